"""``shard_state``: each rank updates a part of every parameter, or some parameters, for all. Where one of them cannot,
or is lost, no parameter holds parts of two steps that no rank knows of, and each list of the ``TornStepError`` is true.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import instep
from instep._optim.stepper import Stepper
from instep._ranks.votes import StepVotes
from instep.errors import TornStepError
from instep.sources.ddp.buckets import Reduction
from tests.cases import Blocks
from tests.distributed.loops import loss_of, train
from tests.distributed.pool import RankPool, races
from tests.inside import schedule_of

WAYS: dict[str, dict[str, Any]] = {"backward": {"schedule": "backward"}, "forward": {"schedule": "forward"}}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "rows": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "whole": lambda p: torch.optim.Adafactor(p, lr=1e-2, foreach=False),
}
BUCKETS = 4
MOMENTS = ("before", "in", "after")
"""Of an update of a bucket."""


class Loop:
    def __init__(self, way: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Blocks(), bucket_cap_mb=0.004, gradient_as_bucket_view=True)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        with patch.object(instep.options, "DEFAULT_BUCKET_BYTES", 4_000):  # of updates that are put off
            self.overlap = instep.attach(self.model, self.optimizer, shard_state=True, **WAYS[way])

    def step(self, i: int) -> None:
        train(self.model, self.optimizer, range(i, i + 1))
        self.overlap.synchronize()

    def values(self) -> dict[str, torch.Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            return {name: parameter.detach().clone() for name, parameter in self.model.module.named_parameters()}

    def names(self, parameters: list[torch.Tensor]) -> list[str]:
        mine = set(map(id, parameters))
        return [name for name, parameter in self.model.module.named_parameters() if id(parameter) in mine]


class _At(TorchDispatchMode):
    """Raises at the third operation inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 3

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError("the update")
        return func(*args, **(kwargs or {}))


@contextmanager
def failing(loop: Loop, bucket: int, moment: str) -> Iterator[list[str]]:
    """The update of one bucket raises. Yields a list of the names of its parameters, once it has."""
    real, begun, calls = Stepper.step, list[str](), iter(range(100))

    def step(
        self: Stepper, tensors: Any, parameters: list[torch.Tensor], shards: Any, begins: Any, placing: Any = None
    ) -> None:
        if next(calls) != bucket:
            real(self, tensors, parameters, shards, begins)
            return
        begun.extend(loop.names(parameters))
        if moment == "in":
            with _At():
                real(self, tensors, parameters, shards, begins)
        if moment == "after":
            real(self, tensors, parameters, shards, begins)
        begins()
        raise ZeroDivisionError("the update")

    with patch.object(Stepper, "step", step):
        yield begun


def require_exact(torn: TornStepError, loop: Loop, old: Any, new: Any, begun: list[str]) -> None:
    """Each name is where it belongs.

    Args:
        begun: names of the parameters whose update has raised: of these nothing is known.
    """
    found = loop.values()
    applied, pending, unsure = (
        [name.removeprefix("module.") for name in names] for names in (torn.applied, torn.pending, torn.unsure)
    )
    assert sorted([*applied, *pending, *unsure]) == sorted(found)
    for name, value in found.items():
        is_old, is_new = torch.equal(value, old[name]), torch.equal(value, new[name])
        expected = applied if is_new else pending if is_old else unsure
        assert name in expected or (name in begun and name in unsure), (
            f"rank {dist.get_rank()}: {name} is {'new' if is_new else 'old' if is_old else 'mixed'}; {torn}"
        )


def first_error(loop: Loop, i: int) -> BaseException | None:
    try:
        loop.step(i)
    except Exception as error:
        return error
    return None


def torn_by(loop: Loop) -> TornStepError:
    """Everything says that the step is torn."""
    assert loop.overlap.state == "torn"
    before = loop.values()
    uses: list[Callable[[], object]] = [
        lambda: loss_of(loop.model, 9),
        loop.optimizer.step,
        loop.model.state_dict,
        loop.optimizer.state_dict,
    ]
    found = []
    for use in uses:
        with pytest.raises(TornStepError) as caught:
            use()
        found.append(caught.value)
    assert all(map(torch.equal, before.values(), loop.values().values()))
    return found[0]


def one_fails(way: str, optimizer: str, rank: int) -> int:
    """On ``rank`` an update fails at each moment of each bucket. Returns how many have failed here."""
    oracle, count = Loop(way, optimizer), 0
    oracle.step(0)
    old = oracle.values()
    oracle.step(1)
    new = oracle.values()
    for bucket, moment in product(range(BUCKETS), MOMENTS):
        loop = Loop(way, optimizer)
        loop.step(0)
        begun: list[str] = []
        if rank == dist.get_rank():
            with failing(loop, bucket, moment) as begun:
                error = first_error(loop, 1)
            assert isinstance(error, ZeroDivisionError if begun else None.__class__), error
            count += bool(begun)
        else:
            error = first_error(loop, 1)
            assert error is None or isinstance(error, TornStepError)
            assert error is None or f"rank {rank} said" in str(error.__cause__)
        if error is None:  # this rank updates nothing of so many buckets
            assert all(map(torch.equal, loop.values().values(), new.values()))
            continue
        require_exact(torn_by(loop), loop, old, new, begun)
        loop.overlap.accept_torn()
        loop.step(2)  # ranks have sent one another the same, and go on
    return count


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_fails(three_ranks: RankPool, way: str, optimizer: str, rank: int) -> None:
    counts = three_ranks.run(one_by_one, one_fails, way, optimizer, rank)
    assert counts[rank] > 0
    if optimizer == "rows":
        assert counts[rank] == BUCKETS * len(MOMENTS)


