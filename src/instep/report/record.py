"""Spans of time, and the recorder to set as ``Attachment.recorder``."""

from typing import NamedTuple


class Span(NamedTuple):
    """Something that ran from ``start`` to ``end``, both ``perf_counter`` seconds.

    Attributes:
        kind: ``"step"`` for the update of one bucket, ``"communication"`` for a bucket on its way between ranks.
        name: which bucket.
    """

    kind: str
    name: str
    start: float
    end: float


class SpanRecorder:
    """Collects spans. Called from any thread: communication ends on the backend's own."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def __call__(self, kind: str, name: str, start: float, end: float) -> None:
        self._spans.append(Span(kind, name, start, end))

    def take(self) -> list[Span]:
        """The spans that ended since the last call, in the order in which they ended."""
        spans, self._spans = self._spans, []
        return spans
