"""What is kept of single parameters beside their ``state``: in their own attributes (``p.grad_batch``), and in mappings
that the optimizer's attributes reach (``self.averages[p]``).

An update may read it, and others may write it: hooks of a backward, say, after the parameter's gradient is there. A
bucket that was stepped by then has found the last step's. So what a bucket's update leaves is looked at again when
``optimizer.step()`` is called (``BelongingsGuard``), and a step that is judged is left, with all that come, where it
changes between a gradient and ``step()`` (``Arrivals``).
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.reached import reached
from instep._optim.shadow import GroupLayout
from instep._optim.stages import Stage, Update
from instep._optim.values import fingerprint, is_immutable, unlike
from instep.errors import HyperparameterChangedError

Mappings = MutableMapping[Any, Any]


def mappings_of(optimizer: Optimizer) -> list[Mappings]:
    """Those that it reaches."""
    return [mapping for mapping in reached(optimizer, MutableMapping) if mapping is not optimizer.state]


def with_parameters(mappings: Iterable[Mappings]) -> list[Mappings]:
    """Those that have tensors for keys."""
    return [mapping for mapping in mappings if any(map(isinstance, mapping, repeat(torch.Tensor)))]


def mappings_with(parameter: torch.Tensor, mappings: Iterable[Mappings]) -> Iterator[Mappings]:
    """Those in which something is kept by it."""
    for mapping in mappings:
        # A number of the same hash is there, and torch compares the two; or it takes no such key (the sections of a
        # configuration, the process's environment).
        with suppress(Exception):
            if parameter in mapping:
                yield mapping


Places = dict[Any, tuple[Mappings, Any]]
"""Where something is kept of one parameter: mappings with keys, by the ``id`` of a mapping, or an attribute's name."""


def places_of(parameter: torch.Tensor, mappings: Iterable[Mappings], attributes: Iterable[str]) -> Places:
    places: Places = {id(mapping): (mapping, parameter) for mapping in mappings_with(parameter, mappings)}
    return places | {name: (vars(parameter), name) for name in attributes}


def kept_of(parameter: torch.Tensor, mappings: Iterable[Mappings]) -> dict[Any, Any]:
    """What is kept of it, to be compared: in its attributes what a library may keep of a parameter."""
    names: list[str] = []
    if attributes := vars(parameter):
        kinds = (torch.Tensor, list, tuple, dict, set)
        # The attributes in which a tensor of a wrapper class (a ``DTensor``) has its values.
        flatten: Any = getattr(type(parameter), "__tensor_flatten__", None)
        own: Sequence[str] = () if flatten is None else flatten(parameter)[0]
        names = [
            name
            for name, value in attributes.items()
            # torch.compile marks tensors that it has seen.
            if (is_immutable(value) or isinstance(value, kinds)) and name not in own and not name.startswith("_dynamo_")
        ]
    return {where: mapping[key] for where, (mapping, key) in places_of(parameter, mappings, names).items()}


def _look_at(parameter: torch.Tensor, mappings: Sequence[Mappings]) -> dict[Any, Any]:
    return {where: fingerprint(value) for where, value in kept_of(parameter, mappings).items()}


def _keep_nothing(parameters: Iterable[torch.Tensor], mappings: Sequence[Mappings]) -> bool:
    return not mappings and not any(map(vars, parameters))


class BelongingsGuard(Stage):
    """Looks at what is kept of the parameters of a foreign optimizer after their updates, and when ``step()`` is
    called.

    Attributes:
        mappings: in which something may be kept by them; ``None``: as a step begins, those that the optimizer reaches.
        rests: whether updates are put back, and are none of the step's.
    """

    def __init__(self, name: str, mappings: Sequence[Mappings] | None = None) -> None:
        self.mappings = mappings
        self.rests = False
        self._name = name
        self._found: dict[int, tuple[torch.Tensor, dict[Any, Any]]] = {}

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        if self.mappings is None:
            self.mappings = mappings_of(optimizer)

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        yield
        self.note(update.owned)

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """They were updated. What is kept of them now takes the place of what was noted before."""
        if self.rests:
            return
        mappings = with_parameters(self.mappings) if self.mappings else []
        # As mostly there is nothing, and it is asked of each bucket, and in each step.
        kept = repeat(_NOTHING) if _keep_nothing(parameters, mappings) else (_look_at(p, mappings) for p in parameters)
        self._found.update(zip(map(id, parameters), zip(parameters, kept, strict=False), strict=False))

    def changed(self) -> str | None:
        """Something that is not as it was noted, in words; ``None``: nothing."""
        mappings = with_parameters(self.mappings or ())
        parameters, kept = zip(*self._found.values(), strict=True) if self._found else ((), ())
        if not any(kept) and _keep_nothing(parameters, mappings):
            return None
        for parameter, then in self._found.values():
            for where in unlike(_look_at(parameter, mappings), then):
                what = f"attribute {where!r} of" if isinstance(where, str) else "what the optimizer keeps by"
                return f"{what} a parameter of shape {tuple(parameter.shape)}"
        return None

    def require_unchanged(self, optimizer: Optimizer) -> None:
        if (what := self.changed()) is not None:
            raise HyperparameterChangedError(
                f"{what} was changed after backward had already stepped it with what {self._name} found there: by a "
                "hook of this backward? Use schedule='forward', which steps after backward"
            )

    def end_step(self) -> None:
        self._found, self.mappings = {}, None


_NOTHING: dict[Any, Any] = {}
