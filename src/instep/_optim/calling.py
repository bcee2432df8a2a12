"""How an update is called outside of ``optimizer.step()``: without torch's step hooks, and outside of autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer


def undecorated_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """``cls.step`` without the wrapper in which torch runs its global step hooks: they are owed one call per step."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def autocast_of(device_type: str) -> torch.dtype | None:
    """The dtype of the autocast block that this thread is in; ``None``: it is in none."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A block outside of autocast."""
    # backward() may be called inside an autocast block; optimizer.step() is not.
    enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else nullcontext()
