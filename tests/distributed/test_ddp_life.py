"""Under DistributedDataParallel: what goes wrong, what is refused, and what detach leaves."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError, StaleAttachmentError, TornStepError
from instep.sources.ddp.reducer import ReducerGroup
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, weights
from tests.distributed.loops import Fails, WithOwn, equal, loss_of, require_two_optimizers_at_once, train, work_of
from tests.distributed.pool import RankPool
from tests.pace import Pace


def make(**options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Blocks(), **{"bucket_cap_mb": 0.004, **options})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def body_join(divide_by_initial_world_size: bool) -> str | None:
    def run(attach: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = make()
        if attach:
            instep.attach(model, optimizer, schedule="backward")
        steps = 3 + 2 * dist.get_rank()
        with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
            train(model, optimizer, range(steps))
        return model, optimizer

    plain, plain_optimizer = run(False)
    model, optimizer = run(True)
    overlap = instep.attached(model)
    assert overlap is not None
    assert overlap.step_count == 3 + 2 * dist.get_rank()
    overlap.detach()
    return first_difference(training_state(plain, plain_optimizer), training_state(model, optimizer))


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
def test_join_with_uneven_inputs(three_ranks: RankPool, divide_by_initial_world_size: bool) -> None:
    assert three_ranks.run(body_join, divide_by_initial_world_size) == [None] * 3


def body_step_raises() -> bool:
    """The error has its own type, no bucket after it is stepped, and DDP works on."""
    model, _ = make()
    optimizer = Fails(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="backward")
    Fails.failing = False
    train(model, optimizer, range(2))
    Fails.failing = True
    with pytest.raises(ZeroDivisionError, match="the update"):
        loss_of(model, 2).backward()
    after = weights(model)
    for use in (optimizer.step, lambda: loss_of(model, 3)):
        with pytest.raises(TornStepError) as torn:
            use()
        assert torn.value.step == 3
        assert "inner.weight" in torn.value.unsure
        assert torn.value.rank == dist.get_rank()
    assert equal(weights(model), after)
    overlap.accept_torn()
    Fails.failing = False
    train(model, optimizer, range(3, 6))
    assert overlap.step_count == 6  # the torn one counts
    overlap.detach()
    return True


def test_an_error_in_the_update(two_ranks: RankPool) -> None:
    assert two_ranks.run(body_step_raises) == [True] * 2


def body_failed_future(failing_bucket: int) -> tuple[str, bool, bool]:
    model, optimizer = make()
    overlap = instep.attach(model, optimizer, schedule="backward")
    train(model, optimizer, range(2))
    before = weights(model)
    real, calls = ReducerGroup._reduce, []

    def fail(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()
        raise ConnectionError("the peer is gone")

    def failing(*args: Any) -> Work:
        calls.append(args)
        work = real(*args)
        return work_of(work.get_future().then(fail)) if len(calls) - 1 == failing_bucket else work

    with mock.patch.object(ReducerGroup, "_reduce", failing):
        try:
            loss_of(model, 2).backward()
        except RuntimeError as error:
            message = str(error)
        else:
            message = "no error"
    assert len(calls) > 2
    untouched = equal(weights(model), before)
    try:
        optimizer.step()
        torn = False
    except TornStepError:
        torn = True
    overlap.detach()
    return message, untouched, torn


@pytest.mark.parametrize("failing_bucket", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_failed_communication_is_never_stepped_from(failing_bucket: int) -> None:
    """In the first bucket: nothing was written. In a later one: nothing, or torn, and said so at once."""
    pool = RankPool(2)
    try:
        for message, untouched, torn in pool.run(body_failed_future, failing_bucket):
            assert "the peer is gone" in message
            # Buckets that arrived before the failed one did may have been stepped by then; if so, it is said.
            assert untouched != torn
            assert untouched or failing_bucket == 1
    finally:
        pool.stop()


def body_peer_dies() -> tuple[str, bool, float]:
    model, optimizer = make()
    instep.attach(model, optimizer, schedule="backward")
    train(model, optimizer, range(2))
    before = weights(model)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started, error = time.monotonic(), "no error"
    with Pace() as pace:
        try:
            loss_of(model, 2).backward()
        except RuntimeError as caught:
            error = type(caught).__name__
    return error, equal(weights(model), before), pace.since(started)


def test_a_killed_peer_raises_on_the_survivor_and_writes_nothing() -> None:
    """torch's own overlap returns normally here, with half the local gradient applied."""
    pool = RankPool(2, group_seconds=30)
    error, untouched, seconds = pool.run_until_a_rank_dies(0, body_peer_dies)
    assert error in ("RuntimeError", "TornStepError")  # of its bucket, or of the vote on the last step
    assert untouched
    assert seconds < 30 + 5


