"""The norm of all gradients, bit for bit that of ``torch.nn.utils.clip_grad_norm_``, from norms taken one by one.

torch takes the norm of every gradient, puts these in an order of its own (by device and dtype, then as given), and
takes the norm of them (``torch/nn/utils/clip_grad.py``, ``_get_total_norm``). The norm of one gradient does not depend
on the others, so it can be taken as soon as that gradient is final. How torch groups tensors, and which of two kernels
it takes, has no public name: ``tests/unit/test_norms.py`` fails clearly when that changes.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.utils import _foreach_utils

_Groups = dict[tuple[torch.device, torch.dtype], tuple[list[list[torch.Tensor]], list[int]]]


@torch.no_grad()
def norms_of(gradients: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each gradient, as torch takes it: 0-dim, on the gradient's device and in its dtype."""
    found: dict[int, torch.Tensor] = {}
    for on_one in by_mesh(gradients):
        for (device, _), ([members], positions) in _grouped([gradients[i] for i in on_one]).items():
            if _foreach_utils._has_foreach_support(members, device):
                norms: Sequence[torch.Tensor] = torch._foreach_norm(members, norm_type)
            else:
                norms = [torch.linalg.vector_norm(g, norm_type) for g in members]
            found.update(zip((on_one[i] for i in positions), norms, strict=True))
    return [found[position] for position in range(len(gradients))]


@torch.no_grad()
def total_norm(
    like: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """The norm of ``norms``, in torch's order: a plain 0-dim tensor.

    Norms of gradients that are spread over ranks are reduced as torch reduces them: all ranks must call this. torch
    has no norm of gradients on several meshes (or of plain ones beside them). Here it is the norm of the norms on each.

    Args:
        like: tensors of the devices and dtypes of the gradients: the gradients, or their parameters.

    Raises:
        RuntimeError: as torch raises it, where ``error_if_nonfinite`` is set.
    """
    if not norms:
        return torch.tensor(0.0)
    totals: list[torch.Tensor] = []
    for members in by_mesh(norms):
        ordered = [norms[members[i]] for ([_], places) in _grouped([like[m] for m in members]).values() for i in places]
        total = torch.linalg.vector_norm(torch.stack([norm.to(like[0].device) for norm in ordered]), norm_type)
        totals.append(total.full_tensor() if hasattr(total, "full_tensor") else total)
    total = totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped. "
            "Nothing was updated. With ClipNorm(error_if_nonfinite=False) they would be scaled by it anyway"
        )
    return total


def clip_by(parameters: Sequence[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
    """Scale the gradients of ``parameters`` in place, as torch does once it has the norm."""
    for members in by_mesh([p if p.grad is None else p.grad for p in parameters]):
        torch.nn.utils.clip_grads_with_norm_([parameters[i] for i in members], max_norm, total)


def by_mesh(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Their positions, divided into what one foreach call takes: plain tensors, and DTensors of one device mesh."""
    found: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(position)
    return list(found.values())


def scales_down(max_norm: float, total: torch.Tensor) -> bool:
    """Whether clipping changes anything. Waits for the norm."""
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    return not bool(factor == 1.0)


def _grouped(tensors: Sequence[torch.Tensor]) -> _Groups:
    if not tensors:
        return {}
    grouped: Any = _foreach_utils._group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)
    return cast(_Groups, grouped)
