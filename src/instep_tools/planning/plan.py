"""A plan from a job: rehearse the loop, lay out the buckets, ask ``attach`` about its options, and compute the times.

``plan`` is the entry. A ``_Planning`` collects the numbers of one ``Estimate``.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from instep import attach
from instep_tools.output import MIB, CannotRunError, Told, size_of
from instep_tools.planning.job import EVERYTHING, Estimate, Job, Offloaded, PlannedBucket, PlannedPeak, Sizes
from instep_tools.planning.model import MakeOptimizer, PlannedModel, optimizer_makers
from instep_tools.planning.refusals import ask_attach, is_judged
from instep_tools.planning.rehearse import DryRun, Measured, bytes_by_dtype, gradients_by_dtype, order_of_gradients
from instep_tools.planning.times import machine_of, seconds_of_passes, times

PCIE_GBYTES = 25.0
"""The speed between host and device, unless the job says another."""
DDP_MIB = (1, 25)
"""The sizes of DDP's first bucket, and of all others, where ``bucket_cap_mb`` is not given."""
MOST_ON_CPU, SHARE = 16 * MIB, 20
"""The most bytes of a bucket on a CPU, where the rehearsal is, and how many buckets there are elsewhere."""
ON_THEIR_WAY = 2
"""How many buckets of ``replicate`` are on their way at most."""


def plan(job: Job, *, refusals: bool = False, told: Told = lambda done, of, what: None) -> Estimate:
    """Return what training as ``job`` says would need and take.

    Nothing is trained, and no tensor of the model is made. Rates of the machine that ``job`` does not give are
    measured, which takes two seconds.

    Args:
        refusals: whether each option of ``attach`` is tried, too.
        told: is told how many parts of the work are done, of how many, and what is next.

    Raises:
        CannotRunError: something that ``job`` names is not there, or cannot be run without data.
    """
    _require_sensible(job)
    makers = optimizer_makers(job)
    planned = PlannedModel(job)
    return _Planning(job, planned, makers, told).estimate(refusals)


def _require_sensible(job: Job) -> None:
    """Refuse numbers that make no sense, and options that do not go together, before anything is built."""
    sizes = ("world_size", "micro_batches", "bucket_cap_mb", "bucket_bytes")
    rates = ("gbits", "tflops", "terabytes", "forward_ms", "pcie_gbytes")
    for name in (*sizes, *rates):
        if (value := getattr(job, name)) is not None and not value > 0:
            raise CannotRunError(f"--{name.replace('_', '-')} {value}: a number above 0 is needed")
    if job.latency_us is not None and job.latency_us < 0:
        raise CannotRunError(f"--latency-us {job.latency_us}: a number of at least 0 is needed")
    has_ranks, is_off = job.world_size > 1, os.environ.get("INSTEP_DISABLE", "") not in ("", "0")
    wrong = {
        f"--offload {job.offload}: it is host, or left out": job.offload not in (None, "host"),
        "--pcie-gbytes is for --offload host: give both": job.pcie_gbytes is not None and job.offload is None,
        "--bucket-bytes is for one device: buckets of ranks have --bucket-cap-mb": has_ranks and job.bucket_bytes,
        "--micro-batches is for one device: leave it out with --world-size": has_ranks and job.micro_batches > 1,
        "--bucket-cap-mb is for ranks: buckets of one device have --bucket-bytes": not has_ranks and job.bucket_cap_mb,
        "INSTEP_DISABLE is set, with which torch takes every step: unset it to see what attach() would do": is_off,
    }
    for reason, holds in wrong.items():
        if holds:
            raise CannotRunError(reason)


