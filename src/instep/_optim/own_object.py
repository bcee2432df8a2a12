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

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.belongings import BelongingsGuard
from instep._optim.beside import Beside, depends_on_buckets
from instep._optim.guards import Entry, SettingsGuard, numbers_of
from instep._optim.kinds import STEP_HOOKS, STEPPED_WHOLE
from instep._optim.overrides import MANAGER, overrides_in_bucket
from instep._optim.proved import is_proved
from instep._optim.random_numbers import Generators
from instep._optim.reached import reached_by
from instep._optim.shadow import CallUpdate, GroupLayout, Members, parameters_of, without_autocast
from instep._optim.values import ABSENT, address_of, held_in
from instep._torch.versions import memory_of, version_of, versions_of
from instep.errors import UnsupportedOptimizerError


class _Params(list[Any]):
    """A group's parameters while a bucket is stepped: on the thread that steps those of the bucket, on every other one
    all of the group.

    The list itself holds the bucket's: torch's functions read a list without asking its methods.
    """

    __slots__ = ("names", "thread", "whole")

    # Set by ``_lend``, and not in a constructor: a bucket has little time.
    whole: list[Any]
    names: list[str] | None  # of all
    thread: int

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (list(self),)


def _of_thread(name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(list, name)

    def seen(self: _Params, *args: Any) -> Any:
        return method(self if threading.get_ident() == self.thread else self.whole, *args)

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


class _Draws:
    """The generators from which updates of one foreign optimizer must not draw.

    Attributes:
        generators: that are looked at around each update in the running step; ``None``: none need be.
    """

    def __init__(self) -> None:
        self.generators: Generators | None = None
        self._groups: GroupLayout | None = None  # for whose devices these are, where they are kept
        self._is_proved: bool | None = None

    def begin(self, optimizer: Optimizer, groups: GroupLayout, beside: Beside, *, may_draw: bool) -> None:
        # Proved before its first step, and nothing that could have it draw was set since, as far as that can be told.
        self._is_proved = is_proved(optimizer) if self._is_proved is None else self._is_proved and not beside.was_set
        if may_draw or (self._is_proved and beside.is_flat):
            self.generators = None
        elif not beside.is_flat:
            self.generators = Generators.of(optimizer, _devices_of(optimizer), torchs_alone=True)
        elif self.generators is None or self._groups is not groups:  # it refers to none of its own
            self.generators = Generators(_devices_of(optimizer), torchs_alone=True)
        self._groups = groups if beside.is_flat else None

    def end_step(self) -> None:
        if self._groups is None:  # the optimizer's attributes, which they may be among, may refer to the model
            self.generators = None


_Lists = tuple[dict[str, Any], list[Any], "list[str] | None"]
"""A group, with its parameters and, where it has them, their names."""


class _Known(NamedTuple):
    """What is known of the object for the length of a step.

    Attributes:
        instead: attributes that it has while it steps a bucket.
        reached: parameters that it reaches in another way than by its groups.
        whole: its groups, where each bucket finds them as they were; else empty.
        is_on_cpu: whether nobody reads later what an update has given back.
    """

    instead: dict[str, Any]
    reached: list[torch.Tensor]
    whole: list[_Lists]
    is_on_cpu: bool


_NOTHING_KNOWN = _Known({}, [], [], False)


class OwnObject:
    """Steps buckets of one foreign optimizer by the object itself.

    Args:
        name: of the optimizer.
        settings: of its groups.

    Attributes:
        beside: what the object holds beside parameters and their state.
        belongings: looks at what is kept of single parameters.
        notes: whether what an update has made of other values is what the step leaves.
        returned: what the last ``step()`` has returned.
        wrote: whether the last ``step()`` without notes has written parameters that it was given.
        gave_back: whether an update of this step has given back memory of an accelerator that it has read.
    """

    def __init__(self, name: str, settings: SettingsGuard) -> None:
        self._name = name
        self._settings = settings
        # Of an accelerator's backward each device has a thread, and two threads must not exchange the groups at once.
        self._lock = threading.RLock()
        self._draws = _Draws()
        self._known = _NOTHING_KNOWN
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
        self.beside.begin(optimizer, layout)
        # Where all is numbers, nothing is kept by a parameter, as long as nothing is changed.
        self.belongings.mappings = [] if self.beside.is_flat else None
        self._draws.begin(optimizer, layout, self.beside, may_draw=may_draw)
        # No hooks, and methods that see all parameters. Made once a step: a bucket has little time.
        hooks: dict[str, Any] = {name: OrderedDict() for name in STEP_HOOKS if name in vars(optimizer)}
        methods = {name: partial(self._of_all, optimizer, name) for name in _OF_ALL}
        if layout.is_on_cpu is None:
            layout.is_on_cpu = {device.type for device in _devices_of(optimizer)} == {"cpu"}
        self._known = _Known(
            hooks | methods,
            [] if in_parts else reached_by(optimizer, layout),
            _lists_of(optimizer.param_groups) if self.beside.is_flat and not in_parts else [],
            layout.is_on_cpu,
        )

    def step(
        self,
        optimizer: Optimizer,
        members: Sequence[Members],
        owned: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        call: CallUpdate,
    ) -> None:
        """Update the bucket by the object's own ``step()``. What that has made of other values is noted, and taken
        back.

        Args:
            members: where its parameters stand.
            owned: these.
            tensors: the same. With ``shard_state`` a rank steps whole parameters by aliases, whose gradients are its
                own.
            call: calls the object's update.

        Raises:
            UnsupportedOptimizerError: another bucket has left other values, or random numbers were drawn.
        """
        lent: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        if tensors is not owned:
            lent = [(p, p.grad, alias.grad) for p, alias in zip(owned, tensors, strict=True) if alias is not p]
        places = None if self._known.is_on_cpu else StorageAddresses(owned, map(optimizer.state.get, owned))
        try:
            for parameter, _, gradient in lent:
                parameter.grad = gradient
            with self._lock:  # and handlers of signals wait for that of the step, or of its calls
                if not self.belongings.rests and not self.beside.is_as_found:
                    # By a hook of this backward, between two buckets: taken back after this one, it would be lost.
                    self._settings.look(optimizer, numbers_of(members))
                    self.beside.require_unchanged(groups=True)
                self._step(optimizer, members, owned, call)
        finally:
            for parameter, gradient, _ in lent:
                parameter.grad = gradient
            if places is not None:
                self.gave_back |= places.were_left(map(optimizer.state.get, owned))

    def _step(self, optimizer: Optimizer, members: Sequence[Members], tensors: Sequence[Any], call: CallUpdate) -> None:
        draws, groups, state = self._draws.generators, Groups(optimizer), optimizer.state
        entries, ids = dict(state), set(map(id, tensors))
        # As mostly, there are none.
        others = [p for p in self._known.reached if id(p) not in ids] if self._known.reached else []
        versions = [*map(version_of, others)]
        if draws is not None:
            draws.begin()
        try:
            given = [] if self.notes else versions_of(tensors)
            self.returned = self._call(optimizer, members, tensors, call)
            if not self.notes:
                self.wrote = versions_of(tensors) != given
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
        if others and [*map(version_of, others)] != versions:
            raise _refused(self._name, _WRITES_OTHERS)
        if optimizer.state is not state or len(state) < len(entries):
            optimizer.state = state
            self._put_entries_back(state, {key: entry for key, entry in entries.items() if id(key) not in ids})
        if groups.put_back():
            raise depends_on_buckets(self._name, "its list of param_groups")

    def _put_entries_back(self, state: MutableMapping[Any, Any], others: Mapping[Any, Any]) -> None:
        """Those of ``others``, which are not the bucket's, that the update has taken out."""
        lost = {key: entry for key, entry in others.items() if key not in state}
        state.update(lost)
        if lost:
            raise _refused(self._name, _TAKES_STATE_OUT)

    def end_step(self) -> None:
        self.beside.end_step()
        self.belongings.end_step()
        self._draws.end_step()
        self.returned, self.gave_back, self._known = None, False, _NOTHING_KNOWN

    def _call(self, optimizer: Optimizer, members: Sequence[Members], tensors: Sequence[Any], call: CallUpdate) -> Any:
        attributes, groups = vars(optimizer), optimizer.param_groups
        instead, whole = self._known.instead, self._known.whole or _lists_of(groups)
        overrides = overrides_in_bucket(optimizer, (m.in_group for m in members)) if MANAGER in attributes else None
        if overrides is not None:
            instead = {**instead, MANAGER: overrides}
        before = [*zip(instead, map(attributes.get, instead, repeat(ABSENT)), strict=True)]
        try:
            attributes.update(instead)
            _lend(whole, members, tensors)
            self._runs_on, self._used_others = threading.get_ident(), False
            device_type = tensors[0].device.type
            if torch.is_grad_enabled() or torch.is_autocast_enabled(device_type):
                with torch.no_grad(), without_autocast(device_type):
                    returned = call(optimizer, members)
            else:  # as mostly in a backward, and to enter contexts takes longer than to ask
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
            hooks = self._known.instead.get
            for name in STEP_HOOKS if any(map(hooks, STEP_HOOKS)) else ():
                if registered := hooks(name):
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


class ObjectCall(NamedTuple):
    """The update of one bucket by the object itself, made before its gradients are there.

    Attributes:
        call: calls the object's update.
        owned: the parameters.
        tensors: the same, or aliases of them.
        members: where they stand.
        lists: what a kernel would be given of the state: nothing is known of that.
    """

    own: OwnObject
    call: CallUpdate
    optimizer: Optimizer
    owned: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    members: Sequence[Members]
    lists: Sequence[list[torch.Tensor]] = ()

    def run(self, gradients: list[torch.Tensor]) -> None:
        """``gradients``: of the bucket. They are in ``.grad``, where the object finds them."""
        self.own.step(self.optimizer, self.members, self.owned, self.tensors, self.call)
        self.own.belongings.note(self.owned)


def _devices_of(optimizer: Optimizer) -> set[torch.device]:
    return {memory_of(p).device for p in parameters_of(optimizer)}


def _lists_of(groups: Iterable[dict[str, Any]]) -> list[_Lists]:
    return [(group, group["params"], group.get("param_names")) for group in groups]


def _put(lists: Iterable[_Lists]) -> None:
    for group, params, names in lists:
        group["params"] = params
        if names is not None:
            group["param_names"] = names


def _lend(whole: Iterable[_Lists], members: Sequence[Members], tensors: Sequence[Any]) -> None:
    """From now on the groups hold ``tensors`` alone."""
    thread = threading.get_ident()
    for number, (group, params, names) in enumerate(whole):
        # A group that was added since the step began holds none of them.
        in_bucket, in_group = members[number] if number < len(members) else ((), ())
        some = group["params"] = _Params(map(tensors.__getitem__, in_bucket))
        some.whole, some.names, some.thread = params, names, thread
        if names is not None:
            group["param_names"] = [names[place] for place in in_group]


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
    return [memory_of(t) for entry in entries if entry for t in held_in([dict(entry)], torch.Tensor)]


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
