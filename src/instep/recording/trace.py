"""What ``torch.profiler`` saw, in the terms of a recording."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from instep.report.spans import Span

Event = dict[str, Any]

NODE = "autograd::engine::evaluate_function: "
ACCUMULATION = NODE + "torch::autograd::AccumulateGrad"
STEP = "Optimizer.step#"

_BYTES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "c10::complex<float>": 8}


class Change(NamedTuple):
    """Memory that was allocated, or freed if ``nbytes`` is negative."""

    time: float
    address: int
    nbytes: int
    thread: int


class Trace:
    """Events of a trace that ``torch.profiler`` exported.

    Args:
        offset: what ``perf_counter`` is behind the time of day, in seconds. All times given out are the former's.
    """

    def __init__(self, path: Path, offset: float) -> None:
        document = json.loads(path.read_bytes())
        self._zero = document["baseTimeNanoseconds"] / 1e9 - offset
        self._events: list[Event] = [event for event in document["traceEvents"] if "ts" in event]

    def time(self, event: Event) -> float:
        return float(self._zero + event["ts"] / 1e6)

    def nodes(self) -> list[float]:
        """When a node of a graph began to run in a backward, in order."""
        return sorted(self.time(event) for event in self._named(NODE))

    def accumulations(self) -> list[Span]:
        """In which a gradient came to a parameter."""
        return [self._span("accumulation", "", event) for event in self._named(ACCUMULATION)]

    def steps(self) -> list[Span]:
        """Calls of ``optimizer.step()``."""
        return [self._span("step", "optimizer.step()", event) for event in self._named(STEP)]

    def communication(self) -> list[Span]:
        """Collectives under way. Those of integers are left out: gradients and parameters are not."""
        found = []
        for event in self._events:
            if event.get("ph") != "X":
                continue
            name = event["name"]
            if name.startswith("gloo:"):
                nbytes = _nbytes(event.get("args", {}))
                if nbytes is not None:
                    said = f"{name.removeprefix('gloo:')}, {nbytes / 2**10:,.1f} KiB"
                    found.append(self._span("communication", said, event))
            elif event.get("cat") == "kernel" and "nccl" in name.lower():
                found.append(self._span("communication", name, event))
        return found

    def memory(self) -> Iterator[Change]:
        """In order of time."""
        changes = []
        for event in self._events:
            if event["name"] == "[memory]":
                found = event["args"]
                changes.append(Change(self.time(event), found["Addr"], found["Bytes"], event["tid"]))
        return iter(sorted(changes))

    def shown(self, zero: float) -> list[Event]:
        """All operations, for a trace viewer, in microseconds since ``zero``."""
        kept = []
        for event in self._events:
            if event.get("ph") == "X" and event.get("cat") not in ("Trace", None) and isinstance(event["tid"], int):
                ts = 1e6 * (self.time(event) - zero)
                kept.append({key: event[key] for key in ("ph", "cat", "name", "tid", "dur")} | {"ts": ts})
        return kept

    def _named(self, prefix: str) -> Iterator[Event]:
        return (event for event in self._events if event.get("ph") == "X" and event["name"].startswith(prefix))

    def _span(self, kind: str, name: str, event: Event) -> Span:
        start = self.time(event)
        return Span(kind, name, start, start + event["dur"] / 1e6, event["tid"])


def _nbytes(arguments: dict[str, Any]) -> int | None:
    """Of what was communicated; ``None`` if none of it is of floating-point numbers."""
    total = None
    for kind, dims in zip(arguments.get("Input type", ()), arguments.get("Input Dims", ()), strict=False):
        for name, shape in [(kind, dims)] if isinstance(kind, str) else zip(kind, dims, strict=False):
            if name in _BYTES:
                total = (total or 0) + _BYTES[name] * _product(shape)
    return total


def _product(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


class Phases:
    """Which of some spans a moment lies in, by thread. Of nested ones the innermost."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._by_thread: dict[int, list[Span]] = {}
        for span in sorted(spans, key=lambda span: span.start):
            self._by_thread.setdefault(span.thread, []).append(span)
        self._starts = {thread: [span.start for span in found] for thread, found in self._by_thread.items()}

    def at(self, time: float, thread: int) -> Span | None:
        spans: Sequence[Span] = self._by_thread.get(thread, ())
        for number in range(bisect_right(self._starts.get(thread, []), time) - 1, -1, -1):
            if spans[number].end >= time:
                return spans[number]
        return None
