"""Gradients averaged over ranks in buckets that exist only while they are in flight.

A bucket is made when autograd has accumulated its last gradient and the bucket before it was sent. At most two are in
flight: before a third is sent, the oldest one is waited for and handed over, and its memory is freed with the last of
its gradients. All ranks send the same buckets in the same order, whatever the order in which their own gradients are
accumulated.
"""

import weakref
from collections import deque
from collections.abc import Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from instep._ranks.collectives import broadcast
from instep._ranks.process_groups import communicating
from instep._step.streams import ProducerStreams
from instep._torch.engine import Phase, current, leads_to, runs
from instep._torch.hooks import UntracedHook, WeakHook, nodes_of
from instep._torch.placeholders import Placeholder
from instep.comm_hooks import mean_allreduce
from instep.errors import AccumulationError, InstepError
from instep.sources import LaunchedBucket
from instep.sources.ddp.buckets import divided_as_by_ddp, slices_of

if TYPE_CHECKING:
    from instep.sources.replicate.source import ReplicatedSource

IN_FLIGHT = 2
"""How many buckets are in flight at once. So many have memory of their own."""


class TransientBucket(LaunchedBucket):
    """A bucket of one backward. It has memory from when it is sent until the last of its gradients is freed.

    Attributes:
        communication: a work; the future of a sparse gradient. NCCL's work keeps the bucket's memory until the work
            itself was waited for, not its future alone.
        flat: the bucket's memory; ``None``: of a sparse gradient.
        numbers: of its parameters.
        missing: how many gradients it still waits for.
        is_sent: whether it is on its way, or has arrived.
        unused: once it is sent, the numbers of the parameters that this rank has no new gradient for.
    """

    __slots__ = ("flat", "is_sent", "missing", "numbers", "unused")

    def __init__(self, numbers: Sequence[int], members: Sequence[torch.Tensor]) -> None:
        super().__init__(members, None)
        self.flat: torch.Tensor | None = None
        self.numbers = numbers
        self.missing = len(numbers)
        self.is_sent = False
        self.unused: Set[int] = frozenset()

    def put_means(self, used: Set[int]) -> None:
        """The bucket has arrived: put the mean into ``.grad`` of the members with these numbers, and let go of the
        bucket. From now on ``.grad`` alone keeps its memory."""
        dtype = self.members[0].dtype
        if self.flat is None:
            means = [self.communication.value().to(dtype)]
        else:
            means = slices_of(self.flat.to(dtype.to_real()), self.members)
        for number, parameter, mean in zip(self.numbers, self.members, means, strict=True):
            if number in used:
                parameter.grad = mean
        self.communication = self.flat = None


class _BackwardProgress:
    """How far each bucket has come in one backward that reduces.

    Attributes:
        bucket_of: the bucket of each parameter, by the parameter's number.
        arrived: the numbers of the parameters whose gradients were accumulated, in that order.
        waiting: the buckets that are still to be sent, in that order.
        in_flight: the buckets that were sent and not waited for, in the order of sending.
        held: the buckets that have arrived, and have parameters that this rank has not used: whether another rank has
            used them is known at the end of backward.
    """

    def __init__(self, buckets: Sequence[TransientBucket]) -> None:
        self.bucket_of = {number: bucket for bucket in buckets for number in bucket.numbers}
        self.arrived: dict[int, None] = {}
        self.waiting = deque(buckets)
        self.in_flight: deque[TransientBucket] = deque()
        self.held: list[TransientBucket] = []


