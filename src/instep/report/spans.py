"""Spans of time, and the recorder to set as ``Attachment.recorder``."""

import threading
from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Something that ran, or was waited for, from ``start`` to ``end``, in seconds.

    Attributes:
        kind: ``"forward"``, ``"backward"``, ``"step"`` (an update of parameters), ``"communication"`` (between ranks),
            ``"flight"`` (of a bucket's gradients, from when they are handed over to when they have come back) or
            ``"waiting"``.
        name: for people.
        thread: on which it was, as the operating system numbers them.
        parameters: whose; empty where it is not about some of them.
    """

    kind: str
    name: str
    start: float
    end: float
    thread: int = 0
    parameters: tuple[str, ...] = ()


class SpanRecorder:
    """Collects spans in ``perf_counter`` seconds. Called from any thread: communication ends on the backend's own."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def __call__(self, kind: str, names: Sequence[str], start: float, end: float) -> None:
        self._spans.append(Span(kind, title(names), start, end, threading.get_native_id(), tuple(names)))

    def take(self) -> list[Span]:
        """The spans that ended since the last call, in the order in which they ended."""
        spans, self._spans = self._spans, []
        return spans


def title(parameters: Sequence[str]) -> str:
    """What a bucket of these is called."""
    if len(parameters) < 3:
        return ", ".join(parameters)
    return f"{parameters[0]} … {parameters[-1]} ({len(parameters)} parameters)"
