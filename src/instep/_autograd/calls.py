"""What is done around the call of a module, however it ends.

A forward hook of torch's is not called after ``KeyboardInterrupt`` or ``SystemExit``, and an error of its own is lost
where another one is on its way. A module calls itself by its ``_call_impl``, which torch has no public name for: an
instance may have one of its own. ``tests/unit/test_calls.py`` fails clearly where it is not called any more.
"""

import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from instep._autograd.hooks import BoundHook

CALL = "_call_impl"


@dataclass(frozen=True, slots=True)
class Around:
    """What is done around one call.

    Attributes:
        begin: before it, with all hooks of the module still to come.
        end: once it has returned.
        failed: if an exception of any kind has left it, or ``begin`` or ``end``. What is called must know whether it
            comes to anything, and may be called twice.
    """

    begin: Callable[[], None]
    end: Callable[[], None]
    failed: Callable[[], None]


class GuardedCall(BoundHook):
    """Stands in the place of the ``_call_impl`` of ``module``, until it is removed.

    Args:
        called: returns what is to be done around a call of the module that is about to begin, or ``None``.
    """

    __slots__ = ("__weakref__", "_before", "_module")

    def __init__(self, module: nn.Module, called: Callable[[nn.Module], Around | None]) -> None:
        super().__init__(called)
        self._module = weakref.ref(module)
        self._before = vars(module).get(CALL)  # another attachment's
        vars(module)[CALL] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "it is called by its module"
        call: Callable[..., Any] = self._before or _plain_call(module)
        if torch.compiler.is_compiling() or self._call is None:
            return call(*args, **kwargs)
        around = self._call(module)
        if around is None:
            return call(*args, **kwargs)
        try:
            around.begin()
            result = call(*args, **kwargs)
            around.end()  # in here: what comes between this and the loop is nothing that can be interrupted
            return result
        except BaseException:
            # An error of what is done here is told by what is done next: the loop's own goes to the loop.
            with suppress(Exception):
                try:
                    around.failed()
                except KeyboardInterrupt:  # Ctrl-C goes to the loop, once what it has cut short is done
                    around.failed()
                    raise
            raise

    def remove(self) -> None:
        self._call = None  # also where somebody else's stands before this one now
        module = self._module()
        if module is None or vars(module).get(CALL) is not self:
            return
        before = self._before
        while isinstance(before, GuardedCall) and before._call is None:  # removed, while this one stood before it
            before = before._before
        if before is None:
            del vars(module)[CALL]
        else:
            vars(module)[CALL] = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module()))  # made before what is in it
        return BoundHook(None) if copied is None else _plain_call(copied)

    def __reduce__(self) -> Any:
        return _plain_call, (self._module(),)


def _plain_call(module: Any) -> Callable[..., Any]:
    """What ``module`` would have, had nobody put anything in its place."""
    return types.MethodType(type(module)._call_impl, module)