def body_refusals() -> bool:
    model, optimizer = make()
    inner = model.module
    with pytest.raises(AttachError, match=r"Attach the DistributedDataParallel instead"):
        instep.attach(inner, optimizer, schedule="backward")
    with pytest.raises(AttachError, match="bucket_cap_mb"):
        instep.attach(model, optimizer, bucket_bytes=1024, schedule="backward")
    with instep.attach(model, optimizer, schedule="backward"), pytest.raises(AttachError, match="already attached"):
        instep.attach(model, optimizer, schedule="backward")
    require_two_optimizers_at_once(model)

    hooked, optimizer = make()
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(AttachError, match="already has a communication hook"):
        instep.attach(hooked, optimizer, schedule="backward")

    delayed = Blocks()
    late = [("outer.weight", delayed.outer.weight), ("outer.bias", delayed.outer.bias)]
    delaying = DistributedDataParallel(
        delayed, delay_all_reduce_named_params=late, param_to_hook_all_reduce=delayed.inner.weight
    )
    with pytest.raises(AttachError, match="delay_all_reduce_named_params"):
        instep.attach(delaying, torch.optim.SGD(delaying.parameters(), lr=0.1), schedule="backward")

    early = Blocks()
    with instep.attach(early, torch.optim.SGD(early.parameters(), lr=0.1), schedule="backward"):
        wrapped = DistributedDataParallel(early)
        with pytest.raises(StaleAttachmentError, match="wrap the model in DistributedDataParallel"):
            loss_of(wrapped, 0)
    return True


def test_what_is_refused(two_ranks: RankPool) -> None:
    assert two_ranks.run(body_refusals) == [True] * 2


def body_inside_another_module() -> str | None:
    def run(attach: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = WithOwn(make()[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if attach:
            overlap = instep.attach(model, optimizer, schedule="backward")
            assert {bucket.source for bucket in overlap.plan.buckets} == {"ddp", "local"}
        train(model, optimizer, range(4))
        return model, optimizer

    plain, attached = run(False), run(True)
    return first_difference(training_state(*plain), training_state(*attached))


def test_ddp_inside_another_module(three_ranks: RankPool) -> None:
    assert three_ranks.run(body_inside_another_module) == [None] * 3


def body_plan() -> str:
    model, optimizer = make()
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        assert len(overlap.plan.buckets) == 1
        train(model, optimizer, range(2))
        assert sum(len(bucket.parameters) for bucket in overlap.plan.buckets) == len(list(model.parameters()))
        return str(overlap.plan)


def test_the_plan_shows_the_buckets_of_ddp(two_ranks: RankPool) -> None:
    plan, other = two_ranks.run(body_plan)
    assert plan == other
    assert plan.splitlines()[1].split()[1] == "ddp"
    assert len(plan.splitlines()) > 4
    assert "module." not in plan


def body_error_beside_ddp() -> bool:
    """An error of a local parameter's update must not come before DDP is done with the same backward."""
    model = WithOwn(make()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        train(model, optimizer, range(2))
        decorated: Any = torch.optim.SGD.step
        real = decorated.__wrapped__

        def failing(self: Any, closure: Any = None) -> None:
            raise ZeroDivisionError("once")

        failing.__module__ = real.__module__  # else it is no longer torch's own optimizer
        decorated.__wrapped__ = failing
        try:
            with pytest.raises(ZeroDivisionError):
                loss_of(model, 2).backward()
        finally:
            decorated.__wrapped__ = real
        overlap.accept_torn()
        train(model, optimizer, range(3, 6))
        assert overlap.step_count == 6  # the torn one counts
    return True


def test_an_error_beside_ddp_leaves_it_usable(two_ranks: RankPool) -> None:
    assert two_ranks.run(body_error_beside_ddp) == [True] * 2


def body_thawed_after_wrapping(view: bool) -> str | None:
    """Frozen when DDP was built, thawed later: DDP never reduces it, and each rank trains its own, attached or not."""

    def run(attach: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        inner = Blocks()
        inner.outer.requires_grad_(False)
        model = DistributedDataParallel(inner, gradient_as_bucket_view=view)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if attach:
            instep.attach(model, optimizer, schedule="backward")
        for i in range(4):
            inner.outer.requires_grad_(i >= 2)
            loss_of(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    return first_difference(training_state(*run(False)), training_state(*run(True)))


@pytest.mark.parametrize("view", [False, True])
def test_a_parameter_thawed_after_wrapping(three_ranks: RankPool, view: bool) -> None:
    assert three_ranks.run(body_thawed_after_wrapping, view) == [None] * 3


def body_cleared_after_the_forward(options: dict[str, Any], view: bool) -> str | None:
    """DDP's second forward lays out its buckets anew, and meets the gradients of the step before."""

    def run(attach: bool) -> Iterator[tuple[str, Any]]:
        model = make(gradient_as_bucket_view=view)[0]
        # Not fused: over the rows of a rank that rounds in another way (docs/sharded.md).
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        overlap = instep.attach(model, optimizer, **options) if attach else None
        for i in range(4):
            loss = loss_of(model, i)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if overlap is not None:
            optimizer.zero_grad()
            overlap.synchronize()
            overlap.detach()
            assert not model._forward_pre_hooks
            assert not model._forward_hooks
        return training_state(model, optimizer)

    return first_difference(run(False), run(True))


CLEARED_LATE: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True},
}


@pytest.mark.parametrize(("how", "view"), [(how, view) for how in CLEARED_LATE for view in (True, False)])
def test_gradients_cleared_after_the_forward(three_ranks: RankPool, how: str, view: bool) -> None:
    assert three_ranks.run(body_cleared_after_the_forward, CLEARED_LATE[how], view) == [None] * 3


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_gradients_cleared_after_the_forward_of_divided_state(two_ranks: RankPool, schedule: str) -> None:
    options = {"schedule": schedule, "defer": schedule == "forward", "shard_state": True}
    assert two_ranks.run(body_cleared_after_the_forward, options, True) == [None] * 2
