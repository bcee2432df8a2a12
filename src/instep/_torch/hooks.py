"""Hooks: that stay with their model and not with its copies, where they stand among the user's, and around calls."""

import copy
import copyreg
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from instep._torch.engine import call_apart, not_traced, traced_by
from instep._torch.interrupts import heard, held

# Hooks that stay with the model they were registered on, and where they stand among those of the user.


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

    @not_traced
    def __call__(self, *args: Any) -> Any:
        call = self._call
        if call is None:
            return None
        return call(*args) if traced_by() is None else call_apart(call, *args)


class WeakHook(BoundHook):
    """The same, of ``method`` with ``args`` before what it is called with, for as long as its owner lives: see
    ``weakly``. In one function: it is called for every bucket."""

    __slots__ = ("_args", "_function", "_owner")

    def __init__(self, method: Callable[..., Any], *args: Any) -> None:
        super().__init__(None)
        bound: Any = method
        self._owner, self._function, self._args = weakref.ref(bound.__self__), bound.__func__, args

    @not_traced
    def __call__(self, *args: Any) -> Any:
        owner = self._owner()
        if owner is None:
            return None
        if traced_by() is None:
            return self._function(owner, *self._args, *args)
        return call_apart(self._function, owner, *self._args, *args)


class StandIn(BoundHook):
    """Stands in the place of a method of an object, as an attribute of the object, until it is removed. Several may
    stand before one method, and may be removed in any order. Copies of the object do without.

    Args:
        call: what it does; ``None``: it is removed, and another one stands before it.
    """

    __slots__ = ("__weakref__", "_before", "_name", "_owner")

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        super().__init__(call)
        self._owner = weakref.ref(owner)
        self._name = name
        self._before: Any = vars(owner).get(name)  # another one, or the user's; ``None``: the method of the class
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call or self.before()
        return call(*args, **kwargs)

    def before(self) -> Callable[..., Any]:
        """What would be called without it: what it stands before."""
        owner = self._owner()
        assert owner is not None, "it is its attribute"
        method: Callable[..., Any] = self._before or getattr(type(owner), self._name).__get__(owner)
        return method

    def remove(self) -> None:
        self._call = None  # also where somebody else's stands before this one now
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is not self:
            return
        before = self._before
        while isinstance(before, StandIn) and before._call is None:  # removed, while this one stood before it
            before = before._before
        if before is None:
            del vars(owner)[self._name]
        else:
            vars(owner)[self._name] = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        copied = memo.get(id(self._owner()))  # there by now: its attributes are copied last
        return BoundHook(None) if copied is None else _method_of(copied, self._name)

    def __reduce__(self) -> Any:
        return _method_of, (self._owner(), self._name)


def _method_of(owner: Any, name: str) -> Callable[..., Any]:
    """What the class of ``owner`` has: nobody has put anything in its place."""
    method: Callable[..., Any] = getattr(type(owner), name).__get__(owner)
    return method


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


def has_global_step_hooks() -> bool:
    """Whether somebody else has registered a step hook for all optimizers. torch has no public way to ask."""
    own = None if _global_hook is None else _global_hook.id
    return bool(_global_optimizer_post_hooks) or not _global_optimizer_pre_hooks.keys() <= {own}


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


@not_traced
def _move_last(optimizer: Optimizer, *_: object) -> None:
    """Global hooks run before the optimizer's own, which may still be put in order then."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    number = _last.get(optimizer)
    if number in hooks:
        hooks.move_to_end(number)


# torch runs the step hooks in a wrapper of each class's step(): where one calls its parent class's, they run twice.
_STEP: Any = torch.optim.SGD.step
_WRAPPER = Optimizer.profile_hook_step(_STEP).__code__


def is_torchs(function: Any) -> bool:
    """Whether a function, and all that it wraps, is in a file of torch's: anybody may replace a method of a class of
    torch's, and torch.compile itself wraps the functions that call a fused kernel."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or _TORCH not in Path(code.co_filename).parents:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


_TORCH = Path(torch.__file__).parent


