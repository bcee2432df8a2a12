"""What the running loop could gain, in words."""

from collections.abc import Iterator

from instep._optim.plan import MIB
from instep._step.schedule import Schedule
from instep.options import DEFAULT_BUCKET_BYTES


def advice(schedule: Schedule, *, divided: bool) -> str:
    """Sentences, one a line; empty where there is nothing to say.

    Args:
        divided: whether several ranks have gradients in common: then not all of them can be freed early.
    """
    return "\n".join(_lines(schedule, divided=divided))


def _lines(schedule: Schedule, *, divided: bool) -> Iterator[str]:
    if schedule.deferral is not None:
        yield f"Steps are {schedule.deferral}."
    gains = schedule.gains
    sizes = [a.spec.nbytes for a in schedule.parameters if (p := a.peek()) is not None and p.requires_grad]
    total = sum(sizes)
    freed = total - max(*sizes, min(total, DEFAULT_BUCKET_BYTES)) if sizes else 0
    if gains is None or divided:
        return
    if gains.leaves_gradients and freed > 0:
        yield (
            f"The loop leaves gradients alone between backward and optimizer.step(): schedule='backward' would free "
            f"{freed / MIB:.1f} of their {total / MIB:.1f} MiB in backward, and take {gains.step:.1f} of the "
            f"{gains.iteration:.1f} ms of an iteration there."
        )
