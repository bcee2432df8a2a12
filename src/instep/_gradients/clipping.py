"""Clipping: the policies that ``attach`` takes, a step's norms and factors, and torch's arithmetic in parts.

A policy is a small frozen value. ``Clipping`` is the policy at work: it measures gradients as they become final
(``measure``), takes the norm of all of them (``compute_total_norm``), and scales gradients before they are applied
(``clip``). torch does all of this in one call of ``clip_grad_norm_``, when every gradient is there. The functions below
``Clipping`` do the same in parts, bit for bit.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch.utils import _foreach_utils

from instep._optim.parameters import AttachedParameter
from instep._optim.stepper import Stepper
from instep._torch.placeholders import dtype_of_gradient
from instep._torch.versions import memory_of
from instep.errors import AttachError

Mode = Literal["exact", "two_pass"]


@dataclass(frozen=True, slots=True)
class ClipNorm:
    """Scale gradients down so that their total norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_``.

    The norm is that of the gradients of all attached parameters, in the model's order.

    Attributes:
        max_norm: every gradient is multiplied by ``min(max_norm / (norm + 1e-6), 1)``. With ``math.inf`` a finite norm
            is taken for ``overlap.grad_norm`` alone, with every schedule. Where it is not finite, torch makes all
            gradients NaN, and ``schedule="backward"`` without ``undo`` has applied them as they were.
        norm_type: the p of the p-norm; ``inf`` is the largest absolute value.
        error_if_nonfinite: raise ``RuntimeError`` where the norm is not finite, before any gradient is scaled.
        mode: how the norm is known before the first update. Both have the plain loop's numbers.

            - ``"exact"``: with ``schedule="forward"``, or with ``undo``.
            - ``"two_pass"``: with ``schedule="backward"``. ``overlap.backward(loss)`` in place of ``loss.backward()``
              runs backward twice, to measure and to step (LOMO, arXiv:2306.09782). Under DDP, whose buckets hold all
              gradients anyway, once.

    Since 0.1.0.

    Example:
        ```python
        clip = instep.ClipNorm(1.0, mode="two_pass")
        overlap = instep.attach(model, optimizer, schedule="backward", clip=clip)
        for batch in loader:
            overlap.backward(model(batch))  # two backwards: the first one measures
            optimizer.step()
            optimizer.zero_grad()
            print(overlap.grad_norm)
        ```
    """

    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False
    mode: Mode = "exact"

    def __post_init__(self) -> None:
        _require_number("ClipNorm", "max_norm", self.max_norm)
        _require_number("ClipNorm", "norm_type", self.norm_type)
        if not isinstance(self.error_if_nonfinite, bool):
            raise AttachError(f"ClipNorm: error_if_nonfinite must be True or False, not {self.error_if_nonfinite!r}")
        if self.mode not in get_args(Mode):
            raise AttachError(f"ClipNorm: mode={self.mode!r} is not known: it is one of {', '.join(get_args(Mode))}")


@dataclass(frozen=True, slots=True)
class ClipValue:
    """Clamp every element of every gradient to ``[-clip_value, clip_value]``, as ``clip_grad_value_``.

    Exact under every schedule.

    Since 0.1.0.

    Example:
        ```python
        instep.attach(model, optimizer, schedule="backward", clip=instep.ClipValue(0.5))
        for batch in loader:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        ```
    """

    clip_value: float

    def __post_init__(self) -> None:
        _require_number("ClipValue", "clip_value", self.clip_value)


def _require_number(kind: str, name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Not NaN, nor a whole number that is no float.
    if not is_number or not (0 <= value <= sys.float_info.max or value == math.inf):
        raise AttachError(f"{kind}: {name} must be a number that is not negative, not {value!r}")


Clip = Callable[[Sequence[torch.Tensor]], None]
"""Clips the ``.grad`` of parameters in place."""


class Clipping:
    """A clip policy at work: the norms of the running step, and what is done to gradients with them.

    Attributes:
        policy: what was asked for; ``None`` does nothing.
        over_stages: takes the norm of all stages of a pipeline, given this rank's; ``None``: there are no others.
        grad_norm: the norm of all gradients of the last step, before they were clipped, 0-dim; ``None`` before the
            first, and unless ``policy`` is a ``ClipNorm``.
        total: the same for the running step, once it is known.
        norms: of the gradients of the running step that were measured, by index.
        clipped_count: how many steps had a norm above the limit, where that was asked.
        has_clipped: whether the last of those that were asked had.
    """

    def __init__(self, policy: ClipNorm | ClipValue | None) -> None:
        self.policy = policy
        self.over_stages: Callable[[torch.Tensor, float], torch.Tensor] | None = None
        self.grad_norm: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.clipped_count = 0
        self.has_clipped = False
        self._so_far: torch.Tensor | None = None  # the norm of the gradients that were measured, where it was asked for
        self.norms: dict[int, torch.Tensor] = {}
        self._steppers_left: set[Stepper] = set()  # whose step() has still to use the norm

    @property
    def mode(self) -> str | None:
        """The mode of a ``ClipNorm``; ``None`` for another policy."""
        return self.policy.mode if isinstance(self.policy, ClipNorm) else None

    def begin(self) -> None:
        """A step begins: none of its gradients is known yet."""
        self._steppers_left.clear()
        self.total = None
        self.drop_norms()

    def measure(self, parameters: Sequence[AttachedParameter], gradients: Sequence[torch.Tensor]) -> None:
        if isinstance(self.policy, ClipNorm):
            self.norms.update(self.norms_of(parameters, gradients))

    def norms_of(
        self, parameters: Sequence[AttachedParameter], gradients: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The norm of each of these gradients, by index."""
        assert isinstance(self.policy, ClipNorm)
        norms = norms_of(gradients, self.policy.norm_type)
        return {attached.spec.index: norm for attached, norm in zip(parameters, norms, strict=True)}

    def is_measured(self, attached: AttachedParameter) -> bool:
        return attached.spec.index in self.norms

    def drop_norm(self, attached: AttachedParameter) -> None:
        """A gradient was changed after it had been measured."""
        self.norms.pop(attached.spec.index, None)

    def drop_norms(self) -> None:
        """Gradients may change from now on."""
        self.norms.clear()
        self._so_far = None

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
        norm_type = self.policy.norm_type
        norms = [self.norms[a.spec.index] for a in known]
        # torch groups gradients by their own dtypes, which parameters may have others than. A norm has that of its
        # gradient, but for that of a complex one, which is real.
        pairs = [(a.get(), norm) for a, norm in zip(known, norms, strict=True)]
        like = [p if dtype_of_gradient(p) is p.dtype else norm for p, norm in pairs]
        total = total_norm(like, norms, norm_type)
        if self.over_stages is not None:
            total = self.over_stages(total.to(parameters[0].spec.device), norm_type)
        if self.policy.error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(  # as torch raises it
                f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped. "
                "Nothing was updated. With ClipNorm(error_if_nonfinite=False) they would be scaled by it anyway"
            )
        self.total = self.grad_norm = total
        self._steppers_left = {a.stepper for a in known}

    def stepped(self, stepper: Stepper) -> None:
        """``optimizer.step()`` has used the norm. With that of the last optimizer the step is over."""
        self._steppers_left.discard(stepper)
        if not self._steppers_left:
            self.begin()

    def scales_down(self) -> bool:
        """Whether the norm, which is known, is above the limit. Waits for it."""
        assert isinstance(self.policy, ClipNorm)
        assert self.total is not None
        self.has_clipped = scales_down(self.policy.max_norm, self.total)
        self.clipped_count += self.has_clipped
        return self.has_clipped

    def will_scale_down(self, measured: Sequence[AttachedParameter]) -> bool:
        """Whether the gradients that were measured so far, of which ``measured`` are the last, have a norm above the
        limit by themselves: that of all is not smaller, rounding aside. Only where the host need not wait for it."""
        if not isinstance(self.policy, ClipNorm):
            return False
        norms = [self.norms[attached.spec.index] for attached in measured]
        if self._so_far is not None:
            norms.append(self._so_far)
        if any(norm.device.type != "cpu" or hasattr(norm, "device_mesh") for norm in norms):
            return False
        self._so_far = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), self.policy.norm_type)
        return scales_down(self.policy.max_norm, self._so_far)

    def clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the ``.grad`` of ``parameters`` in place, which are about to be applied together."""
        self.as_of_now()(parameters)

    def as_of_now(self) -> Clip:
        """``clip`` with the norm of this moment, for a later one: an update that is put off clips by the norm of its
        own step, when the next step has its norm already."""
        return partial(_clip, self.policy, self.total)


def _clip(policy: ClipNorm | ClipValue | None, total: torch.Tensor | None, parameters: Sequence[torch.Tensor]) -> None:
    if not parameters:
        return  # clip_grad_value_ raises where there is nothing to clip
    if isinstance(policy, ClipValue):
        for members in by_mesh([p if p.grad is None else p.grad for p in parameters]):
            torch.nn.utils.clip_grad_value_([parameters[i] for i in members], policy.clip_value)
    elif isinstance(policy, ClipNorm) and total is not None:
        clip_by(parameters, policy.max_norm, total)


# The norm of all gradients, bit for bit that of ``torch.nn.utils.clip_grad_norm_``, from norms taken one by one.
#
# torch takes the norm of every gradient, puts these in an order of its own (by device and dtype, then as given), and
# takes the norm of them (``torch/nn/utils/clip_grad.py``, ``_get_total_norm``). The norm of one gradient does not
# depend on the others, so it can be taken as soon as that gradient is final. How torch groups tensors, and which of two
# kernels it takes, has no public name: ``tests/unit/test_norms.py`` fails clearly when that changes.


@torch.no_grad()
def norms_of(gradients: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each gradient, as torch takes it: 0-dim, on the gradient's device and in its dtype."""
    by_position: dict[int, torch.Tensor] = {}
    for on_one in by_mesh(gradients):
        for (device, _), ([members], positions) in _grouped([gradients[i] for i in on_one]).items():
            if _foreach_utils._has_foreach_support(members, device):
                norms: Sequence[torch.Tensor] = torch._foreach_norm(members, norm_type)
            else:
                norms = [torch.linalg.vector_norm(g, norm_type) for g in members]
            by_position.update(zip((on_one[i] for i in positions), norms, strict=True))
    return [by_position[position] for position in range(len(gradients))]