def is_in_torch_optim(made_by: Callable[..., Optimizer]) -> bool:
    """Whether ``made_by`` is a class of ``torch.optim``. Some of these name a file in ``__module__``, others the
    package itself."""
    return f"{made_by.__module__}.".startswith("torch.optim.")


def undecorated_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """``cls.step`` without the wrapper in which torch runs its global step hooks: they are owed one call per step."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


# Weakly: the class of an optimizer that is made in a function may refer to the model.
_are_torchs: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()


def is_called_by_step(optimizer: Optimizer) -> bool:
    """In a step hook: whether the ``step()`` that runs it was called by another ``step()`` of the same optimizer."""
    step = type(optimizer).step
    is_own = _are_torchs.get(step)
    if is_own is None:
        is_own = _are_torchs[step] = is_torchs(step)
    if is_own and "step" not in vars(optimizer):
        return False  # none of torch's calls another one
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


# What is done around the call of a module, however it ends.
#
# A forward hook of torch's is not called after ``KeyboardInterrupt`` or ``SystemExit``, and an error of its own is lost
# where another one is on its way. A module calls itself by its ``_call_impl``, which torch has no public name for: an
# instance may have one of its own. ``tests/unit/test_calls.py`` fails clearly where it is not called any more.


CALL = "_call_impl"


@dataclass(frozen=True, slots=True)
class Around:
    """What is done around one call.

    Attributes:
        begin: before it, with all hooks of the module still to come.
        end: once it has returned.
        failed: if an exception of any kind has left it, or ``begin`` or ``end``. What is called must know whether it
            comes to anything.
    """

    begin: Callable[[], None]
    end: Callable[[], None]
    failed: Callable[[], None]


class GuardedCall(StandIn):
    """Stands in the place of the ``_call_impl`` of ``module``, until it is removed.

    Args:
        called: returns what is to be done around a call of the module that is about to begin, or ``None``.
    """

    __slots__ = ()

    def __init__(self, module: nn.Module, called: Callable[[nn.Module], Around | None]) -> None:
        super().__init__(module, CALL, called)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.before()
        if torch.compiler.is_compiling() or self._call is None:
            return call(*args, **kwargs)
        around = self._call(self._owner())
        if around is None:
            return call(*args, **kwargs)
        try:
            around.begin()
            result = call(*args, **kwargs)
            around.end()  # in here: what comes between this and the loop is nothing that can be interrupted
            return result
        except BaseException:
            # An error of what is done here is told by what is done next: the loop's own goes to the loop.
            with suppress(Exception), held(heard()):
                around.failed()
            raise


def nodes_of(output: object) -> Iterator[Node]:
    """The autograd nodes of the tensors in a module's output: backward starts at them.

    A backward may also start elsewhere: at a loss that the module keeps for itself, or in an object of which nothing
    is known here. Nothing that must be right may hang on these nodes alone.
    """
    for tensor in tensors_of(output):
        assert tensor.grad_fn is not None
        yield tensor.grad_fn


def tensors_of(output: object) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in(output) if tensor.grad_fn is not None)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors in what a module is given, or returns."""
    return _tensors_in(value, set())


def _tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        members: Iterable[object] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        members = value
    elif isinstance(value, type):
        return
    else:
        # A dataclass, or an object of the model's own. Objects in it may refer to much else: the model, its settings.
        members = [item for item in _attributes(value) if _may_hold_tensors(item)]
    for item in members:
        yield from _tensors_in(item, seen)


