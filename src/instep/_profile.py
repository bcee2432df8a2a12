"""What torch's profiler shows of instep: ranges named ``instep::…``, on the thread that the work runs on."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

_NO_RANGE: AbstractContextManager[None] = nullcontext()


def profiled(part: str, first: str = "") -> AbstractContextManager[Any]:
    """Around a part of a step: a range in the trace of a running profiler, else nothing.

    Args:
        first: the first parameter that it is about, which the trace has as the range's input.
    """
    # Private: whether any profiler is on, as torch's own code asks. Without that question each range would cost some
    # microseconds. tests/unit/test_profile.py fails if torch renames it.
    if not profiler._is_profiler_enabled:
        return _NO_RANGE
    return profiler.record_function(f"instep::{part}", first or None)
