"""Ranks as accelerate expects them."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist


def as_torchrun(body: Callable[..., Any], *args: Any) -> Any:
    """Call ``body`` on a rank of a pool as if ``torchrun`` had started it, as far as accelerate looks."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, told):
        return body(*args)
