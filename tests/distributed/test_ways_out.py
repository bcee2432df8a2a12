"""After a step that was torn: weights can be read, and every way out of docs/errors.md works, on every source."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import instep
from instep._optim.stepper import Stepper
from instep.errors import TornStepError, UncommittedStepError
from instep.sources.ddp.buckets import Reduction
from tests.cases import Blocks, batch, two_groups
from tests.checkpoint import saved
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, nested

SOURCES: Mapping[str, tuple[Callable[[nn.Module], nn.Module], Mapping[str, Any]]] = {
    "one device": (lambda model: model, {"bucket_bytes": 2_000}),
    "ddp": (lambda model: DistributedDataParallel(model, bucket_cap_mb=0.004), {}),
    "ddp, views": (lambda model: DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=True), {}),
    "shard_state": (lambda model: DistributedDataParallel(model, bucket_cap_mb=0.004), {"shard_state": True}),
    "replicate": (lambda model: instep.replicate(model, bucket_cap_mb=0.004), {}),
    "fsdp2": (nested, {}),
    "fsdp1": (lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=here()), {}),
}


class Alike(Loop):
    """With the same data on all ranks: what is not wrapped has the same weights everywhere, as a checkpoint asks."""

    def loss(self, i: int) -> torch.Tensor:
        x, y = batch(i)
        return nn.functional.cross_entropy(self.model(x), y)


WAYS_OUT = ("accept", "load by hand", "load", "detach")


@contextmanager
def torn(whole: int = 0) -> Iterator[None]:
    """The update of a bucket fails half way, after that of so many others."""
    step, calls = Stepper.step, count()

    def fail_half_way(
        stepper: Stepper,
        tensors: Any,
        parameters: Any = None,
        shards: Any = None,
        begins: Any = None,
        placing: Any = None,
    ) -> None:
        if next(calls) < whole:
            step(stepper, tensors, parameters, shards, begins)
            return
        some = slice(0, -(-len(tensors) // 2))
        step(stepper, tensors[some], parameters and parameters[some], shards and shards[some], begins)
        raise ValueError("the update failed")

    with patch.object(Stepper, "step", fail_half_way):
        yield


def _saved(loop: Loop) -> Any:
    return copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))


def _values(loop: Loop) -> list[torch.Tensor]:
    return [p.detach().clone() for p in loop.model.parameters()]


def _same(one: list[Any], other: list[Any]) -> bool:
    local = [[getattr(t, "_local_tensor", t) for t in tensors] for tensors in (one, other)]
    return all(map(torch.equal, *local))


def _begun(source: str, way: str, directory: str, **more: Any) -> tuple[Loop, list[torch.Tensor], Any]:
    """A loop after two steps, with its weights, and with what is saved of it."""
    wrap, options = SOURCES[source]
    torch.manual_seed(0)
    model = wrap(Blocks())
    loop = Alike(model, torch.optim.AdamW(two_groups(model), lr=1e-2))
    loop.overlap = instep.attach(model, loop.optimizer, schedule="backward", **options, **more)
    for i in range(2):
        loop.learn(i)
    if way == "load":
        saved.save(directory, model, loop.optimizer, loop.overlap)
    return loop, _values(loop), _saved(loop)


def _tear(source: str, way: str, directory: str) -> None:
    loop, before, kept = _begun(source, way, directory)
    overlap = loop.overlap
    with pytest.raises(ValueError, match="the update failed"), torn():
        loop.learn(2)
    with pytest.raises(TornStepError):
        loop.optimizer.step()
    assert not _same(before, _values(loop)), "the first bucket was updated, and its weights can be read"
    _go_on(loop, way, kept, directory)
    if way not in ("accept", "detach"):
        assert _same(before, _values(loop))
        assert overlap.step_count == 2 + (way == "load by hand")
    for i in range(3, 6):
        loop.learn(i)
    overlap.synchronize()
    overlap.detach()


def _go_on(loop: Loop, way: str, kept: Any, directory: str) -> None:
    loop.optimizer.zero_grad()
    if way == "load by hand":
        loop.model.load_state_dict(kept[0])
        loop.optimizer.load_state_dict(kept[1])
    if way == "load":
        saved.load(directory, loop.model, loop.optimizer, loop.overlap)
    elif way == "detach":
        loop.overlap.detach()
    else:
        loop.overlap.accept_torn()


# DCP wants FullyShardedDataParallel's own state_dict types.
@pytest.mark.parametrize(
    ("source", "way"), [(source, way) for source in SOURCES for way in WAYS_OUT if (source, way) != ("fsdp1", "load")]
)
def test_way_out(two_ranks: RankPool, source: str, way: str, tmp_path: Path) -> None:
    two_ranks.run(_tear, source, way, str(tmp_path))


def _tear_after_a_bucket() -> None:
    loop, before, kept = _begun("ddp", "load by hand", "")
    one_by_one = patch.object(Reduction, "arrived", False)  # else buckets that have arrived are stepped together
    with one_by_one, pytest.raises(ValueError, match="the update failed"), torn(whole=1):
        loop.learn(2)
    with pytest.raises(TornStepError) as error:
        loop.optimizer.step()
    names = [name.removeprefix("module.") for name, _ in loop.model.named_parameters()]
    assert set(error.value.applied) < set(names)
    now = dict(zip(names, zip(before, _values(loop), strict=True), strict=True))
    assert error.value.applied
    assert not any(torch.equal(*now[name]) for name in error.value.applied), "updated, and can be read"
    _go_on(loop, "load by hand", kept, "")
    assert _same(before, _values(loop))
    loop.learn(3)
    loop.overlap.detach()


def test_weights_of_a_bucket_before_the_one_that_failed(two_ranks: RankPool) -> None:
    two_ranks.run(_tear_after_a_bucket)


def _leave_open(source: str, way: str, directory: str) -> None:
    """Ctrl-C after backward, and a handler that clears the gradients."""
    loop, before, kept = _begun(source, way, directory)
    model, overlap = loop.model, loop.overlap
    loop.backward(2)
    loop.optimizer.zero_grad()
    with pytest.raises(UncommittedStepError, match=r"overlap\.accept_torn\(\), and a checkpoint"):
        loop.loss(2)
    if way == "load":
        saved.load(directory, model, loop.optimizer, loop.overlap)
    elif way == "detach":
        overlap.detach()
    else:
        overlap.accept_torn()
        assert overlap.step_count == 3
    if way == "load by hand":
        model.load_state_dict(kept[0])
        loop.optimizer.load_state_dict(kept[1])
    assert _same(before, _values(loop)) == (way in ("load", "load by hand"))
    for i in range(3, 6):
        loop.learn(i)
    overlap.synchronize()
    overlap.detach()


@pytest.mark.parametrize(
    ("source", "way"), [(source, way) for source in SOURCES for way in WAYS_OUT if (source, way) != ("fsdp1", "load")]
)
def test_way_out_of_an_open_step(two_ranks: RankPool, source: str, way: str, tmp_path: Path) -> None:
    two_ranks.run(_leave_open, source, way, str(tmp_path))


def _tear_one_rank(source: str) -> None:
    """Another rank has the whole step: all take that."""
    wrap, options = SOURCES[source]
    torch.manual_seed(0)
    model = wrap(Blocks())
    loop = Loop(model, torch.optim.AdamW(two_groups(model), lr=1e-2))
    overlap = instep.attach(model, loop.optimizer, schedule="backward", **options)
    loop.learn(0)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="the update failed"), torn():
            loop.learn(1)
    else:
        loop.learn(1)
    overlap.resync_from(0)
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine)
    assert torch.equal(*theirs)
    assert overlap.step_count == 2
    loop.learn(2)
    overlap.detach()


@pytest.mark.parametrize("source", ["ddp", "ddp, views", "replicate"])
def test_resync(two_ranks: RankPool, source: str) -> None:
    two_ranks.run(_tear_one_rank, source)
