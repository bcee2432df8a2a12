"""``load``: a checkpoint into a model and its optimizers, once all of it is known to fit.

The checkpoints in the directory are tried from the newest on. Each rank compares the files with their digests, reads
what it needs into new memory, and compares that with the model and the optimizers (``_stage``). The ranks then tell
one another. Only if no rank has found anything wrong, each of them writes (``StagedLoad.write``).
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep._arguments import path_of, require_flag
from instep._torch.watch import nobody_told
from instep.attachment import Attachment
from instep.checkpoint.boxes import box_of, local_of
from instep.checkpoint.files import MANIFEST, checkpoints_in, require_directory
from instep.checkpoint.manifest import DrawsRecord, Manifest, ModelRecord, key_prefix
from instep.checkpoint.optimizers import SHOWN, StagedOptimizer, listed, matched, require_finite, shown
from instep.checkpoint.ranks import Collective
from instep.checkpoint.reader import CheckpointReader
from instep.checkpoint.training_state import TrainingState, listed_places
from instep.checkpoint.values import decode
from instep.errors import CheckpointError, DamagedCheckpointError
from instep.naming import Named

_logger = logging.getLogger("instep")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint that ``load`` has loaded.

    Attributes:
        step: how many steps had been taken.
        extra: what this rank gave to ``save``. Where there are more ranks now than then, new ones get that of rank 0.
        world_size: how many ranks saved it.
        path: its directory.

    Since 0.1.0.

    Example:
        ```python
        instep.save("run", model, optimizer, step=300, extra={"scheduler": scheduler.state_dict()})
        checkpoint = instep.load("run", model, optimizer)
        scheduler.load_state_dict(checkpoint.extra["scheduler"])
        print(checkpoint.step, checkpoint.path)  # 300 run/step-000000000300
        ```
    """

    step: int
    extra: Any
    world_size: int
    path: Path


