"""An autocast block around ``optimizer.step()``: does it change the update? In backward, and behind the next forward,
updates run outside of it."""

import warnings
import weakref

import torch
from torch.optim import Optimizer

from instep._optim.calling import autocast_of
from instep._optim.generators import Generators, TorchGenerators
from instep._optim.made_up import STEPS, WEATHERS, Spec, specs_for
from instep._optim.made_up_run import MadeUpRun
from instep._optim.twins import parameters_of, step_plainly
from instep.errors import HyperparameterChangedError

_found: "weakref.WeakKeyDictionary[Optimizer, dict[torch.dtype, bool]]" = weakref.WeakKeyDictionary()


def autocast_matters(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step()``, called here, would compute other numbers than outside of every autocast block.

    Tried on made-up parameters, once for each optimizer and dtype of autocast. Where that fails, the answer is yes.
    """
    first = next(parameters_of(optimizer), None)
    dtype = None if first is None else autocast_of(first.device.type)
    if dtype is None:
        return False
    found = _found.setdefault(optimizer, {})
    if dtype not in found:
        found[dtype] = _tried(optimizer, dtype)
    return found[dtype]


def require_same_in_autocast(optimizer: Optimizer) -> None:
    """Raise ``HyperparameterChangedError`` if the autocast block in which ``step()`` is called matters: this update
    was, or is about to be, computed outside of it."""
    if autocast_matters(optimizer):
        raise HyperparameterChangedError(
            f"{type(optimizer).__name__}.step() was called inside an autocast block, and computes other numbers there; "
            "instep's updates run outside of it. Call optimizer.step() outside of the block, as PyTorch advises"
        )


def _tried(optimizer: Optimizer, dtype: torch.dtype) -> bool:
    generators = Generators({p.device for p in parameters_of(optimizer)}, [optimizer])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            specs = specs_for(optimizer)
            answer = _differs(optimizer, specs, dtype)
            if answer is None:  # some take no parameters but those that fit one another
                answer = _differs(optimizer, specs_for(optimizer, alike=True), dtype)
            return answer is not False
    finally:
        generators.restore()


def _differs(optimizer: Optimizer, specs: list[list[Spec]], dtype: torch.dtype) -> bool | None:
    """``None``: made-up parameters cannot be stepped."""
    generators = TorchGenerators(spec.device for mine in specs for spec in mine)
    try:
        outside, inside = MadeUpRun(optimizer, specs), MadeUpRun(optimizer, specs)
        for step in range(STEPS):
            gradients = WEATHERS[1].gradients([spec for mine in specs for spec in mine], step)
            outside.give(gradients)
            inside.give(gradients)
            generators.seed(step)
            outside.step()
            generators.seed(step)
            step_plainly(inside.twin, autocast=dtype)
    except Exception:
        return None
    finally:
        generators.restore()
    return inside.differs_from(outside) is not None
