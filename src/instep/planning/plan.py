"""A plan from a job: rates of this machine, what ``attach`` says to the options, buckets, times and memory."""

import copy
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from instep._gradients.clipping import ClipNorm, ClipValue
from instep._optim.parameters import MIB, ParameterSpec, fill_buckets
from instep.attaching import attach
from instep.errors import AttachError
from instep.options import DEFAULT_BUCKET_BYTES
from instep.planning.job import Job, PlanError
from instep.planning.rehearse import (
    DryRun,
    MakeOptimizer,
    Measured,
    PlannedModel,
    bytes_by_dtype,
    forward_flops,
    optimizer_makers,
    order_of_gradients,
)
from instep.report.simulate import EVERYTHING, Estimate, Machine, Offloaded, Peak, PlannedBucket, Refusal, Sizes, times
from instep.sources.replicate.buckets import IN_FLIGHT
from instep.sources.replicate.layout import BucketSizes, as_they_arrived

# What this machine reaches, measured in about two seconds.


SECONDS = 0.7
"""For each rate, after a warm-up."""
MATRIX_SIDE = 768
"""Of the matrices: large enough for all cores, and quick on one."""
ELEMENTS = 4 << 20
"""That AdamW updates: more than fit in a CPU's caches."""
ARRAYS = 7
"""That AdamW reads or writes: gradient, weight and two moments, of which the last three are written, too."""


def measured_flops() -> float:
    """Operations a second of a product of float32 matrices."""
    matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE, device=_device())
    return 2 * MATRIX_SIDE**3 / _seconds(lambda: matrix @ matrix)


def measured_memory_bytes() -> float:
    """Bytes a second that a step of fused AdamW reads and writes."""
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS, device=_device()))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return ARRAYS * parameter.nbytes / _seconds(optimizer.step)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _seconds(work: Callable[[], object]) -> float:
    """Of one call: the least, since other programs only take time away."""
    best = float("inf")
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


# What ``attach`` says to its options in this set-up: it is asked, on a small model of the same kind.


