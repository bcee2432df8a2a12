"""What a plan says is what happens."""

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import plan_against_measured
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

import instep
from instep_tools.harness import LiveBytes
from instep_tools.output import CannotRunError, size_of
from instep_tools.planning.job import EVERYTHING, Job, PlannedBucket
from instep_tools.planning.model import PlannedModel, optimizer_makers
from instep_tools.planning.plan import plan
from instep_tools.planning.rehearse import DryRun, LiveInside, order_of_gradients
from instep_tools.planning.show import verdict
from instep_tools.planning.times import Machine, measured_flops, measured_memory_bytes, times
from tests import net
from tests.judged import own_steps_are_judged
from tests.planning import models

HERE = "tests.planning.models"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RATES: dict[str, Any] = {"gbits": 1.0, "latency_us": 1.0, "tflops": 1.0, "terabytes": 1.0}
MOST = 0.10
"""How far a planned peak may be from the measured one, of the latter."""


@pytest.mark.filterwarnings("ignore:.*does not support.*:UserWarning")
@pytest.mark.parametrize("name", ["convnet", "embedding"])
def test_peaks_are_those_of_the_allocator(name: str) -> None:
    rows = list(plan_against_measured.compare(name, 32))
    assert {row.way for row in rows} == set(plan_against_measured.WAYS)
    assert {row.implementation for row in rows} == {"foreach" if torch.cuda.is_available() else "for-loop", "fused"}
    for row in rows:
        assert max(map(abs, row.errors)) < MOST, row


def test_the_peak_of_micro_batches_is_that_of_the_allocator() -> None:
    """Of a model whose head is its embedding."""
    rows = list(plan_against_measured.compare("llama, 8 micro-batches", 128))
    assert {row.way for row in rows} == set(plan_against_measured.OF_MICRO_BATCHES)
    for row in rows:
        assert max(map(abs, row.errors)) < MOST, row


def test_what_a_convolution_takes_inside() -> None:
    def train(begin: Callable[[], object] = lambda: None) -> None:
        convolution, x = nn.Conv2d(64, 64, 3, padding=1), torch.ones(8, 64, 16, 16, requires_grad=True)
        begin()
        with record_function(plan_against_measured.COUNT):
            y = convolution(x)
            y.backward(torch.ones_like(y))

    with plan_against_measured.recorded() as most:
        train()
    with LiveInside() as live:
        train(live.reset)
    with LiveBytes() as tensors:
        train(tensors.reset)
    assert live.peak == pytest.approx(most[0], rel=0.05)
    assert tensors.peak < 0.8 * most[0]


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(plan_against_measured.KINDS))
def test_peaks_of_larger_models(name: str) -> None:
    for row in plan_against_measured.compare(name, 128):
        assert max(map(abs, row.errors)) < MOST, row


@pytest.mark.nightly
@pytest.mark.timeout(2 * net.SECONDS)
def test_peaks_of_two_ranks() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gradient_memory.py")],
        capture_output=True,
        text=True,
        timeout=net.SECONDS,
        check=True,
    )
    measured = {name: float(mib) for name, mib in re.findall(r"^\| (.+?) \| ([\d.]+) \|", done.stdout, re.MULTILINE)}
    attached = ' with `attach(…, schedule="backward")`'
    for view in (False, True):
        job = Job(
            f"{HERE}:benchmarked", inputs=f"{HERE}:tokens", loss=f"{HERE}:cross_entropy", options=("fused=True",),
            world_size=2, bucket_cap_mb=4, bucket_view=view,
        )  # fmt: skip
        planned = {peak.way: peak.above / (1 << 20) for peak in plan(job).peaks}
        if view:
            ddp = "`DistributedDataParallel(model, gradient_as_bucket_view=True)`"
            assert planned["backward"] == pytest.approx(measured[f"that one{attached}"], rel=MOST)
        else:
            ddp = "`DistributedDataParallel(model)`"
        assert planned["plain"] == pytest.approx(measured[ddp], rel=MOST)
        # At worst: with two buckets of 4 MiB on their way. Whether the second one is, where memory peaks, is up to the
        # link.
        most, found = planned["backward, replicate"], measured[f"`replicate(model)`{attached}"]
        assert (1 - MOST) * (most - 4) <= found <= (1 + MOST) * most


