"""The two ends of a plan: the ``Job`` that the command line gives, and the ``Estimate`` that ``plan`` makes of it.

Both are plain values, and this file imports no torch, so that the command line need not wait for torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be planned, in the words of the command line, and how fast the machine is that is to train.

    Attributes:
        build: ``module:function`` that returns the model, or ``(model, inputs)``.
        optimizer: a class of ``torch.optim``, or ``module:name`` of a function that makes an optimizer of parameters.
        options: the optimizer's options, each ``name=value``.
        inputs: ``module:function`` that returns the model's inputs; ``None``: ``build`` does, or there are none.
        loss: ``module:function`` that makes a number of the model's output; ``None``: the output's own, or its sum.
        world_size: how many ranks train data-parallel.
        bucket_cap_mb: the option of DistributedDataParallel; ``None``: its default.
        bucket_view: whether DistributedDataParallel's gradients are views of its buckets.
        bucket_bytes: the option of ``instep.attach``; ``None``: its default.
        micro_batches: forwards and backwards in one step, on one device.
        offload: ``"host"``: plan with optimizer state in host memory, too; ``None``: do not.
        gbits: Gbit/s of each rank's link, in each direction; ``None``: a default.
        latency_us: microseconds from one rank to another; ``None``: a default.
        tflops: TFLOP/s that forward and backward reach; ``None``: measured on this machine.
        terabytes: TB/s at which the step reads and writes memory; ``None``: measured on this machine.
        forward_ms: measured milliseconds of one forward; ``None``: computed from its operations.
        pcie_gbytes: GB a second between host and device, in each direction; ``None``: a default.
    """

    build: str
    optimizer: str = "AdamW"
    options: tuple[str, ...] = ()
    inputs: str | None = None
    loss: str | None = None
    world_size: int = 1
    bucket_cap_mb: float | None = None
    bucket_view: bool = True
    bucket_bytes: int | None = None
    micro_batches: int = 1
    offload: str | None = None
    gbits: float | None = None
    latency_us: float | None = None
    tflops: float | None = None
    terabytes: float | None = None
    forward_ms: float | None = None
    pcie_gbytes: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes by dtype, on one rank.

    Attributes:
        state: the optimizer's state, on a rank that keeps all of it.
        activations: the bytes that the forward leaves for backward; ``None``: the forward was not run.
    """

    parameters: Mapping[str, int]
    buffers: Mapping[str, int]
    gradients: Mapping[str, int]
    state: Mapping[str, int]
    activations: int | None


@dataclass(frozen=True, slots=True)
class PlannedPeak:
    """The most bytes alive in a step, on one rank.

    Attributes:
        way: how the loop steps.
        implementation: the optimizer's implementation: foreach, fused, or as it comes.
        total: all bytes.
        own: how many of them are parameters, buffers and state.
    """

    way: str
    implementation: str
    total: int
    own: int

    @property
    def above(self) -> int:
        return self.total - self.own


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Parameters that step, and under DDP travel, together.

    Attributes:
        step_bytes: the bytes that the optimizer reads and writes: parameters and state twice, gradients once.
    """

    nbytes: int
    parameters: tuple[str, ...]
    step_bytes: int


@dataclass(frozen=True, slots=True)
class Timing:
    """An iteration under one schedule, in seconds.

    Attributes:
        exposed: by how much the iteration is longer than one without an optimizer; negative where more than the step
            was hidden.
    """

    schedule: str
    iteration: float
    exposed: float


@dataclass(frozen=True, slots=True)
class PlannedTimes:
    """An iteration under each schedule, and the seconds that it is made of. Without a forward there is no schedule."""

    forward: float | None
    backward: float | None
    step: float
    communication: float
    algorithm: str
    schedules: tuple[Timing, ...]


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The copies of one step with ``offload="host"``.

    Attributes:
        nbytes: the bytes of state that are copied in each direction.
        seconds: how long the copies take, in both directions at a time.
        exposed: the seconds that backward does not hide; ``None``: it is not known how long backward takes.
    """

    nbytes: int
    seconds: float
    exposed: float | None


EVERYTHING = "everything"
"""Stands for the options of a ``Refusal`` where the optimizer or the model is refused, whatever the options."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why ``attach`` refuses some options in this set-up."""

    options: str
    reason: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """The whole plan, as ``--json`` writes it: a field, here and in the classes above, is a name that programs read.

    Attributes:
        bucket_on_accelerator: bytes of a bucket there, where ``attach`` chooses; 0: the job, or DDP, says it.
        offloaded: ``None`` if it was not asked for.
        measured_here: the rates that the job does not give, and that are this machine's.
        accepted: options, with the schedule, that ``attach`` takes.
        assumptions: sentences on what the job does not say, and what is assumed of it.
    """

    model: str
    optimizer: str
    ranks: int
    tensors: int
    numel: int
    sizes: Sizes
    peaks: tuple[PlannedPeak, ...]
    buckets: tuple[PlannedBucket, ...]
    bucket_on_accelerator: int
    times: PlannedTimes
    measured_here: tuple[str, ...]
    offloaded: Offloaded | None
    refusals: tuple[Refusal, ...]
    accepted: tuple[str, ...]
    assumptions: tuple[str, ...]
