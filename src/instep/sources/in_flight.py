"""A bucket of gradients from the start of its communication until it is used."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import torch

from instep._profile import profiled


class Communication(Protocol):
    """A collective that was started: the future of a communication hook or of a backend, or several works in one."""

    def wait(self) -> Any:
        """Return when it is done; on an accelerator the current stream waits, and not the host. Raises what the
        communication raised."""


def drain(communications: Iterable[Communication]) -> None:
    """Return when all of them are done, or one has failed: whatever went wrong, another error is on its way already.
    After one that has failed none is waited for: once a rank is lost, each takes as long as the process group waits."""
    with suppress(Exception):
        for communication in communications:
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
        with profiled("wait for gradients"):
            self.communication.wait()
