"""ZeRO-1 under DistributedDataParallel: each rank keeps the optimizer's state of its own part of the parameters.

A bucket's gradients are reduced and scattered: each rank gets the mean of its own part. The parts are stepped, and the
new values are gathered from all ranks. That sends as many bytes as DDP's all-reduce, with 1/N of the step and of the
state on each of N ranks (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, stage 1).

``Zero`` is what an attachment has: it divides the optimizers' state when they are connected, and makes it whole again
for ``state_dict()`` and after detach. ``ZeroSource`` is what an iteration sees of it.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._ranks.process_groups import communicating
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation
from instep._torch.hooks import BoundHook
from instep.comm_hooks import cast_mean_allreduce
from instep.errors import AccumulationError, InstepError, class_name
from instep.sources import ErrorsKept, Sink, deliver, drain
from instep.sources.ddp.buckets import AnyBucket, Reduction, as_they_arrive, grad_as_left, slices_of
from instep.sources.ddp.reducer import connect_listener
from instep.sources.ddp.source import DDPSource
from instep.sources.zero.shards import GatheredShards, ScatteredGradients, StateShards, ZeroShard

_logger = logging.getLogger("instep")


class Zero:
    """``shard_state=True`` for one attachment: its optimizers, whose state is divided.

    Attributes:
        reduced: by ``id``: the parameters that are in DDP's buckets. Others are stepped whole on each rank.
    """

    def __init__(self, ddp: DistributedDataParallel, votes: StepVotes, reduced: set[int]) -> None:
        self.shards = StateShards(ddp)
        self._ddp = weakref.ref(ddp)
        self._votes = votes
        self.reduced = reduced
        self._connected: list[tuple[weakref.ref[Optimizer], Callable[[], Iterable[AttachedParameter]]]] = []

    def connect(
        self, optimizer: Optimizer, parameters: Callable[[], Iterable[AttachedParameter]]
    ) -> list[RemovableHandle]:
        """Keep the optimizer's state of this rank's parts alone. ``state_dict()`` has all of it, and
        ``load_state_dict()`` takes all of it."""
        _shard(optimizer, parameters())
        self._connected.append((weakref.ref(optimizer), parameters))
        saved = BoundHook(lambda optimizer, state_dict: self._whole_state_dict(optimizer, state_dict, parameters()))
        loaded = BoundHook(lambda optimizer: _shard(optimizer, parameters()))
        return [
            optimizer.register_state_dict_post_hook(saved),
            optimizer.register_load_state_dict_post_hook(loaded),
        ]

    def require_reduced(self, parameters: Iterable[AttachedParameter]) -> None:
        """Before ``optimizer.step()``: raise ``AccumulationError`` if these gradients were not reduced. The plain loop
        applies them on this rank alone; here this rank would step its rows with them for all ranks."""
        ddp = self._ddp()
        if ddp is None or ddp.require_forward_param_sync:
            return  # after the last forward DDP reduces
        for attached in parameters:
            gradient = attached.get().grad
            if id(attached.peek()) in self.reduced and gradient is not None and not isinstance(gradient, DTensor):
                with torch._C.DisableTorchFunctionSubclass():
                    written = bool(gradient.any())  # DCP steps with zeros, for the state that a step makes
                if written:
                    raise AccumulationError(
                        f"optimizer.step() came after backwards in no_sync() or accumulate() only: the gradient of "
                        f"{attached.spec.name!r} is this rank's own, and with shard_state=True each rank steps a part "
                        "of every parameter for all ranks. Nothing was updated. Run the last micro-batch of each step "
                        "outside of no_sync()"
                    )

    def _whole_state_dict(
        self, optimizer: Optimizer, state_dict: dict[str, Any], parameters: Iterable[AttachedParameter]
    ) -> dict[str, Any]:
        """The plain optimizer's ``state_dict()``. All ranks must call this."""
        if self._votes.mismatch is not None:
            if optimizer.state:
                self._votes.require_same()
            return state_dict
        parts = {id(parameter): part for parameter, part in _parts(parameters)}
        ordered = [p for group in optimizer.param_groups for p in group["params"]]
        state = dict(state_dict["state"])
        for number, parameter in enumerate(ordered):
            if (part := parts.get(id(parameter))) is not None:
                entry = part.give(state.get(number))
                if entry is None:
                    state.pop(number, None)
                else:
                    state[number] = entry
        return {**state_dict, "state": state}

    def close(self) -> None:
        """Make the optimizers plain ones again. All ranks must call this.

        If ranks differ, some of them will not: no step was taken, and state that was loaded before stays divided.
        """
        connected, self._connected = self._connected, []
        for ref, parameters in connected:
            if (optimizer := ref()) is None:
                continue
            if self._votes.mismatch is None:
                _unshard(optimizer, parameters())
            elif optimizer.state:
                _logger.warning(
                    "the state of %s stays divided among the ranks (shard_state), because they have attached in "
                    "different ways: load it again",
                    class_name(optimizer),
                )


