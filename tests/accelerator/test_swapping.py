"""Blocks whose weights are on the device only while they run, as trainers with little memory swap them: each is brought
before its forward and its backward, and taken to the host after them. ``schedule="backward"`` refuses them by name."""

import pytest
import torch
from torch import nn

import instep
from instep.errors import StaleAttachmentError

pytestmark = pytest.mark.accelerator
DEVICE = "emu"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.second(torch.tanh(self.first(x)))
        return out


class Swapped(nn.Module):
    """Its first and last layer stay on the device. The hooks are the trainer's."""

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


@pytest.mark.parametrize("undo", [False, True])
def test_blocks_that_are_swapped_are_refused_by_name(undo: bool) -> None:
    model = Swapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=1, undo=undo)
    before = [p.detach().cpu().clone() for p in model.blocks.parameters()]
    with pytest.raises(StaleAttachmentError, match=r"'blocks\.3\.second\.\w+' is on emu:0 in backward.*block swap"):
        model(torch.randn(3, 4).to(DEVICE)).square().mean().backward()
    torch.accelerator.synchronize()
    assert all(map(torch.equal, before, [p.detach().cpu() for p in model.blocks.parameters()]))
    overlap.accept_torn()
    overlap.detach()
