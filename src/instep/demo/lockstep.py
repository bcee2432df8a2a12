"""Two loops in one process, step by step side by side, compared after each step: ``DistributedDataParallel``, and
``replicate`` with the step in backward."""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from instep.attaching import attach
from instep.attachment import record
from instep.demo.job import RECORDED_STEPS, WARM_UP_STEPS, Finished, InRank, Progress
from instep.demo.loop import Loop, new_model, numbers, wait, weight_bytes
from instep.demo.memory import GradientProbe
from instep.demo.text import Batches
from instep.replication import replicate
from instep.report.run import Run
from instep.verification import first_difference, training_state

BUCKETS = 10
MIB = 1024 * 1024


def train_in_lockstep(
    job: InRank, text: bytes, device: torch.device, tell: Callable[[Progress | Finished], None]
) -> None:
    """Take all steps of ``job``; rank 0 tells of each. A difference does not end them: it is in the answer.

    The process group is there, and all ranks call this together.
    """
    batches = Batches(text, job.rank, device, rows=1)
    bucket_mb = weight_bytes(new_model(job.shape, torch.device("meta"))) / BUCKETS / MIB
    plain = _Lane(new_model(job.shape, device), lambda module: _data_parallel(module, bucket_mb), device)
    other = _Lane(new_model(job.shape, device), lambda module: replicate(module, bucket_cap_mb=bucket_mb), device)
    difference = None
    with attach(other.loop.model, other.loop.optimizer, schedule="backward"):
        for number in range(1, job.steps + 1):
            batch = batches.next()
            # Whichever goes first finds other caches than the second.
            for lane in (plain, other) if number % 2 == 0 else (other, plain):
                lane.step(*batch)
            difference = difference or _difference(number, plain.loop, other.loop)
            if job.rank == 0:
                tell(Progress(number, plain.loss))
            if number == WARM_UP_STEPS:
                plain.probe.remove()
                other.probe.remove()
        more = [batches.next() for _ in range(RECORDED_STEPS + 1)]
        recorded = [run for lane in (plain, other) if (run := _record(lane.loop, more)) is not None]
        difference = difference or _difference(job.steps + len(more), plain.loop, other.loop)
    tell(
        Finished(
            parameters=numbers(plain.loop.model),
            weight_bytes=weight_bytes(plain.loop.model),
            tensors=_count_tensors(plain.loop),
            difference=difference,
            plain_gradient_bytes=plain.probe.peak_bytes,
            gradient_bytes=other.probe.peak_bytes,
            plain_seconds=tuple(plain.seconds),
            seconds=tuple(other.seconds),
            recorded=tuple(recorded),
        )
    )


class _Lane:
    """A loop with the clock and the probe beside it.

    Attributes:
        loss: of the last step.
    """

    def __init__(self, module: nn.Module, wrap: Callable[[nn.Module], nn.Module], device: torch.device) -> None:
        self.probe = GradientProbe(module.parameters())
        self.loop = Loop(wrap(module))
        self.seconds: list[float] = []
        self.loss = 0.0
        self._device = device

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        # On all ranks at about the same time, so that no loop pays for what came before it.
        wait(self._device)
        dist.barrier(device_ids=None if self._device.index is None else [self._device.index])
        started = perf_counter()
        loss = self.loop.step(inputs, targets)
        wait(self._device)
        self.seconds.append(perf_counter() - started)
        self.loss = loss.item()


def _data_parallel(module: nn.Module, bucket_mb: float) -> nn.Module:
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)


def _record(loop: Loop, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Run | None:
    """One step more than is recorded: the last of them is complete with the forward that follows."""
    with record(loop.model, loop.optimizer, RECORDED_STEPS) as recording:
        for inputs, targets in batches:
            loop.step(inputs, targets)
    return recording.run()


def _difference(step: int, plain: Loop, other: Loop) -> str | None:
    found = first_difference(training_state(plain.model, plain.optimizer), training_state(other.model, other.optimizer))
    return None if found is None else f"after step {step}: {found}"


def _count_tensors(loop: Loop) -> int:
    return sum(isinstance(value, torch.Tensor) for _, value in training_state(loop.model, loop.optimizer))
