"""``attach(cross_iteration=True)``: gradients that are on their way when backward returns, against plain DDP."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import instep
from instep._torch.placeholders import HeldGradient
from instep.errors import AttachError, InstepError, TornStepError
from instep.sources.cross_iteration import order as plan
from instep.sources.cross_iteration import source as crossing
from instep.sources.cross_iteration.order import CrossingTrial
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, Sometimes, Tied, batch, grad_of, weights
from tests.devices import here, on_cpu_only
from tests.distributed.casting import CastByHand, send_as
from tests.distributed.crossing import OPTIMIZERS, STEPS, Loop, Step, blocks, compare
from tests.distributed.pool import RankPool
from tests.inside import source_of
from tests.pace import Pace


class Normed(Blocks):
    """With buffers, which DDP broadcasts before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.running = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.running(x))


def tied(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator(here()).manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def sometimes(model: nn.Module, seed: int) -> torch.Tensor:
    """An expert that only the second rank uses, and not always."""
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x, 0 if dist.get_rank() == 1 and seed % 2 else None), y)


def assert_equal(pool: RankPool, *args: Any, **kwargs: Any) -> None:
    assert pool.run(compare, *args, **kwargs) == [None] * pool.world_size


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(two_ranks: RankPool, optimizer: str) -> None:
    assert_equal(two_ranks, optimizer=optimizer)


@pytest.mark.parametrize(
    "ddp", [{}, {"bucket_cap_mb": 25}, {"static_graph": True}, {"broadcast_buffers": False}], ids=str
)
@pytest.mark.parametrize(("make", "loss"), [(Blocks, blocks), (Tied, tied), (Normed, blocks)])
def test_on_three_ranks(three_ranks: RankPool, make: Any, loss: Any, ddp: Any) -> None:
    assert_equal(three_ranks, make=make, loss=loss, ddp=ddp)


class Experts(nn.Module):
    """DDP does not make its buckets anew where parameters may be unused, and its first ones are of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.big = Blocks(width=300, depth=3, out=16)
        self.sometimes = Sometimes()

    def forward(self, x: torch.Tensor, choice: int | None) -> torch.Tensor:
        found: torch.Tensor = self.sometimes(self.big(x), choice)
        return found


def test_parameters_that_only_some_ranks_use(three_ranks: RankPool) -> None:
    ddp = {"find_unused_parameters": True, "bucket_cap_mb": 0.5}
    assert_equal(three_ranks, make=Experts, loss=sometimes, ddp=ddp)


class HalfFrozen(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


def test_frozen_parameters(two_ranks: RankPool) -> None:
    assert_equal(two_ranks, make=HalfFrozen)


@pytest.mark.parametrize("send", [None, torch.bfloat16])
def test_mixed_precision(three_ranks: RankPool, send: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=send or torch.float32)
    assert three_ranks.run(mixed, policy) == [None] * 3


def mixed(policy: MixedPrecisionPolicy) -> str | None:
    plain = Loop(False, cast=partial(CastByHand, dtype=torch.bfloat16))
    send = policy.reduce_dtype or policy.param_dtype  # torch 2.6 forgets the first if both are the same
    if send is not torch.float32:
        plain.model.register_comm_hook(send, send_as)
    attached = Loop(True, options={"mixed_precision": policy})
    with attached.overlap:
        for i in range(STEPS):
            plain.step(i)
            attached.step(i)
        attached.overlap.synchronize()
        pairs = zip(plain.model.parameters(), attached.model.parameters(), strict=True)
        return None if all(torch.equal(p, q) for p, q in pairs) else "weights"


# What a loop may do with gradients, and between steps.


def accumulates(loop: Loop, i: int) -> None:
    for micro in range(3):
        hold = nullcontext() if micro == 2 else loop.overlap.accumulate() if loop.overlap else loop.model.no_sync()
        with hold:
            loop.backward(3 * i + micro)
    loop.finish()


def clips(loop: Loop, i: int) -> torch.Tensor:
    loop.backward(i)
    norm = clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.finish()
    return norm


def reads_one(loop: Loop, i: int) -> torch.Tensor:
    loop.backward(i)
    gradient = loop.model.module.blocks[1][1].weight.grad
    assert gradient is not None
    found = gradient.sum() if i % 3 == 1 else torch.zeros(())
    loop.finish()
    return found


def changes_one(loop: Loop, i: int) -> None:
    loop.backward(i)
    if i % 3 == 1:
        loop.model.module.outer.weight.grad.mul_(2)
    loop.finish()


def drops_one(loop: Loop, i: int) -> None:
    loop.backward(i)
    if i % 3 == 1:
        loop.model.module.outer.weight.grad = None
    loop.finish()


def gives_up_a_batch(loop: Loop, i: int) -> None:
    loop.backward(100 + i)
    loop.optimizer.zero_grad()
    loop.step(i)


def backs_twice(loop: Loop, i: int) -> None:
    """DDP reduces both times; gradients add up."""
    loop.backward(100 + i)
    loop.step(i)


def zeroes_in_place(loop: Loop, i: int) -> None:
    loop.backward(i)
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.scheduler.step()


def never_clears(loop: Loop, i: int) -> None:
    loop.backward(i)
    loop.optimizer.step()
    loop.scheduler.step()


def evaluates(loop: Loop, i: int) -> torch.Tensor:
    loop.backward(i)
    with torch.no_grad():
        before = loop.model.module(batch(1)[0])
    loop.finish()
    with torch.no_grad():
        return torch.stack([before, loop.model.module(batch(1)[0])])


def sends_its_own(loop: Loop, i: int) -> torch.Tensor:
    """The loop's collectives come at any time, between those of the buckets."""
    loop.backward(i)
    mine = torch.full((1000,), float(dist.get_rank() + i))
    dist.all_reduce(mine)
    loop.finish()
    dist.all_reduce(mine)
    return mine


