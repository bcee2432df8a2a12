"""A plan from a job: rehearse the loop, lay out the buckets, ask ``attach`` about its options, and compute the times.

``plan`` is the entry. A ``_Planning`` collects the numbers of one ``Estimate``; rates of the machine that the job does
not give are measured here, in about two seconds.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from instep.buckets import ParameterSpec, bucket_bytes_for, fill_buckets
from instep.planning.job import (
    EVERYTHING,
    Estimate,
    Job,
    Offloaded,
    PlanError,
    PlannedBucket,
    PlannedPeak,
    Sizes,
)
from instep.planning.model import MakeOptimizer, PlannedModel, optimizer_makers
from instep.planning.refusals import ask_attach, is_judged
from instep.planning.rehearse import DryRun, Measured, bytes_by_dtype, forward_flops, order_of_gradients
from instep.planning.simulate import MachineRates, times
from instep.sources.replicate.buckets import IN_FLIGHT
from instep.sources.replicate.layout import BucketSizes, as_they_arrived

GBITS, LATENCY_US, PCIE_GBYTES = 100.0, 20.0, 25.0
"""The defaults of the rates that cannot be measured here."""


def plan(job: Job, *, refusals: bool = False) -> Estimate:
    """Return what training as ``job`` says would need and take.

    Nothing is trained, and no tensor of the model is made. Rates of the machine that ``job`` does not give are
    measured, which takes two seconds.

    Args:
        refusals: whether each option of ``attach`` is tried, too.

    Raises:
        PlanError: something that ``job`` names is not there, or cannot be run without data.
    """
    _require_sensible(job)
    makers = optimizer_makers(job)
    planned = PlannedModel(job)
    return _Planning(job, planned, makers).estimate(refusals)


def _require_sensible(job: Job) -> None:
    """Refuse numbers that make no sense, and options that do not go together, before anything is built."""
    positive = ("world_size", "micro_batches", "bucket_cap_mb", "bucket_bytes")
    rates = ("gbits", "tflops", "terabytes", "forward_ms", "pcie_gbytes")
    given = {name: getattr(job, name) for name in positive} | {name: getattr(job.rates, name) for name in rates}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise PlanError(f"--{name.replace('_', '-')} {value}: a number above 0 is needed")
    latency = job.rates.latency_us
    if latency is not None and latency < 0:
        raise PlanError(f"--latency-us {latency}: a number of at least 0 is needed")
    if job.offload not in (None, "host"):
        raise PlanError(f"--offload {job.offload}: it is host, or left out")
    if job.rates.pcie_gbytes is not None and job.offload is None:
        raise PlanError("--pcie-gbytes is for --offload host: give both")
    if job.world_size > 1 and job.bucket_bytes is not None:
        raise PlanError("--bucket-bytes is for one device: DistributedDataParallel's buckets have --bucket-cap-mb")
    if job.world_size > 1 and job.micro_batches > 1:
        raise PlanError("--micro-batches is for one device: leave it out with --world-size above 1")
    if job.world_size == 1 and job.bucket_cap_mb is not None:
        raise PlanError("--bucket-cap-mb is for --world-size above 1: the buckets of one device have --bucket-bytes")
    if os.environ.get("INSTEP_DISABLE", "") not in ("", "0"):
        raise PlanError(
            "INSTEP_DISABLE is set, with which torch takes every step: unset it to see what attach() would do"
        )


class _Planning:
    """One plan in the making: it collects the numbers, and the assumptions that they rest on."""

    def __init__(self, job: Job, planned: PlannedModel, makers: Mapping[str, MakeOptimizer]) -> None:
        self._job = job
        self._planned = planned
        self._makers = makers
        self._trained = {name: p for name, p in planned.model.named_parameters() if p.requires_grad}
        self._assumptions: list[str] = []
        self._first: Measured | None = None  # the plain loop with the first implementation of the optimizer
        self._refused: str | None = None  # the reason, if the optimizer or the model is refused

    def estimate(self, try_all: bool) -> Estimate:
        job, model = self._job, self._planned.model
        make = next(iter(self._makers.values()))
        refusals, accepted = ask_attach(self._planned, make, job, every_option=try_all)
        self._order = order_of_gradients(self._planned)
        # The default schedule takes every optimizer, so that a refused one has a row for ``forward`` alone.
        self._refused = next((one.reason for one in refusals if one.options.startswith(EVERYTHING)), None)
        name = job.optimizer.rpartition(":")[2]
        peaks = self._peaks()
        if self._refused is None and is_judged(self._planned, make):
            self._assumptions.append(
                f"{name} updates each parameter by itself, as its first two updates show, with the memory of plain"
            )
        plain = self._first
        assert plain is not None
        buckets = self._buckets(plain)
        machine = self._machine()
        sizes = Sizes(
            dict(bytes_by_dtype(model.parameters())),
            dict(bytes_by_dtype(model.buffers())),
            dict(bytes_by_dtype(self._trained.values())),
            dict(sum(plain.state.values(), Counter())),
            plain.activations if self._planned.runs else None,
        )
        forward = self._forward_seconds(machine)
        found = times(buckets, machine, forward)
        return Estimate(
            model=type(model).__name__,
            optimizer=name,
            ranks=job.world_size,
            tensors=len(list(model.parameters())),
            numel=sum(p.numel() for p in model.parameters()),
            sizes=sizes,
            peaks=tuple(peaks),
            buckets=buckets,
            times=found,
            offloaded=self._offloaded(sum(sizes.state.values()), found.backward),
            refusals=refusals,
            accepted=accepted,
            assumptions=tuple(self._assumptions),
        )

    def _peaks(self) -> list[PlannedPeak]:
        """Rehearse each way to train with each implementation of the optimizer."""
        found: dict[str, list[PlannedPeak]] = {}
        failed: list[PlanError] = []
        for implementation, make in self._makers.items():
            try:
                for way, seen in (self._alone if self._job.world_size == 1 else self._among_ranks)(make):
                    found.setdefault(way, []).append(PlannedPeak(way, implementation, seen.peak, seen.own))
            except PlanError as error:
                failed.append(error)
        if not found:
            raise failed[0] if self._refused is None else PlanError(f"instep refuses it: {self._refused}")
        self._assumptions += [f"left out: {error}" for error in failed]
        return [peak for peaks in found.values() for peak in peaks]

    def _alone(self, make: MakeOptimizer) -> Iterator[tuple[str, Measured]]:
        """Rehearse the ways to train on one device."""
        run = DryRun(self._planned, make, self._job.micro_batches)
        size = self._job.bucket_bytes
        plain = run.plain()
        self._first = self._first or plain
        yield "plain", plain
        if self._refused is not None:
            yield "forward", plain
            return
        attached = run.attached(size)
        # The plain loop has no buckets: the plan shows those that ``attach`` makes.
        if not self._first.buckets:
            self._first = replace(self._first, buckets=attached.buckets)
        yield "backward", attached
        yield from self._offload("backward", attached, attached.buckets)
        if self._job.micro_batches > 1:
            yield "backward, micro_batches", run.attached(size, together=True)
        forward = run.by_bucket(self._step_buckets())
        yield "forward", forward
        yield from self._offload("forward", forward, self._named(self._step_buckets()))
        yield "backward, undo", run.attached(size, undo=True)
        yield "backward, two_pass", run.attached(size, two_pass=True)

    def _among_ranks(self, make: MakeOptimizer) -> Iterator[tuple[str, Measured]]:
        """Rehearse the ways to train on several ranks, of which each has the same peak."""
        run, ranks, view = DryRun(self._planned, make), self._job.world_size, self._job.bucket_view
        ddp = self._ddp_buckets()
        plain = run.plain(ddp, view=view)
        self._first = self._first or plain
        yield "plain", plain
        if self._refused is not None:
            yield "forward", plain
            return
        transient = run.attached(self._sizes.rest)
        backward = run.by_bucket(ddp, ddp, view=view)
        yield "backward", backward
        yield from self._offload("backward", backward, self._named(ddp))
        yield "forward", run.by_bucket(self._step_buckets(), ddp, view=view)
        yield "backward, undo", run.by_bucket(ddp, ddp, view=view, undo=True)
        # shard_state: each rank keeps its share of the state, rounded up (-(-a // b)).
        state = sum(sum(one.values()) for one in backward.state.values())
        own = backward.own - state + -(-state // ranks)
        gradients = sum(p.nbytes for p in self._trained.values())
        for schedule, sent in (("backward", gradients), ("forward", 0)):
            # While backward runs, a copy of all gradients is being sent. In the step, what is sent and gathered is
            # there beside what was received.
            during = backward.peak - backward.own + gradients
            step = 2 * gradients + sent + 2 * -(-gradients // ranks)
            yield f"{schedule}, shard_state", replace(backward, peak=own + max(during, step), own=own)
        # ``replicate`` keeps no bucket: at most IN_FLIGHT of them are on their way, the largest ones at worst.
        in_flight = sorted((sum(p.nbytes for p in bucket) for bucket in ddp), reverse=True)[:IN_FLIGHT]
        yield "backward, replicate", replace(transient, peak=transient.peak + sum(in_flight))

    def _offload(self, way: str, seen: Measured, buckets: Sequence[Sequence[str]]) -> Iterator[tuple[str, Measured]]:
        """Yield the same way with ``offload="host"``, if the job asks for it.

        State of two buckets is on the device: while one is stepped, the next one's is copied.
        """
        if self._job.offload is None:
            return
        of_buckets = [self._state_of(seen, bucket) for bucket in buckets]
        two = max(map(sum, zip(of_buckets, [*of_buckets[1:], 0], strict=True)), default=0)
        away = sum(of_buckets) - two
        yield f"{way}, offload", replace(seen, peak=seen.peak - away, own=seen.own - away)

    def _state_of(self, seen: Measured, names: Sequence[str]) -> int:
        """Return the bytes of state that these parameters have."""
        places = {name: number for number, (name, _) in enumerate(self._planned.model.named_parameters())}
        return sum(sum(seen.state.get(places[name], {}).values()) for name in names)

    def _named(self, buckets: Sequence[Sequence[torch.Tensor]]) -> list[list[str]]:
        names = {id(p): name for name, p in self._trained.items()}
        return [[names[id(p)] for p in bucket] for bucket in buckets]

    def _offloaded(self, state: int, backward: float | None) -> Offloaded | None:
        if self._job.offload is None:
            return None
        speed = self._job.rates.pcie_gbytes or PCIE_GBYTES
        if self._job.rates.pcie_gbytes is None:
            self._assumptions.append(f"{speed:g} GB/s between host and device, in each direction (--pcie-gbytes)")
        # To the device and back at the same time, beside backward, which hides as much as it lasts.
        seconds = state / (speed * 1e9)
        return Offloaded(state, seconds, None if backward is None else max(0.0, seconds - backward))

    @property
    def _sizes(self) -> BucketSizes:
        return BucketSizes.of(self._job.bucket_cap_mb)

    def _ddp_buckets(self) -> list[list[torch.Tensor]]:
        """Return DDP's buckets as they are after its first backward, which puts them in the order of arrival."""
        parameters = list(self._trained.values())
        numbers = {name: number for number, name in enumerate(self._trained)}
        arrived = [numbers[name] for name in self._order]
        modules = [module for module in self._planned.model.modules() if getattr(module, "sparse", False)]
        rows = {id(p) for module in modules for p in module.parameters(recurse=False)}
        sparse = frozenset(number for number, p in enumerate(parameters) if id(p) in rows)
        layout = as_they_arrived(parameters, arrived, sparse, self._sizes)
        return [[parameters[number] for number in bucket] for bucket in layout.buckets]

    def _step_buckets(self) -> list[list[torch.Tensor]]:
        """Return the buckets of ``schedule="forward"``: in the order in which the model has its parameters."""
        specs = [
            ParameterSpec(number, name, p.shape, p.dtype, p.device, p.nbytes)
            for number, (name, p) in enumerate(self._trained.items())
        ]
        buckets = fill_buckets("forward", specs, self._job.bucket_bytes or bucket_bytes_for(specs))
        return [[self._trained[spec.name] for spec in bucket.parameters] for bucket in buckets]

    def _buckets(self, plain: Measured) -> tuple[PlannedBucket, ...]:
        """Return the buckets in which backward completes gradients."""
        if self._job.world_size > 1:
            buckets = list(map(tuple, self._named(self._ddp_buckets())))
        else:
            buckets = list(plain.buckets) or [tuple(self._order)]  # refused: the optimizer steps all at once
        made = []
        for bucket in buckets:
            nbytes = sum(self._trained[name].nbytes for name in bucket)
            made.append(PlannedBucket(nbytes, bucket, 3 * nbytes + 2 * self._state_of(plain, bucket)))
        return tuple(made)

    def _machine(self) -> MachineRates:
        """Return the machine's rates: given, measured here, or by default. What is not given is an assumption."""
        job = self._job
        terabytes, tflops = job.rates.terabytes, job.rates.tflops
        if terabytes is None:
            terabytes = measured_memory_bytes() / 1e12
            self._assumptions.append(
                f"{terabytes:.3g} TB/s of memory, measured here on a step of fused AdamW (--terabytes)"
            )
        if tflops is None and self._planned.runs and job.rates.forward_ms is None:
            tflops = measured_flops() / 1e12
            self._assumptions.append(f"{tflops:.3g} TFLOP/s, measured here on a product of float32 matrices (--tflops)")
        gbits, latency = job.rates.gbits or GBITS, LATENCY_US if job.rates.latency_us is None else job.rates.latency_us
        if job.world_size > 1 and job.rates.gbits is None:
            self._assumptions.append(f"{gbits:g} Gbit/s of each rank's link (--gbits)")
        if job.world_size > 1 and job.rates.latency_us is None:
            self._assumptions.append(f"{latency:g} µs from one rank to another (--latency-us)")
        return MachineRates(job.world_size, (tflops or 1.0) * 1e12, terabytes * 1e12, gbits * 1e9 / 8, latency * 1e-6)

    def _forward_seconds(self, machine: MachineRates) -> float | None:
        """Return the seconds of all forwards of a step; ``None``: they are not known."""
        if self._job.rates.forward_ms is not None:
            return self._job.micro_batches * self._job.rates.forward_ms / 1e3
        if not self._planned.runs:
            self._assumptions.append("no activations, and no times of an iteration: the model has no --inputs")
            return None
        if self._planned.sums_outputs:
            self._assumptions.append("the loss is the sum of the model's outputs, which keeps nothing (--loss)")
        flops = forward_flops(self._planned)
        if not flops:
            self._assumptions.append("no times of an iteration: the forward has no operations that torch counts")
            return None
        return self._job.micro_batches * flops / machine.flops


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
    matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE, device=_device())
    return 2 * MATRIX_SIDE**3 / _seconds(lambda: matrix @ matrix)


def measured_memory_bytes() -> float:
    """Return the bytes a second that a step of fused AdamW reads and writes."""
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS, device=_device()))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return ARRAYS * parameter.nbytes / _seconds(optimizer.step)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _seconds(work: Callable[[], object]) -> float:
    """Return the seconds of one call: the least, since other programs only take time away."""
    best = float("inf")  # of one call at least, however long that takes
    end = perf_counter() + SECONDS
    while best == float("inf") or perf_counter() < end:
        _wait()
        started = perf_counter()
        work()
        _wait()
        best = min(best, perf_counter() - started)
    return best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
