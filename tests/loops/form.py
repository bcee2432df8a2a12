"""A form of a loop, and one run of it: plain, or with the line."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import instep

Seen = dict[str, Any]
"""What one step has left, by name: copies of tensors, and numbers."""

FIELDS = (
    "supervised",
    "vision",
    "rl",
    "control",
    "adversarial",
    "language",
    "alignment",
    "diffusion",
    "frameworks",
    "hands",
    "odd",
)
"""The modules of ``tests/loops/forms``, in the order of the table."""


class Run:
    """One run of a form. A form calls ``attach`` where a user writes the line, and ``saw`` after each step.

    Args:
        options: those of ``attach``; ``None`` for the plain loop.
        every_step: whether models and optimizers are read after every step. Otherwise only the loop itself reads them,
            until the last step.
        gradients: whether the gradients are read, too.
    """

    def __init__(self, options: Mapping[str, Any] | None, *, every_step: bool, gradients: bool = True) -> None:
        self.options = options
        self.steps: list[Seen] = []
        self._every_step = every_step
        self._gradients = gradients
        self._parts: tuple[Any, ...] = ()
        self._overlaps: list[instep.Attachment] = []

    def attach(self, model: nn.Module, optimizer: Optimizer | list[Optimizer]) -> None:
        """The line. Nothing in the plain run."""
        if self.options is not None:
            self._overlaps.append(instep.attach(model, optimizer, **self.options))

    def saw(self, *parts: Any, **logged: Any) -> None:
        """A step is over. ``parts`` are modules, optimizers and tensors that the loop does not look at here.

        Args:
            logged: what the loop itself keeps, prints or saves at this point.
        """
        self.steps.append(dict(_leaves("logged", logged)))
        self._parts = parts
        if self._every_step:
            self.steps[-1] |= self._state()

    def detach(self) -> None:
        """The line's counterpart, where a loop goes on with another optimizer."""
        for overlap in self._overlaps:
            overlap.detach()

    def end(self) -> None:
        """Read everything once more, and detach."""
        self.steps.append(self._state())
        self.detach()

    def _state(self) -> Seen:
        return {
            name: value
            for number, part in enumerate(self._parts)
            for name, value in _entries(f"part {number}", part, gradients=self._gradients)
        }

    @property
    def stepped(self) -> int:
        """How many steps instep has taken."""
        return sum(overlap.step_count for overlap in self._overlaps)


@dataclass(frozen=True)
class Form:
    """A loop, and what the table says of it.

    Attributes:
        run: trains with the ``Run`` it is given.
        what: one line for the table.
        found_in: the kind of code base that writes the loop so.
        fails: why the loop cannot be equal with the line; empty where the loops are equal.
        by_itself: the form attaches through a callback of instep's, not through ``Run.attach``.
    """

    run: Callable[[Run], None]
    what: str
    found_in: str
    fails: str
    by_itself: bool

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def field(self) -> str:
        return self.run.__module__.rpartition(".")[2]


_FORMS: list[Form] = []


def form(
    what: str, found_in: str, *, fails: str = "", by_itself: bool = False
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a function to the forms."""

    def add(run: Callable[[Run], None]) -> Callable[[Run], None]:
        _FORMS.append(Form(run, what, found_in, fails, by_itself))
        return run

    return add


def forms() -> list[Form]:
    """All forms, field by field."""
    for field in FIELDS:
        import_module(f"tests.loops.forms.{field}")
    return sorted(_FORMS, key=lambda one: FIELDS.index(one.field))


def _entries(label: str, part: Any, *, gradients: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(part, nn.Module):
        for name, parameter in part.named_parameters():
            yield f"{label}: parameter {name!r}", _copy(parameter)
            if gradients:
                yield f"{label}: gradient of {name!r}", _copy(parameter.grad)
        for name, buffer in part.named_buffers():
            yield f"{label}: buffer {name!r}", _copy(buffer)
    elif isinstance(part, Optimizer):
        numbers: dict[Any, int] = {}
        for index, group in enumerate(part.param_groups):
            for parameter in group["params"]:
                numbers[parameter] = len(numbers)
            yield from _leaves(f"{label}: group {index}", {k: v for k, v in group.items() if k != "params"})
        for key, value in part.state.items():
            yield from _leaves(f"{label}: state of {numbers.get(key, key)}", value)
    else:
        yield from _leaves(label, part)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield f"{name}: keys", list(map(str, value))
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(value):
            yield from _leaves(f"{name}[{i}]", item)
    elif hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, type)) and not callable(value):
        yield from _leaves(name, vars(value))
    else:
        yield name, _copy(value)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
