"""Tensors that are spread over ranks (``DTensor``): which part of one is this rank's, and how a new one is laid out."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from instep._optim.dtensor import is_sharded, spread
from instep.checkpoint.tiles import Box, whole


def local_of(tensor: Any) -> torch.Tensor:
    """What this rank has of it, in the same memory."""
    local: torch.Tensor = tensor._local_tensor if is_sharded(tensor) else tensor.detach()
    return local


def box_of(tensor: Any) -> Box:
    """Which part of the whole that is."""
    if not is_sharded(tensor):
        return whole(tensor.shape)
    # As torch.distributed.checkpoint asks for it (torch/distributed/_checkpointable.py).
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def without_sums(tensor: Any) -> Any:
    """A ``DTensor`` of which no rank has only a summand. All ranks must call this."""
    if not is_sharded(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    return tensor.redistribute(placements=[replicate if p.is_partial() else p for p in tensor.placements])


def empty_beside(parameter: Any, shape: Sequence[int], dtype: torch.dtype, *, in_host_memory: bool) -> Any:
    """A new ``DTensor`` on the mesh of ``parameter``: spread as that is if of its shape, else whole on each rank."""
    if tuple(shape) == tuple(parameter.shape):
        if in_host_memory:
            local = torch.empty_like(parameter._local_tensor, dtype=dtype, device="cpu", pin_memory=True)
            return spread(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    tensor: Any = sys.modules["torch.distributed.tensor"]
    local = torch.empty(shape, dtype=dtype, device=parameter._local_tensor.device)
    mesh = parameter.device_mesh
    return spread(local, mesh, [tensor.Replicate()] * mesh.ndim, local.shape, local.stride())
