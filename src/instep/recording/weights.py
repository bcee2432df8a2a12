"""The digest of the weights: two recordings show by it whether their loops have trained the same model."""

import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from instep.sources.fsdp.wrappers import fsdp1_in


def digest(model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """SHA-256 of this rank's part of the parameters of ``optimizers``, in the order of their groups. Empty for FSDP1,
    whose parameters are views that it moves about."""
    if fsdp1_in(model):
        return ""
    found = hashlib.sha256()
    for parameter in (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # a DTensor
        found.update(f"{tuple(local.shape)} {local.dtype}".encode())
        # Of a copy: once NumPy has had a parameter's own memory, nobody can tell any more whether others have it, too.
        found.update(local.detach().clone().to("cpu").flatten().view(torch.uint8).numpy())
    return found.hexdigest()
