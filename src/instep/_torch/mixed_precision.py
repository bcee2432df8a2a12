"""Parameters that are computed with in low precision, while the model and its optimizer keep the full one."""

import copy
import dataclasses
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from instep._torch.engine import graph_task
from instep._torch.hooks import BoundHook
from instep._torch.versions import version_of
from instep.errors import InstepError

_TO_MODULE_CALL = 3
"""Frames up from ``_check_caller`` to torch's ``Module._call_impl``, which calls the hooks and then the forward."""


_Swap = tuple[nn.Module, str, torch.Tensor, torch.Tensor, int]


class LowPrecision:
    """While a module runs, its floating-point parameters are low-precision copies of themselves.

    A copy is made by a cast inside the autograd graph, once for each parameter (a tied one has one copy): its gradient
    is accumulated in ``dtype`` and cast back when it reaches the parameter, so everything that waits for the
    parameter's own gradient goes on as before. A copy is freed as soon as backward needs it no more. Parameters keep
    their dtype and identity; buffers are left alone. So is batch normalization, as under autocast: its running
    statistics are buffers, and its kernels want weights of their dtype.

    The outermost module that is called makes the copies, and casts its floating-point inputs: the model, a part of it
    that is called by itself, or a checkpointed module that backward runs again.

    Args:
        policy: torch's ``MixedPrecisionPolicy``: ``param_dtype`` of the copies; what floating-point tensors in the
            output of ``model`` are cast to; and whether those among its inputs are cast to ``param_dtype``.
    """

    def __init__(self, model: nn.Module, policy: Any) -> None:
        self._dtype = policy.param_dtype
        self._casts_inputs = policy.cast_forward_inputs
        self._running: list[nn.Module] = []
        self._caller: tuple[int, FrameType] | None = None
        self._swapped: list[_Swap] = []
        self._handles: list[Any] = []
        if self._dtype is not None:
            for module in model.modules():
                if next(module.parameters(), None) is not None:
                    self._handles.append(module.register_forward_pre_hook(BoundHook(self._enter), with_kwargs=True))
                    # Also when the forward raises: a model that keeps its copies would train no more.
                    self._handles.append(module.register_forward_hook(BoundHook(self._leave), always_call=True))
                    self._handles.append(module.register_state_dict_pre_hook(BoundHook(self._restore_if_interrupted)))
        if policy.output_dtype is not None:
            cast = BoundHook(lambda module, args, output: _map_floating(output, policy.output_dtype))
            self._handles.append(model.register_forward_hook(cast))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._restore()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():
            self._check_caller(module)
        if self._running:
            self._running.append(module)
            return None
        self._swap(module)
        self._running.append(module)
        if not self._casts_inputs or graph_task() is not None:
            return None
        return _map_floating(args, self._dtype), _map_floating(kwargs, self._dtype)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        # Called without _enter when a hook before it raised.
        if self._running and self._running[-1] is module:
            self._running.pop()
            if not self._running:
                written = [p for _, _, p, low, version in self._swapped if version_of(low) != version]
                self._restore()
                if written:
                    name = next(name for name, p in module.named_parameters() if p is written[0])
                    raise InstepError(
                        f"the forward of {type(module).__name__} wrote to its parameter {name!r}. With mixed_precision "
                        "that is a copy of the moment, and what was written to it is lost: write to parameters "
                        "outside of the forward, or leave out mixed_precision"
                    )

    def _check_caller(self, module: nn.Module) -> None:
        self._restore_if_interrupted()
        thread = threading.get_ident()
        if not self._running:
            self._caller = thread, sys._getframe(_TO_MODULE_CALL)
        elif self._caller is not None and self._caller[0] != thread:
            raise InstepError(
                f"a second thread called {type(module).__name__} while another one runs it: with mixed_precision both "
                "would compute with one set of copies. Call the model from one thread at a time"
            )

    def _restore_if_interrupted(self, *_: object) -> None:
        """The outermost call may have ended without its hook: torch calls it for an ``Exception``, not on Ctrl-C."""
        if self._running and self._caller is not None:
            thread, caller = self._caller
            frame = sys._current_frames().get(thread)
            while frame is not None and frame is not caller:
                frame = frame.f_back
            if frame is None:
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
                    low = copies[id(parameter)]
                    self._swapped.append((module, name, parameter, low, version_of(low)))
        for module, name, _, low, _ in self._swapped:
            _put(module, name, low)

    def _restore(self) -> None:
        for module, name, parameter, low, _ in self._swapped:
            if module._parameters.get(name) is low:
                _put(module, name, parameter)
        self._swapped.clear()
        self._running.clear()
        self._caller = None


def _put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    # As torch.func.functional_call does: setattr would refuse a tensor that is no nn.Parameter.
    module._parameters[name] = tensor  # type: ignore[assignment]
    if isinstance(module, nn.RNNBase):  # keeps a list of its own
        module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]


def _map_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` with the floating-point tensors in it, at any depth, cast to ``dtype``.

    What holds none that is cast stays the same object: a forward may write to a list it was given.
    """
    cast: Callable[[Any], Any] = lambda item: _map_floating(item, dtype)  # noqa: E731
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        items = [cast(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: new for key, item in value.items() if (new := cast(item)) is not item}
        if not changed:
            return value
        copied = copy.copy(value)  # frameworks return subclasses, some of which know attributes and items of one name
        for key, item in changed.items():
            copied[key] = item
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: new for name, item in fields.items() if (new := cast(item)) is not item}
        return dataclasses.replace(value, **changed) if changed else value
    return value
