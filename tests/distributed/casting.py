"""Mixed precision written out by hand: a module that casts its parameters, and a hook that sends in a dtype."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

DTYPES: dict[str | None, Any] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}


class CastByHand(nn.Module):
    """``inner`` with its parameters cast once in each forward, and its floating-point inputs."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        # As under autocast, not in batch normalization.
        names = (name for name, _ in self.inner.named_parameters() if not name.startswith("norm."))
        low = {name: self.inner.get_parameter(name).to(self.dtype) for name in names}
        x = x.to(self.dtype) if x.is_floating_point() else x
        out: torch.Tensor = torch.func.functional_call(self.inner, low, (x, *args), tie_weights=True)
        return out


def send_as(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    low = buffer.to(dtype)
    low *= 1.0 / dist.get_world_size()
    dist.all_reduce(low)
    buffer.copy_(low)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
