"""What a foreign optimizer holds beside parameters and their state: settings, attributes, state under names.

What a bucket's update has made of it is noted, and taken back, so that each bucket of a step finds what the first one
has found. All buckets must leave the same, which is put in when the step is committed.
"""

import re
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from enum import Enum
from functools import partial
from itertools import chain, compress, count
from operator import attrgetter, is_, is_not, methodcaller
from types import BuiltinFunctionType, CodeType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.belongings import with_parameters
from instep._optim.contents import Contents, digest_of_value
from instep._optim.kinds import (
    NO_SETTINGS,
    OF_SCHEDULERS,
    STEPPED_WHOLE,
    beside_parameters,
    classes_of,
    read_by_update,
)
from instep._optim.proved import FREE
from instep._optim.reached import in_modules, reached
from instep._optim.shadow import GroupLayout, Members, parameters_of
from instep._optim.values import (
    ABSENT,
    attributes_of,
    fingerprint,
    held_in,
    is_closed,
    is_immutable,
    is_of_torch,
    kind_of,
    put_dict,
    put_item,
    settings_in,
    storage_of,
)
from instep._torch.versions import versions_of
from instep.errors import HyperparameterChangedError, UnsupportedOptimizerError

MOST_BYTES = 4 * 1024 * 1024
"""Tensors that are larger are not copied in each step: it is found out whether an update writes them."""


