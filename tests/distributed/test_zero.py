"""``shard_state=True``: the parameters and the whole state are those of plain DDP with the plain optimizer."""

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AccumulationError, AttachError, HyperparameterChangedError, TornStepError
from instep.sources.zero.shards import StateShards
from instep_tools.harness import LiveBytes
from tests import net
from tests.cases import Blocks, Sometimes, Tied, batch, grad_of, optimizer_cases, two_groups, weights
from tests.devices import here, on_cpu_only
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, Step, loss_of, sampled
from tests.distributed.zero import WAYS, adamw, both, ddp, same, saved
from tests.stopping import Stops

# Fused kernels on a CPU round the last elements of a tensor, which do not fill a vector, in another way than the
# others: which these are depends on how the tensor is divided.
ELEMENTWISE = {c[0]: c for c in optimizer_cases() if not c[0].startswith("Adafactor") and "fused" not in c[0]}
in_every_way = pytest.mark.parametrize("way", ["backward", "forward", pytest.param("late", marks=pytest.mark.nightly)])


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(two_groups(model), lr=1e-2)


def one_optimizer(way: str, cls: Any, kwargs: Any) -> None:
    both(way, lambda model: cls(two_groups(model), **kwargs), steps=4)


@pytest.mark.parametrize(("name", "way"), sampled(ELEMENTWISE, 12, WAYS))
def test_every_elementwise_optimizer(two_ranks: RankPool, way: str, name: str) -> None:
    two_ranks.run(one_optimizer, way, *ELEMENTWISE[name][1:])


def halves(way: str) -> tuple[int, int]:
    """How many elements of state there are here, and in the whole."""
    loop = Loop(ddp(Blocks()), None)
    loop.optimizer = adamw(loop.model)
    with instep.attach(loop.model, loop.optimizer, shard_state=True, **WAYS[way]):
        for i in range(3):
            loop.learn(i)
        kept = [v for entry in loop.optimizer.state.values() for k, v in entry.items() if k != "step"]
        assert all(isinstance(v, DTensor) for v in kept)
        return sum(v.to_local().numel() for v in kept), sum(v.numel() for v in kept)


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_each_rank_has_its_share_of_the_state(two_ranks: RankPool, way: str) -> None:
    shares = two_ranks.run(halves, way)
    assert sum(here for here, _ in shares) == shares[0][1]
    assert max(here for here, _ in shares) < 0.52 * shares[0][1]


def kept_by_backward(way: str) -> tuple[int, int]:
    """How many bytes there are more after it than before, and how many there are of gradients."""
    with LiveBytes() as live:
        loop = Loop(ddp(Blocks(), gradient_as_bucket_view=True), None)
        loop.optimizer = adamw(loop.model)
        with instep.attach(loop.model, loop.optimizer, shard_state=True, **WAYS[way]):
            for i in range(3):
                loop.learn(i)
            before = live.now
            loss_of(loop.model(batch(3)[0]), batch(3)[1]).backward()
            after = live.now
            loop.optimizer.step()
    return after - before, sum(p.nbytes for p in loop.model.parameters())


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_backward_keeps_nothing_but_ddps_own_buckets(two_ranks: RankPool, way: str) -> None:
    for kept, gradients in two_ranks.run(kept_by_backward, way):
        assert kept < gradients / 20


def kept_of_what_was_sent() -> int:
    model = ddp(Blocks())
    shards = StateShards(cast(DistributedDataParallel, model))
    parameters = list(model.parameters())
    parts = [shards.shard_of(p, adamw(model)) for p in parameters]
    with LiveBytes(parameters) as live:
        scattered = shards.scatter([torch.ones_like(p) for p in parameters], parts, 2, torch.float32)
        there = live.now
        until = time.monotonic() + net.SECONDS / 2
        while not scattered.free_if_done():
            assert time.monotonic() < until
            time.sleep(0.01)
        kept = live.now
    assert all(torch.equal(g.to_local(), torch.ones_like(g.to_local())) for g in scattered.gradients(parameters))
    size = sum(p.nbytes for p in parameters)
    assert 1.9 * size < there < 2.1 * size
    return kept - there + size


