"""Guards: bucket by bucket, updates find the settings, switches and state that ``optimizer.step()`` would find."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from operator import is_, length_hint, methodcaller
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.shadow import GroupLayout, Members
from instep._optim.stages import Stage, Update
from instep._optim.values import (
    ABSENT,
    PER_PARAMETER,
    SHORT,
    alike,
    bytes_of,
    fingerprint,
    is_immutable,
    same,
    waits_for_host,
)
from instep._torch.engine import as_default_device, default_device
from instep._torch.versions import are_plain, versions_of
from instep.errors import HyperparameterChangedError


class SettingsGuard(Stage):
    """One step has one set of settings: every update finds what the first one has found, and ``optimizer.step()`` is to
    find that again.

    Args:
        name: of the optimizer.

    Attributes:
        layout: of the groups as they are in this step.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.layout = GroupLayout(name, ())
        self._switches: dict[str, Any] = {}
        self._groups: dict[int, Snapshot] = {}
        # Snapshots of earlier steps, to be taken again. None that can be changed: it may refer to the model.
        self._known: dict[int, Snapshot] = {}
        # Whether small tensors on an accelerator were written, of which the host would have to wait to know: compared
        # there in one step, and read in the next. Each with its name.
        self._flags: list[tuple[str, torch.Tensor]] = []

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        self.layout = layout
        self._switches = switches()

    def look(self, optimizer: Optimizer, members_of: Sequence[Members]) -> None:
        """Raise ``HyperparameterChangedError`` if a group was changed since the step's first update; or this is that of
        the group.

        Args:
            members_of: each group, as ``GroupLayout.members_of`` has it.
        """
        for index, (members, _) in enumerate(members_of):
            live, used = optimizer.param_groups[index], self._groups.get(index)
            if used is not None:
                if not used.is_of(live):
                    require_same(self._name, f"param_groups[{index}]", used, live)
            elif members:
                snapshot = self._known.get(index)
                if snapshot is None or not snapshot.is_of(live):
                    snapshot = Snapshot(live)
                    if snapshot.is_plain:
                        self._known[index] = snapshot
                self._groups[index] = snapshot

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        self.look(update.optimizer, update.members)
        yield

    def require_unchanged(self, optimizer: Optimizer) -> None:
        if self.layout.were_moved(optimizer.param_groups):
            raise HyperparameterChangedError(
                f"parameters of {self._name} were moved within its param_groups after backward had already stepped "
                "parameters with the groups as they were. Move them after optimizer.step() or before backward()"
            )
        if (difference := switched(self._switches)) is not None:
            raise HyperparameterChangedError(
                f"{difference}, in {self._name}.step(), after backward had already stepped parameters under what it "
                "was. Call backward() and optimizer.step() under the same, or use undo=True or schedule='forward'"
            )
        # Where settings are, in words; what they were; and what they are.
        looks = [(f"param_groups[{i}]", used, optimizer.param_groups[i]) for i, used in self._groups.items()]
        for where, before, now in looks:
            require_same(self._name, where, before, now)
        flags, self._flags = self._flags, []
        self._flags = [(f"{where}[{key!r}]", flag) for where, before, now in looks for key, flag in before.flags(now)]
        told = torch.stack([flag.to(flags[0][1].device) for _, flag in flags]).tolist() if flags else []
        for (name, _), written in zip(flags, told, strict=True):
            if written:
                raise HyperparameterChangedError(
                    f"{name} in {self._name} was written, in the step before, after backward had already stepped "
                    "parameters with what it was. Change hyper-parameters after optimizer.step() or before backward()"
                )

    def end_step(self) -> None:
        self._groups = {}


