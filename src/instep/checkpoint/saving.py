"""``save``: all of a training run's state into one directory, at once or not at all.

Each rank collects what it has (``LocalState``), and tells the others. All ranks then know who writes which tensor
(``_share_out``), and go through three rounds together (``_Saving``): rank 0 makes a directory that nobody reads, every
rank writes its file there, and rank 0 writes the manifest and renames the directory. A rank that fails in a round fails
on all ranks.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep._arguments import path_of, require_flag
from instep._optim.dtensor import is_sharded
from instep._optim.kinds import beside_parameters
from instep._optim.values import bytes_of
from instep.attachment import Attachment
from instep.checkpoint import manifest as manifests
from instep.checkpoint.boxes import Box, box_of, cover_once, local_of, without_partials
from instep.checkpoint.files import (
    DIGEST,
    DTYPES,
    MANIFEST,
    FileRecord,
    checkpoints_in,
    digest_line,
    make_unfinished,
    publish,
    remove_older,
    require_as_recorded,
    require_directory,
    write,
    write_tensors,
)
from instep.checkpoint.manifest import (
    DTYPE_OF_NAME,
    DrawsRecord,
    GroupRecord,
    Manifest,
    ModelRecord,
    OptimizerRecord,
    TensorRecord,
    dtype_name,
    file_of,
    key_prefix,
)
from instep.checkpoint.ranks import Collective
from instep.checkpoint.training_state import NOT_IN_GROUP, TrainingState, class_of
from instep.checkpoint.values import Json, encode, is_finite
from instep.errors import CheckpointError, DamagedCheckpointError
from instep.naming import Named

_LARGEST_STEP = 10**18


def save(
    path: str | PathLike[str],
    model: nn.Module | Sequence[nn.Module],
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
            applied to. Parameters and buffers are saved under the names that they have without any wrapper. Of an
            attached pipeline what ``attach`` was given, the module of this rank's stage or a list of those of all its
            stages: the checkpoint has all ranks' stages. Of another list of models each is saved by its number.
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

    Since 0.1.0.

    Example:
        ```python
        for step in range(1, steps + 1):
            train(step)  # forward, backward, optimizer.step(), zero_grad()
            if step % 2 == 0:
                instep.save("run", model, optimizer, step=step, extra={"scheduler": scheduler.state_dict()})
        ```
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

    # What one rank refuses is refused on all of them, before anything is written.
    with torch.no_grad():
        parts = [json.loads(part) for part in ranks.attempt("the checkpoint was not saved", collect)]
    assert contents is not None
    saving = _Saving(directory, contents, parts, ranks.rank)
    what = f"the checkpoint of step {saving.number} was not saved"
    try:
        name = ranks.attempt(what, saving.start)[0].decode()
        written = ranks.attempt(what, partial(saving.write, name, allow_nonfinite))
        final = directory / ranks.attempt(what, partial(saving.commit, written))[0].decode()
    except BaseException:  # Ctrl-C, too
        saving.discard()
        raise
    # Only now: until the new one stands, nothing of the old ones is touched.
    if ranks.rank == 0:
        remove_older(directory, saving.number, keep)
    return final


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


_SAMPLED = 64


def _sample_of(tensor: torch.Tensor) -> str:
    """A digest of so many elements from all over the tensor, which has its own memory."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].cpu()
    return hashlib.sha256(bytes_of(some).numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """This rank's part of a tensor.

    Attributes:
        shape: of the whole tensor.
        box: where the part is in the whole.
        finite: whether NaN and infinity are refused.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    finite: bool


class LocalState:
    """What this rank has of a checkpoint: values encoded for the manifest, and the tensors that they refer to by key.

    Attributes:
        common: the part of the manifest that must be the same on all ranks, or on all that have the same stages.
        state: for each optimizer, the encoded state of its parameters by name. Ranks may have different ones.
        extra: the encoded ``extra`` of this rank.
        tensors: this rank's tensors, by the keys that they have in the manifest.
        samples: by the keys of parameters, a digest of a few elements: other ranks' must be the same.
    """

    def __init__(self, training: TrainingState, step: int, rank: int, extra: Any) -> None:
        self.tensors: dict[str, LocalTensor] = {}
        self.samples: dict[str, str] = {}
        self._prefix = key_prefix(training.stages)
        self.common: dict[str, Json] = {
            "step": step,
            "stages": training.stages,
            "stage_count": training.stage_count,
            "parameters": self._put_named("parameter", training.parameters, finite=True),
            "buffers": self._put_named("buffer", training.buffers, finite=False),
            "optimizers": [self._common(n, *one, training) for n, one in enumerate(training.labelled())],
            "previous_norms": [self._previous_norm(n, one) for n, one in enumerate(training.attachments)],
            "draws": [one.draws for one in training.attachments],
        }
        self.state = [self._state(n, *one, training) for n, one in enumerate(training.labelled())]

        def put_extra(path: str, tensor: torch.Tensor) -> Mapping[str, Json]:
            if is_sharded(tensor):
                raise CheckpointError(f"extra{path} is a DTensor: give its full_tensor(), or its to_local()")
            return {"tensor": self._put_as(f"extra/{rank}{path}", f"extra{path}", tensor, finite=False)}

        self.extra = encode(extra, "extra", put_extra)

    def to_bytes(self) -> bytes:
        """What the other ranks must know: all but the elements of the tensors."""
        tensors = {
            key: [dtype_name(one.local.dtype), one.shape, one.box.offset, one.box.shape]
            for key, one in self.tensors.items()
        }
        told = {"common": self.common, "state": self.state, "extra": self.extra, "tensors": tensors}
        told["samples"] = self.samples
        return json.dumps(told, allow_nan=False).encode("ascii")

    def _put(self, key: str, where: str, tensor: torch.Tensor, *, finite: bool) -> str:
        """Take in a tensor of the model or of an optimizer, of which other ranks of a pipeline may have another."""
        return self._put_as(self._prefix + key, where, tensor, finite=finite)

    def _put_as(self, key: str, where: str, tensor: torch.Tensor, *, finite: bool) -> str:
        """Take in ``tensor`` under ``key``, which is returned; a message calls the tensor ``where``."""
        # A collective, for a tensor of which ranks have summands: all of them come here with the same tensors.
        tensor = without_partials(tensor)
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise CheckpointError(f"{where} is a {tensor.layout} tensor of {tensor.dtype}, which cannot be saved")
        local = local_of(tensor)
        if local.is_meta or type(local) not in (torch.Tensor, nn.Parameter):
            raise CheckpointError(
                f"{where} is a {'meta tensor' if local.is_meta else type(local).__name__}, which cannot be saved: only "
                "plain tensors and DTensors"
            )
        self.tensors[key] = LocalTensor(local, tuple(tensor.shape), box_of(tensor), finite)
        return key

    def _put_named(self, kind: str, named: Sequence[Named], *, finite: bool) -> dict[str, tuple[str, ...]]:
        """Take in the model's parameters or buffers. Returns all names of each, by its own."""
        for one in named:
            key = self._put(f"model/{one.name}", f"{kind} {one.name!r}", one.tensor, finite=finite)
            # Not of buffers: DDP's differ from rank to rank, where nobody synchronizes batch normalization.
            if kind == "parameter":
                self.samples[key] = _sample_of(self.tensors[key].local)
        return {one.name: one.names for one in named}

    def _common(self, number: int, which: str, optimizer: Optimizer, training: TrainingState) -> Json:
        """The part of an optimizer that is the same on all ranks: its groups, and state that belongs to no
        parameter."""
        if has_ids(optimizer.state, (p for group in optimizer.param_groups for p in group["params"])):
            raise CheckpointError(
                f"{which} keeps the state of a parameter under its id(), which is another one in the process that "
                "loads it. Keep it under the parameter, as torch's own optimizers do: state[p] = {...}"
            )
        groups = []
        for g, group in enumerate(optimizer.param_groups):
            where = f"{which}.param_groups[{g}]"

            # Defaults, here and below: a function made in a loop would see the names of the loop's last round.
            def put(path: str, tensor: torch.Tensor, g: int = g, where: str = where) -> Mapping[str, Json]:
                return {"tensor": self._put(f"optimizer/{number}/groups/{g}{path}", where + path, tensor, finite=False)}

            values = {k: encode(v, where, put, f"[{k!r}]") for k, v in group.items() if k not in NOT_IN_GROUP}
            groups.append({"parameters": [training.name_of[id(p)] for p in group["params"]], "values": values})
        shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}

        def put_shared(path: str, tensor: torch.Tensor) -> Mapping[str, Json]:
            where = f"{which}.state{path}"
            return {"tensor": self._put(f"optimizer/{number}/shared{path}", where, tensor, finite=True)}

        encoded = encode(shared, f"{which}.state", put_shared)
        return {"class": class_of(optimizer), "groups": groups, "shared": encoded}

    def _state(self, number: int, which: str, optimizer: Optimizer, training: TrainingState) -> dict[str, Json]:
        """The state of an optimizer's parameters, by their names."""
        found: dict[str, Json] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = training.name_of[id(parameter)]
                where = f"{which}.state of {name!r}: "

                def put(path: str, tensor: Any, p: Any = parameter, name: str = name, where: str = where) -> Json:
                    key = self._put(f"optimizer/{number}/state/{name}{path}", where + path, tensor, finite=True)
                    # What ``load`` cannot know where the optimizer has no such tensor yet: that it is not on the
                    # parameter's device, and that it is whole on each rank beside a sharded parameter.
                    leaf: dict[str, Json] = {"tensor": key}
                    if tensor.device.type != p.device.type and not training.is_offloaded(p, tensor.shape):
                        leaf["elsewhere"] = True
                    if is_sharded(p) and not is_sharded(tensor):
                        leaf["plain"] = True
                    return leaf

                entry = optimizer.state.get(parameter, {})
                for key in entry:
                    if not isinstance(key, str):
                        raise CheckpointError(f"{where}the key {key!r} is no string, and cannot be saved")
                if entry:
                    found[name] = {key: encode(value, where, put, f"[{key!r}]") for key, value in entry.items()}
        return found

    def _previous_norm(self, number: int, attachment: Attachment) -> Json:
        def put(path: str, tensor: torch.Tensor) -> Mapping[str, Json]:
            return {"tensor": self._put(f"previous_norms/{number}", "the previous norm", tensor, finite=False)}

        return encode(attachment.previous_norm, "the previous norm", put)


