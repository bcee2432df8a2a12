"""ZeRO-1 under DistributedDataParallel: each rank keeps the optimizer's state of its own rows of every parameter.

A bucket's gradients are reduced and scattered (each rank gets the mean of its rows), the rows are stepped, and the new
rows are gathered from all ranks: the bytes of DDP's all-reduce, and 1/N of the step and of the state on each of N ranks
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1). Rows are
divided as ``DTensor``'s ``Shard(0)`` divides them, and the state is kept as such ``DTensor``.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import grad_mode
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported if available
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from instep._core.hooks import BoundHook
from instep._core.parameters import AttachedParameter
from instep._core.plan import Bucket
from instep.errors import AccumulationError, InstepError
from instep.sources import Sink
from instep.sources.hook_slot import before_backward, release, take
from instep.sources.reductions import Reduction, Reductions, as_they_arrive, bucket_parameters, slices_of

Finish = Callable[[], None]


class Rows:
    """This rank's rows of one parameter. One without dimensions is every rank's own."""

    alone = True

    def __init__(self, parameter: torch.Tensor, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._rank = mesh.get_local_rank()
        self.shape = parameter.shape
        self._divided = parameter.dim() > 0
        whole = _with_rows(parameter.detach())
        self._stride = whole.stride() if self._divided else ()
        self._whole = whole.shape
        self.size = -(-whole.shape[0] // mesh.size())
        self.numel = self.size * (whole[:1].numel())

    def range(self, rank: int) -> tuple[int, int]:
        """The rows of ``rank``: the first, and the first that is not."""
        rows = self._whole[0]
        if not self._divided:
            return 0, 1
        return min(rank * self.size, rows), min((rank + 1) * self.size, rows)

    def rows(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The rows of ``rank`` of a plain tensor, in the same memory."""
        start, stop = self.range(rank)
        return _with_rows(tensor.detach())[start:stop]

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if isinstance(tensor, DTensor):
            return tensor._local_tensor
        return self.rows(tensor, self._rank) if self._divided else tensor.detach()

    def fits(self, entry: Mapping[Any, Any]) -> bool:
        return True  # nobody else makes state for it

    def of_state(self, value: Any) -> Any:
        return value._local_tensor if isinstance(value, DTensor) else value

    def as_state(self, value: Any) -> Any:
        start, stop = self.range(self._rank)
        if not isinstance(value, torch.Tensor) or value.shape != (stop - start, *self._whole[1:]):
            return value
        return self.spread(value)

    def spread(self, rows: torch.Tensor) -> DTensor:
        """This rank's rows as a part of the whole."""
        with torch.no_grad():
            if not self._divided:
                return DTensor.from_local(rows.view(()), self._mesh, [Replicate()], run_check=False)
            return DTensor.from_local(
                rows, self._mesh, [Shard(0)], run_check=False, shape=self.shape, stride=self._stride
            )

    def take(self, value: Any) -> Any:
        """The entry to keep for one of the plain optimizer's."""
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            return value
        if not self._divided or value.shape != self.shape:
            return value
        return self.spread(self.rows(value, self._rank).clone())

    def give(self, value: Any) -> Any:
        """The plain optimizer's entry for one that was kept. All ranks must call this."""
        return value.full_tensor() if isinstance(value, DTensor) else value


