"""Parameters by the names the bare model knows them by, whatever it is wrapped in."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from instep.sources.replicate.source import Replicated

_MODULE = (DistributedDataParallel, DataParallel, Replicated)
# What torch.compile, activation checkpointing and FSDP1 call the module that they wrap.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True, slots=True)
class Named:
    """One tensor of a model. A tied one has several names; the first is its own."""

    tensor: torch.Tensor
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]


def parameters_of(model: nn.Module) -> list[Named]:
    """Each parameter once, in the model's order."""
    names: dict[int, Named] = {}
    for prefix, module in modules_of(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                known = names.get(id(parameter))
                names[id(parameter)] = Named(parameter, (*(known.names if known else ()), prefix + name))
    return list(names.values())


def modules_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Each module, with what the names of its parameters begin with."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            hidden = name in _WRAPPED or (name == "module" and isinstance(module, _MODULE))
            yield from modules_of(child, prefix if hidden else f"{prefix}{name}.")
