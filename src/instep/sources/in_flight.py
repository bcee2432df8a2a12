"""A bucket of gradients from the start of its communication until it is used."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import torch


class Communication(Protocol):
    """A collective that was started: the future of a communication hook or of a backend, or several works in one."""

    def wait(self) -> Any:
        """Return when it is done; on an accelerator the current stream waits, and not the host. Raises what the
        communication raised."""


def drain(communication: Communication) -> None:
    """Return when ``communication`` is done or has failed: whatever went wrong, another error is on its way already."""
    with suppress(Exception):
        communication.wait()


C = TypeVar("C", bound=Communication)


class InFlightBucket(Generic[C]):
    """
    Attributes:
        members: all of the bucket's parameters.
        communication: reduces the bucket.
    """

    __slots__ = ("communication", "members")

    def __init__(self, members: Sequence[torch.Tensor], communication: C) -> None:
        self.members = members
        self.communication = communication

    def wait(self) -> None:
        """Return when the bucket has arrived, for the current stream. Raises what the communication raised."""
        self.communication.wait()

    def drain(self) -> None:
        """Return when nothing writes the bucket any more, for the current stream, whether it failed or not. The next
        backward writes the same memory."""
        drain(self)
