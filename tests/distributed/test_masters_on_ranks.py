"""``instep.masters`` on two ranks: DDP and FSDP2, bit for bit the loop that keeps masters by hand there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import instep
from instep.errors import InstepError, StaleMasterError
from tests.cases import Blocks, batch
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, loss_of, nested
from tests.inside import schedule_of

WAYS: dict[str, dict[str, Any] | None] = {
    "not attached": None,
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "forward": {"schedule": "forward", "defer": True},
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    "Muon": (getattr(torch.optim, "Muon", None), {}),
}


class Half(Blocks):
    """Takes its batches in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(torch.bfloat16)).float()


def build(kind: str, *, matrices: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Half().to(here(), torch.bfloat16)
    for p in model.parameters():
        p.requires_grad_(not matrices or p.ndim == 2)
    return DistributedDataParallel(model, bucket_cap_mb=0.01) if kind == "DDP" else nested(model)


def part_of(tensor: Any) -> Any:
    value = tensor.detach()
    return (value.to_local() if isinstance(value, DTensor) else value).clone()


def backward(model: nn.Module, i: int) -> None:
    x, y = batch(i * torch.distributed.get_world_size() + torch.distributed.get_rank())
    loss_of(model(x.to(here())), y.to(here())).backward()


def difference(kind: str, way: str, name: str, *, resumed: bool = False) -> str | None:
    cls, settings = OPTIMIZERS[name]
    assert cls is not None
    options = WAYS[way]

    def picked(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]

    hand, model = (build(kind, matrices=name == "Muon") for _ in range(2))
    halves, own = picked(hand), picked(model)
    masters = [nn.Parameter(p.detach().float()) for p in halves]
    by_hand = cls(masters, lr=1e-2, **settings)
    make: Callable[..., Optimizer] = instep.masters(cls)
    optimizer = make(own, lr=1e-2, **settings)
    overlap = None if options is None else instep.attach(model, optimizer, **options)
    for i in range(4):
        backward(hand, i)
        for p, m in zip(halves, masters, strict=True):
            m.grad = None if p.grad is None else p.grad.float()
        by_hand.step()
        for p, m in zip(halves, masters, strict=True):
            with torch.no_grad():
                p.copy_(m)
            p.grad = m.grad = None
        backward(model, i)
        optimizer.step()
        optimizer.zero_grad()
        if overlap is not None:
            overlap.synchronize()
        for k, (p, m, q) in enumerate(zip(halves, masters, own, strict=True)):
            state = optimizer.state[q]
            pairs = [(p, q), (m, state["master"]), *((v, state[n]) for n, v in by_hand.state[m].items())]
            if not all(torch.equal(part_of(a), part_of(b)) for a, b in pairs):
                return f"parameter {k} in step {i}"
        if resumed and i == 1:
            saved = get_optimizer_state_dict(model, optimizer)
            if overlap is not None:
                overlap.detach()
            again = build(kind)
            again.load_state_dict(model.state_dict())
            model, own = again, picked(again)
            optimizer = make(own, lr=1.0, **settings)
            set_optimizer_state_dict(model, optimizer, saved)
            overlap = None if options is None else instep.attach(model, optimizer, **options)
    if overlap is not None:
        overlap.detach()
    return None


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_two_ranks(two_ranks: RankPool, kind: str, way: str, name: str) -> None:
    if OPTIMIZERS[name][0] is None:
        pytest.skip("no Muon in this torch")
    assert two_ranks.run(difference, kind, way, name) == [None, None]


@pytest.mark.parametrize("way", ["not attached", "backward"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_run_goes_on_from_a_checkpoint_of_dcp(two_ranks: RankPool, kind: str, way: str) -> None:
    assert two_ranks.run(difference, kind, way, "AdamW", resumed=True) == [None, None]


def written(kind: str, options: dict[str, Any] | None) -> bool:
    model = build(kind)
    optimizer: Any = instep.masters(torch.optim.AdamW)(model.parameters(), lr=1e-2)
    overlap = None if options is None else instep.attach(model, optimizer, **options)
    loop = Loop(model, optimizer)
    loop.learn(0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    with pytest.raises(StaleMasterError):
        loop.learn(1)
    if overlap is not None:
        overlap.accept_torn()
        overlap.detach()
    optimizer.zero_grad()
    optimizer.renew_masters()
    loop.learn(2)
    return all(torch.equal(part_of(optimizer.state[p]["master"]).to(p.dtype), part_of(p)) for p in model.parameters())


@pytest.mark.parametrize("way", ["not attached", "backward"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_weights_that_were_written(two_ranks: RankPool, kind: str, way: str) -> None:
    assert two_ranks.run(written, kind, WAYS[way]) == [True, True]


def written_of_one_owner(options: dict[str, Any]) -> str:
    """With ``shard_state`` one rank has the master of a weight, which all have written."""
    model = build("DDP", matrices=True)
    optimizer: Any = instep.masters(torch.optim.AdamW)([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    overlap = instep.attach(model, optimizer, shard_state=True, **options)
    loop = Loop(model, optimizer)
    loop.learn(0)
    loop.learn(1)
    overlap.synchronize()
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).mul_(0.5)
    votes: Any = schedule_of(overlap)._step.ledger.votes
    told, say = list[int](), votes.say_failed

    def saying(step: int) -> None:
        told.append(step)
        say(step)

    votes.say_failed = saying
    try:
        loop.learn(2)
        overlap.synchronize()
    except StaleMasterError:
        if options["schedule"] == "forward" and not told:
            say(3)  # or the other would wait for as long as the process group does
            return "kept to itself"
        return "StaleMasterError"
    except InstepError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_a_weight_that_one_rank_has_the_master_of(way: str) -> None:
    """That rank raises, and the other does not wait for it."""
    pool = RankPool(2)  # of its own: what the other has sent is still in the process group
    try:
        said = pool.run(written_of_one_owner, WAYS[way])
    finally:
        pool.stop()
    assert sorted(said) == ["StaleMasterError", "TornStepError"]
