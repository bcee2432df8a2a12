"""``param_groups`` of a checkpoint: whether they fit an optimizer's, and are sane."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from instep.errors import CheckpointError

# torch's own optimizers refuse others.
_NOT_NEGATIVE = ("lr", "initial_lr", "weight_decay", "momentum")


def check_values(where: str, current: Mapping[str, Any], saved: Mapping[str, Any], *, allow_nonfinite: bool) -> None:
    """Raise ``CheckpointError`` unless ``saved`` could be the values of the group that has ``current``."""
    for key, value in saved.items():
        for number in _numbers(value):
            if not allow_nonfinite and not math.isfinite(number) and not _nonfinite(current.get(key)):
                raise CheckpointError(f"{where}[{key!r}] is {value!r} in the checkpoint, which is not finite")
            if key in _NOT_NEGATIVE and number < 0:
                raise CheckpointError(f"{where}[{key!r}] is {value!r} in the checkpoint, which is negative")
        if key in current and not _alike(current[key], value):
            raise CheckpointError(
                f"{where}[{key!r}] is {value!r} in the checkpoint and {current[key]!r} in the optimizer"
            )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            yield float(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _nonfinite(value: Any) -> bool:
    return any(not math.isfinite(number) for number in _numbers(value))


def _alike(current: Any, saved: Any) -> bool:
    if current is None or saved is None:
        return True
    if isinstance(current, (list, tuple)) and isinstance(saved, (list, tuple)):
        return len(current) == len(saved) and all(map(_alike, current, saved))
    if _is_number(current) and _is_number(saved):
        return True
    return type(current) is type(saved)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
