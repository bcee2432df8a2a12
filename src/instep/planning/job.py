"""Why nothing can be planned."""

from dataclasses import dataclass


class PlanError(Exception):
    """What was named cannot be planned with. The message is for the user: what was found and what to do."""


# What is to be planned.


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the machine that is to train.

    Attributes:
        gbits: of each rank's link, in each direction; ``None``: a default, as with the latency.
        tflops: that forward and backward reach; ``None``: measured on this machine, as with the memory's terabytes.
        forward_ms: of one forward, measured; ``None``: from its operations.
        pcie_gbytes: GB a second between host and device, in each direction; ``None``: a default.
    """

    gbits: float | None = None
    latency_us: float | None = None
    tflops: float | None = None
    terabytes: float | None = None
    forward_ms: float | None = None
    pcie_gbytes: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """The words of the command line.

    Attributes:
        build: ``module:function`` that returns the model, or ``(model, inputs)``.
        optimizer: a class of ``torch.optim``, or ``module:name`` of what makes an optimizer of parameters.
        options: of the optimizer, each ``name=value``.
        inputs: ``module:function`` that returns what the model is called with; ``None``: nothing does.
        loss: ``module:function`` that makes a number of the model's output; ``None``: the output's own, or its sum.
        world_size: how many ranks train data-parallel.
        bucket_cap_mb: of DistributedDataParallel; ``None``: its default.
        bucket_view: whether DistributedDataParallel's gradients are views of its buckets.
        bucket_bytes: of ``instep.attach``; ``None``: its default.
        rates: how fast the machine is.
        micro_batches: forwards and backwards in one step, on one device.
        offload: ``"host"``: also with optimizer state in host memory; ``None``: not.
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
    rates: Rates = Rates()
    micro_batches: int = 1
    offload: str | None = None
