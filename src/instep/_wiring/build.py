"""How an attachment is put together: its sources and schedule, its parts, and the hooks on model and optimizers."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep._gradients.clipping import ClipNorm, Clipping
from instep._gradients.scaling import LossScale
from instep._optim.kinds import ToldStep, can_be_put_off, steps_as_known, steps_one, takes_hooks
from instep._optim.offload import HostLoading, HostState, OffloadedState, Part
from instep._optim.owners import in_views_of_ddp, in_views_of_replicate
from instep._optim.parameters import AttachedParameter
from instep._optim.random_numbers import KeyedDraws
from instep._optim.stepper import Stepper
from instep._optim.undo import Undo
from instep._ranks.collectives import norm_over_stages
from instep._ranks.process_groups import world
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation, Syncing
from instep._step.deferrable import ReadOrder
from instep._step.deferral import Deferring
from instep._step.deferred import ForwardSchedule
from instep._step.in_backward import BackwardSchedule
from instep._step.judging import Judge
from instep._step.norms import MeasuringSink
from instep._step.plain import PlainSchedule
from instep._step.schedule import Schedule
from instep._step.state import StepMembers
from instep._step.step import RunningStep
from instep._torch.engine import RunErrors, Traced, graph_task
from instep._torch.hooks import BoundHook, PlainPickles, UntracedHook, first_of_post_hooks, last_of_pre_hooks
from instep._torch.lifetime import Owners, weakly
from instep._torch.mixed_precision import LowPrecision
from instep._torch.pipelining import Pipeline
from instep._wiring.advice import deferring_of
from instep._wiring.hooks import (
    AddedParameters,
    BackwardHooks,
    CheckedReaders,
    ErrorForUse,
    ForwardHooks,
    ParametersOfModel,
    PlainHooks,
    Readers,
    Sharding,
    StepHooks,
    SteppingItself,
    Threads,
    WaitingReaders,
)
from instep._wiring.ranks import Joining, communicates, rank, ranks_of, stand_aside
from instep._wiring.weak_refs import Handles, WeakRefs, living_parameters
from instep.buckets import Plan, bucket_bytes_for
from instep.options import BY_ENVIRONMENT, Communication, Options
from instep.sources import Sink, Source
from instep.sources.ddp.source import DDPSource
from instep.sources.fsdp.fsdp1 import FSDP1Source
from instep.sources.fsdp.modules import FSDP1Sync, FSDP2Sync, ReplicaSums, fsdp2_reading_streams
from instep.sources.local import ForwardCounts, LocalSource
from instep.sources.pipeline import PipelineSource
from instep.sources.replicate.source import Replicated, ReplicatedSource
from instep.target import Target, Wrapped, reduced_by

if TYPE_CHECKING:
    from instep.sources.zero.source import Zero


class Chosen(NamedTuple):
    """A schedule, with what goes with it.

    Attributes:
        sink: what the sources tell; ``None``: there are none.
        tells_all: whether the sink is told of every gradient, and not only where a source communicates for itself.
        readers: makes what is done before a module reads its parameters.
        error_for_use: what the use of a gradient that was applied raises; ``None``: nothing is put in its place.
    """

    schedule: Schedule
    sink: BackwardSchedule | MeasuringSink | None
    tells_all: bool
    readers: Callable[[BackwardHooks], Readers]
    error_for_use: ErrorForUse | None


def choose(
    options: Options,
    step: RunningStep,
    deferring: Callable[[], Deferring],
) -> Chosen:
    """The schedule that ``options`` ask for. This is the one place that asks which it is."""
    steppers, votes = step.members.steppers, step.ledger.votes
    if options.disabled:
        why = None if options.left_to_torch == BY_ENVIRONMENT else options.left_to_torch
        any_loop = options.takes_any_loop
        plain = PlainSchedule(step, why, takes_any_loop=any_loop)
        return Chosen(plain, None, False, lambda _: Readers(), None)
    if options.schedule == "forward":
        # An update that runs later raises elsewhere: of a step() that is the user's own, the loop expects it there.
        may_wait = [s for s in steppers if can_be_put_off(s.optimizer()) and steps_as_known(s.optimizer())]
        reading = ReadOrder(options.bucket_bytes, options.most_put_off_together)
        forward = ForwardSchedule(step, may_wait, reading, deferring())
        measures = isinstance(options.clip, ClipNorm)
        return Chosen(forward, forward.measuring, measures, lambda _: WaitingReaders(forward), None)
    undo = Undo(host=options.undo == "host") if options.undo else None
    votes.asks_first = undo is not None and options.nonfinite != "allow"
    scale = None if options.scaler is None else LossScale(options.scaler)
    beside = deferring if options.may_update_beside_backward else None
    backward = BackwardSchedule(step, beside, undo, scale)
    frees = undo is None and not options.steps_itself
    readers = partial(CheckedReaders, backward, on_trial=undo is not None)
    return Chosen(backward, backward, True, readers, backward.error_for_use if frees else None)


def make_sources(
    target: Target,
    options: Options,
    chosen: Chosen,
    accumulation: Accumulation,
    zero: "Zero | None",
    uses: ForwardCounts,
) -> list[Source]:
    """The sources of the schedule's parameters, not connected yet: one for each wrapper, and one for the parameters
    outside of all."""
    if (pipeline := options.communication.pipeline) is not None:
        return [_in_pipeline(options, pipeline, chosen, accumulation)]
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
        elif chosen.tells_all or communication.comm_hook is not None or dtype is not None:
            sources.append(_reducing(wrapper, mine, sink, communication))
    # A norm is taken in backward where that waits for other ranks. On one device step() takes all of them in one call.
    are_local = not target.fsdp1 and not target.groups
    if chosen.tells_all and rest and not (isinstance(sink, MeasuringSink) and are_local):
        sources.append(_unwrapped(target, rest, sink, options, uses))
    return sources


def _reducing(wrapper: Wrapped, mine: Sequence[AttachedParameter], sink: Sink, communication: Communication) -> Source:
    if isinstance(wrapper, Replicated):
        return ReplicatedSource(sink, mine, wrapper, communication.reduce_dtype)
    return DDPSource(sink, mine, wrapper, communication.comm_hook, communication.reduce_dtype)


def _in_pipeline(options: Options, pipeline: Pipeline, chosen: Chosen, accumulation: Accumulation) -> Source:
    """``optimizer.step()`` takes norms itself: only with ``schedule="backward"`` anything is done with gradients."""
    accumulation.runs_stages = False
    sink = chosen.sink if isinstance(chosen.sink, BackwardSchedule) else None
    of_each = [frozenset(map(id, stage.parameters())) for stage in pipeline.modules]
    schedule, size = chosen.schedule, options.bucket_bytes
    return PipelineSource(schedule, sink, schedule.parameters, of_each, pipeline, accumulation, size)


def _unwrapped(
    target: Target, mine: Sequence[AttachedParameter], sink: Sink, options: Options, uses: ForwardCounts
) -> Source:
    if target.fsdp1:
        return FSDP1Source(sink, mine, target.fsdp1)
    return LocalSource(sink, mine, options.bucket_bytes, uses, ReplicaSums(target.fsdp2).applied)


def offload(
    schedule: Schedule,
    optimizers: Sequence[Optimizer],
    steppers: Sequence[Stepper],
    bucket_bytes: int | None,
    handles: Handles,
) -> None:
    """The state of the optimizers goes to host memory, and stays there when it is loaded.

    Raises:
        UnsupportedOptimizerError: an optimizer has state that cannot live in host memory.
    """
    state = HostState()
    # What is lent together is what the gradients are that backward frees together.
    size = bucket_bytes or bucket_bytes_for(attached.spec for attached in schedule.parameters)
    for optimizer, stepper in zip(optimizers, steppers, strict=True):
        parts = partial(_parts_of, weakref.ref(schedule), weakref.ref(stepper))
        stepper.offloaded = home = OffloadedState(state, optimizer, parts, size)
        home.take_in()
        loading = HostLoading(home)
        handles.append(optimizer.register_load_state_dict_pre_hook(UntracedHook(loading.before)))
        handles.append(optimizer.register_load_state_dict_post_hook(UntracedHook(loading.after)))


def _parts_of(schedule: "weakref.ref[Schedule]", stepper: "weakref.ref[Stepper]") -> Iterator[Part]:
    """The parameters that ``stepper`` steps: some may have been added since ``attach``."""
    found = schedule()
    for attached in () if found is None else found.parameters:
        if attached.stepper is stepper() and (parameter := attached.peek()) is not None:
            yield parameter, attached.shard


class Planned:
    """The plan of an attachment: its buckets, and the optimizers that are not proven."""

    def __init__(self, options: Options, schedule: Schedule, sources: Sequence[Source], step: RunningStep) -> None:
        # Else the sources' buckets are those in which norms are taken, or gradients sent: not those that are stepped.
        self._sources_step = options.schedule == "backward"
        self._schedule = schedule
        self._sources = sources
        self._step = step
        self._last: Plan | None = None

    def now(self) -> Plan:
        """The buckets as they are; of one that is detached, as they were."""
        if self._last is not None:
            return self._last
        buckets = [bucket for source in self._sources for bucket in source.buckets if self._sources_step]
        return Plan(self._schedule.planned(buckets), self.said())

    def keep(self) -> None:
        """The model is gone, or detached."""
        self._last = self.now()

    def said(self) -> tuple[str, ...]:
        """What keeps foreign optimizers from being stepped in backward, or how many steps are still compared."""
        judge = self._step.judge
        return () if judge is None else tuple(filter(None, [str(judge)]))

    def buckets(self) -> Iterator[Sequence[int]]:
        """Those of the sources, by the indices of their parameters."""
        for source in self._sources:
            for bucket in source.buckets:
                yield [spec.index for spec in bucket.parameters]


@dataclass(frozen=True)
class Parts:
    """The parts of an attachment, made of what is attached and of the options.

    Attributes:
        zero: with ``shard_state``: the shards of the state.
        draws: with ``random="keyed"``: what updates draw from.
        sharding: of a model that FSDP has divided into groups.
        handles: what was put on the model and the optimizers; empty before it is connected, and once it is detached.
    """

    refs: WeakRefs
    schedule: Schedule
    sources: list[Source]
    step: RunningStep
    planned: Planned
    zero: "Zero | None"
    draws: KeyedDraws | None
    sharding: Sharding | None
    late: AddedParameters
    threads: Threads
    forwards: ForwardHooks | PlainHooks
    steps: StepHooks
    handles: Handles

    @property
    def accumulation(self) -> Accumulation:
        return self.step.accumulation

    @property
    def clipping(self) -> Clipping:
        return self.step.passes.clipping

    @property
    def votes(self) -> StepVotes:
        return self.step.ledger.votes

    def abandon(self) -> None:
        """Model and optimizers are gone: whoever keeps this keeps nothing of them."""
        self.planned.keep()
        for attached in self.schedule.parameters:
            attached.let_go()
        self.sources.clear()


def build(target: Target, options: Options) -> Parts:
    """Nothing is put on the model yet."""
    refs = WeakRefs(target)
    clipping, votes = _clipping(options), StepVotes(rank)
    is_sharded = bool(target.groups)
    synced = _synced(refs.wrapped, target, in_pipeline=options.communication.pipeline is not None)
    accumulation = Accumulation(options.accumulation_steps, synced, votes, sharded=is_sharded)
    foreign = [] if options.disabled else [stepper for stepper in refs.steppers if stepper.is_foreign]
    judge = Judge(foreign, in_parts=options.schedule == "backward") if foreign else None
    ranks = ranks_of(target, options)
    votes.ranks, votes.voting = ranks, ranks if options.votes else None
    step = RunningStep(StepMembers(refs.steppers), votes, accumulation, clipping, judge, options.nonfinite)
    deferring = partial(deferring_of, options, refs, ranks, step.times)
    chosen = choose(options, step, deferring)
    schedule = chosen.schedule
    zero = _zero(target.ddps[0], step) if options.communication.shard_state and not options.disabled else None
    draws: KeyedDraws | None = None
    if options.randomness.seed is not None and not options.disabled:
        draws = KeyedDraws(options.randomness.seed, partial(getattr, step.ledger, "step_count"))
        for stepper in refs.steppers:
            stepper.draws = draws
    parameters = ParametersOfModel(target, refs, zero, None if draws is None else draws.name, chosen.error_for_use)
    schedule.parameters = parameters.gather(target.optimizers, target.names)

    uses = ForwardCounts()
    sources = make_sources(target, options, chosen, accumulation, zero, uses)
    if target.wrapped or target.fsdp2:
        in_ddp = bool(target.ddps)
        schedule.divides(in_views_of_ddp if in_ddp else in_views_of_replicate)
    if target.groups and not target.fsdp1:
        schedule.read_by(partial(_reading_streams, refs.model))

    handles: Handles = []
    threads = Threads(refs.name, schedule)
    sharding = Sharding(target, schedule, uses) if is_sharded else None
    stepping = SteppingItself(target.optimizers, schedule, sources) if options.steps_itself else None
    backwards = BackwardHooks(schedule, sources, accumulation, threads, sharding, stepping, handles)
    readers = chosen.readers(backwards)
    if chosen.sink is not None:
        stepping_ask = [] if stepping is None else [weakref.WeakMethod(stepping.ask)]
        at_open = [readers.while_open.start, *(source.begin_step for source in sources)]
        chosen.sink.at_open = [*stepping_ask, *map(weakref.WeakMethod, at_open)]
    late = AddedParameters(refs, schedule, sources, parameters, readers, handles)
    forwards: ForwardHooks | PlainHooks
    if options.disabled:
        forwards = PlainHooks(step, schedule, handles, is_sharded=is_sharded)
    else:
        forwards = ForwardHooks(refs, step, schedule, sources, threads, late, backwards, is_sharded=is_sharded)
        # Nobody else needs to know of forwards, and of the backwards that begin at their outputs.
        schedule.may_rest = not (sources or is_sharded or options.steps_itself)
    for source in sources:
        if isinstance(source, PipelineSource):
            source.begin_run, source.end_run = weakly(forwards.begin_run), weakly(forwards.end_run)
    planned = Planned(options, schedule, sources, step)
    step.buckets = weakly(planned.buckets)
    return Parts(
        refs,
        schedule,
        sources,
        step,
        planned,
        zero,
        draws,
        sharding,
        late,
        threads,
        forwards,
        StepHooks(step, schedule, late, zero, forwards, handles),
        handles,
    )


def _clipping(options: Options) -> Clipping:
    clipping = Clipping(options.clip)
    if (pipeline := options.communication.pipeline) is not None:
        clipping.over_stages = partial(norm_over_stages, group=pipeline.group or world())
    return clipping


def _synced(
    wrapped: "Sequence[weakref.ref[Wrapped]]", target: Target, *, in_pipeline: bool
) -> Callable[[], Sequence[Syncing]]:
    """What says whether the next backward reduces gradients: the living wrappers, and FSDP."""
    sharded: list[Syncing] = []
    if target.groups and not in_pipeline:  # whose stages say it to FSDP, each by itself
        sharded.append(FSDP1Sync(target.model) if target.fsdp1 else FSDP2Sync(target.model))
    if not wrapped and not sharded:
        return tuple
    return lambda: [*(one for ref in wrapped if (one := ref()) is not None), *sharded]


def _zero(ddp: DistributedDataParallel, step: RunningStep) -> "Zero":
    from instep.sources.zero.source import Zero  # imports DTensor, which takes a while

    zero = Zero(ddp, step.ledger.votes)
    step.gather = zero.shards.gather
    return zero


def _reading_streams(model: Callable[[], nn.Module | None]) -> list[torch.Stream]:
    found = model()
    return [] if found is None else list(fsdp2_reading_streams(found))


def connect(parts: Parts, target: Target, options: Options) -> None:
    """Put everything on the model and the optimizers. Whoever is stopped in the middle takes off what is in
    ``parts.handles``: that is all of it."""
    if options.disabled:
        _connect_plainly(parts, target, options)
        return
    model, handles = target.model, parts.handles
    if isinstance(parts.schedule, BackwardSchedule):
        handles.append(RunErrors(parts.schedule))
    for source in parts.sources:
        source.connect()
    sharding = parts.sharding
    # Before FSDP2's, which gathers the weights.
    _watch_forwards(parts, target, prepend=sharding is not None)
    if options.schedule == "forward":
        _watch_wrapped(parts, target)
    parts.late.watch(model, parts.schedule.parameters)
    if sharding is not None:
        sharding.connect(parts.late.readers, handles)
    _watch_steps(parts, target)
    if parts.zero is not None:
        for optimizer in target.optimizers:
            handles.extend(parts.zero.connect(optimizer, partial(getattr, parts.schedule, "parameters")))
    _watch_saving(parts, target, options)
    _count_in_no_sync(parts, target, options)
    if options.communication.mixed_precision is not None:
        handles.append(LowPrecision(model, options.communication.mixed_precision))
    handles.append(Owners(target.optimizers, weakly(parts.schedule.abandon)))
    handles.append(Owners([*target.called, *target.optimizers], weakly(parts.abandon)))
    handles.append(PlainPickles(model.modules()))
    _meet_ranks(parts, target, options)


def _connect_plainly(parts: Parts, target: Target, options: Options) -> None:
    for source in parts.sources:  # of a pipeline, whose micro-batches count as one
        source.connect()
    _watch_forwards(parts, target, prepend=parts.sharding is not None)  # as others do: what a rank says comes first
    _watch_steps(parts, target)
    parts.handles.append(PlainPickles(target.model.modules()))
    _count_in_no_sync(parts, target, options)
    _meet_ranks(parts, target, options)


def _meet_ranks(parts: Parts, target: Target, options: Options) -> None:
    votes, ddps = parts.votes, target.ddps
    if votes.ranks is None:
        return
    if not target.groups and options.communication.pipeline is None:  # FSDP gathers the weights for autograd.grad, too
        votes.communicates = partial(communicates, weakref.ref(parts.schedule))
    votes.stand_aside = partial(stand_aside, list(map(weakref.ref, parts.sources)), list(map(weakref.ref, ddps)))
    parts.handles.extend(Joining(ddp, votes, parts.schedule) for ddp in ddps)


def _watch_forwards(parts: Parts, target: Target, *, prepend: bool) -> None:
    before, after = BoundHook(parts.forwards.before_forward), BoundHook(parts.forwards.after_forward)
    for model in target.called:
        if isinstance(model, torch.jit.ScriptModule):
            continue  # takes no hooks; it is left to torch
        parts.handles.append(model.register_forward_pre_hook(before, prepend=prepend))
        parts.handles.append(model.register_forward_hook(after))


def _watch_wrapped(parts: Parts, target: Target) -> None:
    after = BoundHook(partial(_after_wrapped, weakref.ref(parts.schedule)))
    for wrapper in target.wrapped:
        parts.handles.append(wrapper.module.register_forward_hook(after))


def _after_wrapped(schedule: "weakref.ref[Schedule]", *_: object) -> None:
    """The forward of what DDP wraps has returned: wait for the buckets that this forward did not read, as
    ``Schedule.after_forward`` does, of which nobody hears where the loop calls ``forward()`` of the wrapper."""
    if torch.compiler.is_compiling() or graph_task() is not None or not torch.is_grad_enabled():
        return
    if (found := schedule()) is not None:
        found.synchronize()


def _watch_steps(parts: Parts, target: Target) -> None:
    for optimizer, stepper in _hookable(parts, target):
        if steps_one(optimizer) is not None:
            parts.handles.append(ToldStep(optimizer))
        handle = optimizer.register_step_post_hook(UntracedHook(partial(parts.steps.after_step, stepper)))
        first_of_post_hooks(optimizer, handle)
        parts.handles.append(handle)
        compiled = Traced()
        parts.handles.append(optimizer.register_step_pre_hook(compiled))
        before_step = UntracedHook(partial(parts.steps.before_step, stepper, compiled))
        handle = optimizer.register_step_pre_hook(before_step)
        last_of_pre_hooks(optimizer, handle)
        parts.handles.append(handle)


def _hookable(parts: Parts, target: Target) -> Iterator[tuple[Optimizer, Stepper]]:
    """The optimizers whose calls torch tells of. Of another one's steps nothing is put off, and nothing counted."""
    for optimizer, stepper in zip(target.optimizers, parts.refs.steppers, strict=True):
        if takes_hooks(optimizer):
            yield optimizer, stepper


