"""Two ranks on one machine: ``torchrun --standalone --nproc-per-node 2 examples/ddp.py``."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
model = DistributedDataParallel(
    nn.Sequential(*layers, nn.Linear(256, 10)).to(device), gradient_as_bucket_view=True, bucket_cap_mb=1
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

overlap = instep.attach(model, optimizer, schedule="backward")
generator = torch.Generator().manual_seed(rank)
for step in range(50):
    accumulated = torch.randn(2, 64, 256, generator=generator).to(device)
    with overlap.accumulate():  # all but the last micro-batch
        nn.functional.cross_entropy(model(accumulated[0]), (accumulated[0, :, 0] > 0).long()).backward()
    loss = nn.functional.cross_entropy(model(accumulated[1]), (accumulated[1, :, 0] > 0).long())
    loss.backward()  # a bucket is stepped when it has arrived, while later ones are on their way
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 9:
        print(f"step {overlap.step_count}: loss {loss.item():.3f}")
if rank == 0:
    print(overlap.plan)
dist.destroy_process_group()
