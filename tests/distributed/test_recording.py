"""Recordings of two ranks: one file, with what was on its way."""

import os
from collections import Counter
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import instep
from instep_tools.report.figures import figures
from instep_tools.report.page import page
from instep_tools.report.run import Rank, Run, load
from instep_tools.report.spans import Span
from tests.cases import Blocks
from tests.distributed.pipelines import V_SHAPED, Kind, Loop, needs_schedules
from tests.distributed.pool import RankPool

BUCKETS = 4  # about
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "zero": {"schedule": "backward", "shard_state": True},
}


def body(how: str, wrapper: str, path: Path) -> None:
    torch.manual_seed(0)
    model: Any = Blocks(width=64)
    if wrapper == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        nbytes = sum(p.numel() * 4 for p in model.parameters())
        model = DistributedDataParallel(model, bucket_cap_mb=nbytes / BUCKETS / 2**20, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    overlap = None if how == "plain" else instep.attach(model, optimizer, **HOW[how])

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(torch.ones(2, dtype=torch.int64))  # the loop's own, of how many samples there were

    train(3)
    with instep.record(model, optimizer, 3) as recording:
        train(4)
    recording.save(path)
    if overlap is not None:
        overlap.synchronize()
        overlap.detach()


def recorded(pool: RankPool, how: str, wrapper: str, path: Path) -> Run:
    pool.run(body, how, wrapper, path)
    return load(path)


@pytest.mark.parametrize("how", HOW)
def test_ddp(two_ranks: RankPool, how: str, tmp_path: Path) -> None:
    run = recorded(two_ranks, how, "ddp", tmp_path / "run.json")
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert (run.setup.ranks, run.setup.wrapper) == (2, "DistributedDataParallel")
    assert run.ranks[0].gradient_bytes >= run.setup.nbytes["gradients"], "DDP's buckets"
    for rank in run.ranks:
        assert len(rank.iterations) == 3
        sent = [span for span in rank.spans if span.kind == "communication"]
        assert {span.thread for span in sent}.isdisjoint({rank.main})
        # Nor votes, and the loop's own integers: some bytes.
        if how != "zero":
            assert len(sent) >= 3 * (BUCKETS - 1)
            assert all("all_reduce" in span.name for span in sent), sorted({span.name for span in sent})
            assert all(float(span.name.split()[1]) > 1 for span in sent)
    first, second = (rank.iterations[0][0] for rank in run.ranks)
    assert abs(first - second) < 20, "on one clock"
    found = figures(run)
    assert 0 <= found.communication.exposed <= found.communication.total
    assert found.communication.total > 0
    assert len(found.by_rank) == 2
    if how == "backward":
        spans = {kind: {s.parameters for s in run.ranks[0].spans if s.kind == kind} for kind in ("flight", "step")}
        assert all(len(buckets) >= BUCKETS - 1 for buckets in spans.values())


def slow_gathers() -> tuple[int, list[bool]]:
    """The number of gathers of a recorded loop that is put off, and which had arrived when the profiler stopped."""
    from instep._step import deferred
    from instep_tools.recording import recording

    futures: list[torch.futures.Future[Any]] = []
    arrived: list[bool] = []

    class Slow:
        def __init__(self, work: Any) -> None:
            self.future: torch.futures.Future[Any] = torch.futures.Future()
            Timer(0.2, lambda: self.future.set_result(work.wait())).start()
            futures.append(self.future)

        def wait(self) -> None:
            self.future.wait()

    class Watched(torch.profiler.profile):
        def stop(self) -> None:
            arrived.extend(future.done() for future in futures)
            super().stop()

    with pytest.MonkeyPatch.context() as patch:
        real = dist.all_gather
        patch.setattr(dist, "all_gather", lambda *args, **options: Slow(real(*args, **options)))
        patch.setattr(deferred, "which_cannot_wait", lambda *_, **__: set())
        patch.setattr(recording, "profile", Watched)
        torch.manual_seed(0)
        model = DistributedDataParallel(Blocks(), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with instep.attach(model, optimizer, shard_state=True) as overlap, overlap.record(steps=2):
            for _ in range(3):
                model(torch.randn(8, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return len(futures), arrived


def test_a_recording_ends_when_nothing_communicates(two_ranks: RankPool) -> None:
    """gloo writes down that a collective has ended, in memory that the profiler frees when it stops."""
    for count, arrived in two_ranks.run(slow_gathers):
        assert 0 < len(arrived) < count
        assert all(arrived)


def profiled_votes() -> tuple[int, list[str]]:
    """The number of votes in a profile of torch's, and the collectives that it has."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    overlap = instep.attach(model, optimizer, schedule="backward")
    before = overlap.stats()["votes"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in range(3):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [str(event.input_shapes) for event in profile.events() if event.name.startswith("gloo:")]
    votes = int(overlap.stats()["votes"] - before)
    overlap.detach()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(6))
    assert [event.name for event in profile.events() if "gloo" in event.name] == ["gloo:all_reduce"], "as before"
    return votes, found


def test_a_profiler_does_not_see_votes(two_ranks: RankPool) -> None:
    """A vote is under way when the step has returned, and a profiler that stops then would crash."""
    for votes, found in two_ranks.run(profiled_votes):
        assert votes == 3
        assert found, "the gradients"
        assert "[[6]]" not in found


def test_a_sharded_model(two_ranks: RankPool, tmp_path: Path) -> None:
    run = recorded(two_ranks, "backward", "fsdp", tmp_path / "run.json")
    assert run.setup.wrapper == "DTensor"
    found = figures(run)
    assert found.communication.total > 0
    assert found.step.total > 0
    kinds = {span.name.split(",")[0] for span in run.ranks[1].spans if span.kind == "communication"}
    assert kinds == {"all_gather", "all_reduce"}, "gloo scatters by reducing all"


def test_a_job_is_the_same_in_any_wrapper(two_ranks: RankPool, tmp_path: Path) -> None:
    ddp, fsdp = (
        recorded(two_ranks, "plain", wrapper, tmp_path / f"{wrapper}.json").setup for wrapper in ("ddp", "fsdp")
    )
    assert (ddp.model, ddp.ranks, ddp.batch, ddp.count) == (fsdp.model, fsdp.ranks, fsdp.batch, fsdp.count)
    assert (ddp.model, ddp.ranks, ddp.batch) == ("Blocks", 2, ["(8, 16) float32"])


# Pipelines, in which a run has many forwards and backwards, and all of them are one iteration.

PIPELINES = [
    Kind("Schedule1F1B"),
    Kind("ScheduleInterleaved1F1B", per_rank=2),
    Kind("ScheduleZBVZeroBubble", per_rank=2),
]
by_pipeline = pytest.mark.parametrize("kind", PIPELINES, ids=lambda kind: kind.schedule)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "disabled": {"schedule": "backward"},
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "forward": {"schedule": "forward", "defer": True},
}


def pipeline(kind: Kind, how: str, path: Path) -> None:
    loop = Loop(kind)
    models: Any = loop.models if len(loop.models) > 1 else loop.models[0]
    if how == "disabled":
        os.environ["INSTEP_DISABLE"] = "1"
    try:
        if how != "plain":
            loop.overlap = instep.attach(models, loop.optimizers, pipeline=loop.pipeline, **WAYS[how])
    finally:
        os.environ.pop("INSTEP_DISABLE", None)

    def train(steps: range) -> None:
        for i in steps:
            loop.run(i)
            loop.step()

    train(range(2))
    if how == "backward":
        recording = loop.overlap.record(steps=3)
    else:
        recording = instep.record(models, loop.optimizers, 3, pipeline=None if loop.overlap else loop.pipeline)
    with recording:
        train(range(2, 6))
    recording.save(path)
    if loop.overlap is not None:
        loop.overlap.synchronize()
        loop.overlap.detach()
    watched = [loop.pipeline, *getattr(loop.pipeline, "_stages", [getattr(loop.pipeline, "_stage", None)])]
    assert not any(name == "step" or name.endswith("_one_chunk") for one in watched for name in vars(one))


def piped(pool: RankPool, kind: Kind, how: str, path: Path) -> Run:
    pool.run(pipeline, kind, how, path)
    return load(path)


def inside(rank: Rank, window: tuple[float, float], *kinds: str) -> list[Span]:
    return [span for span in rank.spans if span.kind in kinds and window[0] <= span.start < window[1]]


def stages_of(kind: Kind, rank: int) -> list[int]:
    if kind.schedule in V_SHAPED:
        return [rank, kind.count - 1 - rank]
    return list(range(rank, kind.count, kind.ranks))


def require_micro_batches(kind: Kind, rank: Rank, window: tuple[float, float]) -> None:
    """Each goes through each stage of the rank once, forward and then backward."""
    of_stage: dict[int | None, list[Span]] = {stage: [] for stage in rank.stages}
    for one in inside(rank, window, "forward", "backward"):
        of_stage[one.stage].append(one)
    for stage, spans in of_stage.items():
        losses = [one for one in spans if one.name == "loss"]
        assert len(losses) == (kind.micro_batches if stage == kind.count - 1 else 0)
        for number in range(kind.micro_batches):
            name = f"micro-batch {number}"
            said = [(one.kind, one.name) for one in spans if one.name.endswith(name)]
            if kind.schedule in V_SHAPED:
                parts = [("backward", f"inputs, {name}"), ("backward", f"weights, {name}")]
                assert said in ([("forward", name), *parts], [("forward", name), ("backward", name)])
            else:
                assert said == [("forward", name), ("backward", name)]


@needs_schedules
@by_pipeline
@pytest.mark.parametrize("how", WAYS)
def test_an_iteration_of_a_pipeline_has_all_its_micro_batches(
    two_ranks: RankPool, kind: Kind, how: str, tmp_path: Path
) -> None:
    run = piped(two_ranks, kind, how, tmp_path / "run.json")
    for number, rank in enumerate(run.ranks):
        assert list(rank.stages) == stages_of(kind, number)
        assert len(rank.iterations) == 3
        for window in rank.iterations:
            assert Counter(s.stage for s in inside(rank, window, "forward", "backward")).keys() == set(rank.stages)
            require_micro_batches(kind, rank, window)


@needs_schedules
@by_pipeline
@pytest.mark.parametrize("how", ["backward", "undo"])
def test_each_stage_is_stepped_in_the_run(two_ranks: RankPool, kind: Kind, how: str, tmp_path: Path) -> None:
    run = piped(two_ranks, kind, how, tmp_path / "run.json")
    for rank in run.ranks:
        for window in rank.iterations:
            steps = [span for span in inside(rank, window, "step") if span.parameters]
            assert sorted(span.stage or 0 for span in steps) == sorted(rank.stages), "a bucket of each"
            for step in steps:
                mine = [one for one in inside(rank, window, "backward") if one.stage == step.stage]
                assert step.start >= max(one.end for one in mine)


@needs_schedules
@by_pipeline
def test_plain_and_attached_are_on_one_page(two_ranks: RankPool, kind: Kind, tmp_path: Path) -> None:
    runs = [piped(two_ranks, kind, how, tmp_path / f"{how}.json") for how in WAYS]
    assert [run.setup.label for run in runs[:2]] == ["plain", "plain"]
    whole = sum(p.numel() for m in stages_alone(kind) for p in m.parameters() if p.requires_grad)
    assert {(run.setup.model, run.setup.count) for run in runs} == {("Stage", whole)}
    text = page(runs)
    for stage in range(kind.count):
        assert f"<span>stage {stage}</span>" in text
        assert f"forward, stage {stage}, micro-batch 0: " in text
        assert f"step, stage {stage}, " in text


def stages_alone(kind: Kind) -> list[torch.nn.Module]:
    from tests.distributed.pipelines import CLASSES, WIDTH, Stage

    return [Stage(CLASSES if number == kind.count - 1 else WIDTH) for number in range(kind.count)]


def several_runs(path: Path) -> None:
    loop = Loop(PIPELINES[1])
    overlap = instep.attach(loop.models, loop.optimizers, pipeline=loop.pipeline, schedule="backward")
    with overlap.record(steps=2) as recording:
        for i in range(3):
            with overlap.accumulate():
                loop.run(2 * i)
            loop.run(2 * i + 1)
            loop.step()
    recording.save(path)
    overlap.detach()


@needs_schedules
def test_several_runs_of_a_step_are_one_iteration(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(several_runs, tmp_path / "run.json")
    for rank in load(tmp_path / "run.json").ranks:
        assert len(rank.iterations) == 2
        steps = [span for span in rank.spans if span.kind == "step" and span.parameters]
        assert len(steps) == 2 * len(rank.stages)


def detached_within() -> None:
    """The hooks of the recording stand around those of the attachment, which go first, and come again in the end."""
    loop = Loop(PIPELINES[2])
    for again in (False, True):
        overlap = instep.attach(loop.models, loop.optimizers, pipeline=loop.pipeline, schedule="backward")
        with overlap.record(steps=3) as recording:
            loop.run(0)
            loop.step()
            overlap.detach()
            if again:
                overlap = instep.attach(loop.models, loop.optimizers, pipeline=loop.pipeline, schedule="backward")
            loop.run(1)
            loop.step()
        loop.run(2)
        if again:
            assert overlap.state == "open", "stepped in the run"
            loop.step()
            overlap.detach()
        run = recording.run()
        assert run is None or [len(rank.iterations) for rank in run.ranks] == [2, 2]
    assert "step" not in vars(loop.pipeline)


@needs_schedules
def test_an_attachment_may_end_and_begin_while_it_is_recorded(two_ranks: RankPool) -> None:
    two_ranks.run(detached_within)


def refused() -> None:
    loop = Loop(PIPELINES[1])
    with pytest.raises(instep.errors.InstepError, match="give its schedule as pipeline="):
        instep.record(loop.models, loop.optimizers)
    with pytest.raises(instep.errors.AttachError, match="pipeline must be a schedule"):
        instep.record(loop.models, loop.optimizers, pipeline=loop.models)  # type: ignore[arg-type]


@needs_schedules
def test_stages_without_their_schedule_are_refused(two_ranks: RankPool) -> None:
    two_ranks.run(refused)
