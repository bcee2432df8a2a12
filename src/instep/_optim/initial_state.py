"""How tools have an optimizer make its state before there has been a step: torch's distributed checkpoints (DCP), above
all, have it step with gradients of zeros, with a learning rate of 0."""

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import is_torchs_own
from instep._optim.layout import GroupLayout
from instep._optim.parts import memory_of


def asks_for_state(optimizer: Optimizer, gradients: Iterable[torch.Tensor], *, first: bool) -> bool:
    """Whether a ``step()`` with these gradients is a tool's, which wants the state that the step makes, and none of a
    training loop. Some tools have an optimizer without state step with gradients of zeros: before training, or, as DCP
    does, with a learning rate of 0 (``torch/distributed/checkpoint/state_dict.py``, ``_init_optim_state``).

    Args:
        first: whether no step has been taken.
    """
    still = all(_is_zero(group.get("lr", 0)) for group in optimizer.param_groups)
    if optimizer.state or not (first or still):
        return False
    return not any(map(_holds_anything, gradients))


def begin_state(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Give ``parameters`` empty entries in the state of an optimizer that has none, while their update is due.

    DCP looks into ``state``, and has an optimizer without any take a step of its own; nothing tells instep of that
    look. torch's own optimizers fill an entry that is empty.
    """
    if not optimizer.state and is_torchs_own(optimizer):
        mine = {id(p) for p in parameters}
        for group in optimizer.param_groups:
            optimizer.state.update((p, {}) for p in group["params"] if id(p) in mine)


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
