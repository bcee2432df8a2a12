"""After two steps in order, one parameter of each bucket speaks for all of it. Then something else comes."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import instep
from tests.cases import batch
from tests.parity.lockstep import SMALL, Contender, Refused, in_every_way, lockstep, loss_of

ODD = (4, 5, 8)  # one by itself, two in a row
STEPS = 11
REENTRANT = Refused(RuntimeError, "untouched", match="use_reentrant=False")


class Three(nn.Module):
    """Three layers, of which the last two can be swapped, left out, run again in backward, or used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)
        self.mode = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()
        if self.mode in ("head only", "first detached"):
            y = y.detach()
        if self.mode == "head only":
            return self.head(y)
        layers = {"swapped": [self.third, self.second], "left out": [self.third]}.get(
            self.mode, [self.second, self.third]
        )
        for layer in layers * (2 if "twice" in self.mode else 1):
            y = checkpoint(layer, y, use_reentrant=True) if "nested" in self.mode else layer(y)
            y = y.tanh()
        return self.head(y)


def hooks_of(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())


def usual(lane: Contender, i: int) -> None:
    x, y = batch(i)
    lane.learn(loss_of(lane.model(x), y))


def by_mode(mode: str) -> Callable[[Contender, int], None]:
    def step(lane: Contender, i: int) -> None:
        lane.model.mode = mode if i in ODD else ""
        usual(lane, i)

    return step


def from_elsewhere(lane: Contender, i: int) -> None:
    """Gradients are there before backward, from somewhere else, and the order is another."""
    lane.model.mode = "swapped" if i in ODD else ""
    x, y = batch(i)
    loss = loss_of(lane.model(x), y)
    if i in ODD:
        for parameter in lane.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
    lane.learn(loss)


def micro_batches(lane: Contender, i: int) -> None:
    x, y = batch(i)
    if i in ODD:
        adds_up(lane, loss_of(lane.model(x), y))
    lane.learn(loss_of(lane.model(-x), y))


def all_forwards_first(lane: Contender, i: int) -> None:
    """The second backward is in another order, and finds the gradients of the first."""
    x, y = batch(i)
    if i not in ODD:
        usual(lane, i)
        return
    first = loss_of(lane.model(x), y)
    lane.model.mode = "swapped"
    last = loss_of(lane.model(-x), y)
    lane.model.mode = ""
    adds_up(lane, first)
    lane.learn(last)


def adds_up(lane: Contender, loss: torch.Tensor) -> None:
    if lane.overlap is None:
        loss.backward()
    else:
        with lane.overlap.accumulate():
            loss.backward()


def always_in_two(mode: str, which: int) -> Callable[[Contender, int], None]:
    """Each step has two micro-batches, of which the one or the other is an odd one."""

    def step(lane: Contender, i: int) -> None:
        x, y = batch(i)
        for number, part in enumerate((x, -x)):
            lane.model.mode = mode if i in ODD and number == which else ""
            loss = loss_of(lane.model(part), y)
            if number == 0:
                adds_up(lane, loss)
            else:
                lane.learn(loss)

    return step


def cleared_in_between(lane: Contender, i: int) -> None:
    """The loop has given up a micro-batch, or all of it but one gradient."""
    x, y = batch(i)
    adds_up(lane, loss_of(lane.model(x), y))
    if i in ODD:
        kept = lane.model.second.weight.grad
        lane.zero_grad()
        lane.model.second.weight.grad = kept if i == ODD[0] else None
    lane.learn(loss_of(lane.model(-x), y))


def without_its_forward(lane: Contender, i: int) -> None:
    x, y = batch(i)
    model = lane.model
    if i in ODD:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        for layer in (model.first, model.third, model.second):
            x = layer(x).tanh()
        lane.learn(loss_of(model.head(x), y))
    else:
        lane.learn(loss_of(model(x), y))


def frozen_for_a_while(lane: Contender, i: int) -> None:
    lane.model.second.requires_grad_(i not in ODD)
    usual(lane, i)


def frozen_after_forward(lane: Contender, i: int) -> None:
    x, y = batch(i)
    loss = loss_of(lane.model(x), y)
    lane.model.third.weight.requires_grad_(i not in ODD)
    lane.learn(loss)
    lane.model.third.weight.requires_grad_(True)


