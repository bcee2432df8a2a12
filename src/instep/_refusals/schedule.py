"""``schedule`` and ``bucket_bytes``."""

from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


def unknown(target: Target, options: Options) -> None:
    if options.schedule not in ("backward", "forward"):
        raise AttachError(f"schedule={options.schedule!r} is not known: it is 'backward' or 'forward'")


def bucket_bytes(target: Target, options: Options) -> None:
    given = options.bucket_bytes
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise AttachError(f"bucket_bytes must be a positive number of bytes or None, not {given!r}")


def defer(target: Target, options: Options) -> None:
    if options.defer != "auto" and not isinstance(options.defer, bool):
        raise AttachError(f"defer must be 'auto', True or False, not {options.defer!r}")
    if options.defer is True and options.schedule == "backward":
        raise AttachError(
            "defer=True is for schedule='forward': with schedule='backward' the step runs in backward. Leave it out"
        )
