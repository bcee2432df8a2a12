"""The backend "emu" of torch.distributed: NCCL's manners for tensors on ``emu``, gloo for those on the CPU.

``register()``, then ``dist.init_process_group("emu", …)``.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tests.accelerator.device import load

_CPU = torch.device("cpu")


def _group(store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=5)) -> dist.ProcessGroup:
    """A process group whose CPU collectives and whose device's ones go over two gloo groups: the device's are carried
    in the background, and so in another order among the CPU's on each rank."""
    group = _with_gloo(PrefixStore("host", store), rank, size, timeout)
    bytes_ = _with_gloo(PrefixStore("device", store), rank, size, timeout)
    return dist.ProcessGroup.unbox(torch.ops.emu.add_backend(group.boxed(), bytes_.boxed()))


def _with_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType
    group._set_default_backend(kind.CUSTOM)
    group._register_backend(_CPU, kind.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout))
    return group


def register() -> None:
    """Load the device, and make the backend known. To be called before the first backward of the process."""
    load()
    if "emu" not in dist.Backend.backend_list:
        dist.Backend.register_backend("emu", _group, devices=["emu", "cpu"])
