"""Guards: bucket by bucket, updates find the settings, switches and state that ``optimizer.step()`` would find."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, repeat
from operator import is_, itemgetter, length_hint, methodcaller
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.shadow import GroupLayout, Members
from instep._optim.stages import Stage
from instep._optim.values import (
    ABSENT,
    PER_PARAMETER,
    SHORT,
    address_of,
    bytes_of,
    fingerprint,
    is_immutable,
    settings_in,
    waits_for_host,
)
from instep._torch.switches import switched, switches
from instep._torch.versions import PLAIN, are_plain, versions_of
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

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        self.layout = layout
        self._switches = switches()

    def look(self, optimizer: Optimizer, numbers: Iterable[int]) -> None:
        """Raise ``HyperparameterChangedError`` if one of these groups was changed since the step's first update; or
        this is that of the group."""
        for index in numbers:
            live, used = optimizer.param_groups[index], self._groups.get(index)
            if used is None:
                used = self._known.get(index)
                if used is None or not used.is_of(live):
                    used = Snapshot(live)
                    if used.is_plain:
                        self._known[index] = used
                self._groups[index] = used
            elif not used.is_of(live):
                self._require_same(index, used, live)

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
        written: list[tuple[int, str, torch.Tensor]] = []
        for index, used in self._groups.items():
            live = optimizer.param_groups[index]
            if not used.is_of(live):
                self._require_same(index, used, live)
                written += [(index, f"[{key!r}] was written", flag) for key, flag in used.written(live)]
        # The host waits once, however many there are.
        told = torch.stack([flag.to(written[0][2].device) for *_, flag in written]).tolist() if written else []
        for index, what, _ in compress(written, told):
            raise self._changed(index, what)

    def _require_same(self, index: int, before: "Snapshot", now: Mapping[str, Any]) -> None:
        if (difference := before.difference(now)) is not None:
            raise self._changed(index, difference)

    def _changed(self, index: int, what: str) -> HyperparameterChangedError:
        return HyperparameterChangedError(
            f"param_groups[{index}]{what} in {self._name} after backward had already stepped parameters with what it "
            "was. Change hyper-parameters (and call the scheduler) after optimizer.step() or before backward(), not in "
            "between"
        )

    def end_step(self) -> None:
        self._groups = {}


def numbers_of(members: Iterable[Members]) -> list[int]:
    """The numbers of the groups that have some of a bucket."""
    return [number for number, (mine, _) in enumerate(members) if mine]


class Snapshot:
    """The settings of a group at one moment.

    Attributes:
        is_plain: whether none of the values can be changed in place, or refers to anything.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._values = settings_in(group)
        self._mutable = {k: fingerprint(v, is_setting=True) for k, v in self._values.items() if not is_immutable(v)}
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

    def difference(self, group: Mapping[str, Any]) -> str | None:
        """The first setting that ``group`` has not, or not any more as it was, and what it is now; ``None``: all are as
        they were."""
        for key, value in settings_in(group).items():
            then = self._values.get(key, ABSENT)
            # Asked for every bucket: what cannot be changed in place and is the same object needs no look.
            if value is not then or key in self._mutable:
                before = self._mutable[key] if key in self._mutable else fingerprint(then, is_setting=True)
                if fingerprint(value, is_setting=True) != before:
                    return f"[{key!r}] changed to {SHORT.repr(value)}"
        missing = next((key for key in self._values if key not in group), None)
        return None if missing is None else f"[{missing!r}] was removed"

    def written(self, group: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Of each small tensor on an accelerator, of which the host cannot know without waiting, whether it was
        written: 0-dim, there."""
        for key, before in self._on_device.items():
            now = group.get(key)
            if isinstance(now, torch.Tensor) and now.shape == before.shape and now.dtype == before.dtype:
                yield key, (bytes_of(now.detach()) != bytes_of(before)).any()


# What the state holds of a bucket, and whether it was written since.


Entry = Mapping[Any, Any] | None


class EntriesAsLeft(NamedTuple):
    """What the state holds of some parameters, as an update has left it, to find out later whether somebody has written
    it. The tensors are large: no copies.

    Attributes:
        sizes: of each entry, how many values it has: where there is none, 0.
        names: of all values, one entry after the other.
        values: in the same order.
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
    def of(cls, parameters: Sequence[torch.Tensor], state: Mapping[Any, Any]) -> "EntriesAsLeft":
        entries: list[Entry] = list(map(state.get, parameters))
        names, values = _names_of(entries), _values_of(entries)
        tensors: list[torch.Tensor] = values
        others: list[tuple[Any, Any]] = []
        if not PLAIN.issuperset(map(type, values)):
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            written = [value for value in values if not isinstance(value, torch.Tensor) and not is_immutable(value)]
            others = [(value, fingerprint(value)) for value in written]
        sizes = list(map(length_hint, entries))
        return cls([*parameters], entries, sizes, names, values, tensors, versions_of(tensors), others)

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
            or any(fingerprint(value) != then for value, then in self.others)
        )


