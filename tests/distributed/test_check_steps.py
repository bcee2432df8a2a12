"""``check_steps`` on several ranks: each compares what it steps itself."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
import instep.options
from instep.errors import AttachError, TornStepError, UnsupportedOptimizerError
from instep.sources.ddp.buckets import Reduction
from tests.cases import Blocks, batch, two_groups
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, both, fsdp1, loss_of, nested
from tests.parity.changes import LATE, MetTheOdd, Odd

WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True},
    "host": {"schedule": "backward", "undo": "host"},
}


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=True)


def replicate(model: nn.Module) -> nn.Module:
    return instep.replicate(model, bucket_cap_mb=0.004)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(two_groups(model), lr=1e-2)


def nothing(optimizer: Any, mine: list[torch.Tensor]) -> None: ...


def of_ones_own(model: nn.Module) -> torch.optim.Optimizer:
    """Not known to be elementwise: stepped as ``DTensor``."""
    return MetTheOdd(model.parameters(), nothing)


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[Any], Any], dict[str, Any]]] = {
    "ddp": (ddp, adamw, {}),
    "crossing": (ddp, adamw, {"cross_iteration": True}),
    "replicate": (replicate, adamw, {}),
    "shard_state": (ddp, adamw, {"shard_state": True}),
    "fsdp2": (nested, adamw, {}),
    "fsdp2, whole": (nested, of_ones_own, {}),
    "fsdp1": (fsdp1, adamw, {}),
}


def late_on_ranks(way: str, what: str, wrap: str) -> str:
    late, words = LATE[what]
    torch.manual_seed(0)
    model = WRAPPERS[wrap][0](Odd())
    optimizer = MetTheOdd(model.parameters(), late)
    with patch.object(instep.options, "DEFAULT_BUCKET_BYTES", 2_000):
        overlap = instep.attach(model, optimizer, check_steps=5, **WAYS[way])

    def iteration(i: int) -> None:
        loss_of(model(batch(i)[0]), batch(i)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(2):
        iteration(i)
    assert "checked 2 of 5 steps" in repr(overlap)
    with pytest.raises(UnsupportedOptimizerError, match="MetTheOdd " + words):
        iteration(2)
    if WAYS[way].get("undo"):
        assert repr(overlap).endswith("open>")
    else:
        with pytest.raises(TornStepError) as torn:
            model(batch(0)[0])
        assert torn.value.step == 3
        assert isinstance(torn.value.cause, UnsupportedOptimizerError)
    said = repr(overlap)
    overlap.detach()
    return said


def late_where_all_have_arrived(way: str, what: str) -> None:
    """Buckets of DDP that have arrived are stepped in one call: here all, however slow the machine is."""
    with patch.object(Reduction, "arrived", True):
        late_on_ranks(way, what, "ddp")


@pytest.mark.parametrize("what", list(LATE))
@pytest.mark.parametrize("way", list(WAYS))
def test_every_rank_finds_what_begins_late(two_ranks: RankPool, way: str, what: str) -> None:
    two_ranks.run(late_where_all_have_arrived, way, what)


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_what_begins_late_is_found_with_replicate(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(late_on_ranks, way, "couples", "replicate")


def no_alarm(way: str, wrap: str) -> None:
    shard, make, options = WRAPPERS[wrap]
    both(way, shard, make, steps=4, check_steps=3, **options)


def says_checked(way: str, wrap: str) -> None:
    shard, make, options = WRAPPERS[wrap]
    model = shard(Blocks())
    loop = Loop(model, make(model))
    loop.overlap = instep.attach(model, loop.optimizer, check_steps=2, **WAYS[way], **options)
    for i in range(3):
        loop.learn(i)
    loop.overlap.synchronize()
    assert "checked 2 steps" in repr(loop.overlap), repr(loop.overlap)
    loop.overlap.detach()


SOUND = [
    (way, wrap)
    for wrap in WRAPPERS
    for way in ("backward", "forward", "undo")
    if not (wrap == "crossing" and way != "forward") and not (wrap == "shard_state" and way == "undo")
]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("way", "wrap"), SOUND)
def test_no_false_alarm(two_ranks: RankPool, way: str, wrap: str) -> None:
    if wrap != "shard_state":  # whose plain loop has other state
        two_ranks.run(no_alarm, way, wrap)
    two_ranks.run(says_checked, way, wrap)


def own_rows_that_differ() -> None:
    """Beside the defect that a rank's own part shows: one that is put in by hand."""
    model = ddp(Blocks())
    optimizer = adamw(model)
    overlap = instep.attach(model, optimizer, check_steps=3, shard_state=True, schedule="backward")
    loss_of(model(batch(0)[0]), batch(0)[1]).backward()
    weight = model.get_parameter("module.outer.weight")
    entry = optimizer.state[weight]["exp_avg"]
    assert isinstance(entry, DTensor)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(entry._local_tensor):
        entry._local_tensor.add_(1)
    with pytest.raises(UnsupportedOptimizerError, match=r"state 'exp_avg' of parameter 'outer.weight'"):
        optimizer.step()
    overlap.accept_torn()
    overlap.detach()


def test_rows_of_state_are_compared(two_ranks: RankPool) -> None:
    two_ranks.run(own_rows_that_differ)


def refused_whole() -> None:
    model = ddp(Blocks())
    with pytest.raises(AttachError, match="check_steps=3 does not go with shard_state=True and Adafactor"):
        instep.attach(model, adafactor(model), check_steps=3, shard_state=True, schedule="backward")


def test_whole_parameters_of_single_ranks_are_refused(two_ranks: RankPool) -> None:
    two_ranks.run(refused_whole)
