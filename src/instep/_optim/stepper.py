"""Steps a few parameters with the user's own optimizer, which stays as it is.

A bucket is stepped by a *shadow* of the optimizer: an object of the same class with the same attributes and the same
per-parameter state, whose ``param_groups`` hold the bucket's parameters alone. It lives for one call. What the update
writes outside the parameters' own state (values in a group, keys of ``state`` that are no parameter, attributes) is
taken from the shadows, must be the same for all of them, and is written into the user's object when the step is
committed.
"""

import weakref
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, chain
from numbers import Real
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from instep._autograd.hooks import is_in_step
from instep._optim.changes import Snapshot, alike, changes, fingerprint, is_immutable, is_plain, private, same
from instep._optim.elsewhere import Elsewhere
from instep._optim.entries import Entries
from instep._optim.generators import Generators
from instep._optim.parts import LocalShard, memory_of, version_of
from instep._optim.places import Places
from instep._optim.reach import reached_from
from instep._optim.switches import switched, switches
from instep._optim.waiting import class_of
from instep.errors import HyperparameterChangedError, StaleAttachmentError, UnsupportedOptimizerError

_PER_PARAMETER = ("params", "param_names")
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_OWN = ("param_groups", "state", "defaults", *_HOOKS)
# Which torch itself, its schedulers and GradScaler write on any optimizer, at any time.
_TORCHS = ("_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured", "grad_scale", "found_inf")


_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)


