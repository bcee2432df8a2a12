"""What a loop or an optimizer may do that is easily overlooked."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import AttachError, HyperparameterChangedError, UncommittedStepError
from tests.cases import Blocks, batch
from tests.parity.lockstep import CLIP, EXACT, Contender, Refused, in_exact_ways, lockstep, loss_of, ways


def blocks(make: Any) -> Any:
    def build() -> Any:
        model = Blocks(depth=2)
        return model, make(model)

    return build


class Plain(torch.optim.Optimizer):
    """SGD that takes an argument, has a setting of its own, and skips frozen parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.factor = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.requires_grad:
                    p.sub_(p.grad, alpha=group["lr"] * scale * self.factor)


CHANGED = Refused(HyperparameterChangedError, "torn")


@ways("backward", *EXACT)
def test_step_with_arguments_of_its_own(way: str) -> None:
    def step(lane: Contender, i: int) -> None:
        x, y = batch(i)
        lane.backward(loss_of(lane.model(x), y))
        lane.optimizer.step(scale=0.5)
        lane.zero_grad()

    lockstep(way, blocks(lambda m: Plain(m.parameters())), step, refused={"backward": CHANGED})


class Unit(nn.Parameter):
    """A weight that its optimizer keeps at length one."""


class Riemannian(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    if isinstance(p, Unit):
                        p.div_(p.norm())


@ways("backward", *EXACT)
def test_an_optimizer_that_asks_for_the_class_of_a_parameter(way: str) -> None:
    def build() -> Any:
        model = Blocks(depth=2)
        model.outer.weight = Unit(model.outer.weight.detach())
        return model, Riemannian(model.parameters())

    lockstep(way, build)


@dataclass
class Output:
    logits: torch.Tensor


class InDataclass(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        return Output(super().forward(x))


@pytest.mark.parametrize("make", [Blocks, InDataclass])
@in_exact_ways
def test_two_optimizers_that_are_clipped_in_turn(way: str, make: Any) -> None:
    """Each clips by the norm of all that is there, old and new."""

    def build() -> Any:
        model = make(depth=2)
        first = torch.optim.SGD(model.blocks.parameters(), lr=0.5, momentum=0.9)
        rest = nn.ModuleList([model.inner, model.outer])
        return model, [first, torch.optim.SGD(rest.parameters(), lr=0.5)]

    def step(lane: Contender, i: int) -> None:
        for turn, optimizer in enumerate(lane.optimizers):
            x, y = batch(2 * i + turn)
            out = lane.model(x)
            lane.backward(loss_of(out.logits if isinstance(out, Output) else out, y))
            lane.clip()
            optimizer.step()
            if turn == 0:
                optimizer.zero_grad()
        lane.zero_grad()

    lockstep(way, build, step, clip=instep.ClipNorm(CLIP))


def test_a_write_through_an_alias_before_a_step_is_put_back_is_no_secret() -> None:
    model = Blocks()
    alias = model.inner.weight.detach()
    optimizer = torch.optim.AdamW(model.parameters())
    with instep.attach(model, optimizer, bucket_bytes=1, undo=True, schedule="backward"):
        model(batch(0)[0]).sum().backward()
        alias.mul_(0.5)
        with pytest.raises(UncommittedStepError, match=r"'inner.weight'.*put back"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def test_parameters_that_share_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(AttachError, match=r"'0.weight' and '1.weight' share memory"):
        instep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule="backward")


@pytest.mark.parametrize("way", ["forward", "late", "undo"])
def test_a_gradient_that_is_changed_through_a_reference_to_it(way: str) -> None:
    """Its norm was taken when it arrived."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks()
        kept: list[torch.Tensor] = []
        vars(model)["kept"] = kept
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(lane: Contender, i: int) -> None:
        lane.backward(loss_of(lane.model(batch(i)[0]), batch(i)[1]))
        for gradient in lane.model.kept:
            gradient.mul_(7.0)
        lane.model.kept.clear()
        lane.step()
        lane.zero_grad()

    lockstep(way, build, step, clip=instep.ClipNorm(CLIP))
