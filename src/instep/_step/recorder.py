"""Who listens to what runs when."""

from collections.abc import Sequence
from typing import Protocol


class Recorder(Protocol):
    """Told what ran when, on the thread that it ran on: ``kind`` is ``"step"`` for the update of these parameters,
    ``"communication"`` for their gradients on their way between ranks, which any thread tells, or ``"waiting"`` for
    either. Times are ``perf_counter`` seconds."""

    def __call__(self, kind: str, names: Sequence[str], start: float, end: float) -> None: ...
