"""Backwards that nobody sees begin, on several ranks: the forward returns nothing in which a tensor is found, or is
not the wrapper's ``__call__``."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep._ranks.step_ranks import StepRanks
from instep.errors import AccumulationError, TornStepError
from instep.options import Schedules
from instep_tools.harness import first_difference
from tests.cases import batch, two_groups, weights
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, parameters_of
from tests.late import late_updates
from tests.parity.lockstep import loss_of
from tests.parity.unseen import Keeps


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True, **options})


def adamw(model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, fused=fused)


SOURCES: Mapping[str, tuple[Callable[[nn.Module], nn.Module], Mapping[str, Any]]] = {
    "ddp": (ddp, {"schedule": "backward"}),
    "undo": (ddp, {"schedule": "backward", "undo": True}),
    "forward": (ddp, {"schedule": "forward", "defer": True}),
    "replicate": (instep.replicate, {"schedule": "backward"}),
    "replicate, forward": (instep.replicate, {"schedule": "forward", "defer": True}),
    "shard_state": (ddp, {"schedule": "backward", "shard_state": True}),
    "shard_state, forward": (ddp, {"shard_state": True, "schedule": "forward", "defer": True}),
}
EXACT = [name for name in SOURCES if "undo" in name or "forward" in name]


def sees_none(loop: Loop, i: int, how: str) -> torch.Tensor:
    """A loss of which the wrapper's outputs do not tell."""
    x, y = batch(i * dist.get_world_size() + dist.get_rank())
    (loop.model if how == "call" else loop.model.forward)(x, y)
    loss: torch.Tensor = loop.model.module.loss
    return loss


def usual(loop: Loop, i: int, how: str) -> torch.Tensor:
    loss = sees_none(loop, i, how)
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.detach()


def sometimes_left_out(loop: Loop, i: int, how: str) -> torch.Tensor:
    loss = sees_none(loop, i, how)
    loss.backward()
    if i % 3 != 1:
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss.detach()


def train(source: str, output: str, how: str, step: Callable[[Loop, int, str], Any], counted: int) -> None:
    wrap, options = SOURCES[source]
    loops = []
    for wrapped in (instep.replicate if wrap is instep.replicate else ddp, wrap):
        torch.manual_seed(0)
        model = wrapped(Keeps(output))
        # Fused kernels round a part of a tensor in another way than the whole.
        loops.append(Loop(model, adamw(model, fused="shard_state" not in source)))
    plain, loop = loops
    loop.overlap = instep.attach(loop.model, loop.optimizer, **options)
    for i in range(9):
        assert torch.equal(step(plain, i, how), step(loop, i, how)), f"iteration {i}"
        if i % 2:
            loop.overlap.synchronize()
            states: list[Any] = [parameters_of(one.model, one.optimizer) for one in loops]
            if "shard_state" in source:
                states = [enumerate(weights(one.model)) for one in loops]
            assert first_difference(*states) is None, f"iteration {i}"
    assert loop.overlap.step_count == counted
    loop.overlap.detach()


@pytest.mark.parametrize("how", ["call", "forward"])
@pytest.mark.parametrize("output", ["none", "opaque", "slotted"])
@pytest.mark.parametrize("source", list(SOURCES))
def test_a_usual_loop(two_ranks: RankPool, source: str, output: str, how: str) -> None:
    two_ranks.run(train, source, output, how, usual, 9)


@pytest.mark.parametrize("how", ["call", "forward"])
@pytest.mark.parametrize("output", ["none", "slotted"])
@pytest.mark.parametrize("source", EXACT)
def test_a_step_that_is_left_out(two_ranks: RankPool, source: str, output: str, how: str) -> None:
    two_ranks.run(train, source, output, how, sometimes_left_out, 6)


class FirstLeftOut(nn.Module):
    """Now and then its forward does not read the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, *, leave_out: bool) -> torch.Tensor:
        found: torch.Tensor = self.third(self.second(x if leave_out else self.first(x)).tanh())
        return found


def _first_left_out() -> str | None:
    states = []
    for attached in (False, True):
        torch.manual_seed(0)
        with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1):  # DDP keeps its first buckets here
            model = ddp(FirstLeftOut(), find_unused_parameters=True, bucket_cap_mb=0.0005)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        overlap = None
        if attached:
            with patch("instep.options.DEFAULT_BUCKET_BYTES", 1):
                overlap = instep.attach(model, optimizer, schedule="forward", defer=True)
        with late_updates():
            for i in range(7):
                x, y = batch(i * dist.get_world_size() + dist.get_rank())
                loss_of(model.forward(x, leave_out=i % 3 == 0), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if overlap is not None:
                assert len(overlap.plan.buckets) > 1
                overlap.detach()
        states.append(parameters_of(model, optimizer))
    return first_difference(*states)


def test_a_forward_that_does_not_read_what_the_last_step_updates(two_ranks: RankPool) -> None:
    """Its backward writes the buckets of which the gradients of that step are views."""
    assert two_ranks.run(_first_left_out) == [None] * 2


def _another_rank_failed() -> None:
    """The second rank says that its second step failed. No forward or backward is there to hear of that before the
    third."""
    torch.manual_seed(0)
    model = ddp(Keeps("none"))
    optimizer = adamw(model)
    overlap = instep.attach(model, optimizer, schedule="backward")
    cast = StepRanks.cast

    def fail_on_the_second(votes: StepRanks, step: int, **said: Any) -> Any:
        return cast(votes, step, failed=step == 2 and dist.get_rank() == 1)

    loop = Loop(model, optimizer)
    with patch.object(StepRanks, "cast", fail_on_the_second):
        for i in range(2):
            usual(loop, i, "forward")
        with pytest.raises(TornStepError, match="step 2"):
            usual(loop, 2, "forward")
    optimizer.zero_grad()
    overlap.accept_torn()
    usual(loop, 3, "forward")
    assert overlap.step_count == 3
    overlap.detach()


def test_another_rank_failed(two_ranks: RankPool) -> None:
    two_ranks.run(_another_rank_failed)


def _reduced_never(schedule: Schedules, how: str) -> None:
    torch.manual_seed(0)
    model: Any = ddp(Keeps("none" if how == "unseen" else "named tuple"))
    optimizer = adamw(model)
    overlap = instep.attach(model, optimizer, schedule=schedule, defer=schedule == "forward", shard_state=True)
    loop = Loop(model, optimizer)

    def iteration(i: int, *, reduced: bool) -> None:
        with overlap.accumulate() if how == "accumulate" else model.no_sync():
            sees_none(loop, i, "call").backward()
        if reduced:
            sees_none(loop, i + 1, "call").backward()
        optimizer.step()
        optimizer.zero_grad()

    iteration(0, reduced=True)
    overlap.synchronize()
    before = weights(model)
    with pytest.raises(AccumulationError, match=r"this rank's own.*Nothing was updated"):
        iteration(2, reduced=False)
    assert all(map(torch.equal, before, weights(model)))
    optimizer.zero_grad()
    iteration(4, reduced=True)
    overlap.synchronize()
    assert overlap.step_count == 2
    overlap.detach()


@pytest.mark.parametrize("how", ["no_sync", "accumulate", "unseen"])
@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_shard_state_refuses_gradients_that_were_never_reduced(
    two_ranks: RankPool, schedule: Schedules, how: str
) -> None:
    two_ranks.run(_reduced_never, schedule, how)
