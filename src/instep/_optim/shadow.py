"""Other optimizer objects over the same parameters: a shadow for one update, a snapshot for a step that is put off."""

from collections import OrderedDict
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.attributes import STEP_HOOKS, read_by_update
from instep._optim.changes import PER_PARAMETER, is_immutable, is_plain, private
from instep._optim.patched import rebind


def shadow_of(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """An optimizer of the same class with the same attributes over other groups and state, without step hooks."""
    # object.__new__: no constructor runs, so nothing is validated, registered or patched a second time.
    shadow: Optimizer = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    vars(shadow).pop("step", None)  # an LR scheduler's patch of the instance
    rebind(optimizer, shadow)
    shadow.param_groups = groups
    shadow.state = state
    for name in STEP_HOOKS:
        setattr(shadow, name, OrderedDict())
    return shadow


def alias_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory and version counter, with ``gradient`` as its ``.grad``.

    The alias can be stepped on another thread while the parameter's own ``.grad`` is read and cleared.
    """
    alias = parameter.detach()
    if parameter.requires_grad:
        alias.requires_grad = True
    if attributes := vars(parameter):
        vars(alias).update(attributes)
    alias.grad = gradient
    return alias


def snapshot_of(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with its groups and attributes as they are now, over the live state.

    What a fused ``GradScaler`` step sets for the duration of ``step()`` is copied: it is updated in place later.
    """
    groups = [
        {key: list(value) if key in PER_PARAMETER else private(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    copied = shadow_of(optimizer, groups, optimizer.state)
    copied.defaults = private(optimizer.defaults)
    for name in ("grad_scale", "found_inf"):
        if isinstance(value := vars(copied).get(name), torch.Tensor):
            setattr(copied, name, value.detach().clone())
    return copied


def is_copied_whole(optimizer: Optimizer) -> bool:
    """Whether ``snapshot_of`` copies all that the update reads, parameters and state aside."""
    groups = [value for group in optimizer.param_groups for key, value in group.items() if key not in PER_PARAMETER]
    attributes = [value for name, value in read_by_update(optimizer).items() if name != "defaults"]
    return all(map(is_plain, groups)) and is_plain(optimizer.defaults) and all(map(is_immutable, attributes))
