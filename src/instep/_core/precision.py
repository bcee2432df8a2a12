"""Parameters that are computed with in low precision, while the model and its optimizer keep the full one."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from instep._core.hooks import BoundHook


class Policy(Protocol):
    """The part of ``torch.distributed.fsdp.MixedPrecisionPolicy`` that does not concern communication."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...
    @property
    def output_dtype(self) -> torch.dtype | None: ...
    @property
    def cast_forward_inputs(self) -> bool: ...


_Swap = tuple[nn.Module, str, torch.Tensor, torch.Tensor]


class LowPrecision:
    """While a module runs, its floating-point parameters are low-precision copies of themselves.

    A copy is made by a cast inside the autograd graph, once for each parameter (a tied one has one copy): its gradient
    is accumulated in ``dtype`` and cast back when it reaches the parameter, so everything that waits for the
    parameter's own gradient goes on as before. A copy is freed as soon as backward needs it no more. Parameters keep
    their dtype and identity; buffers are left alone. So is batch normalization, as under autocast: its running
    statistics are buffers, and its kernels want weights of their dtype.

    The outermost module that is called makes the copies: the model, a part of it that is called by itself, or a
    checkpointed segment that backward runs again.

    Args:
        policy: ``param_dtype`` of the copies; what floating-point tensors in the output of ``model`` are cast to; and
            whether those among its inputs are cast to ``param_dtype``.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self._dtype = policy.param_dtype
        self._output_dtype = policy.output_dtype
        self._running: list[nn.Module] = []
        self._swapped: list[_Swap] = []
        self._handles: list[RemovableHandle] = []
        if self._dtype is not None:
            if policy.cast_forward_inputs:
                self._handles.append(model.register_forward_pre_hook(BoundHook(self._cast_inputs), with_kwargs=True))
            for module in model.modules():
                if next(module.parameters(), None) is not None:
                    self._handles.append(module.register_forward_pre_hook(BoundHook(self._enter)))
                    # Also when the forward raises: a model that keeps its copies would train no more.
                    self._handles.append(module.register_forward_hook(BoundHook(self._leave), always_call=True))
        if self._output_dtype is not None:
            self._handles.append(model.register_forward_hook(BoundHook(self._cast_output)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: object) -> None:
        if not self._running:
            self._swap(module)
        self._running.append(module)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        # Called without _enter when a hook before it raised.
        if self._running and self._running[-1] is module:
            self._running.pop()
            if not self._running:
                self._restore()

    def _swap(self, outermost: nn.Module) -> None:
        copies: dict[int, torch.Tensor] = {}
        for module in outermost.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point() and parameter.dtype != self._dtype:
                    if id(parameter) not in copies:
                        copies[id(parameter)] = parameter.to(self._dtype)
                    self._swapped.append((module, name, parameter, copies[id(parameter)]))
        for module, name, _, low in self._swapped:
            _put(module, name, low)

    def _restore(self) -> None:
        for module, name, parameter, low in self._swapped:
            if module._parameters.get(name) is low:
                _put(module, name, parameter)
        self._swapped.clear()

    def _cast_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _map_floating(args, self._dtype), _map_floating(kwargs, self._dtype)

    def _cast_output(self, module: nn.Module, args: object, output: Any) -> Any:
        return _map_floating(output, self._output_dtype)


def _put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    # As torch.func.functional_call does: setattr would refuse a tensor that is no nn.Parameter.
    module._parameters[name] = tensor  # type: ignore[assignment]
    if isinstance(module, nn.RNNBase):  # keeps a list of its own
        module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]


def _map_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` with the floating-point tensors in it, at any depth, cast to ``dtype``."""
    cast: Callable[[Any], Any] = lambda item: _map_floating(item, dtype)  # noqa: E731
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(cast, value))
    if isinstance(value, (tuple, list, set)):
        return type(value)(map(cast, value))
    if isinstance(value, dict):
        new = copy.copy(value)  # frameworks return subclasses, some of which know attributes and items of one name
        for key, item in value.items():
            new[key] = cast(item)
        return new
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: cast(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value
