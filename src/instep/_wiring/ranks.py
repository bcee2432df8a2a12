"""Which ranks step together, and what must be the same on all of them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from instep._autograd.engine import runs
from instep._ranks.comparison import digest_of
from instep._ranks.step_ranks import StepRanks, neighbours_of
from instep._step.schedule import Schedule
from instep._wiring.held import living_parameters
from instep.options import Communication, Options
from instep.sources.ddp.hook_slot import forget_comm_hook
from instep.target import Target

if TYPE_CHECKING:
    import weakref

    from instep.sources import Source


def rank() -> int:
    """Of this process."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks_of(target: Target, options: Options) -> StepRanks | None:
    """The ranks that share the model; ``None``: there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    neighbours = neighbours_of([*target.wrapped, *target.fsdp1], target.optimized())
    if neighbours is None:
        return None
    meets = options.votes or options.communication != Communication()
    parameters = dict(_parameters_in_words(target, with_optimizers=meets))
    return StepRanks(
        neighbours,
        [options.in_words(), parameters],
        digest_of(dict(_parameters_in_words(target, with_optimizers=False))),  # whatever this rank's options are
        waits=meets,
        matters=meets or not options.asks_for_nothing,
    )


def _parameters_in_words(target: Target, *, with_optimizers: bool) -> Iterator[tuple[str, str]]:
    """Of each parameter of the model its shape on all ranks together, and its dtype.

    Args:
        with_optimizers: also which optimizer steps it. Where torch takes the steps, that may be another one on each
            rank: some loops divide the optimizer by hand.
    """
    optimizers = {
        id(p): f", in optimizer {number}"
        for number, optimizer in enumerate(target.optimizers if with_optimizers else ())
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for parameter, places in target.names.values():
        # FSDP1's parameters are what a rank has of them.
        shape = "" if target.fsdp1 or is_lazy(parameter) else f"{tuple(parameter.shape)} "
        dtype = str(parameter.dtype).removeprefix("torch.")
        yield f"parameter {places[0].name!r}", f"{shape}{dtype}{optimizers.get(id(parameter), '')}"


def communicates(schedule: "weakref.ref[Schedule]") -> bool:
    """Whether the running backward gives an attached parameter its gradient: ``autograd.grad`` gives none."""
    found = schedule()
    with torch._C.DisableTorchFunctionSubclass():  # no value is used, and nobody who watches need be told
        return found is not None and any(
            runs(get_gradient_edge(p).node) for p in living_parameters(found) if p.requires_grad
        )


def stand_aside(sources: "Sequence[Source]", ddps: "Sequence[weakref.ref[DistributedDataParallel]]") -> None:
    """The running backward, which has sent nothing yet, reduces gradients as torch does without instep."""
    for source in sources:
        source.disconnect()
    for ref in ddps:
        if (ddp := ref()) is not None:
            forget_comm_hook(ddp)
