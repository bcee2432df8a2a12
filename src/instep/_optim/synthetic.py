"""Made-up parameters and gradients, and copies of an optimizer that are stepped over them, together or in parts."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import STEPPED_WHOLE
from instep._optim.random_numbers import KeyedDraws
from instep._optim.shadow import alias_of, clone_of, parameters_of, shared_state, step_plainly
from instep._optim.stepper import Stepper
from instep._optim.undo import Undo, UndoCopies
from instep._optim.values import values_differ
from instep.errors import UnsupportedOptimizerError

# Made-up parameters and gradients, to try an optimizer on.


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
class GradientPattern:
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


GRADIENT_PATTERNS = (
    GradientPattern((1.0, 1e-3, 30.0, 1e3, 1e-2, 1.0, 1e-3, 1e3, 0.1, 5.0, 1e3, 1e-3, 1.0, 1.0), gaps=True),
    GradientPattern((1.0,) * STEPS),
    GradientPattern((1e-3,) * STEPS),
    GradientPattern((1e3,) * STEPS),
    GradientPattern((1.0,) * 6, odd={1: 1e10, 3: math.inf, 4: math.nan}),
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


# Copies of one optimizer over made-up parameters, stepped together or in parts.


Divide = Callable[[Sequence[Any]], Iterable[Sequence[Any]]]


def one_by_one(parameters: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Each parameter in a bucket of its own, the last first."""
    yield from ([parameter] for parameter in reversed(parameters))


