"""Programs on two ranks that were found to differ in silence."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import InstepError
from tests.distributed.pool import BodyFailedError, RankPool
from tests.parity.oracle import run_or_refuse_on_this_rank
from tests.parity.programs import Program, Step

BOTH = (True, True)
TAKEN = Step((BOTH,))


def broken(ranks: RankPool, **changed: Any) -> str | None:
    """What the program does against the contract."""
    program = Program(**{"optimizer": "AdamW-0-fused", "width": 8, "depth": 2, "bucket_bytes": 64, **changed})
    try:
        outcomes = ranks.run(run_or_refuse_on_this_rank, program, True)
    except BodyFailedError as error:
        return f"{changed}: {str(error).strip().splitlines()[-1]}"
    return None if len(set(outcomes)) == 1 else f"{changed}: {outcomes}"


def test_shard_state_after_backwards_without_communication(two_ranks: RankPool) -> None:
    found = [
        broken(two_ranks, way=way, steps=(TAKEN,) * 4, no_sync=True)
        for way in ("shard_state", "backward", "forward", "undo")
    ]
    assert not any(found), "\n".join(filter(None, found))


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x).double())
        return made


def static_graph_of_two_dtypes() -> None:
    model = DistributedDataParallel(TwoDtypes(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with instep.attach(model, optimizer, schedule="backward", comm_hook=(dist.group.WORLD, allreduce_hook)):
        with pytest.raises(InstepError, match="static_graph=True and parameters of several dtypes"):
            model(torch.ones(2, 4)).sum().backward()
        assert all(map(torch.equal, before, model.parameters()))


def test_buckets_that_torch_numbers_alike(two_ranks: RankPool) -> None:
    """In the first backward of a static graph (findings/static_graph_hook_has_no_last_bucket.sh)."""
    two_ranks.run(static_graph_of_two_dtypes)
