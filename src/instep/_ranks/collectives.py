"""What ranks send one another: objects and tensors.

First the messages. Then what stands on them: the models of all ranks are compared (``require_the_same``) and made equal
(``broadcast``), one rank's model and optimizers go to all (``resync``), and the stages of a pipeline take one norm
(``norm_over_stages``). Everything here is collective, and public torch.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from instep._ranks.comparison import differences
from instep.buckets import MIB
from instep.errors import AttachError, InstepError


def broadcast_object(value: Any, group: dist.ProcessGroup, source: int) -> Any:
    """``value`` of the group's rank ``source``, on all of them."""
    box = [value]
    dist.broadcast_object_list(box, dist.get_global_rank(group, source), group)
    return box[0]


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """``value`` of each rank of the group, on its first rank; ``None`` on the others."""
    everyone = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(value, everyone, dist.get_global_rank(group, 0), group)
    return everyone


def broadcast_entries(
    entries: Mapping[str, Any] | None, group: dist.ProcessGroup, source: int
) -> dict[str, Any] | None:
    """A dictionary of tensors and JSON values, or ``None``, of the group's rank ``source``, on all of them.

    There its own objects are returned, elsewhere tensors on devices of the same type.

    Raises:
        InstepError: on all ranks, where a value is neither.
    """
    is_source = dist.get_rank(group) == source
    sent = {key: _sendable(value) for key, value in entries.items()} if is_source and entries is not None else None
    received = broadcast_object(sent, group, source)
    if received is None:
        return None
    for key, (kind, value) in received.items():
        if kind == "unknown":
            raise InstepError(
                f"{key!r} holds a {value}, which cannot be sent to other ranks: only numbers, strings, "
                "lists and tensors can"
            )
    if is_source and entries is not None:
        return dict(entries)
    return {key: value if kind == "value" else value.to(kind) for key, (kind, value) in received.items()}


def _sendable(value: Any) -> tuple[str, Any]:
    """``value`` as it is pickled, and what it is: a tensor's type of device, "value" or "unknown"."""
    if isinstance(value, torch.Tensor):
        return value.device.type, value.detach().to("cpu", copy=True)  # without the rest of its storage
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return "unknown", type(value).__name__
    return "value", value


# What the ranks of a replicated model must have in common, and how it is made so.


def require_the_same(module: nn.Module, options: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raise ``AttachError`` on every rank, with the same words, if the ranks' models or options differ."""
    own = {
        **{f"the option {name!r}": repr(value) for name, value in options.items()},
        **{f"parameter {name!r}": _description(p, p.requires_grad) for name, p in module.named_parameters()},
        **{f"buffer {name!r}": _description(b, True) for name, b in module.named_buffers()},
    }
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    for rank, theirs in enumerate(everyone):
        for difference in differences((0, everyone[0]), (rank, theirs)):
            raise AttachError(
                f"replicate: {difference}, as this group numbers its ranks. Every rank must build the same model, with "
                "the same parameters frozen"
            )


def _description(tensor: torch.Tensor, trains: bool) -> str:
    frozen = "" if trains else ", frozen"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}"


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


_CHUNK_BYTES = 25 * MIB


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """Divide ``tensors`` into what is sent in one piece: of one dtype and device, and of about ``_CHUNK_BYTES``."""
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


def resync(model: nn.Module, optimizers: Iterable[Optimizer], group: dist.ProcessGroup, source: int) -> None:
    """Take parameters, buffers, optimizer state and groups from the group's rank ``source``.

    Values of a group that are neither numbers, strings, tensors nor lists of such stay this rank's own.
    """
    broadcast([*model.parameters(), *model.buffers()], group, source)
    for optimizer in optimizers:
        for settings in optimizer.param_groups:
            values = {k: v for k, v in settings.items() if k != "params" and _sendable(v)[0] != "unknown"}
            settings.update(broadcast_entries(values, group, source) or {})
            for parameter in settings["params"]:
                entry = optimizer.state.get(parameter, None)
                received = broadcast_entries(entry, group, source)
                if received is None:
                    optimizer.state.pop(parameter, None)
                else:
                    optimizer.state[parameter] = received


@torch.no_grad()
def norm_over_stages(total: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The norm of the gradients of all stages of a pipeline, given ``total``, that of this rank's stages: the p-th root
    of the sum of p-th powers, as a loop by hand takes it (torchtitan, ``distributed/utils.py``, ``clip_grad_norm_``).
    All ranks of ``group`` must call this; it waits for them."""
    total = total.clone()
    if math.isinf(norm_type):
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
        return total
    total.pow_(norm_type)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total.pow_(1.0 / norm_type)
