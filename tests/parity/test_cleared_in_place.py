"""``schedule="backward"``: what a loop does with the gradients of a step that is over, which were freed. They may be
zeroed in place, and another loss may add to them."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._torch.placeholders import ZeroedGradient
from instep.errors import SpentGradientError, UncommittedStepError
from tests.cases import Blocks, batch
from tests.parity.lockstep import SMALL, Contender, Refused, lockstep, loss_of

STEPS = 6


class Branches(nn.Module):
    """Two heads, of which a step takes one, and a lookup that only some steps make."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(20, 16, sparse=sparse, mode="sum")
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.heads = nn.ModuleList(nn.Linear(16, 10) for _ in range(2))

    def forward(self, x: torch.Tensor, i: int) -> Any:
        if i % 3 == 0:
            x = x + self.words((x * 100).long().abs() % 20)
        return self.heads[i % 2](self.body(x))


def branches(optimizers: Callable[[Branches], Any], *, sparse: bool = False) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Branches(sparse=sparse)
        return model, optimizers(model)

    return build


def with_two_optimizers(model: Branches) -> list[torch.optim.Optimizer]:
    rest = [*model.words.parameters(), *model.body.parameters()]
    return [
        torch.optim.SGD(model.heads.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(rest, lr=1e-2, weight_decay=0.1),
    ]


def with_a_sparse_one(model: Branches) -> list[torch.optim.Optimizer]:
    rest = [*model.heads.parameters(), *model.body.parameters()]
    return [torch.optim.SparseAdam(model.words.parameters(), lr=1e-2), torch.optim.Adam(rest, lr=1e-2)]


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "AdamW fused": branches(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)),
    "AdamW foreach": branches(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True)),
    "SGD": branches(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False)),
    "two": branches(with_two_optimizers),
    "sparse": branches(with_a_sparse_one, sparse=True),
}


def in_mode(lane: Contender, mode: AbstractContextManager[Any]) -> None:
    with mode:
        lane.model.zero_grad(set_to_none=False)


def by_hand(lane: Contender) -> None:
    for p in lane.model.parameters():
        if p.grad is not None:
            p.grad.detach_().zero_()


def some(lane: Contender) -> None:
    lane.model.heads.zero_grad(set_to_none=False)
    for part in (lane.model.body, lane.model.words):
        part.zero_grad()


def then_read(lane: Contender) -> Any:
    lane.model.zero_grad(set_to_none=False)
    gradients = [p.grad for p in lane.model.parameters() if p.grad is not None]
    assert not any(g.to_dense().any() for g in gradients)
    return [g.to_dense().norm() for g in gradients]


