"""Optimizers of the user's own on several ranks: what couples nothing is stepped in backward, and what couples
parameters goes on as in the plain loop, on all ranks, whichever of them has found it."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep._step import judging
from instep.errors import InstepError, UnsupportedOptimizerError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, two_groups
from tests.distributed.pool import RankPool
from tests.distributed.sharded import local_of, nested
from tests.judged import own_steps_are_judged

STEPS = 5


class Foreign(torch.optim.Optimizer):
    """Momentum. What ``scale`` returns is the road of a coupling."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.calls = 0

    def scale(self, there: list[Any]) -> float:
        return 1.0 / (1 + self.calls)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        there = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = self.scale(there)
        for p in there:
            state = self.state[p]
            state["m"] = p.grad.clone() if "m" not in state else state["m"].mul_(0.9).add_(p.grad)
            p.sub_(state["m"], alpha=0.05 * scale)
        self.calls += bool(there)


def norm_of(there: list[Any]) -> float:
    """Of this rank's shards."""
    gradients = (local_of(p.grad) if isinstance(p.grad, DTensor) else p.grad for p in there)
    return sum(gradient.square().sum().item() for gradient in gradients)


class Coupled(Foreign):
    def scale(self, there: list[Any]) -> float:
        return 1.0 / (1 + norm_of(there))


class CoupledOnLast(Foreign):
    """Only the last rank's own update couples parameters."""

    def scale(self, there: list[Any]) -> float:
        return 1.0 / (1 + norm_of(there)) if dist.get_rank() == dist.get_world_size() - 1 else 1.0


class CoupledOnFirst(Foreign):
    def scale(self, there: list[Any]) -> float:
        return 1.0 / (1 + norm_of(there)) if dist.get_rank() == 0 else 1.0


class SecondOnLast(CoupledOnLast):
    """It begins with the second update: the others have judged it twice, and know nothing, when the third begins."""

    def scale(self, there: list[Any]) -> float:
        return super().scale(there) if self.calls == 1 else 1.0


class LaterOnLast(CoupledOnLast):
    def scale(self, there: list[Any]) -> float:
        return super().scale(there) if self.calls > 2 else 1.0


class DrawsOnLast(Foreign):
    def scale(self, there: list[Any]) -> float:
        return torch.rand(()).item() if dist.get_rank() == dist.get_world_size() - 1 else 0.5


CALLS = [0]


class HiddenOnLast(Foreign):
    """Only the last rank keeps what nobody can put back."""

    def scale(self, there: list[Any]) -> float:
        CALLS[0] += dist.get_rank() == dist.get_world_size() - 1
        return 1.0 / (1 + CALLS[0])


class RaisesOnLast(Foreign):
    """On parts of all parameters."""

    def scale(self, there: list[Any]) -> float:
        if dist.get_rank() == dist.get_world_size() - 1 and 0 < len(there) < 10:
            raise ValueError
        return 0.5