class _Saving:
    """This rank's work on one checkpoint: each method is a round, after which ranks wait for one another.

    Args:
        parts: by rank, what ``LocalState.to_bytes`` told of it.

    Attributes:
        number: of the step.
    """

    def __init__(self, directory: Path, contents: LocalState, parts: Sequence[Json], rank: int) -> None:
        self._directory = directory
        self._contents = contents
        self._parts = parts
        self._rank = rank
        self.number = int(contents.common["step"])
        self._tensors, self._mine = _share_out(parts, rank)
        self._unfinished: Path | None = None

    def start(self) -> bytes:
        """Rank 0 makes the directory to write into. Returns its name."""
        if self._rank > 0:
            return b""
        _refuse_later(self._directory, self.number)
        self._unfinished = make_unfinished(self._directory, self.number)
        return self._unfinished.name.encode()

    def write(self, name: str, allow_nonfinite: bool) -> bytes:
        """Write the tensors that are this rank's to write. Returns the record of its file; nothing if it has none."""
        tensors = self._contents.tensors
        if not allow_nonfinite:
            # Of a tensor on several ranks only the rank that writes it looks: the others have the same elements.
            _refuse_nonfinite((key, tensors[key].local) for key in self._mine if tensors[key].finite)
        # A tensor without elements is in the manifest alone.
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
        """Rank 0 records the files of all ranks, and gives the directory its final name. Returns that name."""
        if self._rank > 0:
            return b""
        assert self._unfinished is not None
        files = {file_of(rank): FileRecord(**json.loads(one)) for rank, one in enumerate(written) if one}
        text = _manifest_of(self._parts, self._tensors, files).to_bytes()
        write(self._unfinished / MANIFEST, [text])
        write(self._unfinished / DIGEST, [digest_line(manifests.digest_of(text))])
        return publish(self._unfinished, self.number).name.encode()

    def discard(self) -> None:
        """Remove the unfinished directory, which rank 0 alone has made."""
        if self._unfinished is not None:
            shutil.rmtree(self._unfinished, ignore_errors=True)


