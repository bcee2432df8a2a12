"""``load``: a checkpoint into a model and its optimizers, once all of it is known to fit."""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep._arguments import path_of, require_flag
from instep._autograd.watch import nobody_told
from instep.checkpoint.contents import TrainingState
from instep.checkpoint.files import MANIFEST, places, require_directory
from instep.checkpoint.ranks import Collective
from instep.checkpoint.reading import CheckpointReader
from instep.checkpoint.staging import StagedLoad, stage
from instep.errors import CheckpointError, DamagedCheckpointError

_logger = logging.getLogger("instep")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What ``load`` found.

    Attributes:
        step: how many steps had been taken.
        extra: what this rank gave to ``save``. Where there are more ranks now than then, new ones get that of rank 0.
        world_size: how many ranks saved it.
        path: its directory.
    """

    step: int
    extra: Any
    world_size: int
    path: Path


def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    allow_nonfinite: bool = False,
) -> Checkpoint | None:
    """Bring ``model`` and ``optimizer`` to where the newest checkpoint in the directory ``path`` was saved.

    Every file is compared with its digest, and names, shapes, dtypes, the optimizer's class, groups and values with
    what is there, before anything is written. Parameters and state find their places by name, so the optimizer may have
    been built in another order, and the model be wrapped in another way or spread over another number of ranks. All
    ranks must call this, and see the same file system.

    A newest checkpoint that is damaged is named in a warning, and the one before it is taken. Gradients are cleared,
    an attached model's step that is open or torn is given up, and its ``step_count`` is that of the checkpoint.

    Args:
        path: what ``save`` was given; or one checkpoint in it, which is then taken or refused.
        model: built as the one that was saved.
        optimizer: as for ``save``.
        allow_nonfinite: take parameters, state and group values that are NaN or infinite, which is refused otherwise.

    Returns:
        What was loaded; ``None`` if there is no checkpoint yet.

    Raises:
        DamagedCheckpointError: there are checkpoints, and none is as it was saved.
        CheckpointError: the checkpoint does not fit. It says where. Nothing was changed.
    """
    ranks = Collective()
    directory = path_of(path, CheckpointError)
    require_flag("allow_nonfinite", allow_nonfinite, CheckpointError)
    training: TrainingState | None = None

    def look() -> bytes:
        nonlocal training
        require_directory(directory)
        training = TrainingState(model, optimizer)
        return json.dumps(_names(directory)).encode() if ranks.rank == 0 else b""

    names = json.loads(ranks.attempt(f"nothing was loaded from {directory}", look)[0])
    assert training is not None
    for attachment in training.attachments:
        # What stopped an update that is due stops nobody who is about to overwrite it.
        with suppress(Exception):
            attachment.synchronize()
    damages = []
    for name in names:
        try:
            staged = _staged(ranks, directory / name, training, allow_nonfinite)
        except DamagedCheckpointError as error:
            damages.append(error)
            if name != names[-1]:
                _logger.warning("%s. The checkpoint before it is tried", error)
            continue
        staged.write()
        manifest = staged.manifest
        return Checkpoint(manifest.step, staged.extra, manifest.world_size, directory / name)
    if not damages:
        return None
    if len(damages) == 1:
        raise damages[0]
    raise DamagedCheckpointError(
        f"none of the {len(damages)} checkpoints in {directory} can be loaded: " + "; ".join(map(str, damages))
    )


def _names(directory: Path) -> list[str]:
    """The checkpoints in question, the newest first; ``"."`` for the directory itself."""
    if (directory / MANIFEST).exists():
        return ["."]
    return [place.path.name for place in places(directory)] if directory.exists() else []


def _staged(ranks: Collective, directory: Path, training: TrainingState, allow_nonfinite: bool) -> StagedLoad:
    staged: list[StagedLoad] = []

    def work() -> bytes:
        reader = CheckpointReader(directory, ranks.rank, ranks.size)
        # The weights of an open step tell of everybody who uses them.
        with torch.no_grad(), nobody_told():
            staged.append(stage(reader, training, ranks.rank, allow_nonfinite=allow_nonfinite))
        return b""

    ranks.attempt(f"{directory} was not loaded", work)
    return staged[0]
