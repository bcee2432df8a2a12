"""Settings of single parameters that bitsandbytes keeps beside ``param_groups``, while an optimizer steps a bucket.

Its ``GlobalOptimManager``, one object for all optimizers of a process, finds them by a parameter's group and position,
and by its ``id``. In a bucket the parameters have other positions.

bitsandbytes documents ``override_config`` and ``register_module_override``, not how it keeps what they were given:
``index2config``, ``pid2config``, ``module_weight_config_triple`` (tests/parity/test_bitsandbytes.py would tell).
"""

from collections.abc import Iterable
from inspect import getattr_static
from types import SimpleNamespace
from typing import Any

from torch.optim import Optimizer

MANAGER = "mng"
"""The attribute."""


def is_manager(value: object) -> bool:
    """Whether an attribute of an optimizer is the manager, or stands in its place."""
    # Most are numbers and lists, and are asked about in each step. Looked up past what a class does with names that it
    # does not know.
    return type(value).__module__ != "builtins" and all(
        getattr_static(value, name, None) is not None for name in ("index2config", "module_weight_config_triple")
    )


def overrides_in_bucket(optimizer: Optimizer, in_group: Iterable[Iterable[int]]) -> Any:
    """What stands in the place of the manager of ``optimizer`` for a bucket; ``None``: that overrides nothing.

    Args:
        in_group: by group, where each of the bucket's parameters stands in the optimizer's.
    """
    manager: Any = vars(optimizer).get(MANAGER)
    if not is_manager(manager):
        return None
    by_id = getattr(manager, "pid2config", {})
    if not (manager.index2config or manager.module_weight_config_triple or by_id):
        return None
    if not getattr(optimizer, "initialized", True):
        optimizer.check_overrides()  # type: ignore[attr-defined]  # as its first step() does; it may be called again
    by_place = {
        (number, at): manager.index2config[number, position]
        for number, positions in enumerate(in_group)
        for at, position in enumerate(positions)
        if (number, position) in manager.index2config
    }
    # No modules to look for: they have been found.
    return SimpleNamespace(
        index2config=by_place, pid2config=by_id, module_weight_config_triple=[], uses_config_override=True
    )
