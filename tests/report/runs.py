"""Recordings made by hand."""

from collections.abc import Sequence
from typing import Any

from instep.report.memory import Memory
from instep.report.run import Job, Rank, Run, Setup
from instep.report.spans import Span

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


def run_of(
    spans: Sequence[Span],
    iterations: Sequence[tuple[float, float]] = ((0.0, 1.0),),
    memory: Memory | None = None,
    **setup: Any,
) -> Run:
    rank = Rank(0, "here", MAIN, iterations, spans, memory or memory_of())
    return Run(setup_of(**setup), [rank] * setup.get("ranks", 1))