def _refuse_later(directory: Path, step: int) -> None:
    """Raise if ``directory`` has a later checkpoint, which the next ``load`` would take. A damaged one does not count:
    ``load`` has passed it over, and training has gone back."""
    if not directory.exists():
        return
    for found in checkpoints_in(directory):
        if found.step <= step:
            return
        try:
            for name, record in manifests.read(found.path).files.items():
                require_as_recorded(found.path / name, record, digest=True)
        except DamagedCheckpointError:
            continue
        raise CheckpointError(
            f"{found.path} is later than step {step}, and would be loaded in place of it. Load it and go on from "
            "there, save to another directory, or remove it"
        )


def _share_out(parts: Sequence[Json], rank: int) -> tuple[dict[str, TensorRecord], list[str]]:
    """Decide which rank writes what: of the ranks that have the same box, the first.

    Every rank decides by itself, from the same ``parts``, and raises the same.

    Returns:
        The records of all tensors, and the keys of those that are ``rank``'s to write.
    """
    _require_same([part["common"] for part in parts])
    first: dict[str, tuple[str, list[int]]] = {}
    chunks: dict[str, dict[tuple[int, ...], tuple[str, Box]]] = {}
    writer: dict[tuple[str, tuple[int, ...]], int] = {}
    mine = []
    for other, part in enumerate(parts):
        for key, (dtype, shape, offset, size) in part["tensors"].items():
            if first.setdefault(key, (dtype, shape)) != (dtype, shape):
                raise CheckpointError(f"{key!r} is {shape} {dtype} on rank {other} and {first[key]} on another")
            box = Box(tuple(offset), tuple(size))
            known = chunks.setdefault(key, {})
            # By the offset alone: boxes that do not make up the tensor are refused below.
            if box.offset not in known and box.numel:
                known[box.offset] = file_of(other), box
                writer[key, box.offset] = other
                if other == rank:
                    mine.append(key)
            elif box.numel:
                _require_equal(key, parts, writer[key, box.offset], other)
    tensors = {}
    for key, (dtype, shape) in first.items():
        tensors[key] = TensorRecord(DTYPE_OF_NAME[dtype], tuple(shape), tuple(chunks[key].values()))
        if not cover_once([box for _, box in tensors[key].chunks], shape):
            raise CheckpointError(
                f"the parts of {key!r} on all ranks do not make up all of it, once: it is spread in a way that "
                "instep.save does not know"
            )
    return tensors, mine