class StateShards:
    """Who has which rows, and how they travel.

    gloo has no reduce-scatter of its own (torch 2.13 makes one of whole all-reduces), nor a gather into one tensor:
    there rows are sent to their owners, who add them up in the order of ranks.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.group: dist.ProcessGroup = ddp.process_group
        self.mesh = DeviceMesh.from_group(self.group, ddp.device_type)
        self.world_size = dist.get_world_size(self.group)
        self._rank = dist.get_rank(self.group)
        self._by_hand = dist.get_backend(self.group) == "gloo"

    def rows_of(self, parameter: torch.Tensor) -> Rows:
        return Rows(parameter, self.mesh)

    def scatter(
        self, gradients: Sequence[torch.Tensor], rows: Sequence[Rows], divisor: int, dtype: torch.dtype
    ) -> "_Scattered":
        """Send each rank its rows of the mean of ``gradients`` over all ranks, computed and sent in ``dtype``."""
        sent = torch.empty(self.world_size, sum(r.numel for r in rows), dtype=dtype, device=gradients[0].device)
        for one, gradient, offset in _with_offsets(rows, gradients):
            for rank in range(self.world_size):
                part = one.rows(gradient, rank)
                sent[rank, offset : offset + part.numel()].view(part.shape).copy_(part)
        sent.mul_(1.0 / divisor)
        if self._by_hand:
            received = torch.empty_like(sent)
            work: Any = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        else:
            received = torch.empty_like(sent[0])
            reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            work = reduce_scatter(received, sent, group=self.group, async_op=True)
        return _Scattered(work, sent, received)

    def received(self, flat: torch.Tensor, rows: Sequence[Rows]) -> list[DTensor]:
        """This rank's rows in what has arrived."""
        found = []
        for one, _, offset in _with_offsets(rows, rows):
            start, stop = one.range(self._rank)
            shape = (stop - start, *one._whole[1:])
            numel = torch.Size(shape).numel()
            found.append(one.spread(flat[offset : offset + numel].view(shape)))
        return found

    def gather(self, parameters: Sequence[AttachedParameter]) -> Finish:
        """Send this rank's rows of ``parameters``, which were stepped, to all others. All ranks must call this with the
        same parameters, in the same order of calls.

        Returns:
            What waits for the others' rows, and writes them into the parameters.
        """
        kinds: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, Rows]]] = {}
        for attached in parameters:
            parameter, part = attached.get(), attached.part
            assert isinstance(part, Rows)
            kinds.setdefault((parameter.device, parameter.dtype), []).append((parameter, part))
        finishes = [self._gather(members) for members in kinds.values()]

        def finish() -> None:
            for one in finishes:
                one()

        return finish

    @torch.no_grad()
    def _gather(self, members: Sequence[tuple[torch.Tensor, Rows]]) -> Finish:
        tensors = [parameter.detach() for parameter, _ in members]
        rows = [part for _, part in members]
        received = torch.empty(
            self.world_size, sum(r.numel for r in rows), dtype=tensors[0].dtype, device=tensors[0].device
        )
        mine = received[self._rank]
        for one, tensor, offset in _with_offsets(rows, tensors):
            part = one.rows(tensor, self._rank)
            mine[offset : offset + part.numel()].view(part.shape).copy_(part)
        if self._by_hand:
            work: Any = dist.all_gather(list(received), mine.clone(), group=self.group, async_op=True)
        else:
            gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            work = gather(received, mine.clone(), group=self.group, async_op=True)

        @torch.no_grad()
        def finish() -> None:
            work.wait()
            if received.device.type != "cpu":
                received.record_stream(torch.accelerator.current_stream(received.device))
            # The step has counted as a write of the parameter already.
            with grad_mode._unsafe_preserve_version_counter(tuple(tensors)):
                for one, tensor, offset in _with_offsets(rows, tensors):
                    for rank in range(self.world_size):
                        part = one.rows(tensor, rank)
                        if rank != self._rank:
                            part.copy_(received[rank, offset : offset + part.numel()].view(part.shape))

        return finish


class _Scattered:
    """A scattered bucket under way, in the terms of a communication hook's future."""

    def __init__(self, work: Any, sent: torch.Tensor, received: torch.Tensor) -> None:
        self._work = work
        self._sent: torch.Tensor | None = sent  # alive until it has been sent
        self._received = received

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()
        self._sent = None

    def value(self) -> torch.Tensor:
        if self._received.dim() == 1:
            return self._received
        total = self._received[0]
        for others in self._received[1:]:
            total += others
        return total


