"""Hooks that stay with the model they were registered on, and where they stand among those of the user."""

import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from instep._autograd.tracing import untraced


class BoundHook:
    """A callable for torch's hook tables whose copies do nothing.

    A deep copy or an unpickled copy of a model carries its hooks along; bound to the original's state they would
    step the original from the copy's gradients.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any] | None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BoundHook":
        return BoundHook(None)

    def __reduce__(self) -> tuple[type["BoundHook"], tuple[None]]:
        return BoundHook, (None,)


class UntracedHook(BoundHook):
    """A hook that torch.compile does not trace. Not for the forward hooks of modules: see ``untraced``."""

    __slots__ = ()

    @untraced
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


# torch has public ways to register a hook, and none to say where among the others it runs.


def first_of_post_hooks(optimizer: Optimizer, handle: RemovableHandle) -> None:
    """Run this step post-hook of ``optimizer`` before those that are there: the user's find the gradients that the
    plain loop has there."""
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)


def last_of_pre_hooks(optimizer: Optimizer, handle: RemovableHandle) -> None:
    """Run this step pre-hook of ``optimizer`` after all others, those that are registered later too: it takes away the
    gradients that they want to see.

    For this a global pre-hook of torch's is registered, once, and stays.
    """
    global _global_hook
    _last[optimizer] = handle.id
    if _global_hook is None:
        _global_hook = register_optimizer_step_pre_hook(_move_last)


def first_of_tensor_hooks(tensor: torch.Tensor, call: Callable[..., Any]) -> None:
    """In a backward, ``call`` before whatever else waits for the gradient of ``tensor``."""
    tensor.register_hook(call)
    hooks: Any = tensor._backward_hooks
    others = list(hooks.items())[:-1]
    for number, _ in others:  # the engine goes by the order in which they were put in, and not by move_to_end()
        del hooks[number]
    hooks.update(others)


_last: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()
_global_hook: RemovableHandle | None = None


@untraced
def _move_last(optimizer: Optimizer, *_: object) -> None:
    """Global hooks run before the optimizer's own, which may still be put in order then."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    number = _last.get(optimizer)
    if number in hooks:
        hooks.move_to_end(number)


# torch runs the step hooks in a wrapper of each class's step(): where one calls its parent class's, they run twice.
_STEP: Any = torch.optim.SGD.step
_WRAPPER = Optimizer.profile_hook_step(_STEP).__code__


def is_called_by_step(optimizer: Optimizer) -> bool:
    """In a step hook: whether the ``step()`` that runs it was called by another ``step()`` of the same optimizer."""
    # One of its class, which a class that inherits from that may share, and that of Optimizer.
    if "step" not in vars(optimizer) and sum("step" in vars(cls) for cls in type(optimizer).__mro__) <= 2:
        return False
    return len(list(islice(_steps_in(sys._getframe(), optimizer), 2))) == 2


def is_in_step(optimizer: Optimizer) -> bool:
    """Whether a ``step()`` of ``optimizer`` runs, in any thread. torch.compile may hide one that it has compiled."""
    if next(_steps_in(sys._getframe(), optimizer), False):
        return True
    return any(next(_steps_in(frame, optimizer), False) for frame in sys._current_frames().values())


def _steps_in(frame: FrameType | None, optimizer: Optimizer) -> Iterator[bool]:
    """One ``True`` for each of its ``step()`` in the stack that ends in ``frame``."""
    while frame is not None:
        if frame.f_code is _WRAPPER and frame.f_locals["args"][0] is optimizer:
            yield True
        frame = frame.f_back
