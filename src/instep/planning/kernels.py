"""What a kernel takes while it runs: bytes that no tensor of the program shows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from instep.planning.live_bytes import LiveBytes

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def inside(func: Any, args: Sequence[Any], result: Any) -> int:
    """The most bytes beside arguments and results.

    A convolution on a CPU (oneDNN's, of more than one element) copies what it reads into a layout of its own, and what
    it has made out of it, as torch's allocator shows. Others are taken as if they needed nothing.
    """
    if func is _FORWARD and _copies(args[1]):
        return max(_bytes(args[0]) + _bytes(args[1]), _bytes(result))
    if func is _BACKWARD and _copies(args[2]):
        return max(_bytes(args[0]) + _bytes(args[1]), _bytes(args[2]))
    return 0


class LiveInside(LiveBytes):
    """Counts what kernels take, too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.now + inside(func, args, result))
        return result


def _copies(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and any(size > 1 for size in weight.shape[2:])


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
