"""Ranks as accelerate expects them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist


def as_torchrun(body: Callable[..., Any], *args: Any) -> Any:
    """Call ``body`` on a rank of a pool as if ``torchrun`` had started it, as far as accelerate looks."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, told):
        return body(*args)


@contextmanager
def sharded_by_accelerate() -> Iterator[None]:
    """accelerate takes FSDP for what accelerators have, and leaves it out on a CPU, though torch has it there. All else
    of it runs as it is."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def make(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if vars(self).get("fsdp_plugin") is not None:
            self.distributed_type = DistributedType.FSDP

    told = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    with mock.patch.object(AcceleratorState, "__init__", make), mock.patch.dict(os.environ, told):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)  # of the process, which has other tests
