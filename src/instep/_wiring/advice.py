"""What keeps steps from being put off, or from running beside backward, and what the running loop could gain."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep._gradients.clipping import ClipNorm
from instep._optim.kinds import ONLY_DEFER, can_be_put_off, class_of_update, is_torchs_own, runs_beside
from instep._optim.values import held_in
from instep._step.deferral import BESIDE_BACKWARD, DeferralTrial, Deferring, Gains, OtherRanks
from instep._step.schedule import Schedule
from instep._step.state import StepTimes
from instep._step.step import RunningStep
from instep._torch.watch import plain_type
from instep._wiring.ranks import in_join
from instep._wiring.weak_refs import WeakRefs
from instep.buckets import MIB, bucket_bytes_for
from instep.errors import StaleAttachmentError, class_name
from instep.options import Options
from instep.sources import Source
from instep.sources.ddp.instance import exposed_communication
from instep.sources.local import LocalSource
from instep.sources.replicate.source import Replicated


def deferring_of(options: Options, refs: WeakRefs, others: OtherRanks | None, times: StepTimes) -> Deferring:
    """Decides of each step whether it is put off; with ``schedule="backward"``, whether its updates run beside it.

    Args:
        others: the other ranks; ``None``: there are none.
    """
    # An accelerator's updates are not over when the host's clock has seen them begin.
    seen = times if all(_devices_of(optimizer) <= {"cpu"} for optimizer in refs.optimizers()) else None
    if options.schedule == "backward":  # no rank need know what the others have found
        if isinstance(options.defer, bool):
            return Deferring(f"defer={options.defer}", asked=options.defer)
        return DeferralTrial(partial(_prevented_beside_backward, refs), wording=BESIDE_BACKWARD, times=seen)
    # Of these ``step()`` is called as it is, though ``defer=True`` was given: what it raises, logs or counts is there
    # when it has returned, as the loop expects it.
    whole = options.defer is True and not options.puts_off_unasked and options.random is None
    own = [optimizer for optimizer in refs.optimizers() if whole and not is_torchs_own(optimizer)]
    if own and len(own) == len(refs.optimizers()):
        return Deferring(f"{class_name(own[0])}.step() is of a class of your own: it runs where the loop calls it")
    if options.always_puts_off:
        alone = options.defer is True and not options.puts_off_unasked  # nothing else has every step put off
        return Deferring("defer=True", asked=True, otherwise=ONLY_DEFER if alone else None)
    if options.defer is False:
        return Deferring("defer=False")
    return DeferralTrial(partial(_prevented, refs), others, times=seen)


def _prevented(refs: WeakRefs) -> str | None:
    """Why putting a step off cannot be faster here; ``None``: it can."""
    reasons = (reason(refs) for reason in (_joins, _unknown, _unfused, _one_core))
    at_once = "its forward reads all weights at once, as soon as it begins"
    return next(filter(None, reasons), None) or _compiled(refs, at_once)


def _prevented_beside_backward(refs: WeakRefs) -> str | None:
    """Why updates beside backward cannot be faster here; ``None``: they can."""
    reasons = (reason(refs) for reason in (_nothing_beside, _reduced_by_torch, _one_core))
    at_once = "it hands gradients over as they are computed, or gives all where its backward ends"
    return next(filter(None, reasons), None) or _compiled(refs, at_once)


def said_of_whole(refs: WeakRefs, sources: Iterable[Source], step: RunningStep) -> str | None:
    """What keeps gradients of compiled code from being freed before its backward ends."""
    local = next((source for source in sources if isinstance(source, LocalSource)), None)
    called = refs.called()
    if local is None or not called or not step.ledger.step_count:
        return None
    return local.kept_because(is_whole=all(map(_is_compiled, called)))


def _nothing_beside(refs: WeakRefs) -> str | None:
    if any(_is_on_cpu(optimizer) and runs_beside(optimizer) for optimizer in refs.optimizers()):
        return None
    return "only fused kernels on a CPU, and Muon there, run on a thread beside backward"


def _reduced_by_torch(refs: WeakRefs) -> str | None:
    wrappers = [type(wrapper).__name__ for wrapper in refs.living_wrappers() if not isinstance(wrapper, Replicated)]
    return f"{wrappers[0]} has gradients of many buckets arrive together" if wrappers else None


def _joins(refs: WeakRefs) -> str | None:
    if any(map(in_join, refs.ddps())):
        return "the loop is in DDP's join(), in which ranks that have no data left cannot be asked"
    return None


def _unknown(refs: WeakRefs) -> str | None:
    by_parameter = any(stepper.steps_every_parameter for stepper in refs.steppers)
    for optimizer in refs.optimizers():
        if not can_be_put_off(optimizer):
            kind, how = type(optimizer).__name__, "by parameter" if by_parameter else "as a whole"
            return f"{kind} is stepped {how}, and only torch's own updates of a bucket are put off unasked"
    return None


def _unfused(refs: WeakRefs) -> str | None:
    """Of several optimizers one is enough: the steps of the others are taken at once."""
    optimizers = refs.optimizers()
    if not optimizers or any(not _is_on_cpu(optimizer) or runs_beside(optimizer) for optimizer in optimizers):
        return None
    names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    return f"on a CPU only fused kernels and Muon run beside the loop, and {names} has fused=False"


def _one_core(refs: WeakRefs) -> str | None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2 and any(map(_is_on_cpu, refs.optimizers())):
        return "there is one CPU core, which the step and the loop would share"
    return None


def _compiled(refs: WeakRefs, why: str) -> str | None:
    called = refs.called()
    if not called:
        return "the model is gone"
    return f"the whole model is compiled: {why}" if all(map(_is_compiled, called)) else None


def _is_compiled(model: nn.Module) -> bool:
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    return compiled or isinstance(getattr(model, "_orig_mod", None), nn.Module)


def _is_on_cpu(optimizer: Optimizer) -> bool:
    return "cpu" in _devices_of(optimizer)


def _devices_of(optimizer: Optimizer) -> set[str]:
    return {p.device.type for group in optimizer.param_groups for p in group["params"]}


WORTH = 0.1
"""Of an iteration. A smaller part is lost again in the order of communication, and in the bookkeeping of that."""
ENOUGH = 4
"""Steps, of which each shows the same."""


def advice(
    schedule: Schedule,
    step: RunningStep,
    options: Options,
    ddps: Sequence[DistributedDataParallel],
    whole: str | None,
    *,
    divided: bool,
) -> str:
    """What the running loop could gain, in sentences, one a line; empty where there is nothing to say.

    Args:
        whole: ``said_of_whole``.
        divided: whether several ranks have gradients in common: then not all of them can be freed early.
    """
    lines = [] if schedule.deferral is None else [f"Steps are {schedule.deferral}."]
    lines += [] if whole is None else [f"{whole[0].upper()}{whole[1:]}."]
    gains = schedule.gains
    if gains is not None:
        lines += _communication(gains, ddps)
        lines += [] if divided else _memory(gains, schedule, options)
    if options.schedule == "backward" and schedule.step_count >= ENOUGH:
        lines += _in_vain(step)
        lines += [] if divided else _not_freed(step, options)
        lines += [] if divided or options.undo else _kept_between(schedule, step)
        lines += _cheaper_clipping(schedule, options, divided=divided)
    return "\n".join((*lines, *_rounded_away(schedule)))


def _rounded_away(schedule: Schedule) -> Iterator[str]:
    """Weights in bfloat16 that an update of torch's own rounds to nearest. Others may have a way of their own."""
    for attached in schedule.parameters:
        with suppress(StaleAttachmentError):
            optimizer = attached.stepper.optimizer()
            bare = is_torchs_own(optimizer) and class_of_update(optimizer) is plain_type(optimizer)
            if bare and attached.spec.dtype == torch.bfloat16:
                yield (
                    f"{class_name(optimizer)} steps bfloat16 weights without fp32 masters: an update below 0.2% of a "
                    "weight is rounded away, in the plain loop, too (docs/pure-bf16.md)."
                )
                return


