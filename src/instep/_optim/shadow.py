"""Other optimizer objects over some of the same parameters: where these stand in the groups, and how one is made."""

import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, chain, islice
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from instep._optim.kinds import (
    SCALES,
    STEP_HOOKS,
    is_torchs_own,
    read_by_update,
    steps_one,
)
from instep._optim.values import PER_PARAMETER, is_immutable, is_plain, private
from instep._torch.hooks import undecorated_step
from instep._torch.lifetime import reference_to
from instep._torch.versions import memory_of
from instep.errors import StaleAttachmentError
from instep.master_weights import LOOKED, Masters

# Where each parameter of an optimizer stands in its ``param_groups``, and which of a bucket's are in which group.


Groups = Sequence[Mapping[str, Any]]


class Members(NamedTuple):
    """The parameters of a bucket that one group holds, in the group's order: where each stands in the bucket, and where
    in the group."""

    in_bucket: list[int]
    in_group: list[int]


class GroupLayout:
    """The members of all groups, as they are when a step begins. Kept from step to step while the groups hold the same.

    Args:
        name: of the optimizer.

    Attributes:
        reached: see ``own_object.reached_by``; ``None``: nobody has asked.
        is_on_cpu: whether all members are in the host's memory; ``None``: the same.
    """

    def __init__(self, name: str, groups: Groups) -> None:
        self.reached: list[weakref.ref[torch.Tensor]] | None = None
        self.is_on_cpu: bool | None = None
        self._name = name
        self._ids = _ids_of(groups)
        self._position = {key: position for position, key in enumerate(chain.from_iterable(self._ids))}
        self._bounds = [0, *accumulate(map(len, self._ids))]
        # Of buckets that were asked for, by the first parameter's id: the ids of all, and the answer. Buckets that are
        # stepped together differ from step to step: of those with one first parameter the last is known.
        self._known: dict[int, tuple[list[int], list[Members]]] = {}

    def is_of(self, groups: Groups) -> bool:
        return _ids_of(groups) == self._ids

    def holds(self, value: object) -> bool:
        return id(value) in self._position

    def members_of(self, bucket: Sequence[torch.Tensor]) -> list[Members]:
        """The parameters of ``bucket`` by group: all groups, those aside that were added since the step began.
        ``StaleAttachmentError``, if a parameter is in none."""
        ids = list(map(id, bucket))
        known = self._known.get(ids[0])
        if known is None or known[0] != ids:
            known = self._known[ids[0]] = ids, self._divide(ids, bucket)
        return known[1]

    def were_moved(self, groups: Groups) -> bool:
        """Whether a parameter has left its place. Others may have been added behind them, or in groups of their own."""
        ids = _ids_of(groups[: len(self._ids)])
        return [now[: len(then)] for now, then in zip(ids, self._ids, strict=False)] != self._ids

    def added_to(self, state: Mapping[Any, Any], size: int) -> list[Any]:
        """The keys that came into ``state`` when it had ``size``, in the order of the groups; then those that are no
        parameters."""
        last = len(self._position)
        return sorted(islice(state, size, None), key=lambda key: self._position.get(id(key), last))

    def _divide(self, ids: Sequence[int], bucket: Sequence[torch.Tensor]) -> list[Members]:
        position = self._position
        for key, parameter in zip(ids, bucket, strict=True):
            if key not in position:
                raise StaleAttachmentError(
                    f"a parameter of shape {tuple(parameter.shape)} is no longer in {self._name}.param_groups. "
                    "detach() before taking parameters out of an optimizer, or now, and attach again after"
                )
        positions = [position[key] for key in ids]
        order = sorted(range(len(positions)), key=positions.__getitem__)
        positions.sort()
        members = []
        for first, last in zip(self._bounds, self._bounds[1:], strict=False):
            in_group = slice(bisect_left(positions, first), bisect_left(positions, last))
            members.append(Members(order[in_group], [at - first for at in positions[in_group]]))
        return members


def _ids_of(groups: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]


# Other optimizer objects over the same parameters: a shadow for one update, a snapshot for a step that is put off.