def _require_equal(key: str, parts: Sequence[Json], writer: int, other: int) -> None:
    """Raise if two ranks that should have the same part of a parameter have different values in it: that of ``writer``
    would be saved for both. Looks at a sample of the elements."""
    if parts[writer]["samples"].get(key) != parts[other]["samples"].get(key):
        raise CheckpointError(
            f"ranks {writer} and {other} have different values of {key!r}, and one of them would be lost. If these are "
            "stages of a pipeline, attach them with pipeline= before save; if each rank trains a model of its own, "
            "give each a directory of its own; else broadcast or average the parameters first"
        )


def _require_same(commons: Sequence[Json]) -> None:
    """Raise unless all ranks save the same model, or all stages of one pipeline, and those with the same stages the
    same."""
    first_with: dict[tuple[int, ...], int] = {}
    for rank, common in enumerate(commons):
        first = first_with.setdefault(tuple(common["stages"]), rank)
        for other, keys in ((0, ("step", "stage_count")), (first, common.keys())):
            theirs, mine = ({key: one[key] for key in keys} for one in (commons[other], common))
            if theirs != mine:
                difference = _difference(theirs, mine, "")
                raise CheckpointError(
                    f"ranks {other} and {rank} do not save the same: {difference}. {_way_out(theirs, mine)}"
                )
    places = sorted(place for stages in first_with for place in stages)
    if places != list(range(commons[0]["stage_count"])):
        raise CheckpointError(
            f"the ranks have the stages {places} of a pipeline of {commons[0]['stage_count']}: a checkpoint has each "
            "of them once. All ranks of the pipeline must call save"
        )


