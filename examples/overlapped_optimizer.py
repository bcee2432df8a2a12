"""An overlapped optimizer of one's own.

``torchrun --standalone --nproc-per-node 2 examples/overlapped_optimizer.py``

``as_overlapped_optim`` takes any ``torch.optim.Optimizer`` as it is. Register a class of your own for an optimizer that
is none, or that wants another communication: this one sends the signs of gradients, one byte each, and steps by their
vote.
"""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep


class SignVote:
    """Moves each weight by ``lr`` in the direction that most ranks want. Not a ``torch.optim.Optimizer``."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def step_param(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        param.add_(grad.sign(), alpha=-self.lr)


def send_signs(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    signs = bucket.buffer().sign().to(torch.int8)
    work = dist.all_reduce(signs, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].to(bucket.buffer().dtype))


@instep.register_overlapped(SignVote)
class OverlappedSignVote(instep.OverlappedOptimizer):
    def __init__(self, optim_cls: type, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optim_cls)
        self.state = instep.OptimizerHookState(optim_cls(*args, **kwargs), params)

    def register_ddp(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(None, instep.hook_then_optimizer(send_signs, self.state))

    def register_fsdp(self, fsdp: nn.Module) -> None:
        raise NotImplementedError("SignVote has no FSDP form")


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
generator = torch.Generator().manual_seed(rank)
for optim_cls, kwargs in ((torch.optim.AdamW, {"lr": 3e-3, "foreach": True}), (SignVote, {"lr": 1e-3})):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    overlapped = instep.as_overlapped_optim(optim_cls, None, **kwargs)
    overlapped.register_ddp(ddp)
    for step in range(60):
        x = torch.randn(64, 64, generator=generator).to(device)
        loss = nn.functional.cross_entropy(ddp(x), x[:, :10].argmax(1))
        loss.backward()  # reduces, and steps: nothing else is left to call
        if rank == 0 and step % 20 == 19:
            print(f"{optim_cls.__name__} step {step + 1}: loss {loss.item():.3f}")
# The process group ends with its last reference, with it the threads that run the callback of send_signs: before
# Python does. DDP refers to itself, so Python's collector has to come.
del ddp, overlapped, loss
gc.collect()
dist.destroy_process_group()