def _attributes(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{name}" if private else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)


def _may_hold_tensors(item: object) -> bool:
    holds = isinstance(item, (torch.Tensor, Mapping, list, tuple, set, frozenset)) or is_dataclass(item)
    return holds or any("__slots__" in vars(cls) for cls in type(item).__mro__[:-1])


# The call that the user has made, found on the stack, for messages.


_THROUGH = frozenset({"contextlib", "functools", "instep"})
"""Modules whose frames are on the way, and are nobody's call."""
_NAMED = frozenset({"copy", "torch"})
_WRAPPERS = frozenset(
    {
        "__torch_function__",
        "__torch_dispatch__",
        "_call_impl",
        "_fn",
        "_no_grad_wrapper",
        "_use_grad",
        "_wrapped_call_impl",
        "decorate_context",
        "handle_torch_function",
        "inner",
        "wrapped",
        "wrapper",
    }
)
"""Functions of torch's that call the one that was meant."""


def user_call(operation: str) -> str:
    """What the user has called, of torch's, that comes down to ``operation`` now: ``"clip_grad_norm_()"``. Where it is
    none of torch's functions in Python, ``operation``."""
    frame: FrameType | None = sys._getframe(1)
    caller: FrameType | None = None
    while frame is not None:
        room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if room in _NAMED and frame.f_code.co_name not in _WRAPPERS:
            caller = frame
        elif room not in _NAMED and room not in _THROUGH:
            break
        frame = frame.f_back
    return operation if caller is None else _name_of(caller)


def _name_of(frame: FrameType) -> str:
    name = frame.f_code.co_name
    owner = frame.f_locals.get("self")
    if isinstance(owner, torch.Tensor):
        return f"Tensor.{name}()"
    if owner is not None and hasattr(type(owner), name):
        return f"{type(owner).__name__}.{name}()"
    if frame.f_globals.get("__name__") == "copy":
        return f"copy.{name}()"
    if getattr(getattr(torch, name, None), "__code__", None) is frame.f_code:
        return f"torch.{name}()"
    return f"{name}()"


# What is copied or saved of an attached model is a plain model: its hook tables without those of the attachment.
#
# torch pickles the hooks of a module with it. ``copyreg`` is Python's public place for how objects of a class are
# copied and pickled; it is asked by ``copy``, ``pickle``, ``torch.save`` and those who build on them. A module whose
# class says itself how it is copied (``__deepcopy__``) takes the hooks along, and these do nothing in a copy.


# Where torch keeps a module's hooks, and where it notes by the same number what is special about one.
_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
)
# The one that torch.save uses, of those that know __reduce_ex__: copyreg does not say which is asked for.
_PROTOCOL = 2
_users: Counter[type] = Counter()
_others: dict[type, Callable[[Any], Any]] = {}  # that were registered before


class PlainPickles:
    """Leaves the hooks of attachments out of the copies and pickles of ``modules``, until it is removed or dropped."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        classes = {type(module) for module in modules}
        for cls in classes:
            _users[cls] += 1
            reducer = copyreg.dispatch_table.get(cls)
            if reducer is not _reduced:
                if reducer is not None:
                    _others[cls] = reducer
                copyreg.pickle(cls, _reduced)
        self._finalizer = weakref.finalize(self, _release, classes)
        self._finalizer.atexit = False

    def remove(self) -> None:
        self._finalizer()


def _release(classes: Iterable[type]) -> None:
    for cls in classes:
        _users[cls] -= 1
        if _users[cls] > 0:
            continue
        del _users[cls]
        other = _others.pop(cls, None)
        if copyreg.dispatch_table.get(cls) is not _reduced:
            continue  # somebody has registered another one since
        if other is None:
            del copyreg.dispatch_table[cls]
        else:
            copyreg.pickle(cls, other)


def _reduced(module: nn.Module) -> Any:
    other = _others.get(type(module))
    reduced = module.__reduce_ex__(_PROTOCOL) if other is None else other(module)
    return tuple(map(_without_hooks, reduced)) if isinstance(reduced, tuple) else reduced


def _without_hooks(part: Any) -> Any:
    """``part`` of what a module is made from again: its state, or a tuple of arguments with the state in it."""
    if type(part) is tuple:
        return tuple(map(_without_hooks, part))
    if type(part) is not dict:
        return part
    tables = {name: part[name] for name in _TABLES if isinstance(part.get(name), Mapping)}
    ours = {
        number
        for table in tables.values()
        for number, hook in table.items()
        if isinstance(getattr(hook, "hook", hook), BoundHook)  # torch wraps the hooks of load_state_dict()
    }
    left = {
        name: type(table)((number, hook) for number, hook in table.items() if number not in ours)
        for name, table in tables.items()
        if not ours.isdisjoint(table)
    }
    return {name: left.get(name, value) for name, value in part.items() if not isinstance(value, BoundHook)}