def _communication(gains: Gains, ddps: Sequence[DistributedDataParallel]) -> Iterator[str]:
    exposed = sum(ms for ddp in ddps if (ms := exposed_communication(ddp)) is not None)
    if exposed >= WORTH * gains.iteration:
        yield (
            f"Communication outlasts backward by {exposed:.1f} of the {gains.iteration:.1f} ms of an iteration: "
            "docs/slow-networks.md says how to send less, or less often."
        )


def _memory(gains: Gains, schedule: Schedule, options: Options) -> Iterator[str]:
    specs = [a.spec for a in schedule.parameters if (p := a.peek()) is not None and p.requires_grad]
    sizes = [spec.nbytes for spec in specs]
    total = sum(sizes)
    freed = total - max(*sizes, min(total, bucket_bytes_for(specs))) if sizes else 0
    if gains.leaves_gradients and freed > 0:
        way, clip, cost = "schedule='backward'", options.clip, ""
        if isinstance(clip, ClipNorm) and clip.mode == "exact":
            way += f" with clip=ClipNorm({clip.max_norm}, mode='two_pass')"
            cost = " It runs backward twice: overlap.backward(loss) in place of loss.backward()."
        yield (
            f"The loop leaves gradients alone between backward and optimizer.step(): {way} would free "
            f"{freed / MIB:.1f} of their {total / MIB:.1f} MiB in backward, and take {gains.step:.1f} of the "
            f"{gains.iteration:.1f} ms of an iteration there.{cost}"
        )


