"""``undo``, and the ``scaler`` that needs it."""

from torch.amp import GradScaler

from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


def no_scaler(target: Target, options: Options) -> None:
    scaler = options.scaler
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise AttachError(f"scaler must be a torch.amp.GradScaler or None, not {type(scaler).__name__}")


def unknown(target: Target, options: Options) -> None:
    undo = options.undo
    if undo is not True and undo is not False and undo != "host":
        raise AttachError(f"undo must be True, False or 'host', not {undo!r}")


def nothing_to_undo(target: Target, options: Options) -> None:
    if options.schedule == "forward" and options.undo:
        raise AttachError(
            f"undo={options.undo!r} is for schedule='backward': with schedule='forward' nothing is written before "
            "optimizer.step(). Leave it out"
        )


def scaled_gradients(target: Target, options: Options) -> None:
    if options.schedule == "backward" and options.scaler is not None and not options.undo:
        undo = "" if options.communication.shard_state else "undo=True, with which such a step is put back, or "
        raise AttachError(
            "scaler: with schedule='backward' weights are updated before GradScaler has seen whether a gradient is "
            f"infinite. Use {undo}schedule='forward', which needs no scaler argument"
        )
