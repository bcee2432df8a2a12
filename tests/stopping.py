"""An update that stops in the middle, and what an error may say of the parameters then."""

from collections.abc import Mapping
from typing import Any

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
