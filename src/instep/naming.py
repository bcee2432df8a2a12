"""Parameters by the names the bare model knows them by, whatever it is wrapped in."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from instep.sources.replicate.source import Replicated

_MODULE = (DistributedDataParallel, DataParallel, Replicated)
# What torch.compile, activation checkpointing and FSDP1 call the module that they wrap.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def parameters_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter once, in the model's order. A tied one has several names; the first is its own."""
    seen: set[int] = set()
    for prefix, module in modules_of(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + name, parameter


def modules_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Each module, with what the names of its parameters begin with."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            hidden = name in _WRAPPED or (name == "module" and isinstance(module, _MODULE))
            yield from modules_of(child, prefix if hidden else f"{prefix}{name}.")
