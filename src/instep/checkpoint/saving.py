"""``save``: all of a training run's state into one directory, at once or not at all."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep._arguments import path_of, require_flag
from instep.checkpoint import manifest as manifests
from instep.checkpoint.contents import LocalState, TrainingState
from instep.checkpoint.files import (
    DIGEST,
    DTYPES,
    MANIFEST,
    FileRecord,
    begin,
    digest_line,
    finish,
    places,
    remove_older,
    require_as_recorded,
    require_directory,
    write,
    write_tensors,
)
from instep.checkpoint.manifest import DrawsRecord, GroupRecord, Manifest, OptimizerRecord, TensorRecord, file_of
from instep.checkpoint.ranks import Collective
from instep.checkpoint.tiles import Box, cover_once
from instep.checkpoint.values import Json
from instep.errors import CheckpointError, DamagedCheckpointError

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_LARGEST_STEP = 10**18


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int = 2,
    allow_nonfinite: bool = False,
) -> Path:
    """Write a checkpoint of ``model`` and ``optimizer`` into the directory ``path``, and return when it is on the disk.

    It is there as a whole or not at all: it is written under another name, flushed, and renamed. Whatever stops it,
    the last one stays the newest. Each rank writes what it alone has, and rank 0 what all have. All ranks must call
    this, between steps, and see the same file system.

    Args:
        path: holds the checkpoints, ``step-000000000007`` and so on; made if it is not there.
        model: attached or not; a ``DistributedDataParallel``, or what ``fully_shard`` or tensor parallelism was
            applied to. Parameters and buffers are saved under the names that they have without any wrapper.
        optimizer: one, or several, of parameters of ``model``: state and ``param_groups``, by the names of the
            parameters.
        step: how many steps have been taken. Of an attached model this is known: ``step_count``, unless told.
        extra: this rank's own: scheduler, scaler, random state, data position. Nested dicts, lists and tuples of None,
            bool, int, float, str, bytes and tensors; tensors come back in host memory.
        keep: how many checkpoints are left in ``path``, this one among them. Older ones go when this one stands.
        allow_nonfinite: save parameters and optimizer state that are NaN or infinite, which is refused otherwise.

    Returns:
        The directory of the checkpoint.

    Raises:
        UncommittedStepError, TornStepError: of the attached model's last step some was applied, and not all.
        CheckpointError: something that cannot be saved, named; ranks that differ; a file that could not be written, on
            any rank; a later checkpoint in ``path``. Nothing was changed.
    """
    ranks = Collective()
    directory = path_of(path, CheckpointError)
    require_flag("allow_nonfinite", allow_nonfinite, CheckpointError)
    contents: LocalState | None = None

    def collect() -> bytes:
        nonlocal contents
        _refuse_keep(keep)
        require_directory(directory)
        training = TrainingState(model, optimizer)
        for attachment in training.attachments:
            attachment.require_committed()
        contents = LocalState(training, _step_of(training, step), ranks.rank, extra)
        return contents.to_bytes()

    with torch.no_grad():
        parts = [json.loads(part) for part in ranks.attempt("the checkpoint was not saved", collect)]
    assert contents is not None
    saving = _Saving(directory, contents, parts, ranks.rank)
    what = f"the checkpoint of step {saving.number} was not saved"
    try:
        name = ranks.attempt(what, saving.start)[0].decode()
        written = ranks.attempt(what, partial(saving.write, name, allow_nonfinite))
        final = directory / ranks.attempt(what, partial(saving.commit, written))[0].decode()
    except BaseException:
        saving.discard()
        raise
    if ranks.rank == 0:
        remove_older(directory, saving.number, keep)
    return final


class _Saving:
    """This rank's work on one checkpoint: each method is a round, after which ranks wait for one another.

    Args:
        parts: by rank, what it has.
    """

    def __init__(self, directory: Path, contents: LocalState, parts: Sequence[Json], rank: int) -> None:
        self._directory = directory
        self._contents = contents
        self._parts = parts
        self._rank = rank
        self.number = int(contents.common["step"])
        self._tensors, self._mine = _divided(parts, rank)
        self._unfinished: Path | None = None

    def start(self) -> bytes:
        """Rank 0 makes the directory to write into. Returns its name."""
        if self._rank > 0:
            return b""
        _refuse_later(self._directory, self.number)
        self._unfinished = begin(self._directory, self.number)
        return self._unfinished.name.encode()

    def write(self, name: str, allow_nonfinite: bool) -> bytes:
        """Write the tensors that are this rank's to write. Returns the record of its file; nothing if it has none."""
        tensors = self._contents.tensors
        if not allow_nonfinite:
            _refuse_nonfinite((key, tensors[key].local) for key in self._mine if tensors[key].finite)
        named = [(key, tensors[key].local) for key in self._mine if tensors[key].box.numel]
        if not named:
            return b""
        if not (self._directory / name).is_dir():
            raise CheckpointError(
                f"rank 0 has made {str(self._directory / name)!r}, and this rank does not see it: path must be on a "
                "file system that all ranks share"
            )
        return json.dumps(asdict(write_tensors(self._directory / name / file_of(self._rank), named))).encode()

    def commit(self, written: Sequence[bytes]) -> bytes:
        """Rank 0 records the files of all ranks, and gives the directory its name. Returns that."""
        if self._rank > 0:
            return b""
        assert self._unfinished is not None
        files = {file_of(rank): FileRecord(**json.loads(one)) for rank, one in enumerate(written) if one}
        text = _manifest(self._parts, self._tensors, files).to_bytes()
        write(self._unfinished / MANIFEST, [text])
        write(self._unfinished / DIGEST, [digest_line(manifests.digest_of(text))])
        return finish(self._unfinished, self.number).name.encode()

    def discard(self) -> None:
        """Remove what this rank has begun."""
        if self._unfinished is not None:
            shutil.rmtree(self._unfinished, ignore_errors=True)


