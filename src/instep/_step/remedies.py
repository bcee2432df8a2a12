"""How messages end: what works in place of what was refused, and what a use of a spent gradient means."""

from instep._torch.engine import graph_task
from instep._torch.hooks import user_call
from instep._torch.pipelining import is_used
from instep._torch.placeholders import ACCUMULATE
from instep.errors import AccumulationError, InstepError, SpentGradientError

KEEP = "`with overlap.keep_gradients():`"
_AS_IT_IS = "attach with schedule='forward', which takes the loop as it is; so does undo=True, with copies"

LEAVE_IT = f"put {KEEP} around that backward, which leaves its step to optimizer.step(). Or {_AS_IT_IS}"
ANY_LOOP = f"Or {LEAVE_IT}"
"""Ways that work whatever the loop has done with the gradients or weights of one backward."""

KEEP_ALL = f"Or put {KEEP} around all backwards of the step, which leaves them to optimizer.step(). Or {_AS_IT_IS}"
"""The same, for a step of several backwards."""

WRITE_LATER = f"Or put {KEEP} around that backward, or attach with schedule='forward': nothing is written before step()"
"""For writes of which nobody is told, and which ``undo`` does not know of in time."""


def several_backwards() -> str:
    """For a step of several backwards."""
    in_loop = "Wrap all but the last micro-batch in `with overlap.accumulate():` (DDP: no_sync())"
    if not is_used():
        return in_loop
    return f"{in_loop}, or give the schedule of torch.distributed.pipelining that runs them to attach(…, pipeline=…)"


def several_losses(optimizers: int) -> str:
    """For losses that have a step each."""
    if optimizers == 1:
        return (
            "For a loss that only passes through this model, as an actor's through its critic: "
            "model.requires_grad_(False) around it; or, if the model's own loss comes first, zero_grad() before its "
            "backward() and not after step()"
        )
    return (
        f"Where each of the {optimizers} optimizers has a loss, as in a GAN: freeze the others' parameters around its "
        "forward (requires_grad_(False); in Lightning toggle_optimizer()), and call its step() behind its backward(), "
        "before the next loss's forward"
    )


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
        "of two passes has already measured and freed. Read each gradient in a hook on its own parameter that "
        f"is registered before attach. {ANY_LOOP}"
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
            f"the gradient of {name!r} arrived again before optimizer.step(), but this step has already "
            f"applied it. {several_backwards()}. Losses that share a graph: add them and call backward() once. A "
            f"parameter that reentrant checkpointing visits twice needs use_reentrant=False. {KEEP_ALL}"
        ), True
    call = user_call(operation)
    if "unscale" in operation:
        return SpentGradientError(
            f"{call} found the gradient of {name!r} already applied, still scaled: this step's "
            "weights are wrong. Give the scaler to attach(…, scaler=scaler, undo=True), or attach with "
            "schedule='forward', which needs no scaler; or train in bfloat16 without a scaler; or put "
            f"{KEEP} around every scaled backward"
        ), True
    if graph_task() is not None:
        return SpentGradientError(
            f"{call} was called, in a hook during backward, on the gradient of {name!r}, which this "
            "backward has already applied and freed. Read each gradient in a hook on its own parameter that is "
            f"registered before attach. {ANY_LOOP}"
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
            "Remove the loop's own clipping, and attach with clip=instep.ClipNorm(…, mode='two_pass'), with which "
            "overlap.backward(loss) takes the place of loss.backward(). "
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
        " The gradient of a later backward was added to it; or step() was called once more without a backward, or by "
        "an optimizer that is not attached."
        if call.endswith(".step()")
        else ""
    )
    return SpentGradientError(
        f"{call} met the gradient of {name!r} from a step that is over: it was applied during backward "
        f"and freed, so it can neither be read nor stepped.{other} Call zero_grad() between optimizer.step() and "
        "the next backward(). Where something else needs "
        f"the gradient (another optimizer of that parameter, a log), {LEAVE_IT}"
    )
