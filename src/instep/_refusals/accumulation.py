"""``accumulation_steps``."""

from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


def no_number(target: Target, options: Options) -> None:
    steps = options.accumulation_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise AttachError(f"accumulation_steps must be a number of backwards, at least 1, not {steps!r}")
