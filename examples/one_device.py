"""Fine-tune on one device: gradients never all alive. Run as it is: ``python examples/one_device.py``."""

import torch
from torch import nn

import instep

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)], nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)

overlap = instep.attach(model, optimizer, bucket_bytes=512 * 1024, schedule="backward")
for step in range(50):
    x = torch.randn(64, 256)
    y = (x[:, 0] > 0).long()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()  # each bucket is stepped as soon as its gradients are final
    optimizer.step()  # steps what is left, and commits
    optimizer.zero_grad()
    scheduler.step()
    if step % 10 == 9:
        print(f"step {overlap.step_count}: loss {loss.item():.3f}")
print(overlap.plan)