def shadow_of(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """An optimizer of the same class, one of torch's, with the same attributes over other groups and state, without
    step hooks."""
    # object.__new__: no constructor runs, so nothing is validated, registered or patched a second time.
    shadow: Optimizer = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    vars(shadow).pop("step", None)  # an LR scheduler's patch of the instance
    if isinstance(optimizer, Masters):
        vars(shadow)[LOOKED] = True
    shadow.param_groups = groups
    shadow.state = state
    for name in STEP_HOOKS:
        setattr(shadow, name, OrderedDict())
    return shadow


def alias_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory and version counter, with ``gradient`` as its ``.grad``.

    The alias can be stepped on another thread while the parameter's own ``.grad`` is read and cleared.
    """
    alias = parameter.detach()
    if parameter.requires_grad:
        alias.requires_grad = True
    if attributes := vars(parameter):
        vars(alias).update(attributes)
    if gradient.dtype is not alias.dtype:
        alias.grad_dtype = gradient.dtype  # as the loop has said it of the parameter, since torch 2.10
    alias.grad = gradient
    return alias


def snapshot_of(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with its groups and attributes as they are now, over the live state.

    What a fused ``GradScaler`` step sets for the duration of ``step()`` is copied: it is updated in place later.
    """
    groups = [
        {key: list(value) if key in PER_PARAMETER else private(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    copied = shadow_of(optimizer, groups, optimizer.state)
    copied.defaults = private(optimizer.defaults)
    for name in SCALES:
        if isinstance(value := vars(copied).get(name), torch.Tensor):
            setattr(copied, name, value.detach().clone())
    return copied


def is_copied_whole(optimizer: Optimizer) -> bool:
    """Whether ``snapshot_of`` copies all that the update reads, parameters and state aside."""
    groups = [value for group in optimizer.param_groups for key, value in group.items() if key not in PER_PARAMETER]
    attributes = [value for name, value in read_by_update(optimizer).items() if name != "defaults"]
    return all(map(is_plain, groups)) and is_plain(optimizer.defaults) and all(map(is_immutable, attributes))


def parameters_of(optimizer: Optimizer) -> Iterator[Any]:
    """All of them, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


# How tools have an optimizer make its state before there has been a step: torch's distributed checkpoints (DCP), above
# all, have it step with gradients of zeros, with a learning rate of 0.


def asks_for_state(optimizer: Optimizer, gradients: Iterable[torch.Tensor], *, first: bool) -> bool:
    """Whether a ``step()`` with these gradients is a tool's, which wants the state that the step makes, and none of a
    training loop. Some tools have an optimizer without state step with gradients of zeros: before training, or, as DCP
    does, with a learning rate of 0 (``torch/distributed/checkpoint/state_dict.py``, ``_init_optim_state``).

    Args:
        first: whether no step has been taken.
    """
    if optimizer.state or not (first or all(_is_zero(group.get("lr", 0)) for group in optimizer.param_groups)):
        return False
    return not any(map(_holds_anything, gradients))


def begin_state(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Give ``parameters`` empty entries in the state of an optimizer that has none, while their update is due.

    DCP looks into ``state``, and has an optimizer without any take a step of its own; nothing tells instep of that
    look. torch's own optimizers fill an entry that is empty.
    """
    if not optimizer.state and is_torchs_own(optimizer):
        ids = {id(p) for p in parameters}
        for group in optimizer.param_groups:
            optimizer.state.update((p, {}) for p in group["params"] if id(p) in ids)


def end_state(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Remove the entries that ``begin_state`` made and no update has filled."""
    for parameter in parameters:
        if parameter in optimizer.state and not optimizer.state[parameter]:
            del optimizer.state[parameter]


def order_added(optimizer: Optimizer, count: int) -> None:
    """Order the entries that have come into ``state`` since it had ``count`` as a plain ``step()`` makes them: by
    group. Of a step that was put off in part, torch has made some before the others."""
    if len(optimizer.state) > count:
        layout = GroupLayout(type(optimizer).__name__, optimizer.param_groups)
        for key in layout.added_to(optimizer.state, count):
            optimizer.state[key] = optimizer.state.pop(key)


def _holds_anything(gradient: torch.Tensor) -> bool:
    if memory_of(gradient) is gradient:
        return bool(gradient.any())
    # All ranks must get the same answer for a gradient that is spread over them, and one may hold nothing of it.
    count: Any = torch.linalg.vector_norm(gradient, 0)
    return bool(count.full_tensor())


def _is_zero(rate: Any) -> bool:
    """Of a learning rate: an optimizer that finds its own may have ``None`` there, or an object."""
    if isinstance(rate, torch.Tensor):
        return not bool(rate.any())
    return isinstance(rate, Real) and rate == 0


# How an update is called outside of ``optimizer.step()``: without torch's step hooks, and outside of autocast.


CallUpdate = Callable[[Optimizer, Sequence[Members]], Any]
"""Calls the update of an optimizer whose groups hold the bucket alone, given where its parameters stand."""


def how_to_step(optimizer: Optimizer) -> CallUpdate:
    """The update of ``optimizer``, without torch's step hooks."""
    if steps_one(optimizer) is not None:
        return _step_one_by_one
    # Weakly: a class that is made in a function may refer to the model, and the optimizer has its class.
    step = reference_to(undecorated_step(type(optimizer)))
    return lambda itself, members: step()(itself)


def _step_one_by_one(optimizer: Optimizer, members: Sequence[Members]) -> None:
    step = steps_one(optimizer)
    assert step is not None
    # Groups that were added since the step began hold none of them.
    for group, (_, indices) in zip(optimizer.param_groups, members, strict=False):
        for parameter, index in zip(list(group["params"]), indices, strict=True):
            step(parameter, group, index)


def autocast_here(optimizer: Optimizer) -> torch.dtype | None:
    """The dtype of the autocast block for the parameters of ``optimizer`` that this thread is in; ``None``: it is in
    none."""
    for group in optimizer.param_groups:
        for first in group["params"]:  # asked in each step, and of the first alone
            kind = first.device.type
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    # backward() may be called inside an autocast block; optimizer.step() is not.
    enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else nullcontext()
