"""One optimizer for each parameter, inside backward: torch's private verbs with only the import changed."""

import torch
from torch import nn

# from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
from instep import apply_optimizer_in_backward, get_in_backward_optimizers

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 3))
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() == 1]
apply_optimizer_in_backward(torch.optim.AdamW, matrices, {"lr": 3e-3, "fused": True})
apply_optimizer_in_backward(torch.optim.SGD, vectors, {"lr": 1e-2})

schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.99) for o in get_in_backward_optimizers(model)]
for step in range(100):
    x = torch.randn(64, 32)
    loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
    loss.backward()  # steps every parameter and frees its gradient: no step(), no zero_grad()
    for scheduler in schedulers:
        scheduler.step()
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.3f}")
assert all(p.grad is None for p in model.parameters())
