"""Recordings of real loops on one device: what they hold, and that training is none the wiser."""

import gc
import itertools
import json
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._step.beside_backward import MOST
from instep_tools.harness import first_difference, training_state
from instep_tools.report.figures import figures
from instep_tools.report.run import Run, load
from tests.inside import trial_of
from tests.report.loops import DEPTH, HOW, LAYER, ROWS, WIDTH, made, train

pytestmark = pytest.mark.filterwarnings("ignore:Profiler clears events")


def recorded(how: str, path: Path, steps: int = 3) -> Run:
    """Of a trained model, four steps, of which so many are recorded."""
    model, optimizer = made(how)
    train(model, optimizer, 2)
    with instep.record(model, optimizer, steps) as recording:
        train(model, optimizer, 4)
    recording.save(path)
    found = instep.attached(model)
    if found is not None:
        assert found.recorder is None, "nobody listens any more"
        found.detach()
    return load(path)


@pytest.mark.parametrize("how", HOW)
def test_a_loop(how: str, tmp_path: Path) -> None:
    run = recorded(how, tmp_path / "run.json")
    rank, found = run.ranks[0], figures(run)
    assert len(rank.iterations) == 3
    assert run.setup.nbytes["parameters"] == run.setup.nbytes["gradients"] == DEPTH * LAYER
    assert DEPTH * LAYER * 2 <= run.setup.nbytes["optimizer state"] < DEPTH * LAYER * 2 + 1000
    defer = ", defer=True" if how == "forward" else ""
    assert run.setup.label == ("plain" if how == "plain" else f"instep, schedule={how!r}{defer}, bucket_bytes={LAYER}")
    assert found.forward > 0
    assert found.backward > 0
    assert found.step.total > 0
    assert found.communication.total == 0
    of_kind = {kind: [s for s in rank.spans if s.kind == kind] for kind in ("forward", "backward", "step")}
    for start, end in rank.iterations:
        (backward,) = (s for s in of_kind["backward"] if start <= s.start < end)
        (forward,) = (s for s in of_kind["forward"] if start <= s.start < end)
        assert start <= forward.start < forward.end <= backward.start < backward.end <= end
        stepped = [s for s in of_kind["step"] if backward.start < s.start < backward.end and s.parameters]
        assert len(stepped) == (DEPTH if how == "backward" else 0)
    if how == "forward":
        workers = {s.thread for s in of_kind["step"] if s.parameters}
        assert workers
        assert rank.main not in workers


def test_stepping_in_backward_has_fewer_gradients_at_once(tmp_path: Path) -> None:
    most = {how: recorded(how, tmp_path / f"{how}.json").ranks[0].gradient_bytes for how in HOW}
    assert most["plain"] == pytest.approx(DEPTH * LAYER, rel=0.01)
    assert most["backward"] <= 2.1 * LAYER, "a bucket, and one that is made beside it"
    assert most["forward"] <= 1.1 * DEPTH * LAYER, "the next forward has waited before more are made"


def test_gradients_that_a_worker_lets_go_in_backward_are_gone(tmp_path: Path) -> None:
    """The profiler does not follow the worker, and sees none of these frees."""
    model, optimizer = made("backward")
    overlap = instep.attached(model)
    assert overlap is not None
    with overlap:
        train(model, optimizer, 2)
        trial = trial_of(overlap)
        trial.puts_off = trial.decided = True  # as a trial that gains decides
        with overlap.record(steps=3) as recording:
            train(model, optimizer, 4)
    run = recording.run()
    assert run is not None
    rank = run.ranks[0]
    assert {s.thread for s in rank.spans if s.kind == "step" and s.parameters} - {rank.main}, "a worker stepped"
    # Those that wait for the worker, the one that it updates, and one that is made beside them.
    assert rank.gradient_bytes <= (MOST + 2.1) * LAYER


