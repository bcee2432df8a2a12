"""``INSTEP_DISABLE=1``: what needs an attachment, and changes the numbers of the plain loop, cannot be left out."""

from instep._gradients.clipping import Clipping
from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


def clipped_buckets(target: Target, options: Options) -> None:
    if Clipping(options.clip).clips_buckets:
        raise AttachError(
            "INSTEP_DISABLE is set, and clip=ClipNorm(mode='per_bucket') clips bucket by bucket: the plain loop has no "
            "buckets. Use another mode, or unset INSTEP_DISABLE"
        )


def other_numbers(target: Target, options: Options) -> None:
    for name in ("comm_hook", "mixed_precision"):
        if getattr(options.communication, name) is not None:
            raise AttachError(
                f"INSTEP_DISABLE is set, and {name} changes the numbers of the plain loop, which cannot have it from "
                "instep. Leave it out (register_comm_hook and torch.autocast are torch's own), or unset INSTEP_DISABLE"
            )
