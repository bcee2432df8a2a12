"""An autocast block around ``optimizer.step()``: would it change the update of one of torch's own optimizers?

In backward, and behind the next forward, updates run outside of every such block. ``step()`` may be called inside.
"""

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import undecorated_step
from instep._optim.values import same_numbers
from instep._torch.versions import memory_of

_STEPS = 3


def autocast_matters(optimizer: Optimizer, dtype: torch.dtype) -> bool:
    """Whether ``step()`` of this optimizer of torch's computes other numbers inside of an autocast block of ``dtype``.

    Another optimizer of the class takes a few steps inside and outside, over small parameters of the same kinds. Where
    it cannot, the answer is yes.
    """
    # Whoever asks may be inside of inference_mode(), or of torch.device("meta").
    with torch.inference_mode(False), torch.device("cpu"):
        try:
            return any(_differs(optimizer, group, dtype) for group in optimizer.param_groups)
        except Exception:
            return True


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
