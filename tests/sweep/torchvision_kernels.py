"""Imported before timm, which imports torchvision: where its kernels are another build's, it fails to import.

A package index has torchvision built for torch with CUDA. With torch for the CPU its kernels do not load, and it stops
at the first that it describes. No optimizer needs one.
"""

import torch

LIBRARIES = []
try:
    import torchvision  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
except RuntimeError:
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    library.define("qnms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    LIBRARIES.append(library)  # what it defines lives as long as it does
