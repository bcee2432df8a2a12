"""Parameters and state as they were before a step, to be put back bit for bit, and gradients that are lent to it."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import grad_mode
from torch.optim import Optimizer

from instep._optim.foreign import parameters_reached_by
from instep._optim.kinds import held_by_classes, is_torchs_own, read_by_update
from instep._optim.shadow import GroupLayout
from instep._optim.stages import Stage, Update
from instep._optim.values import PER_PARAMETER, Contents, OutsideState, Restore, copy_of, restore, same_bits
from instep._torch.engine import is_captured
from instep._torch.versions import version_of
from instep.errors import UnsupportedOptimizerError, class_name

# Gradients that are lent to an update on trial: some optimizers write or replace the gradient in their ``step()``.


class LentGradient:
    """A copy that stands in a parameter's ``.grad`` while it is updated, and what the update makes of it."""

    __slots__ = ("_given", "_like", "_parameter", "_version")

    def __init__(self, parameter: torch.Tensor, like: torch.Tensor) -> None:
        self._parameter = parameter
        self._like = like
        self._given = parameter.grad = like.detach().clone()
        self._version = version_of(self._given)

    @property
    def given(self) -> torch.Tensor:
        return self._given

    def outcome(self) -> "GradientOutcome | None":
        """``None``: the update left it as it was."""
        now = self._parameter.grad
        written = version_of(self._given) != self._version or not _is_known_equal(self._given, self._like)
        if now is self._given and not written:
            return None
        return GradientOutcome(self._given if written else None, now is not self._given, now)


class GradientOutcome:
    """What an update made of its gradient: what it wrote into it, and what it put in its place."""

    __slots__ = ("_now", "_replaced", "_values")

    def __init__(self, values: torch.Tensor | None, replaced: bool, now: torch.Tensor | None) -> None:
        self._values = values
        self._replaced = replaced
        self._now = now

    @torch.no_grad()
    def of(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """What the plain loop has in ``.grad`` after the step, given its ``gradient`` of before. May be asked twice."""
        if self._values is not None:
            gradient.copy_(self._values)
        return self._now if self._replaced else gradient


def _is_known_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether nothing was written through ``.data``. On an accelerator the host would have to wait for the answer."""
    plain = type(a) is torch.Tensor and a.layout is torch.strided and a.device.type == "cpu"
    return plain and same_bits(a, b)


# Parameters and optimizer state as they were before a step, to be put back bit for bit.


class _Saved:
    """One parameter with its state. Tensors come back as the same objects, with their values."""

    def __init__(self, parameter: torch.Tensor, optimizer: Optimizer, host: bool) -> None:
        self.device = parameter.device
        self._parameter = parameter
        self._values = copy_of(parameter, host)
        state: dict[Any, Any] | None = optimizer.state.get(parameter)
        self._optimizer = weakref.ref(optimizer)
        self._mapping = optimizer.state
        self._version = grad_mode._unsafe_preserve_version_counter(parameter)
        contents = Contents(host)
        contents.known(parameter)
        self._entry = state
        self._entries: Restore | None = None if state is None else contents.of(state)

    def restore(self) -> None:
        optimizer = self._optimizer()
        mapping = self._mapping if optimizer is None else optimizer.state
        found = mapping.get(self._parameter)
        if self._entries is None:
            mapping.pop(self._parameter, None)
        elif found or found is self._entry:  # else somebody has taken it out meanwhile
            mapping[self._parameter] = self._entries()
        restore(self._parameter, self._values)
        # The bits are back: a graph that has saved them may run. torch has a private way to say so. After the state,
        # which may hold a view of the parameter.
        self._version.__exit__()


class UndoCopies(Stage):
    """Copies of the parameters and their state are taken before an update writes them. What an update keeps of single
    parameters outside of ``state`` nobody puts back: that is refused.

    Args:
        name: of the optimizer.
        copies: of all optimizers of the step.
    """

    def __init__(self, name: str, copies: "Undo") -> None:
        self._name = name
        self._copies = copies
        self._is_foreign = False
        self._reached: list[torch.Tensor] = []
        self._kept_in: str | None = None  # where the optimizer keeps values of single parameters, its state aside

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        self._is_foreign = not is_torchs_own(optimizer)
        self._reached = parameters_reached_by(optimizer, layout) if self._is_foreign else []

    def forget(self) -> None:
        self._reached = []

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        if is_captured(update.tensors[0].device):
            raise UnsupportedOptimizerError(
                "a CUDA graph is being recorded, and undo=True keeps copies that nothing has written before the graph "
                "is replayed: they could not be put back. Attach without undo before you record"
            )
        outside = self._look_outside(update) if self._is_foreign else None
        self._copies.save([*update.owned, *self._reached], update.optimizer)
        yield
        if outside is not None and (found := outside.restore()) is not None:
            self._kept_in, whole = found
            self.wrote_in_place |= not whole
            raise self._refusal(self._kept_in)

    def _look_outside(self, update: Update) -> OutsideState:
        optimizer = update.optimizer
        places = {f"its attribute {name!r}": value for name, value in read_by_update(optimizer).items()}
        for index, group in enumerate(optimizer.param_groups):
            places |= {f"param_groups[{index}][{k!r}]": v for k, v in group.items() if k not in PER_PARAMETER}
        before = OutsideState(places | held_by_classes(optimizer), update.owned)
        self._kept_in = self._kept_in or before.kept
        if self._kept_in is not None:
            raise self._refusal(self._kept_in)
        return before

    def _refusal(self, place: str) -> UnsupportedOptimizerError:
        return UnsupportedOptimizerError(
            f"{self._name} keeps values of single parameters in {place}, which undo does not put back. Use "
            "schedule='forward', or no undo"
        )


class Undo:
    """Copies taken before the first write of a step.

    Args:
        host: keep them in host memory, pinned where the parameters are on an accelerator.
    """

    def __init__(self, host: bool) -> None:
        self._host = host
        self._saved: dict[int, _Saved] = {}

    @property
    def devices(self) -> set[torch.device]:
        """Those with something saved."""
        return {saved.device for saved in self._saved.values()}

    @torch.no_grad()
    def save(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
        """Copy ``parameters`` and their state, on the current stream, those aside that are saved already."""
        for parameter in parameters:
            if id(parameter) not in self._saved:
                try:
                    self._saved[id(parameter)] = _Saved(parameter, optimizer, self._host)
                except TypeError as error:
                    raise UnsupportedOptimizerError(
                        f"{class_name(optimizer)} keeps in its state what cannot be copied ({error}), and so undo "
                        "could not put back. Use schedule='forward', or no undo"
                    ) from error

    @torch.no_grad()
    def restore(self, device: torch.device) -> None:
        """Put back all that was saved of ``device``, on the current stream, and forget its copies. Who is interrupted
        here does it again."""
        # The last first: an object that entries of several parameters refer to comes back as the first has found it.
        for key in reversed([key for key, saved in self._saved.items() if saved.device == device]):
            self._saved[key].restore()
            del self._saved[key]

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """These will not be put back any more."""
        for parameter in parameters:
            self._saved.pop(id(parameter), None)

    def forget_all(self) -> None:
        self._saved.clear()
