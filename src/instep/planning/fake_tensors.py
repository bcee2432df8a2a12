"""Tensors that have everything but values: programs run on them as they are, and take no memory.

They are torch's fake tensors, the ones that ``torch.export`` and ``torch.compile`` run models on; ``torch._subclasses``
is where torch's own documentation imports them from.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_ITEM = torch.ops.aten._local_scalar_dense.default
_EQUAL = torch.ops.aten.equal.default


class _AnyValue(TorchDispatchMode):
    """Answers 1 where a program asks for the value of a tensor: optimizers do, for the number of their steps. Tensors
    that are compared are equal."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _ITEM and (args[0].is_meta or isinstance(args[0], FakeTensor)):
            return _one(args[0].dtype)
        if func is _EQUAL and any(isinstance(arg, FakeTensor) for arg in args):
            return True
        return func(*args, **(kwargs or {}))


def _one(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1 + 0j if dtype.is_complex else 1


class _Copies(TorchFunctionMode):
    """Makes deep copies of tensors that have no memory to copy: torch's own way to do it crashes on them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


class FakeTensors:
    """Where programs run on fake tensors, without data. All tensors that meet must be of one ``FakeTensors``."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._mode, _AnyValue():
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """The same, where tensors may be deep-copied."""
        with self(), _Copies():
            yield

    @contextmanager
    def building(self) -> Iterator[None]:
        """Where what is to be put on it is made: on torch's meta device, which a model may be moved and cast on."""
        with torch.device("meta"), _AnyValue():
            yield

    def put_inputs(self, inputs: Any) -> Any:
        """The same, of tensors without data."""
        with self._mode:
            return tree_map_only(torch.Tensor, self._put, inputs)

    def put(self, model: nn.Module) -> None:
        """Make all parameters and buffers of ``model`` ones without data, on a device that computes; tied ones stay
        tied."""
        made: dict[int, Any] = {}
        with self._mode:
            for module in model.modules():
                for tensors in (module._parameters, module._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            if id(tensor) not in made:
                                made[id(tensor)] = self._put(tensor)
                            tensors[name] = made[id(tensor)]

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
            return tensor
        device = "cpu" if tensor.device.type == "meta" else tensor.device
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake
