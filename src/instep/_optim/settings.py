"""Settings that ``optimizer.step()`` may write, to be restored when the step turns out to be left out."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.attributes import beside_parameters
from instep._optim.changes import PER_PARAMETER, is_immutable, private, same


def remember_settings(optimizer: Optimizer) -> Callable[[], None]:
    """Copy the values that ``step()`` may write outside of parameters and their own state.

    Returns:
        A function that restores them: in the groups, in ``state`` and on the optimizer itself.
    """
    places: list[tuple[Any, dict[Any, Any]]] = [
        (group, {key: private(value) for key, value in group.items() if key not in PER_PARAMETER})
        for group in optimizer.param_groups
    ]
    places.append((optimizer.state, {key: private(v) for key, v in beside_parameters(optimizer.state).items()}))
    places.append((vars(optimizer), {key: private(value) for key, value in _attributes(optimizer).items()}))
    known = [set(place) for place, _ in places]

    def restore() -> None:
        for (place, before), names in zip(places, known, strict=True):
            for key in place.keys() - names:
                if place is not vars(optimizer) or _may_be_setting(key):
                    del place[key]
            for key, value in before.items():
                _restore(place, key, value)

    return restore


def _restore(place: dict[Any, Any], key: Any, value: Any) -> None:
    """A tensor is written into, as far as it fits: others may refer to it."""
    now = place.get(key)
    if not _holds(now, value):
        place[key] = value
    elif not same(now, value):
        place[key].detach().copy_(value)


def _holds(now: Any, value: Any) -> bool:
    """Whether ``now`` is a tensor into which ``value`` can be written."""
    tensors = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
    return tensors and now.shape == value.shape and now.dtype == value.dtype


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The numbers and tensors that a loop may set on an optimizer beside its groups."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if _may_be_setting(name) and (isinstance(value, torch.Tensor) or is_immutable(value))
    }


def _may_be_setting(name: str) -> bool:
    # The underscore is torch's own; the two names are GradScaler's, for the duration of a fused step.
    return not name.startswith("_") and name not in ("grad_scale", "found_inf")
