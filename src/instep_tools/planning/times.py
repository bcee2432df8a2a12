"""How long an iteration takes, by when the optimizer steps: from bytes, operations, and the rates of a machine.

A model of the loop, not of the machine: forward, backward, communication and step take as long as their bytes and
operations say, and wait for each other as they do in the loop. The step takes from forward and backward the memory
bandwidth that it uses, as if they took turns: behind the next forward it takes as long as before it. So only
``backward`` hides any of it, while gradients are still on their way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.utils.benchmark import Timer

from instep_tools.planning.job import Job, PlannedBucket, PlannedTimes, Timing
from instep_tools.planning.model import PlannedModel
from instep_tools.planning.rehearse import operations_of
from instep_tools.processes import device_of

GBITS, LATENCY_US = 100.0, 20.0
"""The defaults of the rates that cannot be measured here."""
BACKWARD_TO_FORWARD = 2.0
"""Where the forward's time is given: for each of its matrix products backward takes two, the gradients of the inputs
and of the weights. What checkpoints compute again is not known then."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The rates that a machine reaches, which are not those of a data sheet.

    Attributes:
        flops: operations a second of forward and backward.
        memory_bytes: bytes a second that the step reads and writes.
        link_bytes: bytes a second of each rank's link, in each direction.
        latency: seconds from one rank to another.
        measured: the rates that are this machine's, for want of others: ``"terabytes"``, ``"tflops"``.
    """

    ranks: int
    flops: float
    memory_bytes: float
    link_bytes: float
    latency: float
    measured: tuple[str, ...] = ()

    def allreduce(self, nbytes: float, algorithm: str) -> float:
        """Return the seconds that an all-reduce takes, by a ring or a tree."""
        if algorithm == "ring":
            # Reduce-scatter and all-gather: in each a rank sends all shards but one, one hop after another.
            hops = 2 * (self.ranks - 1)
            return hops / self.ranks * nbytes / self.link_bytes + hops * self.latency
        # Up the tree and down again, in pieces: each level costs its latency, and the bytes pass each link once a way.
        return 2 * nbytes / self.link_bytes + 2 * (self.ranks - 1).bit_length() * self.latency


def times(buckets: Sequence[PlannedBucket], machine: Machine, passes: tuple[float, float] | None) -> PlannedTimes:
    """Return how long an iteration takes under each schedule.

    Args:
        passes: seconds of the whole forward, and of backward; ``None``: not known, and then neither is an iteration.
    """
    sizes = [bucket.nbytes for bucket in buckets]
    steps = [bucket.step_bytes / machine.memory_bytes for bucket in buckets]
    sent, algorithm = [0.0] * len(sizes), "ring"
    if machine.ranks > 1:  # by the algorithm that is sooner, as backends choose it
        ways = {way: [machine.allreduce(nbytes, way) for nbytes in sizes] for way in ("ring", "tree")}
        algorithm, sent = min(ways.items(), key=lambda one: sum(one[1]))
    if passes is None:
        return PlannedTimes(None, None, sum(steps), sum(sent), algorithm, ())
    forward, backward = passes
    # Nothing tells how backward is spread over the layers: each bucket gets its share of the bytes.
    made = accumulate(backward * size / max(sum(sizes), 1) for size in sizes)
    arrived, stepped = 0.0, backward
    for gradients, seconds, step in zip(made, sent, steps, strict=True):
        arrived = max(arrived, gradients) + seconds
        # As buckets arrive, from the end of backward's own work on.
        stepped = max(stepped, arrived) + step
    bare = max(arrived, backward) + forward
    iterations = {
        "plain": bare + sum(steps),
        "backward": stepped + forward,
        "forward": bare + sum(steps),
        "no optimizer": bare,
    }
    found = tuple(Timing(name, seconds, seconds - bare) for name, seconds in iterations.items())
    return PlannedTimes(forward, backward, sum(steps), sum(sent), algorithm, found)


def machine_of(job: Job, assumptions: list[str], *, has_forward: bool) -> Machine:
    """Return the machine's rates: given, measured here, or by default. What is not given is an assumption."""
    terabytes, tflops, gbits, latency = job.terabytes, job.tflops, job.gbits, job.latency_us
    measured = []
    if terabytes is None:
        terabytes = measured_memory_bytes() / 1e12
        measured.append("terabytes")
        assumptions.append(f"{terabytes:.3g} TB/s of memory, measured here on a step of fused AdamW (--terabytes)")
    if tflops is None and has_forward and job.forward_ms is None:
        tflops = measured_flops() / 1e12
        measured.append("tflops")
        assumptions.append(f"{tflops:.3g} TFLOP/s, measured here on a product of float32 matrices (--tflops)")
    if job.world_size > 1 and gbits is None:
        assumptions.append(f"{GBITS:g} Gbit/s of each rank's link (--gbits)")
    if job.world_size > 1 and latency is None:
        assumptions.append(f"{LATENCY_US:g} µs from one rank to another (--latency-us)")
    link = (gbits or GBITS) * 1e9 / 8, (LATENCY_US if latency is None else latency) * 1e-6
    return Machine(job.world_size, (tflops or 1.0) * 1e12, terabytes * 1e12, *link, tuple(measured))


def seconds_of_passes(
    job: Job, planned: PlannedModel, machine: Machine, assumptions: list[str]
) -> tuple[float, float] | None:
    """Return the seconds of all forwards of a step, and of all backwards; ``None``: they are not known."""
    if job.forward_ms is not None:
        forward = job.micro_batches * job.forward_ms / 1e3
        return forward, BACKWARD_TO_FORWARD * forward
    if not planned.runs:
        assumptions.append("no activations, and no times of an iteration: the model has no --inputs")
        return None
    if planned.sums_outputs:
        assumptions.append("the loss is the sum of the model's outputs, which keeps nothing (--loss)")
    operations = operations_of(planned)
    if not operations[0]:
        assumptions.append("no times of an iteration: the forward has no operations that torch counts")
        return None
    each = job.micro_batches / machine.flops
    return operations[0] * each, operations[1] * each


SECONDS = 0.7
"""How long each rate is measured."""
MATRIX_SIDE = 768
"""The side of the matrices that are multiplied: large enough for all cores, and quick on one."""
ELEMENTS = 4 << 20
"""The numbers that AdamW updates: more than fit in a CPU's caches."""
ARRAYS = 7
"""The arrays that AdamW reads or writes: gradient, weight and two moments, of which the last three are written, too."""


def measured_flops() -> float:
    """Return the operations a second of a product of float32 matrices."""
    matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE, device=device_of(None))
    return 2 * MATRIX_SIDE**3 / _seconds(lambda: matrix @ matrix)


def measured_memory_bytes() -> float:
    """Return the bytes a second that a step of fused AdamW reads and writes."""
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS, device=device_of(None)))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return ARRAYS * parameter.nbytes / _seconds(optimizer.step)


def _seconds(work: Callable[[], object]) -> float:
    """Return the seconds of one call: the least, since other programs only take time away."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return float(min(timer.blocked_autorange(min_run_time=SECONDS).times))
