"""Digests of the weights: two recordings show by them whether their loops have trained the same model."""

import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from instep._autograd.watch import plain_type
from instep.sources.fsdp.wrappers import fsdp1_in


class Weights:
    """This rank's part of the parameters of ``optimizers``, in the order of their groups."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._digests: list[str] = []

    def look(self) -> None:
        """Take the digest of the weights as they are now."""
        self._digests.append(self._digest())

    @property
    def digests(self) -> Sequence[str]:
        """One of each look; none if one of the looks could not tell."""
        return self._digests if all(self._digests) else ()

    def _digest(self) -> str:
        """SHA-256. Empty for FSDP1, whose parameters are views that it moves about, and for tensors of an unknown
        kind."""
        if fsdp1_in(self._model):
            return ""
        found = hashlib.sha256()
        for parameter in (
            p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]
        ):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # a DTensor
            known = plain_type(local) in (nn.Parameter, torch.Tensor)
            if not known or local.layout is not torch.strided or local.is_meta:
                return ""
            found.update(f"{tuple(local.shape)} {local.dtype}".encode())
            # Of a copy: once NumPy has had a parameter's own memory, nobody can tell any more whether others have it.
            found.update(local.detach().clone().to("cpu").flatten().view(torch.uint8).numpy())
        return found.hexdigest()
