"""What ranks tell each other: JSON and tensors, in collectives of plain numbers. What was sent is never run."""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from instep.errors import InstepError


def broadcast_json(value: Any, group: dist.ProcessGroup, source: int) -> Any:
    """``value`` of the group's rank ``source``, on all of them. Tuples arrive as lists."""
    mine = dist.get_rank(group) == source
    message = _bytes(value if mine else None, group)
    length = torch.tensor([message.numel()], device=message.device)
    dist.broadcast(length, dist.get_global_rank(group, source), group)
    if not mine:
        message = message.new_empty(int(length))
    dist.broadcast(message, dist.get_global_rank(group, source), group)
    return _value(message)


def all_gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """``value`` of each rank of the group, in the order of ranks. Tuples arrive as lists."""
    padded, lengths = _padded(value, group)
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group)
    return [_value(one[:length]) for one, length in zip(everyone, lengths, strict=True)]


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """``value`` of each rank of the group, on its first rank; ``None`` on the others. Tuples arrive as lists."""
    padded, lengths = _padded(value, group)
    everyone = [torch.empty_like(padded) for _ in lengths] if dist.get_rank(group) == 0 else None
    dist.gather(padded, everyone, dist.get_global_rank(group, 0), group)
    if everyone is None:
        return None
    return [_value(one[:length]) for one, length in zip(everyone, lengths, strict=True)]


def _padded(value: Any, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[int]]:
    """The message, as long as the longest of all ranks, and the length of each rank's."""
    message = _bytes(value, group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=message.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([message.numel()], device=message.device), group)
    found = [int(length) for length in lengths]
    return torch.nn.functional.pad(message, (0, max(found) - message.numel())), found


def broadcast_entries(
    entries: Mapping[str, Any] | None, group: dist.ProcessGroup, source: int
) -> dict[str, Any] | None:
    """A dictionary of tensors and JSON values, or ``None``, of the group's rank ``source``, on all of them.

    There its own objects are returned. Elsewhere tuples arrive as lists, and tensors on devices of the same type.

    Raises:
        InstepError: on all ranks, where a value is neither.
    """
    mine = dist.get_rank(group) == source
    described = None if entries is None else {key: _described(value) for key, value in entries.items()}
    described = broadcast_json(described if mine else None, group, source)
    if described is None:
        return None
    found: dict[str, Any] = {}
    for key, (kind, *what) in described.items():
        if kind == "unknown":
            raise InstepError(
                f"{key!r} holds a {what[0]}, which cannot be sent to other ranks: only numbers, strings, "
                "lists and tensors can"
            )
        if kind == "value":
            found[key] = entries[key] if mine and entries is not None else what[0]
            continue
        shape, dtype, device = what
        there = _device_of(group)
        if mine and entries is not None:
            found[key] = entries[key]
            sent = entries[key].detach().to(there).contiguous()
        else:
            sent = torch.empty(shape, dtype=getattr(torch, dtype), device=there)
        if sent.numel():
            dist.broadcast(sent.view(-1).view(torch.uint8), dist.get_global_rank(group, source), group)
        if not mine:
            found[key] = sent.to(device)
    return found


def sendable(value: Any) -> bool:
    """Whether ``broadcast_entries`` can send it."""
    return bool(_described(value)[0] != "unknown")


def _described(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return ["unknown", type(value).__name__]
    return ["value", value]


def _bytes(value: Any, group: dist.ProcessGroup) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(_device_of(group))


def _value(message: torch.Tensor) -> Any:
    return json.loads(message.cpu().numpy().tobytes())


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """That of the tensors which the group's backend sends."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