def _way_out(a: Json, b: Json) -> str:
    """What the user can do about two ranks that do not save the same."""
    if a["stage_count"] != b["stage_count"]:
        return "Attach on all ranks of the pipeline, with pipeline=, before save"
    if a["step"] != b["step"]:
        return "All ranks must call save after the same step; where a rank has nothing to train, give step= on all"
    return "All ranks must call save"


def _difference(a: Json, b: Json, path: str) -> str:
    """The first place at which two different values differ, in words."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next(_difference(a[k], b[k], f"{path}[{k!r}]") for k in a if a[k] != b[k])
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(_difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return f"{path.removeprefix('[').replace(']', '', 1)} is {str(a)[:200]} on the one and {str(b)[:200]} on the other"


def _refuse_nonfinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for key, local in tensors:
        if not is_finite(local):
            raise CheckpointError(
                f"{key!r} is not finite: a checkpoint of it would take the place of a good one. Go back to the last "
                "checkpoint, or save with allow_nonfinite=True"
            )


def _manifest_of(
    parts: Sequence[Json], tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord]
) -> Manifest:
    having: dict[tuple[int, ...], list[Json]] = {}
    for part in parts:
        having.setdefault(tuple(part["common"]["stages"]), []).append(part)
    return Manifest(
        parts[0]["common"]["step"],
        len(parts),
        tuple(_model_of(stages, same) for stages, same in having.items()),
        tuple(part["extra"] for part in parts),
        tensors,
        files,
    )


def _model_of(stages: tuple[int, ...], parts: Sequence[Json]) -> ModelRecord:
    """Record what the ranks of ``parts`` have all of."""
    common = parts[0]["common"]
    optimizers = []
    for number, one in enumerate(common["optimizers"]):
        state: dict[str, Json] = {}
        # With shard_state a rank has state of its own parameters alone.
        for part in parts:
            for name, entry in part["state"][number].items():
                state.setdefault(name, entry)
        groups = tuple(GroupRecord(tuple(g["parameters"]), g["values"]) for g in one["groups"])
        optimizers.append(OptimizerRecord(one["class"], groups, state, one["shared"]))
    return ModelRecord(
        stages,
        common["parameters"],
        common["buffers"],
        tuple(optimizers),
        tuple(common["previous_norms"]),
        tuple(None if one is None else DrawsRecord(*one) for one in common["draws"]),
    )


def has_ids(state: Mapping[Any, Any], parameters: Iterable[torch.Tensor]) -> bool:
    """Whether what belongs to one of these parameters is under its ``id()``. A look for the parameter itself then finds
    that number, of the same hash, and raises in comparing the two."""
    return not {id(p) for p in parameters}.isdisjoint(beside_parameters(state))
