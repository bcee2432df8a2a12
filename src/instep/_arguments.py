"""The arguments that many public verbs share: models and optimizers.

Each function takes what the user gave, and the class of the verb's errors. It returns the argument in one form, or
raises an error that says what was found, and what to give instead.
"""

from collections.abc import Iterable, Iterator, Mapping
from inspect import isfunction
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep.errors import InstepError, class_name

Error = type[InstepError]
_WRAP_ONLY = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"})
"""Libraries whose prepared optimizers have the user's own in ``optimizer``, and call its ``step()``."""


def require_model(model: object, error: Error, name: str = "model") -> nn.Module:
    """Return ``model``, if it is a module."""
    if not isinstance(model, nn.Module):
        raise error(f"{name} must be a torch.nn.Module, not {_found(model)}")
    return model


def models_of(model: object, error: Error) -> list[nn.Module]:
    """Return the model as a list, or the models of a list. None may be a part of another: it would be stepped twice."""
    if not isinstance(model, (list, tuple)):
        if not isinstance(model, nn.Module):
            raise error(f"model must be a torch.nn.Module or a list of them, not {_found(model)}")
        return [model]
    if not model:
        raise error("model is an empty list: give one module or more")
    models = [require_model(module, error, f"model[{position}]") for position, module in enumerate(model)]
    for position, outer in enumerate(models):
        inside = {id(module): name for name, module in outer.named_modules()}
        for other, inner in enumerate(models):
            if other == position or id(inner) not in inside:
                continue
            if inner is outer:
                raise error(f"model[{position}] and model[{other}] are the same {type(inner).__name__}: give it once")
            raise error(
                f"model[{other}] is inside of model[{position}], as {inside[id(inner)]!r}: give model[{position}] alone"
            )
    return models


def optimizers_of(optimizer: object, error: Error, name: str = "optimizer") -> list[Optimizer]:
    """Return the optimizer as a list, or those of a list: the user's own, inside accelerate's and Fabric's wrappers."""
    optimizer = _unwrapped(optimizer)
    if isinstance(optimizer, Optimizer):
        return [_require_groups(optimizer, error, name)]
    # Python can iterate over these, too, and would say something of their first element.
    no_list = str, bytes, type, Mapping, nn.Module, torch.Tensor
    if not isinstance(optimizer, Iterable) or isinstance(optimizer, no_list):
        raise error(f"{name} must be a torch.optim.Optimizer or a list of them, not {_found(optimizer)}")
    optimizers: list[Optimizer] = []
    for position, item in enumerate(map(_unwrapped, optimizer)):
        if not isinstance(item, Optimizer):
            raise error(f"{name}[{position}] must be a torch.optim.Optimizer, not {_found(item)}")
        optimizers.append(_require_groups(item, error, f"{name}[{position}]"))
    if not optimizers:
        raise error(f"{name} is an empty list: give one optimizer or more")
    return optimizers


def _require_groups(optimizer: Optimizer, error: Error, name: str) -> Optimizer:
    if not _has_groups(optimizer):
        raise error(
            f"{name} has no param_groups: {class_name(optimizer, in_full=True)} was made without "
            "torch.optim.Optimizer.__init__. Call super().__init__(params, defaults) in its constructor"
        )
    return optimizer


def _has_groups(optimizer: Optimizer) -> bool:
    """Whether it says what it steps. Not where a class has left out ``Optimizer.__init__``, and does not need them."""
    return hasattr(optimizer, "param_groups")


def unlike_torchs(optimizer: object) -> str | None:
    """Name the class of the first object that steps and clears gradients as an optimizer does, and is none of torch's
    kind: fastai's, ``ScheduleFreeWrapper``, one that the loop has written. ``None``: there is none."""
    for item in _several(optimizer):
        steps = all(callable(getattr(item, name, None)) for name in ("step", "zero_grad"))
        if steps and isinstance(item, Optimizer) and not _has_groups(item):
            return f"{class_name(item, in_full=True)}, made without torch.optim.Optimizer.__init__,"
        if steps and not isinstance(item, (Optimizer, nn.Module, type)):
            return class_name(item, in_full=True)
    return None


def torchs_of(optimizer: object) -> list[Optimizer]:
    """Return the optimizers of torch's kind, beside others, of which ``unlike_torchs`` names the first."""
    return [item for item in _several(optimizer) if isinstance(item, Optimizer) and _has_groups(item)]


def _several(optimizer: object) -> Iterator[Any]:
    """The optimizer, or those of a list, unwrapped and whatever they are."""
    return map(_unwrapped, optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])


def _unwrapped(optimizer: Any) -> Any:
    """The user's own optimizer inside a wrapper of these libraries, which steps it. Other wrappers may do more."""
    seen = {id(optimizer)}  # a wrapper that holds itself would be unwrapped forever
    while type(optimizer).__module__.partition(".")[0] in _WRAP_ONLY:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) or id(inner) in seen:
            break
        seen.add(id(inner))
        optimizer = inner
    return optimizer


def _found(value: Any) -> str:
    """Describe what was given, and the mistake that this usually is."""
    kind = class_name(value)
    if isinstance(value, type):
        return f"the class {class_name(value)}: make an object of it, {value.__name__}(…)"
    if isinstance(value, nn.Module):
        return f"the model {kind}: the model comes first, then its optimizer"
    if isinstance(value, Optimizer):
        return f"the optimizer {kind}: the model comes first, then its optimizer"
    if isinstance(getattr(value, "__self__", None), nn.Module) or isfunction(value):
        return f"{kind}: give the object itself (torch.compile of a module that is compiled already returns a function)"
    if (held := _held_by(value)) is not None:
        return f"{class_name(value, in_full=True)}, {held}"
    if isinstance(value, torch.Tensor):
        return f"{kind}: build an optimizer of the parameters, torch.optim.AdamW(model.parameters()), and give that"
    if isinstance(value, Mapping):
        return f"{kind}: give its values as a list"
    return class_name(value, in_full=True)


def _held_by(value: Any) -> str | None:
    """How to get at the optimizers that an object of another library holds; ``None``: it shows none."""
    try:
        attributes = dict(vars(value))
    except TypeError:  # it has none
        return None
    for name, held in attributes.items():
        if isinstance(held, Optimizer):
            return f"which has an optimizer: give that one, {type(value).__name__}.{name}"
        # Pyro makes one for each parameter, when it first meets that.
        several = list(held.values()) if isinstance(held, Mapping) else held if isinstance(held, (list, tuple)) else ()
        if name == "optim_objs" or (several and all(isinstance(item, Optimizer) for item in several)):
            listed = f"list(optim.{name}.values())" if isinstance(held, Mapping) else f"optim.{name}"
            empty = "" if several else "; it makes them in its first step: attach after that"
            return f"which holds several: pass the torch optimizers that it holds, {listed}{empty}"
    return None
