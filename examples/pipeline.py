"""Four stages on two ranks: ``torchrun --standalone --nproc-per-node 2 examples/pipeline.py``."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import instep

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
count = 2 * ranks
layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(count - 1)] + [nn.Linear(256, 2)]
numbers = [rank, rank + ranks]  # of this rank's stages
modules = [layers[number].to(device) for number in numbers]
stages = [PipelineStage(module, number, count, device) for module, number in zip(modules, numbers, strict=True)]
pipeline = ScheduleInterleaved1F1B(stages, n_microbatches=2 * ranks, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=3e-4, fused=True)

clip = instep.ClipNorm(1.0)  # by the norm of the gradients of all stages
overlap = instep.attach(modules, optimizer, schedule="backward", undo=True, clip=clip, pipeline=pipeline)
generator = torch.Generator().manual_seed(0)
for step in range(60):
    x = torch.randn(64, 256, generator=generator).to(device)
    given = [x] if rank == 0 else []
    losses: list[torch.Tensor] = []
    if rank == ranks - 1:
        pipeline.step(*given, target=(x[:, 0] > 0).long(), losses=losses)
    else:
        pipeline.step(*given)  # each stage is stepped on trial when its last micro-batch is through
    optimizer.step()  # the stages exchange the norm: the trial stands, or the step is put back and done again
    optimizer.zero_grad()
    if losses and step % 20 == 19:
        print(f"step {overlap.step_count}: loss {sum(losses).item() / len(losses):.3f}")
if rank == 0:
    print(f"{overlap.redo_count} of {overlap.step_count} steps were clipped")
dist.destroy_process_group()
