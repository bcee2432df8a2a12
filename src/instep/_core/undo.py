"""Parameters and optimizer state as they were before a step, to be put back bit for bit."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class _Saved:
    """One parameter with its state. Tensors come back as the same objects, with their values."""

    def __init__(self, parameter: torch.Tensor, optimizer: Optimizer, host: bool) -> None:
        self.device = parameter.device
        self._parameter = parameter
        self._values = _copied(parameter, host)
        state = optimizer.state.get(parameter)
        self._optimizer = optimizer
        self._state: dict[Any, Any] | None = state
        self._entries = {} if state is None else {key: (value, _copied(value, host)) for key, value in state.items()}

    def restore(self) -> None:
        _put_back(self._parameter, self._values)
        if self._state is None:
            self._optimizer.state.pop(self._parameter, None)
            return
        self._state.clear()
        for key, (value, saved) in self._entries.items():
            if isinstance(value, torch.Tensor):
                _put_back(value, saved)
                saved = value
            self._state[key] = saved
        self._optimizer.state[self._parameter] = self._state


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
        """Copy ``parameters`` and their state, on the current stream."""
        for parameter in parameters:
            self._saved[id(parameter)] = _Saved(parameter, optimizer, self._host)

    @torch.no_grad()
    def restore(self, device: torch.device) -> None:
        """Put back all that was saved of ``device``, on the current stream, and forget its copies."""
        for key in [key for key, saved in self._saved.items() if saved.device == device]:
            self._saved.pop(key).restore()

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