def _names_of(entries: Iterable[Entry]) -> list[Any]:
    return list(chain.from_iterable(filter(None, entries)))


def _values_of(entries: Iterable[Entry]) -> list[Any]:
    return list(chain.from_iterable(map(_VALUES, filter(None, entries))))


_VALUES: Callable[[Any], Iterable[Any]] = methodcaller("values")


_NONE = EntriesAsLeft([], [], [], [], [], [], [], [])


class StateLayout:
    """Which value of which entry stands where in a whole state. Kept from step to step while that has the same keys and
    names: it refers to no tensor.

    Attributes:
        keys: by ``id``.
        sizes: of each entry, how many values it has.
        names: of all values, one entry after the other.
        values: by ``id``, as they were found last.
        share: whether two of them have the same memory: what one bucket writes is another's then, too.
    """

    def __init__(self, keys: list[int], sizes: list[int], names: list[Any]) -> None:
        self.keys, self.sizes, self.names = keys, sizes, names
        self.values: list[int] = []
        self.share = False
        self._entry = {key: number for number, key in enumerate(keys)}
        self._first = [0, *accumulate(sizes)]

    def entries_of(self, parameters: Iterable[torch.Tensor]) -> list[int | None]:
        """Which entries are theirs. ``None``: it has none."""
        return list(map(self._entry.get, map(id, parameters)))

    def column(self, entries: Iterable[int | None], name: str) -> list[int] | None:
        """Where each of these entries has its value of this name. ``None``: one has none."""
        try:
            return [self.names.index(name, *self._place_of(number)) for number in entries]
        except ValueError:
            return None

    def values_of(self, entry: int | None) -> slice:
        """Where all values of an entry are."""
        return slice(*self._place_of(entry))

    def _place_of(self, entry: int | None) -> tuple[int, int]:
        return (0, 0) if entry is None else (self._first[entry], self._first[entry + 1])

    def look_at(self, values: Sequence[Any], ids: list[int]) -> None:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self.share = len({address_of(t) or -id(t) for t in tensors}) < len(tensors)
        self.values = ids


@dataclass(slots=True)
class Layouts:
    """Where parameters stand in an optimizer's groups, and in its state, as a step has found them: as long as a later
    one finds the same, they are the same objects."""

    groups: GroupLayout
    state: StateLayout | None = None


class FoundState(NamedTuple):
    """The whole state as a step has found it, before its first update: each question is one pass over all entries, for
    which no parameter is hashed.

    Attributes:
        values: of all entries, in the order of the state.
        are_plain: whether all values are tensors of torch's own two classes.
    """

    layout: StateLayout
    entries: list[Entry]
    values: list[Any]
    are_plain: bool

    @classmethod
    def of(cls, state: Mapping[Any, Any], known: StateLayout | None) -> "FoundState":
        """``known``: the layout of the step before."""
        entries: list[Entry] = list(state.values())
        keys, sizes, names = list(map(id, state)), list(map(length_hint, entries)), _names_of(entries)
        if known is None or keys != known.keys or sizes != known.sizes or names != known.names:
            known = StateLayout(keys, sizes, names)
        values = _values_of(entries)
        ids = list(map(id, values))
        if ids != known.values:  # as long as these are the same objects, their memory is taken for the same
            known.look_at(values, ids)
        return cls(known, entries, values, are_plain(values))

    def is_of(self, state: Mapping[Any, Any]) -> bool:
        """Whether ``state`` has the same entries, with the same values."""
        entries = list(state.values())
        return (
            _are(entries, self.entries)
            and list(map(id, state)) == self.layout.keys
            and list(map(length_hint, entries)) == self.layout.sizes
            and _names_of(entries) == self.layout.names
            and _are(_values_of(entries), self.values)
        )


