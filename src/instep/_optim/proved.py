"""Classes of foreign optimizers that are known to update each parameter by itself.

``proved.json`` is what ``python -m tests.sweep`` writes: each class that came out equal, bucket by bucket, on one
device and on two ranks, with its distribution, its version, and the settings with which it did. The first updates of
such an optimizer are not compared, so that they need no more memory than the others.
"""

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import class_of_update, has_values, read_by_update, replaced_step
from instep._optim.shadow import parameters_of
from instep._optim.values import is_immutable
from instep._torch.versions import memory_of
from instep.master_weights import HALF, Masters

FREE = frozenset({"lr", "initial_lr", "weight_decay", "betas", "eps", "momentum"})
"""Numbers that may be others than in the sweep. Any other setting may switch on what couples parameters."""


def is_proved(optimizer: Optimizer) -> bool:
    """Whether the sweep has proved the class of ``optimizer``, in the version that is installed, with its settings.
    Where there are no values there is nothing to compare: a plan takes it for granted."""
    if not has_values(optimizer):
        return True
    cls = class_of_update(optimizer)  # of masters, what is done around it is of each parameter alone
    proof = _proved().get(f"{cls.__module__}.{cls.__qualname__}")
    return (
        proof is not None
        and replaced_step(optimizer) is None
        and _version_of(proof["distribution"]) == proof["version"]
        and settings_of(optimizer) in proof["settings"]
    )


def settings_of(optimizer: Optimizer) -> list[str]:
    """Its groups' settings, its attributes, and of which kinds its parameters are: each once, in order."""
    places = [dict(group, params=None, param_names=None) for group in optimizer.param_groups]
    places.append({name: value for name, value in read_by_update(optimizer).items() if name != "defaults"})
    settings = ((name, value) for place in places for name, value in place.items() if name not in FREE)
    wide = HALF if isinstance(optimizer, Masters) else ()  # it is the masters that are stepped
    kinds = {
        f"{type(memory_of(p)).__name__} of {torch.float32 if p.dtype in wide else p.dtype}"
        for p in parameters_of(optimizer)
    }
    # What can be changed is known by its kind alone. Numbers that count steps, and the like, begin alike.
    words = ((name, repr(value) if is_immutable(value) else type(value).__name__) for name, value in settings)
    # Among the attributes is a name for torch's profiler, with that of the class in it.
    own, inside = (f"#{cls.__name__}." for cls in (type(optimizer), class_of_update(optimizer)))
    return sorted({f"{name}={value}".replace(own, inside) for name, value in words} | kinds)


@cache
def _proved() -> dict[str, Any]:
    proofs: dict[str, Any] = json.loads(files("instep._optim").joinpath("proved.json").read_text())
    return proofs


@cache
def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