@on_cpu_only
def test_what_was_sent_is_let_go(two_ranks: RankPool) -> None:
    for kept in two_ranks.run(kept_of_what_was_sent):
        assert kept <= 0


def kept_by_the_loop() -> list[bool]:
    loop = Loop(ddp(Blocks()), None)
    loop.optimizer = adamw(loop.model)
    with instep.attach(loop.model, loop.optimizer, shard_state=True, schedule="forward", defer=True):
        loop.learn(0)
        loop.backward(1)
        kept = [p.grad.to_local() for p in loop.model.parameters()]
        expected = [gradient.clone() for gradient in kept]
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.learn(2)
    return list(map(torch.equal, kept, expected))


def test_gradients_that_the_loop_keeps_stay_as_they_were(two_ranks: RankPool) -> None:
    """As in the plain loop, where they are no views of buckets."""
    for stayed in two_ranks.run(kept_by_the_loop):
        assert all(stayed)


class OfMine(torch.optim.AdamW):
    """Nobody knows whether the update of a class of the user's own is elementwise."""


WHOLE = {c[0]: c for c in optimizer_cases() if c[0].startswith("Adafactor")}
WHOLE["OfMine"] = ("OfMine", OfMine, {"lr": 1e-2})
WHOLE["OfMine-fused"] = ("OfMine", OfMine, {"lr": 1e-2, "fused": True})


def owned(way: str, cls: Any, kwargs: Any) -> None:
    loop = both(way, lambda model: cls(two_groups(model), **kwargs), build=Odd, steps=4)
    with instep.attach(loop.model, loop.optimizer, shard_state=True, **WAYS[way]):
        loop.learn(0)
        kept = [p for p, entry in loop.optimizer.state.items() if entry]
        numbers = [sum(p.numel() for p in kept)] * dist.get_world_size()
        dist.all_gather_object(numbers, numbers[0])
        trained = [p for group in loop.optimizer.param_groups for p in group["params"] if p.requires_grad]
        assert sum(numbers) == sum(p.numel() for p in trained)
        assert max(numbers) < 0.6 * sum(numbers)


@in_every_way
@pytest.mark.parametrize("name", list(WHOLE))
def test_whole_parameters_per_rank_where_the_update_is_not_elementwise(
    two_ranks: RankPool, way: str, name: str
) -> None:
    two_ranks.run(owned, way, *WHOLE[name][1:])


def muon(way: str, options: Mapping[str, Any]) -> None:
    """Beside another optimizer, whose parameters are divided by rows, in the same buckets."""
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(ddp(Odd()))
        matrices = [p for p in models[-1].parameters() if p.dim() == 2]
        rest = [p for p in models[-1].parameters() if p.dim() != 2]
        optimizers.append([torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)])
    clip = options.get("clip")
    with instep.attach(models[1], optimizers[1], shard_state=True, **WAYS[way], **options) as overlap:
        for i in range(5):
            for model, pair in zip(models, optimizers, strict=True):
                Loop(model, None).backward(i)
                if clip is not None and model is models[0]:
                    norm = nn.utils.clip_grad_norm_(model.parameters(), clip.max_norm)
                for optimizer in pair:
                    optimizer.step()
                    optimizer.zero_grad()
            overlap.synchronize()
            if clip is None:
                assert all(map(torch.equal, weights(models[0]), weights(models[1]))), f"iteration {i}"
                assert [same(*pair) for pair in zip(*optimizers, strict=True)] == [None, None], f"iteration {i}"
            else:
                assert overlap.grad_norm is not None
                assert near(overlap.grad_norm, norm)
                assert all(map(near, weights(models[0]), weights(models[1]))), f"iteration {i}"


