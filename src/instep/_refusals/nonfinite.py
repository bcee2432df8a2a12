"""``nonfinite``."""

from typing import get_args

from instep._gradients.clipping import ClipNorm
from instep._gradients.scaling import Policy
from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


def unknown(target: Target, options: Options) -> None:
    if options.nonfinite not in get_args(Policy):
        raise AttachError(f"nonfinite must be one of {', '.join(get_args(Policy))}, not {options.nonfinite!r}")


def skip_while_writing(target: Target, options: Options) -> None:
    if options.nonfinite == "skip" and options.schedule == "backward" and not options.undo:
        undo = "" if options.communication.shard_state else ", or undo=True, with which such a step is put back"
        raise AttachError(
            "nonfinite='skip' needs every gradient before the first update, and schedule='backward' updates during "
            f"backward. Use schedule='forward'{undo}; or nonfinite='raise'"
        )


def skip_what_raises(target: Target, options: Options) -> None:
    clip = options.clip
    if options.nonfinite == "skip" and isinstance(clip, ClipNorm) and clip.error_if_nonfinite:
        raise AttachError(
            "nonfinite='skip' leaves out the steps for which ClipNorm(error_if_nonfinite=True) raises. Leave one out"
        )
