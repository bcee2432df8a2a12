"""``defer="auto"`` on several ranks: one decision, and the plain loop's numbers before, in and after the trial."""

from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import instep
from instep._step import deferral as deferring
from instep.sources.ddp.instance import exposed_communication
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.devices import here
from tests.distributed.pool import RankPool

PAIRS = 4
STEPS = 4 * PAIRS + 3


Loop = tuple[Any, torch.optim.Optimizer]


def both(view: bool) -> tuple[Loop, Loop]:
    loops: list[Loop] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = DistributedDataParallel(Blocks(), bucket_cap_mb=0.004, gradient_as_bucket_view=view)
        loops.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)))
    return loops[0], loops[1]


def step(model: Any, optimizer: Any, i: int) -> None:
    x, y = batch(100 * dist.get_rank() + i)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def differs(plain: Loop, attached: Loop) -> str | None:
    return first_difference(training_state(*plain), training_state(*attached))


def trial(gains: list[bool], view: bool) -> tuple[str | None, list[bool], str]:
    """Whether ranks differ from plain DDP, which steps were put off, and how ``repr`` ends.

    Args:
        gains: of each rank, whether its iterations are shorter with the step put off.
    """
    plain, attached = both(view)
    made = deferring.DeferralTrial
    ticks = count()

    def clock() -> float:
        # Each call is one iteration later: as long as its step was put off, or not.
        now = next(ticks)
        return sum(seconds(i) for i in range(now))

    def seconds(i: int) -> float:
        put_off = 1 <= i <= 2 * PAIRS and (i - 1) % 4 in (1, 2)
        return 0.5 if put_off and gains[dist.get_rank()] else 1.0

    def make(prevented: Any, others: Any, times: Any) -> Any:
        return made(lambda: None, others, clock)

    put_off, difference = [], None
    with (
        patch.multiple(deferring, WARM_UP=1, PAIRS=PAIRS, LEAST_WINS=PAIRS),
        patch("instep._wiring.advice.DeferralTrial", make),
        instep.attach(*attached) as overlap,
    ):
        for i in range(STEPS):
            step(*plain, i)
            step(*attached, i)
            put_off.append(overlap.state == "pending")
            overlap.synchronize()
            difference = difference or differs(plain, attached)
        said = overlap.advice.splitlines()[0]
    return difference, put_off, said


@pytest.mark.parametrize("view", [True, False], ids=["gradient_as_bucket_view", "copies"])
@pytest.mark.parametrize(("gains", "decided"), [([True, True], True), ([True, False], False), ([False, True], False)])
def test_all_ranks_decide_alike(two_ranks: RankPool, gains: list[bool], decided: bool, view: bool) -> None:
    (first, *_), (second, *_) = found = two_ranks.run(trial, gains, view)
    assert (first, second) == (None, None)
    for _, put_off, said in found:
        assert put_off[:5] == [False, False, True, True, False]
        assert put_off[-3:] == [decided] * 3
        assert said.startswith("Steps are put off (" if decided else "Steps are taken at once (")
        assert "on all ranks" in said or decided


LONG = 70
"""Steps: more than a trial takes."""


def uneven(option: str) -> str | None:
    """A rank that has no data left shadows the others, in DDP's ``join()``, or does so in a first epoch alone."""
    plain, attached = both(view=True)
    with instep.attach(*attached) as overlap:
        for one in (plain, attached):
            with Join([one[0]]):
                for i in range(4 + LONG * dist.get_rank()):
                    step(*one, i)
            for i in range(LONG if option == "an epoch after" else 0):
                step(*one, i)
        assert "join()" in overlap.advice
    return differs(plain, attached)


@pytest.mark.parametrize("option", ["alone", "an epoch after"])
def test_uneven_inputs(two_ranks: RankPool, option: str) -> None:
    assert two_ranks.run(uneven, option) == [None] * 2


def redundant() -> str | None:
    """An optimizer that shards its state over the ranks, with a backward of one rank alone during the trial."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit where it is imported

    found = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Blocks(), bucket_cap_mb=0.004)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        if attach:
            instep.attach(model, optimizer)
        for i in range(LONG):
            if dist.get_rank() == 0 and i == 5:
                torch.autograd.grad(model(batch(i)[0]).sum(), list(model.parameters())[-1])
            step(model, optimizer, i)
        found.append(list(model.named_parameters()))
    return first_difference(iter(found[0]), iter(found[1]))


def test_a_zero_redundancy_optimizer(two_ranks: RankPool) -> None:
    assert two_ranks.run(redundant) == [None] * 2


SHARED: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda weight, optimizer: None,
    "a local tensor": lambda weight, optimizer: weight.to_local(),
    "a row of one": lambda weight, optimizer: weight.to_local().detach()[:1],
    "a local gradient": lambda weight, optimizer: weight.grad.to_local(),
    "a local tensor of the state": lambda weight, optimizer: optimizer.state[weight]["exp_avg"].to_local(),
}


def readers_of_shards(taken: str) -> list[str]:
    """What differs from the plain loop of FSDP2, and in which state the steps were."""
    loops: list[Loop] = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 10))
        mesh = init_device_mesh(here().type, (dist.get_world_size(),))
        for part in (*(part for part in model if isinstance(part, nn.Linear)), model):
            fully_shard(part, mesh=mesh)
        loops.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    plain, attached = loops
    found, kept = [], [None, None]
    with instep.attach(*attached, defer=True) as overlap:
        for i in range(4):
            for number, (model, optimizer) in enumerate(loops):
                x, y = batch(100 * dist.get_rank() + i)
                nn.functional.cross_entropy(model(x), y).backward()
                if i >= 2:
                    kept[number] = SHARED[taken](model[0].weight, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            found.append(overlap.state)
            if kept[0] is not None and not torch.equal(*(one.detach() for one in kept)):
                found.append("another value")
        overlap.synchronize()
        if (difference := differs(plain, attached)) is not None:
            found.append(difference)
    return found


@pytest.mark.parametrize("taken", SHARED)
def test_readers_of_shards_who_took_them_earlier(two_ranks: RankPool, taken: str) -> None:
    for found in two_ranks.run(readers_of_shards, taken):
        assert found == ["pending"] * 4  # the other parameters are put off


def advised(exposed: float | None) -> str:
    """What is advised where communication outlasts backward by so many milliseconds; ``None``: as DDP measures it."""
    _, (model, optimizer) = both(view=True)
    with instep.attach(model, optimizer) as overlap:
        for i in range(12):
            step(model, optimizer, i)
        if exposed is None:
            # torch's private measure is there, and so are its names. DDP has no timer for other devices.
            assert exposed_communication(model) is not None or here().type not in ("cpu", "cuda")
            return overlap.advice
        with patch("instep._wiring.advice.exposed_communication", lambda ddp: exposed):
            return overlap.advice


@pytest.mark.parametrize(("exposed", "said"), [(1e6, True), (0.0, False), (None, None)])
def test_what_outlasts_backward_is_said(two_ranks: RankPool, exposed: float | None, said: bool | None) -> None:
    for advice in two_ranks.run(advised, exposed):
        assert advice.startswith("Steps are ")
        assert said is None or ("docs/slow-networks.md" in advice) is said
