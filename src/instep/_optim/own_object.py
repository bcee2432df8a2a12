"""A foreign optimizer steps a bucket as itself: by the user's own object, whose groups hold the bucket for one call.

An optimizer that is not torch's own may keep anything: functions over itself, handles that its finalizer gives back,
compiled methods. A copy of such an object is another one, and a copy that reaches the object, or is finalized, does
harm. So nothing is copied. For the length of one call

- each group's ``"params"`` holds the members of the bucket alone, in the user's own dict. Groups without a member stay,
  and are empty. Other threads go on to see all parameters (``_Params``), and the handlers of signals wait;
- the object's hooks are set aside: they are owed to the one ``step()`` of the loop, and ``super().step()`` calls them;
- methods that need all parameters (``state_dict()``, ``add_param_group()``) see them: on another thread they wait.

What the call has made of settings, attributes and state beside that of parameters is noted and taken back
(``Beside``), so that each bucket of a step finds what the first one has found. All buckets must leave the same: that
is put into the object when the step is committed, in place of what ``step()`` without gradients has made of it.
"""

import inspect
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping, Sequence
from enum import Enum
from functools import partial
from itertools import chain, repeat
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.belongings import BelongingsGuard
from instep._optim.contents import Contents, Restore, digest_of_value, put_dict
from instep._optim.guards import Entry
from instep._optim.kinds import (
    NO_SETTINGS,
    OF_SCHEDULERS,
    STEP_HOOKS,
    STEPPED_WHOLE,
    beside_parameters,
    classes_of,
    read_by_update,
)
from instep._optim.overrides import MANAGER, overrides_in_bucket
from instep._optim.random_numbers import Generators
from instep._optim.shadow import CallUpdate, GroupLayout, Members, parameters_of, without_autocast
from instep._optim.stages import Update
from instep._optim.values import (
    ABSENT,
    address_of,
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
from instep._torch.versions import memory_of, versions_of
from instep.errors import HyperparameterChangedError, UnsupportedOptimizerError


class _Params(list[Any]):
    """A group's parameters while a bucket is stepped: on the thread that steps those of the bucket, on every other one
    all of the group.

    The list itself holds the bucket's: torch's functions read a list without asking its methods.
    """

    __slots__ = ("_thread", "names", "whole")

    def __init__(self, members: Iterable[Any], whole: list[Any], names: list[str] | None) -> None:
        super().__init__(members)
        self._thread = threading.get_ident()
        self.whole = whole
        self.names = names  # of all

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)


