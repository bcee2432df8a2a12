"""How DDP's buckets are seen: in the group of its reducer, and where that cannot be, by a communication hook."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError
from instep.sources.ddp.instance import buckets_of
from instep.sources.ddp.reducer import ReducerGroup, _slots
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, grad_of
from tests.devices import sparse_collectives
from tests.distributed.loops import loss_of, train
from tests.distributed.pool import RankPool


def make(model: nn.Module | None = None, **options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Blocks() if model is None else model, **{"bucket_cap_mb": 0.002, **options})
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=False)


def body_what_it_asks_of_the_reducer() -> None:
    model, optimizer = make(gradient_as_bucket_view=True)
    assert ReducerGroup.fits(model)
    train(model, optimizer, range(2))
    assert model._has_rebuilt_buckets
    loss_of(model, 2).backward()
    buckets = buckets_of(model)
    assert len(buckets) > 1
    assert [bucket.index() for bucket in buckets] == list(range(len(buckets)))
    assert [bucket.is_last() for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    for bucket in buckets:
        storage = bucket.buffer().untyped_storage().data_ptr()
        assert all(grad_of(p).untyped_storage().data_ptr() == storage for p in bucket.parameters())
    assert {p for bucket in buckets for p in bucket.parameters()} == set(model.parameters())


def test_what_it_asks_of_the_reducer(two_ranks: RankPool) -> None:
    """It fails here when torch has changed what instep reads."""
    two_ranks.run(body_what_it_asks_of_the_reducer)


def body_nothing_is_left() -> None:
    plain, plain_optimizer = make()
    model, optimizer = make()
    overlap = instep.attach(model, optimizer, schedule="backward")
    buckets = set()
    for i in range(4):
        loss_of(model, i).backward()
        buckets.add(len(overlap.plan.buckets))
        assert all(type(p.grad) is not torch.Tensor for p in model.parameters()), "stepped in backward"
        optimizer.step()
        optimizer.zero_grad()
    assert max(buckets) > 1
    assert model._comm_hooks == []
    overlap.detach()
    assert not model._forward_hooks
    loss_of(model, 4).backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
    optimizer.zero_grad()
    model.register_comm_hook(None, allreduce_hook)
    train(plain, plain_optimizer, range(4))
    plain.register_comm_hook(None, allreduce_hook)
    for one, its_optimizer in ((plain, plain_optimizer), (model, optimizer)):
        train(one, its_optimizer, range(4, 6))
    assert first_difference(training_state(plain, plain_optimizer), training_state(model, optimizer)) is None


def test_nothing_is_left_after_detach(two_ranks: RankPool) -> None:
    two_ranks.run(body_nothing_is_left)


def body_a_hook_that_came_later() -> None:
    model, optimizer = make()
    with instep.attach(model, optimizer, schedule="backward"):
        train(model, optimizer, range(1))
        model.register_comm_hook(None, allreduce_hook)
        with pytest.raises(AttachError, match=r"register_comm_hook was called on an attached .* comm_hook=\(state"):
            loss_of(model, 1)
    builtin, optimizer = make()
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(AttachError, match="already has a communication hook"):
        instep.attach(builtin, optimizer, schedule="backward")


def test_a_hook_that_came_later_or_was_there(two_ranks: RankPool) -> None:
    two_ranks.run(body_a_hook_that_came_later)


class Words(nn.Module):
    """Sparse gradients, whose buckets the reducer does not show, and dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 16, sparse=True)
        self.blocks = Blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x + self.words(x.abs().argmax(1)))


def body_kept_gradients(build: type[nn.Module]) -> str | None:
    """What is added to a gradient that was kept in its bucket is divided there, and in other ways than one that is
    copied into it."""
    states = []
    for attached in (False, True):
        torch.manual_seed(0)
        model, optimizer = make(build(), gradient_as_bucket_view=True)
        overlap = instep.attach(model, optimizer, schedule="backward", undo=True) if attached else None
        for i in range(4):
            loss_of(model, 2 * i).backward()
            loss_of(model, 2 * i + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
        if overlap is not None:
            overlap.detach()
        states.append(training_state(model, optimizer))
    return first_difference(*states)


@pytest.mark.parametrize("build", [Blocks, pytest.param(Words, marks=sparse_collectives)])
def test_gradients_that_were_kept(three_ranks: RankPool, build: type[nn.Module]) -> None:
    assert three_ranks.run(body_kept_gradients, build) == [None] * 3


class InAFunction(Blocks):
    """Returns what nobody can look into."""

    def forward(self, x: torch.Tensor) -> Any:
        loss = super().forward(x).square().mean()
        return lambda: loss


def body_an_output_that_nobody_can_look_into() -> None:
    model, optimizer = make(InAFunction())
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        for i in range(4):
            model(batch(i)[0])().backward()
            assert all(type(p.grad) is not torch.Tensor for p in model.parameters()), "stepped in backward"
            optimizer.step()
            optimizer.zero_grad()
        assert len(overlap.plan.buckets) > 1


def test_an_output_that_nobody_can_look_into(two_ranks: RankPool) -> None:
    two_ranks.run(body_an_output_that_nobody_can_look_into)


def body_other_buckets_where_these_lay(asked_again: bool) -> bool:
    """What wraps DDP may have it make new buckets after the forward, and memory is given out again: found by where
    they lie, these are others. Here every bucket is taken for the one before it."""
    plain, plain_optimizer = make()
    model, optimizer = make()
    train(plain, plain_optimizer, range(4))
    with instep.attach(model, optimizer, schedule="backward"):
        train(model, optimizer, range(2))
        loss = loss_of(model, 2)
        group = _slots[model]
        assert isinstance(group, ReducerGroup)
        known = list(group._buckets.values())
        gone = StorageWeakRef(torch.zeros(4).untyped_storage())
        others = [replace(bucket, storage=gone) for bucket in (*known[1:], known[0])]
        group._buckets = dict(zip(group._buckets, others, strict=True))
        with nullcontext() if asked_again else mock.patch.object(group, "before_backward"):
            loss.backward()
        in_backward = all(type(p.grad) is not torch.Tensor for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(3, 4))
    assert first_difference(training_state(plain, plain_optimizer), training_state(model, optimizer)) is None
    return in_backward


@pytest.mark.parametrize("asked_again", [True, False])
def test_other_buckets_where_these_lay(two_ranks: RankPool, asked_again: bool) -> None:
    assert two_ranks.run(body_other_buckets_where_these_lay, asked_again) == [asked_again] * 2
