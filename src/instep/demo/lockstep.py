"""Two loops in one process, step by step side by side, compared after each step."""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
import torch.distributed as dist

from instep.attaching import attach
from instep.attachment import record
from instep.demo.job import RECORDED_STEPS, WARM_UP_STEPS, Finished, Job, LoopRecord, LoopStep, Progress
from instep.demo.loop import Loop
from instep.demo.text import Batches
from instep.report.overlap import busy, exposed, intervals
from instep.report.run import Run
from instep.report.spans import SpanRecorder
from instep.verification import first_difference, training_state


def train(job: Job, text: bytes, rank: int, device: torch.device, tell: Callable[[Progress], None]) -> Finished:
    """Do all steps of ``job`` on this rank, telling of each. A difference does not end it: it is in the answer.

    With several ranks the process group is there, and all ranks call this together.
    """
    batches = Batches(text, rank)
    plain, attached = _Timed(job, device), _Timed(job, device)
    # DDP has made its own buckets of that size.
    bucket_bytes = attached.loop.bucket_bytes if job.placement.ranks == 1 else None
    difference = None
    with attach(
        attached.loop.model, attached.loop.optimizer, schedule="backward", bucket_bytes=bucket_bytes
    ) as attachment:
        attachment.recorder = attached.recorder
        for number in range(job.steps):
            inputs, targets = (part.to(device) for part in batches.next())
            # Whichever goes first finds other caches than the second.
            for timed in (plain, attached) if number % 2 == 0 else (attached, plain):
                timed.step(inputs, targets)
            difference = difference or _difference(number + 1, plain.loop, attached.loop)
            tell(Progress(number + 1, plain.steps[-1].loss, attached.steps[-1].loss))
            if number + 1 == WARM_UP_STEPS:
                plain.loop.probe.remove()
                attached.loop.probe.remove()
        buckets = len(attachment.plan.buckets)
        attachment.recorder = None
        more = [batches.next() for _ in range(RECORDED_STEPS + 1)]
        recorded = [run for timed in (plain, attached) if (run := _record(timed.loop, more, device)) is not None]
        difference = difference or _difference(job.steps + len(more), plain.loop, attached.loop)
    return Finished(
        parameters=sum(p.numel() for p in plain.loop.model.parameters()),
        gradient_bytes=plain.loop.gradient_bytes,
        tensors=_count_tensors(plain.loop),
        buckets=buckets,
        difference=difference,
        plain=plain.record(),
        attached=attached.record(),
        recorded=tuple(recorded),
    )


def _record(loop: Loop, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> Run | None:
    """One step more than is recorded: the last of them is complete with the forward that follows."""
    with record(loop.model, loop.optimizer, RECORDED_STEPS) as recording:
        for inputs, targets in batches:
            loop.step(inputs.to(device), targets.to(device))
    return recording.run()


class _Timed:
    """A loop and the clock beside it."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.loop = Loop(job, device)
        self.recorder = SpanRecorder()
        self.steps: list[LoopStep] = []
        self._device = device

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        _line_up(self._device)
        started = perf_counter()
        loss, began, done = self.loop.step(inputs, targets)
        _wait(self._device)
        ended = perf_counter()
        spans = self.recorder.take()
        steps = [(began, done), *intervals(span for span in spans if span.kind == "step")]
        communication = intervals(span for span in spans if span.kind == "communication")
        self.steps.append(LoopStep(loss.item(), ended - started, busy(steps), exposed(steps, communication)))

    def record(self) -> LoopRecord:
        return LoopRecord(tuple(self.steps), self.loop.probe.peak_bytes)


def _line_up(device: torch.device) -> None:
    """Return on all ranks at about the same time, so that no loop pays for what came before it."""
    _wait(device)
    if dist.is_initialized():
        dist.barrier(device_ids=None if device.index is None else [device.index])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _difference(step: int, plain: Loop, attached: Loop) -> str | None:
    found = first_difference(
        training_state(plain.model, plain.optimizer), training_state(attached.model, attached.optimizer)
    )
    return None if found is None else f"after step {step}: {found}"


def _count_tensors(loop: Loop) -> int:
    return sum(isinstance(value, torch.Tensor) for _, value in training_state(loop.model, loop.optimizer))
