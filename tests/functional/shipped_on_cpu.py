"""A GPU is the CPU: what lets the tests that torch ships for GPUs run without one.

Only the shipped module gets a torch of its own. What is under test sees torch as it is, so code that asks for a GPU
still fails: ``cuda()``, ``to(number)`` and the ``device_ids`` of DDP apart, which are methods of torch's classes.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FACTORIES = ("ones", "rand", "randn", "tensor", "zeros")
COMMANDS = ("manual_seed", "set_device", "synchronize")
DDP_METHODS_WITH_STREAMS = ("_root_copy_hook", "_module_wait_for_copy_hook")

Shim = contextlib.AbstractContextManager[Any]


def devices(shipped: types.ModuleType) -> Iterator[Shim]:
    """Every shipped test needs these."""
    yield mock.patch.object(shipped, "torch", _torch_without_gpu())
    for owner in (torch.Tensor, nn.Module):
        yield mock.patch.object(owner, "cuda", lambda self, *args, **kwargs: self)
        yield mock.patch.object(owner, "to", _staying(owner.to))
    yield mock.patch.object(DistributedDataParallel, "__init__", _without_devices(DistributedDataParallel.__init__))


def ddp_streams() -> Iterator[Shim]:
    """Streams in the two forward hooks that ``DistributedDataParallel(mixed_precision=…)`` has of its own."""
    for name in DDP_METHODS_WITH_STREAMS:
        method = _with_streams(getattr(DistributedDataParallel, name))
        yield mock.patch.object(DistributedDataParallel, name, method)


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """On the CPU there is no current stream, and nothing to wait for. Torch's own functions ask for one."""
    with (
        mock.patch.object(torch.accelerator, "current_stream", mock.MagicMock()),
        mock.patch.object(torch, "Event", mock.MagicMock()),
    ):
        yield


def _torch_without_gpu() -> types.ModuleType:
    cuda = _stand_in(torch.cuda, dict.fromkeys(COMMANDS, _do_nothing) | {"current_device": dist.get_rank})
    return _stand_in(torch, {name: _on_cpu(getattr(torch, name)) for name in FACTORIES} | {"cuda": cuda})


def _stand_in(module: types.ModuleType, attributes: dict[str, Any]) -> types.ModuleType:
    stand_in = types.ModuleType(module.__name__)
    stand_in.__dict__.update(attributes, __getattr__=functools.partial(getattr, module))
    return stand_in


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        gpu = isinstance(device, int) or str(device).startswith("cuda")
        return factory(*args, device="cpu" if gpu else device, **kwargs)

    return make


def _staying(to: Callable[..., Any]) -> Callable[..., Any]:
    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if args and isinstance(args[0], int) else to(self, *args, **kwargs)

    return stay


def _without_devices(init: Callable[..., None]) -> Callable[..., None]:
    def without(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        named = {name: value for name, value in kwargs.items() if name not in ("device_ids", "output_device")}
        init(self, *args, **named)

    return without


def _with_streams(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def with_streams(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        with streams():
            method(self, *args, **kwargs)

    return with_streams
