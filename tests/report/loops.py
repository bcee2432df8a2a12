"""Loops that are recorded."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import instep

WIDTH, DEPTH, ROWS = 128, 6, 4
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "backward": {"schedule": "backward", "bucket_bytes": LAYER},
    "forward": {"schedule": "forward", "defer": True, "bucket_bytes": LAYER},
}


def made(how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if how != "plain":
        instep.attach(model, optimizer, **HOW[how])
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, micro_batches: int = 1) -> None:
    for number in range(steps):
        overlap = instep.attached(model)
        for last in [False] * (micro_batches - 1) + [True]:
            inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
            with nullcontext() if last or overlap is None else overlap.accumulate():
                model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
