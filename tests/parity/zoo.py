"""Optimizers to draw from: torch's own, and those of every package for optimizers that is installed."""

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from tests.cases import optimizer_cases
from tests.devices import here

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
LR = 1e-2
BESIDE: dict[str, tuple[Any, dict[str, Any]]] = {
    # torch.optim's, with something that the tables of updates by parameter leave out.
    "SGD tensor rate": (torch.optim.SGD, {"lr": LR, "momentum": 0.9}),
    "Adam tensor rate": (torch.optim.Adam, {"lr": LR, "capturable": False}),
    "AdamW tensor rate": (torch.optim.AdamW, {"lr": LR, "fused": True}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
    "Muon": (getattr(torch.optim, "Muon", None), {"lr": LR}),
    "Adafactor": (torch.optim.Adafactor, {"lr": LR}),
}


def _torchs() -> Iterator[tuple[str, Make]]:
    for name, cls, kwargs in optimizer_cases():
        yield name, partial(_made, cls, kwargs)
    for name, (cls, kwargs) in BESIDE.items():
        if cls is not None:
            yield name, partial(_with_tensor_rates if name.endswith("tensor rate") else _made, cls, kwargs)


def _made(cls: Any, kwargs: dict[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return cls(groups, **kwargs)


def _with_tensor_rates(cls: Any, kwargs: dict[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    rates = [{**group, "lr": torch.tensor(float(group.get("lr", LR)))} for group in groups]
    return cls(rates, **{**kwargs, "lr": torch.tensor(kwargs["lr"])})


def _classes(module: Any) -> Iterator[tuple[str, type[torch.optim.Optimizer]]]:
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and not name.startswith("_"):
            yield name, value


def _from_package(cls: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        return cls(groups, lr=LR)
    except TypeError:
        return cls(groups)


def _of_pytorch_optimizer() -> Iterator[tuple[str, Any]]:
    found = importlib.import_module("pytorch_optimizer")
    for name in found.get_supported_optimizers():
        cls = found.load_optimizer(name)
        if isinstance(cls, type) and cls.__module__.startswith("pytorch_optimizer"):
            yield cls.__name__, cls


def _of_timm() -> Iterator[tuple[str, Any]]:
    found = importlib.import_module("timm.optim")
    for name in found.list_optimizers(exclude_filters=["bnb*", "fused*"]):  # those want a GPU
        cls = found.get_optimizer_class(name, bind_defaults=True)
        yield name, cls


def _of(module: str, *names: str) -> Callable[[], Iterator[tuple[str, Any]]]:
    def listed() -> Iterator[tuple[str, Any]]:
        found = importlib.import_module(module)
        yield from ((name, cls) for name, cls in _classes(found) if not names or name in names)

    return listed


def _of_transformers() -> Iterator[tuple[str, Any]]:
    adafactor = importlib.import_module("transformers.optimization").Adafactor
    yield "Adafactor", partial(adafactor, relative_step=False, scale_parameter=False)
    yield "Adafactor relative", lambda groups, lr=None: adafactor([{"params": g["params"]} for g in groups])


PACKAGES: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "pytorch_optimizer": _of_pytorch_optimizer,
    "timm": _of_timm,
    "torchao": _of("torchao.optim"),
    "optimi": _of("optimi"),
    "schedulefree": _of("schedulefree"),
    "transformers": _of_transformers,
    "bitsandbytes": _of("bitsandbytes.optim"),
    "adv_optm": _of("adv_optm"),
    "prodigyopt": _of("prodigyopt"),
    "dadaptation": _of("dadaptation"),
    "lion_pytorch": _of("lion_pytorch"),
    "came_pytorch": _of("came_pytorch"),
    "adabelief_pytorch": _of("adabelief_pytorch"),
}


TORCHS = dict(_torchs())


@cache
def zoo() -> dict[str, Make]:
    """Every optimizer that can be made here, by the name of its package and its own."""
    found: dict[str, Make] = dict(TORCHS)
    for package, listed in PACKAGES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                classes = list(listed())
            except ImportError:
                continue
            found.update((f"{package}.{name}", partial(_from_package, cls)) for name, cls in classes)
    if here().type != "cpu":
        for name in LAUNCH_TOO_MUCH:
            found.pop(name, None)
    return found


LAUNCH_TOO_MUCH = ("pytorch_optimizer.SpectralSphere",)
"""They search in thousands of operations for each matrix. The emulated accelerator keeps each of them: gigabytes."""


def maker(name: str) -> Make:
    return TORCHS[name] if name in TORCHS else zoo()[name]


def installed() -> dict[str, int]:
    """How many optimizers each package gives."""
    return dict(Counter(name.partition(".")[0] if "." in name else "torch" for name in zoo()))


def into_training(optimizer: Any) -> None:
    """Schedule-free optimizers have a mode."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
