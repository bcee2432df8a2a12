"""Checkpoints by ``torch.distributed.checkpoint``, as docs/checkpoints.md has them."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from instep import Attachment

Optimizers = Optimizer | Sequence[Optimizer]


class Training:
    """A model with its optimizers, for DCP: an optimizer that is given as it is loses its state."""

    def __init__(self, model: nn.Module, optimizers: Optimizers) -> None:
        # Several optimizers have other options each, which DCP keeps apart by parameter alone.
        several = not isinstance(optimizers, Optimizer)
        self._options = StateDictOptions(flatten_optimizer_state_dict=several)
        self._model = model
        self._optimizers: Any = optimizers

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizers, options=self._options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._options,
        )


def parts(model: nn.Module, optimizers: Optimizers, overlap: Attachment | None) -> dict[str, Any]:
    return {"training": Training(model, optimizers)} | ({} if overlap is None else {"overlap": overlap})


def save(path: Path | str, model: nn.Module, optimizers: Optimizers, overlap: Attachment | None) -> None:
    """On all ranks, into a folder of its own."""
    if overlap is not None:
        overlap.require_committed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no ranks, and of torch's own deprecated names
        dcp.save(parts(model, optimizers, overlap), checkpoint_id=path)


def load(path: Path | str, model: nn.Module, optimizers: Optimizers, overlap: Attachment | None) -> None:
    """On all ranks. A step that is open or torn is given up."""
    if overlap is not None:
        overlap.accept_torn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(parts(model, optimizers, overlap), checkpoint_id=path)


def stages_of(overlap: Any) -> nn.Module:
    """This rank's stages of a pipeline, which have their places in it as names."""
    return nn.ModuleDict({str(place): module for place, module in overlap.pipeline.stages.items()})
