"""Recordings made by hand."""

from collections.abc import Sequence
from typing import Any

from instep_tools.report.memory import Memory

from instep_tools.report.run import Job, Rank, Run, Setup
from instep_tools.report.spans import Span, intervals, outside

MAIN, WORKER, GLOO = 1, 2, 3
MIB = 2**20


def job_of(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": "Net",
        "parameters": "a digest",
        "count": 2**20,
        "dtypes": ("float32",),
        "batch": ("(8, 64) float32",),
        "ranks": 1,
        "device": "cpu",
    }
    return Job(**{**values, **changes})


def setup_of(**changes: Any) -> Setup:
    of_job = {name: changes.pop(name) for name in list(changes) if name in Job.__dataclass_fields__}
    values: dict[str, Any] = {
        "job": job_of(**of_job),
        "label": "plain",
        "options": {},
        "optimizer": "AdamW(fused=True)",
        "fused": True,
        "wrapper": "",
        "bucket_view": True,
        "buckets": [],
        "gradients": {"a": 3 * MIB, "b": MIB},
        "nbytes": {"parameters": 4 * MIB, "gradients": 4 * MIB, "optimizer state": 8 * MIB},
        "versions": {"torch": "2"},
    }
    return Setup(**{**values, **changes})


def memory_of(**alive: int) -> Memory:
    named = {name.replace("_", " "): nbytes for name, nbytes in alive.items()} or {"parameters": 4 * MIB}
    peak = sum(named.values())
    return Memory([0.0, 0.4, 1.0], [0, peak, 0], 0.4, peak, named, named)


def span(kind: str, start: float, end: float, thread: int = MAIN, *parameters: str) -> Span:
    return Span(kind, kind, start, end, thread, parameters)


def pipelined(*steps: float, attached: bool) -> Run:
    """A pipeline of a stage or two on each of two ranks, in which a rank's run is 0.8 s long and its stages compute for
    0.4 s, beside ``steps`` of so many seconds."""
    ranks = []
    for number, seconds in enumerate(steps):
        stages = [number, 3 - number]
        spans = [
            Span("forward", "micro-batch 0", 0.1, 0.2, MAIN, (), stages[0]),
            Span("forward", "micro-batch 0", 0.2, 0.3, MAIN, (), stages[1]),
            Span("backward", "inputs, micro-batch 0", 0.4, 0.5, MAIN, (), stages[1]),
            Span("backward", "weights, micro-batch 0", 0.5, 0.6, MAIN, (), stages[1]),
        ]
        begins = 0.6 if attached else 0.8
        spans.append(Span("step", "a", begins, begins + seconds, MAIN, ("a",), stages[1] if attached else None))
        work = intervals(spans)
        spans += [Span("bubble", "bubble", *gap, MAIN) for gap in outside([(0.0, 0.8)], work)]
        spans.append(Span("step", "optimizer.step()", 0.9, 0.95, MAIN))
        ranks.append(Rank(number, "here", MAIN, [(0.0, 1.0)], spans, memory_of(), (), stages, [(0.0, 0.8)]))
    options = {"schedule": "'backward'", "pipeline": "of 4 stages"} if attached else {}
    return Run(setup_of(ranks=2, label="instep" if attached else "plain", options=options, buckets=[["a"]]), ranks)


def run_of(
    spans: Sequence[Span],
    iterations: Sequence[tuple[float, float]] = ((0.0, 1.0),),
    memory: Memory | None = None,
    **setup: Any,
) -> Run:
    rank = Rank(0, "here", MAIN, iterations, spans, memory or memory_of())
    return Run(setup_of(**setup), [rank] * setup.get("ranks", 1))
