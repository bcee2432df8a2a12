"""Whether the steps of ``schedule="forward"`` are put off, and what keeps them from gaining by that."""

import os
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from instep._optim.kinds import steps_as_tested
from instep._optim.probe import not_asked
from instep._step.deferring import Always, Deferring, Never, Others, Trial
from instep._wiring.held import Held
from instep._wiring.joining import in_join
from instep.options import Options


def deferring_of(options: Options, held: Held, others: Others | None) -> Deferring:
    """Decides of each step.

    Args:
        others: the other ranks; ``None``: there are none.
    """
    own = [optimizer for optimizer in held.optimizers() if steps_inside_step(optimizer, options)]
    if own and len(own) == len(held.optimizers()):
        return Never(f"{type(own[0]).__name__}.step() is of a class of your own: it runs where the loop calls it")
    if options.always_puts_off:
        return Always(alone=options.defer is True and not options.puts_off_unasked)
    if options.defer is False:
        return Never()
    return Trial(partial(_prevented, held), others)


def steps_inside_step(optimizer: Optimizer, options: Options) -> bool:
    """Whether ``step()`` of this optimizer is called as it is, though ``defer=True`` was given. What it raises, logs or
    counts is there when it has returned, as the loop expects it."""
    splits = options.puts_off_unasked or options.randomness.random is not None
    return options.defer is True and not splits and not steps_as_tested(optimizer)


def _prevented(held: Held) -> str | None:
    """Why putting a step off cannot be faster here; ``None``: it can."""
    reasons: Sequence[Callable[[Held], str | None]] = (_joins, _unknown, _unfused, _one_core, _compiled)
    return next((found for reason in reasons if (found := reason(held)) is not None), None)


def _joins(held: Held) -> str | None:
    ddps = (one for one in held.living_wrappers() if isinstance(one, nn.parallel.DistributedDataParallel))
    if any(map(in_join, ddps)):
        return "the loop is in DDP's join(), in which ranks that have no data left cannot be asked"
    return None


def _unknown(held: Held) -> str | None:
    keyed = any(stepper.draws is not None for stepper in held.steppers)
    for optimizer in held.optimizers():
        if not not_asked(optimizer).contained:
            kind, how = type(optimizer).__name__, "by parameter" if keyed else "as a whole"
            return f"{kind} is stepped {how}, and only torch's own updates of a bucket are put off unasked"
    return None


def _unfused(held: Held) -> str | None:
    for optimizer in held.optimizers():
        if _is_on_cpu(optimizer) and not all(group.get("fused") for group in optimizer.param_groups):
            return f"on a CPU only fused kernels run beside the loop, and {type(optimizer).__name__} has fused=False"
    return None


def _one_core(held: Held) -> str | None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2 and any(map(_is_on_cpu, held.optimizers())):
        return "there is one CPU core, which the step and the loop would share"
    return None


def _compiled(held: Held) -> str | None:
    called = held.called()
    if not called:
        return "the model is gone"
    if all(map(_is_compiled, called)):
        return "the whole model is compiled: its forward reads all weights at once, as soon as it begins"
    return None


def _is_compiled(model: nn.Module) -> bool:
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    return compiled or isinstance(getattr(model, "_orig_mod", None), nn.Module)


def _is_on_cpu(optimizer: Optimizer) -> bool:
    return any(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
