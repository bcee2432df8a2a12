"""``shard_state=True``: the parameters and the whole state are those of plain DDP with the plain optimizer."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AccumulationError, AttachError, UnsupportedOptimizerError
from tests.cases import Blocks, Sometimes, Tied, batch, optimizer_cases, two_groups, weights
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, loss_of
from tests.late import late_updates

# Fused kernels on a CPU round the last elements of a tensor, which do not fill a vector, in another way than the others:
# which these are depends on how the tensor is divided.
ELEMENTWISE = [case for case in optimizer_cases() if not case[0].startswith("Adafactor") and "fused" not in case[0]]
WAYS: Mapping[str, Mapping[str, Any]] = {
    "backward": {},
    "forward": {"schedule": "forward"},
    "late": {"schedule": "forward"},
}
in_every_way = pytest.mark.parametrize("way", list(WAYS))


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return DistributedDataParallel(model.to(device), **{"bucket_cap_mb": 0.004, **options})


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, **options)


def flat(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    saved = optimizer.state_dict()
    for number, entry in saved["state"].items():
        for key, value in entry.items():
            assert not isinstance(value, DTensor)
            yield f"{number}.{key}", value
    yield "groups", str(saved["param_groups"])


def same(plain: Any, other: Any) -> str | None:
    a, b = dict(flat(plain)), dict(flat(other))
    if a.keys() != b.keys():
        return f"{a.keys() ^ b.keys()}"
    for key, value in a.items():
        equal = torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key]
        if not equal:
            return f"{key}: {value} and {b[key]}"
    return None


Step = Callable[[Loop, int], Any]


def both(
    way: str,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    step: Step = Loop.learn,
    build: Callable[[], nn.Module] = Blocks,
    wrap: Callable[[nn.Module], nn.Module] = ddp,
    steps: int = 5,
    equal: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal,
    **options: Any,
) -> Loop:
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = wrap(build())
        loops.append(Loop(model, make_optimizer(model)))
    plain, loop = loops
    loop.overlap = instep.attach(loop.model, loop.optimizer, shard_state=True, **{**WAYS[way], **options})
    with late_updates() if way == "late" else nullcontext():
        for i in range(steps):
            expected, found = step(plain, i), step(loop, i)
            if isinstance(expected, torch.Tensor):
                assert equal(expected, found), f"iteration {i}: {expected} and {found}"
            if way == "late" and i < steps - 1:
                continue
            loop.overlap.synchronize()
            for (name, _), a, b in zip(
                plain.model.named_parameters(), weights(plain.model), weights(loop.model), strict=True
            ):
                assert equal(a, b), f"iteration {i}: {name}"
            if equal is torch.equal:
                difference = same(plain.optimizer, loop.optimizer)
                assert difference is None, f"iteration {i}: {difference}"
    assert loop.overlap.step_count == steps
    loop.overlap.detach()
    if equal is torch.equal:
        for i in range(2):  # the optimizer is a plain one again
            step(plain, steps + i)
            loop.overlap = None
            step(loop, steps + i)
            assert all(map(torch.equal, weights(plain.model), weights(loop.model)))
    return loop


def one_optimizer(way: str, cls: Any, kwargs: Any) -> None:
    both(way, lambda model: cls(two_groups(model), **kwargs), steps=4)


@in_every_way
@pytest.mark.parametrize("case", ELEMENTWISE, ids=lambda case: case[0])
def test_every_elementwise_optimizer(two_ranks: RankPool, way: str, case: Any) -> None:
    two_ranks.run(one_optimizer, way, *case[1:])


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
        self.conv = nn.Conv2d(1, 8, 3).to(memory_format=torch.channels_last)
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


def frozen_later(loop: Loop, i: int) -> None:
    module = loop.model.module
    module.blocks[0].requires_grad_(i % 2 == 0)
    loop.learn(i)


MODELS: dict[str, dict[str, Any]] = {
    "odd shapes": {"build": Odd},
    "channels last": {"build": ChannelsLast},
    "bfloat16 and float32": {"build": Bfloat16},
    "bucket views": {"wrap": partial(ddp, gradient_as_bucket_view=True)},
    "static graph": {"wrap": partial(ddp, static_graph=True)},
    "one bucket": {"wrap": partial(ddp, bucket_cap_mb=25)},
    "find unused": {"wrap": partial(ddp, find_unused_parameters=True)},
    "amsgrad": {"make_optimizer": partial(adamw, amsgrad=True)},
    "low precision": {},
}


def one_model(name: str, way: str) -> None:
    both(way, **MODELS[name])


@in_every_way
@pytest.mark.parametrize("name", list(MODELS))
def test_models(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_model, name, way)


def experts(way: str) -> None:
    """Each rank picks its own expert; some iterations use none."""

    def step(loop: Loop, i: int) -> None:
        x, y = batch(i)
        expert = [0, 1, None][(i + dist.get_rank()) % 3] if i != 3 else None
        loss_of(loop.model(x, expert), y).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    both(way, step=step, build=Sometimes, wrap=partial(ddp, find_unused_parameters=True), steps=6)


@in_every_way
def test_parameters_that_some_ranks_do_not_use(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(experts, way)


def tied(way: str) -> None:
    def step(loop: Loop, i: int) -> None:
        tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(i + dist.get_rank()))
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
        return micro_batches(loop, i)
    loop.backward(3 * i)
    loop.backward(3 * i + 1)
    loop.learn(3 * i + 2)


def scheduled(loop: Loop, i: int) -> None:
    loop.learn(i)
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.7


def evaluated(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    with torch.no_grad():
        return loop.loss(1000 + i)


def saved(loop: Loop, i: int) -> torch.Tensor:
    loop.learn(i)
    return loop.model.state_dict()["module.blocks.2.3.weight"].clone()


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
    "scheduled": (scheduled, {}),
    "evaluated": (evaluated, {}),
    "state_dict()": (saved, {}),
    "reloaded": (reloaded, {}),
}


def one_loop(name: str, way: str) -> None:
    step, options = {**LOOPS, "skipped": (skipped, {})}[name]
    loop = both(way, step=step, **options) if name != "accumulation_steps" else both(way, step=step, steps=4, **options)
    del loop


@in_every_way
@pytest.mark.parametrize("name", [name for name in LOOPS if name != "accumulation_steps"])
def test_loops(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_loop, name, way)


@pytest.mark.parametrize("way", ["forward", "late"])
def test_a_step_left_out(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(one_loop, "skipped", way)
