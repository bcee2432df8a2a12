"""What is asked of a DDP instance beside its buckets: most of it has no public name in torch.

In the order in which an instance comes to it: when it is attached (which parameters it reduces, and what it must not be
built with), in a forward (``GradientsAside``, ``look_from``), in a backward (``Divisor``), and when it was measured
(``exposed_communication``).
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from instep._torch.engine import graph_task
from instep._torch.hooks import BoundHook
from instep._torch.placeholders import SpentGradient
from instep.errors import AttachError
from instep.sources.ddp.buckets import AnyBucket


def managed_by(ddp: DistributedDataParallel) -> set[int]:
    """By ``id``: the parameters that ``ddp`` may reduce. Those that were frozen when it was built are in no bucket:
    ``optimizer.step()`` steps them."""
    return {id(p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}


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


def buckets_of(ddp: DistributedDataParallel) -> Sequence[dist.GradBucket]:
    """The reducer's own buckets. Its method makes zeros like them, which would take as much memory again."""
    with _AsTheyAre():
        return ddp.reducer._get_zeros_like_grad_buckets()


class _AsTheyAre(TorchDispatchMode):
    """Answers ``zeros_like(tensor)`` with ``tensor``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def refuse_manual_finalization(ddp: DistributedDataParallel) -> None:
    """Refuse an instance whose gradients are written where the loop asks for it.

    Raises:
        AttachError: ``ddp`` (of torch 2.15 or later) writes gradients when the loop asks for it, and would write them
            over those that were applied where backward ended.
    """
    if getattr(ddp, "require_manual_backward_finalization", False):
        raise AttachError(
            "DistributedDataParallel.require_manual_backward_finalization is set: gradients are written when "
            "finalize_backward() is called, and here they are used where backward ends. Set it to False, or use "
            "schedule='forward' without shard_state, comm_hook, mixed_precision and clip"
        )


def refuse_delayed_all_reduce(ddp: DistributedDataParallel) -> None:
    """Refuse an instance that reduces some gradients after their hooks.

    Raises:
        AttachError: ``ddp`` reduces some gradients where a hook on their parameters cannot wait for it.
    """
    if ddp._delay_all_reduce_params:
        raise AttachError(
            "DistributedDataParallel(delay_all_reduce_named_params=…) reduces those parameters after their gradient "
            "hooks have run. Build it without"
        )


class GradientsAside:
    """Takes gradients off that fit into no bucket, while a forward of ``ddp`` may lay out its buckets anew: the second.

    With ``gradient_as_bucket_view`` DDP copies every ``.grad`` into the new buckets. Where a loop clears gradients only
    after the forward, these are the gradients of the step before. Attached, they may be spent, or a rank's rows of a
    gradient, which fit into no bucket.
    """

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
                # Others stay: of one that holds a gradient that is to be copied, as in the plain loop, and by one that
                # waits for a backward it is known that the loop has not cleared it.
                if type(gradient) is SpentGradient or hasattr(type(gradient), "to_local"):
                    self._off.append((weakref.ref(parameter), gradient))
                    parameter.grad = None

    def _restore(self, ddp: DistributedDataParallel, args: object, output: object) -> None:
        off, self._off = self._off, []
        for ref, gradient in off:
            if (parameter := ref()) is not None:
                parameter.grad = gradient


def look_from(ddp: DistributedDataParallel, losses: Sequence[torch.Tensor]) -> None:
    """Have ``ddp`` look once more for unused parameters, from all ``losses`` of the next backward, after its last
    forward. Where one backward follows several forwards, each forward alone has taken for unused what it did not use.

    ``find_unused_parameters=True`` looks in each forward, from its outputs, for what backward will come to, with the
    reducer's own method: torch has no public one. ``tests/distributed/test_micro_batches_on_ranks.py`` fails clearly
    when torch changes it.
    """
    if ddp.find_unused_parameters:
        ddp.reducer.prepare_for_backward(list(losses))


class Divisor:
    """The number that DDP's mean divides a sum of gradients by: the world size, or the number of ranks that have not
    joined, in ``join(divide_by_initial_world_size=False)``."""

    def __init__(self) -> None:
        self._active = 0

    def __call__(self, ddp: DistributedDataParallel, bucket: AnyBucket) -> int:
        if not ddp._join_config.enable or ddp._divide_by_initial_world_size:
            return dist.get_world_size(ddp.process_group)
        if bucket.index() == 0:
            # A rank that has joined calls the hook outside of any backward, to match the others' collectives.
            active = torch.tensor([0 if graph_task() is None else 1], device=bucket.buffer().device)
            dist.all_reduce(active, group=ddp.process_group)
            self._active = int(active.item())
        return self._active


_NANOSECONDS = 1e6  # in a millisecond


def exposed_communication(ddp: DistributedDataParallel) -> float | None:
    """How long communication went on when backward's own work was done, in milliseconds, as DDP has measured it last;
    ``None``: DDP has measured nothing on this device.

    DDP measures its first ten iterations, and then every hundredth. It has no public name for what it finds;
    ``tests/distributed/test_deferring.py`` fails clearly when torch changes the private one.
    """
    data: dict[str, Any] = ddp._get_ddp_logging_data()
    total, hidden = data.get("backward_comm_time", 0), data.get("backward_compute_comm_overlap_time", 0)
    return max(total - hidden, 0) / _NANOSECONDS if total > 0 else None