def in_an_autocast_block(way: str) -> list[str]:
    """Each rank's parts are updated by instep, outside of it."""
    torch.manual_seed(0)
    model = ddp(Blocks())
    optimizer = adafactor(model)
    found = []
    with instep.attach(model, optimizer, shard_state=True, **WAYS[way]) as overlap:
        before = [weight.clone() for weight in weights(model)]
        for parameter in model.parameters():  # of no backward
            parameter.grad = torch.ones_like(parameter)
        with torch.autocast(here().type, torch.bfloat16):
            found.append(said(HyperparameterChangedError, optimizer.step))
        assert all(map(torch.equal, weights(model), before))
        optimizer.zero_grad()
        x, y = batch(0)
        with torch.autocast(here().type, torch.bfloat16):
            loss_of(model(x).float(), y).backward()
            found.append(said(HyperparameterChangedError, optimizer.step))
        if way == "forward":  # nothing is written before step()
            optimizer.step()
            overlap.synchronize()
            assert not any(map(torch.equal, weights(model), before))
        else:
            found.append(said(TornStepError, lambda: model(x)))
            overlap.accept_torn()
    return found


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_a_step_in_an_autocast_block_that_changes_it(two_ranks: RankPool, way: str) -> None:
    for found in two_ranks.run(in_an_autocast_block, way):
        assert all("inside an autocast block" in said_ for said_ in found)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("way", ["backward", "forward"])