class TransientBuckets:
    """The gradients of ``parameters``, averaged over the ranks of ``group`` while backward runs.

    Args:
        parameters: by name, in the model's order; those that are frozen are left out while they are.
        sparse: the numbers of those whose gradients are sparse.
        bucket_cap_mb: see ``divided_as_by_ddp``.

    Attributes:
        receiver: is told of each bucket; only its ``ended`` may raise. ``None``: gradients stay in ``.grad``.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        sparse: frozenset[int],
        group: dist.ProcessGroup,
        bucket_cap_mb: float | None,
    ) -> None:
        self.receiver: ReplicatedSource | None = None
        self.group = group
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._sparse = sparse
        self._bucket_cap_mb = bucket_cap_mb
        self._handles: dict[int, RemovableHandle] = {}
        # By the parameters that are trainable: the numbers of those in each bucket, in the order in which gradients
        # arrived on the first rank.
        self._agreed: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._trainable: tuple[int, ...] = ()
        self._reduces = False
        self._backward: _BackwardProgress | None = None
        self._producers = ProducerStreams()
        # The parameters whose .grad holds a gradient of this rank that was not averaged yet: also one that was
        # accumulated in no_sync.
        self._fresh: set[int] = set()
        self.refresh()
        # Hooks are on the parameters, which may outlive this: without a ``Replicated`` around it the model is plain.
        weakref.finalize(self, lambda of: list(map(RemovableHandle.remove, of.values())), self._handles).atexit = False

    @property
    def buckets(self) -> list[TransientBucket]:
        """As they are now, in the order in which they are to be sent. Before all ranks have agreed, that is the model's
        order backwards, as DDP's with ``find_unused_parameters`` before any backward."""
        agreed = self._agreed.get(self._trainable)
        layout = agreed or sorted(self._layout(self._trainable), key=min, reverse=True)
        return [TransientBucket(numbers, [self._parameters[n] for n in numbers]) for numbers in layout]

    def _layout(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Fill buckets with the parameters numbered ``order``, by DDP's own rule, so that ranks add up in the same
        order: with three ranks or more a ring's depends on where in its buffer an element lies."""
        if not order:
            return []
        members = [self._parameters[number] for number in order]
        are_sparse = [number in self._sparse for number in order]
        buckets = divided_as_by_ddp(members, are_sparse, self._bucket_cap_mb)
        return [tuple(order[i] for i in bucket) for bucket in buckets]

    def after_forward(self, output: object, *, reduces: bool) -> None:
        """A forward with gradients has returned ``output``.

        Args:
            reduces: whether the backward from ``output`` averages. In ``no_sync`` gradients only add up.
        """
        self._reduces = reduces
        self.refresh()
        if reduces:
            for node in nodes_of(output):
                # Without the node itself: a hook that refers to its own node keeps the node for good.
                inputs = [following for following, _ in node.next_functions if following is not None]
                node.register_prehook(UntracedHook(partial(self._reached, inputs)))

    def refresh(self) -> None:
        """Take in parameters that were frozen or unfrozen: on all ranks alike."""
        trainable = tuple(number for number, p in enumerate(self._parameters) if p.requires_grad)
        if trainable == self._trainable:
            return
        for number in trainable:
            if number not in self._handles:
                hook = WeakHook(self._accumulated, number)
                self._handles[number] = self._parameters[number].register_post_accumulate_grad_hook(hook)
        self._trainable = trainable

    # In backward: what autograd calls.

    def _reached(self, inputs: Sequence[Node], gradients: object) -> None:
        """Backward comes to an output of the model. Without this hook a rank whose backward uses none of the parameters
        would send nothing, and leave the other ranks waiting."""
        if self._backward is None and self._reduces and self._gives_gradients(inputs):
            self._begin()

    def _gives_gradients(self, inputs: Sequence[Node]) -> bool:
        """Whether the running backward, at an output with these ``inputs``, is for ``.grad`` of the parameters.
        ``autograd.grad`` and ``backward(inputs=…)`` of other tensors are not, and some ranks may run these alone."""
        own = [self._parameters[number] for number in self._trainable]
        with torch._C.DisableTorchFunctionSubclass():  # no value is used: a watched parameter need not notice
            return any(runs(get_gradient_edge(p).node) for p in own) or not leads_to(inputs, set(map(id, own)))

    def _begin(self) -> None:
        backward = _BackwardProgress(self.buckets)
        current().at(Phase.BEFORE_DDP, partial(self._end, backward), partial(self._raised, backward))
        self._backward = backward  # after that: Ctrl-C in between would leave it to the next backward

    def _accumulated(self, number: int, parameter: torch.Tensor) -> None:
        if not parameter.requires_grad:
            return  # frozen since the forward: its gradient was not accumulated
        self._producers.note_current(parameter.device)
        self._fresh.add(number)
        if not self._reduces:
            return
        if self._backward is None:
            self._begin()  # the parameter is used outside of the model's forward as well
        backward = self._backward
        assert backward is not None
        bucket = backward.bucket_of.get(number)
        if bucket is None:
            raise InstepError(
                f"{self._names[number]!r} got a gradient, and was frozen when the last forward ended: it is in no "
                "bucket. Freeze and thaw parameters before the forward"
            )
        if bucket.is_sent:
            raise AccumulationError(
                f"a second gradient for {self._names[number]!r} arrived in one backward, when the first was on its way "
                "to the other ranks. A parameter that reentrant checkpointing visits twice needs use_reentrant=False"
            )
        if number in backward.arrived:
            return
        backward.arrived[number] = None
        bucket.missing -= 1
        try:
            while backward.waiting and backward.waiting[0].missing == 0:
                self._send(backward)
        except BaseException as error:
            self._fail(error)
            raise

    # In backward: a bucket is sent, has arrived, and is handed over.

    def _send(self, backward: _BackwardProgress) -> None:
        """Send the next bucket, with zeros in the place of gradients that this rank does not have."""
        while len(backward.in_flight) >= IN_FLIGHT:
            self._deliver(backward, backward.in_flight.popleft())
        bucket = backward.waiting.popleft()
        bucket.is_sent = True
        with_gradient = zip(bucket.numbers, map(_gradient, bucket.members), strict=True)
        bucket.unused = {number for number, g in with_gradient if number not in self._fresh or g is None}
        # On the stream of the gradient that came last: the others may have been made on other streams.
        self._producers.gather(bucket.members[0].device)
        with torch.no_grad():
            future = self._reduce_sparse(bucket) if bucket.numbers[0] in self._sparse else self._reduce(bucket)
        backward.in_flight.append(bucket)
        if self.receiver is not None:
            self.receiver.launched(bucket.members, future)

    def _reduce(self, bucket: TransientBucket) -> torch.futures.Future[Any]:
        """Fill ``bucket``, and start its all-reduce. Gradients are multiplied by 1/W before the sum, as DDP's reducer
        does (``mark_variable_ready_dense``)."""
        parameters = bucket.members
        factor = 1.0 / dist.get_world_size(self.group)
        own = parameters[0].dtype.to_real()
        dtype = (self.receiver and self.receiver.reduce_dtype) or own
        size = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
        flat = torch.empty(size, dtype=own, device=parameters[0].device)
        for number, parameter, part in zip(bucket.numbers, parameters, slices_of(flat, parameters), strict=True):
            gradient = _gradient(parameter)
            if gradient is None:
                part.zero_()
            elif gradient.is_sparse:
                raise InstepError(
                    f"the gradient of {self._names[number]!r} is sparse, and it is not the weight of an Embedding or "
                    "EmbeddingBag with sparse=True: replicate cannot tell in time. Make it dense"
                )
            elif dtype == own:
                torch.mul(gradient, factor, out=part)
            else:
                part.copy_(gradient)
            if number not in bucket.unused:
                parameter.grad = None
        if dtype != own:
            flat = flat.to(dtype).mul_(factor)
        bucket.flat = flat
        bucket.communication = dist.all_reduce(flat, group=self.group, async_op=True)
        future: torch.futures.Future[Any] = bucket.communication.get_future()
        return future

    def _reduce_sparse(self, bucket: TransientBucket) -> torch.futures.Future[Any]:
        (number,), (parameter,) = bucket.numbers, bucket.members
        gradient = _gradient(parameter)
        if gradient is None:
            rows, *rest = parameter.shape
            nothing = torch.empty(1, 0, dtype=torch.int64), parameter.new_empty(0, *rest)
            gradient = torch.sparse_coo_tensor(*nothing, (rows, *rest), device=parameter.device)
        elif not gradient.is_sparse:
            raise InstepError(
                f"the gradient of {self._names[number]!r} is dense, though it is the weight of an embedding with "
                "sparse=True: something else uses it too. Build the embedding with sparse=False"
            )
        elif number in bucket.unused:
            gradient = gradient.clone()
        else:
            parameter.grad = None
        gradient = gradient.to((self.receiver and self.receiver.reduce_dtype) or gradient.dtype)
        bucket.communication = future = mean_allreduce(gradient, self.group, dist.get_world_size(self.group))
        return future

    def _deliver(self, backward: _BackwardProgress, bucket: TransientBucket) -> None:
        with communicating(self.group):
            bucket.wait()
        if bucket.unused:
            backward.held.append(bucket)
        else:
            self._hand_over(bucket, bucket.numbers)

    def _hand_over(self, bucket: TransientBucket, used: Sequence[int]) -> None:
        """The mean is put into ``.grad`` of the parameters that any rank has used; of the others it stays as it was."""
        bucket.put_means(set(used))
        self._fresh.difference_update(used)
        if self.receiver is not None and used:
            self.receiver.delivered([self._parameters[number] for number in used])

    # Where backward ends.

    def _end(self, backward: _BackwardProgress) -> None:
        if self._backward is not backward:
            return
        try:
            while backward.waiting:
                self._send(backward)
            # Ask how many ranks have a new gradient of each parameter, by number. Read only by ranks that lack one.
            used = torch.ones(len(self._parameters), dtype=torch.int32, device=self._parameters[0].device)
            unused = [number for bucket in (*backward.held, *backward.in_flight) for number in bucket.unused]
            if unused:
                used[unused] = 0
            use_counts: Any = dist.all_reduce(used, group=self.group, async_op=True)
            while backward.in_flight:
                self._deliver(backward, backward.in_flight.popleft())
            with communicating(self.group):
                use_counts.wait()
            somewhere = used.tolist() if backward.held else ()
            for bucket in backward.held:
                self._hand_over(bucket, [number for number in bucket.numbers if somewhere[number]])
            if tuple(sorted(backward.bucket_of)) not in self._agreed:
                self._agree_on_order(backward)
        except BaseException as error:
            self._fail(error)
            raise
        self._backward = None
        if self.receiver is not None:
            self.receiver.ended()

    def _agree_on_order(self, backward: _BackwardProgress) -> None:
        """The first backward with these parameters ends: from now on all ranks fill buckets in the order in which
        gradients arrived on the first rank. Parameters that it did not use come last, so that no other bucket has to
        wait for them."""
        members = sorted(backward.bucket_of)
        rest = (number for number in reversed(members) if number not in backward.arrived)
        order = torch.tensor([*backward.arrived, *rest], device=self._parameters[0].device)
        with communicating(self.group):
            broadcast([order], self.group)
        self._agreed[tuple(members)] = self._layout(order.tolist())

    def _raised(self, backward: _BackwardProgress) -> None:
        # Buckets in flight are not waited for: another rank that raised too may never send its part.
        if self._backward is backward:
            self._backward = None
        if self.receiver is not None:
            self.receiver.raised()

    def _fail(self, error: BaseException) -> None:
        self._backward = None
        # Buckets in flight are not waited for: they have memory of their own, and what is sent later is behind them.
        # Once a rank is lost, each of them would take as long as the process group waits.
        if self.receiver is not None:
            self.receiver.failed(error)


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = parameter.grad
    return None if isinstance(gradient, Placeholder) else gradient
