"""``load``: a checkpoint read and compared, and put into a model and its optimizers once all of it is known to fit."""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.optim import Optimizer

from instep._arguments import path_of, require_flag
from instep._optim.dtensor import is_sharded
from instep._optim.kinds import is_in_torch_optim
from instep._torch.watch import nobody_told
from instep.attachment import Attachment
from instep.checkpoint import manifest as manifests
from instep.checkpoint.files import (
    DTYPES,
    MANIFEST,
    places,
    require_as_recorded,
    require_directory,
    step_in_name,
    stored_shape,
)
from instep.checkpoint.manifest import (
    Box,
    DrawsRecord,
    GroupRecord,
    Manifest,
    OptimizerRecord,
    TensorRecord,
    box_of,
    check_values,
    empty_beside,
    local_of,
    whole,
)
from instep.checkpoint.ranks import Collective
from instep.checkpoint.saving import NOT_IN_GROUP, TrainingState, class_of
from instep.checkpoint.values import Json, decode
from instep.errors import CheckpointError, DamagedCheckpointError
from instep.naming import Named

# The tensors of a checkpoint, whole or in part, out of files that have been found to be as they were written.


class CheckpointReader:
    """One checkpoint on the disk.

    Args:
        rank: of ``size`` ranks, which read the files for their digests in turn. All must have a reader.

    Raises:
        DamagedCheckpointError: something of it is not as it was written.
    """

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self.directory = directory
        self.manifest: Manifest = manifests.read(directory)
        named = step_in_name(directory)
        if named is not None and named != self.manifest.step:
            raise DamagedCheckpointError(f"{directory} holds step {self.manifest.step}: it has been renamed")
        for number, (name, record) in enumerate(sorted(self.manifest.files.items())):
            require_as_recorded(directory / name, record, digest=number % size == rank)
        self._taken: set[str] = set()
        self._open: dict[str, Any] = {}

    def record(self, leaf: Mapping[str, Any]) -> tuple[str, TensorRecord]:
        """What a manifest's value says in a tensor's place: its key, and what is known of it."""
        key = leaf["tensor"]
        if not isinstance(key, str) or key not in self.manifest.tensors or key.startswith("model/"):
            raise DamagedCheckpointError(f"a value is the tensor {str(key)[:200]!r}, which is not there")
        # Or else a small file could be made to fill the memory.
        if key in self._taken:
            raise DamagedCheckpointError(f"two values are the same tensor {key[:200]!r}")
        self._taken.add(key)
        return key, self.manifest.tensors[key]

    def read(self, key: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or a part of it, in host memory."""
        record = self.manifest.tensors[key]
        box = whole(record.shape) if box is None else box
        try:
            return self._read(key, record, box)
        except DamagedCheckpointError:
            raise
        except Exception as error:  # whatever safetensors and torch say of a file that somebody made up
            raise DamagedCheckpointError(f"{self.directory}: tensor {key!r} cannot be read: {error}") from error

    def _read(self, key: str, record: TensorRecord, box: Box) -> torch.Tensor:
        found = torch.empty(box.shape, dtype=record.dtype, device="cpu")
        into = torch.view_as_real(found) if record.dtype.is_complex else found
        for file, chunk in record.chunks:
            common = chunk.common(box)
            if common is None:
                continue
            part = self._file(file).get_slice(key)
            if part.get_shape() != stored_shape(chunk.shape, record.dtype) or part.get_dtype() != DTYPES[record.dtype]:
                raise DamagedCheckpointError(
                    f"tensor {key!r} is {part.get_shape()} {part.get_dtype()} in {file}, and not what the manifest says"
                )
            if common == chunk:
                into[common.within(box)] = self._file(file).get_tensor(key)
            else:
                into[common.within(box)] = part[common.within(chunk)]
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.directory / name, framework="pt", device="cpu")
        return self._open[name]


# All of a checkpoint, read, compared with what it is to be written into, and ready to be written.


_logger = logging.getLogger("instep")
_SHOWN = 6


class StagedLoad:
    """What ``write`` will write, with everything it needs: it reads no file, and allocates nothing to speak of."""

    def __init__(self, manifest: Manifest, training: TrainingState, extra: Any) -> None:
        self.manifest = manifest
        self.extra = extra
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.states: list[tuple[Optimizer, dict[torch.Tensor, dict[str, Any]], dict[Any, Any]]] = []
        self.groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.norms: list[torch.Tensor | None] = []
        self.training = training

    @torch.no_grad()
    def write(self) -> None:
        for attachment, norm, drawn in zip(self.training.attachments, self.norms, self._drawn(), strict=True):
            attachment.restore(self.manifest.step, norm, drawn)
        for into, values in self.copies:
            into.copy_(values)
        for optimizer, state, shared in self.states:
            optimizer.state.clear()
            optimizer.state.update(shared)
            optimizer.state.update(state)
        for group, new in self.groups:
            group.update(new)
        for named in self.training.parameters:
            named.tensor.grad = None

    def _drawn(self) -> list[int | None]:
        """By attachment, the number from which its draws go on; ``None``: they go on from where they are."""
        attachments, saved = self.training.attachments, self.manifest.draws
        if len(saved) != len(attachments):
            saved = (None,) * len(attachments)
        for attachment, record in zip(attachments, saved, strict=True):
            if (said := _other_draws(attachment.draws, record)) is not None:
                _logger.warning("the checkpoint of step %d %s", self.manifest.step, said)
        return [None if record is None else record.step for record in saved]


def _other_draws(mine: tuple[int, int] | None, saved: DrawsRecord | None) -> str | None:
    """In words, why random numbers do not go on as they would have; ``None``: they do."""
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


def stage(reader: CheckpointReader, training: TrainingState, rank: int, *, allow_nonfinite: bool) -> StagedLoad:
    """Read what this rank needs, and compare all of it with ``training``.

    Raises:
        DamagedCheckpointError: a file does not hold what the manifest says.
        CheckpointError: it is of another model or optimizer, or not finite.
    """
    manifest = reader.manifest
    extra = manifest.extra[rank if rank < manifest.world_size else 0]
    staged = StagedLoad(manifest, training, decode(extra, lambda leaf: reader.read(reader.record(leaf)[0])))
    finite = not allow_nonfinite
    saved_as = _stage_named(reader, staged, "parameter", training.parameters, manifest.parameters, finite=finite)
    _stage_named(reader, staged, "buffer", training.buffers, manifest.buffers, finite=False)
    names = {id(named.tensor): saved_as[named.name] for named in training.parameters}
    attached = [a for one in training.attachments for a in one.parameters]
    kept = {id(a.get()): a.shard for a in attached if a.is_divided}
    for which, optimizer, record in _matched(training, names, manifest.optimizers):
        _IntoOptimizer(reader, staged, which, optimizer, names, kept, allow_nonfinite).stage(record)
    staged.norms = _norms(reader, training.attachments)
    return staged


def _stage_named(
    reader: CheckpointReader,
    staged: StagedLoad,
    kind: str,
    named: Sequence[Named],
    saved: Mapping[str, Sequence[str]],
    *,
    finite: bool,
) -> dict[str, str]:
    """Stage the model's parameters or buffers. By what name each of them was saved."""
    saved_as = {alias: name for name, aliases in saved.items() for alias in aliases}
    found = {one.name: {saved_as[name] for name in one.names if name in saved_as} for one in named}
    taken = Counter(name for candidates in found.values() for name in candidates)
    missing = [name for name, candidates in found.items() if not candidates]
    unexpected = [name for name in saved if name not in taken]
    tied = [name for name, candidates in found.items() if len(candidates) > 1]
    tied += [name for name, times in taken.items() if times > 1]
    if missing or unexpected or tied:
        raise CheckpointError(
            f"the checkpoint {reader.directory} is of another model: of its {kind}s, {_listed(missing)} are not in the "
            f"checkpoint, {_listed(unexpected)} are in the checkpoint alone, and {_listed(tied)} are tied in one of "
            "the two alone"
        )
    names = {name: candidates.pop() for name, candidates in found.items()}
    wrong = []
    for one in named:
        record = reader.manifest.tensors[f"model/{names[one.name]}"]
        if (record.shape, record.dtype) != (tuple(one.tensor.shape), one.tensor.dtype):
            wrong.append(
                f"{one.name!r} is {_shown(record)} in the checkpoint and {tuple(one.tensor.shape)} {one.tensor.dtype} "
                "in the model"
            )
    if wrong:
        raise CheckpointError(f"the checkpoint {reader.directory} does not fit: {'; '.join(wrong[:_SHOWN])}")
    for one in named:
        values = reader.read(f"model/{names[one.name]}", box_of(one.tensor))
        if finite:
            _require_finite(values, f"{kind} {one.name!r}")
        staged.copies.append((local_of(one.tensor), values))
    return names


def _matched(
    training: TrainingState, names: Mapping[int, str], records: Sequence[OptimizerRecord]
) -> list[tuple[str, Optimizer, OptimizerRecord]]:
    """Each optimizer with the one that was saved of the same parameters."""
    left = list(records)
    found = []
    for which, optimizer in training.labelled():
        mine = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
        same = [r for r in left if {name for group in r.groups for name in group.parameters} == mine]
        of_class = [r for r in same if r.cls == class_of(optimizer)]
        if not of_class:
            if same:
                raise CheckpointError(
                    f"the checkpoint is of {same[0].cls}, and {which} is {class_of(optimizer)}: their state means "
                    "other things"
                )
            theirs = [{name for group in r.groups for name in group.parameters} for r in left]
            closest = min(theirs, key=lambda one: len(one ^ mine), default=set())
            raise CheckpointError(
                f"no optimizer in the checkpoint has the parameters of {which}: {_listed(sorted(mine - closest))} are "
                f"not in that which is closest, and {_listed(sorted(closest - mine))} in that alone"
            )
        left.remove(of_class[0])
        found.append((which, optimizer, of_class[0]))
    if left:
        raise CheckpointError(
            f"the checkpoint has {len(records)} optimizers, and {len(found)} were given: {left[0].cls} is not there"
        )
    return found


class _IntoOptimizer:
    def __init__(
        self,
        reader: CheckpointReader,
        staged: StagedLoad,
        which: str,
        optimizer: Optimizer,
        names: Mapping[int, str],
        kept: Mapping[int, Any],
        allow_nonfinite: bool,
    ) -> None:
        self._reader = reader
        self._staged = staged
        self._which = which
        self._optimizer = optimizer
        self._names = names
        self._kept = kept
        self._allow_nonfinite = allow_nonfinite

    def stage(self, record: OptimizerRecord) -> None:
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for group, saved in self._groups(record.groups):
            values = self._values(group, saved)
            self._staged.groups.append((group, values))
            for parameter in group["params"]:
                entry = record.state.get(self._names[id(parameter)])
                if entry is not None:
                    state[parameter] = self._entry(parameter, entry, {**group, **values})
        shared = decode(record.shared, self._in_host_memory)
        if not isinstance(shared, dict) or any(isinstance(key, torch.Tensor) for key in shared):
            raise DamagedCheckpointError(f"the state of {self._which} is none")
        self._staged.states.append((self._optimizer, state, shared))

    def _groups(self, records: Sequence[GroupRecord]) -> Iterable[tuple[dict[str, Any], GroupRecord]]:
        left = list(records)
        found = []
        for number, group in enumerate(self._optimizer.param_groups):
            mine = {self._names[id(p)] for p in group["params"]}
            same = [record for record in left if set(record.parameters) == mine]
            if not same:
                raise CheckpointError(
                    f"{self._which}.param_groups[{number}] has {_listed(sorted(mine))}, and no group in the checkpoint "
                    "has just these: divide the parameters as they were when it was saved"
                )
            left.remove(same[0])
            found.append((group, same[0]))
        if left:
            raise CheckpointError(
                f"the checkpoint has {len(records)} groups of {self._which}, which has {len(found)}: that of "
                f"{_listed(left[0].parameters)} is not there"
            )
        return found

    def _values(self, group: dict[str, Any], record: GroupRecord) -> dict[str, Any]:
        number = next(n for n, one in enumerate(self._optimizer.param_groups) if one is group)
        where = f"{self._which}.param_groups[{number}]"
        if not record.values.keys().isdisjoint(NOT_IN_GROUP):
            raise DamagedCheckpointError(f"the values of {where} hold its parameters")
        values = {key: decode(value, self._in_host_memory) for key, value in record.values.items()}
        check_values(where, group, values, allow_nonfinite=self._allow_nonfinite)
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                values[key] = value.to(group[key].device)
        absent = [key for key in group if key not in values and key not in NOT_IN_GROUP]
        if absent:  # another version of the optimizer
            _logger.warning("%s%r are not in the checkpoint, and stay as they are", where, absent)
        return values

    def _in_host_memory(self, leaf: Mapping[str, Json]) -> torch.Tensor:
        return self._reader.read(self._reader.record(leaf)[0])

    def _entry(self, parameter: torch.Tensor, record: Mapping[str, Json], group: Mapping[str, Any]) -> dict[str, Any]:
        part = self._kept.get(id(parameter))
        if part is not None and not part.is_owner:
            return {}  # another rank's: that there is state is all that is known here
        existing = {} if part is not None else self._optimizer.state.get(parameter, {})
        entry = {}
        for key, value in record.items():

            def tensor(leaf: Mapping[str, Json], key: str = key) -> torch.Tensor:
                return self._tensor(parameter, key, leaf, existing.get(key), group)

            entry[key] = decode(value, tensor)
        if part is not None:
            part.take(entry)
        return entry

    def _tensor(
        self,
        parameter: torch.Tensor,
        key: str,
        leaf: Mapping[str, Json],
        existing: Any,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        if not leaf.keys() <= {"tensor", "elsewhere", "plain"}:
            raise DamagedCheckpointError(f"the state of {self._which} has a tensor with {sorted(leaf)}")
        name, record = self._reader.record(leaf)
        self._check(parameter, key, record, existing)
        into: torch.Tensor = self._place(parameter, key, record, leaf, existing, group)
        values = self._reader.read(name, box_of(into))
        if not self._allow_nonfinite:
            _require_finite(values, f"{key!r} of {self._names[id(parameter)]!r} in the state of {self._which}")
        if into is existing:
            self._staged.copies.append((local_of(into), values))
        else:
            local_of(into).copy_(values)
        return into

    def _check(self, parameter: torch.Tensor, key: str, record: TensorRecord, existing: Any) -> None:
        """Whether it can be the state of ``parameter``: torch's own optimizers have that in its shape, or that of its
        rows or columns, or single numbers."""
        cls = type(self._optimizer)
        fits = cls is torch.optim.LBFGS or not is_in_torch_optim(cls)
        fits = fits or math.prod(record.shape) <= 1
        if not fits and len(record.shape) == parameter.dim():
            fits = all(size in (1, full) for size, full in zip(record.shape, parameter.shape, strict=True))
        if isinstance(existing, torch.Tensor) and tuple(existing.shape) != record.shape:
            fits = False
        if not fits:
            raise CheckpointError(
                f"{key!r} of {self._names[id(parameter)]!r}, of shape {tuple(parameter.shape)}, in the state of "
                f"{self._which} is {_shown(record)} in the checkpoint, which does not fit"
            )

    def _place(
        self,
        parameter: torch.Tensor,
        key: str,
        record: TensorRecord,
        leaf: Mapping[str, Json],
        existing: Any,
        group: Mapping[str, Any],
    ) -> Any:
        """Where it goes: in the place of what is there already, or into a new tensor."""
        if isinstance(existing, torch.Tensor) and existing.dtype == record.dtype:
            return existing
        like = record.shape == tuple(parameter.shape)
        offloaded = self._staged.training.is_offloaded(parameter, record.shape)
        if is_sharded(parameter) and not leaf.get("plain") and key != "step" and (like or record.shape):
            return empty_beside(parameter, record.shape, record.dtype, in_host_memory=offloaded)
        device = local_of(parameter).device
        # As in torch's own load_state_dict.
        at_host = key == "step" and not (group.get("capturable") or group.get("fused"))
        if at_host or offloaded or leaf.get("elsewhere"):
            device = torch.device("cpu")
        if like and not is_sharded(parameter):
            made = torch.empty_like(parameter, dtype=record.dtype, device=device, requires_grad=False)
        else:
            made = torch.empty(record.shape, dtype=record.dtype, device=device)
        return made.pin_memory() if offloaded else made


def _norms(reader: CheckpointReader, attachments: Sequence[Attachment]) -> list[torch.Tensor | None]:
    """Those of the attachments that clip by them; saved without, or with other attachments, there are none."""
    saved = [decode(one, lambda leaf: reader.read(reader.record(leaf)[0])) for one in reader.manifest.previous_norms]
    if not all(one is None or isinstance(one, torch.Tensor) for one in saved):
        raise DamagedCheckpointError("a previous norm is none")
    return saved if len(saved) == len(attachments) else [None] * len(attachments)


def _require_finite(values: torch.Tensor, which: str) -> None:
    if (values.is_floating_point() or values.is_complex()) and not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{which} is not finite in the checkpoint. allow_nonfinite=True takes it all the same")


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _shown(record: TensorRecord) -> str:
    return f"{record.shape} {record.dtype}"


# ``load``: a checkpoint into a model and its optimizers, once all of it is known to fit.


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
