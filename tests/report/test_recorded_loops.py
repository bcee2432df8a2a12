"""Loops of an odd kind, recorded: they run as they do without, and what the recording says of them is true."""

import copy
import io
import pickle
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler

import instep
from instep.errors import InstepError
from instep_tools.recording import Recording
from instep_tools.report.figures import figures
from instep_tools.report.run import Rank
from tests.inside import trial_of
from tests.late import late_updates
from tests.report.loops import DEPTH, HOW, LAYER, WIDTH, made, train

pytestmark = pytest.mark.filterwarnings("ignore:Profiler clears events")


def first_rank(recording: Recording) -> Rank:
    run = recording.run()
    assert run is not None
    return run.ranks[0]


# Gradients.


class Turned(torch.autograd.Function):
    """Its gradient is transposed: a parameter keeps a copy."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].t().contiguous().t()


class Turning(nn.Module):
    """Layers of different sizes, so that hardly any memory is given out again where another gradient was."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [WIDTH + 16 * n for n in range(DEPTH)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(n, n) / n) for n in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for weight in self.weights:
            total = total + (x[:, : len(weight)] @ Turned.apply(weight)).square().mean()
        return total


@pytest.mark.parametrize("by", ["worker", "hook"])
def test_gradients_that_a_parameter_keeps_a_copy_of(by: str) -> None:
    torch.manual_seed(0)
    model = Turning()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(4, 2 * WIDTH)

    def iterate() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=1, defer=by == "worker") as overlap:
        for _ in range(3):
            iterate()
        # Late, so that a worker has a gradient while the next one is made.
        with late_updates() if by == "worker" else nullcontext(), overlap.record(steps=4) as recording:
            for _ in range(5):
                iterate()
    run = recording.run()
    assert run is not None
    rank = run.ranks[0]
    largest = max(p.nbytes for p in model.parameters())
    assert bool({s.thread for s in rank.spans if s.kind == "step" and s.parameters} - {rank.main}) == (by == "worker")
    assert largest + (by == "worker") <= rank.gradient_bytes < 5 * largest


def test_gradients_of_before_the_recording_are_gone_when_the_loop_clears_them() -> None:
    """``zero_grad()`` first, as in torch's tutorials: at the beginning those of the step before are there."""
    model, optimizer = made("plain")
    inputs = torch.randn(4, WIDTH)

    def iterate() -> None:
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    iterate()
    with instep.record(model, optimizer, steps=3) as recording:
        for _ in range(4):
            iterate()
    run = recording.run()
    assert run is not None
    assert run.ranks[0].gradient_bytes == pytest.approx(DEPTH * LAYER, rel=0.01)


def test_gradients_that_the_loop_keeps_are_there() -> None:
    model, optimizer = made("backward")
    overlap = instep.attached(model)
    assert overlap is not None
    kept: list[torch.Tensor] = []
    with overlap:
        train(model, optimizer, 2)
        trial = trial_of(overlap)
        trial.puts_off = trial.decided = True
        handles = [p.register_hook(lambda gradient: kept.append(gradient)) for p in model.parameters()]
        with overlap.record(steps=3) as recording:
            train(model, optimizer, 3)
        for handle in handles:
            handle.remove()
    assert first_rank(recording).gradient_bytes >= 3 * DEPTH * LAYER


# What the loop does meanwhile.


@pytest.mark.parametrize("how", HOW)
def test_copies_and_pickles(how: str) -> None:
    model, optimizer = made(how)
    train(model, optimizer, 2)

    def use() -> list[nn.Module]:
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        loaded = torch.load(saved, weights_only=False)
        return [copy.deepcopy(model), averaged.module, loaded, pickle.loads(pickle.dumps(model))]

    with instep.record(model, optimizer, 2) as recording:
        train(model, optimizer, 1)
        for copied in use():
            copied(torch.randn(4, WIDTH)).sum().backward()
        train(model, optimizer, 2)
    assert len(first_rank(recording).iterations) == 2
    if (overlap := instep.attached(model)) is not None:
        overlap.detach()


def test_micro_batches_that_refuse_hooks_on_parameters() -> None:
    model, optimizer = made("backward")
    overlap = instep.attached(model)
    assert overlap is not None
    with overlap, overlap.record(steps=2) as recording:
        for _ in range(3):
            overlap.micro_batches(lambda x: model(x).square().mean(), [torch.randn(4, WIDTH) for _ in range(3)])
            optimizer.step()
            optimizer.zero_grad()
    assert len(first_rank(recording).iterations) == 2


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, None])
def test_a_block_that_is_left_in_the_middle_of_a_step(how: str, error: type[BaseException] | None) -> None:
    model, optimizer = made(how)
    train(model, optimizer, 2)
    with pytest.raises(error) if error else nullcontext(), instep.record(model, optimizer, steps=4) as recording:
        train(model, optimizer, 2)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        if error is not None:
            raise error
    assert len(first_rank(recording).iterations) == 2
    assert not torch._C._autograd._profiler_enabled()
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    if (overlap := instep.attached(model)) is not None:
        overlap.detach()


