"""Errors for uses of a gradient that backward has applied and freed."""

from instep._autograd.engine import graph_task
from instep._autograd.placeholders import ACCUMULATE
from instep.errors import AccumulationError, InstepError, SpentGradientError


def while_measuring(name: str, operation: str) -> InstepError:
    """In the first of two passes."""
    if operation in ACCUMULATE:
        return AccumulationError(
            f"the gradient of {name!r} arrived twice in one backward, which ClipNorm(mode='two_pass') "
            "cannot measure. A parameter that reentrant checkpointing visits twice needs use_reentrant=False"
        )
    return SpentGradientError(
        f"{operation} was called, in a hook during backward, on the gradient of {name!r}, which the first "
        "of two passes has already measured and freed. Read each gradient in a hook on its own parameter that "
        "is registered before attach, or use undo=True or schedule='forward'"
    )


def after_update(name: str, operation: str) -> tuple[InstepError, bool]:
    """In the step that has applied it: the error, and whether weights are known to be wrong by now."""
    if graph_task() is not None and operation in ACCUMULATE:
        return AccumulationError(
            f"the gradient of {name!r} arrived again before optimizer.step(), but this step has already "
            "applied it. Wrap all but the last micro-batch in `with overlap.accumulate():` (DDP: no_sync(); "
            "losses that share a graph: add them and call backward() once). A parameter that reentrant "
            "checkpointing visits twice needs use_reentrant=False"
        ), True
    if "unscale" in operation:
        return SpentGradientError(
            f"GradScaler found the gradient of {name!r} already applied, still scaled: this step's "
            "weights are wrong. Give the scaler to attach(…, scaler=scaler, undo=True), use schedule='forward', or "
            "train in bfloat16 without a scaler"
        ), True
    if graph_task() is not None:
        return SpentGradientError(
            f"{operation} was called, in a hook during backward, on the gradient of {name!r}, which this "
            "backward has already applied and freed. Read each gradient in a hook on its own parameter that is "
            "registered before attach, or use undo=True or schedule='forward'"
        ), False
    return SpentGradientError(
        f"{operation} was called on the gradient of {name!r}, which was applied during backward and "
        "freed. Between backward() and optimizer.step() there is nothing left to read, clip or change: "
        "use attach(…, clip=…), schedule='forward' or undo=True, or move the operation into a gradient hook"
    ), False


def never_cleared(name: str, operation: str) -> SpentGradientError:
    """In the step after that."""
    return SpentGradientError(
        f"{operation} met the gradient of {name!r} from a step that is over: it was applied during backward and freed, "
        "so it can neither be added to nor zeroed in place nor read. Call zero_grad() with set_to_none=True, the "
        "default, between optimizer.step() and the next backward(). Where something else needs the gradient (another "
        "optimizer of that parameter, a log), use undo=True or schedule='forward'"
    )
