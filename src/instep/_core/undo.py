"""Parameters and optimizer state as they were before a step, to be put back bit for bit."""

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import grad_mode
from torch.optim import Optimizer


class _Saved:
    """One parameter with its state. Tensors come back as the same objects, with their values."""

    def __init__(self, parameter: torch.Tensor, optimizer: Optimizer, host: bool) -> None:
        self.device = parameter.device
        self._parameter = parameter
        self._values = _copied(parameter, host)
        state: dict[Any, Any] | None = optimizer.state.get(parameter)
        self._optimizer = weakref.ref(optimizer)
        self._mapping = optimizer.state
        self._version = grad_mode._unsafe_preserve_version_counter(parameter)
        self._state = state
        self._entries = {} if state is None else {key: (value, _copied(value, host)) for key, value in state.items()}

    def restore(self) -> None:
        _put_back(self._parameter, self._values)
        # The bits are back: a graph that has saved them may run. torch has a private way to say so.
        self._version.__exit__()
        optimizer = self._optimizer()
        mapping = self._mapping if optimizer is None else optimizer.state
        if self._state is None:
            mapping.pop(self._parameter, None)
        elif mapping.get(self._parameter):  # else somebody has cleared it meanwhile
            self._restore_state(self._state)
            mapping[self._parameter] = self._state

    def _restore_state(self, state: dict[Any, Any]) -> None:
        # Never empty in between: Ctrl-C may come anywhere, and this is done again then.
        entries = {}
        for key, (value, saved) in self._entries.items():
            if isinstance(value, torch.Tensor):
                _put_back(value, saved)
                saved = value
            entries[key] = saved
        state.update(entries)
        for key in state.keys() - entries.keys():
            del state[key]


class Undo:
    """Copies taken before the first write of a step.

    Args:
        host: keep them in host memory, pinned where the parameters are on an accelerator.
    """

    def __init__(self, host: bool) -> None:
        self._host = host
        self._saved: dict[int, _Saved] = {}

    @property
    def devices(self) -> set[torch.device]:
        """Those with something saved."""
        return {saved.device for saved in self._saved.values()}

    @torch.no_grad()
    def save(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
        """Copy ``parameters`` and their state, on the current stream, those aside that are saved already."""
        for parameter in parameters:
            if id(parameter) not in self._saved:
                self._saved[id(parameter)] = _Saved(parameter, optimizer, self._host)

    @torch.no_grad()
    def restore(self, device: torch.device) -> None:
        """Put back all that was saved of ``device``, on the current stream, and forget its copies. Who is interrupted
        here does it again."""
        for key in [key for key, saved in self._saved.items() if saved.device == device]:
            self._saved[key].restore()
            del self._saved[key]

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """These will not be put back any more."""
        for parameter in parameters:
            self._saved.pop(id(parameter), None)

    def forget_all(self) -> None:
        self._saved.clear()


def _copied(value: Any, host: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if not host or value.device.type == "cpu":
        return value.detach().clone()
    kept = torch.empty_like(value, device="cpu", pin_memory=True)
    return kept.copy_(value.detach(), non_blocking=True)


def _put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.detach().copy_(values, non_blocking=True)