def _of_thread(name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(list, name)

    def seen(self: _Params, *args: Any) -> Any:
        return method(self if threading.get_ident() == self._thread else self.whole, *args)

    return seen


for _name in ("__iter__", "__len__", "__getitem__", "__contains__", "__reversed__", "__eq__", "__add__", "__repr__"):
    setattr(_Params, _name, _of_thread(_name))
for _name in ("__mul__", "__rmul__", "copy", "count", "index"):
    setattr(_Params, _name, _of_thread(_name))
_Params.__radd__ = lambda self, other: other + list(self)  # type: ignore[attr-defined]


class Groups:
    """The list of an optimizer's groups, as it is now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._list = optimizer.param_groups
        self._groups = list(self._list)

    def put_back(self) -> bool:
        """Whether it was replaced, or holds others."""
        optimizer, groups = self._optimizer, self._groups
        same = len(self._list) == len(groups) and all(map(is_, self._list, groups))
        if same and optimizer.param_groups is self._list:
            return False
        self._list[:] = groups
        optimizer.param_groups = self._list
        return True


_OF_ALL = ("state_dict", "load_state_dict", "add_param_group", "zero_grad", "__getstate__")
"""The methods of an optimizer that need all of its parameters."""


class OwnObject:
    """Steps buckets of one foreign optimizer by the object itself.

    Args:
        name: of the optimizer.

    Attributes:
        beside: what the object holds beside parameters and their state.
        belongings: looks at what is kept of single parameters.
        notes: whether what an update has made of other values is what the step leaves.
        returned: what the last ``step()`` has returned.
        wrote: whether the last ``step()`` without notes has written parameters that it was given.
        gave_back: whether an update of this step has given back memory of an accelerator that it has read.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Of an accelerator's backward each device has a thread, and two threads must not exchange the groups at once.
        self._lock = threading.RLock()
        self._draws: Generators | None = None
        self._instead: dict[str, Any] = {}
        self._reached: list[torch.Tensor] = []
        self.beside = Beside(name)
        self.belongings = BelongingsGuard(name)
        self.notes = True
        self.returned: Any = None
        self.wrote = self.gave_back = False
        self._runs_on: int | None = None  # the thread on which an update runs
        self._used_others = False

    def refuse_use(self) -> None:
        """A parameter that was stepped before is about to be used: raise, if it is an update that uses it."""
        if self._runs_on == threading.get_ident():
            self._used_others = True
            raise _refused(self._name, _USES_OTHERS)

    def begin(self, optimizer: Optimizer, layout: GroupLayout, *, may_draw: bool, in_parts: bool) -> None:
        """A step begins, with its first bucket.

        Args:
            may_draw: each parameter's update draws from generators that are seeded for it.
            in_parts: others see to it that no other parameter is used.
        """
        devices = {memory_of(p).device for p in parameters_of(optimizer)}
        self._draws = None if may_draw else Generators.of(optimizer, devices, torchs_alone=True)
        # No hooks, and methods that see all parameters. Made once a step: a bucket has little time.
        hooks: dict[str, Any] = {name: OrderedDict() for name in STEP_HOOKS if name in vars(optimizer)}
        self._instead = hooks | {name: partial(self._of_all, optimizer, name) for name in _OF_ALL}
        self._reached = [] if in_parts else reached_by(optimizer, layout)
        self.beside.begin(optimizer, layout)

    def step(self, update: Update, call: CallUpdate) -> None:
        """Update the bucket by the object's own ``step()``. What that has made of other values is noted, and taken
        back.

        Args:
            call: calls the object's update.

        Raises:
            UnsupportedOptimizerError: another bucket has left other values, or random numbers were drawn.
        """
        optimizer, tensors, state = update.optimizer, update.owned, update.optimizer.state
        # With ``shard_state`` a rank steps whole parameters by aliases, whose gradients are its own.
        lent = [(p, p.grad, alias.grad) for p, alias in zip(tensors, update.tensors, strict=True) if alias is not p]
        # Of a CPU nobody reads later what was given back.
        on_cpu = memory_of(tensors[0]).device.type == "cpu"
        places = None if on_cpu else StorageAddresses(tensors, map(state.get, tensors))
        try:
            for parameter, _, gradient in lent:
                parameter.grad = gradient
            with self._lock:  # and handlers of signals wait for that of the step, or of its calls
                if not self.belongings.rests:
                    # By a hook of this backward, between two buckets: taken back after this one, it would be lost.
                    self.beside.require_unchanged()
                self._step(optimizer, update.members, tensors, call)
        finally:
            for parameter, gradient, _ in lent:
                parameter.grad = gradient
            if places is not None:
                self.gave_back |= places.were_left(map(state.get, tensors))

    def _step(self, optimizer: Optimizer, members: Sequence[Members], tensors: Sequence[Any], call: CallUpdate) -> None:
        draws, groups, state = self._draws, Groups(optimizer), optimizer.state
        entries = dict(state)
        ids = set(map(id, tensors))
        others = [p for p in self._reached if id(p) not in ids]
        versions = versions_of(others)
        if draws is not None:
            draws.begin()
        try:
            given = [] if self.notes else versions_of(tensors)
            self.returned = self._call(optimizer, members, tensors, call)
            self.wrote = not self.notes and versions_of(tensors) != given
            if draws is not None and draws.have_advanced():
                raise _refused(self._name, _DRAWS)
        except BaseException:
            if draws is not None:
                draws.have_advanced()  # to be drawn again, if the update runs again
            groups.put_back()
            self.beside.take_back()
            raise
        if self.notes:
            self.beside.note(members)
        else:
            self.beside.take_back()
        if versions_of(others) != versions:
            raise _refused(self._name, _WRITES_OTHERS)
        if optimizer.state is not state or len(state) < len(entries):
            optimizer.state = state
            lost = {key: entry for key, entry in entries.items() if id(key) not in ids and key not in state}
            state.update(lost)
            if lost:
                raise _refused(self._name, _TAKES_STATE_OUT)
        if groups.put_back():
            raise depends_on_buckets(self._name, "its list of param_groups")

    def end_step(self) -> None:
        self.beside.end_step()
        self.belongings.end_step()
        self.returned, self.gave_back, self._instead, self._reached, self._draws = None, False, {}, [], None

    def _call(self, optimizer: Optimizer, members: Sequence[Members], tensors: Sequence[Any], call: CallUpdate) -> Any:
        attributes, groups = vars(optimizer), optimizer.param_groups
        instead, whole = self._instead, _lists_of(groups)
        if (overrides := overrides_in_bucket(optimizer, (m.in_group for m in members))) is not None:
            instead = {**instead, MANAGER: overrides}
        before = [(name, attributes.get(name, ABSENT)) for name in instead]
        try:
            attributes.update(instead)
            _put(_members_of(whole, members, tensors))
            self._runs_on, self._used_others = threading.get_ident(), False
            with torch.no_grad(), without_autocast(tensors[0].device.type):
                returned = call(optimizer, members)
            if self._used_others:  # and the update has caught the error
                raise _refused(self._name, _USES_OTHERS)
            return returned
        finally:
            self._runs_on = None
            _put(whole)
            for name, value in before:
                if value is ABSENT:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value
            # A hook that was registered while a bucket was stepped, on another thread, say, is the object's.
            for name in STEP_HOOKS:
                if registered := self._instead.get(name):
                    attributes[name].update(registered)
                    registered.clear()

    def _of_all(self, optimizer: Optimizer, name: str, *args: Any, **named: Any) -> Any:
        """A method that needs all parameters is called while a bucket is stepped: by the update itself, or on another
        thread, which waits here until the bucket is."""
        with self._lock:
            now = _lists_of(optimizer.param_groups)
            if name == "add_param_group" and any(isinstance(params, _Params) for _, params, _ in now):
                raise depends_on_buckets(self._name, "its list of param_groups")  # by the update itself: before it does
            if name == "zero_grad":  # an update clears the gradients of the bucket, as it has those of no other
                return getattr(type(optimizer), name)(optimizer, *args, **named)
            # Of another thread these are all again: there is nothing to exchange.
            _put((g, p.whole, p.names) if isinstance(p, _Params) else (g, p, names) for g, p, names in now)
            try:
                return getattr(type(optimizer), name)(optimizer, *args, **named)
            finally:
                _put(now)


_Lists = tuple[dict[str, Any], list[Any], "list[str] | None"]
"""A group, with its parameters and, where it has them, their names."""


def _lists_of(groups: Iterable[dict[str, Any]]) -> list[_Lists]:
    return [(group, group["params"], group.get("param_names")) for group in groups]


def _put(lists: Iterable[_Lists]) -> None:
    for group, params, names in lists:
        group["params"] = params
        if names is not None:
            group["param_names"] = names


def _members_of(whole: Iterable[_Lists], members: Sequence[Members], tensors: Sequence[Any]) -> Iterator[_Lists]:
    """The groups with ``tensors`` alone."""
    for number, (group, params, names) in enumerate(whole):
        # A group that was added since the step began holds none of them.
        in_bucket, in_group = members[number] if number < len(members) else ((), ())
        some = None if names is None else [names[place] for place in in_group]
        yield group, _Params([tensors[i] for i in in_bucket], params, names), some


# What the object holds beside the parameters and their state: settings, attributes, state under names.


MOST_BYTES = 4 * 1024 * 1024
"""Tensors that are larger are not copied in each step: it is found out whether an update writes them."""


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


class _Place:
    """One mapping with values of the object, some of which an update may change.

    Args:
        where: in words.
        mapping: the user's own.
        own: which of its items.
        apart: see ``_Holdings``.

    Attributes:
        large: tensors that are not copied.
        opaque: by key, why a value could not be put back, in words.
    """

    def __init__(
        self,
        where: str,
        mapping: MutableMapping[Any, Any],
        own: Callable[[], dict[Any, Any]],
        apart: Container[int] = frozenset(),
    ) -> None:
        self.where = where
        self.mapping = mapping
        self.opaque: dict[Any, str] = {}
        self._own = own
        self._apart = apart
        self._values = own()
        self._size = len(mapping)
        self._looks: dict[Any, Any] = {}
        self._flat: dict[Any, list[Any]] = {}  # what is in dicts and lists of values that cannot be changed in place
        for key, value in self._values.items():
            if not is_immutable(value):
                self._looks[key] = fingerprint(value)
                items = _items(value) if type(value) in (dict, list) else None
                if items is not None and all(is_immutable(i) or isinstance(i, torch.nn.Parameter) for i in items):
                    self._flat[key] = items
        holdings = _Holdings(apart)
        self._put_back = {key: self._kept(holdings, key) for key in self._looks}
        self.large = holdings.large
        self.reset_left()

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
        now = self._own()
        keys = now.keys() | self._values.keys() if now.keys() != self._values.keys() else now
        return [key for key in keys if not self._is_unchanged(key, now.get(key, ABSENT))]

    def _is_unchanged(self, key: Any, value: Any) -> bool:
        then = self._values.get(key, ABSENT)
        if key in self._flat:
            return value is then and self._is_flat_as_it_was(key)
        if key in self._looks:
            return value is then and alike(fingerprint(value), self._looks[key])
        return value is then or (type(value) is type(then) and alike(value, then))

    def digest(self) -> Any:
        """Of all that it holds, however deep."""
        return digest_of_value(self._own())

    def put_all_back(self) -> None:
        """Also what ``changed`` does not look into."""
        self.take_back(self._own().keys() | self._values.keys())

    def take_back(self, changed: Iterable[Any]) -> None:
        for key in changed:
            if key not in self._values:
                self.mapping.pop(key, None)
            else:
                self.mapping[key] = self._put_back[key]() if key in self._put_back else self._values[key]
                # Put back, it was written: of a large tensor a look knows how often. And it holds what is another's.
                if key in self._looks:
                    self._looks[key] = fingerprint(self.mapping[key])
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
        return {key: fingerprint(self.mapping[key]) if key in self.mapping else ABSENT for key in changed}

    def commit(self) -> None:
        """What buckets have left is what the step leaves. Without one, what is there stands."""
        if self._left is None:
            return
        self.take_back(set(self.changed()) - self._left.keys())
        for key, put in self._put_left.items():
            self.mapping[key] = put()
        for key in self._taken_out:
            self.mapping.pop(key, None)

    def differs(self) -> Any:
        """The first key that is not as buckets have left it; ``ABSENT``: there is none, or no bucket was asked."""
        return ABSENT if self._left is None else next(unlike(self._looked_at(self.changed()), self._left), ABSENT)


class Beside:
    """What a foreign optimizer holds beside parameters and their state, as a step begins with it.

    Attributes:
        unseen: tensors that it reaches, and that are not put back here.
        wrote_in_place: whether one of these was written.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._groups: list[_Place] = []
        self._others: list[_Place] = []
        self.unseen: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._shared: list[tuple[Any, str, Any]] = []
        self.wrote_in_place = False

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        self._groups = [
            _Place(f"param_groups[{number}]", group, partial(settings_in, group))
            for number, group in enumerate(optimizer.param_groups)
        ]
        attributes, read = vars(optimizer), read_by_update(optimizer)
        named = partial(beside_parameters, optimizer.state)
        has_tensors = any(isinstance(value, torch.Tensor) for value in reachable_values([read, named()], optimizer))
        apart = _memory_of_parameters(optimizer) if has_tensors else frozenset()
        left_out = (attributes.keys() - read.keys()) | NO_SETTINGS
        settings = lambda: {name: value for name, value in attributes.items() if name not in left_out}  # noqa: E731
        self._others = [
            _Place("attribute", attributes, settings, apart),
            _Place("state", optimizer.state, named, apart),
        ]
        large = (tensor for place in self.places for tensor in place.large)
        self.unseen = [*large, *_in_modules(optimizer, layout)]
        self.look_at_unseen()

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
        if (what := self.changed()) is not None:
            raise HyperparameterChangedError(
                f"{what} of {self._name} was changed after backward had already stepped parameters with what it was. "
                "Change it after optimizer.step() or before backward(), not in between"
            )

    def changed(self) -> str | None:
        """An attribute that is not what it was, in words; ``None``: none."""
        return next((f"{place.where} {key!r}" for place in self._others for key in place.changed()), None)

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
        self._groups, self._others, self.unseen, self._versions, self._shared = [], [], [], [], []


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


def _in_modules(optimizer: Optimizer, layout: GroupLayout) -> Iterator[torch.Tensor]:
    """The parameters and buffers of modules that its attributes reach, without its own parameters. They may be large,
    and are not copied."""
    for module in _modules_of(optimizer):
        for tensor in chain(module.parameters(), module.buffers()):
            if not layout.holds(tensor) and not tensor.is_inference():
                yield tensor


class Tables:
    """By which modules that an optimizer reaches know their parameters, buffers and attributes, as they are now."""

    def __init__(self, optimizer: Optimizer) -> None:
        in_methods = reachable_values(_of_functions(optimizer), optimizer)
        modules = [*_modules_of(optimizer), *(value for value in in_methods if isinstance(value, torch.nn.Module))]
        every = {id(module): module for module in chain.from_iterable(module.modules() for module in modules)}
        tables = (table for m in every.values() for table in (m._parameters, m._buffers, vars(m)))
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = [(table, dict(table)) for table in tables]

    def have_changed(self) -> bool:
        return next(self._changed(), None) is not None

    def put_back(self) -> bool:
        """Whether one had changed."""
        changed = list(self._changed())
        for table, before in changed:
            table.update(before)
            for name in table.keys() - before.keys():
                del table[name]
        return bool(changed)

    def _changed(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for table, before in self._before:
            if table.keys() != before.keys() or not all(map(is_, map(table.get, before), before.values())):
                yield table, before


def _modules_of(optimizer: Optimizer) -> Iterator[torch.nn.Module]:
    reached = reachable_values([read_by_update(optimizer), beside_parameters(optimizer.state)], optimizer)
    return (value for value in reached if isinstance(value, torch.nn.Module))


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


def in_functions(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The tensors to which its methods refer otherwise than by the object: those in closures, and in globals that the
    methods name."""
    own = set(map(id, parameters_of(optimizer)))
    for value in reachable_values(_of_functions(optimizer), optimizer):
        modules = (*value.parameters(), *value.buffers()) if isinstance(value, torch.nn.Module) else ()
        for tensor in (value, *modules):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in own and not tensor.is_inference():
                yield tensor


def _of_functions(optimizer: Optimizer) -> list[Any]:
    # All instances share the attributes of their classes, and methods enclose values.
    shared = {f"{cls.__name__}.{name}": value for cls in classes_of(optimizer) for name, value in vars(cls).items()}
    methods = (inspect.unwrap(value) for cls in classes_of(optimizer) for value in vars(cls).values())
    functions = [method for method in methods if isinstance(method, FunctionType)]
    named = (f.__globals__.get(name) for f in functions for name in f.__code__.co_names)
    return [shared, *(value for value in named if isinstance(value, _HOLDERS))]


_HOLDERS = (torch.nn.Module, torch.Tensor, dict, list, tuple)


def reached_by(optimizer: Optimizer, layout: GroupLayout) -> list[torch.Tensor]:
    """The optimizer's parameters to which its attributes, groups, shared state or methods refer too: nobody knows what
    an update does with them.

    To look for them takes longer than a bucket, so they are looked for where groups change, and after parts of an
    update were compared (``Stepper.begin_parts``).
    """
    if layout.reached is None:
        groups = map(settings_in, optimizer.param_groups)
        owners = [read_by_update(optimizer), beside_parameters(optimizer.state), *_of_functions(optimizer), *groups]
        layout.reached = [weakref.ref(v) for v in reachable_values(owners, optimizer) if layout.holds(v)]
    return [parameter for ref in layout.reached if (parameter := ref()) is not None]


class StorageAddresses:
    """Where some parameters lie, their gradients, and all tensors in their entries of the optimizer's state. They tell
    whether an update has given memory of an accelerator back: it is the next tensor's at once, and the side stream may
    still be reading it."""

    def __init__(self, parameters: Sequence[torch.Tensor], entries: Iterable[Entry]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._in_state = _tensors_in(entries)
        self._all = [(tensor, address_of(tensor)) for tensor in (*parameters, *gradients, *self._in_state)]

    def were_left(self, entries: Iterable[Entry]) -> bool:
        """Whether one of them lies elsewhere by now, or is in the entries no more."""
        now = set(map(id, _tensors_in(entries)))
        return any(address_of(t) != place for t, place in self._all) or any(id(t) not in now for t in self._in_state)


def _tensors_in(entries: Iterable[Entry]) -> list[torch.Tensor]:
    return [memory_of(t) for entry in entries if entry for t in held_in(dict(entry), (torch.Tensor,))]


def depends_on_buckets(optimizer: str, what: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{optimizer} updates {what} in a way that depends on which parameters step together. {STEPPED_WHOLE}"
    )


def _refused(optimizer: str, does: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(f"{optimizer} {does}. {STEPPED_WHOLE}")


_DRAWS = (
    "draws random numbers in step(): bucket by bucket they would go to other parameters than in the plain loop. "
    "random='keyed' with a seed gives each parameter draws of its own, which are not the plain loop's"
)
_USES_OTHERS = "uses parameters in step() that it was not given: bucket by bucket some were stepped before"
_WRITES_OTHERS = (
    "writes parameters that it was not given, to which its attributes refer: bucket by bucket that comes at another "
    "time than in the plain loop"
)
_TAKES_STATE_OUT = (
    "takes entries out of its state in step(), or replaces it (a restart?): parameters that are stepped later would "
    "find none"
)
WRITES_UNSEEN = (
    "its step() writes large tensors to which it refers, or those of a module (an average of the weights?): bucket by "
    "bucket that would happen once per bucket"
)