class Stepper:
    """Steps the parameters of one optimizer, which it holds weakly.

    Attributes:
        wrote_in_place: whether an update has changed an object beside parameters and their state: nobody can put that
            back.
        gave_back: whether an update of this step has given back memory of an accelerator that it has read.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.wrote_in_place = False
        self._call_is_seen = False
        self._kept_in: str | None = None  # where it keeps values of single parameters, its state aside
        # Kept from step to step, and made anew when the groups hold others: parameters by their position among all
        # of the optimizer's, and where each group's begin and end.
        self._flags: list[tuple[str, torch.Tensor]] = []
        self._grouped: list[list[int]] = []
        self._position: dict[int, int] = {}
        self._bounds: list[int] = [0]
        self._forget()

    def _forget(self) -> None:
        self._open = False
        self.gave_back = False
        self._switches: dict[str, Any] = {}
        self._containers: list[str] = []
        self._state: Any = None
        self._state_size = 0
        self._shared_state: dict[Any, Any] = {}
        self._used: dict[int, Snapshot] = {}
        self._left = Entries()  # as the updates have left them
        # What the update can get at through attributes: parameters of the optimizer's, and others in modules.
        self._reached: list[torch.Tensor] = []
        self._in_modules: list[torch.Tensor] = []
        self._owners: dict[int, int] = {}  # of state tensors, which are held above, by their address
        self._written: dict[str, dict[Any, Any]] = {}

    def called(self) -> None:
        """``step()`` of the optimizer begins. For its pre-hook."""
        self._call_is_seen = is_in_step(self.optimizer())

    @property
    def was_stopped(self) -> bool:
        """Whether the ``step()`` that was begun last, and has not been committed, does not run any more: an error or
        Ctrl-C has ended it. ``False`` also where torch.compile hides it."""
        optimizer = self._optimizer()
        return self._call_is_seen and not (optimizer is not None and is_in_step(optimizer))

    def step(
        self,
        parameters: Sequence[torch.Tensor],
        in_place_of: Sequence[torch.Tensor] | None = None,
        parts: Sequence[LocalShard | None] | None = None,
    ) -> None:
        """Update ``parameters`` from their ``.grad``, as the optimizer's ``step()`` would, and nothing else.

        The optimizer's and torch's global step hooks do not run. Version counters are bumped even where the
        kernel does not (fused ones), so that autograd still notices a weight that was saved for a later node.

        Args:
            in_place_of: the optimizer's own parameters, where ``parameters`` are aliases of them.
            parts: of those of which ``parameters`` holds an alias of this rank's part.
        """
        optimizer = self.optimizer()
        if not self._open:
            self._begin(optimizer)
        owned = parameters if in_place_of is None else in_place_of
        groups = self._groups_of(optimizer, parameters, owned)
        given = {i: self._used[i].of_copy(group) for i, group in groups.items() if group["params"]}
        entries = list(map(optimizer.state.get, owned))
        if parts is not None:
            entries = [e if e is None else _part_of(e, part) for e, part in zip(entries, parts, strict=True)]
        state = {p: entry for p, entry in zip(parameters, entries, strict=True) if entry is not None}
        shadow = shadow_of(optimizer, list(groups.values()), {**private(self._shared_state), **state})
        before_step = list(shadow.state.values())
        base = dict(vars(shadow))
        contents = {name: fingerprint(base[name]) for name in self._containers}
        generators, versions, places = None, {}, None
        if not is_torchs_own(optimizer):
            if parameters[0].device.type != "cpu":
                places = Places(parameters, map(optimizer.state.get, owned))
            generators = Generators({parameters[0].device}, self._settings_of(shadow))
            versions = {id(tensor): version_of(tensor) for _, tensor in _tensors_in(owned, entries)}
        others = [(p, version_of(p)) for p in self._reached if not any(p is own for own in owned)]
        in_modules = [(tensor, version_of(tensor)) for tensor in self._in_modules]
        try:
            with torch.no_grad(), without_autocast(parameters[0].device.type):
                undecorated_step(type(optimizer))(shadow)
        except Exception:
            written = any(version_of(tensor) != version for tensor, version in in_modules)
            self.wrote_in_place |= written or self._wrote_shared(optimizer, shadow, given, base, contents)
            raise
        finally:
            if parts is not None:
                for p, own, part in zip(parameters, owned, parts, strict=True):
                    if part is not None and p in shadow.state:
                        shadow.state[p] = _whole_of(shadow.state[p], optimizer.state.get(own), part)
            made = len(shadow.state) != len(before_step) or not all(map(is_, shadow.state.values(), before_step))
            if made:
                optimizer.state.update(
                    (own, shadow.state[p]) for p, own in zip(parameters, owned, strict=True) if p in shadow.state
                )
            if made or parts is not None:
                entries = list(map(optimizer.state.get, owned))
            torch.autograd.graph.increment_version(parameters)
            if parts is not None:
                torch.autograd.graph.increment_version(owned)
            if places is not None:
                self.gave_back |= places.were_left(map(optimizer.state.get, owned))
        self._left.add(owned, optimizer.state)
        if any(version_of(p) != version for p, version in others):
            raise UnsupportedOptimizerError(
                f"{self.name} writes parameters that it was not given, to which its attributes refer: bucket by bucket "
                "that would happen once per bucket. Use this optimizer without instep"
            )
        if any(version_of(tensor) != version for tensor, version in in_modules):
            self.wrote_in_place = True
            raise UnsupportedOptimizerError(
                f"{self.name} writes tensors of a module to which its attributes refer (an average of the weights?): "
                "bucket by bucket that would happen once per bucket. Update that module in the loop, after "
                "optimizer.step()"
            )
        if generators is not None:
            self._require_state_of_one(owned, entries, versions)
        if generators is not None and generators.drawn() == "yes":
            generators.restore()
            raise UnsupportedOptimizerError(
                f"{self.name} draws random numbers in step(): bucket by bucket they would go to other parameters than "
                "in the plain loop. Use this optimizer without instep"
            )
        for index, before in given.items():
            live = optimizer.param_groups[index]
            self._collect(f"param_groups[{index}]", before.changes(shadow.param_groups[index]), live)
        for name in _written_in_place(shadow, base, contents):
            raise self._writes_in_place(f"its attribute {name!r}")
        self._collect("state", self._shared.changes(_shared(shadow.state)), self._shared_state)
        self._collect("attribute", changes(_attributes(shadow), base))

    def _wrote_shared(
        self,
        optimizer: Optimizer,
        shadow: Optimizer,
        given: Mapping[int, Snapshot],
        base: Mapping[str, Any],
        contents: Mapping[str, Any],
    ) -> bool:
        """Whether an update that raised has changed an object that the optimizer itself holds, too."""
        looks = [(optimizer.param_groups[i], before.changes(shadow.param_groups[i])) for i, before in given.items()]
        looks.append((self._shared_state, self._shared.changes(_shared(shadow.state))))
        if any(value is live.get(key) for live, changed in looks for key, value in changed.items()):
            return True
        return any(True for _ in _written_in_place(shadow, base, contents))

    def require_unchanged(self) -> None:
        """Raise ``HyperparameterChangedError`` if groups or state are not those the buckets were stepped with."""
        optimizer = self.optimizer()
        if optimizer.state is not self._state:
            raise HyperparameterChangedError(
                f"the state of {self.name} was replaced (load_state_dict?) after backward had already stepped "
                "parameters with the old one. Load before backward() or after optimizer.step()"
            )
        self._require_members(optimizer)
        if self._open and (difference := switched(self._switches)) is not None:
            raise HyperparameterChangedError(
                f"{difference}, in {self.name}.step(), after backward had already stepped parameters under what it "
                "was. Call backward() and optimizer.step() under the same, or use undo=True or schedule='forward'"
            )
        looks = [(f"param_groups[{index}]", used, optimizer.param_groups[index]) for index, used in self._used.items()]
        if self._open:
            looks.append(("attribute ", self._attributes, _read_by_update(optimizer)))
            looks.append(("state", self._shared, _shared(optimizer.state)))
        for where, before, now in looks:
            self._require_settings(where, before, now)
        self._require_unflagged(looks)
        if self.state_was_written or not self._left.are_in(optimizer.state):
            raise HyperparameterChangedError(
                f"the state of {self.name} was written between backward() and optimizer.step(), but backward had "
                "already updated it: the plain loop would have written the old one. Write it after optimizer.step() "
                "or before backward()"
            )

    def look_elsewhere(self, parameters: Sequence[torch.Tensor]) -> Elsewhere | None:
        """Before a trial of ``parameters``; ``None``: torch's own keep all in their state.

        Raises:
            UnsupportedOptimizerError: the optimizer keeps values of parameters outside of its ``state``.
        """
        optimizer = self.optimizer()
        if is_torchs_own(optimizer):
            return None
        places = {f"its attribute {name!r}": value for name, value in _read_by_update(optimizer).items()}
        for index, group in enumerate(optimizer.param_groups):
            places |= {f"param_groups[{index}][{k!r}]": v for k, v in group.items() if k not in _PER_PARAMETER}
        before = Elsewhere(places | _of_classes(optimizer), parameters)
        self._kept_in = self._kept_in or before.kept
        if self._kept_in is not None:
            raise self._keeps_in(self._kept_in)
        return before

    def require_all_in_state(self, before: Elsewhere | None) -> None:
        """After the trial: raise ``UnsupportedOptimizerError`` if the update has put values of parameters somewhere
        else. They are taken out again."""
        found = None if before is None else before.put_back()
        if found is not None:
            self._kept_in, whole = found
            self.wrote_in_place |= not whole
            raise self._keeps_in(self._kept_in)

    def _keeps_in(self, place: str) -> UnsupportedOptimizerError:
        return UnsupportedOptimizerError(
            f"{self.name} keeps values of single parameters in {place}, which undo does not put back. Use "
            "schedule='forward', or no undo"
        )

    @property
    def state_was_written(self) -> bool:
        """Whether somebody has written the state of a parameter since the update, or put something in its place."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        return self._left.written or self._left.are_replaced_in(optimizer.state)

    @property
    def wrote_elsewhere(self) -> bool:
        """Whether this step wrote anything but parameters and their own state."""
        return any(self._written.values())

    def commit(self, into: Optimizer | None = None) -> None:
        """Write into the user's optimizer what the shadows wrote outside the parameters' own state.

        Args:
            into: the user's optimizer, where this one steps a frozen copy of it.
        """
        optimizer = into or self.optimizer()
        if self._open:
            for where, values in self._written.items():
                if where == "attribute":
                    vars(optimizer).update(values)
                elif where == "state":
                    optimizer.state.update(values)
                else:
                    index = int(where.removeprefix("param_groups[").removesuffix("]"))
                    optimizer.param_groups[index].update(values)
            self._sort_new_state(optimizer)
        self._forget()

    def abort(self) -> None:
        """Forget the step."""
        self._forget()

    def optimizer(self) -> Optimizer:
        """The user's optimizer; ``StaleAttachmentError`` if it is gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise StaleAttachmentError(
                f"the attached {self.name} no longer exists. Keep a reference to it, or call "
                "instep.attached(model).detach() and attach another one"
            )
        return optimizer

    def _begin(self, optimizer: Optimizer) -> None:
        self._open = True
        self._switches = switches()
        grouped = [list(map(id, group["params"])) for group in optimizer.param_groups]
        if grouped != self._grouped:
            self._grouped = grouped
            self._position = {key: position for position, key in enumerate(chain.from_iterable(grouped))}
            self._bounds = [0, *accumulate(map(len, grouped))]
        read = _read_by_update(optimizer)
        self._containers = [name for name, value in read.items() if name != "defaults" and not is_immutable(value)]
        self._attributes = Snapshot(read)
        self._shared = Snapshot(_shared(optimizer.state))
        self._state = optimizer.state
        self._state_size = len(optimizer.state)
        self._shared_state = _shared(optimizer.state)
        owners = [read, self._shared_state, *({**group, "params": None} for group in optimizer.param_groups)]
        if not is_torchs_own(optimizer):
            position, found = self._position, list(reached_from(owners))
            self._reached = [value for value in found if id(value) in position]
            held = (tensor for value in found if isinstance(value, torch.nn.Module) for tensor in _tensors_of(value))
            self._in_modules = [tensor for tensor in held if id(tensor) not in position]

    def reached(self) -> list[torch.Tensor]:
        """The optimizer's parameters to which its attributes refer too: who knows what its update does with them."""
        if not self._open:
            self._begin(self.optimizer())
        return list(self._reached)

    def _groups_of(
        self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], owned: Sequence[torch.Tensor]
    ) -> dict[int, dict[str, Any]]:
        position = self._position
        for own in owned:
            if id(own) not in position:
                raise StaleAttachmentError(
                    f"a parameter of shape {tuple(own.shape)} is no longer in {self.name}.param_groups. "
                    "detach() before taking parameters out of an optimizer, and attach again after"
                )
        positions = [position[id(own)] for own in owned]
        order = sorted(range(len(positions)), key=positions.__getitem__)
        positions.sort()
        # A group that was added since this step began holds none of them.
        bounds = self._bounds + self._bounds[-1:] * (len(optimizer.param_groups) + 1 - len(self._bounds))
        groups: dict[int, dict[str, Any]] = {}
        # All groups, empty ones too, in the optimizer's order, and parameters in theirs: some updates count them.
        for index, live in enumerate(optimizer.param_groups):
            first, last = bounds[index : index + 2]
            mine = slice(bisect_left(positions, first), bisect_left(positions, last))
            members = [parameters[i] for i in order[mine]]
            if index in self._used:
                self._require_same(index, live)
            elif members:
                self._used[index] = Snapshot(live)
            group = {k: private(v) for k, v in live.items() if k not in _PER_PARAMETER}
            group["params"] = members
            if "param_names" in live:
                group["param_names"] = [live["param_names"][at - first] for at in positions[mine]]
            groups[index] = group
        return groups

    def _require_members(self, optimizer: Optimizer) -> None:
        """Parameters may be added meanwhile, and are left to ``step()``."""
        found = [list(map(id, group["params"])) for group in optimizer.param_groups[: len(self._grouped)]]
        if self._open and [now[: len(then)] for now, then in zip(found, self._grouped, strict=False)] != self._grouped:
            raise HyperparameterChangedError(
                f"parameters of {self.name} were moved within its param_groups after backward had already stepped "
                "parameters with the groups as they were. Move them after optimizer.step() or before backward()"
            )

    def _require_same(self, index: int, live: dict[str, Any]) -> None:
        self._require_settings(f"param_groups[{index}]", self._used[index], live)

    def _require_unflagged(self, looks: Sequence[tuple[str, Snapshot, Mapping[Any, Any]]]) -> None:
        """What the host cannot know without waiting for an accelerator is found out there, and read a step later."""
        flags, self._flags = self._flags, []
        self._flags = [(f"{where}[{key!r}]", flag) for where, then, now in looks for key, flag in then.flags(now)]
        told = torch.stack([flag.to(flags[0][1].device) for _, flag in flags]).tolist() if flags else []
        for (name, _), written in zip(flags, told, strict=True):
            if written:
                raise HyperparameterChangedError(
                    f"{name} in {self.name} was written, in the step before, after backward had already stepped "
                    "parameters with what it was. Change hyper-parameters after optimizer.step() or before backward()"
                )

    def _require_settings(self, where: str, before: Snapshot, now: Mapping[str, Any]) -> None:
        difference = before.difference(now)
        if difference is not None:
            raise HyperparameterChangedError(
                f"{where}{difference} in {self.name} after backward had already stepped parameters with what it was. "
                "Change hyper-parameters (and call the scheduler) after optimizer.step() or before backward(), not in "
                "between"
            )

    def _require_state_of_one(
        self, owned: Sequence[torch.Tensor], entries: Sequence[Any], versions: Mapping[int, int]
    ) -> None:
        """Raise ``UnsupportedOptimizerError`` if state that several parameters share was written."""
        for own, tensor in _tensors_in(owned, entries):
            # One that is empty, or of a wrapper class, has no memory to tell it by.
            first = self._owners.setdefault(memory_of(tensor).data_ptr() or id(tensor), id(own))
            if first != id(own) and versions.get(id(tensor)) != version_of(tensor):
                raise UnsupportedOptimizerError(
                    f"{self.name} writes a state tensor that several parameters share, in an order that bucket by "
                    "bucket is not that of the plain loop. Use this optimizer without instep"
                )

    def _settings_of(self, shadow: Optimizer) -> list[Any]:
        return [_read_by_update(shadow), _shared(shadow.state), *shadow.param_groups]

    def _writes_in_place(self, what: str) -> UnsupportedOptimizerError:
        self.wrote_in_place = True
        return UnsupportedOptimizerError(
            f"{self.name} changes {what} in place in every step, which bucket by bucket would happen once per bucket. "
            "Use this optimizer without instep"
        )

    def _collect(self, where: str, changes: dict[Any, Any], live: Mapping[Any, Any] = MappingProxyType({})) -> None:
        for key, value in changes.items():
            if value is live.get(key):  # an object that the shadows share
                raise self._writes_in_place(f"{where}[{key!r}]")
        first = self._written.setdefault(where, changes)
        for key in first.keys() | changes.keys():
            if key not in first or key not in changes or not same(first[key], changes[key]):
                raise UnsupportedOptimizerError(
                    f"{self.name} cannot be stepped bucket by bucket: its update of {where} {key!r} depends on which "
                    "parameters step together, so the result would differ from the plain loop. Use this optimizer "
                    "without instep"
                )

    def _sort_new_state(self, optimizer: Optimizer) -> None:
        """Order the entries this step added as the plain ``step()`` would have: by group, not by bucket."""
        added = list(optimizer.state)[self._state_size :]
        last = len(self._position)
        for key in sorted(added, key=lambda k: self._position.get(id(k), last)):
            optimizer.state[key] = optimizer.state.pop(key)