def test_muon_beside_another(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(muon, way, {})


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_muon_clipped(two_ranks: RankPool) -> None:
    """The norm of what is divided by rows is summed up in another order."""
    two_ranks.run(muon, "forward", {"clip": instep.ClipNorm(0.3)})


def stateless(model: nn.Module) -> torch.optim.Optimizer:
    return Stops(model.parameters(), lr=0.05)


def without_state(way: str) -> None:
    both(way, stateless, reloaded)


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_an_optimizer_that_keeps_no_state(two_ranks: RankPool, way: str) -> None:
    """Of a parameter that another rank steps it has an empty entry, and of its own none."""
    two_ranks.run(without_state, way)


class Odd(Blocks):
    """Parameters that do not divide by the number of ranks: a scalar, one row, three rows; and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.row = nn.Parameter(torch.ones(1, 24))
        self.three = nn.Parameter(torch.ones(3, 8))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) * self.scale + self.row + self.three.flatten()
        for block in self.blocks:
            x = x + block(x)
        return self.outer(x)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch leaves it out
        self.out = nn.Linear(8 * 2 * 2, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.conv(x.view(-1, 1, 4, 4)).flatten(1))


class Bfloat16(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x.bfloat16()).float()
        return self.outer(x)


MODELS: dict[str, dict[str, Any]] = {
    "odd shapes": {"build": Odd},
    "channels last": {"build": ChannelsLast},
    "bfloat16 and float32": {"build": Bfloat16},
    "bucket views": {"wrap": partial(ddp, gradient_as_bucket_view=True)},
    "static graph": {"wrap": partial(ddp, static_graph=True)},
    "one bucket": {"wrap": partial(ddp, bucket_cap_mb=25)},
    "find unused": {"wrap": partial(ddp, find_unused_parameters=True)},
    "find unused, bucket views": {"wrap": partial(ddp, find_unused_parameters=True, gradient_as_bucket_view=True)},
    "amsgrad": {"make_optimizer": partial(adamw, amsgrad=True)},
    "low precision": {},
}


def one_model(name: str, way: str) -> None:
    both(way, **MODELS[name])


@in_every_way
@pytest.mark.parametrize("name", list(MODELS))
def test_models(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_model, name, way)


def experts(way: str, views: bool) -> None:
    """Each rank picks its own expert; some iterations use none."""

    def step(loop: Loop, i: int) -> None:
        x, y = batch(i)
        expert = [0, 1, None][(i + dist.get_rank()) % 3] if i != 3 else None
        loss_of(loop.model(x, expert), y).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    both(
        way,
        step=step,
        build=Sometimes,
        wrap=partial(ddp, find_unused_parameters=True, gradient_as_bucket_view=views),
        steps=6,
    )


@in_every_way
@pytest.mark.parametrize("views", [False, True])
def test_parameters_that_some_ranks_do_not_use(two_ranks: RankPool, way: str, views: bool) -> None:
    two_ranks.run(experts, way, views)


def tied(way: str) -> None:
    def step(loop: Loop, i: int) -> None:
        tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator(here()).manual_seed(i + dist.get_rank()))
        loss_of(loop.model(tokens).flatten(0, 1), tokens.flatten()).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    both(way, step=step, build=Tied)


@in_every_way
def test_tied_weights(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(tied, way)


def micro_batches(loop: Loop, i: int) -> None:
    with loop.model.no_sync():
        loop.backward(3 * i)
        loop.backward(3 * i + 1)
    loop.learn(3 * i + 2)


def counted(loop: Loop, i: int) -> None:
    if loop.overlap is None:
        micro_batches(loop, i)
    else:
        for number in range(2):
            loop.backward(3 * i + number)
        loop.learn(3 * i + 2)


def added_to_a_mean(loop: Loop, i: int) -> None:
    """DDP asks in its forward whether it is to communicate."""
    loss = loop.loss(2 * i)
    with nullcontext() if loop.overlap is None else loop.overlap.accumulate():
        loss.backward()
    loop.learn(2 * i + 1)


def scheduled(loop: Loop, i: int) -> None:
    loop.learn(i)
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.7


def evaluated(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    with torch.no_grad():
        return loop.loss(1000 + i)


def reloaded(loop: Loop, i: int) -> None:
    loop.learn(i)
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


def skipped(loop: Loop, i: int) -> None:
    loop.backward(i)
    loop.optimizer.zero_grad()
    loop.learn(i + 100)


LOOPS: dict[str, tuple[Step, dict[str, Any]]] = {
    "no_sync": (micro_batches, {}),
    "accumulation_steps": (counted, {"accumulation_steps": 3}),
    "accumulate() around backward alone": (added_to_a_mean, {}),
    "scheduled": (scheduled, {}),
    "evaluated": (evaluated, {}),
    "state_dict()": (saved, {}),
    "reloaded": (reloaded, {}),
}


def one_loop(name: str, way: str) -> None:
    step, options = {**LOOPS, "skipped": (skipped, {})}[name]
    both(way, step=step, **options)


@in_every_way
@pytest.mark.parametrize("name", list(LOOPS))
def test_loops(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_loop, name, way)


@pytest.mark.parametrize("way", ["forward", "late"])
def test_a_step_left_out(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(one_loop, "skipped", way)


# What is equal within rounding only, and why.


def fused_over_rows(way: str, cls: Any, kwargs: Any) -> None:
    """The oracle: the same optimizer over the rows, as each rank has them. To the optimizer over whole parameters it is
    equal within rounding: fused kernels on a CPU treat a tensor's last elements in another way."""
    torch.manual_seed(0)
    model = ddp(Odd())
    optimizer = cls(model.parameters(), **kwargs)
    torch.manual_seed(0)
    plain = ddp(Odd())
    trained = [p for p in plain.parameters() if p.requires_grad]
    rows = [list(p.detach().chunk(dist.get_world_size())) if p.dim() else [p.detach()] for p in trained]
    of_rows = cls([r.requires_grad_() for part in rows for r in part], **kwargs)
    torch.manual_seed(0)
    whole = ddp(Odd())
    of_whole = cls(whole.parameters(), **kwargs)
    with instep.attach(model, optimizer, shard_state=True, **WAYS[way]) as overlap:
        for i in range(4):
            Loop(model, optimizer).learn(i)
            Loop(whole, of_whole).learn(i)
            Loop(plain, None).backward(i)
            for p, parts in zip(trained, rows, strict=True):
                for r, g in zip(parts, grad_of(p).chunk(len(parts)) if p.dim() else [grad_of(p)], strict=True):
                    r.grad = g.clone()
                p.grad = None
            of_rows.step()
            overlap.synchronize()
            for p, q, w in zip(plain.parameters(), model.parameters(), whole.parameters(), strict=True):
                assert torch.equal(p, q), f"step {i}"
                torch.testing.assert_close(q, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["backward", "forward"])
@pytest.mark.parametrize("case", [c for c in optimizer_cases() if c[0].endswith("fused")], ids=lambda case: case[0])
def test_fused_kernels_over_rows(two_ranks: RankPool, way: str, case: Any) -> None:
    two_ranks.run(fused_over_rows, way, *case[1:])


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-6)


