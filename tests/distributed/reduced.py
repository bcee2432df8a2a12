"""A model under whatever reduces its gradients."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from tests.devices import here
from tests.distributed.sharded import fsdp1, nested


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model.to(here()), bucket_cap_mb=0.004, **options)


SOURCES: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp,
    "ddp, views": partial(ddp, gradient_as_bucket_view=True),
    "ddp, static graph": partial(ddp, static_graph=True),
    "replicate": partial(instep.replicate, bucket_cap_mb=0.004),
    "fsdp2": nested,
    "fsdp1": fsdp1,
}