def _written_in_place(shadow: Optimizer, base: Mapping[str, Any], contents: Mapping[str, Any]) -> Iterator[str]:
    """Attributes that are the objects they were, and do not hold what they held."""
    for name, content in contents.items():
        if vars(shadow).get(name) is base[name] and not alike(fingerprint(base[name]), content):
            yield name


def writes_without_gradient(optimizer: str, parameter: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{optimizer}.step() writes parameters without a gradient too: {parameter!r}, which had been updated, was "
        "written a second time. Use this optimizer without instep"
    )


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Those of whose writes torch keeps count."""
    return (tensor for tensor in chain(module.parameters(), module.buffers()) if not tensor.is_inference())


def shadow_of(optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[Any, Any]) -> Optimizer:
    """An optimizer of the same class with the same attributes over other groups and state, without step hooks."""
    # object.__new__: no constructor runs, so nothing is validated, registered or patched a second time.
    shadow: Optimizer = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    vars(shadow).pop("step", None)  # an LR scheduler's patch of the instance
    shadow.param_groups = groups
    shadow.state = defaultdict(dict, state)
    for name in _HOOKS:
        setattr(shadow, name, OrderedDict())
    return shadow


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether it is exactly one of ``torch.optim``: what it reads and writes is known."""
    return type(optimizer).__module__.startswith("torch.optim.")


