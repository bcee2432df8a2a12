"""The buckets of a DDP instance in one backward: those that it has shown, and those in flight."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from instep._optim.parameters import Bucket
from instep._torch.engine import Phase, current, graph_task
from instep._torch.hooks import BoundHook
from instep._torch.lifetime import weakly
from instep._torch.placeholders import SpentGradient
from instep.errors import AttachError, InstepError
from instep.sources import Communication, InFlightBucket, WrappedParameters, as_bucket, drain

# The buckets of a DDP instance, as far as it has shown them.


class ShownBuckets:
    """Those of the last backward. Before the first one: a single bucket that holds everything, as DDP's own in its
    first backward."""

    def __init__(self, parameters: WrappedParameters) -> None:
        self._parameters = parameters
        self._by_index = {0: as_bucket("ddp", parameters)}

    @property
    def in_order(self) -> tuple[Bucket, ...]:
        return tuple(bucket for _, bucket in sorted(self._by_index.items()))

    def show(self, index: int, members: Sequence[torch.Tensor]) -> None:
        """DDP hands over the bucket numbered ``index``. The first one begins a backward."""
        if index == 0:
            self._by_index = {}
        self._by_index[index] = as_bucket("ddp", self._parameters.among(members))


# What lies in ``.grad`` while DDP lays out its buckets anew, in its second forward.
#
# With ``gradient_as_bucket_view`` DDP copies every ``.grad`` into the new buckets. Where a loop clears gradients only
# after the forward, these are the gradients of the step before. Attached, they may be spent, or a rank's rows of a
# gradient, which fit into no bucket.


class GradientsAside:
    """Takes gradients off that fit into no bucket while a forward of ``ddp`` may lay out its buckets."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._off: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self._handles = [
            ddp.register_forward_pre_hook(BoundHook(self._take_off)),
            ddp.register_forward_hook(BoundHook(self._restore), always_call=True),
        ]

    def stop(self) -> None:
        """Take the hooks off ``ddp``."""
        for handle in self._handles:
            handle.remove()

    def _take_off(self, ddp: DistributedDataParallel, args: object) -> None:
        if ddp.gradient_as_bucket_view and not ddp._has_rebuilt_buckets:
            for parameter in ddp._module_parameters:
                gradient = parameter.grad
                # A placeholder that holds a gradient stays: its gradient is to be copied, as in the plain loop.
                if isinstance(gradient, SpentGradient) or hasattr(type(gradient), "to_local"):
                    self._off.append((weakref.ref(parameter), gradient))
                    parameter.grad = None

    def _restore(self, ddp: DistributedDataParallel, args: object, output: object) -> None:
        off, self._off = self._off, []
        for ref, gradient in off:
            if (parameter := ref()) is not None:
                parameter.grad = gradient


# Parameters that DDP takes for unused, where one backward follows several forwards.
#
# ``find_unused_parameters=True`` looks in each forward, from its outputs, for what backward will come to, with the
# reducer's own method: torch has no public one. ``tests/distributed/test_micro_batches_on_ranks.py`` fails clearly when
# torch changes it.


def look_from(ddp: DistributedDataParallel, losses: Sequence[torch.Tensor]) -> None:
    """Have ``ddp`` look once more, from all ``losses`` of the next backward, after its last forward."""
    if ddp.find_unused_parameters:
        ddp.reducer.prepare_for_backward(list(losses))


# How long communication goes on when backward's own work is done, as DDP has measured it last.
#
# DDP measures its first ten iterations, and then every hundredth. It has no public name for what it finds;
# ``tests/distributed/test_deferring.py`` fails clearly when torch changes the private one.


_NANOSECONDS = 1e6  # in a millisecond


def exposed_communication(ddp: DistributedDataParallel) -> float | None:
    """In milliseconds; ``None``: DDP has measured nothing on this device."""
    data: dict[str, Any] = ddp._get_ddp_logging_data()
    total, hidden = data.get("backward_comm_time", 0), data.get("backward_compute_comm_overlap_time", 0)
    return max(total - hidden, 0) / _NANOSECONDS if total > 0 else None


# The buckets that DDP has in flight in one backward, and what is asked of a DDP instance beside them.


class SomeBucket(Protocol):
    """What is asked of a ``torch.distributed.GradBucket``."""

    def index(self) -> int: ...
    def buffer(self) -> torch.Tensor: ...
    def parameters(self) -> list[torch.Tensor]: ...
    def is_last(self) -> bool: ...


class Arriving(Communication, Protocol):
    """A communication that says whether it is done, and has the result then."""

    def done(self) -> bool: ...
    def value(self) -> Any: ...


