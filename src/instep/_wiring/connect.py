"""Everything that an attachment puts on the model and the optimizers. All of it is in ``Parts.handles``."""

import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from instep._autograd.engine import graph_task
from instep._autograd.hooks import BoundHook, UntracedHook, first_of_post_hooks, last_of_pre_hooks
from instep._autograd.pickles import PlainPickles
from instep._autograd.precision import LowPrecision
from instep._autograd.tracing import Traced
from instep._life.life import Owners
from instep._life.weak import weakly
from instep._optim.kinds import takes_hooks
from instep._optim.parameters import AttachedParameter
from instep._optim.patched import ToldStep, steps_one
from instep._optim.stepper import Stepper
from instep._step.accumulation import Accumulation
from instep._step.schedule import Schedule
from instep._wiring.build import Parts
from instep._wiring.held import living_parameters
from instep._wiring.joining import Joining
from instep._wiring.offloading import offload
from instep._wiring.ranks import communicates, stand_aside
from instep.options import Options
from instep.target import Target


def connect(parts: Parts, target: Target, options: Options) -> None:
    """Whoever is stopped in the middle takes off what is in ``parts.handles``."""
    if options.disabled:
        _connect_plainly(parts, target, options)
        return
    model, handles = target.model, parts.handles
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
            handles.extend(parts.zero.connect(optimizer, partial(_parameters_of, parts.schedule)))
    _watch_saving(parts, target, options)
    _count_in_no_sync(parts, target, options)
    if options.communication.mixed_precision is not None:
        handles.append(LowPrecision(model, options.communication.mixed_precision))
    handles.append(Owners(target.optimizers, weakly(parts.schedule.abandon)))
    handles.append(Owners([*target.called, *target.optimizers], weakly(parts.abandon)))
    handles.append(PlainPickles(model.modules()))
    _meet_ranks(parts, target)


def _connect_plainly(parts: Parts, target: Target, options: Options) -> None:
    _watch_forwards(parts, target, prepend=parts.sharding is not None)  # as others do: what a rank says comes first
    _watch_steps(parts, target)
    parts.handles.append(PlainPickles(target.model.modules()))
    _count_in_no_sync(parts, target, options)
    _meet_ranks(parts, target)


def _meet_ranks(parts: Parts, target: Target) -> None:
    votes, ddps = parts.votes, target.ddps
    if votes.ranks is None:
        return
    if not target.groups:  # FSDP gathers the weights for autograd.grad, too
        votes.communicates = partial(communicates, weakref.ref(parts.schedule))
    votes.stand_aside = partial(stand_aside, parts.sources, [weakref.ref(ddp) for ddp in ddps])
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
    for optimizer, stepper in zip(target.optimizers, parts.held.steppers, strict=True):
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
        size = options.bytes_of_a_bucket
        offload(parts.schedule, target.optimizers, parts.held.steppers, size, parts.handles)
    wrapped: set[nn.Module] = {one.module for one in target.wrapped}
    for saved in {*target.called, *wrapped}:
        parts.handles.append(saved.register_state_dict_pre_hook(BoundHook(parts.steps.before_model_state)))
        parts.handles.append(saved.register_load_state_dict_pre_hook(BoundHook(parts.steps.before_load)))


def _parameters_of(schedule: Schedule) -> Sequence[AttachedParameter]:
    return schedule.parameters


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