def load(
    path: str | PathLike[str],
    model: nn.Module | Sequence[nn.Module],
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
        model: built as the one that was saved. Stages of a pipeline are attached, and divided among ranks as they
            were.
        optimizer: as for ``save``.
        allow_nonfinite: take parameters, state and group values that are NaN or infinite, which is refused otherwise.

    Returns:
        What was loaded; ``None`` if there is no checkpoint yet.

    Raises:
        DamagedCheckpointError: there are checkpoints, and none is as it was saved.
        CheckpointError: the checkpoint does not fit. It says where. Nothing was changed.

    Since 0.1.0.

    Example:
        ```python
        checkpoint = instep.load("run", model, optimizer)  # None: nothing is there yet
        for step in range(checkpoint.step if checkpoint else 0, steps):
            train(step)  # forward, backward, optimizer.step(), zero_grad()
        instep.save("run", model, optimizer, step=steps)
        ```
    """
    ranks = Collective()
    directory = path_of(path, CheckpointError)
    require_flag("allow_nonfinite", allow_nonfinite, CheckpointError)
    training: TrainingState | None = None

    def look() -> bytes:
        # Rank 0 alone lists the directory: all ranks must try the same checkpoints.
        nonlocal training
        require_directory(directory)
        training = TrainingState(model, optimizer)
        # An update that is due may fail now, as in the loop. What it would have written is about to be overwritten.
        # Before the exchange: others may wait for this rank's vote on a step, and come to it afterwards.
        for attachment in training.attachments:
            attachment.end_due()
        return json.dumps(_candidates(directory)).encode() if ranks.rank == 0 else b""

    names = json.loads(ranks.attempt(f"nothing was loaded from {directory}", look)[0])
    assert training is not None
    damages = []
    for name in names:
        try:
            staged = _stage_on_all(ranks, directory / name, training, allow_nonfinite)
        except DamagedCheckpointError as error:
            damages.append(error)
            if name != names[-1]:
                _logger.warning("%s. The checkpoint before it is tried", error)
            continue
        # From here on nothing is asked of another rank: every rank has the checkpoint, and writes.
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


def _candidates(directory: Path) -> list[str]:
    """The names of the checkpoints in ``directory``, the newest first; ``"."`` if the directory is one itself."""
    if (directory / MANIFEST).exists():
        return ["."]
    return [found.path.name for found in checkpoints_in(directory)] if directory.exists() else []


def _stage_on_all(ranks: Collective, directory: Path, training: TrainingState, allow_nonfinite: bool) -> "StagedLoad":
    """Stage the checkpoint in ``directory`` on every rank, or raise on every rank. All ranks must call this."""
    staged: list[StagedLoad] = []

    def work() -> bytes:
        reader = CheckpointReader(directory, ranks.rank, ranks.size)
        # The weights of an open step report every use of them: that they are compared here is none of the loop's uses.
        with torch.no_grad(), nobody_told():
            staged.append(_stage(reader, training, ranks.rank, allow_nonfinite=allow_nonfinite))
        return b""

    ranks.attempt(f"{directory} was not loaded", work)
    return staged[0]


def _stage(reader: CheckpointReader, training: TrainingState, rank: int, *, allow_nonfinite: bool) -> "StagedLoad":
    """Read what this rank needs, and compare all of it with ``training``.

    Raises:
        DamagedCheckpointError: a file does not hold what the manifest says.
        CheckpointError: the checkpoint is of another model or optimizer, or is not finite.
    """
    manifest = reader.manifest
    extra = manifest.extra[rank if rank < manifest.world_size else 0]
    staged = StagedLoad(manifest, _model_in(reader, training), training, decode(extra, reader.read_leaf))
    finite = not allow_nonfinite
    model = staged.model
    saved_as = _stage_named(reader, staged, "parameter", training.parameters, model.parameters, finite=finite)
    _stage_named(reader, staged, "buffer", training.buffers, model.buffers, finite=False)
    names = {id(named.tensor): saved_as[named.name] for named in training.parameters}
    attached = [a for one in training.attachments for a in one.parameters]
    shards = {id(a.get()): a.shard for a in attached if a.is_divided}
    for which, optimizer, record in matched(training, names, model.optimizers):
        into = StagedOptimizer(reader, training, staged.copies, which, optimizer, names, shards, allow_nonfinite)
        into.stage(record)
        staged.optimizers.append(into)
    staged.norms = _previous_norms(reader, model, training.attachments)
    return staged


def _model_in(reader: CheckpointReader, training: TrainingState) -> ModelRecord:
    """The model of the checkpoint that this rank has: the only one, or that of the same stages."""
    models = reader.manifest.models
    for found in models:
        # Not of a longer pipeline that begins with the same stages.
        if found.stages == training.stages and sum(len(one.stages) for one in models) == training.stage_count:
            return found
    saved = "; ".join(listed_places(one.stages) for one in models)
    theirs = f"of a pipeline, whose ranks had the stages {saved}" if models[0].stages else "of a whole model"
    mine = "a model that is no attached stage"
    if training.stages:
        mine = f"the stages {listed_places(training.stages)} of {training.stage_count}"
    raise CheckpointError(
        f"the checkpoint {reader.directory} is {theirs}, and this rank has {mine}: attach with pipeline= before load, "
        "and divide the stages as they were"
    )


def _stage_named(
    reader: CheckpointReader,
    staged: "StagedLoad",
    kind: str,
    named: Sequence[Named],
    saved: Mapping[str, Sequence[str]],
    *,
    finite: bool,
) -> dict[str, str]:
    """Stage the model's parameters or buffers. Returns the name under which each of them was saved.

    A tied tensor has several names, and another version of the model may have another one first: any of them will do.

    Args:
        kind: "parameter" or "buffer", for messages.
        finite: whether NaN and infinity are refused.
    """
    saved_as = {alias: name for name, aliases in saved.items() for alias in aliases}
    # The ties are the same in both if each tensor finds one name, and each name one tensor.
    found = {one.name: {saved_as[name] for name in one.names if name in saved_as} for one in named}
    taken = Counter(name for candidates in found.values() for name in candidates)
    missing = [name for name, candidates in found.items() if not candidates]
    unexpected = [name for name in saved if name not in taken]
    tied = [name for name, candidates in found.items() if len(candidates) > 1]
    tied += [name for name, times in taken.items() if times > 1]
    if missing or unexpected or tied:
        raise CheckpointError(
            f"the checkpoint {reader.directory} is of another model: of its {kind}s, {listed(missing)} are not in the "
            f"checkpoint, {listed(unexpected)} are in the checkpoint alone, and {listed(tied)} are tied in one of "
            "the two alone"
        )
    names = {name: candidates.pop() for name, candidates in found.items()}
    prefix = key_prefix(staged.model.stages)
    wrong = []
    for one in named:
        record = reader.manifest.tensors[f"{prefix}model/{names[one.name]}"]
        if (record.shape, record.dtype) != (tuple(one.tensor.shape), one.tensor.dtype):
            wrong.append(
                f"{one.name!r} is {shown(record)} in the checkpoint and {tuple(one.tensor.shape)} {one.tensor.dtype} "
                "in the model"
            )
    if wrong:
        raise CheckpointError(f"the checkpoint {reader.directory} does not fit: {'; '.join(wrong[:SHOWN])}")
    # All shapes are compared before the first tensor is read: a wrong model is told at once.
    for one in named:
        values = reader.read(f"{prefix}model/{names[one.name]}", box_of(one.tensor))
        if finite:
            require_finite(values, f"{kind} {one.name!r}")
        staged.copies.append((local_of(one.tensor), values))
    return names


def _previous_norms(
    reader: CheckpointReader, model: ModelRecord, attachments: Sequence[Attachment]
) -> list[torch.Tensor | None]:
    """By attachment, the norm that it clips the next step by. ``None`` if it was saved without, or if the checkpoint
    has the norms of other attachments."""
    saved = [decode(one, reader.read_leaf) for one in model.previous_norms]
    if not all(one is None or isinstance(one, torch.Tensor) for one in saved):
        raise DamagedCheckpointError("a previous norm is none")
    return saved if len(saved) == len(attachments) else [None] * len(attachments)


class StagedLoad:
    """All that a load will write. ``write`` reads no file, and allocates nothing to speak of, so that little is left
    that could fail between the first weight and the last."""

    def __init__(self, manifest: Manifest, model: ModelRecord, training: TrainingState, extra: Any) -> None:
        self.manifest = manifest
        self.model = model
        self.extra = extra
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.optimizers: list[StagedOptimizer] = []
        self.norms: list[torch.Tensor | None] = []
        self._training = training

    @torch.no_grad()
    def write(self) -> None:
        """Write all of it, and clear the gradients."""
        # First: a step that is open or torn is given up before its weights and state are overwritten.
        for attachment, norm, drawn in zip(self._training.attachments, self.norms, self._next_draws(), strict=True):
            attachment.restore(self.manifest.step, norm, drawn)
        for into, values in self.copies:
            into.copy_(values)
        for optimizer in self.optimizers:
            optimizer.write()
        for named in self._training.parameters:
            named.tensor.grad = None

    def _next_draws(self) -> list[int | None]:
        """By attachment with ``random="keyed"``, the number of its next step; ``None``: the number that it has."""
        attachments, saved = self._training.attachments, self.model.draws
        # Of another number of attachments, nothing says which record is whose.
        if len(saved) != len(attachments):
            saved = (None,) * len(attachments)
        for attachment, record in zip(attachments, saved, strict=True):
            if (said := _draws_differ(attachment.draws, record)) is not None:
                _logger.warning("the checkpoint of step %d %s", self.manifest.step, said)
        return [None if record is None else record.step for record in saved]


def _draws_differ(mine: tuple[int, int] | None, saved: DrawsRecord | None) -> str | None:
    """The reason, in words, why random numbers do not go on as they would have; ``None`` if they do.

    Args:
        mine: the attachment's seed, and the number of its next step.
    """
    if mine is None:
        if saved is None:
            return None
        return (
            f"was saved with random='keyed', seed={saved.seed}, and this model is attached without: it draws otherwise"
        )
    if saved is None:
        return f"was saved without random='keyed': the keys go on from step {mine[1]}"
    if saved.seed != mine[0]:
        return f"was saved with seed={saved.seed}, and this model is attached with seed={mine[0]}: it draws otherwise"
    return None