class Communicates(Foreign):
    """Each parameter by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            norm = p.grad.norm()
            dist.all_reduce(norm)
            p.sub_(p.grad, alpha=0.05 / (1 + norm.item()))
        self.calls += 1


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.004)


WRAPPED: dict[str, Callable[[Any], nn.Module]] = {"ddp": ddp, "fsdp2": nested}
each_way = pytest.mark.parametrize("undo", [False, True], ids=["backward", "undo"])
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPED)


class Pair:
    """A plain loop and an attached one on this rank."""

    def __init__(self, wrapper: str, cls: Any, *, undo: bool, groups: bool = False) -> None:
        self.models, self.optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            model = WRAPPED[wrapper](Blocks())
            self.models.append(model)
            self.optimizers.append(cls(two_groups(model) if groups else model.parameters()))
        with own_steps_are_judged():
            self.overlap = instep.attach(self.models[1], self.optimizers[1], schedule="backward", undo=undo)
        self.stepped = 0  # parameters that the last backward has stepped

    def learn(self, i: int, model: nn.Module, optimizer: Any) -> None:
        torch.manual_seed(i)
        x, y = batch(i * dist.get_world_size() + dist.get_rank())
        nn.functional.cross_entropy(model(x), y).backward()
        self.stepped = sum("Spent" in repr(p.grad) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()

    def step(self, i: int) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            self.learn(i, model, optimizer)
        states = (training_state(m, o) for m, o in zip(self.models, self.optimizers, strict=True))
        difference = first_difference(*states)
        assert difference is None, f"step {i + 1}: {difference}"
        assert self.optimizers[0].calls == self.optimizers[1].calls


def stays_apart(wrapper: str, undo: bool, groups: bool, cls: Any = Foreign) -> None:
    pair = Pair(wrapper, cls, undo=undo, groups=groups)
    with pair.overlap:
        for i in range(STEPS):
            pair.step(i)
            assert undo or bool(pair.stepped) is (i >= judging.LEFT), f"step {i + 1}"
        assert pair.overlap.plan.judged == ()
        assert pair.overlap.step_count == STEPS


@each_way
@each_wrapper
def test_what_couples_nothing_is_stepped_in_backward(two_ranks: RankPool, wrapper: str, undo: bool) -> None:
    two_ranks.run(stays_apart, wrapper, undo, False)


def goes_on_plainly(wrapper: str, cls: Any, undo: bool) -> tuple[str, ...]:
    pair = Pair(wrapper, cls, undo=undo)
    with pair.overlap:
        for i in range(STEPS):
            pair.step(i)
            assert not pair.stepped, f"step {i + 1}"
        assert pair.overlap.step_count == STEPS
        return pair.overlap.plan.judged


@each_way
@each_wrapper
@pytest.mark.parametrize("cls", [Coupled, CoupledOnLast, CoupledOnFirst, SecondOnLast, DrawsOnLast, RaisesOnLast])
def test_one_verdict_for_all_ranks(two_ranks: RankPool, cls: Any, wrapper: str, undo: bool) -> None:
    verdicts = two_ranks.run(goes_on_plainly, wrapper, cls, undo)
    assert all("left to optimizer.step()" in "".join(verdict) for verdict in verdicts), verdicts


@each_way
def test_an_update_that_communicates(two_ranks: RankPool, undo: bool) -> None:
    """The ranks step their buckets in orders of their own."""
    verdicts = two_ranks.run(goes_on_plainly, "ddp", Communicates, undo)
    assert all("communicates with other ranks" in "".join(verdict) for verdict in verdicts), verdicts


class ReadsFilled(Foreign):
    """Reads what a hook at the end of each backward puts on parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad, alpha=0.05 * getattr(p, "filled", 1.0))


class FilledPair(Pair):
    def learn(self, i: int, model: nn.Module, optimizer: Any) -> None:
        def fill(_: torch.Tensor) -> None:
            for p in optimizer.param_groups[0]["params"]:
                p.filled = 1.0 / (1 + i)

        torch.manual_seed(i)
        x, y = batch(i * dist.get_world_size() + dist.get_rank())
        x.requires_grad_().register_hook(fill)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def reads_what_is_filled(wrapper: str, undo: bool) -> tuple[str, ...]:
    pair = FilledPair(wrapper, ReadsFilled, undo=undo)
    with pair.overlap:
        for i in range(STEPS):
            pair.step(i)
        return pair.overlap.plan.judged


@each_way
@each_wrapper
def test_what_a_hook_of_backward_fills(two_ranks: RankPool, wrapper: str, undo: bool) -> None:
    """DDP steps after its backward, which has filled it."""
    verdicts = two_ranks.run(reads_what_is_filled, wrapper, undo)
    assert all(("is written in backward" in "".join(one)) == (wrapper == "fsdp2") for one in verdicts), verdicts


def raises_on_all(wrapper: str, cls: Any, every: int) -> tuple[int, str]:
    """The step in which this rank was told, and by what."""
    CALLS[0] = 0
    with patch.object(judging, "EVERY", every):
        pair = Pair(wrapper, cls, undo=False)
        del pair.models[0], pair.optimizers[0]  # where another rank raises, torch's own collectives would wait
        told = (STEPS, "")
        for i in range(STEPS):
            try:
                pair.learn(i, pair.models[0], pair.optimizers[0])
            except InstepError as error:
                told = (i, type(error).__name__)
                break  # and no other rank may wait for this one
    pair.overlap.accept_torn()
    pair.overlap.detach()
    return told


@each_wrapper
def test_an_optimizer_that_is_refused_on_one_rank_is_refused_on_all(two_ranks: RankPool, wrapper: str) -> None:
    (first, told), (last, error) = two_ranks.run(raises_on_all, wrapper, HiddenOnLast, 50)
    assert (last, error) == (1, UnsupportedOptimizerError.__name__)  # beside the first update nothing stands
    assert told
    assert first <= 2
    two_ranks.stop()


def test_a_coupling_that_begins_later_on_one_rank_stops_all(two_ranks: RankPool) -> None:
    """Under FSDP2: DDP's buckets may be stepped together, and then there are no two to be compared."""
    (first, told), (last, error) = two_ranks.run(raises_on_all, "fsdp2", LaterOnLast, 1)
    assert last == 3
    assert error
    assert told
    assert first <= last + 1
    two_ranks.stop()
