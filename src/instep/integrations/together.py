"""``together=True`` of the callbacks: one backward for all micro-batches of a step."""

from instep.errors import AttachError
from instep.options import Schedules


def require_backward(together: bool, schedule: Schedules) -> None:
    """Raise ``AttachError`` unless ``together`` goes with ``schedule``."""
    if together and schedule != "backward":
        raise AttachError(
            f"together=True is one backward that frees gradients, and schedule={schedule!r} frees none: write "
            "InstepCallback(schedule='backward', together=True, …), or leave it out"
        )
