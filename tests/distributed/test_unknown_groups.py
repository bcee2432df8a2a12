"""DDP over a process group that torch.distributed does not know: whoever makes one knows what its ranks are."""

import tempfile
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError
from tests.cases import Blocks, batch
from tests.devices import on_cpu_only
from tests.distributed.pool import RankPool

pytestmark = on_cpu_only
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "forward": {"schedule": "forward", "defer": True},
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
}


def group(directory: str, name: str) -> dist.ProcessGroup:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"{directory}/{name}", dist.distributed_c10d._get_default_store())
    made = dist.ProcessGroup(store, rank, ranks)
    gloo = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    _kept.append(made)
    return made


_kept: list[dist.ProcessGroup] = []
"""As whoever makes a group keeps it: gloo's end waits for its threads, and these for Python, which waits for them."""


def trained(over: dist.ProcessGroup, options: dict[str, Any] | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Blocks(), process_group=over, bucket_cap_mb=0.004)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    overlap = None if options is None else instep.attach(ddp, optimizer, **options)
    for i in range(4):
        x, y = batch(10 * i + dist.get_rank())
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if overlap is not None:
        overlap.detach()
    return [p.detach() for p in ddp.parameters()]


def differences(directory: str) -> list[str]:
    expected = trained(group(directory, "plain"), None)
    found = {way: trained(group(directory, way), options) for way, options in WAYS.items()}
    return [way for way, weights in found.items() if not all(map(torch.equal, expected, weights))]


def refused(directory: str) -> str:
    with pytest.raises(AttachError) as error:
        trained(group(directory, "shards"), {"schedule": "backward", "shard_state": True})
    return str(error.value)


def test_training(two_ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        assert two_ranks.run(differences, directory) == [[], []]


def test_shard_state_is_refused(two_ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for said in two_ranks.run(refused, directory):
            assert "shard_state=True is for a process group of torch.distributed" in said
