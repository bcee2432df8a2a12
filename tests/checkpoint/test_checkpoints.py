"""A run that goes on from a checkpoint is, bit for bit, the run that was not interrupted."""

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import instep
from instep.errors import CheckpointError, TornStepError, UncommittedStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, two_groups
from tests.checkpoint import saved
from tests.parity.made import Made, Recipe
from tests.stopping import LEFT, updates_stop

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
loss_of = nn.functional.cross_entropy
KEYS = {
    "step_count": int,
    "seed": int,
    "draws": int,
    "stages": int,
    "whole": bool,
}
OPTIMIZERS: Mapping[str, Callable[[nn.Module], Any]] = {
    "AdamW": lambda model: torch.optim.AdamW(two_groups(model), lr=1e-2, amsgrad=True),
    "fused": lambda model: torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True),
    "SGD": lambda model: torch.optim.SGD(two_groups(model), lr=0.1),
    "foreign": lambda model: Made(list(model.named_parameters()), 1e-2, Recipe()),
}
WAYS: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "default": {},
    "forward": {"schedule": "forward", "defer": True},
    "backward": {"schedule": "backward", "bucket_bytes": 1},
    "undo": {"schedule": "backward", "undo": True, "bucket_bytes": 1},
}


class Loop:
    def __init__(self, kind: str, way: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Blocks()
        self.optimizer = OPTIMIZERS[kind](self.model)
        given = WAYS[way]
        self.overlap = None if given is None else instep.attach(self.model, self.optimizer, **{**given, **options})

    def learn(self, steps: range) -> None:
        for i in steps:
            x, y = batch(i)
            loss_of(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> Any:
        if self.overlap is not None:
            self.overlap.synchronize()
        return training_state(self.model, self.optimizer)

    def close(self) -> None:
        if self.overlap is not None:
            self.overlap.detach()

    @property
    def attached(self) -> Any:
        return self.overlap


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("before", ["default", "backward", "undo"])
@pytest.mark.parametrize("after", ["default", "forward", "backward", "undo"])
def test_a_run_that_goes_on(kind: str, before: str, after: str, tmp_path: Path) -> None:
    whole, first, then = Loop(kind, "plain"), Loop(kind, before), Loop(kind, after)
    whole.learn(range(6))
    first.learn(range(3))
    saved.save(tmp_path, first.model, first.optimizer, first.overlap)
    for parameter in then.model.parameters():
        parameter.data.add_(1)
    saved.load(tmp_path, then.model, then.optimizer, then.overlap)
    assert then.attached.step_count == 3
    then.learn(range(3, 6))
    assert first_difference(whole.state(), then.state()) is None
    assert then.attached.step_count == 6
    first.close()
    then.close()


@pytest.mark.parametrize("way", ["default", "forward", "backward", "undo"])
def test_by_torch_save(way: str, tmp_path: Path) -> None:
    whole, first, then = Loop("AdamW", "plain"), Loop("AdamW", way), Loop("AdamW", way)
    whole.learn(range(6))
    first.learn(range(3))
    first.attached.require_committed()
    objects = {"model": first.model, "optimizer": first.optimizer, "overlap": first.attached}
    torch.save({name: one.state_dict() for name, one in objects.items()}, tmp_path / "checkpoint.pt")
    found = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for name, one in {"model": then.model, "optimizer": then.optimizer, "overlap": then.attached}.items():
        one.load_state_dict(found[name])
    then.learn(range(3, 6))
    assert first_difference(whole.state(), then.state()) is None
    first.close()
    then.close()


def test_into_a_loop_without_instep_and_back(tmp_path: Path) -> None:
    whole, first, bare, then = Loop("AdamW", "plain"), Loop("AdamW", "backward"), Loop("AdamW", "plain"), None
    whole.learn(range(6))
    first.learn(range(2))
    saved.save(tmp_path / "1", first.model, first.optimizer, first.overlap)
    saved.load(tmp_path / "1", bare.model, bare.optimizer, None)
    bare.learn(range(2, 4))
    saved.save(tmp_path / "2", bare.model, bare.optimizer, None)
    then = Loop("AdamW", "backward")
    saved.load(tmp_path / "2", then.model, then.optimizer, None)
    then.learn(range(4, 6))
    assert first_difference(whole.state(), then.state()) is None
    first.close()
    then.close()


# What the attachment says.


@pytest.mark.parametrize("way", ["default", "forward", "backward", "undo"])
def test_the_keys_are_the_same_always(way: str) -> None:
    loop = Loop("AdamW", way)
    for _ in range(3):
        state = loop.attached.state_dict()
        assert {key: type(value) for key, value in state.items()} == KEYS
        loop.learn(range(1))
    loop.close()
    assert {key: type(value) for key, value in loop.attached.state_dict().items()} == KEYS


def test_keyed_draws(tmp_path: Path) -> None:
    def drawing(seed: int = 7) -> Loop:
        loop = Loop("SGD", "plain")
        loop.optimizer = Made(list(loop.model.named_parameters()), 1e-2, Recipe(draws="torch"))
        loop.overlap = instep.attach(loop.model, loop.optimizer, schedule="backward", random="keyed", seed=seed)
        return loop

    whole, first, then = drawing(), drawing(), drawing()
    whole.learn(range(6))
    first.learn(range(3))
    saved.save(tmp_path, first.model, first.optimizer, first.overlap)
    saved.load(tmp_path, then.model, then.optimizer, then.overlap)
    then.learn(range(3, 6))
    assert first_difference(whole.state(), then.state()) is None
    other = drawing(seed=8)
    with pytest.raises(CheckpointError, match="seed=7, and this model is attached with random='keyed', seed=8"):
        other.attached.load_state_dict(first.attached.state_dict())
    for loop in (whole, first, then, other):
        loop.close()


def test_what_is_no_state_is_refused() -> None:
    loop = Loop("AdamW", "backward")
    loop.learn(range(2))
    good = loop.attached.state_dict()
    for bad, said in [
        (None, "must be what overlap.state_dict"),
        ({}, "has no 'step_count'"),
        ({key: value for key, value in good.items() if key != "whole"}, "has no 'whole'"),
        ({**good, "whole": False}, "was saved in the middle of step 3"),
        *(({**good, "step_count": count}, "is no number of steps") for count in (-1, "3", 3.5, True)),
        ({**good, "seed": 3}, "random='keyed', seed=3, and this model is attached with no random='keyed'"),
    ]:
        with pytest.raises(CheckpointError, match=said):
            loop.attached.load_state_dict(bad)
    assert loop.attached.step_count == 2
    loop.attached.load_state_dict({**good, "of a later version": 1})
    loop.close()


# In the middle of a step.


def fail(loop: Loop) -> None:
    handle = loop.model.get_parameter("outer.weight").register_hook(lambda gradient: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            loop.learn(range(99, 100))
    finally:
        handle.remove()


def stop(loop: Loop) -> None:
    x, y = batch(99)
    loss_of(loop.model(x), y).backward()


@pytest.mark.parametrize("way", ["default", "forward", "backward", "undo"])
@pytest.mark.parametrize("end", [fail, stop])
def test_a_checkpoint_mends_a_step_that_is_torn_or_open(way: str, end: Callable[[Loop], None], tmp_path: Path) -> None:
    whole, loop = Loop("AdamW", "plain"), Loop("AdamW", way)
    whole.learn(range(6))
    loop.learn(range(3))
    saved.save(tmp_path, loop.model, loop.optimizer, loop.overlap)
    end(loop)
    assert {key: type(value) for key, value in loop.attached.state_dict().items()} == KEYS, (
        "the template is asked first"
    )
    assert loop.attached.state_dict()["whole"] == (loop.attached.state == "idle")
    if loop.attached.state != "idle":
        with pytest.raises((TornStepError, UncommittedStepError)):
            loop.attached.require_committed()
    saved.load(tmp_path, loop.model, loop.optimizer, loop.overlap)
    assert loop.attached.state == "idle"
    loop.learn(range(3, 6))
    assert first_difference(whole.state(), loop.state()) is None
    assert loop.attached.step_count == 6
    loop.close()


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_checkpoint_mends_an_update_that_failed(way: str, tmp_path: Path) -> None:
    """With "forward" the next forward would take it, and whoever waits for it meets the error."""
    whole, loop = Loop("SGD", "plain"), Loop("SGD", way)
    whole.learn(range(6))
    loop.learn(range(3))
    saved.save(tmp_path, loop.model, loop.optimizer, loop.overlap)
    with updates_stop():
        LEFT["parameters"] = 3
        try:
            with suppress(ZeroDivisionError):
                loop.learn(range(99, 100))
            assert {key: type(value) for key, value in loop.attached.state_dict().items()} == KEYS
        finally:
            LEFT.clear()
    assert not loop.attached.state_dict()["whole"]
    with pytest.raises(TornStepError):
        loop.attached.require_committed()
    saved.load(tmp_path, loop.model, loop.optimizer, loop.overlap)
    loop.learn(range(3, 6))
    assert first_difference(whole.state(), loop.state()) is None
    loop.close()


@pytest.mark.parametrize(("way", "steps"), [("forward", 1), ("backward", 1), ("backward", 2), ("undo", 1), ("undo", 2)])
def test_between_micro_batches(way: str, steps: int) -> None:
    loop = Loop("AdamW", way, accumulation_steps=steps)
    x, y = batch(0)
    with loop.attached.accumulate() if steps == 1 else nullcontext():
        loss_of(loop.model(x), y).backward()
        with pytest.raises(UncommittedStepError, match="step 1 is under way"):
            loop.attached.require_committed()
    loss_of(loop.model(x), y).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.attached.require_committed()
    loop.close()


@pytest.mark.parametrize("way", ["default", "backward", "undo"])
def test_a_save_beside_training(way: str, tmp_path: Path) -> None:
    """Waited for before the next backward: that steps."""
    whole, first, then = Loop("AdamW", "plain"), Loop("AdamW", way), Loop("AdamW", way)
    whole.learn(range(6))
    first.learn(range(3))
    first.attached.require_committed()
    done: Any = dcp.async_save(saved.parts(first.model, first.optimizer, first.overlap), checkpoint_id=tmp_path)
    x, y = batch(3)
    loss = loss_of(first.model(x), y)
    done.result()
    loss.backward()
    saved.load(tmp_path, then.model, then.optimizer, then.overlap)
    then.learn(range(3, 6))
    assert first_difference(whole.state(), then.state()) is None
    first.attached.rollback() if way != "backward" else first.attached.accept_torn()
    first.close()
    then.close()


# Killed at drawn moments.


def train(folder: Path, said: int) -> None:
    """Go on from the newest, and save after every step, for ever."""
    loop = Loop("AdamW", "plain")
    overlap = instep.attach(loop.model, loop.optimizer, schedule="backward")
    if found := sorted(folder.glob("step-*")):
        saved.load(found[-1], loop.model, loop.optimizer, overlap)
    while True:
        generator = torch.Generator().manual_seed(overlap.step_count)
        for p in loop.model.parameters():  # without a backward, whose threads do not go with a fork
            p.grad = torch.randn(p.shape, generator=generator)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        step, unfinished = overlap.step_count, folder / f"unfinished-{overlap.step_count}"
        saved.save(unfinished, loop.model, loop.optimizer, overlap)
        unfinished.rename(folder / f"step-{step:04}")
        os.write(said, b".")


def in_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def killed_at_random(folder: Path, kills: int, seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(kills):
        reads, writes = os.pipe()
        child = in_child(lambda: train(folder, writes))  # noqa: B023
        os.close(writes)
        os.read(reads, drawn.randint(1, 3))
        time.sleep(drawn.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.close(reads)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    expected, loop = Loop("AdamW", "plain"), Loop("AdamW", "plain")
    newest = sorted(folder.glob("step-*"))[-1]
    saved.load(newest, loop.model, loop.optimizer, None)
    for i in range(int(newest.name.removeprefix("step-"))):
        generator = torch.Generator().manual_seed(i)
        for p in expected.model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        expected.optimizer.step()
    assert first_difference(expected.state(), loop.state()) is None


def test_killed_at_drawn_moments(tmp_path: Path) -> None:
    killed_at_random(tmp_path, 4, 0)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 9))
def test_killed_at_many_drawn_moments(tmp_path: Path, seed: int) -> None:
    killed_at_random(tmp_path, 25, seed)
