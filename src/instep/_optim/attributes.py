"""What an optimizer object holds beside its groups and the state of parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import is_torchs_own
from instep._optim.overrides import is_manager
from instep._optim.patched import STEPS_ONE

STEP_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_OF_EVERY_OPTIMIZER = ("param_groups", "state", "defaults", *STEP_HOOKS)
# Which torch itself, its schedulers and GradScaler write on any optimizer, at any time.
_WRITTEN_BY_TORCH = ("_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured", "grad_scale", "found_inf")


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that not every optimizer has."""
    return {name: value for name, value in vars(optimizer).items() if name not in _OF_EVERY_OPTIMIZER}


def read_by_update(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that an update may read. torch's own optimizers read none; others may read all but those that
    stand in for a method."""
    if is_torchs_own(optimizer):
        return {}
    return {"defaults": optimizer.defaults} | {
        name: value
        for name, value in attributes_of(optimizer).items()
        if name not in (*_WRITTEN_BY_TORCH, *STEPS_ONE)
        and not callable(getattr(type(optimizer), name, None))
        and not is_manager(value)
    }


def held_by_classes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes of the optimizer's classes, torch's aside. All instances share them, and methods enclose
    values."""
    classes = [cls for cls in type(optimizer).__mro__ if cls is not object and not cls.__module__.startswith("torch.")]
    return {f"{cls.__name__}.{name}": value for cls in classes for name, value in vars(cls).items()}


def beside_parameters(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The items of an optimizer's ``state`` whose key is no parameter."""
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def shared_by_updates(optimizer: Optimizer) -> dict[Any, Any]:
    """The items of its ``state`` that an update may use beside those of its parameters: torch's own use none."""
    return {} if is_torchs_own(optimizer) else beside_parameters(optimizer.state)