def _refuse_keep(keep: Any) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise CheckpointError(f"keep must be a number of checkpoints, at least 1, not {keep!r}")


def _step_of(training: TrainingState, step: int | None) -> int:
    if step is None:
        counts = {attachment.step_count for attachment in training.attachments}
        if len(counts) != 1:
            found = "is not attached" if not counts else f"has attachments of {sorted(counts)} steps"
            raise CheckpointError(f"the model {found}: give step=, the number of steps that have been taken")
        (step,) = counts
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < _LARGEST_STEP:
        raise CheckpointError(f"step must be the number of steps that have been taken, not {step!r}")
    return step


def _divided(parts: Sequence[Json], rank: int) -> tuple[dict[str, TensorRecord], list[str]]:
    """Who writes what: of ranks that have the same the first. All tensors, and the keys of those that are ``rank``'s
    to write. Raises the same on all ranks."""
    for other, part in enumerate(parts):
        if part["common"] != parts[0]["common"]:
            difference = _difference(parts[0]["common"], part["common"], "")
            raise CheckpointError(f"ranks 0 and {other} do not save the same: {difference}. All ranks must call save")
    first: dict[str, tuple[str, list[int]]] = {}
    chunks: dict[str, dict[tuple[int, ...], tuple[str, Box]]] = {}
    mine = []
    for other, part in enumerate(parts):
        for key, (dtype, shape, offset, size) in part["tensors"].items():
            if first.setdefault(key, (dtype, shape)) != (dtype, shape):
                raise CheckpointError(f"{key!r} is {shape} {dtype} on rank {other} and {first[key]} on another")
            box = Box(tuple(offset), tuple(size))
            known = chunks.setdefault(key, {})
            if box.offset not in known and box.numel:
                known[box.offset] = file_of(other), box
                if other == rank:
                    mine.append(key)
    tensors = {}
    for key, (dtype, shape) in first.items():
        tensors[key] = TensorRecord(_DTYPES[dtype], tuple(shape), tuple(chunks[key].values()))
        if not cover_once([box for _, box in tensors[key].chunks], shape):
            raise CheckpointError(
                f"the parts of {key!r} on all ranks do not make up all of it, once: it is spread in a way that "
                "instep.save does not know"
            )
    return tensors, mine


def _difference(a: Json, b: Json, path: str) -> str:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next(_difference(a[k], b[k], f"{path}[{k!r}]") for k in a if a[k] != b[k])
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(_difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return f"{path.removeprefix('[').replace(']', '', 1)} is {str(a)[:200]} on the one and {str(b)[:200]} on the other"


def _manifest(parts: Sequence[Json], tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord]) -> Manifest:
    common = parts[0]["common"]
    optimizers = []
    for number, one in enumerate(common["optimizers"]):
        state: dict[str, Json] = {}
        for part in parts:
            for name, entry in part["state"][number].items():
                state.setdefault(name, entry)
        groups = tuple(GroupRecord(tuple(g["parameters"]), g["values"]) for g in one["groups"])
        optimizers.append(OptimizerRecord(one["class"], groups, state, one["shared"]))
    return Manifest(
        common["step"],
        len(parts),
        common["parameters"],
        common["buffers"],
        tuple(optimizers),
        tuple(common["previous_norms"]),
        tuple(None if one is None else DrawsRecord(*one) for one in common["draws"]),
        tuple(part["extra"] for part in parts),
        tensors,
        files,
    )


def _refuse_nonfinite(tensors: Any) -> None:
    for key, local in tensors:
        if (local.is_floating_point() or local.is_complex()) and not bool(torch.isfinite(local).all()):
            raise CheckpointError(
                f"{key!r} is not finite: a checkpoint of it would take the place of a good one. Go back to the last "
                "checkpoint, or save with allow_nonfinite=True"
            )


def _refuse_later(directory: Path, step: int) -> None:
    """A later checkpoint is what the next ``load`` would take. One that is damaged is not: training has gone back."""
    if not directory.exists():
        return
    for place in places(directory):
        if place.step <= step:
            return
        try:
            for name, record in manifests.read(place.path).files.items():
                require_as_recorded(place.path / name, record, digest=True)
        except DamagedCheckpointError:
            continue
        raise CheckpointError(
            f"{place.path} is later than step {step}, and would be loaded in place of it. Load it and go on from "
            "there, save to another directory, or remove it"
        )