def can_be_frozen(optimizer: Optimizer) -> bool:
    """Whether ``frozen`` has a copy of all that the update reads, parameters and state aside."""
    groups = [value for group in optimizer.param_groups for key, value in group.items() if key not in _PER_PARAMETER]
    attributes = [value for name, value in _read_by_update(optimizer).items() if name != "defaults"]
    return all(map(is_plain, groups)) and is_plain(optimizer.defaults) and all(map(is_immutable, attributes))


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _OWN}


def _read_by_update(optimizer: Optimizer) -> dict[str, Any]:
    """What beside groups and state an update may read. torch's own read nothing; others, their attributes, those aside
    that stand in for a method."""
    if is_torchs_own(optimizer):
        return {}
    return {"defaults": optimizer.defaults} | {
        name: value
        for name, value in _attributes(optimizer).items()
        if name not in _TORCHS and not callable(getattr(type(optimizer), name, None))
    }


def _of_classes(optimizer: Optimizer) -> dict[str, Any]:
    """What the classes hold that are not torch's: attributes that all instances share, and what methods enclose."""
    classes = [cls for cls in type(optimizer).__mro__ if cls is not object and not cls.__module__.startswith("torch.")]
    return {f"{cls.__name__}.{name}": value for cls in classes for name, value in vars(cls).items()}


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """The numbers and tensors that a loop may set on an optimizer beside its groups. The underscore is torch's own."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if _may_be_setting(name) and (isinstance(value, torch.Tensor) or is_immutable(value))
    }


def _may_be_setting(name: str) -> bool:
    return not name.startswith("_") and name not in ("grad_scale", "found_inf")


def frozen(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with its groups and attributes as they are now, over the live state.

    What a fused ``GradScaler`` step sets for the duration of ``step()`` is copied: it is updated in place later.
    """
    groups = [
        {key: list(value) if key in _PER_PARAMETER else private(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    copied = shadow_of(optimizer, groups, {})
    copied.state = optimizer.state
    copied.defaults = private(optimizer.defaults)
    for name in ("grad_scale", "found_inf"):
        if isinstance(value := vars(copied).get(name), torch.Tensor):
            setattr(copied, name, value.detach().clone())
    return copied


def remember_settings(optimizer: Optimizer) -> Callable[[], None]:
    """What ``step()`` may write outside of parameters and their own state, as it is now.

    Returns:
        What puts it back.
    """
    places: list[tuple[Any, dict[Any, Any]]] = [
        (group, {key: private(value) for key, value in group.items() if key not in _PER_PARAMETER})
        for group in optimizer.param_groups
    ]
    places.append((optimizer.state, {key: private(value) for key, value in _shared(optimizer.state).items()}))
    places.append((vars(optimizer), {key: private(value) for key, value in _settings(optimizer).items()}))
    known = [set(place) for place, _ in places]

    def put_back() -> None:
        for (place, before), names in zip(places, known, strict=True):
            for key in place.keys() - names:
                if place is not vars(optimizer) or _may_be_setting(key):
                    del place[key]
            for key, value in before.items():
                now = place.get(key)
                if not _holds(now, value):
                    place[key] = value
                elif not same(now, value):
                    now.detach().copy_(value)

    return put_back


def _holds(now: Any, value: Any) -> bool:
    """Whether ``now`` is a tensor into which ``value`` can be written."""
    tensors = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
    return tensors and now.shape == value.shape and now.dtype == value.dtype


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it updates each element of a parameter from that element's gradient and state alone, so that a part of
    a parameter may be stepped by itself. Classes of others that inherit from these may do otherwise."""
    return class_of(optimizer) in _ELEMENTWISE


def asks_for_state(optimizer: Optimizer, gradients: Iterable[torch.Tensor], *, first: bool) -> bool:
    """Whether a ``step()`` with these gradients is none of a training loop. Some tools have an optimizer without state
    step with gradients of zeros, for the state that this makes: before training, or, as DCP does, with a learning rate
    of 0 (``torch/distributed/checkpoint/state_dict.py``, ``_init_optim_state``).

    Args:
        first: whether no step has been taken.
    """
    still = all(_is_zero(group.get("lr", 0)) for group in optimizer.param_groups)
    if optimizer.state or not (first or still):
        return False
    return not any(map(_holds_anything, gradients))


def _holds_anything(gradient: torch.Tensor) -> bool:
    if memory_of(gradient) is gradient:
        return bool(gradient.any())
    # Of what is spread over ranks all must get the same answer, and one may hold nothing of it.
    count: Any = torch.linalg.vector_norm(gradient, 0)
    return bool(count.full_tensor())


def _is_zero(rate: Any) -> bool:
    """Of a learning rate: an optimizer that finds its own may have ``None`` there, or an object."""
    if isinstance(rate, torch.Tensor):
        return not bool(rate.any())
    return isinstance(rate, Real) and rate == 0


def begin_state(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Show that an optimizer without state is about to have some: DCP asks an optimizer for it, of which nobody tells
    us, and where it finds none has it take a step of its own. torch's optimizers fill an entry that is empty."""
    if not optimizer.state and is_torchs_own(optimizer):
        mine = {id(p) for p in parameters}
        for group in optimizer.param_groups:
            optimizer.state.update((p, {}) for p in group["params"] if id(p) in mine)


def end_state(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Take off again what ``begin_state`` left and nobody has filled."""
    for parameter in parameters:
        if parameter in optimizer.state and not optimizer.state[parameter]:
            del optimizer.state[parameter]


def alias_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory and version counter, with ``gradient`` as its ``.grad``.

    It can be stepped on another thread while the parameter's own ``.grad`` is read and cleared.
    """
    alias = parameter.detach().requires_grad_(parameter.requires_grad)
    vars(alias).update(vars(parameter))
    alias.grad = gradient
    return alias


def undecorated_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """``cls.step`` without the wrapper in which torch runs its global step hooks: they are owed one call per step."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def autocast_of(device_type: str) -> torch.dtype | None:
    """The dtype of the autocast block that this thread is in; ``None``: it is in none."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    # backward() may be called inside an autocast block; optimizer.step() is not.
    enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else nullcontext()


def _part_of(entry: dict[Any, Any], part: LocalShard | None) -> dict[Any, Any]:
    return entry if part is None else {key: part.of_state(value) for key, value in entry.items()}


def _tensors_in(owned: Sequence[torch.Tensor], entries: Sequence[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of some parameters' state, each with its parameter."""
    for own, entry in zip(owned, entries, strict=True):
        for value in (entry or {}).values():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and memory_of(value).numel():
                yield own, value


def _whole_of(stepped: dict[Any, Any], entry: dict[Any, Any] | None, part: LocalShard) -> dict[Any, Any]:
    """The parameter's own entry, with what the update of its part has added or replaced."""
    entry = {} if entry is None else entry
    for key, value in stepped.items():
        if key not in entry or part.of_state(entry[key]) is not value:
            entry[key] = part.as_state(value)
    return entry


def _shared(state: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