def with_a_penalty(lane: Contender, i: int) -> None:
    """A gradient of a parameter that the output does not depend on."""
    lane.model.mode = "left out" if i in ODD else ""
    x, y = batch(i)
    loss = loss_of(lane.model(x), y)
    lane.learn(loss + 0.1 * lane.model.second.weight.square().sum() if i in ODD else loss)


def asked_about(lane: Contender, i: int) -> None:
    x, y = batch(i)
    loss = loss_of(lane.model(x), y)
    if i in ODD:
        torch.autograd.grad(loss, list(lane.model.parameters()), retain_graph=True)
    lane.learn(loss)


def asked_about_in_backward(lane: Contender, i: int) -> None:
    """A hook of the user's runs through another graph of the model while backward runs."""
    x, y = batch(i)
    other, out = loss_of(lane.model(-x), y), lane.model(x)
    if i in ODD:

        def ask(_: torch.Tensor) -> None:
            torch.autograd.grad(other, list(lane.model.parameters()), retain_graph=True)

        out.register_hook(ask)
    lane.learn(loss_of(out, y))


def build() -> tuple[Any, torch.optim.Optimizer]:
    model = Three()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


STEPS_OF = {
    "usual": usual,
    "another order": by_mode("swapped"),
    "one unused": by_mode("left out"),
    "none that speaks": by_mode("head only"),
    "used twice": by_mode("twice"),
    "nested backwards": by_mode("nested"),
    "a gradient from elsewhere": from_elsewhere,
    "micro-batches": micro_batches,
    "all forwards first": all_forwards_first,
    "always micro-batches": always_in_two("", 0),
    "always micro-batches, the first in another order": always_in_two("swapped", 0),
    "always micro-batches, the last in another order": always_in_two("swapped", 1),
    "always micro-batches, one unused in the first": always_in_two("left out", 0),
    "always micro-batches, one unused in the last": always_in_two("left out", 1),
    "always micro-batches, none that speaks in the last": always_in_two("head only", 1),
    "always micro-batches, the last with a detached layer": always_in_two("first detached", 1),
    "always micro-batches, cleared in between": cleared_in_between,
    "without the model's forward": without_its_forward,
    "frozen": frozen_for_a_while,
    "frozen after forward": frozen_after_forward,
    "penalty": with_a_penalty,
    "autograd.grad": asked_about,
    "autograd.grad in backward": asked_about_in_backward,
}


@pytest.mark.parametrize("what", list(STEPS_OF))
@pytest.mark.parametrize("bucket_bytes", [SMALL, 10 * SMALL])
@in_every_way
def test_equal_to_the_plain_loop(way: str, bucket_bytes: int, what: str) -> None:
    refused = {"two_pass": REENTRANT} if what == "nested backwards" else {}
    lane = lockstep(way, build, STEPS_OF[what], steps=STEPS, refused=refused, bucket_bytes=bucket_bytes)
    assert way in refused or lane.overlap.step_count == STEPS


@in_every_way
def test_gradients_for_which_none_speaks_are_of_the_same_step(way: str) -> None:
    """Those of one optimizer arrive, and the hook of their bucket is on a parameter that has none: the calls of both
    optimizers are one step."""

    def build_two() -> Any:
        model = Three()
        late, early = nn.ModuleList([model.third, model.head]), nn.ModuleList([model.first, model.second])
        return model, [torch.optim.SGD(late.parameters(), lr=0.1), torch.optim.AdamW(early.parameters(), lr=1e-2)]

    lane = lockstep(way, build_two, by_mode("first detached"), steps=STEPS, bucket_bytes=1_500)
    assert lane.overlap.step_count == STEPS