CLEARS: dict[str, Callable[[Contender], Any]] = {
    "optimizer": lambda lane: [o.zero_grad(set_to_none=False) for o in lane.optimizers] and None,
    "model": lambda lane: lane.model.zero_grad(set_to_none=False),
    "twice": lambda lane: [lane.model.zero_grad(set_to_none=False) for _ in range(2)] and None,
    "by hand": by_hand,
    "some": some,
    "then read": then_read,
    "in inference mode": lambda lane: in_mode(lane, torch.inference_mode()),
    "on the meta device": lambda lane: in_mode(lane, torch.device("meta")),
}


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("clear", list(CLEARS))
@pytest.mark.parametrize("model", list(MODELS))
def test_gradients_are_zeroed_in_place(model: str, clear: str, first: bool) -> None:
    """A parameter that gets no gradient in a step is moved by its momentum and weight decay."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        found = CLEARS[clear](lane) if first else None
        loss = loss_of(lane.model(x, i), y)
        lane.backward(loss)
        lane.step()
        return [loss.detach(), found if first else CLEARS[clear](lane)]

    lane = lockstep("backward", MODELS[model], step, steps=STEPS)
    assert lane.overlap.stats()["freed_bytes"] > 0


@pytest.mark.parametrize("model", ["AdamW fused", "two"])
@pytest.mark.parametrize("clip", [instep.ClipValue(0.1), instep.ClipNorm(0.3, mode="two_pass")], ids=["value", "norm"])
def test_zeroed_in_place_and_clipped(model: str, clip: Any) -> None:
    def step(lane: Contender, i: int) -> Any:
        lane.model.zero_grad(set_to_none=False)
        x, y = batch(i)
        lane.backward(loss_of(lane.model(x, i), y))
        if lane.overlap is None:
            parameters = list(lane.model.parameters())
            if isinstance(clip, instep.ClipValue):
                nn.utils.clip_grad_value_(parameters, 0.1)
            else:
                nn.utils.clip_grad_norm_(parameters, 0.3)
        for optimizer in lane.optimizers:
            optimizer.step()

    lockstep("backward", MODELS[model], step, steps=STEPS, clip=clip)


@pytest.mark.parametrize("how", ["accumulate", "keep", "counted"])
def test_zeroed_in_place_and_accumulated(how: str) -> None:
    def step(lane: Contender, i: int) -> None:
        lane.optimizer.zero_grad(set_to_none=False)
        for k in range(2):
            context: AbstractContextManager[Any] = nullcontext()
            if lane.overlap is not None and how == "accumulate" and k == 0:
                context = lane.overlap.accumulate()
            if lane.overlap is not None and how == "keep":
                context = lane.overlap.keep_gradients()
            x, y = batch(2 * i + k)
            with context:
                (loss_of(lane.model(x, i), y) / 2).backward()
        lane.optimizer.step()

    options: dict[str, Any] = {"accumulation_steps": 2} if how == "counted" else {}
    lockstep("backward", MODELS["AdamW foreach"], step, steps=STEPS, **options)


def test_a_head_that_is_used_no_more() -> None:
    """By then one hook speaks for each bucket, and the zeros were taken off while backward runs."""

    def step(lane: Contender, i: int) -> None:
        lane.optimizer.zero_grad(set_to_none=False)
        x, y = batch(i)
        loss = loss_of(lane.model(x, 0), y)
        if i < 4:
            loss = loss + loss_of(lane.model(x, 1), y)
        loss.backward()
        lane.optimizer.step()

    lockstep("backward", MODELS["SGD"], step, steps=STEPS)


def test_zeros_take_no_memory_until_they_are_used() -> None:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL)
    for i in range(4):
        x, y = batch(i)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert overlap.stats()["freed_bytes"] == (i + 1) * sum(p.nbytes for p in model.parameters())
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(kept) == len(list(model.parameters()))
    assert all(isinstance(g, ZeroedGradient) for g in kept)
    assert [copy.deepcopy(g).tolist() for g in kept] == [torch.zeros_like(p).tolist() for p in model.parameters()]
    overlap.detach()


# Another loss adds to gradients that were freed.


class Agents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.critic = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1))

    def value(self, x: torch.Tensor, action: torch.Tensor) -> Any:
        return self.critic(torch.cat([x, action], dim=1))


def agents() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = Agents()
    return model, [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (model.critic, model.actor)]


def parts(lane: Contender) -> list[tuple[nn.Module, Any]]:
    return [(lane.model.critic, lane.optimizers[0]), (lane.model.actor, lane.optimizers[1])]


def critic_step(lane: Contender, i: int, *, clears: bool = True) -> torch.Tensor:
    x, _ = batch(i)
    with torch.no_grad():
        goal = x[:, :1] + 0.9 * lane.model.value(x, lane.model.actor(x))
    loss = (lane.model.value(x, x[:, :4]) - goal).square().mean()
    if clears:
        lane.optimizers[0].zero_grad()
    loss.backward()
    lane.optimizers[0].step()
    return loss.detach()


def actor_step(lane: Contender, i: int) -> torch.Tensor:
    x, _ = batch(i)
    loss = -lane.model.value(x, lane.model.actor(x).tanh()).mean()
    lane.optimizers[1].zero_grad()
    loss.backward()
    lane.optimizers[1].step()
    return loss.detach()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("every", [1, 2])
def test_the_loss_of_an_actor_adds_to_the_gradients_of_its_critic(every: int, times: int) -> None:
    """DDPG; TD3, whose actor steps every second time; SAC, whose actor may step several times at once."""

    def step(lane: Contender, i: int) -> Any:
        losses = [critic_step(lane, i)]
        if i % every == 0:
            losses += [actor_step(lane, 10 * i + k) for k in range(times)]
        return losses

    lane = lockstep("backward", agents, step, steps=STEPS, parts=parts)
    assert all(overlap.stats()["freed_bytes"] > 0 for overlap in lane.overlaps)


def test_a_critic_that_is_zeroed_in_place() -> None:
    def step(lane: Contender, i: int) -> Any:
        lane.optimizers[0].zero_grad(set_to_none=False)
        return [critic_step(lane, i, clears=False), actor_step(lane, i)]

    lockstep("backward", agents, step, steps=STEPS, parts=parts)


def test_a_critic_that_is_never_cleared() -> None:
    """Its optimizer would step the sum of its own gradients and those of the actor's loss."""

    def step(lane: Contender, i: int) -> Any:
        return [critic_step(lane, i, clears=False), actor_step(lane, i)]

    refused = Refused(SpentGradientError, "untouched", "a later backward added to it")
    lockstep("backward", agents, step, steps=STEPS, parts=parts, refused={"backward": refused})


def test_a_critic_that_is_cleared_behind_its_step() -> None:
    """The actor's loss gives it gradients that look like those of a step."""

    def step(lane: Contender, i: int) -> Any:
        found = critic_step(lane, i)
        lane.optimizers[0].zero_grad()
        return [found, actor_step(lane, i)]

    refused = Refused(UncommittedStepError, "open", "only passes through this model")
    lockstep("backward", agents, step, steps=STEPS, parts=parts, refused={"backward": refused})


def test_what_was_added_is_not_read() -> None:
    def step(lane: Contender, i: int) -> Any:
        critic_step(lane, i)
        actor_step(lane, i)
        return nn.utils.clip_grad_norm_(lane.model.critic.parameters(), 1.0)

    refused = Refused(SpentGradientError, "idle", "clip_grad_norm_() met")
    lockstep("backward", agents, step, steps=STEPS, parts=parts, refused={"backward": refused})


def test_what_is_added_by_the_loop_is_refused() -> None:
    """By the loop, between steps: it would find the sum."""

    def step(lane: Contender, i: int) -> None:
        critic_step(lane, i)
        for p in lane.model.critic.parameters():
            p.grad.add_(1.0)

    refused = Refused(SpentGradientError, "idle", "add_ met")
    lockstep("backward", agents, step, steps=STEPS, parts=parts, refused={"backward": refused})
