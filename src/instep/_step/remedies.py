"""How messages end: what works in place of what was refused, and what a use of a spent gradient means."""

from instep._torch.engine import graph_task
from instep._torch.hooks import user_call
from instep._torch.pipelining import is_used
from instep._torch.placeholders import ACCUMULATE
from instep.errors import AccumulationError, InstepError, SpentGradientError

KEEP = "`with overlap.keep_gradients():`"
_AS_IT_IS = "attach with schedule='forward', or add undo=True (docs/errors.md)"

LEAVE_IT = f"put {KEEP} around that backward, or {_AS_IT_IS}"
ANY_LOOP = f"Or {LEAVE_IT}"
"""Ways that work whatever the loop has done with the gradients or weights of one backward."""

KEEP_ALL = f"Or put {KEEP} around all its backwards, or {_AS_IT_IS}"
"""The same, for a step of several backwards."""

WRITE_LATER = f"Or put {KEEP} around that backward, or attach with schedule='forward'"
"""For writes of which nobody is told, and which ``undo`` does not know of in time."""


_IN_OWN_HOOK = "Read each gradient in a hook on its own parameter, registered before attach"


def several_backwards() -> str:
    """For a step of several backwards."""
    in_loop = (
        "Wrap all but the last micro-batch in `with overlap.accumulate():` (DDP: no_sync()), or call "
        "overlap.micro_batches(), which frees gradients"
    )
    if not is_used():
        return in_loop
    return f"{in_loop}, or attach(…, pipeline=schedule)"


def several_losses(optimizers: int) -> str:
    """For losses that have a step each."""
    if optimizers == 1:
        return "A loss that only passes through this model: docs/loops.md#actors-and-critics"
    return f"Losses of {optimizers} optimizers (a GAN): freeze the others' parameters"


# Errors for uses of a gradient that backward has applied and freed.


def while_measuring(name: str, operation: str) -> InstepError:
    """In the first of two passes."""
    if operation in ACCUMULATE:
        return AccumulationError(
            f"the gradient of {name!r} arrived twice in one backward, which ClipNorm(mode='two_pass') "
            "cannot measure. A parameter that reentrant checkpointing visits twice needs use_reentrant=False. "
            f"{ANY_LOOP}"
        )
    return SpentGradientError(
        f"{user_call(operation)} was called, in a hook during backward, on the gradient of {name!r}, which the first "
        f"of two passes has measured and freed. {_IN_OWN_HOOK}. {ANY_LOOP}"
    )


def while_waiting(name: str, operation: str) -> InstepError:
    """In a step whose micro-batches wait for the backward of the last."""
    return AccumulationError(
        f"{user_call(operation)} met the gradient of {name!r}, which is not there yet: the backward of the step's "
        "micro-batches runs with that of the last one. Look at gradients after that, or leave out "
        "overlap.backward(more=True)"
    )


def after_update(name: str, operation: str, *, clips: bool) -> tuple[InstepError, bool]:
    """In the step that has applied it: the error, and whether weights are known to be wrong by now."""
    if graph_task() is not None and operation in ACCUMULATE:
        return AccumulationError(
            f"the gradient of {name!r} arrived again before optimizer.step(), which has already applied it. "
            f"{several_backwards()}; of several losses call backward() once for their sum; checkpoint with "
            f"use_reentrant=False. {KEEP_ALL}"
        ), True
    call = user_call(operation)
    if "unscale" in operation:
        return SpentGradientError(
            f"{call} found the gradient of {name!r} already applied, still scaled: this step's "
            "weights are wrong. Attach with schedule='forward', which needs no scaler argument; or add scaler=scaler, "
            "undo=True, which copies weights and state; or train in bfloat16 without a scaler; or put "
            f"{KEEP} around every scaled backward"
        ), True
    if graph_task() is not None:
        return SpentGradientError(
            f"{call} was called, in a hook during backward, on the gradient of {name!r}, which this "
            f"backward has already applied and freed. {_IN_OWN_HOOK}. {ANY_LOOP}"
        ), False
    instead = _in_place_of(call, clips=clips)
    return SpentGradientError(
        f"{call} was called on the gradient of {name!r}, which was applied during backward and "
        "freed: between backward() and optimizer.step() there is nothing left to read, clip or change. "
        f"{f'{instead}{ANY_LOOP}' if instead else LEAVE_IT[0].upper() + LEAVE_IT[1:]}"
    ), False


def _in_place_of(call: str, *, clips: bool) -> str:
    """What to do in place of some calls."""
    if call.startswith("clip_grad"):
        if clips:
            return "It was clipped as clip= says: remove the loop's own clipping. "
        if "value" in call:
            return "Remove the loop's own clipping, and attach with clip=instep.ClipValue(…). "
        return (
            "Remove the loop's own clipping, and attach with clip=instep.ClipNorm(…, mode='two_pass'), with "
            "overlap.backward(loss) for loss.backward(). "
        )
    if "norm" in call:
        return (
            "For a log of the norm attach with clip=instep.ClipNorm(float('inf')), which clips nothing, and read "
            "overlap.grad_norm. "
        )
    if call.endswith(".zero_grad()"):
        return "Call zero_grad() after optimizer.step(), or before backward(). "
    if call.endswith(".step()"):
        return "This optimizer is not the attached one: attach the optimizer whose step() the loop calls. "
    return ""


def never_cleared(name: str, operation: str) -> SpentGradientError:
    """In the step after that."""
    call = user_call(operation)
    other = (
        " step() was called twice, a later backward added to it, or this optimizer is not attached."
        if call.endswith(".step()")
        else ""
    )
    return SpentGradientError(
        f"{call} met the gradient of {name!r} from a step that is over: it was applied, and freed."
        f"{other} Call zero_grad() between optimizer.step() and the next backward(). If something else needs it, "
        f"{LEAVE_IT}"
    )
