"""``schedule="forward"``: parameters that somebody may read in a way that nobody notices. They are stepped at once."""

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch.optim import Optimizer

from instep._optim.owners import (
    are_kept,
    by_themselves,
    entries_are_kept,
    have_other_owners,
    in_views_of_ddp,
    state_is_kept,
)
from instep._optim.parameters import GRADIENT, AttachedParameter, AttachedParameters
from instep._optim.parts import are_plain


def exposed(
    optimizer: Optimizer,
    mine: AttachedParameters,
    everybody: AttachedParameters,
    on_their_way: Collection[AttachedParameter],
    *,
    in_ddp: bool,
) -> set[AttachedParameter]:
    """Those of ``mine`` whose values, gradient or state others have got hold of, who may read or write them after
    ``step()``. Call it before anything else refers to the gradients.

    Args:
        mine: parameters of ``optimizer`` with a gradient.
        everybody: all attached parameters.
        on_their_way: those whose gradient may still be written.
        in_ddp: whether gradients may be views of DDP's buckets.
    """
    if state_is_kept(optimizer):
        return set(mine)
    with torch._C.DisableTorchFunctionSubclass():
        tensors = mine.tensors()
        found = entries_are_kept(list(map(optimizer.state.get, tensors)))
        if are_plain(tensors):
            found = _either(found, have_other_owners(tensors))
            if not on_their_way:
                found = _either(found, _gradients_have_other_owners(tensors, everybody, in_ddp=in_ddp))
                found = _either(found, are_kept(list(map(GRADIENT, tensors))))
    return {attached for attached, one in zip(mine, found, strict=True) if one}


def _gradients_have_other_owners(
    tensors: Sequence[torch.Tensor], everybody: AttachedParameters, *, in_ddp: bool
) -> list[bool]:
    """Of each of ``tensors``, which have one: whether its gradient has."""
    gradients = cast(list[torch.Tensor], list(map(GRADIENT, tensors)))  # each has one
    if not are_plain(gradients):
        return [False] * len(tensors)
    if not in_ddp or not any(map(torch.Tensor._is_view, gradients)):
        return have_other_owners(gradients)
    # A bucket may have gradients of several optimizers.
    in_buckets = [g for g in map(GRADIENT, everybody.tensors()) if type(g) is torch.Tensor and g._is_view()]
    shared = dict(zip(map(id, in_buckets), have_other_owners(in_buckets, in_views_of_ddp), strict=True))
    alone = have_other_owners(gradients, by_themselves)
    return [shared.get(id(gradient), one) for gradient, one in zip(gradients, alone, strict=True)]


def _either(one: Sequence[bool], other: Sequence[bool]) -> list[bool]:
    return [a or b for a, b in zip(one, other, strict=True)]