@pytest.mark.parametrize("how", HOW)
def test_training_is_the_same_while_it_is_recorded(how: str) -> None:
    states = []
    for record in (False, True):
        model, optimizer = made(how)
        with instep.record(model, optimizer, 2) if record else nullcontext():
            train(model, optimizer, 3, micro_batches=2)
        states.append(training_state(model, optimizer))
        found = instep.attached(model)
        if found is not None:
            found.detach()
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        assert not any(p._backward_hooks for p in model.parameters())
        assert not optimizer._optimizer_step_post_hooks
    assert first_difference(*states) is None


def test_all_micro_batches_are_in_one_iteration() -> None:
    model, optimizer = made("backward")
    overlap = instep.attached(model)
    assert overlap is not None
    with overlap.record(2) as recording:
        train(model, optimizer, 3, micro_batches=3)
    run = recording.run()
    assert run is not None
    kinds = [s.kind for s in run.ranks[0].spans if s.kind in ("forward", "backward")]
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["forward", "backward"] * 6
    assert len(run.ranks[0].iterations) == 2
    overlap.detach()


def test_the_trace_names_buckets_and_operations(tmp_path: Path) -> None:
    recorded("backward", tmp_path / "run.json")
    trace = json.loads((tmp_path / "run.json").read_bytes())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["name"] for event in events}
    assert names >= {"forward: forward", "backward: backward", "aten::addmm"}
    (bucket,) = {tuple(e["args"]["parameters"]) for e in events if e["name"].startswith("step: 5.")}
    assert sorted(bucket) == ["5.bias", "5.weight"]
    forward = next(event for event in events if event["name"] == "forward: forward")
    inside = [e for e in events if e["name"] == "aten::addmm" and 0 <= e["ts"] - forward["ts"] <= forward["dur"]]
    assert len(inside) == DEPTH, "the profiler's clock is the hooks'"
    starts = [event["ts"] for event in events]
    assert -1e6 < min(starts) < max(starts) < 60e6, "all on one clock, from the first iteration on"


# What goes wrong.


def _fail(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, 2)
    model(torch.randn(ROWS, WIDTH + 1))


def test_a_loop_that_fails_is_recorded_up_to_there() -> None:
    model, optimizer = made("plain")
    recording = instep.record(model, optimizer)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), recording:
        _fail(model, optimizer)
    run = recording.run()
    assert run is not None
    assert len(run.ranks[0].iterations) == 2, "the one that has failed is none"
    assert not model._forward_hooks


def test_of_nothing_nothing_is_saved(tmp_path: Path) -> None:
    model, optimizer = made("plain")
    recording = instep.record(model, optimizer)
    with pytest.raises(instep.errors.InstepError, match="leave the `with` block first"):
        recording.save(tmp_path / "run.json")
    with recording:
        pass
    with pytest.raises(instep.errors.InstepError, match="at least one forward"):
        recording.save(tmp_path / "run.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_the_number_of_steps_is_checked(steps: Any) -> None:
    model, optimizer = made("plain")
    with pytest.raises(ValueError, match=f"steps must be a whole number, at least 1, not {steps!r}"):
        instep.record(model, optimizer, steps)


def test_a_recording_keeps_nobody_alive() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    instep.attach(model, optimizer, schedule="backward")
    with instep.record(model, optimizer, steps=1) as recording:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    kept = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    assert recording.run() is not None


def test_a_recording_is_used_once() -> None:
    model, optimizer = made("plain")
    with instep.record(model, optimizer) as recording:
        train(model, optimizer, 1)
    with pytest.raises(instep.errors.InstepError, match="has begun before"), recording:
        pass


def test_two_at_once_are_refused_and_the_first_goes_on() -> None:
    model, optimizer = made("plain")
    with instep.record(model, optimizer) as recording:
        with pytest.raises(instep.errors.InstepError, match="running already"), instep.record(model, optimizer):
            pass
        train(model, optimizer, 2)
    run = recording.run()
    assert run is not None
    assert len(run.ranks[0].iterations) == 2


def test_what_is_gone_cannot_be_recorded() -> None:
    model, optimizer = made("backward")
    overlap = instep.attached(model)
    assert overlap is not None
    del model
    with pytest.raises(instep.errors.InstepError, match="nothing to record"):
        overlap.record()
    del optimizer
