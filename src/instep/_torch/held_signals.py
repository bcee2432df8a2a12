"""Signals whose Python handlers wait for the end of a block: a handler sees nothing that is half done."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_FIRST_OF_REAL_TIME = int(getattr(signal, "SIGRTMIN", 32))
_NUMBERS = sorted(number for number in signal.valid_signals() if number < _FIRST_OF_REAL_TIME)


def heard() -> list[int]:
    """The signals that have a handler written in Python, or Python's own for Ctrl-C. None where no signal can come:
    Python runs all handlers on its main thread."""
    if threading.get_ident() != threading.main_thread().ident:
        return []
    return [number for number in _NUMBERS if callable(signal.getsignal(number))]


@contextmanager
def held(numbers: Sequence[int]) -> Iterator[None]:
    """The handlers of these signals run right after this block, on the main thread. On another one nothing is held."""
    if not numbers or threading.get_ident() != threading.main_thread().ident:
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = [(number, signal.signal(number, note)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