class ZeroSource:
    """One DDP instance whose buckets are scattered in place of being reduced on all ranks.

    With a sink that steps (``schedule="backward"``) rows are stepped where backward ends, in order of sending, and sent
    back while others are stepped. With one that does not, ``.grad`` is left with the rows' gradients, as a ``DTensor``.
    """

    def __init__(
        self,
        sink: Sink,
        parameters: Sequence[AttachedParameter],
        ddp: DistributedDataParallel,
        shards: StateShards,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._sink = sink
        self._ddp = weakref.ref(ddp)
        self._shards = shards
        self._reduce_dtype = reduce_dtype
        self._by_id = {id(attached.get()): attached for attached in parameters}
        # Which parameters other ranks have used is known only where DDP's own end of backward has been.
        self._late = not sink.frees_gradients or ddp.find_unused_parameters or ddp.static_graph
        self._reductions = Reductions(self._step, self._settle, lambda _: sink.backward_raised())
        self._gathers: list[Finish] = []
        self._buckets = {0: Bucket("ddp", tuple(attached.spec for attached in parameters))}

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(bucket for _, bucket in sorted(self._buckets.items()))

    def connect(self) -> None:
        ddp = self._ddp()
        assert ddp is not None
        take(ddp, self, None, None)

    def disconnect(self) -> None:
        release(self._ddp(), self)

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        ours = [a for a in parameters if isinstance(a.part, Rows)]
        self._by_id.update((id(a.get()), a) for a in ours)
        return [a for a in parameters if a not in ours]

    def refresh(self) -> None:
        """DDP fixes its parameters when it is constructed."""

    def begin_step(self) -> None:
        """Nothing is counted from step to step."""

    def before_backward(self) -> None:
        """A backward begins: no gradient has changed yet."""
        for attached in self._by_id.values():
            if isinstance(attached.get().grad, DTensor):
                raise AccumulationError(
                    f"the gradient of {attached.spec.name!r} has been reduced and scattered already "
                    "(shard_state=True), so that no other can be added to it. Wrap all but the last micro-batch in "
                    "`with overlap.accumulate():` or no_sync(), and call zero_grad() after optimizer.step()"
                )
        before_backward(self._ddp())

    def communicate(
        self, bucket: GradBucket, group: dist.ProcessGroup, divisor: int
    ) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise InstepError("shard_state=True does not take sparse gradients: use sparse=False, or no shard_state")
        members = bucket.parameters()
        rows = [self._rows(p) for p in members]
        scattered = self._shards.scatter(slices_of(buffer, members), rows, divisor, self._reduce_dtype or buffer.dtype)
        reduction = self._reductions.launched(bucket, scattered, lambda flat, _: self._shards.received(flat, rows))
        if reduction is None:
            raise InstepError("shard_state=True does not go with join(): ranks that have joined own rows, too")
        if reduction.index == 0:
            self._buckets = {}
        self._buckets[reduction.index] = Bucket("ddp", tuple(self._by_id[id(p)].spec for p in members))
        # What DDP copies into .grad is replaced where it has.
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def launched(self, bucket: GradBucket, future: torch.futures.Future[torch.Tensor]) -> None:
        """:meth:`communicate` has seen to it."""

    def _rows(self, parameter: torch.Tensor) -> Rows:
        part = self._by_id[id(parameter)].part
        assert isinstance(part, Rows)
        return part

    def _step(self, reductions: Sequence[Reduction]) -> None:
        if self._late:
            return
        try:
            if self._sink.arrive(self._members(reductions)):
                together = [[one] for one in reductions] if self._sink.by_bucket else as_they_arrive(reductions)
                for arrived in together:
                    as_left = [p.grad for one in arrived for p in one.parameters]
                    self._sink.apply(self._members(arrived), partial(self._fetch, arrived))
                    for p, gradient in zip((p for one in arrived for p in one.parameters), as_left, strict=True):
                        p.grad = gradient
                    self._send(arrived)
        except BaseException as error:
            self._sink.fail(error)

    def _settle(self, reductions: Sequence[Reduction]) -> None:
        if self._late:
            self._step_late(reductions)
        finishes, self._gathers = self._gathers, []
        try:
            for finish in finishes:
                finish()
        except BaseException as error:
            self._sink.fail(error)
        self._sink.spend(a for a in self._members(reductions) if self._sink.is_applied(a))
        self._sink.streams.join()
        self._sink.raise_failure()

    def _step_late(self, reductions: Sequence[Reduction]) -> None:
        try:
            for reduction in reductions:
                self._fetch([reduction])
            members = [a for a in self._members(reductions) if a.get().grad is not None]
            if self._sink.arrive(members):
                self._sink.apply(members)
            if self._sink.frees_gradients:
                self._send(reductions)
        except BaseException as error:
            self._sink.fail(error)

    def _send(self, reductions: Sequence[Reduction]) -> None:
        """Also rows that this rank could not step: the others wait for them."""
        for reduction in reductions:
            members = [self._by_id[id(p)] for p in reduction.members]
            with self._sink.streams.on(members[0].spec.device):
                self._gathers.append(self._shards.gather(members))

    def _fetch(self, reductions: Sequence[Reduction]) -> None:
        for reduction in reductions:
            for parameter, gradient in zip(reduction.members, reduction.all_gradients(), strict=True):
                if parameter.grad is not None:
                    parameter.grad = gradient

    def _members(self, reductions: Sequence[Reduction]) -> list[AttachedParameter]:
        return [self._by_id[id(p)] for reduction in reductions for p in reduction.members]


class Zero:
    """One attachment's share in this.

    Attributes:
        reduced: by ``id``: the parameters that are in DDP's buckets. Others are stepped whole, as ever.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.shards = StateShards(ddp)
        self.reduced = bucket_parameters(ddp)
        self._connected: list[tuple[weakref.ref[Optimizer], Callable[[], Iterable[AttachedParameter]]]] = []

    def source(
        self,
        sink: Sink,
        parameters: Sequence[AttachedParameter],
        ddp: DistributedDataParallel,
        reduce_dtype: torch.dtype | None,
    ) -> "ZeroSource":
        return ZeroSource(sink, parameters, ddp, self.shards, reduce_dtype)

    def connect(
        self, optimizer: Optimizer, parameters: Callable[[], Iterable[AttachedParameter]]
    ) -> list[RemovableHandle]:
        """Keep this rank's rows of the state alone; what is saved and loaded is all of it."""
        _shard(optimizer, parameters())
        self._connected.append((weakref.ref(optimizer), parameters))
        saved = BoundHook(lambda optimizer, state_dict: _whole_state_dict(optimizer, state_dict, parameters()))
        loaded = BoundHook(lambda optimizer: _shard(optimizer, parameters()))
        return [
            optimizer.register_state_dict_post_hook(saved),
            optimizer.register_load_state_dict_post_hook(loaded),
        ]

    def close(self) -> None:
        """Make the optimizers plain ones again. All ranks must call this."""
        connected, self._connected = self._connected, []
        for ref, parameters in connected:
            if (optimizer := ref()) is not None:
                _unshard(optimizer, parameters())


def _whole_state_dict(
    optimizer: Optimizer, state_dict: dict[str, Any], parameters: Iterable[AttachedParameter]
) -> dict[str, Any]:
    """The plain optimizer's ``state_dict()``. All ranks must call this."""
    parts = {id(attached.get()): attached.part for attached in parameters}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    state = dict(state_dict["state"])
    for number, parameter in enumerate(ordered):
        part = parts.get(id(parameter))
        if number in state and isinstance(part, Rows):
            state[number] = {key: part.give(value) for key, value in state[number].items()}
    return {**state_dict, "state": state}


def _shard(optimizer: Optimizer, parameters: Iterable[AttachedParameter]) -> None:
    """Keep of the optimizer's state only this rank's rows."""
    for attached in parameters:
        entry = optimizer.state.get(attached.get())
        if entry is not None and isinstance(attached.part, Rows):
            for key, value in entry.items():
                entry[key] = attached.part.take(value)


def _unshard(optimizer: Optimizer, parameters: Iterable[AttachedParameter]) -> None:
    """Keep all of the optimizer's state, as the plain optimizer does. All ranks must call this."""
    for attached in parameters:
        entry = optimizer.state.get(attached.get())
        if entry is not None and isinstance(attached.part, Rows):
            for key, value in entry.items():
                entry[key] = attached.part.give(value)


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _with_offsets(rows: Sequence[Rows], tensors: Sequence[Any]) -> Iterator[tuple[Rows, Any, int]]:
    """Each with its place in a rank's part of the flat tensor."""
    offset = 0
    for one, tensor in zip(rows, tensors, strict=True):
        yield one, tensor, offset
        offset += one.numel
