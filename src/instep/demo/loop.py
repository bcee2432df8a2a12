"""The training loop as a user writes it. Nothing in it knows of instep."""

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from instep.demo.job import Shape
from instep.demo.model import ByteGPT

SEED = 0
LEARNING_RATE = 1e-3
LR_WARM_UP_STEPS = 20


def new_model(shape: Shape, device: torch.device) -> nn.Module:
    """The same in every process."""
    torch.manual_seed(SEED)
    return ByteGPT(shape).to(device)


class Loop:
    """A model with its optimizer and its schedule."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / LR_WARM_UP_STEPS))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One iteration. Returns the loss."""
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()


def wait(device: torch.device) -> None:
    """Until all is done that was launched."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def weight_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def numbers(model: nn.Module) -> int:
    """How many a model has."""
    return sum(p.numel() for p in model.parameters())