def _parts(parameters: Iterable[AttachedParameter]) -> Iterator[tuple[torch.Tensor, ZeroShard]]:
    return ((attached.get(), attached.shard) for attached in parameters if isinstance(attached.shard, ZeroShard))


def _shard(optimizer: Optimizer, parameters: Iterable[AttachedParameter]) -> None:
    """Keep of the optimizer's state only what belongs to this rank's parts."""
    for parameter, part in _parts(parameters):
        if (entry := optimizer.state.get(parameter)) is not None:
            part.take(entry)


def _unshard(optimizer: Optimizer, parameters: Iterable[AttachedParameter]) -> None:
    """Keep all of the optimizer's state, as the plain optimizer does. All ranks must call this."""
    for parameter, part in _parts(parameters):
        entry = optimizer.state.get(parameter)
        whole = part.give(entry)
        if whole is None:
            optimizer.state.pop(parameter, None)
        elif entry is not None:
            entry.update(whole)


class ZeroSource(DDPSource):
    """The gradients of one DDP instance, whose buckets are scattered in place of being reduced on all ranks.

    With ``schedule="backward"`` parts are stepped where backward ends, in the order of sending, and sent back while
    others are stepped. With ``schedule="forward"`` their gradients are left in ``.grad``, as ``DTensor``.
    """

    def __init__(
        self,
        sink: Sink,
        parameters: Sequence[AttachedParameter],
        ddp: DistributedDataParallel,
        shards: StateShards,
        accumulation: Accumulation,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(sink, parameters, ddp, None, reduce_dtype)
        self._shards = shards
        self._accumulation = accumulation
        # Two answers decide what DDP's own end of backward and this source's end (_settle, after it) do to .grad.
        #
        #   _steps_after_ddp   _in_place
        #   no                 yes         _step comes before DDP's end. .grad is this rank's part while the optimizer
        #                                  runs; before and after that it is what DDP's hooks have left. DDP's end may
        #                                  copy a bucket into .grad in which parts were received by then: nobody reads
        #                                  that, since _settle retires these gradients.
        #   yes                no          DDP's end copies this rank's own gradients into .grad. _settle puts this
        #                                  rank's part of the mean in the place of each, and steps it or leaves it.
        #   yes                yes         The same. But .grad are views of DDP's buckets, so that DDP's end copies
        #                                  nothing, and parts may be received over this rank's own gradients.
        #
        # Whether to step after DDP's own end: .grad is handed out, or other ranks may have used parameters that this
        # one has not, which DDP's own end finds out.
        self._steps_after_ddp = not sink.frees_gradients or ddp.find_unused_parameters or ddp.static_graph
        # Whether parts are received in DDP's own buckets, to save memory: these are not needed once they are sent,
        # unless DDP's own end copies gradients from them that this source's end still looks at.
        self._in_place = ddp.gradient_as_bucket_view or not self._steps_after_ddp
        self._sent = _Sent(shards.group)

    def connect(self) -> None:
        ddp = self._ddp()
        assert ddp is not None
        connect_listener(ddp, self, None, None, divides=True)

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        return self._parameters.adopt(parameters, {id(a.get()) for a in parameters if isinstance(a.shard, ZeroShard)})

    # In backward: DDP has filled a bucket.

    def before_backward(self) -> None:
        for attached in self._parameters:
            if isinstance(attached.get().grad, DTensor):
                raise AccumulationError(
                    f"the gradient of {attached.spec.name!r} has been reduced and scattered already "
                    "(shard_state=True), so that no other can be added to it. Wrap all but the last micro-batch in "
                    "`with overlap.accumulate():` or no_sync(), and call zero_grad() after optimizer.step()"
                )
        super().before_backward()

    def communicate(
        self, bucket: AnyBucket, group: dist.ProcessGroup, divisor: int
    ) -> torch.futures.Future[torch.Tensor] | None:
        buffer = bucket.buffer()
        if self._accumulation.is_in_hold:
            return None  # gradients add up, and the forward was outside of accumulate(): DDP takes its own mean
        if self._sink.keeps_gradients:
            # The loop is to find the mean of all ranks, and optimizer.step() steps this rank's part of that.
            return cast_mean_allreduce(buffer, group, divisor, self._reduce_dtype)
        if buffer.is_sparse:
            raise InstepError("shard_state=True does not take sparse gradients: use sparse=False, or no shard_state")
        members = bucket.parameters()
        parts = [part for p in members if isinstance(part := self._parameters[p].shard, ZeroShard)]
        room = buffer if self._in_place else None
        dtype = self._reduce_dtype or buffer.dtype
        scattered = self._shards.scatter(slices_of(buffer, members), parts, divisor, dtype, room)
        reduction = Reduction(bucket, scattered)
        if not self._reductions.launched(bucket, reduction):
            raise InstepError("shard_state=True does not go with join(): ranks that have joined own rows, too")
        if reduction.index == 0:
            self._sent = _Sent(self._shards.group)
        self._show(reduction)
        self._sent.scattered = [sent for sent in [*self._sent.scattered, scattered] if not sent.free_if_done()]
        # The bucket still holds this rank's own gradients. DDP copies them into .grad, and there they are replaced.
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def launched(self, bucket: AnyBucket, future: torch.futures.Future[torch.Tensor]) -> None:
        """``communicate`` has noted a bucket that is scattered. After a plain mean gradients add up."""

    # Where backward ends, before DDP's own end.

    def _step(self, reductions: Sequence[Reduction]) -> None:
        if self._steps_after_ddp:
            return
        deliver(self._sink, self._members(reductions), partial(self._step_each, reductions))
        # DDP's own end is next, and goes through its buckets, in which parts are received: on the side stream.
        self._receive()
        self._sink.join()

    def _step_each(self, reductions: Sequence[Reduction]) -> bool:
        done = True
        for arrived in as_they_arrive(reductions):
            with grad_as_left([parameter for reduction in arrived for parameter in reduction.parameters]):
                done = self._sink.apply(self._members(arrived), partial(self._fetch, arrived)) and done
            self._send(arrived)
        return done

    def _fetch(self, reductions: Sequence[Reduction]) -> None:
        for reduction in reductions:
            with self._sent.communicating():
                reduction.wait()
            parts = reduction.communication.gradients(reduction.members)
            for parameter, gradient in zip(reduction.members, parts, strict=True):
                if parameter.grad is not None:
                    parameter.grad = gradient.to(parameter.dtype)

    def _send(self, reductions: Sequence[Reduction]) -> None:
        """Send this rank's parts to the other ranks, also those that it could not step: the others wait for them."""
        self._sent.begun = True
        for reduction in reductions:
            members = AttachedParameters(self._parameters[parameter] for parameter in reduction.members)
            with self._communicating(members):
                gathered = self._shards.gather(members, reduction.communication.room)
                self._sent.gathers.append((members, gathered))

    def _receive(self) -> None:
        """Write the parts that other ranks have stepped into the parameters, in the order of sending.

        None is written before all ranks have said that they have stepped all of theirs: of a rank that could not, what
        arrives is no part of the step, and parameters would hold parts of two steps.
        """
        sent = self._sent
        goes_on = sent.begun and self._sink.updated_on_all() and not sent.lost
        while sent.gathers:
            members, gathered = sent.gathers.pop(0)
            if goes_on:
                goes_on = self._write(members, gathered)
            elif not sent.lost:
                drain([gathered])  # it may arrive in DDP's bucket, which the next backward fills

    def _write(self, members: AttachedParameters, gathered: GatheredShards) -> bool:
        with self._communicating(members):
            gathered.wait()
        if self._sent.lost:
            return False
        try:
            with self._sink.streams.on(members[0].spec.device):
                gathered.write()
            self._sink.received(members)
        except BaseException as error:
            self._sink.fail(error, members.names)
            return False
        return True

    @contextmanager
    def _communicating(self, members: AttachedParameters) -> Iterator[None]:
        # On the side stream, which steps the parts that are sent, and writes those that arrive.
        with ErrorsKept(self._sink), self._sent.communicating(), self._sink.streams.on(members[0].spec.device):
            yield

    # After DDP's own end.

    def _settle(self, reductions: Sequence[Reduction]) -> None:
        if self._steps_after_ddp:
            with ErrorsKept(self._sink):
                self._fetch(reductions)
                members = AttachedParameters(a for a in self._members(reductions) if a.get().grad is not None)
                deliver(self._sink, members, partial(self._sink.apply, members))
            if self._sink.frees_gradients:
                self._send(reductions)
            self._receive()
        self._sink.retire(self._members(reductions))
        self._sink.join()
        self._sent = _Sent(self._shards.group)
        self._sink.raise_failure()

    def _members(self, reductions: Sequence[Reduction]) -> AttachedParameters:
        return AttachedParameters(self._parameters[p] for reduction in reductions for p in reduction.members)


class _Sent:
    """What one backward has sent to the other ranks, and receives from them.

    Attributes:
        scattered: gradients whose memory is not freed yet.
        gathers: parts that were stepped, in the order of sending.
        begun: whether this backward has come to sending stepped parts.
        lost: whether a communication has failed. It is the last one that is waited for: once a rank is lost, each takes
            as long as the process group waits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.scattered: list[ScatteredGradients] = []
        self.gathers: list[tuple[AttachedParameters, GatheredShards]] = []
        self.begun = False
        self.lost = False

    @contextmanager
    def communicating(self) -> Iterator[None]:
        try:
            with communicating(self._group):
                yield
        except BaseException:
            self.lost = True
            raise