Slices = Callable[[Any, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Finds the gradients of a bucket's parameters in the result of its communication."""


class BucketListener(Protocol):
    """A source, as a DDP instance sees it: told of each bucket in backward, when DDP has filled it."""

    def communicate(
        self, bucket: SomeBucket, group: dist.ProcessGroup, divisor: int
    ) -> torch.futures.Future[torch.Tensor] | None:
        """Reduce ``bucket``, which is still to be divided by ``divisor``, in place of the plain mean. ``None``: take
        the plain mean."""

    def launched(self, bucket: SomeBucket, future: torch.futures.Future[Any]) -> None:
        """The communication of ``bucket`` was started, and ``future`` is its result."""


class Reduction(InFlightBucket[Arriving]):
    """One bucket of DDP's whose gradients are reduced.

    Attributes:
        index: DDP's number of the bucket.
        parameters: the bucket's parameters that got a gradient on this rank.
        unused: the others. Another rank may have used them: DDP's own end of backward knows, and sets ``.grad`` then.
    """

    __slots__ = ("_positions", "_slices", "_sparse", "index", "parameters", "unused")

    def __init__(self, bucket: SomeBucket, communication: Arriving, slices: "Slices | None" = None) -> None:
        super().__init__(bucket.parameters(), communication)
        self._slices = slices or slices_of
        self._sparse = bucket.buffer().is_sparse
        self._positions = [i for i, parameter in enumerate(self.members) if parameter.grad is not None]
        self.index = bucket.index()
        self.parameters: list[torch.Tensor] = [self.members[i] for i in self._positions]
        self.unused: list[torch.Tensor] = [p for p in self.members if p.grad is None]

    @property
    def arrived(self) -> bool:
        """Whether waiting would cost nothing. Always false on accelerators: there a future is done as soon as its work
        is queued."""
        return self.members[0].device.type == "cpu" and self.communication.done()

    def gradients(self) -> list[torch.Tensor]:
        """Wait, and return the reduced gradients of ``parameters``. Raises what the communication raised."""
        self.wait()
        result = value_of(self.communication)
        slices = [result] if self._sparse else self._slices(result, self.members)
        # A compressing hook may answer in another dtype: DDP too casts what it copies into .grad.
        return [slices[i].to(self.members[i].dtype) for i in self._positions]

    def all_gradients(self) -> list[torch.Tensor]:
        """As ``gradients``, of all ``members``."""
        self.wait()
        found = self._slices(value_of(self.communication), self.members)
        return [gradient.to(member.dtype) for gradient, member in zip(found, self.members, strict=True)]


B = TypeVar("B", bound=InFlightBucket[Any])


class Reductions(Generic[B]):
    """Collects the buckets of one backward, and hands them to their owner where backward ends.

    DDP's own end of backward takes ``.grad`` for what its hooks have left there, and an error before it leaves the
    instance unusable. So there are two calls:

    Args:
        step: is called before DDP's own end. It must not raise, and leaves ``.grad`` as it was.
        settle: is called after DDP's own end. It may replace gradients, and raise.
        raised: is called in the place of either where the backward raises.
    """

    def __init__(
        self,
        step: Callable[[Sequence[B]], None],
        settle: Callable[[Sequence[B]], None],
        raised: Callable[[Sequence[B]], None],
    ) -> None:
        # Weakly: they are methods of the owner, which has this object.
        self._step, self._settle, self._raised = weakly(step), weakly(settle), weakly(raised)
        self._under_way: list[B] = []
        self._task: int | None = None

    def begin(self) -> None:
        """A backward is about to hand over its first bucket: ``raised`` is called wherever it raises from here on, not
        only once its last bucket is under way. For an owner that takes gradients off as buckets come."""
        self._under_way.clear()  # of a backward that raised before it came to an end
        current().at(Phase.BEFORE_DDP, lambda: None, self._failed)

    def launched(self, bucket: SomeBucket, in_flight: B) -> bool:
        """The communication of ``bucket`` was started, as ``in_flight``. ``False`` on a rank that has joined and only
        helps the others: ``join()`` copies their weights to it at the end."""
        if graph_task() is None:
            return False
        if bucket.index() == 0:
            if self._under_way and self._task == graph_task():
                raise InstepError(
                    "two DistributedDataParallel instances share one communication hook of instep's in one backward. "
                    "Make a hook for each of them"
                )
            self._under_way.clear()  # of a backward that raised before it came to an end
            self._task = graph_task()
        self._under_way.append(in_flight)
        if bucket.is_last():
            # In the hook of the last bucket: DDP asks for its own end right after it, so that ours comes first.
            current().at(Phase.BEFORE_DDP, self._before_ddp_ends, self._failed)
        return True

    def _before_ddp_ends(self) -> None:
        self._step(self._under_way)
        for in_flight in self._under_way:
            # Nobody waits for these where a step was given up, and the next backward writes the same memory: also after
            # one that has failed. gloo ends all that is under way with the first that runs out of time.
            drain([in_flight])
        current().at(Phase.AFTER_DDP, self._after_ddp_ended, self._failed)

    def _after_ddp_ended(self) -> None:
        buckets, self._under_way = self._under_way, []
        self._settle(buckets)

    def _failed(self) -> None:
        buckets, self._under_way = self._under_way, []
        self._raised(buckets)


@contextmanager
def grad_as_left(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Around a step that comes before DDP's own end of backward: ``.grad`` of ``parameters`` is put back after it.
    DDP's end takes what is in ``.grad`` for what its hooks have left there."""
    as_left = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, as_left, strict=True):
            parameter.grad = gradient


def value_of(future: Arriving) -> Any:
    """The reduced tensor in ``future``. A future of a backend holds it in a list."""
    value = future.value()
    return value[0] if isinstance(value, list) else value


def as_they_arrive(reductions: Sequence[Reduction], *, one_by_one: bool) -> Iterator[list[Reduction]]:
    """Which buckets to step next, in the order of sending: the first one that is left, with those right behind it that
    have arrived already. One call of the optimizer for all of these costs less than one each.

    Args:
        one_by_one: leave those behind it for later calls.
    """
    start = 0
    while start < len(reductions):
        end = start + 1
        while not one_by_one and end < len(reductions) and reductions[end].arrived:
            end += 1
        yield list(reductions[start:end])
        start = end


def slices_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients in a bucket's dense tensor, one for each of its parameters, as views.

    ``GradBucket.gradients()`` knows contiguous reals only. The reducer keeps a dense parameter's own strides
    (channels_last), and complex ones as pairs of reals (``torch/csrc/distributed/c10d/reducer.cpp``,
    ``initialize_bucket_views``).
    """
    slices, offset = [], 0
    for parameter in parameters:
        layout = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
        if layout.is_contiguous() or torch.empty_like(layout, device="meta").stride() != layout.stride():
            view = flat.narrow(0, offset, layout.numel()).view(layout.shape)
        else:
            view = flat.as_strided(layout.shape, layout.stride(), flat.storage_offset() + offset)
        slices.append(torch.view_as_complex(view) if parameter.is_complex() else view)
        offset += layout.numel()
    return slices


class Divisor:
    """The number that DDP's mean divides a sum of gradients by: the world size, or the number of ranks that have not
    joined, in ``join(divide_by_initial_world_size=False)``."""

    def __init__(self) -> None:
        self._active = 0

    def __call__(self, ddp: DistributedDataParallel, bucket: SomeBucket) -> int:
        if not ddp._join_config.enable or ddp._divide_by_initial_world_size:
            return dist.get_world_size(ddp.process_group)
        if bucket.index() == 0:
            # A rank that has joined calls the hook outside of any backward, to match the others' collectives.
            active = torch.tensor([0 if graph_task() is None else 1], device=bucket.buffer().device)
            dist.all_reduce(active, group=ddp.process_group)
            self._active = int(active.item())
        return self._active


def refuse_manual_finalization(ddp: DistributedDataParallel) -> None:
    """
    Raises:
        AttachError: ``ddp`` (of torch 2.15 or later) writes gradients when the loop asks for it, and would write them
            over those that were applied where backward ended.
    """
    if getattr(ddp, "require_manual_backward_finalization", False):
        raise AttachError(
            "DistributedDataParallel.require_manual_backward_finalization is set: gradients are written when "
            "finalize_backward() is called, and here they are used where backward ends. Set it to False, or use "
            "schedule='forward' without cross_iteration, shard_state, comm_hook, mixed_precision and clip"
        )


def refuse_delayed_all_reduce(ddp: DistributedDataParallel) -> None:
    """
    Raises:
        AttachError: ``ddp`` reduces some gradients where a hook on their parameters cannot wait for it.
    """
    if ddp._delay_all_reduce_params:
        raise AttachError(
            "DistributedDataParallel(delay_all_reduce_named_params=…) reduces those parameters after their gradient "
            "hooks have run. Build it without"
        )


class _AsTheyAre(TorchDispatchMode):
    """Answers ``zeros_like(tensor)`` with ``tensor``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def buckets_of(ddp: DistributedDataParallel) -> Sequence[dist.GradBucket]:
    """The reducer's own, not zeros like them, which would take as much memory again."""
    with _AsTheyAre():
        return ddp.reducer._get_zeros_like_grad_buckets()


def bucket_parameters(ddp: DistributedDataParallel) -> set[int]:
    """By ``id``: the parameters that are in a bucket of ``ddp``: those that were trainable when it was constructed.

    DDP has no public record of them, and shows none of sparse gradients: then they are taken to be the parameters that
    are trainable now.
    """
    try:
        buckets = buckets_of(ddp)
    except RuntimeError:
        return {id(p) for p in ddp._module_parameters if p.requires_grad}
    return {id(p) for bucket in buckets for p in bucket.parameters()}
