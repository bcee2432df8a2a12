"""What the methods of an attachment do: a recording, one rank's state on all ranks, numbers for a log."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from instep._ranks.collectives import broadcast_object, resync
from instep._step.schedule import Schedule
from instep._torch.pipelining import Pipeline
from instep._wiring.build import Parts
from instep._wiring.recorded import RecordedLoop
from instep.errors import InstepError
from instep.options import Options
from instep.target import called_in

if TYPE_CHECKING:
    from instep_tools.recording import Recording


def begin_recording(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    steps: int,
    pipeline: Pipeline | None,
    attached: tuple[Options, Schedule] | None = None,
) -> "Recording":
    """Of a loop whose steps are torch's; with ``attached``, instep's."""
    options, schedule = (None, None) if attached is None else (attached[0].given(), attached[1])
    if pipeline is None and len(called_in(model)) > 1:
        raise InstepError(
            "record() of several models: an iteration of a recording begins where one model's forward does. Attach "
            "the module that holds them, and call that; of the stages of a pipeline, give its schedule as pipeline="
        )
    from instep_tools.recording import Recording  # imports torch.profiler

    return Recording(RecordedLoop(model, optimizers, options, schedule, pipeline), steps)


def resync_from(parts: Parts, rank: int) -> None:
    """Take everything from ``rank``, and give up the step that is open or torn here. All ranks must call this."""
    model, wrapped = parts.refs.model(), parts.refs.living_wrappers()
    if model is None or not wrapped or parts.sharding is not None or parts.zero is not None:
        raise InstepError(
            "resync_from() needs a whole copy of model and optimizer on every rank: DistributedDataParallel or "
            "replicate, without shard_state. Load a checkpoint instead"
        )
    group: dist.ProcessGroup = wrapped[0].process_group
    ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise InstepError(f"resync_from({rank!r}): the ranks that share this model are {ranks}")
    draws = parts.draws
    told = [parts.schedule.last_complete_step(), None if draws is None else draws.earlier]
    step, earlier = broadcast_object(told, group, ranks.index(rank))
    if step is None:
        raise InstepError(
            f"resync_from({rank}): the last step was applied only in part on that rank. Name one where it was "
            "applied as a whole, or load a checkpoint"
        )
    parts.schedule.give_up(gradients=True)
    parts.votes.start_anew()
    resync(model, parts.refs.optimizers(), group, ranks.index(rank))
    for stepper in parts.refs.steppers:
        if stepper.offloaded is not None:
            stepper.offloaded.pin()
    parts.schedule.step_count = step
    if draws is not None and earlier is not None:
        draws.earlier = earlier


Stats = dict[str, int | float]


def stats_of(parts: Parts) -> Stats:
    """An attachment in numbers, for a log. Times are left out before the first step, and on accelerators, whose work
    the host's clock does not show."""
    step, times = parts.step, parts.step.times
    stats: Stats = {
        "steps": step.ledger.step_count,
        "redos": step.ledger.redo_count,
        "skips": step.ledger.skip_count,
        "votes": parts.votes.count,
        "freed_bytes": step.freed_bytes,
    }
    if times.exposed is not None and all(p.device.type == "cpu" for p in step.members.living()):
        stats["exposed_ms"] = 1000 * times.exposed
        stats["outside_ms"] = 1000 * times.outside
    return stats


def table_of(title: str, rows: Mapping[str, object]) -> str:
    """For a notebook: HTML that needs nothing else."""
    lines = "".join(
        f'<tr><th style="text-align:left">{escape(str(name))}</th>'
        f'<td style="text-align:left">{escape(f"{value:.3f}" if isinstance(value, float) else str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f'<table><caption style="text-align:left">{escape(title)}</caption><tbody>{lines}</tbody></table>'
