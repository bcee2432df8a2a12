"""The call that the user has made, found on the stack, for messages."""

import sys
from types import FrameType

import torch

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
    found: FrameType | None = None
    while frame is not None:
        room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if room in _NAMED and frame.f_code.co_name not in _WRAPPERS:
            found = frame
        elif room not in _NAMED and room not in _THROUGH:
            break
        frame = frame.f_back
    return operation if found is None else _name_of(found)


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
