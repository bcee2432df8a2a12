"""The training loop as a user writes it. Nothing in it knows of instep."""

from time import perf_counter

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from instep.demo.job import Job
from instep.demo.memory import GradientProbe
from instep.demo.model import SHAPES, ByteGPT

SEED = 0
BUCKETS = 10
MIB = 1024 * 1024
LEARNING_RATE = 1e-3
LR_WARM_UP_STEPS = 20


class Loop:
    """A model with its optimizer and its schedule, the same in every instance."""

    def __init__(self, job: Job, device: torch.device) -> None:
        torch.manual_seed(SEED)
        module = ByteGPT(SHAPES[job.size]).to(device)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        self.bucket_bytes = self.gradient_bytes // BUCKETS
        self.model = module if job.placement.ranks == 1 else _data_parallel(module, self.bucket_bytes)
        self.optimizer = AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / LR_WARM_UP_STEPS))
        self.probe = GradientProbe(self.model.parameters())

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        """One iteration. Returns the loss, and when ``optimizer.step()`` began and ended (``perf_counter``)."""
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        started = perf_counter()
        self.optimizer.step()
        ended = perf_counter()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach(), started, ended


def _data_parallel(module: nn.Module, bucket_bytes: int) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=bucket_bytes / MIB, gradient_as_bucket_view=True)
