"""Settings of single parameters that bitsandbytes keeps beside ``param_groups``, for a copy of an optimizer.

Its ``GlobalOptimManager``, one object for all optimizers of a process, finds them by a parameter's group and position,
and by its ``id``. A bucket's shadow has its parameters at other positions, and a stand-in has another ``id``: so each
copy of an optimizer has overrides of its own, in which the same parameters have the same settings.

bitsandbytes documents ``override_config`` and ``register_module_override``, not how it keeps what they were given:
``index2config``, ``pid2config``, ``module_weight_config_triple`` (tests/parity/test_bitsandbytes.py would tell).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

MANAGER = "mng"
"""The attribute."""

Place = tuple[int, int]
"""Of a parameter: its group, and where it stands in that."""


class Overrides:
    """In the place of the manager, in a copy of an optimizer.

    Attributes:
        index2config: by place.
        pid2config: by ``id``.
        module_weight_config_triple: modules to look for; none: they have been found.
    """

    def __init__(self, by_place: Mapping[Place, Any], by_id: Mapping[int, Any]) -> None:
        self.index2config = dict(by_place)
        self.pid2config = dict(by_id)
        self.module_weight_config_triple: list[Any] = []
        self.uses_config_override = True


def is_manager(value: object) -> bool:
    """Whether an attribute of an optimizer is the manager, or stands in its place."""
    return hasattr(value, "index2config") and hasattr(value, "module_weight_config_triple")


def has_overrides(optimizer: Optimizer) -> bool:
    """Whether a manager of it holds any, or is about to, in its first step."""
    manager: Any = vars(optimizer).get(MANAGER)
    if not is_manager(manager):
        return False
    return bool(manager.index2config or manager.module_weight_config_triple or getattr(manager, "pid2config", None))


def moved(
    optimizer: Optimizer, places: Iterable[tuple[Place, Place]], ids: Iterable[tuple[int, int]]
) -> Overrides | None:
    """The overrides of ``optimizer`` for a copy of it; ``None``: it has none.

    Args:
        places: of each parameter of the copy: in ``optimizer``, and in the copy.
        ids: likewise.
    """
    if not has_overrides(optimizer):
        return None
    if not getattr(optimizer, "initialized", True):
        optimizer.check_overrides()  # type: ignore[attr-defined]  # as its first step() does; it may be called again
    manager: Any = vars(optimizer)[MANAGER]
    by_place, by_id = manager.index2config, getattr(manager, "pid2config", {})
    return Overrides(
        {there: by_place[here] for here, there in places if here in by_place},
        {there: by_id[here] for here, there in ids if here in by_id},
    )


def same_places(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Place, Place]]:
    """Of a copy that has all parameters where the optimizer has them."""
    for number, group in enumerate(groups):
        for at in range(len(group["params"])):
            yield (number, at), (number, at)


def places_in_bucket(in_group: Sequence[Sequence[int]]) -> Iterator[tuple[Place, Place]]:
    """Of a bucket's shadow.

    Args:
        in_group: by group, where each of the bucket's parameters stands in the optimizer's.
    """
    for number, positions in enumerate(in_group):
        for at, position in enumerate(positions):
            yield (number, position), (number, at)
