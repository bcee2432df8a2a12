"""What is kept of single parameters beside their ``state``: in their own attributes (``p.grad_batch``), and in mappings
that the optimizer's attributes reach (``self.averages[p]``).

An update may read it, and others may write it: hooks of a backward, say, after the parameter's gradient is there. A
bucket that was stepped by then has found the last step's. So what a bucket's update leaves is looked at again when
``optimizer.step()`` is called (``BelongingsGuard``), and a step that is judged is left, with all that come, where it
changes between a gradient and ``step()`` (``Arrivals``).
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import read_by_update
from instep._optim.shadow import GroupLayout
from instep._optim.stages import Stage, Update
from instep._optim.values import fingerprint, is_immutable, reachable_values, unlike
from instep.errors import HyperparameterChangedError

Mappings = MutableMapping[Any, Any]


def mappings_of(optimizer: Optimizer) -> list[Mappings]:
    """Those that its attributes reach."""
    reached = reachable_values([read_by_update(optimizer)], optimizer)
    return [value for value in reached if isinstance(value, MutableMapping) and value is not optimizer.state]


def _with_parameters(mappings: Iterable[Mappings]) -> list[Mappings]:
    """Those that have tensors for keys."""
    return [mapping for mapping in mappings if any(isinstance(key, torch.Tensor) for key in mapping)]


def mappings_with(parameter: torch.Tensor, mappings: Iterable[Mappings]) -> Iterator[Mappings]:
    """Those in which something is kept by it."""
    for mapping in mappings:
        with suppress(RuntimeError):  # a number of the same hash is there, and torch compares the two
            if parameter in mapping:
                yield mapping


def kept_of(parameter: torch.Tensor, mappings: Iterable[Mappings]) -> dict[Any, Any]:
    """What is kept of it: by the ``id`` of a mapping, and the names of attributes."""
    kept: dict[Any, Any] = {id(mapping): mapping[parameter] for mapping in mappings_with(parameter, mappings)}
    if attributes := vars(parameter):
        kinds = (torch.Tensor, list, tuple, dict, set)
        # The attributes in which a tensor of a wrapper class (a ``DTensor``) has its values.
        flatten: Any = getattr(type(parameter), "__tensor_flatten__", None)
        own: Sequence[str] = () if flatten is None else flatten(parameter)[0]
        for name, value in attributes.items():
            # torch.compile marks tensors that it has seen.
            if (
                (is_immutable(value) or isinstance(value, kinds))
                and name not in own
                and not name.startswith("_dynamo_")
            ):
                kept[name] = value
    return kept


class Found:
    """What is kept of some parameters, as it was found.

    Args:
        optimizer: that updates them, and is foreign.
        with_state: their entries of its ``state``, too.
    """

    def __init__(self, optimizer: Optimizer, *, with_state: bool = False) -> None:
        self._mappings = mappings_of(optimizer)
        if with_state:
            self._mappings.append(optimizer.state)
        self._of: dict[int, tuple[torch.Tensor, Any]] = {}

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """As it is now, in place of what was noted of them before."""
        mappings = _with_parameters(self._mappings)
        self._of.update((id(p), (p, _look_at(p, mappings))) for p in parameters)

    def changed(self) -> str | None:
        """Something that is not as it was, in words; ``None``: nothing."""
        mappings = _with_parameters(self._mappings)
        for parameter, then in self._of.values():
            now = _look_at(parameter, mappings)
            for where in unlike(now, then) if now or then else ():
                what = f"attribute {where!r} of" if isinstance(where, str) else "what the optimizer keeps by"
                return f"{what} a parameter of shape {tuple(parameter.shape)}"
        return None


_NOTHING: dict[Any, Any] = {}


def _look_at(parameter: torch.Tensor, mappings: Sequence[Mappings]) -> dict[Any, Any]:
    if not mappings and not vars(parameter):  # as mostly, and asked of each parameter in each step
        return _NOTHING
    return {where: fingerprint(value) for where, value in kept_of(parameter, mappings).items()}


class BelongingsGuard(Stage):
    """Looks at what is kept of the parameters of a foreign optimizer after their updates, and when ``step()`` is
    called.

    Attributes:
        rests: whether updates are put back, and are none of the step's.
    """

    def __init__(self, name: str) -> None:
        self.rests = False
        self._name = name
        self._found: Found | None = None

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        self._found = Found(optimizer)

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        yield
        if self._found is not None and not self.rests:
            self._found.note(update.owned)

    def require_unchanged(self, optimizer: Optimizer) -> None:
        if self._found is not None and (what := self._found.changed()) is not None:
            raise HyperparameterChangedError(
                f"{what} was changed after backward had already stepped it with what {self._name} found there: by a "
                "hook of this backward? Use schedule='forward', which steps after backward"
            )

    def end_step(self) -> None:
        self._found = None
