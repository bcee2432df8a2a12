"""An optimizer object whose ``step`` was replaced, as diffusion trainers do it: beside that stands a method that steps
one parameter, and that the trainer calls in hooks."""

import weakref
from collections.abc import Callable
from functools import wraps
from types import CellType, FunctionType, MethodType
from typing import Any

from torch.optim import Optimizer

STEPS_ONE = ("step_param", "step_parameter")
"""The methods ``step_param(p, group)`` and ``step_parameter(p, group, index)``, with the index in the group."""


def replaced_step(optimizer: Optimizer) -> Any:
    """The function that this object has in place of its class's ``step``; ``None``: it has none of its own. A learning
    rate scheduler's only counts the calls."""
    patch: Any = vars(optimizer).get("step")
    while getattr(patch, "_wrapped_by_lr_sched", False) or getattr(patch, "_told_by_instep", False):
        patch = patch.__wrapped__
    own = getattr(patch, "__func__", patch) is type(optimizer).step  # put back by who had replaced it: accelerate
    return None if own else patch


def steps_one(optimizer: Optimizer) -> Callable[[Any, dict[str, Any], int], None] | None:
    """What steps one parameter of a patched object, given the parameter, its group and its index there. ``None``: the
    object is not patched in that way."""
    if replaced_step(optimizer) is None:
        return None
    method, with_index = map(vars(optimizer).get, STEPS_ONE)
    return with_index if method is None else lambda parameter, group, index: method(parameter, group)


def cannot_follow(optimizer: Optimizer) -> str | None:
    """Why a copy of this patched object could not be stepped in the object's place, in words; ``None``: it could."""
    methods = _methods(optimizer)
    if not methods:
        return "no method step_param(p, group) or step_parameter(p, group, index) beside it steps one parameter"
    for name, method in {"step": replaced_step(optimizer), **methods}.items():
        function = getattr(method, "__func__", method)
        # A scheduler's wrapper holds the function that was bound.
        bound = name == "step" and getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if not isinstance(function, FunctionType) or getattr(method, "__self__", bound and optimizer) is not optimizer:
            return f"{name} is not bound to this object (types.MethodType)"
        if _encloses(function, optimizer):
            return f"{name} holds this very object, so that copies of the object would step it"
    return None


def rebind(optimizer: Optimizer, copy: Optimizer) -> None:
    """Give a copy of a patched object the same methods, as its own."""
    if steps_one(optimizer) is None:
        return
    for name, method in {"step": replaced_step(optimizer), **_methods(optimizer)}.items():
        setattr(copy, name, MethodType(getattr(method, "__func__", method), copy))


def _methods(optimizer: Optimizer) -> dict[str, Any]:
    return {name: vars(optimizer)[name] for name in STEPS_ONE if name in vars(optimizer)}


def _encloses(function: FunctionType, optimizer: Optimizer) -> bool:
    """Whether a function reads the optimizer or one of its methods from the values that it closes over, or from the
    globals of its module; or a function in it does, as one that it decorates."""
    cells = [value for cell in function.__closure__ or () for value in _content(cell)]
    globals_ = [function.__globals__.get(name) for name in function.__code__.co_names]
    if any(value is optimizer or getattr(value, "__self__", None) is optimizer for value in (*cells, *globals_)):
        return True
    inner = (value for value in cells if isinstance(value, FunctionType) and value is not function)
    return any(_encloses(value, optimizer) for value in inner)


def _content(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing was put there yet
        return []


class ToldStep:
    """Torch calls the step hooks in a wrapper of the class's ``step``: a function of the object's own needs one, too.

    Args:
        optimizer: whose ``step`` was replaced. It is held weakly.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        before = optimizer.step

        @wraps(before)
        def step(told: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return before(*args, **kwargs)

        step._told_by_instep = True  # type: ignore[attr-defined]
        hooked: Any = Optimizer.profile_hook_step(step)
        self._optimizer = weakref.ref(optimizer)
        self._hooked = weakref.ref(hooked)  # which refers to the optimizer
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put back what was there. Who has wrapped the method since keeps it, and no hooks are left to be called."""
        optimizer = self._optimizer()
        told: Any = None if optimizer is None else vars(optimizer).get("step")
        if optimizer is not None and told is not None and getattr(told, "__func__", None) is self._hooked():
            optimizer.step = told.__wrapped__.__wrapped__  # type: ignore[method-assign]