class Snapshot:
    """The values of a group, or other settings by name, at one moment; parameters aside.

    Attributes:
        is_plain: whether none of the values can be changed in place, or refers to anything.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._values = {key: value for key, value in group.items() if key not in PER_PARAMETER}
        self._mutable = {k: fingerprint(v) for k, v in self._values.items() if not is_immutable(v)}
        self.is_plain = not self._mutable
        mutable = {k: self._values[k] for k in self._mutable}
        self._on_device = {k: v.detach().clone() for k, v in mutable.items() if waits_for_host(v)}

    def is_of(self, group: Mapping[str, Any]) -> bool:
        """Whether ``group`` holds the very same values, none of which can be changed in place."""
        values = self._values
        return (
            self.is_plain
            and len(group) - sum(map(group.__contains__, PER_PARAMETER)) == len(values)
            and all(map(is_, map(group.get, values, repeat(ABSENT)), values.values()))
        )

    def changes(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What ``group`` has in place of, or on top of, these values."""
        values, mutable = self._values, self._mutable
        return {
            key: value
            for key, value in group.items()
            # Asked for every bucket: what cannot be changed in place and is the same object needs no look.
            if (value is not values.get(key, ABSENT) or key in mutable)
            and key not in PER_PARAMETER
            and not (
                alike(fingerprint(value), mutable[key]) if key in mutable else same(value, values.get(key, ABSENT))
            )
        }

    def difference(self, group: Mapping[str, Any]) -> str | None:
        """The first setting that ``group`` has not, or not any more as it was, and what it is now; ``None``: all are as
        they were."""
        for key, value in self.changes(group).items():
            return f"[{key!r}] changed to {SHORT.repr(value)}"
        if self._values.keys() <= group.keys():
            return None
        missing = next(key for key in self._values if key not in group)
        return f"[{missing!r}] was removed"

    def flags(self, group: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Of each small tensor on an accelerator, of which the host cannot know without waiting, whether it was
        written: 0-dim, there."""
        for key, before in self._on_device.items():
            now = group.get(key)
            if isinstance(now, torch.Tensor) and now.shape == before.shape and now.dtype == before.dtype:
                yield key, (bytes_of(now.detach()) != bytes_of(before)).any()


def require_same(name: str, where: str, before: "Snapshot", now: Mapping[str, Any]) -> None:
    """Raise ``HyperparameterChangedError`` if settings of the optimizer ``name`` are not as they were."""
    if before.is_of(now):
        return
    difference = before.difference(now)
    if difference is not None:
        raise HyperparameterChangedError(
            f"{where}{difference} in {name} after backward had already stepped parameters with what it was. "
            "Change hyper-parameters (and call the scheduler) after optimizer.step() or before backward(), not in "
            "between"
        )


# What the state holds of a bucket: read once for each update, and whether it was written since.


Entry = Mapping[Any, Any] | None


class Entries(NamedTuple):
    """What the state holds of some parameters, as it was read. The tensors are large: no copies.

    Attributes:
        sizes: of each entry, how many values it has: where there is none, 0.
        names: of all values, one entry after the other.
        values: in the same order.
        are_plain: whether all values are tensors of torch's own two classes.
    """

    parameters: list[torch.Tensor]
    entries: list[Entry]
    sizes: list[int]
    names: list[Any]
    values: list[Any]
    are_plain: bool

    @classmethod
    def of(cls, parameters: Sequence[torch.Tensor], state: Mapping[Any, Any]) -> "Entries":
        entries: list[Entry] = list(map(state.get, parameters))
        values = _values_of(entries)
        return cls(
            [*parameters], entries, list(map(length_hint, entries)), _names_of(entries), values, are_plain(values)
        )

    def columns(self, names: Sequence[str]) -> list[list[torch.Tensor]] | None:
        """One list for each of the ``names``, with a plain tensor of each entry. ``None``: an entry lacks one of them,
        as before the first step, or holds something else too; or entries are not all alike, as some may be in a state
        that was loaded."""
        order = list(self.entries[0] or ())
        count = len(order)
        if not self.are_plain or self.names != order * len(self.entries) or {*self.sizes} != {count}:
            return None
        try:
            return [self.values[order.index(name) :: count] for name in names]
        except ValueError:
            return None


class EntriesAsLeft(NamedTuple):
    """Entries as an update has left them, to find out later whether somebody has written them.

    Attributes:
        parameters: and the next four: as ``Entries`` has them.
        tensors: those of the values that are tensors.
        versions: of the tensors.
        others: values that are no tensors and can be written, each with its fingerprint.
    """

    parameters: list[torch.Tensor]
    entries: list[Entry]
    sizes: list[int]
    names: list[Any]
    values: list[Any]
    tensors: list[torch.Tensor]
    versions: list[int]
    others: list[tuple[Any, Any]]

    @classmethod
    def of(cls, read: Entries) -> "EntriesAsLeft":
        tensors: list[torch.Tensor] = read.values
        others: list[tuple[Any, Any]] = []
        if not read.are_plain:
            tensors = [value for value in read.values if isinstance(value, torch.Tensor)]
            written = [v for v in read.values if not isinstance(v, torch.Tensor) and not is_immutable(v)]
            others = [(value, fingerprint(value)) for value in written]
        return cls(
            read.parameters, read.entries, read.sizes, read.names, read.values, tensors, versions_of(tensors), others
        )

    @classmethod
    def of_all(cls, parts: Sequence["EntriesAsLeft"]) -> "EntriesAsLeft":
        columns: Iterable[list[Any]] = map(list, map(chain.from_iterable, zip(*parts, strict=True)))
        return cls(*columns) if parts else _NONE

    def are_as_left(self, state: Mapping[Any, Any]) -> bool:
        """Whether ``state`` has the same entries, an empty one being none, and nothing in them was written."""
        then = self.entries
        now = list(map(state.get, self.parameters))
        are_in = all(map(is_, now, then)) or all(a is b or not (a or b) for a, b in zip(now, then, strict=True))
        return are_in and not self.written

    def are_replaced_in(self, state: Mapping[Any, Any]) -> bool:
        """Whether ``state`` has another entry for one of the parameters, that holds something."""
        now = map(state.get, self.parameters)
        return any(a and a is not b for a, b in zip(now, self.entries, strict=True))

    @property
    def written(self) -> bool:
        """Whether an entry has other values since, or one of them was written. Not seen: a tensor through ``.data``."""
        return (
            # With sizes and names, each value is known to be in its own entry.
            list(map(length_hint, self.entries)) != self.sizes
            or _names_of(self.entries) != self.names
            or not all(map(is_, _values_of(self.entries), self.values))
            or versions_of(self.tensors) != self.versions
            or not all(alike(fingerprint(value), then) for value, then in self.others)
        )


def _names_of(entries: Iterable[Entry]) -> list[Any]:
    return list(chain.from_iterable(filter(None, entries)))


def _values_of(entries: Iterable[Entry]) -> list[Any]:
    return list(chain.from_iterable(map(_VALUES, filter(None, entries))))


_VALUES: Callable[[Any], Iterable[Any]] = methodcaller("values")


_NONE = EntriesAsLeft([], [], [], [], [], [], [], [])


class StateGuard(Stage):
    """The state of the parameters is, at ``optimizer.step()``, as their updates have left it.

    Attributes:
        left: the entries of each bucket of this step, as its update has left them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.left: list[EntriesAsLeft] = []

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        self.left = []

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        yield
        self.note(Entries.of(update.owned, update.optimizer.state))

    def note(self, read: Entries) -> None:
        """An update has left these entries as they are now."""
        self.left.append(EntriesAsLeft.of(read))

    def is_as_left(self, optimizer: Optimizer) -> bool:
        # Of all buckets together: each question is one pass.
        return EntriesAsLeft.of_all(self.left).are_as_left(optimizer.state)

    def require_unchanged(self, optimizer: Optimizer) -> None:
        if not self.is_as_left(optimizer):
            raise HyperparameterChangedError(
                f"the state of {self._name} was written between backward() and optimizer.step(), or by the update of "
                "another bucket, but backward had "
                "already updated it: the plain loop would have written the old one. Write it after optimizer.step() "
                "or before backward()"
            )

    def was_written(self, optimizer: Optimizer) -> bool:
        """Whether a parameter's state was written since its update, or replaced by one that holds something."""
        return any(entries.written or entries.are_replaced_in(optimizer.state) for entries in self.left)

    def end_step(self) -> None:
        self.left = []


# Switches of torch, for the whole process, that an update may read: it needs those of ``optimizer.step()``.


DEFAULT_DTYPE = "torch.get_default_dtype()"
MKLDNN = "torch.backends.mkldnn.enabled"


def switches() -> dict[str, Any]:
    """As they are now, by what tells them. Not among them: whether algorithms are deterministic. A loop may have a
    backward that is not, and no optimizer is known to use such an algorithm."""
    precision: str | None = None
    with suppress(RuntimeError):  # some were set by the newer names, of which there is one for each backend
        precision = torch.get_float32_matmul_precision()
    return {
        DEFAULT_DTYPE: torch.get_default_dtype(),
        MKLDNN: torch.backends.mkldnn.enabled,
        "torch.get_float32_matmul_precision()": precision,
    }


def switched(then: dict[str, Any], *, but: Container[str] = ()) -> str | None:
    """The first that is not as it was, in words; those ``but`` do not count."""
    for name, now in switches().items():
        if now != then[name] and name not in but:
            return f"{name} was {then[name]} and is {now}"
    return None


@contextmanager
def as_then(then: dict[str, Any]) -> Iterator[None]:
    """The default dtype and mkldnn as they were. Only while nobody else can ask for them: they are the whole
    process's."""
    before = switches()
    _set(then, before)
    try:
        yield
    finally:
        _set(before, then)


class OfThread(NamedTuple):
    """What torch keeps for each thread of Python, and an update reads.

    Attributes:
        threads: how many of torch's own. Some kernels divide a sum by that number, and each pool of threads wants the
            cores.
        flushes: whether denormal numbers are taken for zero (``torch.set_flush_denormal``).
        device: that of state which is made without naming one; ``None``: the CPU.
    """

    threads: int
    flushes: bool
    device: torch.device | None


_DENORMAL = 5e-324


def of_this_thread() -> OfThread:
    """The thread's own, which in a new thread also makes torch limit the libraries below it."""
    # torch does not tell. It is the processor's own switch, and Python's numbers obey it, too.
    return OfThread(torch.get_num_threads(), _DENORMAL * 1.0 == 0.0, default_device())


@contextmanager
def as_thread(wanted: OfThread) -> Iterator[None]:
    """With what another thread has had."""
    before = of_this_thread()
    if before == wanted:
        yield
        return
    _set_of_thread(wanted, before)
    try:
        with as_default_device(wanted.device):
            yield
    finally:
        _set_of_thread(before, wanted)


def _set_of_thread(wanted: OfThread, current: OfThread) -> None:
    if wanted.threads != current.threads:
        torch.set_num_threads(wanted.threads)
    if wanted.flushes != current.flushes:
        torch.set_flush_denormal(wanted.flushes)


def _set(wanted: dict[str, Any], current: dict[str, Any]) -> None:
    if wanted[DEFAULT_DTYPE] != current[DEFAULT_DTYPE]:
        torch.set_default_dtype(wanted[DEFAULT_DTYPE])
    if wanted[MKLDNN] != current[MKLDNN]:
        torch.backends.mkldnn.enabled = wanted[MKLDNN]
