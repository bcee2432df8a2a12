"""``load`` into optimizers: which record is whose, and its groups and state, compared with what is there.

``matched`` finds, for each optimizer, the record of one with the same parameters and class. A ``StagedOptimizer`` reads
the groups and the state of its record, and writes nothing before the whole checkpoint is known to fit.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.dtensor import is_sharded
from instep._optim.kinds import is_in_torch_optim
from instep.checkpoint.boxes import box_of, empty_beside, local_of
from instep.checkpoint.manifest import GroupRecord, OptimizerRecord, TensorRecord
from instep.checkpoint.reader import CheckpointReader
from instep.checkpoint.training_state import NOT_IN_GROUP, TrainingState, class_of
from instep.checkpoint.values import Json, decode, is_finite
from instep.errors import CheckpointError, DamagedCheckpointError

SHOWN = 6
"""How many names or faults a message lists."""
_logger = logging.getLogger("instep")


def matched(
    training: TrainingState, names: Mapping[int, str], records: Sequence[OptimizerRecord]
) -> list[tuple[str, Optimizer, OptimizerRecord]]:
    """Each optimizer, as messages name it, with the record of the one that was saved of the same parameters.

    Args:
        names: by the ``id`` of each parameter, the name that it was saved under.
    """
    left = list(records)
    found = []
    for which, optimizer in training.labelled():
        # By the set of names: optimizers, groups and parameters may be in another order than when they were saved.
        mine = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
        same = [r for r in left if {name for group in r.groups for name in group.parameters} == mine]
        of_class = [r for r in same if r.cls == class_of(optimizer)]
        if not of_class:
            if same:
                raise CheckpointError(
                    f"the checkpoint is of {same[0].cls}, and {which} is {class_of(optimizer)}: their state means "
                    "other things"
                )
            # For the message: of the records that are left, the one with the fewest differences.
            theirs = [{name for group in r.groups for name in group.parameters} for r in left]
            closest = min(theirs, key=lambda one: len(one ^ mine), default=set())
            raise CheckpointError(
                f"no optimizer in the checkpoint has the parameters of {which}: {listed(sorted(mine - closest))} are "
                f"not in that which is closest, and {listed(sorted(closest - mine))} in that alone"
            )
        left.remove(of_class[0])  # two optimizers of one class and the same parameters take a record each
        found.append((which, optimizer, of_class[0]))
    if left:
        raise CheckpointError(
            f"the checkpoint has {len(records)} optimizers, and {len(found)} were given: {left[0].cls} is not there"
        )
    return found


class StagedOptimizer:
    """One optimizer, with the groups and the state that ``write`` will give it.

    Args:
        copies: takes what is to be copied, as (into, values): state that is there already keeps its tensors.
        which: the optimizer, as messages name it.
        names: by the ``id`` of each parameter, the name that it was saved under.
        shards: by ``id``, the parameters whose state ``shard_state`` divides among ranks, with this rank's shard.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        training: TrainingState,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        which: str,
        optimizer: Optimizer,
        names: Mapping[int, str],
        shards: Mapping[int, Any],
        allow_nonfinite: bool,
    ) -> None:
        self._reader = reader
        self._training = training
        self._copies = copies
        self._which = which
        self._optimizer = optimizer
        self._names = names
        self._shards = shards
        self._allow_nonfinite = allow_nonfinite
        self._new_groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._new_state: dict[Any, Any] = {}

    def stage(self, record: OptimizerRecord) -> None:
        """Read ``record``, and compare it with the optimizer."""
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for group, saved in self._groups(record.groups):
            values = self._group_values(group, saved)
            self._new_groups.append((group, values))
            for parameter in group["params"]:
                entry = record.state.get(self._names[id(parameter)])
                if entry is not None:
                    # With the values that are to come: they decide where "step" lives (capturable, fused).
                    state[parameter] = self._entry(parameter, entry, {**group, **values})
        shared = decode(record.shared, self._reader.read_leaf)
        if not isinstance(shared, dict) or any(isinstance(key, torch.Tensor) for key in shared):
            raise DamagedCheckpointError(f"the state of {self._which} is none")
        self._new_state = {**shared, **state}

    def write(self) -> None:
        """Give the optimizer what was staged. Tensors of state that stay are written by ``copies``."""
        self._optimizer.state.clear()
        self._optimizer.state.update(self._new_state)
        for group, values in self._new_groups:
            group.update(values)

    def _groups(self, records: Sequence[GroupRecord]) -> list[tuple[dict[str, Any], GroupRecord]]:
        """Each group with the record of the one that had the same parameters."""
        left = list(records)
        found = []
        for number, group in enumerate(self._optimizer.param_groups):
            mine = {self._names[id(p)] for p in group["params"]}
            same = [record for record in left if set(record.parameters) == mine]
            if not same:
                raise CheckpointError(
                    f"{self._which}.param_groups[{number}] has {listed(sorted(mine))}, and no group in the checkpoint "
                    "has just these: divide the parameters as they were when it was saved"
                )
            left.remove(same[0])
            found.append((group, same[0]))
        if left:
            raise CheckpointError(
                f"the checkpoint has {len(records)} groups of {self._which}, which has {len(found)}: that of "
                f"{listed(left[0].parameters)} is not there"
            )
        return found

    def _group_values(self, group: dict[str, Any], record: GroupRecord) -> dict[str, Any]:
        # By identity: == of two groups would compare tensors in them.
        number = next(n for n, one in enumerate(self._optimizer.param_groups) if one is group)
        where = f"{self._which}.param_groups[{number}]"
        if not record.values.keys().isdisjoint(NOT_IN_GROUP):
            raise DamagedCheckpointError(f"the values of {where} hold its parameters")
        values = {key: decode(value, self._reader.read_leaf) for key, value in record.values.items()}
        _require_sane(where, group, values, allow_nonfinite=self._allow_nonfinite)
        # A learning rate may be a tensor: the new one goes where the loop has the old one.
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                values[key] = value.to(group[key].device)
        absent = [key for key in group if key not in values and key not in NOT_IN_GROUP]
        if absent:  # another version of the optimizer
            _logger.warning("%s%r are not in the checkpoint, and stay as they are", where, absent)
        return values

    def _entry(self, parameter: torch.Tensor, record: Mapping[str, Json], group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of ``parameter``."""
        shard = self._shards.get(id(parameter))
        if shard is not None and not shard.is_owner:
            return {}  # another rank's: that there is state is all that is known here
        # What is there may be this rank's rows alone. The checkpoint has all rows, and ``take`` cuts these from them.
        existing = {} if shard is not None else self._optimizer.state.get(parameter, {})
        entry = {}
        for key, value in record.items():

            def tensor(leaf: Mapping[str, Json], key: str = key) -> torch.Tensor:
                return self._tensor(parameter, key, leaf, existing.get(key), group)

            entry[key] = decode(value, tensor)
        if shard is not None:
            shard.take(entry)
        return entry

    def _tensor(
        self,
        parameter: torch.Tensor,
        key: str,
        leaf: Mapping[str, Json],
        existing: Any,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """The tensor that the state will have under ``key``: a new one, filled, or the one that is there, as a copy to
        be made."""
        if not leaf.keys() <= {"tensor", "elsewhere", "plain"}:
            raise DamagedCheckpointError(f"the state of {self._which} has a tensor with {sorted(leaf)}")
        name, record = self._reader.record(leaf)
        self._require_fits(parameter, key, record, existing)
        into: torch.Tensor = self._destination(parameter, key, record, leaf, existing, group)
        values = self._reader.read(name, box_of(into))
        if not self._allow_nonfinite:
            require_finite(values, f"{key!r} of {self._names[id(parameter)]!r} in the state of {self._which}")
        if into is existing:
            self._copies.append((local_of(into), values))
        else:
            local_of(into).copy_(values)
        return into

    def _require_fits(self, parameter: torch.Tensor, key: str, record: TensorRecord, existing: Any) -> None:
        """Raise unless ``record`` can be state of ``parameter``. torch's own optimizers have state in the shape of the
        parameter, of its rows or of its columns, and single numbers."""
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
                f"{self._which} is {shown(record)} in the checkpoint, which does not fit"
            )

    def _destination(
        self,
        parameter: torch.Tensor,
        key: str,
        record: TensorRecord,
        leaf: Mapping[str, Json],
        existing: Any,
        group: Mapping[str, Any],
    ) -> Any:
        """The tensor to load into: the one that is there already, or a new one where the optimizer would make it."""
        if isinstance(existing, torch.Tensor) and existing.dtype == record.dtype:
            return existing
        like = record.shape == tuple(parameter.shape)
        offloaded = self._training.is_offloaded(parameter, record.shape)
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


_NOT_NEGATIVE = ("lr", "initial_lr", "weight_decay", "momentum")
"""The values of a group that torch's own optimizers refuse when they are negative."""


def _require_sane(where: str, current: Mapping[str, Any], saved: Mapping[str, Any], *, allow_nonfinite: bool) -> None:
    """Raise ``CheckpointError`` unless ``saved`` could be the values of the group that has ``current``."""
    for key, value in saved.items():
        for number in _numbers(value):
            if not allow_nonfinite and not math.isfinite(number) and not _nonfinite(current.get(key)):
                raise CheckpointError(f"{where}[{key!r}] is {value!r} in the checkpoint, which is not finite")
            if key in _NOT_NEGATIVE and number < 0:
                raise CheckpointError(f"{where}[{key!r}] is {value!r} in the checkpoint, which is negative")
        if key in current and not _same_kind(current[key], value):
            raise CheckpointError(
                f"{where}[{key!r}] is {value!r} in the checkpoint and {current[key]!r} in the optimizer"
            )


def _numbers(value: Any) -> Iterator[float]:
    """The numbers in a group's value: itself, or those in a list, such as betas."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            yield float(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _nonfinite(value: Any) -> bool:
    return any(not math.isfinite(number) for number in _numbers(value))


def _same_kind(current: Any, saved: Any) -> bool:
    """Whether a loop may have set ``saved`` in the place of ``current``. A number may be a tensor, and ``None`` is
    chosen by the optimizer."""
    if current is None or saved is None:
        return True
    if isinstance(current, (list, tuple)) and isinstance(saved, (list, tuple)):
        return len(current) == len(saved) and all(map(_same_kind, current, saved))
    if _is_number(current) and _is_number(saved):
        return True
    return type(current) is type(saved)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_finite(values: torch.Tensor, which: str) -> None:
    """Raise ``CheckpointError`` if ``values``, which a message calls ``which``, hold NaN or infinity."""
    if not is_finite(values):
        raise CheckpointError(f"{which} is not finite in the checkpoint. allow_nonfinite=True takes it all the same")


def listed(names: Sequence[str]) -> str:
    """``names`` for a message: the first few, and how many more."""
    if not names:
        return "none"
    return ", ".join(map(repr, names[:SHOWN])) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def shown(record: TensorRecord) -> str:
    """A tensor's record for a message."""
    return f"{record.shape} {record.dtype}"
