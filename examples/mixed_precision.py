"""bfloat16 forward, backward and communication, float32 weights and step, under DDP.

``torchrun --standalone --nproc-per-node 2 examples/mixed_precision.py``
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import instep

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10)).to(device)
ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3, fused=True)

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32)
instep.attach(ddp, optimizer, mixed_precision=policy, schedule="backward")
generator = torch.Generator().manual_seed(rank)
for step in range(60):
    x = torch.randn(64, 64, generator=generator).to(device)
    loss = nn.functional.cross_entropy(ddp(x), x[:, :10].argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.3f}, weights {ddp.module[0].weight.dtype}")
dist.destroy_process_group()
