"""Made-up parameters and gradients, to try an optimizer on."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

# Some optimizers treat large matrices, or wide ones, in another way than small ones, some all of one shape together.
_SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [(), ()],
    1: [(7,), (64,), (1,), (300,), (64,)],
    2: [(4, 4), (72, 66), (3, 40), (4, 4), (66, 80), (72, 66)],
    3: [(4, 3, 5), (70, 66, 1), (4, 3, 5)],
    4: [(8, 3, 3, 3), (70, 66, 1, 1), (8, 3, 3, 3)],
}
STEPS = 14
"""Warm-ups of ten steps and a few more are seen to their end."""


@dataclass(frozen=True)
class Spec:
    """What a made-up parameter is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} {self.shape}" if self.device.type == "cpu" else f"{kind} {self.shape} on {self.device}"

    def make(self, number: int) -> torch.nn.Parameter:
        """The parameter, with zeros among its values, on which every update shows."""
        values = torch.randn(self.shape, generator=_seeded(number), device="cpu").round() / 4
        return torch.nn.Parameter(values.to(self.device, self.dtype), requires_grad=self._is_continuous)

    def gradient(self, number: int, step: int, scale: float) -> torch.Tensor:
        dtype = self.dtype if self.dtype.is_complex else torch.float32
        values = torch.randn(self.shape, generator=_seeded(1000 * step + number), device="cpu", dtype=dtype)
        return (values * scale * (1 + number % 3)).to(self.device, self.dtype)

    @property
    def _is_continuous(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class Weather:
    """The gradients of some steps.

    Attributes:
        scales: their size in each step.
        gaps: whether some parameters have none in some steps, and no parameter has one in the last.
        odd: by step, a value that is among those of one parameter: as when a loss overflows. The rest is as ever.
    """

    scales: Sequence[float]
    gaps: bool = False
    odd: Mapping[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.odd:
            return f"a gradient that holds {', '.join(f'{value:g}' for value in self.odd.values())}"
        low, high = min(self.scales), max(self.scales)
        return f"gradients of about {low:g}" if low == high else f"gradients of about {low:g} to {high:g}"

    def gradients(self, specs: Sequence[Spec], step: int) -> list[torch.Tensor | None]:
        last = self.gaps and step == len(self.scales) - 1
        made = [
            None if last or (self.gaps and (number + step) % 4 == 0) else spec.gradient(number, step, self.scales[step])
            for number, spec in enumerate(specs)
        ]
        if step in self.odd and (gradient := made[step % len(made)]) is not None:
            gradient.view(-1)[0] = self.odd[step]
        return made


WEATHERS = (
    Weather((1.0, 1e-3, 30.0, 1e3, 1e-2, 1.0, 1e-3, 1e3, 0.1, 5.0, 1e3, 1e-3, 1.0, 1.0), gaps=True),
    Weather((1.0,) * STEPS),
    Weather((1e-3,) * STEPS),
    Weather((1e3,) * STEPS),
    Weather((1.0,) * 6, odd={1: 1e10, 3: math.inf, 4: math.nan}),
)


def specs_for(optimizer: Optimizer, *, alike: bool = False) -> list[list[Spec]]:
    """For each group, parameters of the kinds that it holds. Groups that differ by numbers alone share the shapes among
    them, so that many of them do not take long.

    Args:
        alike: small square ones only.
    """
    similar: dict[Any, list[int]] = defaultdict(list)
    for index, group in enumerate(optimizer.param_groups):
        for kind in sorted({(p.dim(), p.dtype, p.device) for p in group["params"]}, key=str):
            similar[kind, _manner(group)].append(index)
    specs: list[list[Spec]] = [[] for _ in optimizer.param_groups]
    for ((dim, dtype, device), _), indices in similar.items():
        some = [(4,) * dim] * 2
        for index, shape in _dealt(indices, some if alike else _SHAPES.get(dim, some)):
            specs[index].append(Spec(shape, dtype, device))
    return specs


def _dealt(indices: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    for number in range(max(len(indices), len(shapes))):
        yield indices[number % len(indices)], shapes[number % len(shapes)]


def _manner(group: dict[str, Any]) -> str:
    """What its options switch on and off."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr", "name")}
    return repr({k: (v > 0) - (v < 0) if isinstance(v, float) else v for k, v in options.items()})


def options_of(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """A group's options, as they are for a step that shows: a learning rate that warms up begins at zero, and
    schedule-free optimizers have a mode for evaluation."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if options.get("train_mode") is False:
        options["train_mode"] = True
    lr = options.get("lr")
    if isinstance(lr, (int, float, torch.Tensor)) and not lr:
        shown = float(options.get("initial_lr") or optimizer.defaults.get("lr") or 0) or 1e-3
        options["lr"] = torch.full_like(lr, shown) if isinstance(lr, torch.Tensor) else shown
    return options


def is_finite(parameter: torch.Tensor) -> bool:
    return bool(parameter.isfinite().all()) if math.prod(parameter.shape) else True


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
