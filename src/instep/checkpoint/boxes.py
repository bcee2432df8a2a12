"""Which part of a tensor a rank or a file has: a box of its elements.

A tensor of a checkpoint lies in chunks, one for each rank that had a part of the tensor. Another number of ranks may
load the checkpoint: each rank reads what its own box and each chunk have in common. ``cover_once`` says whether chunks
make up a tensor. The functions at the end are about tensors that are spread over ranks (``DTensor``).
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch

from instep._optim.dtensor import is_sharded, spread


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where the part begins in each dimension, and its size there."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def common(self, other: "Box") -> "Box | None":
        """The box of the elements that are in both; ``None`` if there are none."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = [
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """The index of this box in a tensor that holds ``outer``."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


_MOST_DIVIDED = 6
"""In how many dimensions a tensor may be divided: a box has 2 to the power of these corners."""


def cover_once(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether ``boxes`` cover every element of a tensor of ``shape`` exactly once, and nothing outside.

    The boxes may be made up by anybody, and the tensor huge, so elements are not counted. Corners are: each counts +1
    or -1, by how many of its coordinates are ends. The corners of a tiling cancel out, up to those of the whole.
    (Their sum is the mixed derivative of how often a point is covered, which tells any two coverings apart.)
    """
    outer = whole(shape)
    boxes = [box for box in boxes if box.numel]
    if not outer.numel:
        return not boxes
    # A dimension that every box spans adds nothing but corners.
    divided = [d for d, size in enumerate(shape) if any((box.offset[d], box.shape[d]) != (0, size) for box in boxes)]
    if not divided:
        return len(boxes) == 1
    if len(divided) > _MOST_DIVIDED:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [(-1, outer), *((1, box) for box in boxes)]:
        for ends in product((0, 1), repeat=len(divided)):
            corner = tuple(box.offset[d] + end * box.shape[d] for d, end in zip(divided, ends, strict=True))
            corners[corner] += -sign if sum(ends) % 2 else sign
    return not any(corners.values())


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's part of ``tensor``, in the same memory."""
    local: torch.Tensor = tensor._local_tensor if is_sharded(tensor) else tensor.detach()
    return local


def box_of(tensor: Any) -> Box:
    """The box of this rank's part of ``tensor``."""
    if not is_sharded(tensor):
        return whole(tensor.shape)
    # As torch.distributed.checkpoint asks for it (torch/distributed/_checkpointable.py).
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def without_partials(tensor: Any) -> Any:
    """``tensor``, with the sum in the place of summands (``Partial``) that ranks may have. All ranks must call this."""
    if not is_sharded(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    # A DTensor is there, so its module was imported: instep does not import it by itself, which takes a second.
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    return tensor.redistribute(placements=[replicate if p.is_partial() else p for p in tensor.placements])


def empty_beside(parameter: Any, shape: Sequence[int], dtype: torch.dtype, *, in_host_memory: bool) -> Any:
    """A new ``DTensor`` on the mesh of ``parameter``: spread alike if it has the parameter's shape, else whole on each
    rank."""
    if tuple(shape) == tuple(parameter.shape):
        if in_host_memory:
            local = torch.empty_like(parameter._local_tensor, dtype=dtype, device="cpu", pin_memory=True)
            return spread(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    tensor: Any = sys.modules["torch.distributed.tensor"]
    local = torch.empty(shape, dtype=dtype, device=parameter._local_tensor.device)
    mesh = parameter.device_mesh
    return spread(local, mesh, [tensor.Replicate()] * mesh.ndim, local.shape, local.stride())
