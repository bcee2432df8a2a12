"""An update that stops in the middle, and what an error may say of the parameters then."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from instep.errors import TornStepError

LEFT: dict[str, int] = {}
"""How many parameters may still be updated, where that is bounded. instep sees what a step changes in an optimizer."""


class Stops(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if LEFT.get("parameters") == 0:
                    raise ZeroDivisionError("the update")
                parameter.sub_(parameter.grad, alpha=group["lr"])
                if LEFT:
                    LEFT["parameters"] -= 1


@contextmanager
def updates_stop() -> Iterator[None]:
    """torch's own SGD stops in the same way: an update that waits is one of torch's own."""

    def update(parameters: list[torch.Tensor], gradients: list[torch.Tensor], *_: Any, lr: float, **__: Any) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if LEFT.get("parameters") == 0:
                raise ZeroDivisionError("the update")
            parameter.sub_(gradient, alpha=lr)
            if LEFT:
                LEFT["parameters"] -= 1

    with patch.object(sys.modules["torch.optim.sgd"], "sgd", update):
        yield


def require_true(torn: TornStepError, found: Mapping[str, torch.Tensor], old: Any, new: Any) -> None:
    """Each parameter is what the error says.

    Args:
        found: weights by name, as the torn step has left them.
        old: those of before the step.
        new: those of the plain loop after it.
    """
    named = [*torn.applied, *torn.pending, *torn.unsure]
    assert len(named) == len(set(named))
    assert set(named) <= set(found)
    others = [name for name in torn.applied if not torch.equal(found[name], new[name])]
    assert not others, f"said to be updated: {others}"
    left_alone = set(found) - {*torn.applied, *torn.unsure}  # some had no gradient yet
    assert set(torn.pending) <= left_alone
    written = [name for name in left_alone if not torch.equal(found[name], old[name])]
    assert not written, f"said not to be updated: {written}"
