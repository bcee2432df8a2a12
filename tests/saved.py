"""Checkpoints by ``torch.distributed.checkpoint``, as docs/checkpoints.md has them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from instep import Attachment


class Training(Stateful):
    """A model with its optimizers, for DCP."""

    def __init__(self, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> None:
        self.model = model
        self.optimizers: Any = optimizers

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizers)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def save(
    path: Path | str, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], overlap: Attachment | None
) -> None:
    """On all ranks."""
    state: dict[str, Any] = {"training": Training(model, optimizers)}
    if overlap is not None:
        overlap.require_committed()
        state["overlap"] = overlap
    dcp.save(state, checkpoint_id=path, no_dist=not _is_distributed())


def load(
    path: Path | str, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], overlap: Attachment | None
) -> None:
    """On all ranks."""
    state: dict[str, Any] = {"training": Training(model, optimizers)}
    if overlap is not None:
        state["overlap"] = overlap
    dcp.load(state, checkpoint_id=path, no_dist=not _is_distributed())


def _is_distributed() -> bool:
    return dcp.state_dict_saver.dist.is_available() and dcp.state_dict_saver.dist.is_initialized()
