"""What ``torch.profiler`` saw, in the terms of a recording: what ran when, and whose the memory is.

While a loop is recorded, ``held_before`` says what there was at the beginning, and ``GradientNotes`` where gradients
lie, and when they are gone. Afterwards ``Trace`` reads the profiler's file, and ``memory_of`` gives each allocation a
category: by the span in which it was made, by the notes, and by the optimizers' state at the end.
"""

import gc
import json
import math
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep_tools.report.memory import BUCKETS, GRADIENTS, Allocation, Memory, curve, pair
from instep_tools.report.run import TraceEvent
from instep_tools.report.spans import Span

# Names of events in the profiler's file.
NODE = "autograd::engine::evaluate_function: "
ACCUMULATION = NODE + "torch::autograd::AccumulateGrad"
STEP = "Optimizer.step#"
# By the names that the profiler has for dtypes of floating-point numbers.
_BYTES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "c10::complex<float>": 8}
PARAMETERS, STATE = "parameters", "optimizer state"
_MADE_IN = {  # by the kind of the span in which memory was allocated
    "forward": "activations",
    "backward": "temporaries of backward",
    "step": "temporaries of the step",
    "waiting": "temporaries of backward",
    None: "other",
}


def held_before(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Return the bytes of the model, DDP's buckets, and the state of its optimizers, by category."""
    by_address: dict[int, tuple[str, int]] = {}
    ddp_bytes, _ = _buckets(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        _count(by_address, tensor, PARAMETERS)
    for optimizer in optimizers:
        for tensor in tensors_in_state(optimizer):
            _count(by_address, tensor, STATE)
    nbytes = {BUCKETS: ddp_bytes}
    for category, size in by_address.values():
        nbytes[category] = nbytes.get(category, 0) + size
    return nbytes


def _buckets(model: nn.Module) -> tuple[int, set[int]]:
    """Return the bytes of DDP's buckets, and the ids of the parameters whose gradients are views of them."""
    nbytes, views = 0, set()
    for ddp in model.modules():
        if isinstance(ddp, DistributedDataParallel):
            for name, parameter in ddp.module.named_parameters():
                if parameter.requires_grad and name not in ddp.parameters_to_ignore:
                    nbytes += parameter.numel() * parameter.element_size()
                    if ddp.gradient_as_bucket_view:
                        views.add(id(parameter))
    return nbytes, views


def _count(by_address: dict[int, tuple[str, int]], tensor: torch.Tensor, category: str) -> None:
    for address, nbytes in storages(tensor):
        by_address.setdefault(address, (category, nbytes))


def tensors_in_state(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors in the state of each parameter. Values in other containers are not looked for."""
    for values in list(optimizer.state.values()):
        if isinstance(values, dict):
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def storages(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the address and the bytes of a tensor's memory, if it has any on this rank."""
    storage = _storage_of(tensor)
    if storage is not None:
        yield storage.data_ptr(), storage.nbytes()


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    with torch._C.DisableTorchFunctionSubclass():  # no value is read: nobody need wait for an update of them
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor
        if isinstance(local, torch.Tensor) and local.layout is torch.strided and not local.is_meta:
            storage = local.untyped_storage()
            return storage if storage.nbytes() else None
    return None


def state_beside_parameters(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """Return the bytes of the optimizers' state that lies on the device of its parameter now, by address."""
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for parameter, values in list(optimizer.state.items()):
            for tensor in values.values() if isinstance(values, dict) else ():
                if isinstance(tensor, torch.Tensor) and tensor.device == getattr(parameter, "device", None):
                    found.update(storages(tensor))
    return found


@dataclass
class GradientNote:
    """Where a gradient lay.

    Attributes:
        freed: when its memory was seen to be gone, by who ``look``s; ``None``: it never was.
    """

    time: float
    address: int
    nbytes: int
    freed: float | None = None


class GradientNotes:
    """Notes of where gradients lie, until ``stop``: of those that are there at first, of those that come to a
    parameter, and of those that are handed over to another thread.

    Attributes:
        before: those of before.
        notes: the others.
    """

    def __init__(self, model: nn.Module) -> None:
        self.notes: list[GradientNote] = []
        # Of which the profiler does not see that they are freed: on a CPU it tells of nothing that is older than the
        # recording, nor of other threads. A weak reference keeps no memory, and an address alone does not tell a
        # gradient from what lies there after it.
        self._alive: list[tuple[GradientNote, StorageWeakRef]] = []
        self._lock = threading.Lock()  # the loop notes, while a worker looks
        _, in_ddp = _buckets(model)
        # instep's placeholders have no memory; a view of a bucket is counted with the bucket.
        theirs = [p.grad for p in model.parameters() if type(p.grad) is torch.Tensor and id(p) not in in_ddp]
        self.before: Sequence[GradientNote] = self._watched(theirs)
        self._handles, self._nodes = [], []
        for parameter in model.parameters():
            # FSDP sets the gradients of its shards itself, and no such hook is called.
            if parameter.requires_grad and parameter.is_leaf and not hasattr(parameter, "to_local"):
                # Of the node and not of the parameter, whose hooks are the user's: some uses of a model are refused
                # where it has any. A parameter holds its node weakly.
                with torch._C.DisableTorchFunctionSubclass():
                    node = get_gradient_edge(parameter).node
                self._nodes.append(node)
                self._handles.append(node.register_prehook(partial(_note_in, weakref.ref(self))))

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()
        self._alive.clear()

    def handed_over(self, gradients: Iterable[torch.Tensor]) -> None:
        """Another thread will let go of these."""
        self.notes += self._watched(gradients)

    def look(self) -> None:
        """Note which of the watched gradients are gone."""
        with self._lock:
            now, alive = perf_counter(), []
            for note, storage in self._alive:
                if storage.expired():
                    note.freed = now
                else:
                    alive.append((note, storage))
            self._alive = alive

    def _watched(self, gradients: Iterable[torch.Tensor]) -> list[GradientNote]:
        found: dict[int, tuple[GradientNote, StorageWeakRef]] = {}
        for gradient in gradients:
            storage = _storage_of(gradient)
            if storage is not None and storage.data_ptr() not in found:  # else it is of a bucket, with others
                note = GradientNote(perf_counter(), storage.data_ptr(), storage.nbytes())
                found[note.address] = note, StorageWeakRef(storage)
        with self._lock:
            self._alive += found.values()
        return [note for note, _ in found.values()]

    def note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for gradient in gradients:
            if type(gradient) is torch.Tensor:
                self.notes += (GradientNote(perf_counter(), *place) for place in storages(gradient))


def _note_in(notes: "weakref.ref[GradientNotes]", gradients: Sequence[torch.Tensor | None]) -> None:
    # A graph keeps its hooks where the garbage collector does not look.
    if (there := notes()) is not None:
        there.note(gradients)


class MemoryChange(NamedTuple):
    """Memory that was allocated, or freed if ``nbytes`` is negative."""

    time: float
    address: int
    nbytes: int
    thread: int


@contextmanager
def without_collection() -> Iterator[None]:
    """The collector does not run: of the million objects of a trace it looks at each again and again, which takes most
    of the time of reading it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
        nodes, found = Phases(self._nodes), dict[int, list[float]]()
        for event in self._events:
            if event.get("ph") == "X" and event.get("cat") == "cpu_op" and not event["name"].startswith(NODE):
                start = self.time(event)
                if nodes.at(start, event["tid"]) is None:
                    found.setdefault(event["tid"], []).append(start + event["dur"] / 1e6)
        return {thread: sorted(ends) for thread, ends in found.items()}

    def last_outside_of_nodes(self, before: float, thread: int) -> float:
        """Return when the last operation ended there that no node of a graph has run; 0: there was none."""
        ends = self._outside_of_nodes.get(thread, [])
        number = bisect_left(ends, before)
        return ends[number - 1] if number else 0.0

    def accumulations(self) -> list[Span]:
        """Return the spans in which a gradient came to a parameter."""
        return [self._span("accumulation", "", event) for event in self._named(ACCUMULATION)]

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

    def memory(self) -> Iterator[MemoryChange]:
        """Yield the changes of memory, in order of time."""
        changes = []
        for event in self._events:
            if event["name"] == "[memory]":
                found = event["args"]
                changes.append(MemoryChange(self.time(event), found["Addr"], found["Bytes"], event["tid"]))
        return iter(sorted(changes))

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
                total = (total or 0) + _BYTES[name] * _product(shape)
    return total


def _product(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def memory_of(
    trace: Trace,
    spans: Sequence[Span],
    held: Mapping[str, int],
    notes: GradientNotes,
    state: Mapping[int, int],
    window: tuple[float, float],
) -> Memory:
    """Return the curve of what is alive in ``window``.

    Args:
        spans: memory gets a category by the kind of the span in which it was allocated.
        held: what there was before, beside gradients, by category.
        state: the optimizers' state in the end, as ``state_beside_parameters`` has it.
    """
    phases, accumulations = Phases(spans), Phases(trace.accumulations())
    allocations = pair(
        (change.time, change.address, change.nbytes, _category(change.time, change.thread, phases, accumulations))
        for change in trace.memory()
    )
    gradients = _noted(allocations, notes.notes)
    known = [Allocation(note.address, note.nbytes, window[0], note.freed, GRADIENTS) for note in notes.before]
    for number, allocation in enumerate(allocations):
        if number in gradients:
            ends = [end for end in (allocation.end, gradients[number]) if end is not None]
            allocation = replace(allocation, category=GRADIENTS, end=min(ends, default=None))
        elif allocation.end is None and allocation.address in state and allocation.nbytes > 0:
            allocation = replace(allocation, category=STATE)
        known.append(allocation)
    # State that was made on a thread that the profiler does not follow counts as there from the beginning.
    seen = sum(allocation.nbytes for allocation in known if allocation.category == STATE)
    before = held.get(STATE, 0)
    return curve(known, {**held, STATE: max(before, sum(state.values()) - seen)}, *window)


class Phases:
    """An index of spans by thread and time."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._by_thread: dict[int, list[Span]] = {}
        for span in sorted(spans, key=lambda span: span.start):
            self._by_thread.setdefault(span.thread, []).append(span)
        self._starts = {thread: [span.start for span in found] for thread, found in self._by_thread.items()}
        # Up to when one of the spans until there lasts: where that is over, no earlier one need be looked at.
        self._last = {
            thread: list(accumulate((span.end for span in found), max)) for thread, found in self._by_thread.items()
        }

    def at(self, time: float, thread: int) -> Span | None:
        """Return the innermost span of ``thread`` around ``time``; ``None``: there is none."""
        spans: Sequence[Span] = self._by_thread.get(thread, ())
        # Backwards from the last span that began before: of nested spans that is the innermost.
        for number in range(bisect_right(self._starts.get(thread, []), time) - 1, -1, -1):
            if self._last[thread][number] < time:
                break
            if spans[number].end >= time:
                return spans[number]
        return None


def _category(time: float, thread: int, phases: Phases, accumulations: Phases) -> str:
    span = phases.at(time, thread)
    if span is not None and span.kind == "backward" and accumulations.at(time, thread) is not None:
        return GRADIENTS
    return _MADE_IN.get(None if span is None else span.kind, "other")


def _noted(allocations: Sequence[Allocation], notes: Sequence[GradientNote]) -> dict[int, float | None]:
    """Return the numbers of the allocations that are gradients, by the notes, and when each was seen to be gone."""
    by_address: dict[int, list[int]] = {}
    for number, allocation in enumerate(allocations):
        by_address.setdefault(allocation.address, []).append(number)
    found: dict[int, float | None] = {}
    for note in notes:
        for number in by_address.get(note.address, ()):
            allocation = allocations[number]
            if allocation.start <= note.time and (allocation.end is None or note.time <= allocation.end):
                found[number] = note.freed or found.get(number)
    return found