def three(way: str, make_optimizer: Any) -> None:
    both(way, make_optimizer, build=Odd, equal=near)


@pytest.mark.parametrize("way", ["backward", "forward"])
@pytest.mark.parametrize("make_optimizer", [adamw, adafactor])
def test_three_ranks_add_up_in_another_order(three_ranks: RankPool, way: str, make_optimizer: Any) -> None:
    """The ring of an all-reduce adds each element up in an order that depends on where in a bucket it lies."""
    three_ranks.run(three, way, make_optimizer)


def clip_by_hand(loop: Loop, i: int) -> torch.Tensor:
    loop.backward(i)
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_by_attach(loop: Loop, i: int) -> torch.Tensor:
    loop.backward(i)
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3) if loop.overlap is None else None
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loop.overlap.grad_norm if norm is None else norm


def clipped(way: str, by_attach: bool) -> None:
    """The norm is that of the ranks' rows: another order of summation than over whole gradients."""
    if by_attach:
        both(way, step=clip_by_attach, equal=near, clip=instep.ClipNorm(0.3), build=Odd)
    else:
        both(way, step=clip_by_hand, equal=near, build=Odd)


@pytest.mark.parametrize("by_attach", [True, False])
@pytest.mark.parametrize("way", ["forward", "late"])
def test_clipping(two_ranks: RankPool, way: str, by_attach: bool) -> None:
    two_ranks.run(clipped, way, by_attach)


def clip_value(way: str) -> None:
    def step(loop: Loop, i: int) -> None:
        loop.backward(i)
        if loop.overlap is None:
            nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    torch.manual_seed(0)
    plain, model = ddp(Odd()), ddp(Odd())
    model.load_state_dict(plain.state_dict())
    loops = [Loop(plain, adamw(plain)), Loop(model, adamw(model))]
    loops[1].overlap = instep.attach(
        model, loops[1].optimizer, shard_state=True, clip=instep.ClipValue(0.01), **WAYS[way]
    )
    for i in range(4):
        for loop in loops:
            step(loop, i)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    loops[1].overlap.detach()


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_clipping_by_value(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(clip_value, way)


def scaled() -> list[bool]:
    """An overflow in one rank's rows alone is skipped on all."""
    finite = []
    torch.manual_seed(0)
    plain, model = ddp(Odd()), ddp(Odd())
    model.load_state_dict(plain.state_dict())
    loops = [Loop(plain, adamw(plain)), Loop(model, adamw(model))]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in loops]
    with instep.attach(model, loops[1].optimizer, shard_state=True, schedule="forward", defer=True):
        for i in range(5):
            for loop, scaler in zip(loops, scalers, strict=True):
                if i == 2:
                    handle = loop.model.module.three.register_hook(
                        lambda g: g * g.new_tensor([[1.0], [1.0], [torch.inf]])
                    )
                scaler.scale(loop.loss(i)).backward()
                scaler.unscale_(loop.optimizer)
                scaler.step(loop.optimizer)
                scaler.update()
                loop.optimizer.zero_grad()
                if i == 2:
                    handle.remove()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            finite.append(all(map(torch.equal, plain.parameters(), model.parameters())))
    return finite