def one_cannot_begin() -> None:
    """On the first rank the first bucket's gradients do not arrive: it has updated nothing, and says so."""
    oracle = Loop("backward", "rows")
    oracle.step(0)
    old = oracle.values()
    oracle.step(1)
    new = oracle.values()
    loop = Loop("backward", "rows")
    loop.step(0)
    if dist.get_rank() == 0:
        with patch.object(Reduction, "wait", side_effect=ConnectionError("gone")):
            assert isinstance(first_error(loop, 1), ConnectionError)
        assert loop.overlap.state == "idle"
        assert all(map(torch.equal, loop.values().values(), old.values()))
        return
    error = first_error(loop, 1)
    assert isinstance(error, TornStepError)
    assert "rank 0 said" in str(error.__cause__)
    require_exact(torn_by(loop), loop, old, new, [])
    loop.overlap.accept_torn()


def one_by_one(body: Callable[..., Any], *args: Any) -> Any:
    """DDP's buckets are stepped one by one, as on a slow network."""
    with patch.object(Reduction, "arrived", property(lambda self: False)):
        return body(*args)


@races
def cannot_begin() -> None:
    """What is said to be lost arrives all the same, and nobody has waited for it."""
    one_by_one(one_cannot_begin)


def test_a_rank_that_cannot_begin(three_ranks: RankPool) -> None:
    three_ranks.run(cannot_begin)


def one_dies(way: str, collective: str, where: int, after: bool) -> str:
    """The last rank is killed at a collective of the second step. What the others were told of it."""
    oracle = Loop(way, "rows")
    oracle.step(0)
    old = oracle.values()
    oracle.step(1)
    new = oracle.values()
    loop = Loop(way, "rows")
    loop.step(0)
    real, calls = getattr(dist, collective), iter(range(100))

    def dying(*args: Any, **kwargs: Any) -> Any:
        mine = next(calls) == where and dist.get_rank() == dist.get_world_size() - 1
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        work = real(*args, **kwargs)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    with patch.object(dist, collective, dying):
        error = first_error(loop, 1)
    found = loop.values()
    if loop.overlap.state != "torn":
        # It died before anything was written, or all of it had arrived.
        assert any(all(map(torch.equal, found.values(), whole.values())) for whole in (old, new))
        return "whole"
    assert isinstance(error, TornStepError) or way == "backward"
    torn = torn_by(loop)
    assert torn.step == 2
    assert torn.__cause__ is not None
    require_exact(torn, loop, old, new, [])
    return "torn"


def lost_after(way: str, optimizer: str) -> str:
    """The last rank is killed in its second ``step()``, or behind it, before it says that it has taken it. What has
    become of the step on this one, which has taken it."""
    loop = Loop(way, optimizer)
    loop.step(0)
    old = loop.values()
    if dist.get_rank() == dist.get_world_size() - 1:
        with patch.object(StepVotes, "committed", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            loop.step(1)
        os.kill(os.getpid(), signal.SIGKILL)
    heard = first_error(loop, 1)
    new = loop.values()
    assert not any(map(torch.equal, old.values(), new.values()))
    assert heard is not None or first_error(loop, 2) is not None
    if loop.overlap.state == "torn":
        torn = torn_by(loop)
        assert (torn.step, schedule_of(loop.overlap).last_complete_step()) == (2, 2)
        require_exact(torn, loop, old, new, [])
    return loop.overlap.state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_lost_after_its_update(way: str, optimizer: str) -> None:
    """What it has updated is here: whoever has committed the step has all of it."""
    pool = RankPool(2, group_seconds=10)
    told = pool.run_until_a_rank_dies(0, lost_after, way, optimizer)
    assert told == "torn" or way == "forward"


@pytest.mark.parametrize("where", range(BUCKETS))
@pytest.mark.parametrize("after", [False, True], ids=["before", "in flight"])
@pytest.mark.parametrize("collective", ["all_to_all_single", "all_gather"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_killed(way: str, collective: str, after: bool, where: int) -> None:
    pool = RankPool(2 + where % 2, group_seconds=30)  # of three, one may wait for another that has given up
    told = pool.run_until_a_rank_dies(0, one_by_one, one_dies, way, collective, where, after)
    if collective == "all_to_all_single" and way == "forward":
        assert told == "whole"  # gradients were on their way, and nothing is written before step()
