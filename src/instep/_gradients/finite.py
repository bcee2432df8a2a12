"""Are gradients finite? One pass over them, and one wait."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from instep._gradients.norms import norms_of
from instep._optim.parts import memory_of
from instep._ranks.votes import StepVotes
from instep.errors import NonFiniteGradientError

Policy = Literal["allow", "skip", "raise"]
"""What is done with a step that has a gradient which is not finite."""

Named = Sequence[tuple[str, torch.Tensor]]


@torch.no_grad()
def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether no element is NaN or infinite, of what this rank holds. Waits for the gradients."""
    values = [v for g in gradients if (v := _values(g)).numel()]
    # The norm of finite values may overflow, but that of others is never finite, and nothing is read faster.
    norms = norms_of(values, 2.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for norm in norms:
        by_device.setdefault(norm.device, []).append(norm.double() if norm.device.type == "cpu" else norm.float())
    finite = [torch.stack(found).isfinite().all() for found in by_device.values()]
    if not finite or bool(torch.stack([answer.to(finite[0].device) for answer in finite]).all()):
        return True
    return all(bool(v.isfinite().all()) for v in values)


def first_nonfinite(gradients: Named) -> str | None:
    """The name of the first that is not finite."""
    return next((name for name, g in gradients if not bool(_values(g).isfinite().all())), None)


def nonfinite_error(gradients: Named, rank: int, at: str) -> NonFiniteGradientError:
    """The error for ``nonfinite="raise"``.

    Args:
        rank: a rank with a gradient that is not finite: the first, where ranks were asked; else this one.
        at: what was or was not written.
    """
    name = first_nonfinite(gradients)
    if name is None:
        where = f"a gradient is not finite on rank {rank}, and all gradients of this rank are"
    else:
        where = f"the gradient of {name!r} is not finite"
    return NonFiniteGradientError(
        f"{where}. {at}. Look for a learning rate that is too high, a division by zero or an overflow; "
        "nonfinite='skip' leaves such steps out",
        name,
        rank,
    )


def ask_if_finite(gradients: Named, ranks: StepVotes, step: int) -> int | None:
    """The first rank with a gradient that is not finite; ``None`` if all are on all ranks. Waits for these.

    Raises what is wrong with the step otherwise: see ``error``.
    """
    finite = all_finite(g for _, g in gradients)
    vote = ranks.say(step, nonfinite=not finite)
    if vote is None:
        return None if finite else ranks.rank()
    verdict = vote.verdict()
    error = verdict.error()
    try:
        if error is not None:
            raise error
    finally:
        del error  # or it would refer to itself, by way of this frame
    return verdict.nonfinite_on


def _values(gradient: torch.Tensor) -> torch.Tensor:
    values = memory_of(gradient)
    return values._values() if values.is_sparse else values