SIDE = 2
SCHEDULES: Mapping[str, dict[str, Any]] = {
    "schedule='backward'": {"schedule": "backward"},
    "schedule='forward'": {"schedule": "forward"},
    "undo=True": {"schedule": "backward", "undo": True},
}
OPTIONS: Mapping[str, dict[str, Any]] = {
    "clip=ClipNorm(1.0)": {"clip": ClipNorm(1.0)},
    "clip=ClipNorm(1.0, mode='two_pass')": {"clip": ClipNorm(1.0, mode="two_pass")},
    "clip=ClipNorm(1.0, mode='per_bucket')": {"clip": ClipNorm(1.0, mode="per_bucket")},
    "clip=ClipNorm(1.0, mode='previous_norm')": {"clip": ClipNorm(1.0, mode="previous_norm")},
    "clip=ClipValue(1.0)": {"clip": ClipValue(1.0)},
    "accumulation_steps=2": {"accumulation_steps": 2},
    "scaler=GradScaler()": {"scaler": GradScaler("cpu")},
    "nonfinite='skip'": {"nonfinite": "skip"},
    "nonfinite='raise'": {"nonfinite": "raise"},
    "mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)": {
        "mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    },
    "bucket_bytes=1048576": {"bucket_bytes": MIB},
    "comm_hook=(None, hook)": {"comm_hook": (None, allreduce_hook)},
    "cross_iteration=True": {"cross_iteration": True},
    "shard_state=True": {"shard_state": True},
}


def try_options(planned: PlannedModel, make: MakeOptimizer, job: Job) -> tuple[tuple[Refusal, ...], tuple[str, ...]]:
    """What is refused, with the reasons, and what is accepted.

    Every option is tried with each schedule, by itself. Where a schedule is refused without any, its options are not
    tried.
    """
    return _try(planned, make, job, OPTIONS)


def try_schedules(planned: PlannedModel, make: MakeOptimizer, job: Job) -> tuple[tuple[Refusal, ...], tuple[str, ...]]:
    """The same of the schedules alone, without any option."""
    return _try(planned, make, job, {})


def _try(
    planned: PlannedModel, make: MakeOptimizer, job: Job, options: Mapping[str, dict[str, Any]]
) -> tuple[tuple[Refusal, ...], tuple[str, ...]]:
    refused: dict[tuple[str, str], list[str]] = {}
    accepted = []
    possible = []
    with _as_trained(job) as wrap:
        for schedule, arguments in SCHEDULES.items():
            reason = _refusal(planned, make, wrap, arguments)
            if reason is None:
                possible.append(schedule)
                accepted.append(schedule)
            else:
                refused.setdefault((EVERYTHING, reason), []).append(schedule)
        for option, argument in options.items():
            for schedule in possible:
                reason = _refusal(planned, make, wrap, {**SCHEDULES[schedule], **argument})
                if reason is None:
                    accepted.append(f"{option}, {schedule}")
                else:
                    refused.setdefault((option, reason), []).append(schedule)
    return tuple(
        Refusal(option if len(where) == len(SCHEDULES) else f"{option} with {', '.join(where)}", reason)
        for (option, reason), where in refused.items()
    ), tuple(accepted)


def _refusal(planned: PlannedModel, make: MakeOptimizer, wrap: Any, arguments: dict[str, Any]) -> str | None:
    model = _small(planned)
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    wrapped = wrap(model)
    try:
        attach(wrapped, optimizer, **arguments).detach()
    except AttachError as error:
        return str(error)
    return None


def _small(planned: PlannedModel) -> nn.Module:
    """The same modules and names, with parameters of the same kinds that hold a few numbers each."""
    memo: dict[int, Any] = {id(planned): planned}
    for parameter in planned.model.parameters():
        small = torch.zeros((SIDE,) * parameter.dim(), dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(small, requires_grad=parameter.requires_grad)
    for buffer in planned.model.buffers():
        memo[id(buffer)] = torch.zeros((), dtype=buffer.dtype)
    with planned.fakes.copying():
        return copy.deepcopy(planned.model, memo)


@contextmanager
def _as_trained(job: Job) -> Iterator[Any]:
    """What makes of the model what ``attach`` would be given. Several ranks are one that believes so."""
    if job.world_size == 1:
        yield lambda model: model
        return
    if dist.is_initialized():
        raise PlanError("a process group is there already: plan for several ranks in a process of its own")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    stores: Any = dist  # which does not say that it has one without a network
    dist.init_process_group("gloo", rank=0, world_size=1, store=stores.HashStore())
    try:
        yield lambda model: DistributedDataParallel(model, gradient_as_bucket_view=job.bucket_view)
    finally:
        dist.destroy_process_group()


# A plan from a job: rehearse, lay out the buckets, ask ``attach``, and compute the times.


GBITS, LATENCY_US, PCIE_GBYTES = 100.0, 20.0, 25.0


def plan(job: Job, *, refusals: bool = False) -> Estimate:
    """What training as ``job`` says will need and take.

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
    """One plan in the making."""

    def __init__(self, job: Job, planned: PlannedModel, makers: Mapping[str, MakeOptimizer]) -> None:
        self._job = job
        self._planned = planned
        self._makers = makers
        self._trained = {name: p for name, p in planned.model.named_parameters() if p.requires_grad}
        self._assumptions: list[str] = []
        self._first: Measured | None = None
        self._refused: str | None = None

    def estimate(self, try_all: bool) -> Estimate:
        job, model = self._job, self._planned.model
        make = next(iter(self._makers.values()))
        asked = try_options if try_all else try_schedules
        refusals, accepted = asked(self._planned, make, job)
        self._order = order_of_gradients(self._planned)
        # The default schedule takes every optimizer: then only it has a row.
        self._refused = next((one.reason for one in refusals if one.options.startswith(EVERYTHING)), None)
        peaks = self._peaks()
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
            optimizer=job.optimizer.rpartition(":")[2],
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

    def _peaks(self) -> list[Peak]:
        found: dict[str, list[Peak]] = {}
        failed: list[PlanError] = []
        for implementation, make in self._makers.items():
            try:
                for way, seen in (self._alone if self._job.world_size == 1 else self._among_ranks)(make):
                    found.setdefault(way, []).append(Peak(way, implementation, seen.peak, seen.own))
            except PlanError as error:
                failed.append(error)
        if not found:
            raise failed[0] if self._refused is None else PlanError(f"instep refuses it: {self._refused}")
        self._assumptions += [f"left out: {error}" for error in failed]
        return [peak for peaks in found.values() for peak in peaks]

    def _alone(self, make: MakeOptimizer) -> Iterator[tuple[str, Measured]]:
        run = DryRun(self._planned, make, self._job.micro_batches)
        size = self._job.bucket_bytes
        plain = run.plain()
        self._first = self._first or plain
        yield "plain", plain
        if self._refused is not None:
            yield "forward", plain
            return
        attached = run.attached(size)
        if not self._first.buckets:
            self._first = replace(self._first, buckets=attached.buckets)
        yield "backward", attached
        yield from self._away("backward", attached, attached.buckets)
        if self._job.micro_batches > 1:
            yield "backward, micro_batches", run.attached(size, together=True)
        forward = run.by_bucket(self._step_buckets())
        yield "forward", forward
        yield from self._away("forward", forward, self._named(self._step_buckets()))
        yield "backward, undo", run.attached(size, undo=True)

    def _among_ranks(self, make: MakeOptimizer) -> Iterator[tuple[str, Measured]]:
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
        yield from self._away("backward", backward, self._named(ddp))
        yield "forward", run.by_bucket(self._step_buckets(), ddp, view=view)
        yield "backward, undo", run.by_bucket(ddp, ddp, view=view, undo=True)
        state = sum(sum(one.values()) for one in backward.state.values())
        own = backward.own - state + -(-state // ranks)
        gradients = sum(p.nbytes for p in self._trained.values())
        for schedule, sent in (("backward", gradients), ("forward", 0)):
            # While backward runs, all that is sent; in the step, what is sent and gathered beside what was received.
            during = backward.peak - backward.own + gradients
            step = 2 * gradients + sent + 2 * -(-gradients // ranks)
            yield f"{schedule}, shard_state", replace(backward, peak=own + max(during, step), own=own)
        in_flight = sorted((sum(p.nbytes for p in bucket) for bucket in ddp), reverse=True)[:IN_FLIGHT]
        yield "backward, replicate", replace(transient, peak=transient.peak + sum(in_flight))

    def _away(self, way: str, seen: Measured, buckets: Sequence[Sequence[str]]) -> Iterator[tuple[str, Measured]]:
        """The same with ``offload="host"``: state of two buckets that are stepped one after the other is there."""
        if self._job.offload is None:
            return
        of_buckets = [self._state_of(seen, bucket) for bucket in buckets]
        two = max(map(sum, zip(of_buckets, [*of_buckets[1:], 0], strict=True)), default=0)
        away = sum(of_buckets) - two
        yield f"{way}, offload", replace(seen, peak=seen.peak - away, own=seen.own - away)

    def _state_of(self, seen: Measured, names: Sequence[str]) -> int:
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
        seconds = state / (speed * 1e9)
        return Offloaded(state, seconds, None if backward is None else max(0.0, seconds - backward))

    @property
    def _sizes(self) -> BucketSizes:
        return BucketSizes.of(self._job.bucket_cap_mb)

    def _ddp_buckets(self) -> list[list[torch.Tensor]]:
        """DDP's, as they are after its first backward."""
        parameters = list(self._trained.values())
        numbers = {name: number for number, name in enumerate(self._trained)}
        arrived = [numbers[name] for name in self._order]
        modules = [module for module in self._planned.model.modules() if getattr(module, "sparse", False)]
        rows = {id(p) for module in modules for p in module.parameters(recurse=False)}
        sparse = frozenset(number for number, p in enumerate(parameters) if id(p) in rows)
        layout = as_they_arrived(parameters, arrived, sparse, self._sizes)
        return [[parameters[number] for number in bucket] for bucket in layout.buckets]

    def _step_buckets(self) -> list[list[torch.Tensor]]:
        """Those of ``schedule="forward"``: in the order in which the model has its parameters."""
        specs = [
            ParameterSpec(number, name, p.shape, p.dtype, p.device, p.nbytes)
            for number, (name, p) in enumerate(self._trained.items())
        ]
        buckets = fill_buckets("forward", specs, self._job.bucket_bytes or DEFAULT_BUCKET_BYTES)
        return [[self._trained[spec.name] for spec in bucket.parameters] for bucket in buckets]

    def _buckets(self, plain: Measured) -> tuple[PlannedBucket, ...]:
        if self._job.world_size > 1:
            buckets = list(map(tuple, self._named(self._ddp_buckets())))
        else:
            buckets = list(plain.buckets) or [tuple(self._order)]  # refused: the optimizer steps all at once
        made = []
        for bucket in buckets:
            nbytes = sum(self._trained[name].nbytes for name in bucket)
            made.append(PlannedBucket(nbytes, bucket, 3 * nbytes + 2 * self._state_of(plain, bucket)))
        return tuple(made)

    def _machine(self) -> Machine:
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
        return Machine(job.world_size, (tflops or 1.0) * 1e12, terabytes * 1e12, gbits * 1e9 / 8, latency * 1e-6)

    def _forward_seconds(self, machine: Machine) -> float | None:
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
