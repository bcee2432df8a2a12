"""Blocks whose weights are on the device only while they run, as diffusion trainers swap them: each is brought before its
forward and before its backward, and taken to the host after them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import instep

pytestmark = pytest.mark.accelerator
DEVICE = "emu"
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.second(torch.tanh(self.first(x)))
        return out


class Swapped(nn.Module):
    """Its first and last layer stay on the device. The hooks are those of a trainer: none of them is instep's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8).to(DEVICE)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.outer = nn.Linear(8, 1).to(DEVICE)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda block, args: move(block, DEVICE))
            block.register_forward_hook(lambda block, args, output: move(block, "cpu"))
            block.register_full_backward_pre_hook(lambda block, gradients: move(block, DEVICE))
            block.register_full_backward_hook(lambda block, inputs, outputs: move(block, "cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.outer(x)
        return out


def move(block: nn.Module, device: str) -> None:
    for p in block.parameters():
        p.data = p.data.to(device)


def by_hand(model: nn.Module, optimizer: Any) -> None:
    """What the trainers do: each parameter is stepped, and its gradient freed, as soon as that has been accumulated."""

    def step(group: dict[str, Any], p: torch.Tensor) -> None:
        one = type(optimizer).__new__(type(optimizer))
        one.__dict__.update(optimizer.__dict__)
        one.param_groups = [{**group, "params": [p]}]
        type(optimizer).step(one)
        p.grad = None

    for group in optimizer.param_groups:
        for p in group["params"]:
            p.register_post_accumulate_grad_hook(partial(step, group))


def by_instep(model: nn.Module, optimizer: Any) -> None:
    instep.attach(model, optimizer, schedule="backward", bucket_bytes=1)


def train(attach: Callable[[nn.Module, Any], None]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Swapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    attach(model, optimizer)
    found = []
    for i in range(STEPS):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i)).to(DEVICE)
        model(x).square().mean().backward()
        if attach is by_instep:
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        found += [p.detach().cpu().clone() for p in model.parameters()]
        found += [v.cpu().clone() for p in model.parameters() for v in optimizer.state[p].values()]
    return found


def test_blocks_that_leave_the_device_after_their_backward() -> None:
    plain, attached = train(by_hand), train(by_instep)
    assert len(plain) == len(attached)
    assert all(map(torch.equal, plain, attached))
