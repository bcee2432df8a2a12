"""``random="keyed"`` on ranks: what is whole on each of them draws the same on all, and each shard draws for itself."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError
from instep_tools.harness import first_difference
from tests.cases import batch
from tests.checkpoint import saved
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.distributed.sharded import fsdp1, mesh, nested
from tests.parity.keyed import (
    RECIPES,
    SEED,
    ByHand,
    Dropping,
    Langevin,
    Whitened,
    generators,
    groups_of,
    key_of,
    names_of,
    state_of,
)

KEYED: dict[str, Any] = {"random": "keyed", "seed": SEED}
STEPS = 4
WAYS: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "forward": {"schedule": "forward"},
    "put off": {"schedule": "forward", "defer": True},
}
in_every_way = pytest.mark.parametrize("way", ["backward", "undo", "forward", "put off"])


def ddp(model: nn.Module, bucket_cap_mb: float = 0.004, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **options)


def bare_names(model: nn.Module) -> dict[int, str]:
    """Of what DDP and ``replicate`` wrap as ``module``."""
    return {key: name.removeprefix("module.") for key, name in names_of(model).items()}


def train(model: nn.Module, optimizer: Any, steps: int = STEPS, first: int = 0) -> None:
    """Each rank on data, and with random numbers, of its own."""
    for i in range(first, first + steps):
        seed = 1000 * dist.get_rank() + i
        torch.manual_seed(seed)
        x, y = batch(seed)
        nn.functional.cross_entropy(model(x.to(here())), y.to(here())).backward()
        optimizer.step()
        optimizer.zero_grad()


def made(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Dropping(torch.float32))


def parted(values: Iterator[tuple[str, Any]]) -> list[str]:
    """The names of the tensors that are not the same on all ranks."""
    found = []
    for name, value in values:
        if isinstance(value, torch.Tensor):
            ranks = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(ranks, value.contiguous())
            if not all(torch.equal(one, value) for one in ranks):
                found.append(name)
    return found


def against_the_hand(
    wrap: Callable[[nn.Module], nn.Module], recipe: str, options: Mapping[str, Any]
) -> tuple[str | None, list[str]]:
    """The first difference from the plain loop under DDP; and what has parted the ranks."""
    plain, model = made(ddp), made(wrap)
    by_hand = ByHand(RECIPES[recipe], groups_of(plain), bare_names(plain))
    optimizer = RECIPES[recipe](groups_of(model))
    with instep.attach(model, optimizer, **KEYED, **options) as overlap:
        train(plain, by_hand)
        train(model, optimizer)
        overlap.synchronize()
        found = list(state_of(optimizer, bare_names(model)))
    return first_difference(by_hand.state(), iter(found)), parted(iter(found))


@pytest.mark.parametrize("recipe", list(RECIPES))
@in_every_way
def test_ddp(two_ranks: RankPool, way: str, recipe: str) -> None:
    wrap = partial(ddp, gradient_as_bucket_view=True)
    assert two_ranks.run(against_the_hand, wrap, recipe, WAYS[way]) == [(None, [])] * 2


@pytest.mark.parametrize("way", ["backward", "put off"])
def test_replicate(two_ranks: RankPool, way: str) -> None:
    wrap = partial(instep.replicate, bucket_cap_mb=0.004)
    assert two_ranks.run(against_the_hand, wrap, "AdamW, rounded", WAYS[way]) == [(None, [])] * 2


def test_without_keys_ranks_part(two_ranks: RankPool) -> None:
    """In a plain loop whose ranks have random numbers of their own, as for their data; by default too."""
    assert two_ranks.run(_without_keys, False) == [True, True]
    assert two_ranks.run(_without_keys, True) == [True, True]


def _without_keys(attach: bool) -> bool:
    model = made(ddp)
    optimizer = Langevin(groups_of(model))
    if attach:
        instep.attach(model, optimizer)
    train(model, optimizer)
    return bool(parted(iter(model.named_parameters())))


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_sharded_state(two_ranks: RankPool, way: str) -> None:
    """Each parameter is stepped by one rank, as a whole: the numbers are those of DDP."""
    assert two_ranks.run(_sharded_state, WAYS[way]) == [(None, [])] * 2


def _sharded_state(options: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    plain, model = made(ddp), made(ddp)
    by_hand = ByHand(RECIPES["Kron-like"], groups_of(plain), bare_names(plain))
    optimizer = RECIPES["Kron-like"](groups_of(model))
    with instep.attach(model, optimizer, shard_state=True, **KEYED, **options) as overlap:
        train(plain, by_hand)
        train(model, optimizer)
        overlap.synchronize()
    # ``detach`` has brought the state together.
    found = list(state_of(optimizer, bare_names(model)))
    return first_difference(by_hand.state(), iter(found)), parted(iter(found))


# Shards.


class ByHandOnShards(ByHand):
    """Steps the local tensors of a sharded model's parameters."""

    def __init__(self, make: Any, groups: list[dict[str, Any]], names: Mapping[int, str], shards: Any) -> None:
        self._of: dict[Any, Any] = {}
        local = []
        for group in groups:
            mine = [nn.Parameter(p._local_tensor) for p in group["params"]]
            self._of.update(zip(mine, group["params"], strict=True))
            local.append({**group, "params": mine})
        by_id = {id(mine): names[id(p)] for mine, p in self._of.items()}
        super().__init__(make, local, by_id, shards)

    def step(self) -> None:
        for mine, p in self._of.items():
            mine.grad = None if p.grad is None else p.grad._local_tensor
        super().step()

    def zero_grad(self) -> None:
        for p in self._of.values():
            p.grad = None


