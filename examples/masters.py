"""bfloat16 weights with fp32 masters, stepped in backward, and by hand: ``python examples/masters.py``."""

import torch
from torch import nn

import instep


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(128, 10)).to(torch.bfloat16)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(x.to(torch.bfloat16)).float(), x[:, :10].argmax(1))


model = build()
optimizer = instep.masters(torch.optim.AdamW)(model.parameters(), lr=1e-3, fused=True)
instep.attach(model, optimizer, schedule="backward")
for step in range(50):
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}")

by_hand = build()
copies = [nn.Parameter(p.detach().float()) for p in by_hand.parameters()]
other = torch.optim.AdamW(copies, lr=1e-3, fused=True)
for step in range(50):
    loss_of(by_hand, step).backward()
    for p, copy in zip(by_hand.parameters(), copies, strict=True):
        copy.grad = None if p.grad is None else p.grad.float()
    other.step()
    with torch.no_grad():
        for p, copy in zip(by_hand.parameters(), copies, strict=True):
            p.copy_(copy)
            p.grad = None

pairs = zip(model.parameters(), by_hand.parameters(), copies, strict=True)
equal = all(torch.equal(p, q) and torch.equal(optimizer.state[p]["master"], copy) for p, q, copy in pairs)
print("weights and masters are", "equal, bit for bit" if equal else "not equal")