def _in_pairs(parameters: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The last with the first, and so on: of several groups, backwards."""
    half = len(parameters) // 2
    yield from zip(reversed(parameters[-half:]), parameters[:half], strict=True)
    yield parameters[half : len(parameters) - half]


def _every_other(parameters: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Every other parameter; the rest is left to ``step()``."""
    yield from ([parameter] for parameter in parameters[::2])


DIVISIONS: dict[str, Divide] = {
    "one by one": one_by_one,
    "in pairs": _in_pairs,
    "in part": _every_other,
}


class SyntheticRun:
    """A copy of one optimizer over made-up parameters.

    Attributes:
        twin: the copy.
        parameters: in the order of its groups.
        contained: whether no bucket's update wrote anything but parameters and their own state.
        replaces_gradients: whether a bucket's update put another tensor into a ``.grad``.
        returned: by the last plain ``step()``.

    Args:
        keyed: whether each call draws from generators that are seeded for the step.
    """

    def __init__(self, optimizer: Optimizer, specs: Sequence[Sequence[Spec]], *, keyed: bool = False) -> None:
        numbers = iter(range(sum(map(len, specs))))
        groups = [
            {**options_of(optimizer, group), "params": [spec.make(next(numbers)) for spec in mine]}
            for group, mine in zip(optimizer.param_groups, specs, strict=True)
        ]
        for number, (group, theirs) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            if "param_names" in theirs:
                group["param_names"] = [f"made_up.{number}.{at}" for at in range(len(group["params"]))]
        self.twin = clone_of(optimizer, groups, shared_state(optimizer), {id(p): p for p in parameters_of(optimizer)})
        self.parameters = list(parameters_of(self.twin))
        self._steps = 0  # so many have been taken
        draws = KeyedDraws(0, self._count)
        for parameter in self.parameters:
            draws.name(parameter, "")  # one for all: any of them may be the first of its call
        self._draws = draws if keyed else None
        self.contained = True
        self.replaces_gradients = False
        self.returned: Any = None

    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Put a copy of each gradient into its parameter's ``.grad``."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def step(self, *closure: Callable[[], torch.Tensor]) -> None:
        """Call the plain ``step()``."""
        with self._drawing():
            self.returned = step_plainly(self.twin, *closure)
        self._steps += 1

    def step_divided(self, divide: Divide, *, alias: bool = False) -> None:
        """Step as an attached loop does: buckets first, then the plain ``step()`` for the parameters that are left."""
        stepper = self._stepper()
        with_gradient = [p for p in self.parameters if p.grad is not None]
        for bucket in filter(len, map(list, divide(with_gradient))):
            tensors = [alias_of(p, p.grad) for p in bucket] if alias else bucket
            gradients = [tensor.grad for tensor in tensors]
            stepper.step(tensors, bucket)
            self.replaces_gradients |= any(t.grad is not g for t, g in zip(tensors, gradients, strict=True))
            for parameter in bucket:
                parameter.grad = None
        self.contained = self.contained and not stepper.wrote_elsewhere
        left = any(p.grad is not None for p in self.parameters)
        try:
            self.step()
        except Exception as error:
            if left:
                raise
            raise UnsupportedOptimizerError(raises_without_gradients(self.twin, error)) from error
        stepper.commit()

    def step_in_vain(self) -> None:
        """Step and roll back, as an attached loop does with ``undo``."""
        stepper, undo = self._stepper(), Undo(host=False)
        parameters = [p for p in self.parameters if p.grad is not None]
        if not parameters:
            return
        stepper.add(UndoCopies(stepper.name, undo))
        stepper.step(parameters, begins=_nothing)
        for device in undo.devices:
            undo.restore(device)
        stepper.abort()

    @property
    def devices(self) -> set[torch.device]:
        return {parameter.device for parameter in self.parameters}

    def _stepper(self) -> Stepper:
        stepper = Stepper(self.twin)
        stepper.draws = self._draws
        return stepper

    def _count(self) -> int:
        return self._steps

    def _drawing(self) -> AbstractContextManager[Any]:
        if self._draws is None or not self.parameters:
            return nullcontext()
        return self._draws.drawing(type(self.twin).__name__, self.parameters[0])

    def differs_from(self, other: "SyntheticRun") -> str | None:
        """The first difference from ``other``, in words; ``None``: all is equal bit for bit."""
        for mine, its in zip(self.parameters, other.parameters, strict=True):
            if values_differ(mine, its):
                return f"a parameter of shape {tuple(mine.shape)}"
            if values_differ(self.twin.state.get(mine), other.twin.state.get(its)):
                return f"the state of a parameter of shape {tuple(mine.shape)}"
        if values_differ(*map(shared_state, (self.twin, other.twin))):
            return "what it keeps in its state beside parameters"
        if values_differ(*map(_options, (self.twin, other.twin))):
            return "what it keeps in its param_groups"
        return None


class SyntheticRuns:
    """Makes the runs of one probe, and keeps them until its end: an optimizer may remember parameters by their ids.

    Attributes:
        name: of the optimizer's class.
        specs: by group, the parameters to make.
        keyed: whether each call draws from generators that are seeded for the step.
    """

    def __init__(self, optimizer: Optimizer, specs: list[list[Spec]], *, keyed: bool) -> None:
        self._optimizer = optimizer
        self.keyed = keyed
        self._made: list[SyntheticRun] = []
        self.name = type(optimizer).__name__
        self.specs = specs

    def anew(self, specs: Sequence[Sequence[Spec]] | None = None) -> SyntheticRun:
        """A run that has not been stepped. ``specs``: for parameters other than ``self.specs``."""
        run = SyntheticRun(self._optimizer, self.specs if specs is None else specs, keyed=self.keyed)
        self._made.append(run)
        return run

    def gradients(self, weather: GradientPattern, step: int) -> list[torch.Tensor | None]:
        return weather.gradients([spec for mine in self.specs for spec in mine], step)

    @property
    def devices(self) -> set[torch.device]:
        return {spec.device for mine in self.specs for spec in mine}


def raises_without_gradients(optimizer: Optimizer, error: Exception) -> str:
    """The message for an optimizer whose ``step()`` raised ``error`` where no gradient was left."""
    return (
        f"{type(optimizer).__name__}.step() raises when no parameter has a gradient ({in_short(error)}), as where "
        f"they were stepped before step(). {STEPPED_WHOLE}"
    )


def in_short(error: BaseException) -> str:
    """The error's class and the beginning of its message, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:150]}" if text else type(error).__name__


def _nothing() -> None: ...


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
