"""How an attachment is put together: its sources and schedule, its parts, and the hooks on model and optimizers."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from instep._gradients.clipping import ClipNorm, Clipping
from instep._gradients.scaling import LossScale
from instep._optim.kinds import ToldStep, steps_one, takes_hooks
from instep._optim.offload import HostLoading, HostState, OffloadedState, Part
from instep._optim.owners import IN_VIEWS_OF_DDP, IN_VIEWS_OF_REPLICATE
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
from instep._step.norms import Losses, MeasuringSink
from instep._step.plain import PlainSchedule
from instep._step.schedule import Schedule
from instep._step.state import StepMembers
from instep._step.step import RunningStep
from instep._torch.engine import RunErrors, Traced
from instep._torch.handing_over import TELLS_OF_BACKWARD
from instep._torch.hooks import BoundHook, PlainPickles, UntracedHook, first_of_post_hooks, last_of_pre_hooks
from instep._torch.lifetime import Owners, weakly
from instep._torch.mixed_precision import LowPrecision
from instep._torch.placeholders import dtype_of_gradient
from instep._wiring.advice import deferring_of, said_of_whole
from instep._wiring.hooks import (
    CheckedReaders,
    ErrorForUse,
    IterationHooks,
    ParametersOfModel,
    PlainHooks,
    Readers,
    Sharding,
    SteppingItself,
    WaitingReaders,
)
from instep._wiring.ranks import Joining, rank, ranks_of
from instep._wiring.weak_refs import Handles, WeakRefs
from instep.buckets import Plan, bucket_bytes_for
from instep.options import BY_ENVIRONMENT, Options
from instep.sources import Source
from instep.sources.ddp.source import DDPSource
from instep.sources.fsdp.fsdp1 import FSDP1Source
from instep.sources.fsdp.modules import FSDPSync, ReplicaSums, fsdp2_reading_streams
from instep.sources.fsdp.recovery import AfterErrors
from instep.sources.local import ForwardCounts, LocalSource
from instep.sources.pipeline import PipelineSource
from instep.sources.replicate.source import Replicated, ReplicatedSource
from instep.target import Target

if TYPE_CHECKING:
    from instep.sources.zero.source import Zero


class Chosen(NamedTuple):
    """A schedule, with what goes with it.

    Attributes:
        readers: what is done before a module reads its parameters.
        sink: what the sources tell; ``None``: there are none.
        tells_all: whether the sink is told of every gradient, and not only where a source communicates for itself.
        error_for_use: what the use of a gradient that was applied raises; ``None``: nothing is put in its place.
    """

    schedule: Schedule
    readers: Readers
    sink: BackwardSchedule | MeasuringSink | None = None
    tells_all: bool = False
    error_for_use: ErrorForUse | None = None


def choose(options: Options, step: RunningStep, deferring: Callable[[], Deferring]) -> Chosen:
    """The schedule that ``options`` ask for. This is the one place that asks which it is."""
    votes = step.ledger.votes
    if options.disabled:
        why = None if options.left_to_torch == BY_ENVIRONMENT else options.left_to_torch
        return Chosen(PlainSchedule(step, why, takes_any_loop=options.takes_any_loop), Readers())
    if options.schedule == "forward":
        reading = ReadOrder(options.bucket_bytes, options.most_put_off_together)
        forward = ForwardSchedule(step, reading, deferring())
        return Chosen(forward, WaitingReaders(forward), forward.measuring, isinstance(options.clip, ClipNorm))
    undo = Undo(host=options.undo == "host") if options.undo else None
    votes.asks_first = undo is not None and options.nonfinite != "allow"
    scale = None if options.scaler is None else LossScale(options.scaler)
    beside = deferring if options.may_update_beside_backward else None
    backward = BackwardSchedule(step, beside, undo, scale)
    frees = undo is None and not options.steps_itself
    readers = CheckedReaders(backward, on_trial=undo is not None)
    return Chosen(backward, readers, backward, True, backward.error_for_use if frees else None)


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
    schedule, sink, size = chosen.schedule, chosen.sink, options.bucket_bytes
    if (pipeline := options.communication.pipeline) is not None:
        # optimizer.step() takes norms itself: only with schedule="backward" anything is done with gradients.
        final = sink if isinstance(sink, BackwardSchedule) else None
        accumulation.runs_stages = False
        return [PipelineSource(schedule, final, pipeline, accumulation, size)]
    if sink is None:
        return []
    hook, dtype = options.communication.comm_hook, options.communication.reduce_dtype
    sources: list[Source] = []
    rest = list(schedule.parameters)
    for wrapper in target.wrapped:
        members = [a for a in rest if id(a.get()) in target.reduced[wrapper]]
        rest = [a for a in rest if id(a.get()) not in target.reduced[wrapper]]
        if members and zero is not None and isinstance(wrapper, DistributedDataParallel):
            from instep.sources.zero.source import ZeroSource  # with ``Zero``, which is there

            in_rows = [a for a in members if a.shard is not None]
            sources.append(ZeroSource(sink, in_rows, wrapper, zero.shards, accumulation, dtype))
        elif members and (chosen.tells_all or hook is not None or dtype is not None):
            if isinstance(wrapper, Replicated):
                sources.append(ReplicatedSource(sink, members, wrapper, dtype))
            else:
                sources.append(DDPSource(sink, members, wrapper, hook, dtype))
    # A norm is taken in backward where that waits for other ranks. On one device step() takes all of them in one call.
    are_local = not target.fsdp1 and not target.groups
    if chosen.tells_all and rest and not (isinstance(sink, MeasuringSink) and are_local):
        if target.fsdp1:
            sources.append(FSDP1Source(sink, rest, target.fsdp1))
        else:
            whole = _whole_because(options, rest, is_alone=not target.wrapped and not target.groups)
            applied = ReplicaSums(target.fsdp2).applied
            sources.append(LocalSource(sink, rest, size, uses, applied, whole=whole))
    return sources


def _whole_because(options: Options, parameters: Sequence[AttachedParameter], *, is_alone: bool) -> str | None:
    """Why code that is compiled of the whole model hands no gradient over; ``None``: it does."""
    if not is_alone:
        return "they are reduced over ranks first"
    if options.keeping:
        return f"with {', '.join(options.keeping)} they may be needed for longer than that"
    if any(attached.stepper.is_foreign for attached in parameters):
        return "only optimizers of torch.optim are known not to keep them"
    if any(dtype_of_gradient(attached.get()) is not attached.spec.dtype for attached in parameters):
        return "they are of another dtype than the weights, and are cast where it ends"
    if any(attached.spec.device.type != "cpu" for attached in parameters):
        # An update runs on a stream of its own there, and the compiler would write to what it reads.
        return "only on a CPU does compiled code hand them over"
    return None if TELLS_OF_BACKWARD else "this torch does not tell when it compiles a backward"


def _parts_of(schedule: "weakref.ref[Schedule]", stepper: "weakref.ref[Stepper]") -> Iterator[Part]:
    """The parameters that ``stepper`` steps: some may have been added since ``attach``."""
    living = schedule()
    for attached in () if living is None else living.parameters:
        if attached.stepper is stepper() and (parameter := attached.peek()) is not None:
            yield parameter, attached.shard


@dataclass(eq=False)
class Parts:
    """The parts of an attachment, made of what is attached and of the options.

    Attributes:
        zero: with ``shard_state``: the shards of the state.
        draws: with ``random="keyed"``: what updates draw from.
        sharding: of a model that FSDP has divided into groups.
        handles: what was put on the model and the optimizers; empty before it is connected, and once it is detached.
        last_plan: of one whose model is gone, or detached.
    """

    options: Options
    refs: WeakRefs
    schedule: Schedule
    sources: list[Source]
    step: RunningStep
    zero: "Zero | None"
    draws: KeyedDraws | None
    sharding: Sharding | None
    hooks: IterationHooks
    handles: Handles
    last_plan: Plan | None = None

    @property
    def accumulation(self) -> Accumulation:
        return self.step.accumulation

    @property
    def clipping(self) -> Clipping:
        return self.step.passes.clipping

    @property
    def votes(self) -> StepVotes:
        return self.step.ledger.votes

    @property
    def plan(self) -> Plan:
        """The buckets as they are; of one that is detached, as they were."""
        if self.last_plan is not None:
            return self.last_plan
        # Else the sources' buckets are those in which norms are taken, or gradients sent: not those that are stepped.
        sources = self.sources if self.options.schedule == "backward" else ()
        buckets = [bucket for source in sources for bucket in source.buckets]
        return Plan(self.schedule.planned(buckets), self.notes)

    @property
    def bucket_bytes(self) -> int:
        """The size of a bucket: as ``attach`` was told, or as it chooses."""
        return self.options.bucket_bytes or bucket_bytes_for(a.spec for a in self.schedule.parameters)

    @property
    def notes(self) -> tuple[str, ...]:
        """What keeps foreign optimizers from being stepped in backward, or how many steps are still compared; and of a
        compiled model ``whole``."""
        judge = self.step.judge
        return tuple(filter(None, ["" if judge is None else str(judge), self.whole]))

    @property
    def whole(self) -> str | None:
        """What keeps gradients of compiled code from being freed before its backward ends."""
        return said_of_whole(self.refs, self.sources, self.step) if self.options.schedule == "backward" else None

    def backward(self, loss: Losses, gradient: torch.Tensor | None = None) -> None:
        """See ``Schedule.backward``."""
        self.schedule.backward(loss, gradient, self.hooks.parameters.adopt)

    def abandon(self) -> None:
        """Model and optimizers are gone: whoever keeps this keeps nothing of them."""
        self.let_go()
        self.sources.clear()

    def let_go(self) -> None:
        """Nobody will step the parameters any more."""
        self.last_plan = self.plan
        for attached in self.schedule.parameters:
            attached.let_go()


def build(target: Target, options: Options) -> Parts:
    """Nothing is put on the model yet."""
    refs, ranks = WeakRefs(target), ranks_of(target, options)
    votes = StepVotes(rank, ranks, ranks if options.votes else None)
    zero = None
    if options.communication.shard_state and not options.disabled:
        from instep.sources.zero.source import Zero  # imports DTensor, which takes a while

        zero = Zero(target.ddps[0], votes, target.in_buckets)
    pipeline, fsdp = options.communication.pipeline, list[Syncing]()
    if target.groups and pipeline is None:  # whose stages say it to FSDP, each by itself
        fsdp.append(FSDPSync(target.model))
    # What says whether the next backward reduces gradients: the living wrappers, and FSDP.
    synced = (lambda: [*refs.living_wrappers(), *fsdp]) if refs.wrapped or fsdp else tuple
    accumulation = Accumulation(options.accumulation_steps, synced, votes, is_sharded=bool(target.groups))
    clipping = Clipping(options.clip)
    clipping.over_stages = None if pipeline is None else partial(norm_over_stages, group=pipeline.group or world())
    foreign = [] if options.disabled else [stepper for stepper in refs.steppers if stepper.is_foreign]
    judge = Judge(foreign, in_parts=options.schedule == "backward") if foreign else None
    step = RunningStep(StepMembers(refs.steppers), votes, accumulation, clipping, judge, options.nonfinite)
    step.gather = None if zero is None else zero.shards.gather
    chosen = choose(options, step, partial(deferring_of, options, refs, ranks, step.times))
    schedule = chosen.schedule
    seed = None if options.disabled else options.seed
    draws = None if seed is None else KeyedDraws(seed, partial(getattr, step.ledger, "step_count"))
    for stepper in refs.steppers:
        stepper.draws = draws
    told, readers, in_fsdp1 = None if draws is None else draws.name, chosen.readers, bool(target.fsdp1)
    uses, sources, handles = ForwardCounts(), list[Source](), Handles()
    parameters = ParametersOfModel(
        refs, schedule, target.groups, in_fsdp1, zero, told, chosen.error_for_use, readers, sources, handles
    )
    schedule.parameters = parameters.gather(target.optimizers, target.names)

    sources += make_sources(target, options, chosen, accumulation, zero, uses)
    if target.wrapped or target.fsdp2:
        schedule.divides(IN_VIEWS_OF_DDP if target.ddps else IN_VIEWS_OF_REPLICATE)
    if target.groups and not target.fsdp1:
        schedule.read_by(partial(fsdp2_reading_streams, refs.model))

    sharding = None
    if target.groups:
        sharding = Sharding(target.groups, schedule, uses, AfterErrors(target.model), in_fsdp1)
    stepping = SteppingItself(target.optimizers, schedule, sources) if options.steps_itself else None
    if chosen.sink is not None:
        stepping_ask = [] if stepping is None else [weakref.WeakMethod(stepping.ask)]
        at_open = [readers.while_open.start, *(source.begin_step for source in sources)]
        chosen.sink.at_open = [*stepping_ask, *map(weakref.WeakMethod, at_open)]
    kind = PlainHooks if options.disabled else IterationHooks
    hooks = kind(refs, step, schedule, parameters, zero, sharding, stepping, handles)
    readers.hooks = weakref.ref(hooks)
    if not options.disabled:
        # Nobody else needs to know of forwards, and of the backwards that begin at their outputs.
        schedule.may_rest = not (sources or target.groups or options.steps_itself)
    for runs in (source for source in sources if isinstance(source, PipelineSource)):
        # As a forward of the model, once for all micro-batches of a run.
        runs.begin_run = weakly(hooks.before_forward, None, ())
        runs.end_run = weakly(hooks.after_forward, None, (), ())
    step.buckets = weakly(parameters.buckets)
    step.passes.buffers = partial(_buffers_of, refs)
    return Parts(options, refs, schedule, sources, step, zero, draws, sharding, hooks, handles)


def _buffers_of(refs: WeakRefs) -> Iterable[torch.Tensor]:
    model = refs.model()
    return () if model is None else model.buffers()


def connect(parts: Parts, target: Target, options: Options) -> None:
    """Put everything on the model and the optimizers. Whoever is stopped in the middle takes off what is in
    ``parts.handles``: that is all of it."""
    for source in parts.sources:  # in front: one that refuses finds the optimizers as they were
        source.connect()
    if options.accumulation_steps > 1 and target.wrapped:
        count = UntracedHook(weakly(parts.hooks.count))  # DDP's own is not called in no_sync
        trained = (parameter for a in parts.schedule.parameters if (parameter := a.get()).requires_grad)
        parts.handles.extend(parameter.register_post_accumulate_grad_hook(count) for parameter in trained)
    _connect_optimizers(parts, target, options)
    _connect_model(parts, target, options)
    if options.offload is None or options.disabled:
        return
    state = HostState()
    for optimizer, stepper in zip(target.optimizers, parts.refs.steppers, strict=True):
        of_stepper = partial(_parts_of, weakref.ref(parts.schedule), weakref.ref(stepper))
        # What is lent together is what the gradients are that backward frees together.
        stepper.offloaded = home = OffloadedState(state, optimizer, of_stepper, parts.bucket_bytes)
        home.take_in()  # raises where an optimizer has state that cannot live in host memory
        loading = HostLoading(home)
        parts.handles.append(optimizer.register_load_state_dict_pre_hook(UntracedHook(loading.before)))
        parts.handles.append(optimizer.register_load_state_dict_post_hook(UntracedHook(loading.after)))


def _connect_optimizers(parts: Parts, target: Target, options: Options) -> None:
    schedule, hooks, handles = parts.schedule, parts.hooks, parts.handles
    for optimizer, stepper in zip(target.optimizers, parts.refs.steppers, strict=True):
        if not takes_hooks(optimizer):
            continue  # torch tells nobody of its steps: nothing is put off, and nothing counted
        if steps_one(optimizer) is not None:
            handles.append(ToldStep(optimizer))
        handle = optimizer.register_step_post_hook(UntracedHook(partial(hooks.after_step, stepper)))
        first_of_post_hooks(optimizer, handle)
        handles.append(handle)
        compiled = Traced()
        handles.append(optimizer.register_step_pre_hook(compiled))
        handle = optimizer.register_step_pre_hook(UntracedHook(partial(hooks.before_step, stepper, compiled)))
        last_of_pre_hooks(optimizer, handle)
        handles.append(handle)
        if not options.disabled and not options.steps_itself:
            before_save = UntracedHook(partial(hooks.before_state, stepper, True))
            before_load = UntracedHook(partial(hooks.before_state, stepper, False))
            handles.append(optimizer.register_state_dict_pre_hook(before_save))
            handles.append(optimizer.register_load_state_dict_pre_hook(before_load))
    if parts.zero is not None:
        for optimizer in target.optimizers:
            handles.extend(parts.zero.connect(optimizer, partial(getattr, schedule, "parameters")))


def _connect_model(parts: Parts, target: Target, options: Options) -> None:
    model, schedule, sharding = target.model, parts.schedule, parts.sharding
    hooks, handles = parts.hooks, parts.handles
    if (votes := parts.votes).ranks is not None:
        if not target.groups and options.communication.pipeline is None:  # FSDP gathers for autograd.grad, too
            votes.communicates = weakly(hooks.communicates)
        votes.stand_aside = weakly(hooks.stand_aside)
        handles.extend(Joining(ddp, votes, schedule) for ddp in target.ddps)
    handles.append(PlainPickles(model.modules()))
    before, after = BoundHook(hooks.before_forward), BoundHook(hooks.after_forward)
    # A torch.jit module takes no hooks: it is left to torch.
    for called in (called for called in target.called if not isinstance(called, torch.jit.ScriptModule)):
        # Before FSDP2's hook, which gathers the weights: what a rank says comes first, also of a disabled one.
        handles.append(called.register_forward_pre_hook(before, prepend=sharding is not None))
        handles.append(called.register_forward_hook(after))
    if options.disabled:
        return
    for wrapper in target.wrapped if options.schedule == "forward" else ():
        handles.append(wrapper.module.register_forward_hook(BoundHook(hooks.after_wrapped)))
    hooks.parameters.watch(model, schedule.parameters)
    if sharding is not None:
        sharding.connect(handles)
    for saved in {*target.called, *(wrapper.module for wrapper in target.wrapped)}:
        handles.append(saved.register_state_dict_pre_hook(BoundHook(hooks.before_model_state)))
        handles.append(saved.register_load_state_dict_pre_hook(BoundHook(hooks.before_load)))
    if options.communication.mixed_precision is not None:
        handles.append(LowPrecision(model, options.communication.mixed_precision))
    if isinstance(schedule, BackwardSchedule):
        handles.append(RunErrors(schedule))
    handles.append(Owners(target.optimizers, weakly(schedule.abandon)))
    handles.append(Owners([*target.called, *target.optimizers], weakly(parts.abandon)))