def _as_held(value: Any) -> Any:
    # Tensors are copied, to be put back. So they are compared by what they hold: torch counts that write, too.
    return fingerprint(value, elements=MOST_BYTES // 4)


class AsItWas(Contents):
    """A value of an object that an update may change, as it is now: to be compared with what is there later, and put
    back.

    Args:
        apart: memory that is put back by others, or by nobody: that of parameters and their state.

    Attributes:
        large: tensors that are not copied.
        opaque: why the value could not be put back, in words; ``None``: it can.
        is_flat: whether it is a dict or list of numbers and the like.
    """

    def __init__(self, value: Any, apart: Container[int]) -> None:
        self.large: list[torch.Tensor] = []
        self.opaque: str | None = None
        self._apart = apart
        try:
            super().__init__(value)
        except Exception as error:
            self.opaque = f"{type(error).__name__}: {error}"
            self._put_back = []
        self._look = _as_held(value)
        items = _items(value) if type(value) in (dict, list) else None
        self.is_flat = items is not None and all(map(is_immutable, items))
        # Where the very same objects are there, nothing is changed: parameters are put back by others.
        simple = items is not None and all(is_immutable(i) or isinstance(i, torch.nn.Parameter) for i in items)
        self._items = items if simple else None

    def keep(self, held: Any) -> Iterable[Any]:
        if isinstance(held, torch.Tensor):
            if _memory(held) in self._apart:
                return ()  # put back, it would take the updates of other buckets with it
            if held.nbytes > MOST_BYTES:
                self.large.append(held)
                return ()
        elif held is ABSENT or is_closed(held) or is_of_torch(held) or isinstance(held, _INERT):
            return ()  # an update does not change it, or it is looked at in another way
        elif isinstance(held, dict):
            # What it has under parameters is taken for state of these.
            items = {key: item for key, item in held.items() if not isinstance(key, torch.Tensor)}
            self._put_back.append(partial(put_dict, held, items, (torch.Tensor,)))
            return items.values()
        elif kind_of(held) is None and hasattr(type(held), "__del__"):
            raise TypeError(f"a {type(held).__name__}, which has a finalizer")
        return super().keep(held)

    def put_back(self) -> Any:
        value = super().put_back()
        # Put back, it was written: of a large tensor a look knows how often. And it holds what is another's.
        self.look_anew()
        return value

    def look_anew(self) -> None:
        """As the value is now it is unchanged."""
        self._look = _as_held(self.value)
        self._items = None if self._items is None else _items(self.value)

    def has_same_items(self) -> bool:
        """Whether it is known at once that nothing is changed."""
        if self._items is None:
            return False
        now = _items(self.value)
        return len(now) == len(self._items) and all(map(is_, now, self._items))

    def is_in(self, now: Any) -> bool:
        """Whether ``now`` is the same object, unchanged."""
        return now is self.value and (self.is_like(now) if self._items is None else self.has_same_items())

    def is_like(self, now: Any) -> bool:
        return bool(_as_held(now) == self._look)


_INERT = (weakref.ref, BuiltinFunctionType, CodeType, Enum, re.Pattern)


def _items(held: Any) -> list[Any]:
    """With the keys of a dict."""
    return [*chain.from_iterable(held.items())] if type(held) is dict else [*held]


_Changes = tuple[list[int], list[type], list[Any]]
"""Which of some values are others by now, by number; of which types, which are compared first, as a tensor compares
itself to any number; and what they are."""


class _AtOnce:
    """The values of some dicts and lists, one after the other: whether all are the very same objects takes one pass.

    Args:
        state: of which only the size is looked at: an entry may come under a name.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]], lists: Sequence[list[Any]], state: Sized) -> None:
        self._dicts, self._lists = dicts, lists
        # An item may move from the end of one to the beginning of the next.
        self._sized: Sequence[Sized] = [state, *dicts, *lists]
        self._sizes = list(map(len, self._sized))
        self._keys = [*chain.from_iterable(dicts)]
        self._values = self._now() or []
        self._places: list[tuple[Any, Any]] = []  # of each, where it is put back, once one is

    def _now(self) -> list[Any] | None:
        """``None``: there are values more, or fewer, or under other keys."""
        dicts = self._dicts
        if list(map(len, self._sized)) == self._sizes and all(map(is_, chain.from_iterable(dicts), self._keys)):
            return [*chain.from_iterable(map(_VALUES, dicts)), *chain.from_iterable(self._lists)]
        return None

    @property
    def are_same(self) -> bool:
        now = self._now()
        return now is not None and all(map(is_, now, self._values))

    def changes(self) -> _Changes | None:
        """``None``: see ``_now``."""
        now = self._now()
        if now is None:
            return None
        at = [*compress(count(), map(is_not, now, self._values))]
        values = [*map(now.__getitem__, at)]
        return at, [*map(type, values)], values

    def put_back(self, at: Iterable[int]) -> None:
        if not self._places:
            self._places = [(held, key) for held in self._dicts for key in held]
            self._places += [(held, number) for held in self._lists for number in range(len(held))]
        for number in at:
            held, key = self._places[number]
            held[key] = self._values[number]


_VALUES: Callable[[dict[Any, Any]], Iterable[Any]] = methodcaller("values")
_IN_BUCKET: Callable[[Members], list[int]] = attrgetter("in_bucket")


class _Source(NamedTuple):
    """One mapping with values of the object, some of which an update may change.

    Attributes:
        where: in words.
        mapping: the user's own.
        own: those of its items that count.
    """

    where: str
    mapping: MutableMapping[Any, Any]
    own: Callable[[Mapping[Any, Any]], dict[Any, Any]]


Slot = tuple[int, Any]
"""The place of one value: the number of its source, and its key there."""


def _values_in(sources: Iterable[_Source]) -> dict[Slot, Any]:
    return {
        (number, key): value
        for number, source in enumerate(sources)
        for key, value in source.own(source.mapping).items()
    }


class _Left(NamedTuple):
    """What buckets of the running step have left.

    Attributes:
        at_once: what was changed by a bucket that was noted, by which groups had parameters in it.
        records: by source, where a bucket was asked: what that has left of the values that it changes.
        mappings: all that there were before the first; of an object that is flat the records have them.
        is_first: whether what is kept by parameter may be made now: all of the step is taken by ``step()`` afterwards.
    """

    at_once: dict[tuple[bool, ...], _Changes]
    records: dict[int, dict[Slot, AsItWas]]
    mappings: Sequence[Any] = ()
    is_first: bool = False


class Beside:
    """What a foreign optimizer holds beside parameters and their state, as a step begins with it.

    Most hold numbers, and dicts of numbers. Then one pass tells whether anything is changed (``_AtOnce``); what two
    buckets leave is compared by what was changed, and put back by it; and the next step begins with what is known.

    Attributes:
        was_set: whether somebody has changed it since the last step has ended, other than by numbers that a scheduler
            sets. Of one that was not flat, that is not known.
        is_flat: whether it holds nothing but numbers and the like, and dicts and lists of these.
        unseen: tensors that it reaches, and that are not put back here.
        wrote_in_place: whether one of these was written.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._sources: list[_Source] = []  # the groups, the attributes, the state
        self._values: dict[Slot, Any] = {}
        self._records: dict[Slot, AsItWas] = {}  # of values that can be changed in place
        self._apart: frozenset[int] = frozenset()
        self._at_once: _AtOnce | None = None
        self._left = _Left({}, {})
        self._moved_by_step: set[Slot] = set()  # as buckets have left them, by the last step(), which found no gradient
        self.unseen: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._shared: list[tuple[Any, str, Any]] = []
        self.wrote_in_place = False
        self.is_flat = self.was_set = False

    # A step begins.

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        dicts: list[dict[Any, Any]] = [*optimizer.param_groups, vars(optimizer)]
        is_known = self._begins_again([*dicts, optimizer.state])
        self.was_set = not is_known and bool(self._sources)
        if not is_known:
            self._begin(optimizer, layout)
        self._at_once = None
        self._left = _Left({}, {}, () if self.is_flat else [*held_in(self._values.values(), Mapping)])
        if self.is_flat:
            flat = [record.value for record in self._records.values()]
            lists = [held for held in flat if type(held) is list]
            own = [held for held in flat if type(held) is dict]
            self._at_once = _AtOnce([*dicts, *own], lists, optimizer.state)

    def _begins_again(self, mappings: Sequence[MutableMapping[Any, Any]]) -> bool:
        """Whether these are as the last step has left them, but for such numbers as a scheduler sets."""
        if len(mappings) != len(self._sources):
            return False
        sources = [_Source(where, now, own) for (where, _, own), now in zip(self._sources, mappings, strict=True)]
        now, then = _values_in(sources), self._values
        if now.keys() != then.keys():
            return False
        for slot in compress(now, map(is_not, now.values(), map(then.__getitem__, now))):
            if slot[1] not in FREE or slot in self._records or not is_immutable(now[slot]):
                return False
        self._sources, self._values = sources, now
        return all(map(AsItWas.has_same_items, self._records.values()))

    def _begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        attributes, read = vars(optimizer), read_by_update(optimizer)
        named = beside_parameters(optimizer.state)
        has_tensors = any(True for _ in reached(optimizer, torch.Tensor))
        self._apart = _memory_of_parameters(optimizer) if has_tensors else frozenset()
        left_out = (attributes.keys() - read.keys()) | NO_SETTINGS
        self._sources = [
            *(_Source(f"param_groups[{n}]", group, settings_in) for n, group in enumerate(optimizer.param_groups)),
            _Source("attribute", attributes, partial(_without, left_out)),
            _Source("state", optimizer.state, beside_parameters),
        ]
        self._values = _values_in(self._sources)
        self._records = {
            slot: AsItWas(value, self._apart) for slot, value in self._values.items() if not is_immutable(value)
        }
        records = self._records.values()
        self.unseen = [*(tensor for record in records for tensor in record.large), *in_modules(optimizer, layout)]
        self.look_at_unseen()
        self.is_flat = (
            not (self.unseen or named or left_out - NO_SETTINGS)
            and all(type(group) is dict for group in optimizer.param_groups)
            and all(record.is_flat for record in records)
        )

    def _is_group(self, number: int) -> bool:
        return number < len(self._sources) - 2

    def _in_words(self, slot: Slot) -> str:
        number, key = slot
        return self._sources[number].where + (f"[{key!r}]" if self._is_group(number) else f" {key!r}")

    # A bucket.

    def note(self, members: Sequence[Members]) -> None:
        """A bucket was updated: what that has changed is noted, and taken back."""
        groups = tuple(map(bool, map(_IN_BUCKET, members)))
        changes = None if self._at_once is None else self._at_once.changes()
        if self._at_once is not None and changes is not None and changes == self._left.at_once.get(groups):
            self._at_once.put_back(changes[0])
            return
        changed = self._changed()
        # A group of which the bucket has no parameter need not be left as others leave it.
        asked = [n for n in range(len(self._sources)) if not self._is_group(n) or (n < len(groups) and groups[n])]
        disagreement = next((slot for n in asked for slot in self._left_otherwise(n, changed)), None)
        if not self._left.is_first:
            disagreement = next(filter(self._keeps_elsewhere, changed), disagreement)
        for number in asked:
            if number not in self._left.records:
                left = [slot for slot in changed if slot[0] == number]
                self._left.records[number] = {slot: AsItWas(self._value_at(slot), self._apart) for slot in left}
        self._take_back(changed)
        if self.wrote_unseen():
            raise UnsupportedOptimizerError(
                f"{self._name}: {WRITES_UNSEEN}. They were written, and are not put back. Update them in the loop, "
                f"after optimizer.step(). {STEPPED_WHOLE}"
            )
        if disagreement is not None:
            raise depends_on_buckets(self._name, self._in_words(disagreement))
        if changes is not None and all(map(is_immutable, changes[-1])):
            self._left.at_once[groups] = changes

    def _changed(self) -> list[Slot]:
        """Where a value is not what it was."""
        now, then = _values_in(self._sources), self._values
        if (  # all is as it was, where that can be said at once
            now.keys() == then.keys()
            and all(map(is_, now.values(), map(then.__getitem__, now)))
            and all(map(AsItWas.has_same_items, self._records.values()))
        ):
            return []
        return [slot for slot in now | then if not self._is_unchanged(slot, now.get(slot, ABSENT))]

    def _is_unchanged(self, slot: Slot, value: Any) -> bool:
        if slot in self._records:
            return self._records[slot].is_in(value)
        then = self._values.get(slot, ABSENT)
        return value is then or (type(value) is type(then) and bool(_as_held(value) == _as_held(then)))

    def _left_otherwise(self, number: int, changed: Iterable[Slot]) -> Iterator[Slot]:
        """Where the values of a source are not as the first bucket that was asked has left them; these are changed."""
        if (left := self._left.records.get(number)) is not None:
            yield from left.keys() ^ {slot for slot in changed if slot[0] == number}
            yield from (slot for slot, record in left.items() if not record.is_like(self._value_at(slot)))

    def _value_at(self, slot: Slot) -> Any:
        number, key = slot
        return self._sources[number].mapping.get(key, ABSENT)

    def _put(self, slot: Slot, value: Any) -> None:
        number, key = slot
        put_item(self._sources[number].mapping, key, value)

    def reset_left(self) -> None:
        """The next bucket is the first."""
        self._left = _Left({}, {}, self._left.mappings, self._left.is_first)

    def look_anew(self, left: _Left | None = None) -> _Left:
        """What is there is unchanged, and the next bucket is the first; or is to leave the same as those before that
        have ``left``. Returns what buckets have left until now."""
        before = self._left
        for record in self._records.values():
            record.look_anew()
        self.reset_left()
        self._left = left or self._left
        return before

    def is_first(self) -> None:
        """See ``_Left``."""
        self._left = self._left._replace(is_first=True)

    def _keeps_elsewhere(self, slot: Slot) -> bool:
        """Whether a bucket has put what it keeps by parameter into a mapping of its own: of the next bucket there would
        be nothing in it."""
        made = with_parameters(held_in([self._value_at(slot)], Mapping))
        there = [record.value for record in self._records.values()] if self.is_flat else self._left.mappings
        return any(all(mapping is not known for known in there) for mapping in made)

    def take_back(self) -> None:
        """The update has raised, or does not count."""
        self._take_back(self._changed())
        self.wrote_unseen()

    def _take_back(self, changed: Iterable[Slot]) -> None:
        for slot in changed:
            record = self._records.get(slot)
            self._put(slot, self._values.get(slot, ABSENT) if record is None else record.put_back())

    def wrote_unseen(self) -> bool:
        written = versions_of(self.unseen) != self._versions
        self.wrote_in_place |= written
        return written

    def look_at_unseen(self) -> None:
        self._versions = versions_of(self.unseen)

    # Also what is not looked into after each bucket.

    def look_deeper(self, optimizer: Optimizer) -> str | None:
        """All is to be put back (``put_all_back``). Returns what cannot be, in words."""
        self._shared = list(_values_elsewhere(optimizer))
        if (other := next(reached(optimizer, Optimizer), None)) is not None:
            return f"it holds another optimizer ({type(other).__name__})"
        for (number, key), record in self._records.items():
            if record.opaque is not None:
                return f"its {self._sources[number].where} {key!r} cannot be put back ({record.opaque})"
        return None

    def digest(self) -> Any:
        """Of all that it holds, however deep, and of the attributes of its classes."""
        shared = [getattr(owner, name, ABSENT) for owner, name, _ in self._shared]
        return digest_of_value([[source.own(source.mapping) for source in self._sources], shared])

    def put_all_back(self) -> None:
        self._take_back(_values_in(self._sources).keys() | self._values.keys())
        for owner, name, value in self._shared:
            if value is ABSENT:
                vars(owner).pop(name, None)
            elif getattr(owner, name, ABSENT) is not value:
                setattr(owner, name, value)

    # Between buckets, and around ``step()``.

    @property
    def is_as_found(self) -> bool:
        """Whether all is known to be as the step has found it; ``False``: that cannot be told at once."""
        return self._at_once is not None and self._at_once.are_same

    def changed(self, *, groups: bool = False) -> str | None:
        """An attribute that is not what it was, or a setting of ``groups``, too, in words; ``None``: none."""
        changed = [] if self.is_as_found else self._changed()
        return next((self._in_words(slot) for slot in changed if groups or not self._is_group(slot[0])), None)

    def require_unchanged(self, *, groups: bool = False) -> None:
        """Raise ``HyperparameterChangedError`` if ``optimizer.step()`` would find other attributes than buckets have
        found. Of the settings in groups ``SettingsGuard`` says so.

        Args:
            groups: another bucket is about to be stepped: what is changed in any group would be taken for what its
                update has made of that.
        """
        if (what := self.changed(groups=groups)) is not None:
            raise HyperparameterChangedError(
                f"{what} of {self._name} was changed after backward had already stepped parameters with what it was. "
                "Change it after optimizer.step() or before backward(), not in between"
            )

    def differs(self) -> str | None:
        """What ``step()`` has left otherwise than buckets have, in words; ``None``: nothing."""
        changed = self._changed()
        otherwise = (slot for n in self._left.records for slot in self._left_otherwise(n, changed))
        return next(map(self._in_words, otherwise), None)

    def commit(self, *, rest: Sequence[int] | None = None) -> None:
        """What buckets have left is what the step leaves. Where none was asked, what is there stands.

        Args:
            rest: the loop's own ``step()`` is still to come, and finds gradients in these groups: what it moves by
                itself, such as a count, is left to it. ``None``: it has returned.
        """
        left = {slot: record for records in self._left.records.values() for slot, record in records.items()}
        changed = self._changed() if self._left.records else []
        if rest is None:
            self._moved_by_step = {slot for slot in changed if slot in left and left[slot].is_in(self._value_at(slot))}
        else:
            left = {slot: record for slot, record in left.items() if not self._moves(slot, rest)}
        self._take_back([slot for slot in changed if slot[0] in self._left.records and slot not in left])
        for slot, record in left.items():
            value = record.put_back()
            self._put(slot, value)
            if is_immutable(value):  # else the next step begins anew
                self._values[slot] = value
                self._records.pop(slot, None)  # of what was there

    def _moves(self, slot: Slot, rest: Sequence[int]) -> bool:
        """Whether ``step()`` moves it as each bucket has, given gradients in these groups."""
        return slot in self._moved_by_step or (slot[0] in rest if self._is_group(slot[0]) else bool(rest))

    def end_step(self) -> None:
        # Attributes may refer to the model, which nothing here must keep.
        self._sources = [_Source(where, {}, own) for where, _, own in self._sources] if self.is_flat else []
        if not self.is_flat:
            self._values, self._records = {}, {}
        self.unseen, self._versions, self._shared = [], [], []
        self._at_once = None
        self._left = _Left({}, {})


def _without(names: Container[str], mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in names}


def _memory_of_parameters(optimizer: Optimizer) -> frozenset[int]:
    """The memory of parameters and of all tensors in their state."""
    tensors = [*parameters_of(optimizer)]
    ids = set(map(id, tensors))
    # Not looked up: a state that has the id() of a parameter as a key raises, for torch compares the two.
    for key, entry in optimizer.state.items():
        if id(key) in ids:
            tensors += held_in([entry], torch.Tensor)
    return frozenset(map(_memory, tensors))


def _memory(tensor: torch.Tensor) -> int:
    """Which memory it has, where torch tells; else which tensor it is."""
    return storage_of(tensor) or -id(tensor)


def depends_on_buckets(optimizer: str, what: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{optimizer} updates {what} in a way that depends on which parameters step together. {STEPPED_WHOLE}"
    )


def _values_elsewhere(optimizer: Optimizer) -> Iterator[tuple[Any, str, Any]]:
    """What it counts in its classes, in slots, and under names that torch's schedulers use, too."""
    for cls in classes_of(optimizer):
        for name, value in vars(cls).items():
            if is_immutable(value) and not name.startswith("__"):
                yield cls, name, value
    for name, value in (attributes_of(optimizer) or {}).items():
        if name not in vars(optimizer):
            yield optimizer, name, value
    for name in OF_SCHEDULERS:
        yield optimizer, name, vars(optimizer).get(name, ABSENT)


WRITES_UNSEEN = (
    "its step() writes large tensors to which it refers, or those of a module (an average of the weights?): bucket by "
    "bucket that would happen once per bucket"
)
