"""Updates that run beside the loop, on a thread of their own: Muon's, and what is asked for first is done first."""

import threading
from functools import partial
from heapq import heappush
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._torch.worker import Task, Worker
from instep.errors import UncommittedStepError
from instep_tools.harness import first_difference, training_state
from tests import net
from tests.inside import schedule_of

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")


class Loop:
    """Matrices by Muon, all else by AdamW, which is not fused unless told."""

    def __init__(self, *, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        rest = [p for p in self.model.parameters() if p.ndim != 2]
        muon: Any = torch.optim.Muon
        adam = torch.optim.AdamW(rest, lr=1e-2, fused=fused or None)
        self.optimizers: list[torch.optim.Optimizer] = [muon(matrices, lr=1e-2), adam]

    def step(self, i: int) -> None:
        torch.manual_seed(i)
        self.model(torch.randn(4, 16)).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def difference(self, other: "Loop") -> str | None:
        return first_difference(
            training_state(self.model, self.optimizers), training_state(other.model, other.optimizers)
        )


def names_due(overlap: instep.Attachment) -> set[str]:
    return {name for bucket in schedule_of(overlap)._deferred.all() for name in bucket.names}


@needs_muon
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bucket_bytes", [None, 1, 3_000])
def test_muon_is_put_off_and_runs_beside_the_loop(bucket_bytes: int | None, fused: bool) -> None:
    plain, other = Loop(fused=fused), Loop(fused=fused)
    with instep.attach(other.model, other.optimizers, defer=True, bucket_bytes=bucket_bytes) as overlap:
        for i in range(8):
            plain.step(i)
            other.step(i)
            if i % 3 == 2:
                overlap.synchronize()
                assert (found := plain.difference(other)) is None, f"step {i}: {found}"
        overlap.synchronize()
        assert plain.difference(other) is None


@needs_muon
def test_by_default_a_trial_is_made_with_muon_beside_what_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot run beside the loop is stepped at once, and does not keep the others from it."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    plain, other = Loop(), Loop()
    with instep.attach(other.model, other.optimizers) as overlap:
        deferring = schedule_of(overlap)._deferring
        for i in range(12):
            plain.step(i)
            if i == 4:
                deferring.puts_off = deferring.decided = True  # as a trial that gains decides
            other.step(i)
            if i > 4:
                names = names_due(overlap)
                assert all(name.endswith("weight") for name in names), "AdamW is not fused: taken at once"
                assert names
        overlap.synchronize()
        assert plain.difference(other) is None


@needs_muon
def test_a_switch_that_was_changed_before_an_update_begins_does_not_matter() -> None:
    """It is left to whoever waits for it, and computed under the switches of then."""
    plain, other = Loop(), Loop()
    with instep.attach(other.model, other.optimizers, defer=True) as overlap:
        worker = schedule_of(overlap)._deferred.worker
        for i in range(4):
            plain.step(i)
            gate = threading.Event()
            worker.run(partial(waits, gate), float("-inf"))  # nothing has begun when the switch is changed
            other.step(i)
            before = bool(torch.backends.mkldnn.enabled)
            switch(not before)
            gate.set()
            worker_is_through(worker)
            try:
                overlap.synchronize()
            finally:
                switch(before)
            assert (found := plain.difference(other)) is None, f"step {i}: {found}"


@needs_muon
def test_a_switch_that_was_changed_in_the_middle_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    before = bool(torch.backends.mkldnn.enabled)
    with instep.attach(loop.model, loop.optimizers, defer=True) as overlap:
        loop.step(0)
        overlap.synchronize()
        newton_schulz = torch.optim._muon._zeropower_via_newtonschulz

        def meanwhile(*args: Any) -> torch.Tensor:
            switch(not before)
            return newton_schulz(*args)

        try:
            with monkeypatch.context() as patched:
                patched.setattr("torch.optim._muon._zeropower_via_newtonschulz", meanwhile)
                loop.step(1)
                worker_is_through(schedule_of(overlap)._deferred.worker)
                switch(before)
                with pytest.raises(UncommittedStepError, match=r"mkldnn.*while the update of .* was under way beside"):
                    overlap.synchronize()
        finally:
            switch(before)
        overlap.accept_torn()


def switch(enabled: bool) -> None:
    backends: Any = torch.backends
    backends.mkldnn.enabled = enabled


def worker_is_through(worker: Worker) -> None:
    done = threading.Event()
    worker.last(done.set)
    assert done.wait(net.SECONDS)


def waits(gate: threading.Event) -> None:
    assert gate.wait(net.SECONDS)


def test_what_is_asked_for_comes_first() -> None:
    worker, order, gate = Worker(), list[str](), threading.Event()
    worker.run(partial(waits, gate))
    places = {"a": 3, "b": 1, "c": 2, "d": 2}
    tasks = {name: worker.run(partial(order.append, name), place) for name, place in places.items()}
    worker.last(lambda: order.append("last"))
    worker.hurry(tasks["a"])
    gate.set()
    worker.stop()
    assert order == ["a", "b", "c", "d", "last"]
    assert all(task.done for task in tasks.values())


def test_a_task_runs_once_however_often_it_is_hurried() -> None:
    worker, runs, gate = Worker(), list[int](), threading.Event()
    worker.run(partial(waits, gate))
    task = worker.run(lambda: runs.append(1), 5)
    for _ in range(3):
        worker.hurry(task)
    gate.set()
    task.wait()
    worker.hurry(task)
    worker.stop()
    assert runs == [1]


def test_a_task_whose_token_was_lost_is_run() -> None:
    """Ctrl-C may come between the two."""
    worker, runs = Worker(), list[int]()
    worker.start()
    tokens = worker._tokens
    assert tokens is not None
    task = worker.run(lambda: None)
    task.wait()
    lost = Task(lambda: runs.append(1))
    heappush(worker._due, (0, -1, lost))
    worker.hurry(lost)
    lost.wait()
    worker.stop()
    assert runs == [1]


def test_a_task_that_is_given_to_a_thread_that_has_just_ended_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread forks, and stops the worker before, between the two lines that give it a task."""
    worker, runs, give = Worker(), list[int](), Worker._give
    worker.start()

    def stopped(self: Worker, *args: Any) -> None:
        monkeypatch.undo()
        self.stop()
        give(self, *args)

    monkeypatch.setattr(Worker, "_give", stopped)
    task = worker.run(lambda: runs.append(1))
    assert task.done or worker.started  # else nobody is there to run it
    task.wait()
    worker.stop()
    assert runs == [1]
