"""What the running loop could gain, in words."""

from collections.abc import Iterator, Sequence

from torch.nn.parallel import DistributedDataParallel

from instep._optim.plan import MIB
from instep._step.observed import Gains
from instep._step.schedule import Schedule
from instep.options import DEFAULT_BUCKET_BYTES
from instep.sources.ddp.timing import exposed_communication

WORTH = 0.1
"""Of an iteration. A smaller part is lost again in the order of communication, and in the bookkeeping of that."""


def advice(schedule: Schedule, ddps: Sequence[DistributedDataParallel], *, divided: bool, crosses: bool) -> str:
    """Sentences, one a line; empty where there is nothing to say.

    Args:
        ddps: the living instances in the model.
        divided: whether several ranks have gradients in common: then not all of them can be freed early.
        crosses: whether communication is hidden behind the next forward already.
    """
    lines = [] if schedule.deferral is None else [f"Steps are {schedule.deferral}."]
    gains = schedule.gains
    if gains is not None:
        lines += _communication(gains, [] if crosses else ddps)
        lines += [] if divided else _memory(gains, schedule)
    return "\n".join(lines)


def _communication(gains: Gains, ddps: Sequence[DistributedDataParallel]) -> Iterator[str]:
    exposed = sum(found for ddp in ddps if (found := exposed_communication(ddp)) is not None)
    if exposed >= WORTH * gains.iteration:
        yield (
            f"Communication outlasts backward by {exposed:.1f} of the {gains.iteration:.1f} ms of an iteration: with "
            "cross_iteration=True (and DDP's gradient_as_bucket_view=True) the next forward would begin meanwhile."
        )


def _memory(gains: Gains, schedule: Schedule) -> Iterator[str]:
    sizes = [a.spec.nbytes for a in schedule.parameters if (p := a.peek()) is not None and p.requires_grad]
    total = sum(sizes)
    freed = total - max(*sizes, min(total, DEFAULT_BUCKET_BYTES)) if sizes else 0
    if gains.leaves_gradients and freed > 0:
        yield (
            f"The loop leaves gradients alone between backward and optimizer.step(): schedule='backward' would free "
            f"{freed / MIB:.1f} of their {total / MIB:.1f} MiB in backward, and take {gains.step:.1f} of the "
            f"{gains.iteration:.1f} ms of an iteration there."
        )
