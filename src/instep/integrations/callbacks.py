"""What the callbacks of several frameworks take and give alike."""

from instep.attachment import Attachment
from instep.errors import AttachError
from instep.options import Schedules


def require_backward(together: bool, schedule: Schedules) -> None:
    """Raise ``AttachError`` unless ``together`` goes with ``schedule``."""
    if together and schedule != "backward":
        raise AttachError(
            f"together=True is one backward that frees gradients, and schedule={schedule!r} frees none: write "
            "InstepCallback(schedule='backward', together=True, …), or leave it out"
        )


def named_stats(overlap: Attachment) -> dict[str, float]:
    """``overlap.stats()`` for a framework's log, among the names of others."""
    return {f"instep/{name}": float(value) for name, value in overlap.stats().items()}
