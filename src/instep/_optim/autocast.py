"""An autocast block around ``optimizer.step()``: would it change the update of one of torch's own optimizers?

In backward, and behind the next forward, updates run outside of every such block. ``step()`` may be called inside.
"""

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import undecorated_step
from instep._optim.shadow import autocast_of, parameters_of
from instep._optim.values import same_numbers
from instep._torch.versions import memory_of

_STEPS = 3


class UnderAutocast:
    """What is known of one optimizer's ``step()`` inside of autocast blocks: by dtype, whether it matters."""

    def __init__(self) -> None:
        self._known: dict[torch.dtype, bool] = {}

    def matters(self, optimizer: Optimizer, *, foreign: bool) -> bool:
        """Whether ``step()``, called here, computes other numbers than outside of every autocast block.

        Of torch's own another optimizer of the class takes a few steps inside and outside, over small parameters of the
        same kinds. Where it cannot, the answer is yes; and so it is of a foreign optimizer that was not compared inside
        of such a block.
        """
        dtype = _dtype_here(optimizer)
        if dtype is None:
            return False
        if foreign or dtype in self._known:
            return self._known.get(dtype, True)
        # Whoever asks may be inside of inference_mode(), or of torch.device("meta").
        with torch.inference_mode(False), torch.device("cpu"):
            try:
                self._known[dtype] = any(_differs(optimizer, group, dtype) for group in optimizer.param_groups)
            except Exception:
                self._known[dtype] = True
        return self._known[dtype]

    def came_out_alike(self, optimizer: Optimizer) -> None:
        """A ``step()`` that was called here came out as outside."""
        if (dtype := _dtype_here(optimizer)) is not None:
            self._known[dtype] = False


def _dtype_here(optimizer: Optimizer) -> torch.dtype | None:
    first = next(parameters_of(optimizer), None)
    return None if first is None else autocast_of(first.device.type)


def _differs(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> bool:
    outside, inside = _stepped(optimizer, group, None), _stepped(optimizer, group, dtype)
    return not all(map(same_numbers, outside, inside))


def _stepped(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Parameters and state after some steps."""
    cls = type(optimizer)
    takes = inspect.signature(cls).parameters.keys() - {"params"}
    options = {name: value for name, value in group.items() if name in takes}
    if not torch.as_tensor(options.get("lr", 1)).any():
        options["lr"] = 1e-3  # of a warm-up, say: no update would show
    kinds = dict.fromkeys((p.dim(), p.dtype, memory_of(p).device) for p in group["params"])
    parameters = [_made(number, *kind) for number, kind in enumerate(kinds)]
    if not parameters:
        return []
    made, step = cls(parameters, **options), undecorated_step(cls)
    for at in range(_STEPS):
        for number, parameter in enumerate(parameters):
            parameter.grad = _made(100 * (at + 1) + number, parameter.dim(), parameter.dtype, parameter.device).detach()
        with torch.no_grad(), torch.autocast(parameters[0].device.type, dtype, enabled=dtype is not None):
            step(made)
    state = (value for entry in made.state.values() for value in entry.values())
    return [*(p.detach() for p in parameters), *(value for value in state if isinstance(value, torch.Tensor))]


def _made(seed: int, dim: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn((4,) * dim, generator=generator).to(device, dtype))
