"""What a foreign optimizer holds beside parameters and their state: settings, attributes, state under names.

What a bucket's update has made of it is noted, and taken back, so that each bucket of a step finds what the first one
has found. All buckets must leave the same, which is put in when the step is committed.
"""

import re
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from enum import Enum
from functools import partial
from itertools import chain, compress, count, repeat
from operator import attrgetter, is_, is_not, methodcaller
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.contents import Contents, Restore, digest_of_value, put_dict
from instep._optim.kinds import (
    NO_SETTINGS,
    OF_SCHEDULERS,
    STEPPED_WHOLE,
    beside_parameters,
    classes_of,
    read_by_update,
)
from instep._optim.proved import FREE
from instep._optim.reached import in_modules
from instep._optim.shadow import GroupLayout, Members, parameters_of
from instep._optim.values import (
    ABSENT,
    alike,
    attributes_of,
    compiled_from,
    fingerprint,
    held_in,
    is_closed,
    is_immutable,
    is_of_torch,
    reachable_values,
    settings_in,
    storage_of,
    unlike,
)
from instep._torch.versions import versions_of
from instep.errors import HyperparameterChangedError, UnsupportedOptimizerError

MOST_BYTES = 4 * 1024 * 1024
"""Tensors that are larger are not copied in each step: it is found out whether an update writes them."""