def saves(loop: Loop, i: int) -> Any:
    loop.step(i)
    return torch.cat([p.flatten() for p in loop.model.state_dict().values()]) if i % 3 == 0 else None


def scales(loop: Loop, i: int) -> float:
    if not hasattr(loop, "scaler"):
        loop.scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=2)  # type: ignore[attr-defined]
    scaler: GradScaler = loop.scaler  # type: ignore[attr-defined]
    loss = loop.loss(loop.model, 1000 * dist.get_rank() + i)
    scaler.scale(loss).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    loop.optimizer.zero_grad()
    return scaler.get_scale()


@pytest.mark.parametrize(
    "step",
    [
        accumulates,
        clips,
        reads_one,
        changes_one,
        drops_one,
        gives_up_a_batch,
        backs_twice,
        zeroes_in_place,
        never_clears,
        evaluates,
        sends_its_own,
        saves,
        scales,
    ],
)
def test_loops(three_ranks: RankPool, step: Step) -> None:
    assert_equal(three_ranks, step)


def joined() -> str | None:
    loops = []
    for attach in (False, True):
        loop = Loop(attach)
        with loop.model.join():
            for i in range(3 + 2 * dist.get_rank()):
                loop.step(i)
        for i in range(4):
            loop.step(100 + i)
        loops.append(loop)
    found = first_difference(loops[0].state(), loops[1].state())
    loops[1].overlap.detach()
    return found


def test_join_with_uneven_inputs(three_ranks: RankPool) -> None:
    assert three_ranks.run(joined) == [None] * 3