def _in_vain(step: RunningStep) -> Iterator[str]:
    """Most of what ``undo`` has updated in backward was put back, or would be."""
    steps, redos, clipped = step.ledger.step_count, step.ledger.redo_count, step.passes.clipping.clipped_count
    if 2 * clipped >= steps:
        yield (
            f"{clipped} of {steps} steps were clipped: what backward had updated was put back, and in the step after "
            "one that was clipped backward updates nothing."
        )
    elif 2 * redos >= steps:
        yield (
            f"{redos} of {steps} steps were taken twice: in backward, and again, put back, in optimizer.step(). The "
            "loop changes gradients, weights or settings between the two. Without schedule='backward' and undo each "
            "step is taken once."
        )


def _not_freed(step: RunningStep, options: Options) -> Iterator[str]:
    if step.freed_bytes:
        return
    yield (
        "No gradient was freed in backward: undo keeps them until optimizer.step()."
        if options.undo
        else f"No gradient was freed in backward in {step.ledger.step_count} steps: all were left to optimizer.step()."
    )


def _kept_between(schedule: Schedule, step: RunningStep) -> Iterator[str]:
    """Micro-batches are added up."""
    if step.ledger.has_added:
        size = sum(attached.spec.nbytes for attached in schedule.parameters) / MIB
        yield (
            f"All gradients ({size:.1f} MiB) are kept from the first micro-batch of a step to the last: "
            "overlap.micro_batches(loss_of, batches) frees them in backward, and keeps the activations of all "
            "micro-batches."
        )


def _cheaper_clipping(schedule: Schedule, options: Options, *, divided: bool) -> Iterator[str]:
    """Other ways to the same numbers as ``clip=`` with ``undo``."""
    clip = options.clip
    if not (options.undo and isinstance(clip, ClipNorm) and clip.mode == "exact"):
        return
    yield (
        f"clip=ClipNorm({clip.max_norm}) without schedule='backward' and undo gives the same numbers, and needs no "
        f"copies of parameters and state ({_copied(schedule) / MIB:.1f} MiB in every step)."
    )
    if not divided:
        yield (
            f"clip=ClipNorm({clip.max_norm}, mode='two_pass') in place of undo gives them too, and frees gradients in "
            "backward, for a second backward (overlap.backward(loss))."
        )


def _copied(schedule: Schedule) -> int:
    """The bytes of parameters and their state, which ``undo`` copies in every step, as far as they are still there."""
    size = 0
    with suppress(StaleAttachmentError):
        for attached in schedule.parameters:
            if (parameter := attached.peek()) is not None:
                state = attached.stepper.optimizer().state.get(parameter, {})
                size += sum(tensor.nbytes for tensor in (parameter, *held_in([state], torch.Tensor)))
    return size