def _are(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


class Places(NamedTuple):
    """Where the state of a bucket's parameters stands in a whole state.

    Attributes:
        entries: ``None``: a parameter has none.
        read: gets, of all values, those that its update reads or writes.
    """

    entries: list[int | None]
    read: Callable[[Sequence[Any]], Sequence[Any]]


def at_places(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Gets what is at these places."""
    # In C: a bucket may have thousands. With one place an itemgetter returns the value itself.
    return itemgetter(*places) if len(places) > 1 else lambda values: [values[i] for i in places]


class StateGuard(Stage):
    """The state of the parameters is, at ``optimizer.step()``, as their updates have left it.

    Attributes:
        found: the whole state, as kernels find it in this step; ``None``: none is called.
        left: the entries of each bucket of this step that no kernel has stepped, as its update has left them.
        stepped: of each other bucket its parameters, where their state is in ``found``, and the versions it has then.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.found: FoundState | None = None
        self.left: list[EntriesAsLeft] = []
        self.stepped: list[tuple[Sequence[torch.Tensor], Places, list[int]]] = []

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        self.end_step()

    def note(self, parameters: Sequence[torch.Tensor], state: Mapping[Any, Any]) -> None:
        """Their update has left it like this."""
        self.left.append(EntriesAsLeft.of(parameters, state))

    def find(self, state: Mapping[Any, Any], layouts: Layouts) -> None:
        """Kernels are about to be called, which find ``state`` as it is now."""
        self.found = FoundState.of(state, layouts.state)
        layouts.state = self.found.layout

    def is_as_left(self, optimizer: Optimizer) -> bool:
        # Of all buckets together: each question is one pass.
        state, found = optimizer.state, self.found
        if found is None or not self.stepped:
            return EntriesAsLeft.of_all(self.left).are_as_left(state)
        if self._kernels_were_written():
            return False
        if not self.left and found.is_of(state):
            return True
        return EntriesAsLeft.of_all([*self.left, *self._kernels_left()]).are_as_left(state)

    def _kernels_were_written(self) -> bool:
        """Whether a tensor that a kernel has read or written in this step was written since."""
        if self.found is None or not self.stepped:
            return False
        values = self.found.values
        if not self.found.are_plain:  # some are no tensors: none of those that were read
            return any(versions_of(places.read(values)) != versions for _, places, versions in self.stepped)
        now = versions_of(values)
        return any([*places.read(now)] != versions for _, places, versions in self.stepped)

    def _kernels_left(self) -> Iterator[EntriesAsLeft]:
        """The entries of the buckets that a kernel has stepped."""
        assert self.found is not None
        layout, entries, values, *_ = self.found
        for parameters, places, _ in self.stepped:
            slices = [layout.values_of(number) for number in places.entries]
            yield EntriesAsLeft(
                [*parameters],
                [None if number is None else entries[number] for number in places.entries],
                [one.stop - one.start for one in slices],
                [name for one in slices for name in layout.names[one]],
                [value for one in slices for value in values[one]],
                [],
                [],
                [],
            )

    def require_unchanged(self, optimizer: Optimizer) -> None:
        if not self.is_as_left(optimizer):
            raise HyperparameterChangedError(
                f"the state of {self._name} was written between backward() and optimizer.step(), or by the update of "
                "another bucket, or replaced in backward, but backward had "
                "already updated it: the plain loop would have written the old one. Write it after optimizer.step() "
                "or before backward()"
            )

    def was_written(self, optimizer: Optimizer) -> bool:
        """Whether a parameter's state was written since its update, or replaced by one that holds something."""
        left = [*self.left, *self._kernels_left()] if self.stepped else self.left
        return self._kernels_were_written() or any(
            entries.written or entries.are_replaced_in(optimizer.state) for entries in left
        )

    def end_step(self) -> None:
        self.found = None
        self.left = []
        self.stepped = []
