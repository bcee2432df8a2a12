"""Training in somebody else's loop, unmodified and with instep, compared bit for bit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from instep_tools.harness import first_difference, training_state


def optional(*names: str) -> Any:
    """The module of the last name; skips the test unless all are installed: ``pip install 'instep[frameworks]'``."""
    return [pytest.importorskip(name, reason=f"{name} is not installed: instep[frameworks]") for name in names][-1]


@dataclass
class Trained:
    """What a run leaves.

    Attributes:
        logged: what the framework has logged, without times.
        steps: that instep has made; ``None``: it was not there.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    logged: list[Any] = field(default_factory=list)
    steps: int | None = None


def require_equal(run: Callable[[bool], Trained]) -> None:
    """``run`` once without instep and once with it: the same weights, state and log, and instep has stepped."""
    runs = []
    for attached in (False, True):
        torch.manual_seed(0)
        runs.append(run(attached))
    plain, other = runs
    assert first_difference(*map(_state, runs)) is None
    assert len(plain.logged) == len(other.logged)
    assert all(map(_same, plain.logged, other.logged))
    assert other.steps is not None
    assert other.steps > 1


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else repr(one) == repr(other)  # NaN is NaN


def _state(run: Trained) -> Iterator[tuple[str, Any]]:
    return training_state(run.model, run.optimizer)


def without_times(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if not _is_time(key)} for entry in log]


def _is_time(key: str) -> bool:
    return key.endswith(("_runtime", "_per_second", "time")) or "time/" in key