def local(values: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return ((name, value._local_tensor if isinstance(value, DTensor) else value) for name, value in values)


def by_shard(
    wrap: Callable[[nn.Module], nn.Module], index: Callable[[], int], recipe: str, options: Mapping[str, Any]
) -> str | None:
    plain, model = made(wrap), made(wrap)
    names, make = names_of(plain), RECIPES[recipe]
    by_hand = ByHandOnShards(make, groups_of(plain), names, dict.fromkeys(names.values(), index()))
    optimizer = make(groups_of(model))
    with instep.attach(model, optimizer, **KEYED, **options) as overlap:
        train(plain, by_hand)
        train(model, optimizer)
        overlap.synchronize()
        return first_difference(by_hand.state(), local(state_of(optimizer, names_of(model))))


def whole(model: nn.Module) -> nn.Module:
    return nested(model, mesh=mesh(dist.get_world_size()))


@pytest.mark.parametrize("recipe", ["AdamW, rounded", "Langevin", "Kron-like"])
@in_every_way
def test_each_shard_of_fsdp2_draws_by_its_index(two_ranks: RankPool, way: str, recipe: str) -> None:
    assert two_ranks.run(by_shard, whole, dist.get_rank, recipe, WAYS[way]) == [None] * 2


def _on_two_by_two(model: nn.Module) -> nn.Module:
    return nested(model, mesh=mesh(2, 2))


def _second_dimension() -> int:
    return dist.get_rank() % 2


def test_replicas_of_a_shard_of_fsdp2_draw_the_same(four_ranks: RankPool) -> None:
    """HSDP: the index is that along the dimension over which parameters are sharded."""
    found = four_ranks.run(by_shard, _on_two_by_two, _second_dimension, "Langevin", WAYS["backward"])
    assert found == [None] * 4


def test_fsdp2_over_tensor_parallelism(four_ranks: RankPool) -> None:
    """FSDP2 over tensor parallelism: one index over both."""
    assert four_ranks.run(_places) == [[("0.bias", None), ("0.weight", rank)] for rank in range(4)]


def _places() -> list[tuple[str, int | None]]:
    torch.manual_seed(0)
    two = mesh(2, 2)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).to(here())
    parallelize_module(model, two["tp"], {"0": ColwiseParallel(use_local_output=False)})
    fully_shard(model, mesh=two["dp"])
    optimizer = Langevin([model[0].weight])
    keys: list[tuple[str, int | None]] = [("0.bias", None)]
    with instep.attach(model, optimizer, schedule="forward", **KEYED):
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        before = model[0].weight._local_tensor.clone()
        optimizer.step()
        drawn = model[0].weight._local_tensor - before
    for shard in range(4):
        for generator in generators():
            generator.manual_seed(key_of(0, "0.weight", shard))
        expected = before.float() + 1e-2 * torch.randn_like(before)
        if torch.equal(expected - before, drawn):
            keys.append(("0.weight", shard))
    return keys


def test_flat_shards_are_refused(two_ranks: RankPool) -> None:
    assert all("FullyShardedDataParallel" in words for words in two_ranks.run(_flat_shards))


def _flat_shards() -> str:
    model = fsdp1(Dropping(torch.float32))
    with pytest.raises(AttachError, match="random='keyed' for Langevin does not go with") as raised:
        instep.attach(model, Langevin(model.parameters()), schedule="backward", **KEYED)
    return str(raised.value)


# Going on.


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("shard", [False, True], ids=["ddp", "fsdp2"])
def test_resumed_on_ranks(two_ranks: RankPool, tmp_path: Path, shard: bool, after: int) -> None:
    wrap = whole if shard else ddp
    assert two_ranks.run(_resumed, wrap, tmp_path, after) == [None] * 2


def _resumed(wrap: Callable[[nn.Module], nn.Module], path: Path, after: int) -> str | None:
    found = []
    for interrupted in (False, True):
        model = made(wrap)
        optimizer = Whitened(groups_of(model))
        overlap = instep.attach(model, optimizer, schedule="backward", **KEYED)
        train(model, optimizer, STEPS if not interrupted else after)
        if interrupted:
            saved.save(path, model, optimizer, overlap)
            model = made(wrap)
            optimizer = Whitened(groups_of(model))
            overlap = instep.attach(model, optimizer, schedule="forward", **KEYED)
            saved.load(path, model, optimizer, overlap)
            train(model, optimizer, STEPS - after, after)
        overlap.synchronize()
        found.append(local(iter(list(state_of(optimizer, names_of(model))))))
        overlap.detach()
    return first_difference(*found)


def test_a_rank_that_takes_all_from_another_draws_as_that_does(two_ranks: RankPool) -> None:
    assert two_ranks.run(_resynced) == [[]] * 2


def _resynced() -> list[str]:
    model = made(ddp)
    optimizer = Langevin(groups_of(model))
    with instep.attach(model, optimizer, schedule="backward", **KEYED) as overlap:
        train(model, optimizer, 2)
        draws = overlap._parts.draws
        assert draws is not None
        draws.earlier = 10 + dist.get_rank()  # as if they had loaded checkpoints of different steps
        overlap.resync_from(1)
        assert overlap.state_dict()["draws"] == 13
        train(model, optimizer, 2, 2)
        return parted(state_of(optimizer, names_of(model)))