@pytest.mark.parametrize(("mode", "bucket_bytes"), [("swapped", SMALL), ("head only", 10 * SMALL)])
def test_one_hook_for_each_bucket_until_something_else_comes(mode: str, bucket_bytes: int) -> None:
    """Another order, of which a hook tells; or gradients of which none does, as of a bucket whose last one has none."""
    model, optimizer = build()
    with instep.attach(model, optimizer, bucket_bytes=bucket_bytes, schedule="backward") as overlap:
        everything = sum(1 for _ in model.parameters())
        found = []
        for i in range(STEPS):
            model.mode = mode if i == ODD[0] else ""
            x, y = batch(i)
            loss_of(model(x), y).backward()
            assert repr(overlap).endswith("open>"), i
            found.append((hooks_of(model), sum(type(p.grad) is torch.Tensor for p in model.parameters())))
            optimizer.step()
            optimizer.zero_grad()
        buckets = len(overlap.plan.buckets)
    assert buckets < everything
    for i, (hooks, unapplied) in enumerate(found):
        assert hooks == (buckets if 2 <= i <= ODD[0] else everything), i
        # In the odd one what comes out of order is left to optimizer.step().
        assert (unapplied > 0) == (i == ODD[0]), i


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 3}])
def test_one_hook_for_each_bucket_where_gradients_add_up(options: dict[str, Any]) -> None:
    model, optimizer = build()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward", **options) as overlap:
        everything = sum(1 for _ in model.parameters())
        for i in range(STEPS):
            for number in range(3):
                x, y = batch(3 * i + number)
                loss = loss_of(model(x), y)
                with nullcontext() if options or number == 2 else overlap.accumulate():
                    loss.backward()
                left = [type(p.grad) is torch.Tensor for p in model.parameters()]
                assert all(left) if number < 2 else not any(left)
                assert hooks_of(model) == (len(overlap.plan.buckets) if i > 1 else everything), (i, number)
            optimizer.step()
            optimizer.zero_grad()
        assert len(overlap.plan.buckets) < everything


def test_a_micro_batch_that_leaves_whole_buckets_out_disturbs_no_order() -> None:
    """Their gradients are those of the micro-batch before, and are left to ``optimizer.step()``."""
    model, optimizer = build()
    with instep.attach(model, optimizer, bucket_bytes=700, schedule="backward") as overlap:
        for i in range(STEPS):
            x, y = batch(i)
            with overlap.accumulate():
                loss_of(model(x), y).backward()
            model.mode = "head only" if i == ODD[0] else ""
            loss_of(model(-x), y).backward()
            model.mode = ""
            left = [name for name, p in model.named_parameters() if type(p.grad) is torch.Tensor]
            assert left == ([name for name, _ in model.named_parameters() if "head" not in name] if i == ODD[0] else [])
            optimizer.step()
            optimizer.zero_grad()
            assert hooks_of(model) == (len(overlap.plan.buckets) if i > 1 else 8), i
        assert len(overlap.plan.buckets) < 8


@pytest.mark.parametrize("way", ["backward", "undo"])
def test_a_hook_that_writes_what_has_added_up(way: str) -> None:
    """Where the backward begins: autograd counts that write, too, and afterwards the order is another."""

    def build_with_decay() -> Any:
        model, optimizer = build()

        def decay(_: nn.Module, __: object) -> None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.9)

        model.head.register_full_backward_pre_hook(decay)
        return model, optimizer

    lockstep(way, build_with_decay, always_in_two("swapped", 1), steps=STEPS, bucket_bytes=SMALL)


def test_zeros_are_there_while_gradients_add_up() -> None:
    """For hooks that ask whether a gradient is there."""

    def build_with_hooks() -> Any:
        model, optimizer = build()
        for p in model.parameters():
            p.register_hook(lambda g, p=p: g if p.grad is None else g * 0.5)
        return model, optimizer

    def step(lane: Contender, i: int) -> None:
        x, y = batch(i)
        adds_up(lane, loss_of(lane.model(x), y))
        lane.backward(loss_of(lane.model(-x), y))
        lane.step()
        lane.optimizer.zero_grad(set_to_none=False)

    lockstep("backward", build_with_hooks, step, steps=STEPS, bucket_bytes=SMALL)


def test_nested_backwards_keep_every_hook() -> None:
    model, optimizer = build()
    model.mode = "nested"
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward"):
        for i in range(5):
            x, y = batch(i)
            loss_of(model(x), y).backward()
            assert hooks_of(model) == sum(1 for _ in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
