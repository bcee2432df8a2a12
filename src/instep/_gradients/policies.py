"""What is done to gradients before they are applied: small frozen values that ``attach`` takes."""

import math
import sys
from dataclasses import dataclass
from typing import Literal, get_args

from instep.errors import AttachError

Mode = Literal["exact", "two_pass", "per_bucket", "previous_norm"]


@dataclass(frozen=True, slots=True)
class ClipNorm:
    """Scale gradients down so that their total norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_``.

    The norm is that of the gradients of all attached parameters, in the model's order.

    Attributes:
        max_norm: every gradient is multiplied by ``min(max_norm / (norm + 1e-6), 1)``.
        norm_type: the p of the p-norm; ``inf`` is the largest absolute value.
        error_if_nonfinite: raise ``RuntimeError`` where the norm is not finite, before any gradient is scaled. With
            ``"exact"`` and ``"two_pass"``, whose norm is known before a weight is lost.
        mode: how the norm is known before the first update.

            - ``"exact"``: the plain loop's numbers. With ``schedule="forward"``, or with ``undo``.
            - ``"two_pass"``: the plain loop's numbers with ``schedule="backward"``: ``overlap.backward(loss)`` in
              place of ``loss.backward()`` runs backward twice, to measure and to step (LOMO, arXiv:2306.09782).
              Under DDP, whose buckets hold all gradients anyway, once.
            - ``"per_bucket"``: *another algorithm*. Every bucket is clipped by its own norm, so the result depends on
              ``bucket_bytes``.
            - ``"previous_norm"``: *another algorithm*. The factor comes from the norm of the step before; the first
              step is not clipped.
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
        if self.error_if_nonfinite and self.mode not in ("exact", "two_pass"):
            raise AttachError(
                f"ClipNorm: error_if_nonfinite=True does not fit mode={self.mode!r}, which updates weights before the "
                "norm is known. Use mode='exact' or 'two_pass', or leave it out"
            )


@dataclass(frozen=True, slots=True)
class ClipValue:
    """Clamp every element of every gradient to ``[-clip_value, clip_value]``, as ``clip_grad_value_``.

    Exact under every schedule.
    """

    clip_value: float

    def __post_init__(self) -> None:
        _require_number("ClipValue", "clip_value", self.clip_value)


def _is_a_limit(value: float) -> bool:
    return 0 <= value <= sys.float_info.max or value == math.inf  # not NaN, nor a whole number that is no float


def _require_number(kind: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_a_limit(value):
        raise AttachError(f"{kind}: {name} must be a number that is not negative, not {value!r}")
