"""``schedule="forward"``: which parameters can wait, and in which order the model reads them."""

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import compress, repeat
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep._optim.kernels import GRADIENT
from instep._optim.kinds import can_be_put_off, is_torchs_own, runs_beside
from instep._optim.owners import (
    IN_SHARDS_OF_FSDP2,
    OwnerCount,
    entries_are_kept,
    have_other_owners,
    state_is_kept,
)
from instep._optim.parameters import AttachedParameter, AttachedParameters, all_there, shard_of_gradient
from instep._optim.shadow import is_copied_whole
from instep._optim.stepper import Stepper
from instep._step.state import gradient_of
from instep._step.update import gradients_of
from instep._torch.engine import graph_task, is_captured
from instep._torch.hooks import BoundHook
from instep._torch.lifetime import WeakMethod
from instep._torch.placeholders import Placeholder
from instep._torch.versions import are_plain, memory_of
from instep._torch.watch import plain_type
from instep._torch.worker import ending
from instep.buckets import Bucket, bucket_bytes_for, fill_buckets


class ReadHook(BoundHook):
    """The forward pre-hook of a module that reads parameters. It can rest: a module without hooks is called sooner.

    Attributes:
        traced: whether it was compiled together with the module: then it does not run, and cannot wait.
    """

    __slots__ = ("_before_read", "_handle", "_hooks", "parameters", "traced")

    def __init__(
        self, module: nn.Module, parameters: Sequence[AttachedParameter], before_read: Callable[..., None]
    ) -> None:
        super().__init__(None)
        self.parameters = tuple(parameters)
        self.traced = False
        self._before_read = WeakMethod(before_read)  # its owner has this in a list
        self._handle = module.register_forward_pre_hook(self)
        self._hooks: Callable[[], dict[int, Any] | None] = self._handle.hooks_dict_ref  # the module's, weakly

    def __call__(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            self.traced = True
        elif graph_task() is None and (before_read := self._before_read()) is not None:
            before_read(self.parameters)

    def rest(self) -> None:
        """Until ``wake``. Not where it was traced: what was compiled would be compiled anew."""
        if not self.traced and (hooks := self._hooks()) is not None:
            hooks.pop(self._handle.id, None)

    def wake(self) -> None:
        if (hooks := self._hooks()) is not None:
            hooks[self._handle.id] = self

    def remove(self) -> None:
        """For good."""
        self._handle.remove()
        self._hooks = lambda: None


class ReadOrder:
    """The order in which forwards read parameters.

    Args:
        bucket_bytes: the option; ``None``: a twentieth of what is put off, and ``most`` at most.
    """

    def __init__(self, bucket_bytes: int | None, most: int) -> None:
        self.hooks: list[ReadHook] = []
        self._bucket_bytes = bucket_bytes
        self._most = most
        self._order: dict[int, int] = {}  # the place of each parameter's index, as forwards have come to them
        # The last answer of ``members_of_buckets``. The order only grows: its length tells whether it has changed.
        self._last_parameters = AttachedParameters()
        self._last_key = (0, False)
        self._members: list[AttachedParameters] = []

    def reads(self, parameters: Iterable[AttachedParameter]) -> None:
        for attached in parameters:
            self._order.setdefault(attached.spec.index, len(self._order))

    def place_of(self, parameters: AttachedParameters) -> int:
        """When the next forward comes to the first of them, as the last one did; those not read yet come last."""
        order = self._order
        return min(map(order.get, parameters.indices, repeat(len(order))))

    def unseen(self) -> set[int]:
        """The indices of parameters whose modules were compiled with their hooks: nothing waits before they run."""
        return {a.spec.index for hook in self.hooks if hook.traced for a in hook.parameters}

    def members_of_buckets(self, parameters: AttachedParameters, *, as_read: bool) -> list[AttachedParameters]:
        """The members of ``buckets_of``. Kept for the last ``parameters``, which are the same in most steps."""
        key = (len(self._order), as_read)
        if parameters is not self._last_parameters or key != self._last_key:
            by_index = {attached.spec.index: attached for attached in parameters}
            self._members = [
                AttachedParameters(by_index[spec.index] for spec in bucket.parameters)
                for bucket in self.buckets_of(parameters, as_read=as_read)
            ]
            self._last_parameters, self._last_key = parameters, key
        return self._members

    def buckets_of(self, parameters: Iterable[AttachedParameter], *, as_read: bool) -> tuple[Bucket, ...]:
        """In the order in which forwards read them; those not read yet in the model's order.

        Args:
            as_read: ``False``: in the model's order, which is the same on all ranks. They may read in another one.
        """
        place = self._order if as_read else {}
        ordered = sorted(parameters, key=lambda a: place.get(a.spec.index, len(place) + a.spec.index))
        specs = [attached.spec for attached in ordered]
        size = self._bucket_bytes or min(self._most, bucket_bytes_for(specs))
        return fill_buckets("forward", specs, size)


# Which updates can wait, or run on another thread: all questions, of an optimizer and of its parameters.


def can_wait(stepper: Stepper, parameters: AttachedParameters, *, in_vain: bool) -> bool:
    """Whether an update of this optimizer can run after ``step()`` has returned, as far as its parameters can wait.

    Args:
        parameters: all that it has.
        in_vain: also where nothing of it can be done beside the loop.
    """
    optimizer = stepper.optimizer()
    return (
        not ending()
        # State that was made in it can be written in it alone, and whoever updates later is not in the loop's.
        and not torch.is_inference_mode_enabled()
        and can_be_put_off(optimizer)
        # An update that runs later raises elsewhere: of a step() that is the user's own, also one that the optimizer
        # has got since it was attached, the loop expects it there.
        and is_torchs_own(optimizer)
        and not stepper.is_foreign
        and is_copied_whole(optimizer)
        and (in_vain or runs_beside(optimizer) or any(a.spec.device.type != "cpu" for a in parameters))
        and not stepper.autocast_matters()
        and not (parameters and is_captured(parameters[0].spec.device))
    )


def can_run_beside(bucket: AttachedParameters, *, is_first_step: bool) -> bool:
    """Whether all of ``bucket`` can be updated by a worker while backward goes on."""
    tensors = bucket.tensors()
    return (
        not ending()  # there is no thread any more
        and bucket.are_plain
        and tensors[0].device.type == "cpu"
        and all_there(map(GRADIENT, tensors))
        and are_usual(bucket)
        and all(_makes_no_state(stepper, part, is_first_step) for stepper, part in by_optimizer(bucket))
        # Through another tensor of the same memory nobody is noticed who reads it while it is written.
        and not any(have_other_owners(tensors))
    )


def _makes_no_state(stepper: Stepper, parameters: AttachedParameters, is_first_step: bool) -> bool:
    """Whether an update leaves Python to backward. Not the first one, which may make state: in an order of entries, and
    of another dtype under another default."""
    optimizer = stepper.optimizer()
    if not runs_beside(optimizer):
        return False
    state = vars(optimizer)["state"]  # as torch's own have it; whoever asks the optimizer waits for the worker
    return all_there(map(state.get, parameters.tensors())) or not (is_first_step or state)


def by_optimizer(bucket: AttachedParameters) -> Iterable[tuple[Stepper, AttachedParameters]]:
    """The parameters of each optimizer in ``bucket``."""
    if len(bucket.steppers) == 1:
        return ((bucket.steppers[0], bucket),)
    return zip(bucket.steppers, (part for part, _ in bucket.parts), strict=True)


def which_cannot_wait(
    stepper: Stepper,
    parameters: AttachedParameters,
    everybody: AttachedParameters,
    unseen: Container[int],
    *,
    in_views: OwnerCount | None,
) -> set[AttachedParameter]:
    """Those of ``parameters`` that are stepped at once: somebody may read them in a way that nobody sees.

    Args:
        parameters: those of one optimizer with a gradient.
        unseen: the indices of those whose readers do not wait.
        in_views: the owners of the buckets of which gradients are views; ``None``: they are none.
    """
    seen = _reachable_by_others(stepper.optimizer(), parameters, everybody, in_views=in_views)
    if not unseen and are_usual(parameters):
        return seen
    return {a for a in parameters if a in seen or not _can_wait_alone(a, unseen)}


_LAYOUT = attrgetter("layout")
_IN_GRAPH = attrgetter("requires_grad")  # made by backward(create_graph=True)


def are_usual(parameters: AttachedParameters) -> bool:
    """Whether all of these and their gradients, which they have, are plain strided tensors, and no part of a graph."""
    tensors = parameters.tensors()
    gradients = gradients_of(parameters, tensors)
    strided = set(map(_LAYOUT, gradients)) == {torch.strided}
    return strided and are_plain(tensors) and are_plain(gradients) and not any(map(_IN_GRAPH, gradients))


def _can_wait_alone(attached: AttachedParameter, unseen: Container[int]) -> bool:
    gradient = gradient_of(attached)
    return (
        gradient is not None
        # Some optimizers treat parameters of a class of their own in their own way. Steps that communicate must not
        # come when one rank waits for them and another does not.
        and (
            plain_type(attached.get()) in (torch.nn.Parameter, torch.Tensor)
            or shard_of_gradient(attached, gradient) is not None
        )
        and attached.spec.index not in unseen
        and gradient.layout is torch.strided
        and not gradient.requires_grad
    )


def _reachable_by_others(
    optimizer: Optimizer,
    parameters: AttachedParameters,
    everybody: AttachedParameters,
    *,
    in_views: OwnerCount | None,
) -> set[AttachedParameter]:
    """Those of ``parameters`` whose memory, that of their gradients, or whose state others have got hold of, who may
    read or write it after ``step()``, and are not noticed; all of an optimizer that raises at such gradients as can
    wait."""
    # The step() of SparseAdam raises at a gradient that is not sparse.
    if state_is_kept(optimizer) or isinstance(optimizer, torch.optim.SparseAdam):
        return set(parameters)
    with torch._C.DisableTorchFunctionSubclass():
        tensors = parameters.tensors()
        shared = zip(
            entries_are_kept(list(map(optimizer.state.get, tensors))),
            _have_other_owners(parameters, tensors),
            _gradients_have_other_owners(tensors, everybody, in_views=in_views),
            strict=True,
        )
        return set(compress(parameters, map(any, shared)))


def _have_other_owners(parameters: AttachedParameters, tensors: Sequence[torch.Tensor]) -> list[bool]:
    if are_plain(tensors):
        return have_other_owners(tensors)
    # FSDP2's shards are in no module while it computes.
    in_fsdp2 = [a.mesh is not None and not a.places for a in parameters]
    return have_other_owners(list(map(memory_of, tensors)), IN_SHARDS_OF_FSDP2, in_fsdp2)


def _gradients_have_other_owners(
    tensors: Sequence[torch.Tensor], everybody: AttachedParameters, *, in_views: OwnerCount | None
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
    own = set(map(id, gradients))
    real = (g for g in map(GRADIENT, everybody.tensors()) if not isinstance(g, (Placeholder, NoneType)))
    others = [gradient for gradient in map(memory_of, real) if id(gradient) not in own]
    every = [*gradients, *filter(torch.Tensor._is_view, others)]
    return have_other_owners(every, in_views, list(map(torch.Tensor._is_view, every)))[: len(gradients)]
