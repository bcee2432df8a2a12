"""Recordings made by hand."""

from collections.abc import Sequence
from typing import Any

from instep_tools.report.run import Rank, Run, Setup
from instep_tools.report.spans import Span

MAIN, WORKER, GLOO = 1, 2, 3
MIB = 2**20


def setup_of(**changes: Any) -> Setup:
    values: dict[str, Any] = {
        "label": "plain",
        "options": {},
        "model": "Net",
        "count": 2**20,
        "dtypes": ["float32"],
        "batch": ["(8, 64) float32"],
        "ranks": 1,
        "device": "cpu",
        "optimizer": "AdamW(fused=True)",
        "wrapper": "",
        "nbytes": {"parameters": 4 * MIB, "gradients": 4 * MIB, "optimizer state": 8 * MIB},
        "versions": {"torch": "2"},
    }
    return Setup(**{**values, **changes})


def span(kind: str, start: float, end: float, thread: int = MAIN, *parameters: str) -> Span:
    return Span(kind, kind, start, end, thread, parameters)


def pipelined() -> Run:
    """A pipeline of two stages on each of two ranks."""
    ranks = []
    for number in range(2):
        stages = [number, 3 - number]
        spans = [
            Span("forward", "micro-batch 0", 0.1, 0.2, MAIN, (), stages[0]),
            Span("forward", "micro-batch 0", 0.2, 0.3, MAIN, (), stages[1]),
            Span("backward", "inputs, micro-batch 0", 0.4, 0.5, MAIN, (), stages[1]),
            Span("backward", "weights, micro-batch 0", 0.5, 0.6, MAIN, (), stages[1]),
            Span("step", "a", 0.6, 0.7, MAIN, ("a",), stages[1]),
        ]
        ranks.append(Rank(number, "here", MAIN, [(0.0, 1.0)], spans, 4 * MIB, stages))
    return Run(setup_of(ranks=2, label="instep", options={"schedule": "'backward'"}), ranks)


def run_of(
    spans: Sequence[Span], iterations: Sequence[tuple[float, float]] = ((0.0, 1.0),), gradients: int = 0, **setup: Any
) -> Run:
    rank = Rank(0, "here", MAIN, iterations, spans, gradients)
    return Run(setup_of(**setup), [rank] * setup.get("ranks", 1))
