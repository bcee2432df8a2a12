"""Ranks agree on every step, or all of them say that they do not."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError, InstepError, NonFiniteGradientError, StepMismatchError, TornStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, weights
from tests.distributed.pool import RankPool
from tests.pace import Pace
from tests.parity.lockstep import WAYS


class Fails(torch.optim.AdamW):
    """Its update raises on some ranks, once."""

    failing: tuple[int, ...] = ()

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() in self.failing and any(p.shape == (24, 16) for g in self.param_groups for p in g["params"]):
            Fails.failing = ()
            raise ZeroDivisionError("the update")
        return super().step(closure)


def make(wrap: str = "ddp") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Blocks()
    if wrap == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.004)
    elif wrap == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = instep.replicate(model, bucket_cap_mb=0.004)
    return model, Fails(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, i: int, same: bool = False) -> torch.Tensor:
    x, y = batch(i if same else 100 * dist.get_rank() + i)
    return nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: Any, steps: range, same: bool = False) -> None:
    for i in steps:
        loss_of(model, i, same).backward()
        optimizer.step()
        optimizer.zero_grad()


def here(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(w, "_local_tensor", w) for w in weights(model)]


def raised_by(do: Callable[[], Any]) -> InstepError | None:
    try:
        do()
    except InstepError as error:
        return error
    return None


def update_fails_on_rank_1(way: str, wrap: str) -> tuple[str, ...]:
    """Which errors surface, from the failing iteration on, and whether anything is written after that."""
    model, optimizer = make(wrap)
    overlap = instep.attach(model, optimizer, **WAYS[way])
    train(model, optimizer, range(2))
    overlap.synchronize()
    Fails.failing = (1,)
    seen: list[str] = []
    for i in range(2, 5):
        try:
            train(model, optimizer, range(i, i + 1))
            overlap.synchronize()
        except Exception as error:
            seen.append(f"{i} {type(error).__name__} {type(error.__cause__).__name__}")
            if isinstance(error, (TornStepError, StepMismatchError)):
                break
    after = here(model)
    assert isinstance(raised_by(lambda: loss_of(model, 9)), TornStepError)
    assert isinstance(raised_by(optimizer.step), TornStepError)
    assert all(map(torch.equal, after, here(model)))
    Fails.failing = ()
    overlap.accept_torn()
    train(model, optimizer, range(5, 7), same=True)
    overlap.synchronize()
    overlap.detach()
    return tuple(seen)


@pytest.mark.parametrize("wrap", ["ddp", "replicate"])
def test_a_failed_update_reaches_the_other_ranks_in_backward(two_ranks: RankPool, wrap: str) -> None:
    other, failing = two_ranks.run(update_fails_on_rank_1, "backward", wrap)
    assert failing == ("2 ZeroDivisionError NoneType", "3 TornStepError ZeroDivisionError")
    assert other == ("2 TornStepError InstepError",)


def late_update_fails_on_rank_1() -> tuple[str, bool]:
    """Rank 1 fails in a step that rank 0 has taken, and ends."""
    model, optimizer = make()
    overlap = instep.attach(model, optimizer, schedule="forward", defer=True)
    train(model, optimizer, range(2))
    overlap.synchronize()
    Fails.failing = (1,)
    train(model, optimizer, range(2, 3))
    try:
        overlap.synchronize()
    except ZeroDivisionError:
        os.kill(os.getpid(), signal.SIGKILL)
    after = weights(model)
    try:
        train(model, optimizer, range(3, 5))
        overlap.synchronize()
    except RuntimeError as error:
        return type(error).__name__, all(map(torch.equal, after, weights(model)))
    return "none", False


@pytest.mark.nightly
def test_a_failed_late_update_reaches_the_other_ranks() -> None:
    pool = RankPool(2)
    error, untouched = pool.run_until_a_rank_dies(0, late_update_fails_on_rank_1)
    assert error in ("RuntimeError", "TornStepError")
    assert untouched


def step_left_out_on_rank_1(way: str) -> tuple[str, bool]:
    model, optimizer = make()
    if way == "forward":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # no update but torch's own is put off
    with instep.attach(model, optimizer, **WAYS[way]) as overlap:
        train(model, optimizer, range(2))
        overlap.synchronize()
        loss_of(model, 2).backward()
        if dist.get_rank() == 0:
            optimizer.step()
        optimizer.zero_grad()

        def go_on() -> None:
            for i in range(3, 6):
                train(model, optimizer, range(i, i + 1))
            overlap.synchronize()

        error = raised_by(go_on)
        after = weights(model)
        torn = isinstance(raised_by(lambda: loss_of(model, 9)), TornStepError)
        return type(error).__name__, torn and all(map(torch.equal, after, weights(model)))


@pytest.mark.parametrize("way", ["forward", "undo"])
def test_a_step_that_one_rank_leaves_out(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(step_left_out_on_rank_1, way) == [("StepMismatchError", True)] * 2


def skipped(way: str, wrap: str) -> None:
    """Infinite on one rank: with DDP the mean is on all; with FSDP it may be in one rank's shard alone."""
    loops = [make(wrap) for _ in range(2)]
    with instep.attach(*loops[1], nonfinite="skip", **WAYS[way]) as overlap:
        for i in range(5):
            for model, optimizer in loops:
                handle = None
                if i == 2 and dist.get_rank() == 1:
                    parameter = next(p for n, p in model.named_parameters() if n.endswith("outer.bias"))
                    handle = parameter.register_hook(lambda g: g + torch.inf) if wrap != "fsdp2" else None
                loss = loss_of(model, i)
                (loss * float("inf") if i == 2 and wrap == "fsdp2" and dist.get_rank() == 1 else loss).backward()
                if model is loops[1][0] or i != 2:
                    optimizer.step()
                optimizer.zero_grad()
                if handle is not None:
                    handle.remove()
            overlap.synchronize()
            assert all(map(torch.equal, here(loops[0][0]), here(loops[1][0]))), f"iteration {i}"
        assert overlap.skip_count == 1
        assert overlap.step_count == 4


