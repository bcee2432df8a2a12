"""The parts of an attachment, made of what is attached and of the options. Nothing is put on the model yet."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep._gradients.clipping import Clipping
from instep._life.weak import weakly
from instep._optim.calling import STEPPED_WHOLE
from instep._optim.owners import in_views_of_ddp, in_views_of_replicate
from instep._optim.probe import Separability, not_asked, separability_of
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation, Syncing
from instep._step.checking import Check
from instep._step.schedule import Schedule
from instep._wiring.deferral import deferring_of, steps_inside_step
from instep._wiring.gathering import Gathering
from instep._wiring.held import Handles, Held
from instep._wiring.hooks import BackwardHooks, ForwardHooks, StepHooks
from instep._wiring.late import LateParameters
from instep._wiring.plain import PlainHooks
from instep._wiring.planned import Planned
from instep._wiring.ranks import rank, ranks_of
from instep._wiring.schedules import choose
from instep._wiring.sharding import Sharding
from instep._wiring.sources import connect_crossing, make_sources
from instep._wiring.stepping_itself import SteppingItself
from instep._wiring.threads import Threads
from instep.errors import UnsupportedOptimizerError
from instep.options import Options
from instep.sources import Source
from instep.sources.fsdp.wrappers import FSDP1Sync, FSDP2Sync, fsdp2_reading_streams
from instep.sources.local.parts import ForwardCounts
from instep.target import Target, Wrapped

if TYPE_CHECKING:
    from instep.sources.zero.source import Zero


@dataclass(frozen=True)
class Parts:
    """
    Attributes:
        zero: with ``shard_state``: the shards of the state.
        sharding: of a model that FSDP has divided into groups.
        handles: what was put on the model and the optimizers; empty before it is connected, and once it is detached.
    """

    held: Held
    schedule: Schedule
    sources: list[Source]
    accumulation: Accumulation
    clipping: Clipping
    votes: StepVotes
    planned: Planned
    zero: "Zero | None"
    sharding: Sharding | None
    late: LateParameters
    threads: Threads
    forwards: ForwardHooks | PlainHooks
    steps: StepHooks
    handles: Handles

    def abandon(self) -> None:
        """Model and optimizers are gone: whoever keeps this keeps nothing of them."""
        self.planned.keep()
        self.sources.clear()
        self.schedule.crosses(tuple, bool)


def build(target: Target, options: Options) -> Parts:
    """
    Raises:
        UnsupportedOptimizerError: an optimizer was tried, and its update couples parameters.
    """
    held = Held(target)
    clipping, votes = Clipping(options.clip), StepVotes(rank)
    is_sharded = bool(target.groups)
    accumulation = Accumulation(options.accumulation_steps, _synced(held.wrapped, target), votes, sharded=is_sharded)
    in_backward, on_trial = options.schedule == "backward", bool(options.undo)
    if options.splits_steps or options.check_steps:
        asked = [] if options.disabled else target.optimizers
        separability = [_separability(one, options, in_backward=in_backward, on_trial=on_trial) for one in asked]
    else:
        separability = list(map(not_asked, target.optimizers))
    check = Check(options.check_steps) if options.check_steps and not options.disabled else None
    ranks = ranks_of(target, options)
    votes.ranks, votes.voting = ranks, ranks if options.votes else None
    deferring = deferring_of(options, held, ranks)
    chosen = choose(options, held.steppers, separability, votes, accumulation, clipping, check, deferring)
    schedule = chosen.schedule
    zero = _zero(target.ddps[0], votes) if options.communication.shard_state and not options.disabled else None
    if zero is not None:
        schedule.gather = zero.shards.gather
    if options.randomness.seed is not None and not options.disabled:
        schedule.draw_by(options.randomness.seed)
    gathering = Gathering(target, held, zero, schedule.draws, chosen.error_for_use)
    schedule.parameters = gathering.gather(target.optimizers, target.names)

    uses = ForwardCounts()
    sources = make_sources(target, options, chosen, accumulation, zero, uses)
    connect_crossing(sources, schedule)
    if target.wrapped or target.fsdp2:
        in_ddp = bool(target.ddps)
        schedule.divides(in_views_of_ddp if in_ddp else in_views_of_replicate)
    if target.groups and not target.fsdp1:
        schedule.read_by(partial(_reading_streams, held.model))

    handles: Handles = []
    threads = Threads(held.name, schedule)
    sharding = Sharding(target, schedule, uses) if is_sharded else None
    stepping = SteppingItself(target.optimizers, schedule, sources) if options.steps_itself else None
    backwards = BackwardHooks(schedule, sources, accumulation, threads, sharding, stepping, uses, handles)
    if chosen.sink is not None:
        chosen.sink.on_open = weakly(backwards.begin_step)
    late = LateParameters(held, schedule, sources, gathering, chosen.readers(backwards), handles)
    forwards: ForwardHooks | PlainHooks
    if options.disabled:
        forwards = PlainHooks(schedule, accumulation, votes, handles, is_sharded=is_sharded)
    else:
        forwards = ForwardHooks(
            held, schedule, sources, accumulation, threads, late, backwards, votes, is_sharded=is_sharded
        )
    return Parts(
        held,
        schedule,
        sources,
        accumulation,
        clipping,
        votes,
        Planned(options, schedule, sources, separability, check),
        zero,
        sharding,
        late,
        threads,
        forwards,
        StepHooks(schedule, votes, late, zero, forwards, handles),
        handles,
    )


def _separability(optimizer: Optimizer, options: Options, *, in_backward: bool, on_trial: bool) -> Separability:
    if steps_inside_step(optimizer, options):
        return not_asked(optimizer)
    try:
        keyed, offloaded = options.randomness.random is not None, options.offload is not None
        with torch.device("cpu"):  # the trial compares values, and the loop may be about to make tensors without any
            return separability_of(
                optimizer, in_backward=in_backward, on_trial=on_trial, keyed=keyed, offloaded=offloaded
            )
    except UnsupportedOptimizerError as error:
        if not str(error).endswith(STEPPED_WHOLE):
            raise
        otherwise = options.taken_whole(*(["check_steps"] if options.check_steps else []))
        raise UnsupportedOptimizerError(str(error).removesuffix(STEPPED_WHOLE) + otherwise) from error.__cause__


def _synced(wrapped: "Sequence[weakref.ref[Wrapped]]", target: Target) -> Callable[[], list[Syncing]]:
    """What says whether the next backward reduces gradients: the living wrappers, and FSDP."""
    sharded: list[Syncing] = []
    if target.groups:
        sharded.append(FSDP1Sync(target.model) if target.fsdp1 else FSDP2Sync(target.model))
    return lambda: [*(one for ref in wrapped if (one := ref()) is not None), *sharded]


def _zero(ddp: DistributedDataParallel, votes: StepVotes) -> "Zero":
    from instep.sources.zero.source import Zero  # imports DTensor, which takes a while

    return Zero(ddp, votes)


def _reading_streams(model: Callable[[], nn.Module | None]) -> list[torch.Stream]:
    found = model()
    return [] if found is None else list(fsdp2_reading_streams(found))
