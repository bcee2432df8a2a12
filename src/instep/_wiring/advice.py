"""What the running loop could gain, in words."""

from collections.abc import Iterator, Sequence

from torch.nn.parallel import DistributedDataParallel

from instep._gradients.policies import ClipNorm
from instep._optim.plan import MIB
from instep._step.observed import Gains
from instep._step.schedule import Schedule
from instep.options import DEFAULT_BUCKET_BYTES, Options, bucket_that_frees
from instep.sources.ddp.timing import exposed_communication

WORTH = 0.1
"""Of an iteration. A smaller part is lost again in the order of communication, and in the bookkeeping of that."""
ENOUGH = 4
"""Steps, of which each shows the same."""


def advice(
    schedule: Schedule, options: Options, ddps: Sequence[DistributedDataParallel], *, divided: bool, crosses: bool
) -> str:
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
    if options.schedule == "backward" and schedule.step_count >= ENOUGH:
        lines += _taken_twice(schedule, options)
        lines += [] if divided else _not_freed(schedule, options)
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
    bucket = bucket_that_frees(total)
    said = "" if bucket == DEFAULT_BUCKET_BYTES else f", bucket_bytes={bucket // MIB} * 2**20"
    freed = total - max(*sizes, min(total, bucket)) if sizes else 0
    if gains.leaves_gradients and freed > 0:
        yield (
            f"The loop leaves gradients alone between backward and optimizer.step(): schedule='backward'{said} would "
            f"free {freed / MIB:.1f} of their {total / MIB:.1f} MiB in backward, and take {gains.step:.1f} of the "
            f"{gains.iteration:.1f} ms of an iteration there."
        )


def _taken_twice(schedule: Schedule, options: Options) -> Iterator[str]:
    steps, redos = schedule.step_count, schedule.redo_count
    if 2 * redos >= steps:
        yield f"{redos} of {steps} steps were taken twice: in backward, and again, put back, in optimizer.step(). " + (
            "ClipNorm scales by the norm of all gradients, which is known only then: "
            f"clip=ClipNorm({options.clip.max_norm}, mode='two_pass') in place of undo frees gradients, for a second "
            "backward (overlap.backward(loss)); without schedule='backward' and undo each step is taken once."
            if isinstance(options.clip, ClipNorm)
            else "The loop changes gradients, weights or settings between the two. Without schedule='backward' and "
            "undo each step is taken once."
        )


def _not_freed(schedule: Schedule, options: Options) -> Iterator[str]:
    if schedule.freed_bytes == 0:
        yield (
            "No gradient was freed in backward: undo keeps them until optimizer.step()."
            if options.undo
            else f"No gradient was freed in backward in {schedule.step_count} steps: all were left to optimizer.step()."
        )
