"""Whose the memory is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep.recording.trace import Phases, Trace
from instep.report.memory import BUCKETS, GRADIENTS, Allocation, Memory, curve, pair
from instep.report.spans import Span

PARAMETERS, STATE = "parameters", "optimizer state"
_MADE_IN = {
    "forward": "activations",
    "backward": "temporaries of backward",
    "step": "temporaries of the step",
    "waiting": "temporaries of backward",
    None: "other",
}


def held_before(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Bytes of the model, its gradients, and the state of its optimizers. Other tensors are not counted."""
    by_address: dict[int, tuple[str, int]] = {}
    ddp_bytes, in_ddp = _buckets(model)
    for tensor in [*model.parameters(), *model.buffers()]:
        _count(by_address, tensor, PARAMETERS)
    for optimizer in optimizers:
        for tensor in tensors_in_state(optimizer):
            _count(by_address, tensor, STATE)
    for parameter in model.parameters():
        # instep's placeholders have no memory; a view of a bucket is counted with it.
        if type(parameter.grad) is torch.Tensor and id(parameter) not in in_ddp:
            _count(by_address, parameter.grad, GRADIENTS)
    nbytes = {BUCKETS: ddp_bytes}
    for category, size in by_address.values():
        nbytes[category] = nbytes.get(category, 0) + size
    return nbytes


def _buckets(model: nn.Module) -> tuple[int, set[int]]:
    """The bytes of DDP's buckets, and the parameters whose gradients are views of them."""
    nbytes, views = 0, set()
    for ddp in model.modules():
        if isinstance(ddp, DistributedDataParallel):
            for name, parameter in ddp.module.named_parameters():
                if parameter.requires_grad and name not in ddp.parameters_to_ignore:
                    nbytes += parameter.numel() * parameter.element_size()
                    if ddp.gradient_as_bucket_view:
                        views.add(id(parameter))
    return nbytes, views


def tensors_in_state(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for values in list(optimizer.state.values()):
        if isinstance(values, dict):
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def state_beside_parameters(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """Where the state of the optimizers lies now, on the device of its parameter, and how many bytes are there."""
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for parameter, values in list(optimizer.state.items()):
            for tensor in values.values() if isinstance(values, dict) else ():
                if isinstance(tensor, torch.Tensor) and tensor.device == getattr(parameter, "device", None):
                    found.update(storages(tensor))
    return found


def _count(by_address: dict[int, tuple[str, int]], tensor: torch.Tensor, category: str) -> None:
    for address, nbytes in storages(tensor):
        by_address.setdefault(address, (category, nbytes))


def storages(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor
    if isinstance(local, torch.Tensor) and local.layout is torch.strided and not local.is_meta:
        storage = local.untyped_storage()
        if storage.nbytes():
            yield storage.data_ptr(), storage.nbytes()


class Note(NamedTuple):
    """A gradient that was about to be accumulated."""

    time: float
    address: int


class GradientNotes:
    """Where gradients lie, told by hooks on parameters until ``stop``."""

    def __init__(self, model: nn.Module) -> None:
        self.notes: list[Note] = []
        self._handles = []
        for parameter in model.parameters():
            # FSDP sets the gradients of its shards itself.
            if parameter.requires_grad and parameter.is_leaf and not hasattr(parameter, "to_local"):
                self._handles.append(parameter.register_hook(self._note))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, gradient: torch.Tensor) -> None:
        if type(gradient) is torch.Tensor:
            for address, _ in storages(gradient):
                self.notes.append(Note(perf_counter(), address))


def memory_of(
    trace: Trace,
    spans: Sequence[Span],
    held: Mapping[str, int],
    notes: GradientNotes,
    state: Mapping[int, int],
    window: tuple[float, float],
) -> Memory:
    """The curve of what is alive in ``window``.

    Args:
        spans: in which memory is made: a category by their kind.
        state: the optimizers' state in the end, as ``state_beside_parameters`` has it. What was made meanwhile on a
            thread that the profiler does not follow is taken to have been there from the beginning.
    """
    phases, accumulations = Phases(spans), Phases(trace.accumulations())
    allocations = pair(
        (change.time, change.address, change.nbytes, _category(change.time, change.thread, phases, accumulations))
        for change in trace.memory()
    )
    gradients = _noted(allocations, notes.notes)
    known = []
    for number, allocation in enumerate(allocations):
        if number in gradients:
            allocation = replace(allocation, category=GRADIENTS)
        elif allocation.end is None and allocation.address in state and allocation.nbytes > 0:
            allocation = replace(allocation, category=STATE)
        known.append(allocation)
    seen = sum(allocation.nbytes for allocation in known if allocation.category == STATE)
    before = held.get(STATE, 0)
    return curve(known, {**held, STATE: max(before, sum(state.values()) - seen)}, *window)


def _category(time: float, thread: int, phases: Phases, accumulations: Phases) -> str:
    span = phases.at(time, thread)
    if span is not None and span.kind == "backward" and accumulations.at(time, thread) is not None:
        return GRADIENTS
    return _MADE_IN.get(None if span is None else span.kind, "other")


def _noted(allocations: Sequence[Allocation], notes: Sequence[Note]) -> set[int]:
    """Which of the allocations are gradients."""
    by_address: dict[int, list[int]] = {}
    for number, allocation in enumerate(allocations):
        by_address.setdefault(allocation.address, []).append(number)
    found = set()
    for note in notes:
        for number in by_address.get(note.address, ()):
            allocation = allocations[number]
            if allocation.start <= note.time and (allocation.end is None or note.time <= allocation.end):
                found.add(number)
    return found