def _watch_saving(parts: Parts, target: Target, options: Options) -> None:
    for optimizer, stepper in _hookable(parts, target):
        if not options.steps_itself:
            before_save = UntracedHook(partial(parts.steps.before_state, stepper, True))
            before_load = UntracedHook(partial(parts.steps.before_state, stepper, False))
            parts.handles.append(optimizer.register_state_dict_pre_hook(before_save))
            parts.handles.append(optimizer.register_load_state_dict_pre_hook(before_load))
    if options.offload is not None:
        offload(parts.schedule, target.optimizers, parts.refs.steppers, options.bucket_bytes, parts.handles)
    wrapped: set[nn.Module] = {one.module for one in target.wrapped}
    for saved in {*target.called, *wrapped}:
        parts.handles.append(saved.register_state_dict_pre_hook(BoundHook(parts.steps.before_model_state)))
        parts.handles.append(saved.register_load_state_dict_pre_hook(BoundHook(parts.steps.before_load)))


def _count_in_no_sync(parts: Parts, target: Target, options: Options) -> None:
    if options.accumulation_steps > 1 and target.wrapped:
        # DDP's own hook is not called in no_sync.
        for parameter in living_parameters(parts.schedule):
            if parameter.requires_grad:
                count = UntracedHook(partial(_count, weakref.ref(parts.accumulation)))
                parts.handles.append(parameter.register_post_accumulate_grad_hook(count))


def _count(accumulation: "weakref.ref[Accumulation]", parameter: object) -> None:
    if (found := accumulation()) is not None:
        found.count()