def test_a_loss_scale(two_ranks: RankPool) -> None:
    assert two_ranks.run(scaled) == [[True] * 5] * 2


def low_precision(way: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    torch.manual_seed(0)
    plain, model = ddp(Odd()), ddp(Odd())
    model.load_state_dict(plain.state_dict())
    loops = [Loop(plain, adamw(plain)), Loop(model, adamw(model))]
    first = instep.attach(plain, loops[0].optimizer, mixed_precision=policy, schedule="backward")
    with instep.attach(model, loops[1].optimizer, shard_state=True, mixed_precision=policy, **WAYS[way]) as overlap:
        for i in range(4):
            for loop in loops:
                loop.learn(i)
            overlap.synchronize()
            assert all(map(torch.equal, plain.parameters(), model.parameters())), f"step {i}"
    first.detach()


@in_every_way
def test_mixed_precision(two_ranks: RankPool, way: str) -> None:
    """Equal to ``mixed_precision`` without ``shard_state``, which has tests of its own."""
    two_ranks.run(low_precision, way)


# Checkpoints.


def resumed(way: str, make_optimizer: Any, path: str, load_at: int | None) -> dict[str, Any] | None:
    """Trains six steps in all, three of them after a resume."""
    torch.manual_seed(0)
    model: Any = ddp(Odd())
    loop = Loop(model, make_optimizer(model))
    if load_at is None:
        overlap = instep.attach(model, loop.optimizer, shard_state=True, **WAYS[way])
        for i in range(3):
            loop.learn(i)
        saved = {"model": model.module.state_dict(), "optimizer": loop.optimizer.state_dict()}
        overlap.detach()
        if dist.get_rank() == 0:
            torch.save(saved, path)
        dist.barrier()
        return None
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    if load_at == 0:  # the state is there when it is attached
        loop.optimizer.load_state_dict(saved["optimizer"])
    overlap = instep.attach(model, loop.optimizer, shard_state=True, **WAYS[way])
    if load_at == 1:
        loop.optimizer.load_state_dict(saved["optimizer"])
    again = loop.optimizer.state_dict()
    for number, entry in saved["optimizer"]["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, again["state"][number][key]), key
    # The same data on all ranks, so that the world size does not matter.
    plain_model = Odd()
    plain_model.load_state_dict(saved["model"])
    plain = Loop(plain_model, make_optimizer(plain_model))
    plain.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    for i in range(3):
        for one in (plain, loop):
            x, y = batch(i)
            loss_of(one.model(x), y).backward()
            one.optimizer.step()
            one.optimizer.zero_grad()
    overlap.synchronize()
    for p, q in zip(plain_model.parameters(), model.module.parameters(), strict=True):
        # The mean of three equal gradients is rounded, and Adam divides by the root of its small second moments.
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    overlap.detach()
    return None


@pytest.mark.parametrize("load_at", [0, 1])
@pytest.mark.parametrize(("way", "make_optimizer"), [("backward", adamw), ("forward", adamw), ("forward", adafactor)])
def test_saved_by_two_ranks_and_loaded_by_three(
    two_ranks: RankPool, three_ranks: RankPool, way: str, make_optimizer: Any, load_at: int, tmp_path: Any
) -> None:
    path = str(tmp_path / "checkpoint")
    two_ranks.run(resumed, way, make_optimizer, path, None)
    three_ranks.run(resumed, way, make_optimizer, path, load_at)


def distributed_checkpoint(way: str, make_optimizer: Any) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    torch.manual_seed(0)
    plain, model = ddp(Odd()), ddp(Odd())
    model.load_state_dict(plain.state_dict())
    loops = [Loop(plain, make_optimizer(plain)), Loop(model, make_optimizer(model))]
    loops[1].overlap = instep.attach(model, loops[1].optimizer, shard_state=True, **WAYS[way])
    options = StateDictOptions(full_state_dict=True)
    for trained in (False, True):
        if trained:
            for i in range(3):
                for loop in loops:
                    loop.learn(i)
        found: list[Any] = [get_state_dict(loop.model, loop.optimizer, options=options) for loop in loops]
        (weights_0, state_0), (weights_1, state_1) = found
        assert weights_0.keys() == weights_1.keys()
        assert all(torch.equal(weights_0[key], weights_1[key]) for key in weights_0)
        assert state_0["state"].keys() == state_1["state"].keys()
        for name, entry in state_0["state"].items():
            assert all(torch.equal(value, state_1["state"][name][key]) for key, value in entry.items()), name
    assert loops[1].overlap.step_count == 3
    for loop in loops:
        # It takes what it is given apart, and the tensors are those of the plain loop.
        given: dict[str, Any] = {
            "model_state_dict": copy.deepcopy(weights_0),
            "optim_state_dict": copy.deepcopy(state_0),
        }
        set_state_dict(loop.model, loop.optimizer, options=options, **given)
    for loop in loops:
        loop.learn(7)
    loops[1].overlap.synchronize()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    loops[1].overlap.detach()


@pytest.mark.parametrize("make_optimizer", [adamw, adafactor])
@pytest.mark.parametrize("way", ["backward", "forward"])
def test_distributed_checkpoint(two_ranks: RankPool, way: str, make_optimizer: Any) -> None:
    two_ranks.run(distributed_checkpoint, way, make_optimizer)


# What a user may get wrong.


def said(error: type[Exception], do: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        do()
    return str(caught.value)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))


def complex_parameters() -> str:
    turned = ddp(Complex())
    optimizer = torch.optim.SGD(turned.parameters(), lr=0.1)
    return said(AttachError, lambda: instep.attach(turned, optimizer, shard_state=True, schedule="backward"))


def test_complex_parameters(two_ranks: RankPool) -> None:
    for found in two_ranks.run(complex_parameters):
        assert "'turn'" in found


def left_out() -> str:
    model = ddp(Blocks())
    optimizer = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    return said(AttachError, lambda: instep.attach(model, optimizer, shard_state=True, schedule="backward"))


def test_a_parameter_in_no_optimizer(two_ranks: RankPool) -> None:
    for found in two_ranks.run(left_out):
        assert "'inner.weight'" in found
        assert "requires_grad_(False)" in found


def mistakes() -> list[str]:
    alone = Blocks()
    model = ddp(Blocks())
    attach = partial(instep.attach, shard_state=True)
    found = [
        said(AttachError, lambda: attach(alone, adamw(alone), schedule="backward")),
        said(
            AttachError,
            lambda: attach(model, OfMine(model.parameters()), clip=instep.ClipValue(0.1), schedule="backward"),
        ),
        said(AttachError, lambda: attach(model, adamw(model), undo=True, schedule="backward")),
        said(
            AttachError,
            lambda: attach(model, adamw(model), comm_hook=(None, lambda state, bucket: state), schedule="backward"),
        ),
        said(
            AttachError,
            lambda: attach(model, adamw(model), clip=instep.ClipNorm(1.0, mode="two_pass"), schedule="backward"),
        ),
    ]
    loop = Loop(model, adamw(model))
    with attach(model, loop.optimizer, schedule="forward", defer=True):
        loop.learn(0)
        loop.backward(1)
        found.append(said(AccumulationError, lambda: loop.backward(2)))
    return found


def test_mistakes(two_ranks: RankPool) -> None:
    expected = [
        "a model that has no DistributedDataParallel",
        "OfMine",
        "undo=True does not go with shard_state=True",
        "comm_hook does not go with shard_state=True",
        "'two_pass'",
        "accumulate()",
    ]
    for found in two_ranks.run(mistakes):
        for said_, part in zip(found, expected, strict=True):
            assert part in said_
