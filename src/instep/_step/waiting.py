"""``schedule="forward"``: which parameters of a step can wait. Those that somebody may read in a way that nobody sees
are stepped at once."""

from collections.abc import Collection, Container, Mapping, Sequence
from operator import attrgetter

import torch
from torch.optim import Optimizer

from instep._autograd.placeholders import HeldGradient, Placeholder
from instep._autograd.watch import plain_type
from instep._optim.calls import shard_of_gradient
from instep._optim.kinds import refuses_dense_gradients
from instep._optim.owners import (
    Owners,
    are_kept,
    by_themselves,
    entries_are_kept,
    have_other_owners,
    in_shards_of_fsdp2,
    in_two_parts,
    state_is_kept,
)
from instep._optim.parameters import GRADIENT, AttachedParameter, AttachedParameters
from instep._optim.parts import are_plain, memory_of
from instep._optim.stepper import Stepper
from instep._step.pending import InFlightBucket, gradients_in, in_grad

_LAYOUT = attrgetter("layout")
_IN_GRAPH = attrgetter("requires_grad")  # made by backward(create_graph=True)
InFlight = Mapping[AttachedParameter, InFlightBucket]


def waiting_of(
    stepper: Stepper,
    mine: AttachedParameters,
    everybody: AttachedParameters,
    in_flight: InFlight,
    unseen: Container[int],
    *,
    in_views: Owners | None,
) -> dict[AttachedParameter, bool]:
    """Of each parameter of ``mine`` whether its update can wait.

    Args:
        mine: parameters of one optimizer with a gradient.
        everybody: all attached parameters.
        in_flight: those whose gradient may still be on its way.
        unseen: the indices of those whose readers do not wait.
        in_views: the owners of the buckets of which gradients are views; ``None``: they are none.
    """
    seen = _exposed(stepper.optimizer(), mine, everybody, in_flight, in_views=in_views)
    if not in_flight and not unseen and _are_usual(mine):
        return {**dict.fromkeys(mine, True), **dict.fromkeys(seen, False)}
    return {a: a not in seen and _can_wait_alone(a, in_flight.get(a), unseen) for a in mine}


def _are_usual(mine: AttachedParameters) -> bool:
    tensors = mine.tensors()
    gradients = gradients_in(mine, tensors)
    strided = set(map(_LAYOUT, gradients)) == {torch.strided}
    return strided and are_plain(tensors) and are_plain(gradients) and not any(map(_IN_GRAPH, gradients))


def _can_wait_alone(attached: AttachedParameter, flight: InFlightBucket | None, unseen: Container[int]) -> bool:
    gradient = in_grad(attached, flight)
    return (
        # Some optimizers treat parameters of a class of their own in their own way. Steps that communicate must not
        # come when one rank waits for them and another does not.
        (
            plain_type(attached.get()) in (torch.nn.Parameter, torch.Tensor)
            or shard_of_gradient(attached, gradient) is not None
        )
        and attached.spec.index not in unseen
        and gradient.layout is torch.strided
        and not gradient.requires_grad
    )


def _exposed(
    optimizer: Optimizer,
    mine: AttachedParameters,
    everybody: AttachedParameters,
    on_their_way: Collection[AttachedParameter],
    *,
    in_views: Owners | None,
) -> set[AttachedParameter]:
    """Those of ``mine`` whose values, gradient or state others have got hold of, who may read or write them after
    ``step()``; all of an optimizer that raises at such gradients as can wait. Called before anything else refers to the
    gradients."""
    if state_is_kept(optimizer):
        return set(mine)
    if refuses_dense_gradients(optimizer):
        return set(mine)
    with torch._C.DisableTorchFunctionSubclass():
        tensors = mine.tensors()
        found = entries_are_kept(list(map(optimizer.state.get, tensors)))
        found = _either(found, _have_other_owners(mine, tensors))
        if not on_their_way:
            found = _either(found, _gradients_have_other_owners(tensors, everybody, in_views=in_views))
            found = _either(found, are_kept(list(map(GRADIENT, tensors))))
    return {attached for attached, one in zip(mine, found, strict=True) if one}


def _have_other_owners(mine: AttachedParameters, tensors: Sequence[torch.Tensor]) -> list[bool]:
    if are_plain(tensors):
        return have_other_owners(tensors)
    memory = list(map(memory_of, tensors))
    # FSDP2's shards are in no module while it computes.
    in_fsdp2 = [a.mesh is not None and not a.places for a in mine]
    return in_two_parts(memory, in_fsdp2, in_shards_of_fsdp2)


def _gradients_have_other_owners(
    tensors: Sequence[torch.Tensor], everybody: AttachedParameters, *, in_views: Owners | None
) -> list[bool]:
    """Of each of ``tensors``, which have one: whether its gradient has."""
    gradients = [gradient for gradient in map(GRADIENT, tensors) if gradient is not None]
    if not are_plain(gradients):
        gradients = list(map(memory_of, gradients))
    if set(map(_LAYOUT, gradients)) != {torch.strided}:
        return [True] * len(tensors)
    if in_views is None or not any(map(torch.Tensor._is_view, gradients)):
        return have_other_owners(gradients)
    # A bucket may have gradients of several optimizers.
    found = [memory_of(g) for g in map(GRADIENT, everybody.tensors()) if g is not None and not _stands_in(g)]
    in_buckets = [gradient for gradient in found if gradient._is_view()]
    shared = dict(zip(map(id, in_buckets), have_other_owners(in_buckets, in_views), strict=True))
    alone = have_other_owners(gradients, by_themselves)
    return [shared.get(id(gradient), one) for gradient, one in zip(gradients, alone, strict=True)]


def _stands_in(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, (HeldGradient, Placeholder))


def _either(one: Sequence[bool], other: Sequence[bool]) -> list[bool]:
    return [a or b for a, b in zip(one, other, strict=True)]
