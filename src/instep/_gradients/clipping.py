"""Clipping within one step: norms as they become known, and what is done to gradients with them."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from instep._gradients.norms import by_mesh, clip_by, norms_of, scales_down, total_norm
from instep._gradients.policies import ClipNorm, ClipValue
from instep._optim.parameters import AttachedParameter
from instep._optim.stepper import Stepper

Clip = Callable[[Sequence[torch.Tensor]], None]
"""Clips the ``.grad`` of parameters in place."""


class Clipping:
    """A clip policy at work.

    Attributes:
        policy: what was asked for; ``None`` does nothing.
        grad_norm: the norm of all gradients of the last step, before they were clipped, 0-dim; ``None`` before the
            first, and unless ``policy`` is a ``ClipNorm``.
        total: the same for the running step, once it is known.
    """

    def __init__(self, policy: ClipNorm | ClipValue | None) -> None:
        self.policy = policy
        self.grad_norm: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self._previous: torch.Tensor | None = None
        self._norms: dict[int, torch.Tensor] = {}
        self._owing: set[Stepper] = set()

    @property
    def mode(self) -> str | None:
        """That of a ``ClipNorm``."""
        return self.policy.mode if isinstance(self.policy, ClipNorm) else None

    @property
    def clips_buckets(self) -> bool:
        """Whether each bucket is clipped by its own norm. An infinite limit clips nothing, and only has norms taken."""
        return (
            isinstance(self.policy, ClipNorm) and self.policy.mode == "per_bucket" and self.policy.max_norm < math.inf
        )

    def begin(self) -> None:
        """A step begins: no gradient of it is known yet."""
        self._owing.clear()
        self.total = None
        self._previous = self.grad_norm
        self._norms.clear()

    def measure(self, parameters: Sequence[AttachedParameter], gradients: Sequence[torch.Tensor]) -> None:
        """Take the norms of final gradients."""
        if isinstance(self.policy, ClipNorm):
            for attached, norm in zip(parameters, norms_of(gradients, self.policy.norm_type), strict=True):
                self._norms[attached.spec.index] = norm

    def is_measured(self, attached: AttachedParameter) -> bool:
        return attached.spec.index in self._norms

    def forget(self, attached: AttachedParameter) -> None:
        """A gradient was changed after it had been measured."""
        self._norms.pop(attached.spec.index, None)

    def forget_norms(self) -> None:
        """Gradients may change from now on."""
        self._norms.clear()

    def compute_total_norm(
        self, parameters: Sequence[AttachedParameter], gradient: Callable[[AttachedParameter], torch.Tensor | None]
    ) -> None:
        """All gradients of the step are final: measure those that were not, and take the norm of all.

        Args:
            parameters: all that are attached, in the model's order.
            gradient: of those that have not been measured; ``None`` for those without one.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
        """
        if not isinstance(self.policy, ClipNorm) or self.total is not None:
            return
        rest = [(a, g) for a in parameters if not self.is_measured(a) and (g := gradient(a)) is not None]
        self.measure([a for a, _ in rest], [g for _, g in rest])
        known = [a for a in parameters if self.is_measured(a)]
        self.total = total_norm(
            [a.get() for a in known],
            [self._norms[a.spec.index] for a in known],
            self.policy.norm_type,
            self.policy.error_if_nonfinite,
        )
        self.grad_norm = self.total
        self._owing = {a.stepper for a in known}

    def stepped(self, stepper: Stepper) -> None:
        """``optimizer.step()`` has used the norm. With that of the last optimizer the step is over."""
        self._owing.discard(stepper)
        if not self._owing:
            self.begin()

    def scales_down(self) -> bool:
        """Whether the norm, which is known, is above the limit. Waits for it."""
        assert isinstance(self.policy, ClipNorm)
        assert self.total is not None
        return scales_down(self.policy.max_norm, self.total)

    def clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the ``.grad`` of ``parameters`` in place, which are about to be applied together."""
        self.as_of_now()(parameters)

    def as_of_now(self) -> Clip:
        """``clip`` as it is now, for a later moment."""
        return partial(_clip, self.policy, self._previous if self.mode == "previous_norm" else self.total)


def _clip(policy: ClipNorm | ClipValue | None, total: torch.Tensor | None, parameters: Sequence[torch.Tensor]) -> None:
    if not parameters:
        return  # clip_grad_value_ raises where there is nothing to clip
    if isinstance(policy, ClipValue):
        for members in by_mesh([p if p.grad is None else p.grad for p in parameters]):
            torch.nn.utils.clip_grad_value_([parameters[i] for i in members], policy.clip_value)
    elif isinstance(policy, ClipNorm) and policy.mode == "per_bucket":
        gradients = [p.grad for p in parameters if p.grad is not None]
        own = total_norm(gradients, norms_of(gradients, policy.norm_type), policy.norm_type, False)
        clip_by(parameters, policy.max_norm, own)
    elif isinstance(policy, ClipNorm) and total is not None:
        clip_by(parameters, policy.max_norm, total)
