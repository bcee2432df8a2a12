"""What the ranks of a replicated model must have in common, and how it is made so. Collective, and public torch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from instep._optim.plan import MIB
from instep._ranks.messages import all_gather_json
from instep.errors import AttachError

_CHUNK_BYTES = 25 * MIB


def require_the_same(module: nn.Module, options: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raise ``AttachError`` on every rank, with the same words, if the ranks' models or options differ."""
    mine = {
        **{f"the option {name!r}": value for name, value in options.items()},
        **{f"parameter {name!r}": _description(p, p.requires_grad) for name, p in module.named_parameters()},
        **{f"buffer {name!r}": _description(b, True) for name, b in module.named_buffers()},
    }
    everyone = all_gather_json(mine, group)
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            first, other = everyone[0].get(name, "missing"), theirs.get(name, "missing")
            if first != other:
                raise AttachError(
                    f"replicate: {name} is {first} on rank 0 of the group and {other} on rank {rank}. Every rank must "
                    "build the same model, with the same parameters frozen"
                )
        if list(everyone[0]) != list(theirs):
            raise AttachError(
                f"replicate: rank 0 and rank {rank} of the group have the same parameters and buffers in another "
                "order. Every rank must build the same model"
            )


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Write the values of the group's rank ``source`` into ``tensors`` on all others.

    Autograd is not told, as by DDP: a graph that has saved a buffer may still be waiting for its backward.
    """
    is_source = dist.get_rank(group) == source
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
        dist.broadcast(flat.view(torch.uint8), src=dist.get_global_rank(group, source), group=group)
        if not is_source:
            for tensor, part in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
                tensor.data.copy_(part.view(tensor.shape))


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    chunks: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        key = tensor.dtype, tensor.device
        chunk = chunks.setdefault(key, [])
        chunk.append(tensor)
        if sum(t.numel() * t.element_size() for t in chunk) >= _CHUNK_BYTES:
            yield chunks.pop(key)
    yield from chunks.values()


def _description(tensor: torch.Tensor, trains: bool) -> str:
    frozen = "" if trains else ", frozen"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}"