@pytest.mark.parametrize("way", ["forward", "undo"])
@pytest.mark.parametrize("wrap", ["ddp", "replicate", "fsdp2"])
def test_skip_on_all_ranks(two_ranks: RankPool, way: str, wrap: str) -> None:
    two_ranks.run(skipped, way, wrap)


class Local(nn.Module):
    """A parameter of each rank's own, beside a DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.core = DistributedDataParallel(Blocks(), bucket_cap_mb=0.004)
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(x) * self.scale


def infinite_in_one_rank_alone(way: str, nonfinite: Any) -> tuple[str | None, int, bool]:
    torch.manual_seed(0)
    model = Local()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with instep.attach(model, optimizer, nonfinite=nonfinite, **WAYS[way]) as overlap:
        train(model, optimizer, range(2))
        overlap.synchronize()
        before = weights(model)
        handle = model.scale.register_hook(lambda g: g * (float("nan") if dist.get_rank() == 1 else 1.0))

        def bad() -> None:
            loss_of(model, 2).backward()
            optimizer.step()
            overlap.synchronize()

        error = raised_by(bad)
        handle.remove()
        untouched = all(map(torch.equal, before, weights(model)))
        if not isinstance(error, NonFiniteGradientError):
            return type(error).__name__, overlap.skip_count, untouched
        return f"{error.parameter} {error.rank}", overlap.skip_count, untouched


@pytest.mark.parametrize("way", ["forward", "undo"])
def test_infinite_in_one_rank_alone_is_skipped_on_all(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(infinite_in_one_rank_alone, way, "skip") == [("NoneType", 1, True)] * 2


@pytest.mark.parametrize("way", ["forward", "undo"])
def test_infinite_in_one_rank_alone_raises_on_all(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(infinite_in_one_rank_alone, way, "raise") == [("None 1", 0, True), ("scale 1", 0, True)]


def resynced(way: str, wrap: str) -> str | None:
    """Rank 1 fails in the middle of a step; all take rank 0's copy and go on as ranks that never failed."""
    model, optimizer = make(wrap)
    overlap = instep.attach(model, optimizer, **WAYS[way])
    train(model, optimizer, range(2))
    overlap.synchronize()
    Fails.failing = (1,)
    for i in range(2, 5):
        try:
            train(model, optimizer, range(i, i + 1))
            overlap.synchronize()
        except Exception as error:
            if isinstance(error, TornStepError):
                break
    assert overlap.state == "torn"
    refused = raised_by(lambda: overlap.resync_from(1))
    assert refused is not None
    assert "only in part" in str(refused)
    assert "ranks that share this model are [0, 1]" in str(raised_by(lambda: overlap.resync_from(7)))
    overlap.resync_from(0)
    assert overlap.step_count == 3
    overlap.detach()
    # The oracle: a loop that took the same three steps, and never failed.
    plain, plain_optimizer = make(wrap)
    train(plain, plain_optimizer, range(3))
    overlap = instep.attach(model, optimizer, **WAYS[way])
    for one in ((plain, plain_optimizer), (model, optimizer)):
        train(*one, range(5, 8))
    overlap.detach()

    return first_difference(training_state(plain, [plain_optimizer]), training_state(model, [optimizer]))