def trained(build: Callable[[], nn.Module], optimizer: str, options: tuple[str, ...]) -> torch.optim.Optimizer:
    """With data, for a step."""
    model = build()
    made = next(iter(optimizer_makers(Job("", optimizer, options)).values()))(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    made.step()
    return made


@pytest.mark.parametrize(
    ("build", "optimizer", "options"),
    [
        ("layers", "SGD", ()),
        ("layers", "SGD", ("momentum=0.9",)),
        ("layers", "AdamW", ("amsgrad=True",)),
        ("halves", "AdamW", ()),
        ("layers", "Adafactor", ()),
        ("layers", "Rprop", ()),
        ("layers", "Adagrad", ()),
        ("matrices", "Muon", ()),
        ("layers", f"{HERE}:CountsInItsGroup", ()),
        ("layers", "schedulefree:AdamWScheduleFree", ()),
        ("layers", "optimi:AdamW", ("lr=0.1",)),
    ],
)
def test_state_is_that_of_the_optimizer_itself(build: str, optimizer: str, options: tuple[str, ...]) -> None:
    real = trained(getattr(models, build), optimizer, options)
    expected: dict[str, int] = {}
    for entry in real.state.values():
        for value in entry.values():
            if isinstance(value, torch.Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                expected[dtype] = expected.get(dtype, 0) + value.nbytes
    job = Job(f"{HERE}:{build}", optimizer, options)
    seen = DryRun(PlannedModel(job), next(iter(optimizer_makers(job).values()))).plain()
    found: dict[str, int] = {}
    for one in seen.state.values():
        for dtype, size in one.items():
            found[dtype] = found.get(dtype, 0) + size
    assert found == expected


def test_buckets_of_one_device_are_those_of_attach() -> None:
    torch.manual_seed(0)
    model = models.layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with instep.attach(model, optimizer, bucket_bytes=100, schedule="backward") as overlap:
        for _ in range(2):
            model(models.rows()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        real = [tuple(p.name for p in bucket.parameters) for bucket in overlap.plan.buckets]
    planned = plan(Job(f"{HERE}:layers_and_rows", bucket_bytes=100))
    assert len(real) > 2
    assert [bucket.parameters for bucket in planned.buckets] == real
    assert [bucket.nbytes for bucket in planned.buckets] == [
        sum(dict(model.named_parameters())[name].nbytes for name in names) for names in real
    ]


def test_buckets_of_ranks_are_those_of_torch() -> None:
    job = Job(f"{HERE}:layers", world_size=2, bucket_cap_mb=0.0002)
    planned = plan(job).buckets
    model = models.layers()
    order = order_of_gradients(PlannedModel(job))
    arrived: list[torch.Tensor] = [dict(model.named_parameters())[name] for name in order]
    cap = int(0.0002 * 1024 * 1024)
    theirs, _ = dist._compute_bucket_assignment_by_size(arrived, [cap, cap], [False] * len(arrived))
    assert len(theirs) > 2
    assert [bucket.parameters for bucket in planned] == [tuple(order[i] for i in bucket) for bucket in theirs]


def test_what_attach_refuses_is_found_by_asking_it() -> None:
    found = plan(Job(f"{HERE}:layers"), refusals=True)
    reasons = {refusal.options: refusal.reason for refusal in found.refusals}
    model = models.layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(instep.errors.AttachError) as refused:
        instep.attach(model, optimizer, clip=instep.ClipNorm(1.0), schedule="backward")
    assert reasons["clip=ClipNorm(1.0) with schedule='backward'"] == str(refused.value)
    assert "clip=ClipNorm(1.0), undo=True" in found.accepted
    assert "a model that has no DistributedDataParallel" in reasons["shard_state=True"]


@pytest.mark.parametrize("view", [False, True])
def test_what_it_refuses_on_several_ranks(view: bool) -> None:
    found = plan(Job(f"{HERE}:layers", world_size=2, bucket_view=view), refusals=True)
    options = {refusal.options: refusal.reason for refusal in found.refusals}
    assert "makes buckets of its own" in options["bucket_bytes=1048576"]
    assert "shard_state=True, schedule='forward'" in found.accepted


def test_an_optimizer_that_wraps_another_is_refused_with_everything() -> None:
    found = plan(Job(f"{HERE}:layers", f"{HERE}:Wraps", ("lr=0.1",)))
    first = found.refusals[0]
    assert first.options == f"{EVERYTHING} with schedule='backward', undo=True"
    assert "holds another optimizer" in first.reason
    assert [peak.way for peak in found.peaks] == ["plain", "forward"]
    with pytest.raises(CannotRunError, match="instep refuses it: LBFGS"):
        plan(Job(f"{HERE}:layers", "LBFGS"))


@pytest.mark.parametrize("optimizer", ["AdamW", f"{HERE}:CountsInItsGroup"])
def test_what_is_judged_has_all_rows_and_an_assumption(optimizer: str) -> None:
    with own_steps_are_judged():
        found = plan(Job(f"{HERE}:layers_and_rows", optimizer, micro_batches=2, **RATES))
    ways = ("plain", "backward", "backward, micro_batches", "forward", "backward, undo", "backward, two_pass")
    assert tuple(dict.fromkeys(peak.way for peak in found.peaks)) == ways
    assert not [one for one in found.assumptions if one.startswith("left out")]
    judged = [one for one in found.assumptions if one.startswith("CountsInItsGroup updates each parameter by itself")]
    assert len(judged) == (optimizer != "AdamW")


def test_what_is_known_of_memory_by_hand() -> None:
    found = plan(Job(f"{HERE}:tied_on_meta", "AdamW", ("fused=True",)))
    gradients = 4 * (50 * 8 + 50)
    assert found.sizes.gradients == {"float32": gradients}
    assert (found.tensors, found.numel) == (2, 450), "tied weights are one"
    assert found.sizes.state == {"float32": 2 * gradients + 2 * 4}
    assert found.sizes.activations is None
    peaks = {peak.way: peak.above for peak in found.peaks}
    small = 64  # the loss and the like
    for way in ("plain", "backward", "forward"):
        assert gradients <= peaks[way] < gradients + small
    assert peaks["backward, undo"] >= 4 * gradients


def test_permanent_buckets() -> None:
    gradients = sum(p.nbytes for p in models.matrices().parameters())
    above = {}
    for view in (False, True):
        found = plan(Job(f"{HERE}:matrices", options=("fused=True",), world_size=4, bucket_view=view))
        above[view] = {peak.way: peak.above for peak in found.peaks}
        states = {peak.way: peak.own for peak in found.peaks}
        state = sum(found.sizes.state.values())
        assert states["plain"] - states["backward, shard_state"] == state - -(-state // 4)
    assert above[False]["plain"] >= 2 * gradients
    assert gradients <= above[True]["plain"] < 2 * gradients
    assert above[True]["backward"] >= gradients, "DDP's buckets stay"


def test_times() -> None:
    buckets = [PlannedBucket(1_000_000, ("a",), 7_000_000), PlannedBucket(3_000_000, ("b",), 21_000_000)]
    machine = Machine(ranks=8, flops=1e12, memory_bytes=1e9, link_bytes=1e8, latency=1e-5)
    found = times(buckets, machine, (0.004, 0.008))
    assert found.algorithm == "ring"
    assert found.communication == pytest.approx(2 * 7 / 8 * 4e6 / 1e8 + 2 * 2 * 7 * 1e-5)
    assert (found.step, found.backward) == pytest.approx((0.028, 0.008))
    by_schedule = {one.schedule: one for one in found.schedules}
    assert by_schedule["plain"].exposed == pytest.approx(0.028)
    assert by_schedule["backward"].exposed < 0.028
    assert by_schedule["forward"].iteration == by_schedule["plain"].iteration
    alone = times(buckets, Machine(1, 1e12, 1e9, 1e8, 1e-5), None)
    assert (alone.schedules, alone.communication) == ((), 0.0)


def test_operations_of_the_forward_become_its_time() -> None:
    found = plan(Job(f"{HERE}:layers_and_rows", loss=f"{HERE}:squared", tflops=1e-6))
    operations = 2 * 3 * (8 * 16 + 16 * 16 + 16 * 4)
    assert found.times.forward == pytest.approx(operations / 1e6)
    first = 2 * 3 * 8 * 16  # whose inputs need no gradient
    assert found.times.backward == pytest.approx((2 * operations - first) / 1e6)
    assert not any("loss" in one for one in found.assumptions)
    assert plan(Job(f"{HERE}:layers", forward_ms=5)).times.forward == 0.005


def test_buckets_are_those_of_a_cpu() -> None:
    """Where a GPU's are larger, the plan says so, and how to ask for them."""
    large = Job(f"{HERE}:large_on_meta", **RATES)
    (said,) = (one for one in plan(large).assumptions if one.startswith("buckets of 16"))
    size = 24 * 2048 * 2048 * 4 // 20
    assert said.endswith(f"(--bucket-bytes {size})")
    assert not [one for one in plan(replace(large, bucket_bytes=size)).assumptions if one.startswith("buckets of")]
    assert not [one for one in plan(Job(f"{HERE}:layers")).assumptions if one.startswith("buckets of")]


def test_attention_and_what_is_computed_again_take_their_time() -> None:
    first, second = (
        plan(Job(f"{HERE}:{name}", tflops=1e-6)).times for name in ("attending", "attending_and_checkpointed")
    )
    linear, attention = 2 * 32 * 16 * 48, 2 * 2 * 2 * 32 * 32 * 8
    assert first.forward == second.forward == pytest.approx((linear + attention) / 1e6)
    assert first.backward is not None
    assert first.backward > (linear + 2 * attention) / 1e6
    assert second.backward == pytest.approx(first.backward + (linear + attention) / 1e6)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="from torch 2.10 on")
def test_gradients_that_an_optimizer_wants_in_another_dtype() -> None:
    found = plan(Job(f"{HERE}:halves", f"{HERE}:wide_masters", **RATES))
    size = sum(p.numel() for p in models.halves().parameters())
    assert found.sizes.gradients == {"float32": 4 * size}
    assert found.sizes.parameters == {"bfloat16": 2 * size}
    assert sum(bucket.nbytes for bucket in found.buckets) == 4 * size


def test_the_verdict_says_which_card_it_takes() -> None:
    """Weights, gradients and state of a billion numbers are 16 GB; without gradients 12, and two buckets of 0.2."""
    found = plan(Job(f"{HERE}:a_billion_on_meta", options=("fused=True",), **RATES))
    (said,) = (one for one in verdict(found) if "card" in one)
    assert said == 'The smallest card: 24 GB plain, 16 GB with schedule="backward"'
    given = plan(Job(f"{HERE}:a_billion_on_meta", options=("fused=True",), bucket_bytes=1, **RATES))
    assert (found.bucket_on_accelerator, given.bucket_on_accelerator) == (2 * 10**8, 0)
    (said,) = (one for one in verdict(plan(Job(f"{HERE}:a_billion_on_meta", **RATES))) if "card" in one)
    assert said == 'The smallest card, with fused=True: 24 GB plain, 16 GB with schedule="backward"'
    peaks = [replace(peak, total=peak.total + 68 * 10**9) for peak in found.peaks]
    (said,) = (one for one in verdict(replace(found, peaks=tuple(peaks))) if "card" in one)
    assert said == 'The smallest card: more than 80 GB plain, more than 80 GB with schedule="backward"'
    assert not [one for one in verdict(plan(Job(f"{HERE}:layers", **RATES))) if "card" in one]


def test_the_verdict_of_a_model_whose_peak_is_gradients() -> None:
    said = list(verdict(plan(Job(f"{HERE}:deep", terabytes=1.0, bucket_bytes=1))))
    assert 'schedule="backward" would save' in said[0]
    assert said[-2] == 'Take instep.attach(model, optimizer, schedule="backward")'


def test_the_verdict_says_what_a_loop_takes_that_clips() -> None:
    """Two backwards keep the graph for longer: they save less, and no more than what was counted."""
    found = plan(Job(f"{HERE}:deep", inputs=f"{HERE}:eights", **RATES, bucket_bytes=512))
    *_, said = verdict(found)
    peaks = {peak.way: peak.total for peak in found.peaks if peak.implementation == found.peaks[0].implementation}
    assert peaks["backward"] <= peaks["backward, two_pass"] < peaks["plain"]
    assert said.startswith(
        "A loop that clips by the norm of all gradients takes instep.attach(model, optimizer), which"
    )
    assert f"which saves {size_of(peaks['plain'] - peaks['backward, two_pass'])} for a second backward (" in said


def test_micro_batches_are_what_a_loop_takes() -> None:
    """Counted in a loop that trains: forwards run on other threads, where tensors are counted all the same."""
    job = Job(f"{HERE}:deep", options=("fused=True",), inputs=f"{HERE}:eights", bucket_bytes=512, micro_batches=2)
    predicted = {peak.way: peak.above for peak in plan(job).peaks}
    model = models.deep()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=512) as overlap:
        for step in range(3):
            state = [value for entry in optimizer.state.values() for value in entry.values()]
            with LiveBytes([*model.parameters(), *state]) if step == 2 else nullcontext() as live:
                overlap.micro_batches(lambda _: model(models.eights()).sum(), range(2))
                optimizer.step()
                optimizer.zero_grad()
    assert live is not None
    assert predicted["backward, micro_batches"] == pytest.approx(live.peak, rel=MOST)
    assert predicted["backward, micro_batches"] < 0.7 * predicted["backward"]
    assert predicted["backward"] == pytest.approx(predicted["plain"], rel=MOST)


def test_the_verdict_names_micro_batches() -> None:
    job = Job(f"{HERE}:deep", inputs=f"{HERE}:eights", bucket_bytes=512, micro_batches=2, **RATES)
    said = list(verdict(plan(job)))
    assert said[0].startswith("5.00 KiB of gradients. overlap.micro_batches() with")
    assert said[-2].endswith(
        'schedule="backward"), and overlap.micro_batches() in place of the loop over micro-batches'
    )


def test_the_verdict_on_ranks_names_replicate() -> None:
    said = list(verdict(plan(Job(f"{HERE}:deep", world_size=2, terabytes=1.0, bucket_cap_mb=0.0002))))
    assert said[-1] == 'Take model = instep.replicate(model), and instep.attach(model, optimizer, schedule="backward")'


def test_the_verdict_where_little_is_saved() -> None:
    said = list(verdict(plan(Job(f"{HERE}:layers", terabytes=1.0, bucket_bytes=1 << 30))))
    assert "nothing would be saved" in said[0]
    assert said[-1].startswith("Take nothing for memory. instep.attach(model, optimizer) takes any loop")


def test_the_verdict_where_backward_is_refused() -> None:
    said = list(verdict(plan(Job(f"{HERE}:layers", f"{HERE}:Wraps", ("lr=0.1",), terabytes=1.0))))
    assert said[-1].startswith("Take instep.attach(model, optimizer). schedule='backward' is refused: ")
    assert "holds another optimizer" in said[-1]


def test_rates_of_this_machine_are_sensible() -> None:
    assert 1e8 < measured_flops() < 1e16
    assert 1e7 < measured_memory_bytes() < 1e14