def detached() -> str | None:
    """With gradients on their way, and attached again."""
    plain, attached = Loop(False), Loop(True)
    for i in range(4):
        plain.step(i)
        attached.step(i)
    for loop in (plain, attached):
        loop.backward(4)
    attached.overlap.detach()
    gradients = [grad_of(p) for p in attached.model.parameters()]
    assert all(type(g) is torch.Tensor for g in gradients)
    found = [None if all(map(torch.equal, gradients, [grad_of(p) for p in plain.model.parameters()])) else "gradients"]
    for loop in (plain, attached):
        loop.finish()
        loop.step(5)
    found.append(first_difference(plain.state(), attached.state()))
    attached.overlap = instep.attach(
        attached.model, attached.optimizer, schedule="forward", defer=True, cross_iteration=True
    )
    for i in range(6, 12):
        plain.step(i)
        attached.step(i)
    with attached.overlap:
        found.append(first_difference(plain.state(), attached.state()))
    return next((text for text in found if text), None)


def test_detach_and_attach_again(three_ranks: RankPool) -> None:
    assert three_ranks.run(detached) == [None] * 3


def two_models() -> str | None:
    """Each has a process group of its own; several optimizers, and parameters of none."""
    loops = []
    for attach in (False, True):
        torch.manual_seed(0)
        ddp: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.004}
        model = nn.ModuleList([DistributedDataParallel(Blocks(), **ddp), DistributedDataParallel(Blocks(10), **ddp)])
        model.append(nn.Linear(10, 10))
        optimizers = [
            torch.optim.AdamW([p for n, p in model[0].named_parameters() if "outer" not in n], fused=True),
            torch.optim.SGD([*model[1].parameters(), *model[2].parameters()], lr=0.1, momentum=0.9),
        ]
        overlap = (
            instep.attach(model, optimizers, schedule="forward", defer=True, cross_iteration=True) if attach else None
        )
        for i in range(8):
            x, y = batch(1000 * dist.get_rank() + i)
            h = model[0](x)
            loss = nn.functional.cross_entropy(model[2](model[1](torch.cat([h, h[:, :6]], 1))), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        if overlap is not None:
            overlap.synchronize()
        loops.append([*training_state(model, optimizers[0]), *training_state(model, optimizers[1])])
        if overlap is not None:
            overlap.detach()
    return first_difference(iter(loops[0]), iter(loops[1]))


def test_several_models_and_optimizers(two_ranks: RankPool) -> None:
    assert two_ranks.run(two_models) == [None] * 2


def on_their_way() -> None:
    """Backward returns before a bucket has arrived, a use of any gradient waits for all, and the forward for each."""
    loop = Loop(True)
    overlap = loop.overlap
    for i in range(4):
        loop.step(i)
    held: list[tuple[torch.futures.Future[Any], Any]] = []

    def start(*args: Any) -> torch.futures.Future[Any]:
        held.append((torch.futures.Future(), args))
        return held[-1][0]

    real = crossing._start
    with patch.object(crossing, "_start", start):
        loop.backward(4)
    gradients = [p.grad for p in loop.model.parameters()]
    assert all(isinstance(g, HeldGradient) for g in gradients)
    loop.finish()
    assert overlap.step_count == 5
    assert overlap.state == "pending"
    assert not any(future.done() for future, _ in held)
    for future, args in held:
        real(*args).wait()
        future.set_result(None)
    loop.step(5)
    overlap.detach()


@on_cpu_only
def test_backward_does_not_wait(two_ranks: RankPool) -> None:
    two_ranks.run(on_their_way)


def chosen(crosses: float, waits: float) -> str | None:
    """As if an iteration took so long, on the first rank; the others find the opposite, by less."""
    real, here = CrossingTrial.took, dist.get_rank() == 0
    seconds = {True: crosses, False: waits} if here else {True: waits / 4, False: crosses / 4}
    plain, attached = Loop(False), Loop(True)
    overlap = attached.overlap
    crossed = []
    with patch.object(CrossingTrial, "took", lambda trial, i, first, _: real(trial, i, first, seconds[first])):
        for i in range(76):
            plain.step(i)
            attached.backward(i)
            crossed.append(bool(source_of(overlap).flights))
            attached.finish()
            # What was waited for is stepped by optimizer.step() itself.
            assert (overlap.state == "pending") == (crossed[-1] or i < 2)
            if i % 10 == 9:
                found = first_difference(plain.state(), attached.state())
                if found is not None:
                    return found
    # Two steps until the buckets are known; then both ways are tried; then one is kept.
    assert crossed[:25] == [False] * 2 + [True] * 7 + [False] * 8 + [True] * 8
    assert set(crossed[66:]) == {crosses < waits}
    assert overlap.step_count == 76
    overlap.detach()
    return first_difference(plain.state(), training_state(attached.model, attached.optimizer))


@pytest.mark.parametrize(("crosses", "waits"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_faster_way_is_kept(three_ranks: RankPool, crosses: float, waits: float) -> None:
    assert three_ranks.run(chosen, crosses, waits) == [None] * 3


def planned() -> list[Any]:
    loop, asked = Loop(True), []

    def best_order(timed: Any) -> Any:
        asked.append((list(timed), list(real(timed))))
        return asked[-1][1]

    real = plan.best_order
    with loop.overlap, patch.object(plan, "best_order", best_order):
        orders = []
        for i in range(20):
            loop.step(i)
            orders.append(list(source_of(loop.overlap)._plan.order))
        names = [[spec.name for spec in bucket.parameters] for bucket in loop.overlap.plan.buckets]
    return [orders, names, asked]


def test_the_order_is_the_same_on_all_ranks_and_holds_every_bucket(three_ranks: RankPool) -> None:
    first, second, third = three_ranks.run(planned)
    assert first == second == third
    orders, names, asked = first
    assert all(sorted(order) == list(range(len(order))) for order in orders)
    assert len(orders[-1]) > 3
    assert len(asked) > 1
    assert orders[-1] == asked[-1][1], "the one that was planned from measured times"
    assert sum(map(len, names)) == len(list(Blocks().parameters()))


# What goes wrong.


def fails_on(rank: int) -> Any:
    """One collective fails, on one rank or on all."""
    loop = Loop(True)
    for i in range(4):
        loop.step(i)
    loop.overlap.synchronize()
    before = weights(loop.model)
    real = dist.all_reduce
    calls = []

    def failing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        if len(calls) > 1 and rank in (dist.get_rank(), -1):
            raise RuntimeError("the link is down")
        return real(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", failing):
        loop.backward(4)
        loop.optimizer.step()
        with pytest.raises(RuntimeError) as raised:
            loop.overlap.synchronize()
    assert not isinstance(raised.value, TornStepError)
    with pytest.raises(TornStepError) as torn:
        loop.backward(5)
    written = {
        name
        for name, p, old in zip(names_of(loop), loop.model.parameters(), before, strict=True)
        if not torch.equal(p, old)
    }
    assert written == set(torn.value.applied)
    loop.overlap.accept_torn()
    loop.optimizer.zero_grad()
    with pytest.raises(InstepError, match="were not all reduced"):
        loop.backward(6)
    loop.overlap.detach()
    return str(raised.value)


def names_of(loop: Loop) -> Iterator[str]:
    return (name.removeprefix("module.") for name, _ in loop.model.named_parameters())


def test_a_collective_that_fails_on_all_ranks(two_ranks: RankPool) -> None:
    assert two_ranks.run(fails_on, -1) == ["the link is down"] * 2


def fails_where_it_is_read() -> None:
    loop = Loop(True)
    for i in range(4):
        loop.step(i)
    loop.overlap.synchronize()

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the link is down")

    with patch.object(dist, "all_reduce", failing):
        loop.backward(4)
        for p in loop.model.parameters():
            with pytest.raises(RuntimeError, match="the link is down"):
                grad_of(p).sum()
            if p.grad is None:
                break
    assert any(p.grad is None for p in loop.model.parameters()), "half of a gradient was left"
    loop.overlap.detach()


def test_a_gradient_that_did_not_arrive_is_none(brief: RankPool) -> None:
    brief.run(fails_where_it_is_read)


@pytest.fixture
def brief() -> Iterator[RankPool]:
    pool = RankPool(2, group_seconds=30)
    yield pool
    pool.stop()


def one_is_killed() -> Any:
    loop = Loop(True)
    for i in range(4):
        loop.step(i)
    loop.overlap.synchronize()
    before = weights(loop.model)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with Pace() as pace, pytest.raises((RuntimeError, InstepError)):  # noqa: PT012  # whichever comes to know of it
        loop.backward(4)
        loop.optimizer.step()
        loop.overlap.synchronize()
    return pace.since(started), all(map(torch.equal, before, weights(loop.model)))


def test_a_killed_peer_raises_on_the_survivor_and_writes_nothing(brief: RankPool) -> None:
    seconds, untouched = brief.run_until_a_rank_dies(0, one_is_killed)
    assert seconds < 30 + 5
    assert untouched


def backward_raises() -> str:
    loop = Loop(True)
    for i in range(4):
        loop.step(i)
    loop.overlap.synchronize()
    before = weights(loop.model)
    handle = loop.model.module.blocks[1][1].weight.register_hook(_raises)
    with pytest.raises(ZeroDivisionError):
        loop.backward(4)
    handle.remove()
    assert all(map(torch.equal, before, weights(loop.model)))
    assert not any(isinstance(p.grad, HeldGradient) for p in loop.model.parameters())
    loop.optimizer.zero_grad()
    with pytest.raises(RuntimeError) as raised:
        loop.backward(5)
    assert all(map(torch.equal, before, weights(loop.model)))
    loop.overlap.detach()
    return str(raised.value)


def _raises(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_a_backward_that_raises_on_all_ranks(brief: RankPool) -> None:
    """DDP says so itself, in its next forward, with instep or without."""
    for said in brief.run(backward_raises):
        assert "Expected to have finished reduction" in said


@pytest.mark.parametrize(
    ("options", "ddp", "match"),
    [
        ({"schedule": "backward", "defer": False}, {}, "schedule='forward'"),
        ({"clip": instep.ClipNorm(1.0)}, {}, "clip="),
        ({"nonfinite": "skip"}, {}, "nonfinite="),
        ({"comm_hook": (None, send_as)}, {}, "comm_hook"),
        ({"shard_state": True}, {}, "shard_state"),
        ({}, {"gradient_as_bucket_view": False}, "gradient_as_bucket_view=True"),
    ],
)
def test_what_is_refused(two_ranks: RankPool, options: Any, ddp: Any, match: str) -> None:
    for said in two_ranks.run(refused, options, ddp):
        assert match in said


def refused(options: Any, ddp: Any) -> str:
    model = DistributedDataParallel(Blocks(), **{"gradient_as_bucket_view": True, **ddp})
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(AttachError) as raised:
        instep.attach(model, optimizer, **{"schedule": "forward", "defer": True, "cross_iteration": True, **options})
    assert "cross_iteration=True" in str(raised.value)
    return str(raised.value)


def test_a_model_without_ddp_is_refused() -> None:
    model = Blocks()
    with pytest.raises(AttachError, match="DistributedDataParallel"):
        instep.attach(
            model, torch.optim.AdamW(model.parameters()), schedule="forward", defer=True, cross_iteration=True
        )


@pytest.mark.parametrize("clip", [instep.ClipValue(0.01)])
def test_clipping_of_single_values(three_ranks: RankPool, clip: instep.ClipValue) -> None:
    assert three_ranks.run(value_clipped, clip) == [None] * 3


def value_clipped(clip: instep.ClipValue) -> str | None:
    plain, attached = Loop(False), Loop(True, options={"clip": clip})
    with attached.overlap:
        for i in range(STEPS):
            plain.backward(i)
            torch.nn.utils.clip_grad_value_(plain.model.parameters(), clip.clip_value)
            plain.finish()
            attached.step(i)
        return first_difference(plain.state(), attached.state())
