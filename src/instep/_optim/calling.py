"""How an update is called outside of ``optimizer.step()``: without torch's step hooks, and outside of autocast."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.patched import replaced_step, steps_one

STEPPED_WHOLE = "Use schedule='forward' with defer='auto', which calls step() as it is"
"""What to do with an optimizer whose update cannot be split."""
ONLY_DEFER = "Only defer=True refuses it: with defer='auto' instep takes the loop"
"""What to do where nothing but that option splits the update, or puts the step off."""


def undecorated_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """``cls.step`` without the wrapper in which torch runs its global step hooks: they are owed one call per step."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def step_whole(copy: Optimizer, *closure: Callable[[], torch.Tensor]) -> Any:
    """Call ``step()`` of a copy of an optimizer, its own where the user's object has one."""
    return (replaced_step(copy) or partial(undecorated_step(type(copy)), copy))(*closure)


def step_bucket(copy: Optimizer, places: Sequence[Sequence[int]]) -> None:
    """Update the parameters that the groups of a copy hold.

    Args:
        places: by group, the index of each in the user's own group. Groups that were added since hold none.
    """
    one = steps_one(copy)
    if one is None:
        undecorated_step(type(copy))(copy)
        return
    for group, indices in zip(copy.param_groups, places, strict=False):
        for parameter, index in zip(group["params"], indices, strict=True):
            one(parameter, group, index)


def autocast_of(device_type: str) -> torch.dtype | None:
    """The dtype of the autocast block that this thread is in; ``None``: it is in none."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A block outside of autocast."""
    # backward() may be called inside an autocast block; optimizer.step() is not.
    enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else nullcontext()
