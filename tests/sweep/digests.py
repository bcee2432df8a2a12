"""What a process has, as digests: weights, optimizer state, and what else of it a loop may depend on."""

import ctypes
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch._dynamo.config  # before the fork: imported or not, it is the same in all processes
import torch._dynamo.utils
from torch import nn
from torch.optim import Optimizer

DEPTH = 6
Digests = dict[str, str]


def weights(model: nn.Module) -> Digests:
    """Parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {f"weight {name}": _text(tensor) for name, tensor in named}


def state(model: nn.Module, optimizer: Any, of: str = "") -> Digests:
    """State, groups and plain attributes of the optimizer, and of one that it wraps."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for key, value in list(optimizer.state.items()):
        name = names.get(id(key), "?") if isinstance(key, torch.Tensor) else repr(key)
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        found[f"{of}state {name}"] = str(sorted(map(str, value))) if isinstance(value, Mapping) else ""
        found |= {f"{of}state {name} {entry}": _text(of_entry) for entry, of_entry in entries}
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"{of}group {number} {key}": _text(value) for key, value in group.items() if key != "params"}
    for name, value in vars(optimizer).items():
        if isinstance(value, (bool, int, float, str, torch.Tensor)) and not name.startswith("_"):
            found[f"{of}attribute {name}"] = _text(value)
        elif isinstance(value, Optimizer) and not of:
            found |= state(model, value, f"{name}'s ")
    return found


def process() -> Digests:
    """Generators and flags of the process."""
    found = {
        "torch's generator": _text(torch.get_rng_state()),
        "Python's generator": _text(random.getstate()),
        "NumPy's generator": _text(np.random.get_state(legacy=False)),
        "default dtype": str(torch.get_default_dtype()),
        "grad mode": str((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled())),
        "autocast": str(torch.is_autocast_enabled("cpu")),
        "threads": str(torch.get_num_threads()),
        "determinism": str((torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision())),
    }
    limits = ("recompile_limit", "accumulated_recompile_limit", "suppress_errors", "disable")
    found["dynamo's settings"] = str([getattr(torch._dynamo.config, name, None) for name in limits])
    return found


def graphs() -> int:
    """How many graphs dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _text(value: Any) -> str:
    return hashlib.blake2b("\n".join(_parts(value, DEPTH)).encode(), digest_size=8).hexdigest()


def _parts(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield from _tensor(value)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape} {hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    elif isinstance(value, torch.Generator):
        yield from _tensor(value.get_state())
    elif isinstance(value, (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)):
        yield repr(value)
    elif depth and isinstance(value, Mapping):
        for key, entry in value.items():
            yield str(key)
            yield from _parts(entry, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for entry in value:
            yield from _parts(entry, depth - 1)
    else:  # an object that is kept in state: a projector, say
        yield type(value).__qualname__
        if depth and hasattr(value, "__dict__") and not callable(value):
            yield from _parts({key: entry for key, entry in vars(value).items() if key[0] != "_"}, depth - 1)


def inside(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors inside of a subclass, by name; else the tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield "", tensor
        return
    for name in flatten()[0]:
        value = getattr(tensor, name)
        if isinstance(value, torch.Tensor):
            yield from ((f".{name}{below}", of_it) for below, of_it in inside(value))


class Memory:
    """Where the weights lie: it reads them as nobody does who asks torch, which instep would notice."""

    def __init__(self, model: nn.Module) -> None:
        self.places = {
            name + of: (tensor.data_ptr(), tensor.numel() * tensor.element_size())
            for name, parameter in model.named_parameters()
            for of, tensor in inside(parameter)
            if parameter.requires_grad and tensor.is_contiguous()
        }

    def read(self) -> dict[str, bytes]:
        return {name: ctypes.string_at(at, size) for name, (at, size) in self.places.items()}


def _tensor(tensor: torch.Tensor) -> Iterator[str]:
    """What is inside of a subclass; of a sparse tensor its indices and values."""
    pieces = list(inside(tensor))
    if pieces[0][1] is not tensor:
        for name, piece in pieces:
            yield name
            yield from _tensor(piece)
        return
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        yield from _tensor(tensor._indices())
        yield from _tensor(tensor._values())
        return
    content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    yield f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.blake2b(content, digest_size=16).hexdigest()}"