@torch.no_grad()
def are_unlike(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> torch.Tensor:
    """For each of these norms, of gradients on one device, whether it is another one the second time."""
    then, now = (torch.stack([*map(memory_of, norms)]) for norms in (first, second))
    # Bit for bit on a CPU. On an accelerator kernels may add in another order each time (atomics), which changes the
    # last bits; what this looks for are other gradients.
    return ~torch.isclose(now, then, rtol=0.0 if now.is_cpu else 0.01, atol=0.0, equal_nan=True)


@torch.no_grad()
def total_norm(like: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of ``norms``, in torch's order: a plain 0-dim tensor.

    Norms of gradients that are spread over ranks are reduced as torch reduces them: all ranks must call this. torch
    has no norm of gradients on several meshes (or of plain ones beside them). Here it is the norm of the norms on each.

    Args:
        like: tensors of the devices and dtypes of the gradients: the gradients, or their parameters.
    """
    if not norms:
        return torch.tensor(0.0)
    totals: list[torch.Tensor] = []
    for members in by_mesh(norms):
        ordered = [norms[members[i]] for ([_], places) in _grouped([like[m] for m in members]).values() for i in places]
        total = torch.linalg.vector_norm(torch.stack([norm.to(like[0].device) for norm in ordered]), norm_type)
        totals.append(total.full_tensor() if hasattr(total, "full_tensor") else total)
    return totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals), norm_type)


def scales_down(max_norm: float, total: torch.Tensor) -> bool:
    """Whether clipping changes anything. Waits for the norm."""
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    return not bool(factor == 1.0)


def clip_by(parameters: Sequence[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
    """Scale the gradients of ``parameters`` in place, as torch does once it has the norm."""
    for members in by_mesh([p if p.grad is None else p.grad for p in parameters]):
        torch.nn.utils.clip_grads_with_norm_([parameters[i] for i in members], max_norm, total)


def by_mesh(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Divide the positions of ``tensors`` into what one foreach call takes: plain tensors, and the DTensors of each
    device mesh."""
    positions: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        positions.setdefault(getattr(tensor, "device_mesh", None), []).append(position)
    return list(positions.values())


_Groups = dict[tuple[torch.device, torch.dtype], tuple[list[list[torch.Tensor]], list[int]]]


def _grouped(tensors: Sequence[torch.Tensor]) -> _Groups:
    if not tensors:
        return {}
    grouped: Any = _foreach_utils._group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)
    return cast(_Groups, grouped)
