"""Sources say when the gradients of some parameters are final. One file each; they do not know one another."""

from typing import Protocol

from instep._core.plan import Bucket


class Source(Protocol):
    """What the attachment asks of a source.

    During backward the source announces final gradients with ``Transaction.arrive``, steps full buckets with
    ``Transaction.apply``, and calls ``Transaction.raise_failure`` once nothing it would harm is left to run.
    """

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets as they are now, in the order in which they are expected."""

    def connect(self) -> None:
        """Register the hooks: all of them, or none and an error."""

    def disconnect(self) -> None:
        """Take the hooks off again. Safe to call twice."""

    def refresh(self) -> None:
        """Between steps: take in parameters that were frozen or unfrozen."""

    def begin_step(self) -> None:
        """The first gradient of a step is about to be announced."""
