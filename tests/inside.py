"""What tests look at inside of an attachment: one place knows where it is."""

from typing import Any

import instep


def schedule_of(overlap: instep.Attachment) -> Any:
    """The schedule, with its step."""
    return overlap._parts.schedule


def source_of(overlap: instep.Attachment) -> Any:
    """The one source of gradients."""
    (source,) = overlap._parts.sources
    return source


def before_forward(overlap: instep.Attachment) -> None:
    """What instep does before the model's forward, and nothing of what others do there."""
    model = overlap._parts.refs.model()
    assert model is not None
    overlap._parts.forwards.before_forward(model, ())
