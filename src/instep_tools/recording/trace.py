"""What ``torch.profiler`` saw, in the terms of a recording: what ran when."""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from instep_tools.report.run import TraceEvent
from instep_tools.report.spans import Span, intervals, union

# Names of events in the profiler's file.
NODE = "autograd::engine::evaluate_function: "
STEP = "Optimizer.step#"
# By the names that the profiler has for dtypes of floating-point numbers.
_BYTES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "c10::complex<float>": 8}


class Trace:
    """The events of a trace that ``torch.profiler`` exported. Times that it gives out are ``perf_counter`` seconds.

    Args:
        offset: the time of day less ``perf_counter``, in seconds.
    """

    def __init__(self, path: Path, offset: float) -> None:
        document = json.loads(path.read_bytes())
        self._zero = document["baseTimeNanoseconds"] / 1e9 - offset
        self._events: list[TraceEvent] = [event for event in document["traceEvents"] if "ts" in event]

    def time(self, event: TraceEvent) -> float:
        """Return when an event began."""
        return float(self._zero + event["ts"] / 1e6)

    def first_node(self, after: float) -> float:
        """Return when the first node of a graph after then began to run in a backward."""
        number = bisect_right(self._nodes, after, key=attrgetter("start"))
        return self._nodes[number].start if number < len(self._nodes) else math.inf

    @cached_property
    def _nodes(self) -> list[Span]:
        return sorted((self._span("node", "", event) for event in self._named(NODE)), key=attrgetter("start"))

    @cached_property
    def _outside_of_nodes(self) -> dict[int, list[float]]:
        """By thread, when each operation ended that no node of a graph has run, in order."""
        threads = {node.thread for node in self._nodes}
        ran = {thread: union(intervals(node for node in self._nodes if node.thread == thread)) for thread in threads}
        found: dict[int, list[float]] = {}
        for event in self._events:
            if event.get("ph") == "X" and event.get("cat") == "cpu_op" and not event["name"].startswith(NODE):
                start, nodes = self.time(event), ran.get(event["tid"], [])
                number = bisect_right(nodes, (start, math.inf)) - 1  # the last that began before
                if number < 0 or nodes[number][1] < start:
                    found.setdefault(event["tid"], []).append(start + event["dur"] / 1e6)
        return {thread: sorted(ends) for thread, ends in found.items()}

    def last_outside_of_nodes(self, before: float, thread: int) -> float:
        """Return when the last operation ended there that no node of a graph has run; 0: there was none."""
        ends = self._outside_of_nodes.get(thread, [])
        number = bisect_left(ends, before)
        return ends[number - 1] if number else 0.0

    def steps(self) -> list[Span]:
        """Return the calls of ``optimizer.step()``."""
        return [self._span("step", "optimizer.step()", event) for event in self._named(STEP)]

    def communication(self) -> list[Span]:
        """Return the collectives under way, without those of integers: gradients and parameters are floating-point."""
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

    def shown(self, zero: float) -> list[TraceEvent]:
        """Return all operations, for a trace viewer, in microseconds since ``zero``."""
        kept = []
        for event in self._events:
            # Only what has a thread: the rest are rows of the profiler's own.
            if event.get("ph") == "X" and event.get("cat") not in ("Trace", None) and isinstance(event["tid"], int):
                ts = 1e6 * (self.time(event) - zero)
                kept.append({key: event[key] for key in ("ph", "cat", "name", "tid", "dur")} | {"ts": ts})
        return kept

    def _named(self, prefix: str) -> Iterator[TraceEvent]:
        return (event for event in self._events if event.get("ph") == "X" and event["name"].startswith(prefix))

    def _span(self, kind: str, name: str, event: TraceEvent) -> Span:
        start = self.time(event)
        return Span(kind, name, start, start + event["dur"] / 1e6, event["tid"])


def _nbytes(arguments: dict[str, Any]) -> int | None:
    """Return the bytes that a collective communicated; ``None`` if none of them are of floating-point numbers."""
    total = None
    for kind, dims in zip(arguments.get("Input type", ()), arguments.get("Input Dims", ()), strict=False):
        # A list of tensors has lists of names and of shapes.
        for name, shape in [(kind, dims)] if isinstance(kind, str) else zip(kind, dims, strict=False):
            if name in _BYTES:
                total = (total or 0) + _BYTES[name] * math.prod(shape)
    return total
