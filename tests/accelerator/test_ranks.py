"""Collectives on the emulated device: NCCL's manners, gloo's bytes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator.recording import recorded
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.accelerator


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _ddp_body(device: str) -> tuple[list[torch.Tensor], list[str], int]:
    model = _model().to(device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0002, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with recorded() as log:
        for _ in range(4):
            wrapped(torch.randn(4, 8, generator=generator).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [p.detach().cpu() for p in model.parameters()]
    return weights, [str(f) for f in log.findings], len(log.streams)


def test_ddp_has_the_bits_of_gloo(two_emulated_ranks: RankPool) -> None:
    (plain, _, _), *_ = two_emulated_ranks.run(_ddp_body, "cpu")
    for weights, findings, streams in two_emulated_ranks.run(_ddp_body, "emu"):
        assert all(map(torch.equal, weights, plain))
        assert findings == []
        assert streams == 2
