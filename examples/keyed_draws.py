"""An optimizer that draws random numbers, stepped in backward, and the same by hand. Run it as it is.

``random="keyed"`` seeds torch's generators for each parameter's update by seed, step and name, and puts them back. The
loop by hand has an optimizer for each parameter, and does the same with ``instep.draw_key``.
"""

import copy
from typing import Any

import torch
from torch import nn

import instep


class Langevin(torch.optim.Optimizer):
    """Gradient descent with noise."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=group["lr"])


x = torch.randn(8, 16)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 10))
by_hand = copy.deepcopy(model)

torch.manual_seed(0)
optimizer = Langevin(model.parameters())
overlap = instep.attach(model, optimizer, schedule="backward", random="keyed", seed=1234)
for _ in range(3):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

torch.manual_seed(0)  # dropout draws as if the optimizer drew nothing
optimizers = {name: Langevin([p]) for name, p in by_hand.named_parameters()}
for step in range(3):
    by_hand(x).square().mean().backward()
    for name, each in optimizers.items():
        with torch.random.fork_rng():
            torch.manual_seed(instep.draw_key(1234, step=step, name=name))
            each.step()
        each.zero_grad()

assert all(map(torch.equal, model.parameters(), by_hand.parameters()))
print(f"{overlap.step_count} steps in backward: equal, bit for bit, to those by hand")
