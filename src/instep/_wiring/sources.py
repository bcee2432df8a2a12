"""Which sources say when gradients are final: one for each wrapper, and one for the parameters outside of all."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from instep._optim.parameters import AttachedParameter
from instep._step.accumulation import Accumulation
from instep._step.pending import InFlightBucket
from instep._step.recorder import Recorder
from instep._step.schedule import Schedule
from instep._wiring.schedules import Chosen
from instep.options import Communication, Options
from instep.sources import Sink, Source
from instep.sources.crossing.source import CrossingSource
from instep.sources.ddp.source import DDPSource
from instep.sources.fsdp.source import FSDP1Source
from instep.sources.local.parts import ForwardCounts
from instep.sources.local.source import LocalSource
from instep.sources.replicate.source import Replicated, ReplicatedSource
from instep.target import Target, Wrapped, reduced_by

if TYPE_CHECKING:
    from instep.sources.zero.source import Zero


def make_sources(
    target: Target,
    options: Options,
    chosen: Chosen,
    accumulation: Accumulation,
    zero: "Zero | None",
    uses: ForwardCounts,
) -> list[Source]:
    """The sources of the schedule's parameters, not connected yet."""
    if chosen.sink is None:
        return []
    sink, communication, dtype = chosen.sink, options.communication, options.communication.reduce_dtype
    sources: list[Source] = []
    rest = list(chosen.schedule.parameters)
    for wrapper in target.wrapped:
        reduced = reduced_by(wrapper)
        mine = [a for a in rest if id(a.get()) in reduced]
        rest = [a for a in rest if id(a.get()) not in reduced]
        if not mine:
            continue
        if zero is not None and isinstance(wrapper, DistributedDataParallel):
            in_rows = [a for a in mine if a.shard is not None]
            sources.append(zero.source(sink, in_rows, wrapper, accumulation, dtype))
        elif communication.cross_iteration and isinstance(wrapper, DistributedDataParallel):
            recorder = partial(_recorder_of, weakref.ref(chosen.schedule))
            sources.append(CrossingSource(mine, wrapper, dtype, recorder))
        elif chosen.tells_all or communication.comm_hook is not None or dtype is not None:
            sources.append(_reducing(wrapper, mine, sink, communication))
    if chosen.tells_all and rest:
        sources.append(_unwrapped(target, rest, sink, options, uses))
    return sources


def connect_crossing(sources: Sequence[Source], schedule: Schedule) -> None:
    """With ``cross_iteration`` ``optimizer.step()`` takes over gradients that are still on their way."""
    crossing = [source for source in sources if isinstance(source, CrossingSource)]
    if crossing:
        schedule.crosses(partial(_flights, crossing), partial(_waited, crossing))


def _reducing(wrapper: Wrapped, mine: Sequence[AttachedParameter], sink: Sink, communication: Communication) -> Source:
    if isinstance(wrapper, Replicated):
        return ReplicatedSource(sink, mine, wrapper, communication.reduce_dtype)
    return DDPSource(sink, mine, wrapper, communication.comm_hook, communication.reduce_dtype)


def _unwrapped(
    target: Target, mine: Sequence[AttachedParameter], sink: Sink, options: Options, uses: ForwardCounts
) -> Source:
    if target.fsdp1:
        return FSDP1Source(sink, mine, target.fsdp1)
    return LocalSource(sink, mine, options.bytes_of_a_bucket, uses)


def _recorder_of(schedule: "weakref.ref[Schedule]") -> Recorder | None:
    return None if (found := schedule()) is None else found.recorder


def _flights(sources: Sequence[CrossingSource]) -> list[InFlightBucket]:
    return [flight for source in sources for flight in source.flights]


def _waited(sources: Sequence[CrossingSource]) -> bool:
    return all(source.waited for source in sources)