@pytest.mark.parametrize("wrap", ["ddp", "replicate"])
def test_resync(two_ranks: RankPool, wrap: str) -> None:
    assert two_ranks.run(resynced, "backward", wrap) == [None, None]


def resync_refused() -> str:
    model, optimizer = make("fsdp2")
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        train(model, optimizer, range(1))
        return str(raised_by(lambda: overlap.resync_from(0)))


def test_resync_of_a_sharded_model(two_ranks: RankPool) -> None:
    for said in two_ranks.run(resync_refused):
        assert "Load a checkpoint instead" in said


def stopped_peer() -> tuple[str, bool, float]:
    """Rank 1 stops after its step; rank 0 waits for it no longer than the process group does."""
    model, optimizer = make()
    overlap = instep.attach(model, optimizer, schedule="backward")
    train(model, optimizer, range(2))
    overlap.synchronize()
    before = weights(model)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    with Pace() as pace:
        try:
            train(model, optimizer, range(2, 4))
            overlap.synchronize()
            error = "none"
        except RuntimeError as caught:
            error = type(caught).__name__
        torn = isinstance(raised_by(lambda: loss_of(model, 9)), TornStepError)
        seconds = pace.since(started)
    return error, torn or all(map(torch.equal, before, weights(model))), seconds


@pytest.mark.nightly
def test_a_stopped_peer() -> None:
    pool = RankPool(2, group_seconds=30)
    error, said, seconds = pool.run_until_a_rank_dies(0, stopped_peer)
    assert error in ("RuntimeError", "TornStepError")
    assert said
    assert seconds < 30 + 5


def joined() -> None:
    """Ranks with more data than others do not wait for the votes of these."""
    model, optimizer = make()
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        with model.join():
            train(model, optimizer, range(2 + 2 * dist.get_rank()))
        overlap.synchronize()


def test_uneven_inputs(two_ranks: RankPool) -> None:
    two_ranks.run(joined)


def attach_fails() -> str:
    model, optimizer = make()
    return str(raised_by(lambda: instep.attach(model, optimizer, nonfinite="skip", schedule="backward")))


def test_an_error_in_attach_leaves_no_rank_waiting(two_ranks: RankPool) -> None:
    for said in two_ranks.run(attach_fails):
        assert "nonfinite='skip'" in said
    assert issubclass(AttachError, InstepError)
