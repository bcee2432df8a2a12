"""Does an optimizer of unknown make update each parameter by itself? It is tried on made-up parameters at attach."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from instep._core.stepper import Stepper, alias_of, shadow_of, undecorated_step
from instep.errors import UnsupportedOptimizerError

STEPS = 3
SIDE = 4


def require_separable(optimizer: Optimizer) -> bool:
    """Raise ``UnsupportedOptimizerError`` if stepping parameters one by one differs from stepping them together.

    torch's own optimizers are known and not asked. An optimizer that cannot be run on made-up parameters is taken as
    it is: ``Stepper`` still notices what is left in its groups and attributes.

    Returns:
        Whether it is known to write nothing but parameters and their own state.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return True
    kind = type(optimizer).__name__
    generators = _Generators(optimizer)
    try:
        together, alone = _twin(optimizer), _twin(optimizer)
        contained = True
        for step in range(STEPS):
            _set_gradients(together, step)
            _set_gradients(alone, step)
            _step(together)
            stepper = Stepper(alone)
            for parameter in reversed(list(_parameters(alone))):
                stepper.step([parameter])
            contained = contained and not stepper.wrote_elsewhere
            stepper.commit()
        equal = all(map(torch.equal, _parameters(together), _parameters(alone)))
        random = generators.advanced()
    except UnsupportedOptimizerError:
        raise
    except Exception:
        return False
    finally:
        generators.restore()
    if random:
        raise UnsupportedOptimizerError(
            f"{kind} draws random numbers in step(): bucket by bucket they would go to other parameters than in the "
            "plain loop. Use this optimizer without instep"
        )
    if not equal:
        raise UnsupportedOptimizerError(
            f"{kind} couples parameters: stepped one by one they get other values than stepped together, so stepping "
            "during backward would differ from the plain loop. Use this optimizer without instep"
        )
    _require_step_without_gradients(together, kind)
    # What an attribute holds may be changed by the loop before the step is applied.
    holds = any(
        isinstance(value, (torch.Tensor, dict, list, set))
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state", "defaults") and not name.startswith("_optimizer_")
    )
    return contained and not holds and _takes_aliases(optimizer, together)


def _takes_aliases(optimizer: Optimizer, plain: Optimizer) -> bool:
    """Whether it can be stepped on other tensors of the same memory. Some know a parameter by the object it is, or
    replace its gradient."""
    twin = _twin(optimizer)
    try:
        for step in range(STEPS):
            _set_gradients(twin, step)
            stepper = Stepper(twin)
            for parameter in _parameters(twin):
                gradient = parameter.grad
                alias = alias_of(parameter, gradient)
                stepper.step([alias], [parameter])
                if alias.grad is not gradient:
                    return False  # the loop would find the old one in .grad
            stepper.commit()
    except Exception:
        return False
    return all(map(torch.equal, _parameters(plain), _parameters(twin)))


class _Generators:
    """torch's random number generators on the optimizer's devices, as they were: the user's loop must not notice."""

    def __init__(self, optimizer: Optimizer) -> None:
        devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self._before = self._states()

    def advanced(self) -> bool:
        return not all(map(torch.equal, self._before, self._states()))

    def restore(self) -> None:
        torch.set_rng_state(self._before[0])
        for device, state in zip(self._devices, self._before[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)

    def _states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in self._devices)]


def _require_step_without_gradients(twin: Optimizer, kind: str) -> None:
    for parameter in _parameters(twin):
        parameter.grad = None
    try:
        _step(twin)
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"{kind}.step() raises when no parameter has a gradient ({type(error).__name__}: {error}), as it is after "
            "backward has stepped them all. Use this optimizer without instep"
        ) from error


def _step(twin: Optimizer) -> None:
    with torch.no_grad():
        undecorated_step(type(twin))(twin)


def _twin(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with nothing of its own: copied attributes, no state, two small parameters for each kind of
    parameter in a group."""
    groups = []
    for group in optimizer.param_groups:
        kinds = {(p.dim(), p.dtype, p.device) for p in group["params"]}
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        made = [_parameter(*kind) for kind in sorted(kinds, key=str) for _ in range(2)]
        groups.append({**copy.deepcopy(options), "params": made})
    twin = shadow_of(optimizer, groups, {})
    attributes = {
        name: value
        for name, value in vars(twin).items()
        if name not in ("param_groups", "state") and not name.startswith("_optimizer_")
    }
    # The model's parameters, where an attribute refers to them, are not worth a copy.
    large: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    vars(twin).update(copy.deepcopy(attributes, memo=large))
    return twin


def _parameter(dim: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones((SIDE,) * dim, dtype=dtype, device=device))


def _parameters(twin: Optimizer) -> Iterator[Any]:
    for group in twin.param_groups:
        yield from group["params"]


def _set_gradients(twin: Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(_parameters(twin)):
        gradient = torch.randn(parameter.shape, generator=generator) * (1 + number)
        parameter.grad = gradient.to(parameter.device, parameter.dtype)
