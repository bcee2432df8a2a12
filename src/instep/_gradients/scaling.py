"""A loss scale taken off gradients as ``torch.amp.GradScaler`` takes it off (``torch/amp/grad_scaler.py``)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer


class LossScale:
    """The scale of the running step.

    ``GradScaler`` takes it off in one of two ways: ``unscale_`` multiplies by the reciprocal, and a fused optimizer's
    kernel divides. They are the same where the scale is a power of two.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._inverse: torch.Tensor | None = None
        self._asked: torch.Tensor | None = None  # about which the answer is known
        self._leaves = False
        self.taken_off = False

    def begin(self) -> None:
        """A new step: the scale may be another."""
        self._inverse = self._asked = None
        self.taken_off = False

    def unscaled(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of ``gradients`` without the scale."""
        if self._inverse is None:
            self._inverse = _reciprocal(self._scaler.scale(torch.ones((), device=gradients[0].device)))
        copies = [gradient.clone() for gradient in gradients]
        _unscale(copies, self._inverse)
        return copies

    def take_off(self, inverse: torch.Tensor) -> bool:
        """``GradScaler`` multiplies all gradients by ``inverse``, in place. Whether the scale is taken off so, or
        nothing is changed: 1 is its check for infinities alone. Asked for each gradient of a call; the host waits
        once."""
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
    found: Any = vars(optimizer).get("found_inf")
    return found is not None and bool(found)


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
