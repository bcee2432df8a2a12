"""The two functions of torch that instep stands in for, once ``apply_optimizer_in_backward`` has been called.

Both do what torch's own do, unless a parameter is instep's. ``tests/functional/test_names.py`` fails clearly when
torch changes them.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from instep.sources.fsdp.wrappers import instances_of

running_ddps: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()
"""The DDP instances whose first forward has begun."""
_installed = False


def install(
    set_up_ddp: Callable[[DistributedDataParallel], bool], moved: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Stand in for both functions, once.

    Args:
        set_up_ddp: is called before a DDP instance's first forward, where DDP looks for in-backward optimizers.
            ``False``: do what DDP does with them, which fails on CPU.
        moved: is called as ``moved(parameter, sharded)`` when ``fully_shard`` replaces a parameter. FSDP2 has no hook
            for this.
    """
    global _installed
    if _installed:
        return
    _installed = True
    running_ddps.update(ddp for ddp in instances_of(DistributedDataParallel) if ddp._lazy_init_ran)
    torchs_set_up: Any = DistributedDataParallel._setup_in_backward_optimizers

    def _setup_in_backward_optimizers(self: DistributedDataParallel) -> None:
        if not set_up_ddp(self):
            torchs_set_up(self)
        running_ddps.add(self)

    DistributedDataParallel._setup_in_backward_optimizers = _setup_in_backward_optimizers  # type: ignore[method-assign]
    if not dist.is_available():
        return
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # not needed before

    torchs_init: Any = FSDPParam._init_sharded_param

    def _init_sharded_param(self: FSDPParam, param: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torchs_init(self, param, *args, **kwargs)
        moved(param, self.sharded_param)

    FSDPParam._init_sharded_param = _init_sharded_param  # type: ignore[method-assign]