def test_another_profiler_in_the_block_ends_the_recording() -> None:
    """torch dies where the first of two is read."""
    model, optimizer = made("plain")

    def record(recording: Recording, *, fails: bool) -> None:
        with recording:
            train(model, optimizer, 1)
            with torch.profiler.profile():
                train(model, optimizer, 1)
            if fails:
                raise ZeroDivisionError
            train(model, optimizer, 1)

    with pytest.raises(ZeroDivisionError):
        record(instep.record(model, optimizer, 2), fails=True)
    recording = instep.record(model, optimizer, 2)
    with pytest.raises(InstepError, match=r"another torch\.profiler"):
        record(recording, fails=False)
    with pytest.raises(InstepError, match="nothing was recorded"):
        recording.run()
    with instep.record(model, optimizer, 1) as recording:
        train(model, optimizer, 2)
    assert recording.run() is not None


def test_a_loop_on_another_thread_is_not_seen_and_that_is_said() -> None:
    model, optimizer = made("plain")

    def train_elsewhere(steps: int) -> None:
        thread = threading.Thread(target=train, args=(model, optimizer, steps))
        thread.start()
        thread.join()

    for steps in (1, 3):
        with pytest.raises(InstepError, match="ran on another thread"), instep.record(model, optimizer, 2):
            train_elsewhere(steps)
    with instep.record(model, optimizer, 2) as recording:
        train(model, optimizer, 2)
    assert recording.run() is not None


def test_a_profiler_on_another_thread_is_noticed() -> None:
    model, optimizer = made("plain")
    runs, ends = threading.Event(), threading.Event()

    def profiled() -> None:
        with torch.profiler.profile():
            runs.set()
            ends.wait(60)

    thread = threading.Thread(target=profiled)
    thread.start()
    assert runs.wait(60)
    try:
        assert profiler._is_profiler_enabled
        with pytest.raises(InstepError, match="is running already"), instep.record(model, optimizer):
            pass
    finally:
        ends.set()
        thread.join()


def test_a_recorder_of_the_users_own_is_told_and_stays() -> None:
    model, optimizer = made("backward")
    overlap = instep.attached(model)
    assert overlap is not None
    told: list[str] = []

    def own(kind: str, names: Any, start: float, end: float) -> None:
        told.append(kind)

    overlap.recorder = own
    with overlap:
        with overlap.record(steps=2) as recording:
            train(model, optimizer, 3)
        assert overlap.recorder is own
    assert told == ["step"] * 3 * DEPTH
    assert len([s for s in first_rank(recording).spans if s.parameters]) == 2 * DEPTH


# Times.


def test_another_models_backward_is_not_this_ones() -> None:
    """As in a GAN: the other's backward, its step, and this one's forward lie between two backwards of this one."""
    model, optimizer = made("plain")
    other, its = made("plain")
    with instep.record(model, optimizer, steps=3) as recording:
        for _ in range(4):
            its.zero_grad()
            other(torch.randn(512, WIDTH)).square().mean().backward()
            its.step()
            train(model, optimizer, 1)
    rank = first_rank(recording)
    forwards, backwards = ([s for s in rank.spans if s.kind == kind] for kind in ("forward", "backward"))
    assert len(forwards) == len(backwards) == 3
    for forward, backward in zip(forwards, backwards, strict=True):
        assert forward.end <= backward.start


def test_a_backward_that_raised_is_left_out() -> None:
    model, optimizer = made("plain")

    def raises(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    with instep.record(model, optimizer, steps=2) as recording:
        for _ in range(3):
            output = model(torch.randn(4, WIDTH))
            output.register_hook(raises)
            with pytest.raises(ZeroDivisionError):
                output.sum().backward()
            train(model, optimizer, 1)
    rank = first_rank(recording)
    for backward in (s for s in rank.spans if s.kind == "backward"):
        forward = max((s for s in rank.spans if s.kind == "forward" and s.start < backward.end), key=lambda s: s.start)
        assert forward.end <= backward.start


def test_a_closure_is_forward_and_backward_and_not_the_step() -> None:
    model, optimizer = made("plain")

    def evaluate() -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(64, WIDTH)).square().mean()
        loss.backward()
        return loss.item()

    with instep.record(model, optimizer, steps=3) as recording:
        for _ in range(4):
            optimizer.step(evaluate)
    run = recording.run()
    assert run is not None
    found = figures(run)
    assert found.forward > 0
    assert found.backward > 0
    assert found.step.total > 0
    rank = run.ranks[0]
    for step in (s for s in rank.spans if s.kind == "step"):
        computed = [s for s in rank.spans if s.kind in ("forward", "backward")]
        assert not any(s.start < step.end and step.start < s.end for s in computed)


def test_an_iteration_that_does_not_come_to_its_step_is_none() -> None:
    runs = []
    for steps, more in ((2, False), (2, True), (3, False)):
        model, optimizer = made("plain")
        with instep.record(model, optimizer, steps=5) as recording:
            train(model, optimizer, steps)
            if more:
                model(torch.randn(4, WIDTH))
        run = recording.run()
        assert run is not None
        runs.append(run)
    assert [len(run.ranks[0].iterations) for run in runs] == [2, 2, 3]
