"""What the demo trains, in processes of its own: loops on one device, and the same on several ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from instep import record, replicate
from instep_tools.output import MIB
from instep_tools.report.run import Run
from instep_tools.training import (
    CONTEXT,
    ByteGPT,
    Gain,
    Job,
    Kind,
    Shape,
    TrainedLoop,
    measure_group,
)

WARM_UP_STEPS = 3
"""The first steps, which are not timed."""
MIN_STEPS = WARM_UP_STEPS + 2  # quantiles need two timed steps
MICRO_BATCHES = 4
RECORDED_STEPS = 4
"""Steps after all others, which are recorded for the report."""
BACKWARD = {"schedule": "backward"}


@dataclass(frozen=True, slots=True)
class Act:
    """What one act has found.

    Attributes:
        backend: that ranks communicate over; empty for one device.
        parameters: how many numbers the model has.
        gradient_bytes: of all gradients.
        loops: the plain one first, and that with the step in backward last.
        accumulating: the same two with several micro-batches in a step; empty on ranks.
        recorded: of the first loop and the last one; empty on other ranks than the first.
    """

    ranks: int
    backend: str
    parameters: int
    gradient_bytes: int
    loops: tuple[Gain, ...]
    accumulating: tuple[Gain, ...]
    recorded: tuple[Run, ...]

    @property
    def differences(self) -> list[str]:
        """How weights and state differ from the plain loop's, in words."""
        return [f"{one.name}: {one.difference}" for one in (*self.loops, *self.accumulating) if one.difference]


Tell = Callable[[int, float], None]  # is told the number of each step, and the loss


def one_device(device: torch.device, tell: Tell, shape: Shape, steps: int, text: bytes) -> Act:
    """The first act: train the plain loop, the default and ``schedule="backward"`` in turn. Then two accumulate."""
    job = _job(device, shape, steps, text)
    backward = Kind('schedule="backward"', "plain", BACKWARD)
    act = _trained([Kind("plain", "plain"), Kind("default", "plain", {}), backward], job, tell)
    accumulating = [
        Kind("plain, accumulating", "plain, accumulating", micro_batches=MICRO_BATCHES),
        Kind("micro_batches()", "plain, accumulating", BACKWARD, micro_batches=MICRO_BATCHES),
    ]
    shorter = replace(job, tokens=CONTEXT // MICRO_BATCHES, tried=1, rounds=2)
    return replace(act, accumulating=tuple(measure_group(accumulating, shorter)))


def on_ranks(device: torch.device, tell: Tell, shape: Shape, steps: int, text: bytes) -> Act:
    """The second act, on each rank: train DistributedDataParallel and ``replicate`` in turn."""
    bucket_mb = _bytes_of(shape) / 10 / MIB  # ten buckets, or so
    ddp = partial(DistributedDataParallel, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    kinds = [
        Kind("plain DDP", "plain DDP", wrap=ddp),
        Kind("instep.replicate", "plain DDP", BACKWARD, wrap=partial(replicate, bucket_cap_mb=bucket_mb)),
    ]
    act = _trained(kinds, _job(device, shape, steps, text), tell if dist.get_rank() == 0 else None)
    return replace(act, ranks=dist.get_world_size(), backend=dist.get_backend())


def _job(device: torch.device, shape: Shape, steps: int, text: bytes) -> Job:
    content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rounds = steps - WARM_UP_STEPS
    return Job(shape, device, torch.float32, CONTEXT, WARM_UP_STEPS, rounds, text=content, compares=True)


def _trained(kinds: Sequence[Kind], job: Job, tell: Tell | None) -> Act:
    """Measure the loops, and record the first one and the last. Nobody needs a recording of the default: its loop runs
    as the plain one does until a trial has found a gain."""
    recorded: list[Run] = []

    def after(loops: Mapping[str, TrainedLoop]) -> None:
        for name in (kinds[0].name, kinds[-1].name):
            loop, first = loops[name], job.tried + job.rounds
            with record(loop.model, loop.optimizers, RECORDED_STEPS) as recording:
                for number in range(first, first + RECORDED_STEPS + 1):  # the forward after the last step completes it
                    loop.step(number)
            if (run := recording.run()) is not None:
                recorded.append(run)

    found, nbytes = measure_group(kinds, job, tell, after), _bytes_of(job.shape)
    return Act(1, "", nbytes // job.dtype.itemsize, nbytes, tuple(found), (), tuple(recorded))


def _bytes_of(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in ByteGPT(shape).parameters())
