"""Loss scales and gradients that are not finite: what a step asks of gradients before it keeps their update.

``LossScale`` takes a loss scale off gradients as ``torch.amp.GradScaler`` does (``torch/amp/grad_scaler.py``).
``ask_if_finite`` asks all ranks whether their gradients are finite, for the option ``nonfinite``.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from instep._gradients.clipping import norms_of
from instep._ranks.votes import StepVotes
from instep._torch.versions import memory_of
from instep.errors import NonFiniteGradientError


class LossScale:
    """The loss scale of the running step.

    ``GradScaler`` takes it off in one of two ways: ``unscale_`` multiplies by the reciprocal, and a fused optimizer's
    kernel divides. Both give the same gradients where the scale is a power of two.

    Attributes:
        taken_off: whether ``GradScaler`` has asked for the scale to be taken off in this step, as it was here.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._inverse: torch.Tensor | None = None  # by which the gradients of this step were multiplied here
        # The factor that GradScaler gave last, and the answer of take_off to it: the host waits once for each factor.
        self._asked: torch.Tensor | None = None
        self._leaves = False
        self.taken_off = False

    def begin(self) -> None:
        """A new step: the scale may be another."""
        self._inverse = self._asked = None
        self.taken_off = False

    def unscaled(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._inverse is None:
            self._inverse = _reciprocal(self._scaler.scale(torch.ones((), device=gradients[0].device)))
        copies = [gradient.clone() for gradient in gradients]
        _unscale(copies, self._inverse)
        return copies

    def take_off(self, inverse: torch.Tensor) -> bool:
        """``GradScaler`` is about to multiply all gradients by ``inverse``, in place. Whether that is the scale of this
        step, which was taken off here already, or changes nothing: with 1 it only looks for infinities. Asked for each
        gradient of a call; the host waits once."""
        if inverse is not self._asked:
            self._asked = inverse
            if self._inverse is not None and not self.taken_off:
                self.taken_off = torch.equal(inverse.to(self._inverse.device), self._inverse)
            self._leaves = self.taken_off or float(inverse) == 1.0
        return self._leaves

    def is_inverse_of(self, scale: torch.Tensor) -> bool:
        return self._inverse is not None and torch.equal(_reciprocal(scale).to(self._inverse.device), self._inverse)


def kernel_scale(optimizer: Optimizer) -> torch.Tensor | None:
    """The scale that the optimizer's kernel is about to divide gradients by."""
    scale: Any = vars(optimizer).get("grad_scale")
    return scale if isinstance(scale, torch.Tensor) else None


def found_inf(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel is about to skip its update."""
    flag: Any = vars(optimizer).get("found_inf")
    return flag is not None and bool(flag)


def tells_kernel(optimizer: Optimizer) -> bool:
    """Whether its kernel is told of a loss scale, or of infinities: then it writes gradients, or skips its update."""
    return kernel_scale(optimizer) is not None or vars(optimizer).get("found_inf") is not None


def is_power_of_two(scale: torch.Tensor) -> bool:
    return math.frexp(scale.item())[0] == 0.5


def take_off_here(optimizer: Optimizer, gradients: Sequence[torch.Tensor]) -> None:
    """Unscale ``gradients`` in place as ``unscale_`` would, and tell the optimizer's kernel not to."""
    scale = kernel_scale(optimizer)
    if scale is not None:
        _unscale(gradients, _reciprocal(scale))
        optimizer.grad_scale = None  # type: ignore[attr-defined]  # GradScaler's, which deletes it after step()


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    return scale.double().reciprocal().float()


def _unscale(gradients: Sequence[torch.Tensor], inverse: torch.Tensor) -> None:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), members in kinds.items():
        ignored = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(members, ignored, inverse.to(device))


Policy = Literal["allow", "skip", "raise"]
"""What is done with a step that has a gradient which is not finite."""


Named = Sequence[tuple[str, torch.Tensor]]
"""Gradients, each with the name of its parameter."""


def ask_if_finite(gradients: Named, ranks: StepVotes, step: int) -> int | None:
    """The first rank with a gradient that is not finite; ``None`` if all are finite on all ranks. Waits for the ranks.

    Raises what else is wrong with the step: see ``Verdict.error``.
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


@torch.no_grad()
def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether no element of what this rank holds is NaN or infinite. Waits for the gradients."""
    values = [v for g in gradients if (v := _values(g)).numel()]
    # The norm of finite values may overflow, but that of others is never finite, and nothing is read faster.
    norms = norms_of(values, 2.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for norm in norms:
        by_device.setdefault(norm.device, []).append(norm.double() if norm.device.type == "cpu" else norm.float())
    finite = [torch.stack(of_device).isfinite().all() for of_device in by_device.values()]
    if not finite or bool(torch.stack([answer.to(finite[0].device) for answer in finite]).all()):
        return True
    return all(bool(v.isfinite().all()) for v in values)


def nonfinite_error(gradients: Named, rank: int, at: str) -> NonFiniteGradientError:
    """The error for ``nonfinite="raise"``.

    Args:
        rank: a rank with a gradient that is not finite: the first, where ranks were asked; else this one.
        at: what was or was not written.
    """
    name = next((name for name, g in gradients if not bool(_values(g).isfinite().all())), None)
    if name is None:
        where = f"a gradient is not finite on rank {rank}, and all gradients of this rank are"
    else:
        where = f"the gradient of {name!r} is not finite"
    return NonFiniteGradientError(
        f"{where}. {at}. Look for a learning rate that is too high, a division by zero or an overflow; "
        "nonfinite='skip', with schedule='forward' or undo=True, leaves such steps out",
        name,
        rank,
    )


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The elements that this rank holds; of a sparse gradient those that are stored."""
    values = memory_of(gradient)
    return values._values() if values.is_sparse else values
