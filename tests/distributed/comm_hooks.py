"""Communication hooks: torch's, and hooks that answer in an odd way."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)


def power_sgd(**options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1, **options
    )


def local_sgd() -> post_localSGD_hook.PostLocalSGDState:
    # Each rank is a group of its own: after the second step gradients are no longer exchanged.
    mine, _ = dist.new_subgroups(group_size=1)
    return post_localSGD_hook.PostLocalSGDState(None, mine, start_localSGD_iter=2)


def to_another_tensor(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leaves the bucket as it was, and answers with a tensor of its own."""
    work = dist.all_reduce(bucket.buffer() * 0.25, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] * 3)


def at_once(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Under a name of its own: plain DDP refuses torch's where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def bf16_power_sgd(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)(state, bucket)


class _AllGatherAsRead:
    """``torch.distributed`` whose ``all_gather`` answers with one tensor of all ranks' in a list: torch's quantization
    hooks read it so, and fail over gloo under plain DDP too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        dist.all_gather(outputs, tensor, group=group)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([torch.stack(outputs)])
        return SimpleNamespace(get_future=lambda: future)


def quantize_per_tensor(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    with patch.object(quantization_hooks, "dist", _AllGatherAsRead()):
        return quantization_hooks.quantization_pertensor_hook(state, bucket)


def quantize_per_channel(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    with patch.object(quantization_hooks, "dist", _AllGatherAsRead()):
        return quantization_hooks.quantization_perchannel_hook(state, bucket, bucket_size=64)


def _none() -> None:
    return None


def _world() -> Any:
    return dist.group.WORLD


HOOKS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "allreduce": (_none, default_hooks.allreduce_hook),
    "fp16": (_none, default_hooks.fp16_compress_hook),
    "bf16": (_none, bf16),
    "fp16(allreduce)": (_none, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16(PowerSGD)": (power_sgd, bf16_power_sgd),
    "PowerSGD": (power_sgd, powerSGD_hook.powerSGD_hook),
    "PowerSGD, no error feedback": (lambda: power_sgd(use_error_feedback=False), powerSGD_hook.powerSGD_hook),
    # Not batched_powerSGD_hook: torch 2.13's raises under plain DDP too (_orthogonalize takes batches of matrices).
    "post_localSGD": (local_sgd, post_localSGD_hook.post_localSGD_hook),
    "quantization per tensor": (_world, quantize_per_tensor),
    "quantization per channel": (_world, quantize_per_channel),
    "no reduction": (_none, debugging_hooks.noop_hook),
    "to another tensor": (_none, to_another_tensor),
    "at once": (_none, at_once),
}