class _Planning:
    """One plan in the making: it collects the numbers, and the assumptions that they rest on."""

    def __init__(self, job: Job, planned: PlannedModel, makers: Mapping[str, MakeOptimizer], told: Told) -> None:
        self._job = job
        self._planned = planned
        self._makers = makers
        self._told = told
        self._trained = {name: p for name, p in planned.model.named_parameters() if p.requires_grad}
        self._assumptions: list[str] = []
        self._first: Measured | None = None  # the plain loop with the first implementation of the optimizer
        self._refused: str | None = None  # the reason, if the optimizer or the model is refused

    def estimate(self, try_all: bool) -> Estimate:
        job, model = self._job, self._planned.model
        make = next(iter(self._makers.values()))
        self._told(0, self._parts, "asking attach()")
        refusals, accepted = ask_attach(self._planned, make, job, every_option=try_all)
        # The default schedule takes every optimizer, so that a refused one has a row for ``forward`` alone.
        self._refused = next((one.reason for one in refusals if one.options.startswith(EVERYTHING)), None)
        name = job.optimizer.rpartition(":")[2]
        if self._refused is None and is_judged(self._planned, make):
            self._assumptions.append(
                f"{name} updates each parameter by itself, as its first updates show, with the memory of plain"
            )
        self._order = order_of_gradients(self._planned)
        peaks = self._peaks()
        plain = self._first
        assert plain is not None
        gradients = gradients_by_dtype(self._trained.values())  # as the optimizer wants them
        share = sum(gradients.values()) // SHARE
        chosen = share if job.world_size == 1 and job.bucket_bytes is None else 0
        if chosen > MOST_ON_CPU:
            self._assumptions.append(
                f"buckets of {size_of(MOST_ON_CPU)}, as on a CPU: a GPU's are of {size_of(share)}, and one more is "
                f"alive (--bucket-bytes {share})"
            )
        buckets = self._buckets(plain)
        self._told(self._parts - 1, self._parts, "computing times")
        machine = machine_of(job, self._assumptions, has_forward=self._planned.runs)
        sizes = Sizes(
            dict(bytes_by_dtype(model.parameters())),
            dict(bytes_by_dtype(model.buffers())),
            dict(gradients),
            dict(sum(plain.state.values(), Counter())),
            plain.activations if self._planned.runs else None,
        )
        found = times(buckets, machine, seconds_of_passes(job, self._planned, machine, self._assumptions))
        return Estimate(
            model=type(model).__name__,
            optimizer=name,
            ranks=job.world_size,
            tensors=len(list(model.parameters())),
            numel=sum(p.numel() for p in model.parameters()),
            sizes=sizes,
            peaks=tuple(peaks),
            buckets=buckets,
            bucket_on_accelerator=chosen,
            times=found,
            measured_here=machine.measured,
            offloaded=self._offloaded(sum(sizes.state.values()), found.backward),
            refusals=refusals,
            accepted=accepted,
            assumptions=tuple(self._assumptions),
        )

    @property
    def _ways(self) -> int:
        """How many ways to train are rehearsed with each implementation of the optimizer."""
        if self._refused is not None:
            return 2
        alone = 5 + (self._job.micro_batches > 1) + 2 * (self._job.offload is not None)
        return alone if self._job.world_size == 1 else 7 + (self._job.offload is not None)

    @property
    def _parts(self) -> int:
        """How many parts the work has: what is asked first, the ways to train, and the times."""
        return 2 + len(self._makers) * self._ways

    def _peaks(self) -> list[PlannedPeak]:
        """Rehearse each way to train with each implementation of the optimizer."""
        found: dict[str, list[PlannedPeak]] = {}
        failed: list[CannotRunError] = []
        for number, (implementation, make) in enumerate(self._makers.items()):
            done = 1 + number * self._ways
            try:
                self._told(done, self._parts, f"rehearsing {implementation}")
                for way, seen in (self._alone if self._job.world_size == 1 else self._among_ranks)(make):
                    done += 1
                    self._told(done, self._parts, f"rehearsing {implementation}")
                    found.setdefault(way, []).append(PlannedPeak(way, implementation, seen.peak, seen.own))
            except CannotRunError as error:
                failed.append(error)
        if not found:
            raise failed[0] if self._refused is None else CannotRunError(f"instep refuses it: {self._refused}")
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
        transient = run.attached(int((self._job.bucket_cap_mb or DDP_MIB[1]) * MIB))
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
        # ``replicate`` keeps no bucket: at most ON_THEIR_WAY of them are on their way, the largest ones at worst.
        in_flight = sorted((sum(p.nbytes for p in bucket) for bucket in ddp), reverse=True)[:ON_THEIR_WAY]
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
        return sum(sum(seen.state.get(name, {}).values()) for name in names)

    def _named(self, buckets: Sequence[Sequence[torch.Tensor]]) -> list[list[str]]:
        names = {id(p): name for name, p in self._trained.items()}
        return [[names[id(p)] for p in bucket] for bucket in buckets]

    def _offloaded(self, state: int, backward: float | None) -> Offloaded | None:
        if self._job.offload is None:
            return None
        speed = self._job.pcie_gbytes or PCIE_GBYTES
        if self._job.pcie_gbytes is None:
            self._assumptions.append(f"{speed:g} GB/s between host and device, in each direction (--pcie-gbytes)")
        # To the device and back at the same time, beside backward, which hides as much as it lasts.
        seconds = state / (speed * 1e9)
        return Offloaded(state, seconds, None if backward is None else max(0.0, seconds - backward))

    def _ddp_buckets(self) -> list[list[torch.Tensor]]:
        """Return DDP's buckets as they are after its first backward, which puts them in the order of arrival."""
        parameters: list[torch.Tensor] = [self._trained[name] for name in self._order]
        modules = [module for module in self._planned.model.modules() if getattr(module, "sparse", False)]
        rows = {id(p) for module in modules for p in module.parameters(recurse=False)}
        # As DDP itself asks for them (``torch/nn/parallel/distributed.py``). It has no public name.
        given = self._job.bucket_cap_mb
        sizes = [int(mib * MIB) for mib in (DDP_MIB if given is None else [given])]
        sparse, order = [id(p) in rows for p in parameters], list(range(len(parameters)))
        found, _ = dist._compute_bucket_assignment_by_size(parameters, sizes, sparse, order)
        return [[parameters[number] for number in bucket] for bucket in found]

    def _step_buckets(self) -> list[list[torch.Tensor]]:
        """Return the buckets of ``schedule="forward"``: in the order in which the model has its parameters."""
        model, bucket_bytes = self._planned.model, self._job.bucket_bytes
        with self._planned.fakes():
            optimizer = next(iter(self._makers.values()))(self._trained.values())
            with attach(model, optimizer, schedule="forward", bucket_bytes=bucket_bytes) as overlap:
                buckets = overlap.plan.buckets
        return [[self._trained[spec.name] for spec in bucket.parameters] for bucket in buckets]

    def _buckets(self, plain: Measured) -> tuple[PlannedBucket, ...]:
        """Return the buckets in which backward completes gradients."""
        if self._job.world_size > 1:
            buckets = list(map(tuple, self._named(self._ddp_buckets())))
        else:
            buckets = list(plain.buckets) or [tuple(self._order)]  # refused: the optimizer steps all at once
        made = []
        for bucket in buckets:
            nbytes = sum(gradients_by_dtype(self._trained[name] for name in bucket).values())
            made.append(PlannedBucket(nbytes, bucket, 3 * nbytes + 2 * self._state_of(plain, bucket)))
        return tuple(made)