def _as_held(value: Any) -> Any:
    # Tensors are copied, to be put back. So they are compared by what they hold: torch counts that write, too.
    return fingerprint(value, elements=MOST_BYTES // 4)


class _Holdings(Contents):
    """Copies values of an object that an update may change, to put them back.

    Args:
        apart: memory that is put back by others, or by nobody: that of parameters and their state.

    Attributes:
        large: tensors that were not copied.
    """

    def __init__(self, apart: Container[int]) -> None:
        super().__init__(host=False)
        self.large: list[torch.Tensor] = []
        self._apart = apart

    def of(self, value: Any) -> Restore:
        if isinstance(value, torch.Tensor):
            if _memory(value) in self._apart:
                return lambda: value  # put back, it would take the updates of other buckets with it
            if value.nbytes > MOST_BYTES:
                self.large.append(value)
                return lambda: value
        elif is_closed(value) or is_of_torch(value) or isinstance(value, _INERT):
            return lambda: value  # an update does not change it, or it is looked at in another way
        elif isinstance(value, dict) and id(value) not in self._known:
            self.known(value)
            items = {key: self.of(item) for key, item in value.items() if not isinstance(key, torch.Tensor)}
            # What it has under parameters is taken for state of these.
            self._known[id(value)] = partial(put_dict, value, items, (torch.Tensor,))
            return self._known[id(value)]
        elif isinstance(value, FunctionType):
            value = compiled_from(value)
        return super().of(value)

    def _object(self, value: Any) -> Restore:
        if hasattr(type(value), "__del__"):
            raise TypeError(f"a {type(value).__name__}, which has a finalizer")
        return super()._object(value)


_INERT = (weakref.ref, BuiltinFunctionType, CodeType, Enum, re.Pattern)


def _items(held: Any) -> list[Any]:
    """With the keys of a dict."""
    return [*chain.from_iterable(held.items())] if type(held) is dict else [*held]


class _Changes(NamedTuple):
    """Which of some values are others by now, by number; of which types, which are compared first, as a tensor compares
    itself to any number; and what they are."""

    at: list[int]
    types: list[type]
    values: list[Any]


class _AtOnce:
    """The values of some dicts and lists, one after the other: whether all are the very same objects takes one pass.

    Args:
        state: of which only the size is looked at: an entry may come under a name.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]], lists: Sequence[list[Any]], state: Sized) -> None:
        self._dicts, self._lists, self._state = dicts, lists, state
        self._keys = [*chain.from_iterable(dicts)]
        self._sizes = self._sizes_now()
        self._values = self._now()
        self._places: list[tuple[Any, Any]] = []  # of each, where it is put back, once one is

    def _sizes_now(self) -> list[int]:
        # An item may move from the end of one to the beginning of the next.
        return [len(self._state), *map(len, self._dicts), *map(len, self._lists)]

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(_VALUES, self._dicts)), *chain.from_iterable(self._lists)]

    @property
    def _keys_are_same(self) -> bool:
        return self._sizes_now() == self._sizes and all(map(is_, chain.from_iterable(self._dicts), self._keys))

    @property
    def are_same(self) -> bool:
        return self._keys_are_same and all(map(is_, self._now(), self._values))

    def changes(self) -> _Changes | None:
        """``None``: there are values more, or fewer, or under other keys."""
        if not self._keys_are_same:
            return None
        now = self._now()
        at = [*compress(count(), map(is_not, now, self._values))]
        values = [*map(now.__getitem__, at)]
        return _Changes(at, [*map(type, values)], values)

    def put_back(self, at: Iterable[int]) -> None:
        if not self._places:
            self._places = [(held, key) for held in self._dicts for key in held]
            self._places += [(held, number) for held in self._lists for number in range(len(held))]
        for number in at:
            held, key = self._places[number]
            held[key] = self._values[number]


_VALUES: Callable[[dict[Any, Any]], Iterable[Any]] = methodcaller("values")
_IN_BUCKET: Callable[[Members], list[int]] = attrgetter("in_bucket")


class _Place:
    """One mapping with values of the object, some of which an update may change.

    Args:
        where: in words.
        mapping: the user's own.
        own: those of its items that count.
        apart: see ``_Holdings``.

    Attributes:
        large: tensors that are not copied.
        opaque: by key, why a value could not be put back, in words.
    """

    def __init__(
        self,
        where: str,
        mapping: MutableMapping[Any, Any],
        own: Callable[[Mapping[Any, Any]], dict[Any, Any]],
        apart: Container[int] = frozenset(),
    ) -> None:
        self.where = where
        self.mapping = mapping
        self.opaque: dict[Any, str] = {}
        self._own = own
        self._apart = apart
        self._values = own(mapping)
        self._size = len(mapping)
        self._looks: dict[Any, Any] = {}
        self._flat: dict[Any, list[Any]] = {}  # what is in dicts and lists of values that cannot be changed in place
        for key, value in self._values.items():
            if not is_immutable(value):
                self._looks[key] = _as_held(value)
                items = _items(value) if type(value) in (dict, list) else None
                if items is not None and all(is_immutable(i) or isinstance(i, torch.nn.Parameter) for i in items):
                    self._flat[key] = items
        holdings = _Holdings(apart)
        self._put_back = {key: self._kept(holdings, key) for key in self._looks}
        self.large = holdings.large
        self.reset_left()

    def begin_again(self, mapping: MutableMapping[Any, Any]) -> bool:
        """Another step begins, whose ``mapping`` this is. ``False``: somebody has changed it since the last one has
        ended, other than by such numbers as a scheduler sets."""
        now, then = self._own(mapping), self._values
        if now.keys() != then.keys():
            return False
        for key in compress(now, map(is_not, now.values(), map(then.__getitem__, now))):
            if key not in FREE or key in self._looks or not is_immutable(now[key]):
                return False
        self.mapping, self._values, self._size = mapping, now, len(mapping)
        return all(map(self._is_flat_as_it_was, self._flat))

    def let_go(self) -> None:
        """The step is over: nothing is kept that refers to a tensor, where all ``is_flat``."""
        self.mapping = {}
        self.reset_left()

    @property
    def is_flat(self) -> bool:
        """Whether all values are numbers and the like, and dicts and lists of these."""
        return len(self._flat) == len(self._looks) and all(map(is_immutable, chain.from_iterable(self._flat.values())))

    @property
    def flat(self) -> list[Any]:
        """These dicts and lists."""
        return [*map(self._values.__getitem__, self._flat)]

    def reset_left(self) -> None:
        self._left: dict[Any, Any] | None = None  # what buckets have left, as ``fingerprint`` sees it
        self._put_left: dict[Any, Restore] = {}
        self._taken_out: list[Any] = []

    def _is_flat_as_it_was(self, key: Any) -> bool:
        now, then = _items(self._values[key]), self._flat[key]
        return len(now) == len(then) and all(map(is_, now, then))

    def _kept(self, holdings: _Holdings, key: Any) -> Restore:
        value = self.mapping[key]
        try:
            return holdings.of(value)
        except Exception as error:
            self.opaque[key] = f"{type(error).__name__}: {error}"
            return lambda: value

    def changed(self) -> list[Any]:
        """The keys whose value is not what it was."""
        if (  # all is as it was, where that can be said at once
            len(self._flat) == len(self._looks)
            and len(self.mapping) == self._size
            and all(map(is_, map(self.mapping.get, self._values, repeat(ABSENT)), self._values.values()))
            and all(map(self._is_flat_as_it_was, self._flat))
        ):
            return []
        now, then, looks = self._own(self.mapping), self._values, self._looks
        keys = now.keys() | then.keys() if now.keys() != then.keys() else now
        others = (key for key in keys if key in looks or now.get(key, ABSENT) is not then.get(key, ABSENT))
        return [key for key in others if not self._is_unchanged(key, now.get(key, ABSENT))]

    def _is_unchanged(self, key: Any, value: Any) -> bool:
        then = self._values.get(key, ABSENT)
        if key in self._flat:
            return value is then and self._is_flat_as_it_was(key)
        if key in self._looks:
            return value is then and alike(_as_held(value), self._looks[key])
        return value is then or (type(value) is type(then) and alike(value, then))

    def digest(self) -> Any:
        """Of all that it holds, however deep."""
        return digest_of_value(self._own(self.mapping))

    def put_all_back(self) -> None:
        """Also what ``changed`` does not look into."""
        self.take_back(self._own(self.mapping).keys() | self._values.keys())

    def take_back(self, changed: Iterable[Any]) -> None:
        for key in changed:
            if key not in self._values:
                self.mapping.pop(key, None)
            else:
                self.mapping[key] = self._put_back[key]() if key in self._put_back else self._values[key]
                # Put back, it was written: of a large tensor a look knows how often. And it holds what is another's.
                if key in self._looks:
                    self._looks[key] = _as_held(self.mapping[key])
                if key in self._flat:
                    self._flat[key] = _items(self.mapping[key])

    def note(self, changed: Sequence[Any]) -> Any:
        """A bucket's update has ``changed`` these. Returns the first key that another bucket has left otherwise;
        ``ABSENT``: none."""
        left = self._looked_at(changed)
        if self._left is not None:
            return next(unlike(left, self._left), ABSENT)
        holdings = _Holdings(self._apart)
        self._left, self._taken_out = left, [key for key in changed if key not in self.mapping]
        self._put_left = {key: self._kept(holdings, key) for key in changed if key in self.mapping}
        return ABSENT

    def _looked_at(self, changed: Iterable[Any]) -> dict[Any, Any]:
        return {key: _as_held(self.mapping[key]) if key in self.mapping else ABSENT for key in changed}

    def commit(self) -> None:
        """What buckets have left is what the step leaves. Without one, what is there stands."""
        if self._left is None:
            return
        self.take_back(set(self.changed()) - self._left.keys())
        for key, put in self._put_left.items():
            self.mapping[key] = put()
            if is_immutable(self.mapping[key]):  # else the next step begins anew
                self._values[key] = self.mapping[key]
                for known in (self._looks, self._flat, self._put_back):  # of what was there
                    known.pop(key, None)
        for key in self._taken_out:
            self.mapping.pop(key, None)

    def differs(self) -> Any:
        """The first key that is not as buckets have left it; ``ABSENT``: there is none, or no bucket was asked."""
        return ABSENT if self._left is None else next(unlike(self._looked_at(self.changed()), self._left), ABSENT)


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
        self._groups: list[_Place] = []
        self._others: list[_Place] = []
        self._at_once: _AtOnce | None = None
        # What was changed by a bucket that was noted, by which groups had parameters in it.
        self._noted: dict[tuple[bool, ...], _Changes] = {}
        self.unseen: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._shared: list[tuple[Any, str, Any]] = []
        self.wrote_in_place = False
        self.is_flat = self.was_set = False

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        dicts: list[dict[Any, Any]] = [*optimizer.param_groups, vars(optimizer)]
        mappings: list[MutableMapping[Any, Any]] = [*dicts, optimizer.state]
        is_known = len(mappings) == len(self.places) and all(
            place.begin_again(mapping) for place, mapping in zip(self.places, mappings, strict=True)
        )
        self.was_set = not is_known and bool(self.places)
        if not is_known:
            self._begin(optimizer, layout)
        self._noted = {}
        self._at_once = None
        if self.is_flat:
            flat = [held for place in self.places for held in place.flat]
            lists = [held for held in flat if type(held) is list]
            own = [held for held in flat if type(held) is dict]
            self._at_once = _AtOnce([*dicts, *own], lists, optimizer.state)

    def _begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        self._groups = [
            _Place(f"param_groups[{number}]", group, settings_in) for number, group in enumerate(optimizer.param_groups)
        ]
        attributes, read = vars(optimizer), read_by_update(optimizer)
        named = beside_parameters(optimizer.state)
        has_tensors = any(isinstance(value, torch.Tensor) for value in reachable_values([read, named], optimizer))
        apart = _memory_of_parameters(optimizer) if has_tensors else frozenset()
        left_out = (attributes.keys() - read.keys()) | NO_SETTINGS
        self._others = [
            _Place("attribute", attributes, partial(_without, left_out), apart),
            _Place("state", optimizer.state, beside_parameters, apart),
        ]
        large = (tensor for place in self.places for tensor in place.large)
        self.unseen = [*large, *in_modules(optimizer, layout)]
        self.look_at_unseen()
        self.is_flat = (
            not (self.unseen or named or left_out - NO_SETTINGS)
            and all(type(group) is dict for group in optimizer.param_groups)
            and all(place.is_flat for place in self.places)
        )

    def look_deeper(self, optimizer: Optimizer) -> str | None:
        """All is to be put back: also what is not looked into in each step. Returns what cannot be, in words."""
        self._shared = list(_values_elsewhere(optimizer))
        reached = reachable_values([read_by_update(optimizer)], optimizer)
        if (other := next((value for value in reached if isinstance(value, Optimizer)), None)) is not None:
            return f"it holds another optimizer ({type(other).__name__})"
        opaque = ((place.where, key, why) for place in self.places for key, why in place.opaque.items())
        return next((f"its {where} {key!r} cannot be put back ({why})" for where, key, why in opaque), None)

    @property
    def places(self) -> Sequence[_Place]:
        return *self._groups, *self._others

    def note(self, members: Sequence[Members]) -> None:
        """A bucket was updated: what that has changed is noted, and taken back."""
        groups = tuple(map(bool, map(_IN_BUCKET, members)))
        changes = None if self._at_once is None else self._at_once.changes()
        if self._at_once is not None and changes is not None and changes == self._noted.get(groups):
            self._at_once.put_back(changes.at)
            return
        disagreement: str | None = None
        for number, place in enumerate(self.places):
            changed = place.changed()
            # A group of which the bucket has no parameter need not be left as others leave it.
            is_group = number < len(self._groups)
            is_asked = not is_group or (number < len(members) and bool(members[number].in_bucket))
            if is_asked and (key := place.note(changed)) is not ABSENT:
                disagreement = disagreement or place.where + (f"[{key!r}]" if is_group else f" {key!r}")
            place.take_back(changed)
        if self.wrote_unseen():
            raise UnsupportedOptimizerError(
                f"{self._name}: {WRITES_UNSEEN}. They were written, and are not put back. Update them in the loop, "
                f"after optimizer.step(). {STEPPED_WHOLE}"
            )
        if disagreement is not None:
            raise depends_on_buckets(self._name, disagreement)
        if changes is not None and all(map(is_immutable, changes.values)):
            self._noted[groups] = changes

    @property
    def is_as_found(self) -> bool:
        """Whether all is known to be as the step has found it; ``False``: that cannot be told at once."""
        return self._at_once is not None and self._at_once.are_same

    def reset_left(self) -> None:
        """The next bucket is the first."""
        self._noted = {}
        for place in self.places:
            place.reset_left()

    def take_back(self) -> None:
        """The update has raised, or does not count."""
        for place in self.places:
            place.take_back(place.changed())
        self.wrote_unseen()

    def digest(self) -> Any:
        """Of all that it holds, and of the attributes of its classes."""
        places = [place.digest() for place in self.places]
        return places, [getattr(owner, name, ABSENT) for owner, name, _ in self._shared]

    def look_at_unseen(self) -> None:
        self._versions = versions_of(self.unseen)

    def put_all_back(self) -> None:
        """Also what is not looked into after each bucket (``look_deeper``)."""
        for place in self.places:
            place.put_all_back()
        for owner, name, value in self._shared:
            if value is ABSENT:
                vars(owner).pop(name, None)
            elif getattr(owner, name, ABSENT) is not value:
                setattr(owner, name, value)

    def wrote_unseen(self) -> bool:
        written = versions_of(self.unseen) != self._versions
        self.wrote_in_place |= written
        return written

    def require_unchanged(self) -> None:
        """Raise ``HyperparameterChangedError`` if ``optimizer.step()`` would find other attributes than buckets have
        found. Of the settings in groups ``SettingsGuard`` says so."""
        self._require(self.changed())

    def require_as_found(self) -> None:
        """The same, where another bucket is about to be stepped: what is changed in any group would be taken for what
        its update has made of that."""
        self._require(self.changed() or self._changed_in(self._groups))

    def _require(self, what: str | None) -> None:
        if what is not None:
            raise HyperparameterChangedError(
                f"{what} of {self._name} was changed after backward had already stepped parameters with what it was. "
                "Change it after optimizer.step() or before backward(), not in between"
            )

    def changed(self) -> str | None:
        """An attribute that is not what it was, in words; ``None``: none."""
        return None if self.is_as_found else self._changed_in(self._others)

    def _changed_in(self, places: Iterable[_Place]) -> str | None:
        return next((f"{place.where} {key!r}" for place in places for key in place.changed()), None)

    def differs(self) -> str | None:
        """What ``step()`` has left otherwise than buckets have, in words; ``None``: nothing."""
        for place in self.places:
            if (key := place.differs()) is not ABSENT:
                return f"{place.where} {key!r}"
        return None

    def commit(self) -> None:
        for place in self.places:
            place.commit()

    def end_step(self) -> None:
        # Attributes may refer to the model, which nothing here must keep.
        if not self.is_flat:
            self._groups, self._others = [], []
        for place in self.places:
            place.let_go()
        self.unseen, self._versions, self._shared = [], [], []
        self._at_once, self._noted = None, {}


def _without(names: Container[str], mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in names}


def _memory_of_parameters(optimizer: Optimizer) -> frozenset[int]:
    """The memory of parameters and of all tensors in their state."""
    tensors = [*parameters_of(optimizer)]
    ids = set(map(id, tensors))
    # Not looked up: a state that has the id() of a parameter as a key raises, for torch compares the two.
    for key, entry in optimizer.state.items():
        if id(key) in ids:
            tensors += held_in(entry, (torch.Tensor,))
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
