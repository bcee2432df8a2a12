"""A list of modules, each of which the loop calls by itself: the attached loop is the plain one."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import instep
from instep.attachment import attachments
from instep.errors import AccumulationError, InstepError, TornStepError, UncommittedStepError
from tests.cases import Blocks, batch
from tests.inside import source_of
from tests.parity.lockstep import SMALL, Contender, in_every_way, in_exact_ways, lockstep, loss_of


class Pair(nn.Module):
    """Holds two, and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.q1, self.q2 = Blocks(depth=2), Blocks(depth=2)


def pair() -> tuple[Pair, torch.optim.Optimizer]:
    model = Pair()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def one_each() -> tuple[Pair, Any]:
    model = Pair()
    return model, [
        torch.optim.AdamW(model.q1.parameters(), lr=1e-2, fused=True),
        torch.optim.SGD(model.q2.parameters(), lr=1e-2, momentum=0.9),
    ]


def members(lane: Contender) -> list[tuple[Any, Any]]:
    return [([lane.model.q1, lane.model.q2], lane.optimizers)]


def both(lane: Contender, i: int) -> torch.Tensor:
    """As two critics are trained."""
    x, y = batch(i)
    return lane.learn(loss_of(lane.model.q1(x), y) + loss_of(lane.model.q2(x), y))


def clipped(lane: Contender, i: int) -> Any:
    x, y = batch(i)
    (loss_of(lane.model.q1(x), y) + loss_of(lane.model.q2(x), y)).backward()
    norm = clip_grad_norm_(lane.model.parameters(), 0.1)
    lane.optimizer.step()
    lane.zero_grad()
    return norm


def one_into_the_other(lane: Contender, i: int) -> torch.Tensor:
    """Whose weights are checkpointed."""
    x, y = batch(i)
    hidden = checkpoint(lane.model.q1, x, use_reentrant=False)
    return lane.learn(loss_of(lane.model.q2(torch.cat([hidden, x[:, :6]], 1)), y))


def only_one(lane: Contender, i: int) -> torch.Tensor:
    x, y = batch(i)
    return lane.learn(loss_of((lane.model.q1, lane.model.q2)[i % 2](x), y))


def evaluated(lane: Contender, i: int) -> Any:
    found = both(lane, i)
    with torch.no_grad():
        return [found, lane.model.q1(batch(9)[0]), lane.model.q2(batch(9)[0])]


def accumulated(lane: Contender, i: int) -> None:
    x, y = batch(i)
    with lane.overlap.accumulate() if lane.overlap is not None else nullcontext():
        loss_of(lane.model.q1(x), y).backward()
    lane.backward(loss_of(lane.model.q2(x), y))
    lane.step()
    lane.zero_grad()


@pytest.mark.parametrize("build", [pair, one_each])
@pytest.mark.parametrize("step", [both, one_into_the_other, evaluated, accumulated])
@in_every_way
def test_steps(way: str, step: Callable[[Contender, int], Any], build: Callable[[], Any]) -> None:
    lane = lockstep(way, build, step, parts=members)
    assert lane.overlap.step_count == 5


@in_every_way
def test_a_loop_that_calls_one_of_them(way: str) -> None:
    lockstep(way, pair, only_one, parts=members)


@in_exact_ways
def test_a_loop_that_clips(way: str) -> None:
    lockstep(way, pair, clipped, parts=members)


def test_backward_is_seen_to_begin_at_each() -> None:
    """Their forwards are refused while a step is open, and their names have the place in the list."""
    model, optimizer = pair()
    overlap = instep.attach((model.q1, model.q2), optimizer, schedule="backward", bucket_bytes=SMALL)
    names = {spec.name for bucket in overlap.plan.buckets for spec in bucket.parameters}
    assert {name[:2] for name in names} == {"0.", "1."}
    assert "0.inner.weight" in names
    x, saved = batch(0)[0], Blocks(depth=2).state_dict()
    (model.q1(x).sum() + model.q2(x).sum()).backward()
    for member in (model.q1, model.q2):
        with pytest.raises(UncommittedStepError):
            member(x)
        with pytest.raises(UncommittedStepError, match=r"Blocks.load_state_dict\(\) was called"):
            member.load_state_dict(saved)
    optimizer.step()
    assert repr(overlap).startswith("<instep.Attachment [Blocks, Blocks] with AdamW")
    overlap.detach()


@pytest.mark.parametrize("name", ["q1", "q2"])
def test_a_second_backward_of_one_is_refused_before_it_begins(name: str) -> None:
    model, optimizer = pair()
    overlap = instep.attach([model.q1, model.q2], optimizer, schedule="backward", bucket_bytes=SMALL)
    loss = model.get_submodule(name)(batch(0)[0]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AccumulationError, match="a second backward began before AdamW"):
        loss.backward()
    with pytest.raises(TornStepError):  # of the first alone
        optimizer.step()
    overlap.accept_torn()
    overlap.detach()


def test_the_optimizer_is_dropped_first() -> None:
    """Nothing is given up while one of the modules is there."""
    model, optimizer = pair()
    overlap = instep.attach([model.q1, model.q2], optimizer, schedule="backward", bucket_bytes=SMALL)
    del optimizer
    gc.collect()
    assert source_of(overlap)
    overlap.detach()


def test_each_has_the_attachment_until_it_is_detached() -> None:
    model, optimizer = pair()
    overlap = instep.attach([model.q1, model.q2], optimizer)
    assert instep.attached(model.q1) is instep.attached(model.q2) is overlap
    assert instep.attached(model) is None
    assert attachments() == [overlap]
    with pytest.raises(InstepError, match="several models"):
        overlap.record()
    overlap.detach()
    assert instep.attached(model.q1) is instep.attached(model.q2) is None
    for module in (model.q1, model.q2):
        assert not any((module._forward_hooks, module._forward_pre_hooks, module._state_dict_pre_hooks))


def test_a_list_of_one_is_that_model() -> None:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach([model], optimizer) as overlap:
        assert instep.attached(model) is overlap
        assert "inner.weight" in {spec.name for bucket in overlap.plan.buckets for spec in bucket.parameters}


def test_parameters_added_later() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Pair()
        return model, torch.optim.AdamW(model.q1.parameters(), lr=1e-2)

    def step(lane: Contender, i: int) -> Any:
        if i == 2:
            lane.optimizer.add_param_group({"params": list(lane.model.q2.parameters())})
        lane.model.zero_grad()
        return both(lane, i)

    for way in ("backward", "forward", "undo"):
        lane = lockstep(way, build, step, parts=members)
        assert "1.inner.weight" in {spec.name for bucket in lane.overlap.plan.buckets for spec in bucket.parameters}
