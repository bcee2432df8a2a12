"""``optimizer.load_state_dict`` where state lives in host memory.

torch moves all state to the parameters' device, which may have no room for it. So torch does not see the tensors, and
they are put into their places afterwards.
"""

from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.host_state import StateHome


class _Hidden:
    """Something that torch leaves as it is."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class HostLoading:
    """Hooks around ``load_state_dict`` of one optimizer."""

    def __init__(self, home: StateHome) -> None:
        self._home = home

    def before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            return None  # it may look at the tensors
        state = {
            key: {name: _hidden(name, value) for name, value in entry.items()} if type(entry) is dict else entry
            for key, entry in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def after(self, optimizer: Optimizer) -> None:
        for parameter, entry in optimizer.state.items():
            if isinstance(parameter, torch.Tensor) and isinstance(entry, dict):
                entry.update((name, _shown(value, parameter)) for name, value in entry.items())
        self._home.take_in()


def _hidden(name: object, value: Any) -> Any:
    is_steps = name == "step"  # which torch puts on the host or on the device, as the optimizer counts them
    return value if is_steps or type(value) is not torch.Tensor or value.numel() <= 1 else _Hidden(value)


def _shown(value: Any, parameter: torch.Tensor) -> Any:
    """In the dtype that torch's ``load_state_dict`` gives it."""
    if not isinstance(value, _Hidden):
        return value
    tensor = value.tensor
    if parameter.is_floating_point():
        tensor = tensor.to(parameter.dtype)
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
