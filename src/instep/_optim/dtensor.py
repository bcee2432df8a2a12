"""Parameters that are ``DTensor``, and this rank's parts of them."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import is_elementwise
from instep._optim.local_shard import LocalShard


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether it is a ``DTensor``."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(parameter, tensor.DTensor)


def may_be_gathered() -> bool:
    """Whether a plain parameter may be one that FSDP has gathered: FSDP has been imported, and there are ranks."""
    ranks = sys.modules.get("torch.distributed")
    return "torch.distributed.fsdp" in sys.modules and ranks is not None and bool(ranks.is_initialized())


class _Shard:
    """This rank's part of a ``DTensor``: its local tensor, which torch names ``_local_tensor``. (``to_local()`` makes
    another object each time, and autograd nodes.)"""

    state_is_sharded = False
    is_owner = True
    is_shared = False
    is_empty = False

    def __init__(self, parameter: Any) -> None:
        self._mesh = parameter.device_mesh
        self._placements = parameter.placements
        self._shape = parameter.shape
        self._stride = parameter.stride()
        self._local_shape = parameter._local_tensor.shape

    def of(self, tensor: Any) -> torch.Tensor | None:
        if not is_sharded(tensor) or tensor.device_mesh != self._mesh or tensor.placements != self._placements:
            return None
        local: torch.Tensor = tensor._local_tensor
        return local

    def fits(self, entry: Mapping[Any, Any]) -> bool:
        return all(self.of(value) is not None for value in entry.values() if is_sharded(value))

    def of_state(self, value: Any) -> Any:
        return value._local_tensor if is_sharded(value) else value

    def as_state(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != self._local_shape:
            return value
        return spread(value, self._mesh, self._placements, self._shape, self._stride)


def spread(local: torch.Tensor, mesh: Any, placements: Any, shape: Any, stride: Any) -> Any:
    """The ``DTensor`` of this shape whose part on this rank is ``local``, wherever that is.

    ``DTensor.from_local`` moves it to the mesh's device; FSDP2's ``CPUOffloadPolicy`` has shards in host memory, on a
    mesh of accelerators. It makes them as here: with the constructor, which torch does not document.
    """
    tensors: Any = sys.modules["torch.distributed.tensor"].DTensor
    there = local.device.type == mesh.device_type
    with torch.no_grad():
        some = local if there else local.new_empty(0, device=mesh.device_type)
        made = tensors.from_local(some, mesh, placements, run_check=False, shape=shape, stride=stride)
        return made if there else tensors(local, made._spec, requires_grad=False)


def shard_of(parameter: torch.Tensor, optimizer: Optimizer) -> LocalShard | None:
    """The part of ``parameter`` to be stepped in its place: where the result is the same, but costs less.

    Without dimensions a parameter could not be told from the counters in its state.
    """
    if is_sharded(parameter) and parameter.dim() > 0 and is_elementwise(optimizer):
        return _Shard(parameter)
    return None


def shard_index(parameter: Any) -> int | None:
    """Which part of a ``DTensor`` this rank has, counted along the dimensions of the mesh over which it is sharded;
    ``None``: all of it, as other ranks do."""
    if not is_sharded(parameter) or all(placement.is_replicate() for placement in parameter.placements):
        return None
    index, mesh = 0, parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            index = index * mesh.size(dim) + mesh.get_local_rank(dim)
    return index


# In the place of torch's own, which has the ranks of an accelerator's mesh draw parts of one sequence: each draws for
# its part from its own generator, as it does on a CPU.
_OF_EACH_RANK = SimpleNamespace(distribute_region_enabled=False, _distribute_region=lambda *_: nullcontext())


@contextmanager
def drawn_by_part(parameter: torch.Tensor) -> Iterator[None]:
    """Random operations on ``parameter``, and what is computed of it, draw from the generators of this rank."""
    if not is_sharded(parameter):
        yield
        return
    # Private: nothing public has a DTensor draw so.
    module: Any = sys.modules["torch.distributed.tensor._random"]
    before, module._rng_tracker = module._rng_tracker, _OF_EACH_RANK
    try:
        yield
    finally:
        module._rng_tracker = before
