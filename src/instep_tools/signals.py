"""SIGINT and SIGTERM, for the command: they end the process at once, raise, or wait.

While the command imports they end it, and its work runs in ``raising``. The writing of a file, which must not be cut
short, and the start of processes run in ``waiting``.

A signal that the process was started to ignore stays ignored: a job in the background of a shell, or under ``nohup``.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class TerminatedError(BaseException):
    """SIGTERM arrived. No ``Exception``, as ``KeyboardInterrupt`` is none: nothing on the way may handle it."""


@contextmanager
def raising() -> Iterator[None]:
    """SIGINT raises ``KeyboardInterrupt``, SIGTERM ``TerminatedError``."""

    def throw(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else TerminatedError

    with _handled_by(throw):
        yield


@contextmanager
def waiting() -> Iterator[None]:
    """Both signals wait for the end of this block. The first that came has its old effect then."""
    came: list[int] = []
    try:
        with _handled_by(lambda number, frame: came.append(number)):
            yield
    finally:
        # The old handlers are back: the signal does now what it would have done before the block.
        for number in came[:1]:
            signal.raise_signal(number)


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _heard()}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _heard() -> list[signal.Signals]:
    """Return the signals that this process does not ignore."""
    # ``None``: the handler was not set from Python, and could not be put back.
    return [number for number in STOPPING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
