"""What torch.compile sees of instep: it traces the hooks of modules and optimizers, and where a compiled function calls
``backward()``, each function that autograd calls."""

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """``function``, run as it is inside of what was compiled, with all that it calls.

    Not for the forward hooks of modules: a model could not be compiled as one graph with them.
    """
    disable: Any = torch.compiler.disable  # which has no types
    return disable(function)  # type: ignore[no-any-return]


class Traced:
    """A hook that says whether torch.compile has traced it, and with it the ``step()`` that it was registered for.

    It does nothing else and uses none of its arguments: torch.compile makes few versions of one function, and gives up.
    """

    __slots__ = ("yes",)

    def __init__(self) -> None:
        self.yes = False  # set by the compiled code, each time

    def __call__(self, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.yes = True


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded: all that is launched for a step is to be in it, on the loop's stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Compiles(Protocol):
    def before_compile(self) -> None:
        """torch.compile is about to trace a function, whose arguments it has, and has not looked at yet."""


_listening: "weakref.WeakSet[Compiles]" = weakref.WeakSet()


def listen(to: Compiles) -> None:
    """Have ``to`` told before torch.compile traces a function. Held weakly."""
    _listening.add(to)
    callback = sys.modules.get("torch._dynamo.callback")  # else nothing was compiled yet
    # ``torch._dynamo.on_compile_start`` registers for good; ``torch._dynamo.reset()`` may let go of it.
    if callback is not None and _tell not in callback.callback_handler.start_callbacks:
        callback.on_compile_start(_tell)


def _tell(*_: object) -> None:
    for one in list(_listening):
        one.before_compile()
