"""Parameters and state as they were before a step, to be put back bit for bit, and gradients that are lent to it."""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import grad_mode
from torch.optim import Optimizer

from instep._optim.belongings import Mappings, Places, mappings_of, places_of
from instep._optim.beside import Beside
from instep._optim.contents import Contents, copy_of, restore
from instep._optim.kinds import is_torchs_own
from instep._optim.own_object import Groups
from instep._optim.random_numbers import Generators
from instep._optim.reached import Tables, in_functions, reached_by
from instep._optim.shadow import GroupLayout, parameters_of
from instep._optim.stages import Stage, Update
from instep._optim.values import fingerprint, same_bits, unlike
from instep._torch.engine import is_captured
from instep._torch.versions import memory_of, version_of
from instep.errors import UnsupportedOptimizerError, class_name

# Gradients that are lent to an update on trial: some optimizers write or replace the gradient in their ``step()``.


class LentGradient:
    """A copy, ``given``, that stands in a parameter's ``.grad`` while that is updated, and what becomes of it."""

    __slots__ = ("_like", "_now", "_parameter", "_version", "_written", "given")

    def __init__(self, parameter: torch.Tensor, like: torch.Tensor) -> None:
        self._parameter = parameter
        self._like = like
        self.given = parameter.grad = like.detach().clone()
        self._version = version_of(self.given)

    def was_changed(self) -> bool:
        """The update is over: whether it has written the copy, or put something in its place."""
        given = self.given
        self._now = self._parameter.grad
        # A write through ``.data`` counts in no version. Of a device the host would have to wait for the answer.
        plain = type(given) is torch.Tensor and given.layout is torch.strided and given.device.type == "cpu"
        self._written = version_of(given) != self._version or not (plain and same_bits(given, self._like))
        return self._written or self._now is not given

    @torch.no_grad()
    def of(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """What the plain loop has in ``.grad`` after the step, given its ``gradient`` of before. May be asked twice."""
        if self._written:
            gradient.copy_(self.given)
        return gradient if self._now is self.given else self._now


class SavedParameter:
    """One parameter with its state, its attributes, and what is kept by it. Tensors come back as the same objects, with
    their values.

    Args:
        mappings: in which the optimizer may keep something by it.

    Attributes:
        left: what ``look`` has seen when its update was over; ``None``: it was not updated. What others write there
            from then on, a hook of this backward, say, is theirs: it is not put back.
    """

    def __init__(
        self, parameter: torch.Tensor, optimizer: Optimizer, host: bool, mappings: Sequence[Mappings] = ()
    ) -> None:
        self.device = parameter.device
        self._mappings = mappings
        self._parameter = parameter
        self._host = host
        self._values = copy_of(parameter, host)
        entry = _entry_of(optimizer, parameter)
        self._entry = None if entry is None else Contents(entry, host, parameter)  # None: there was none
        self._optimizer = weakref.ref(optimizer)
        self._state = optimizer.state
        self._version = grad_mode._unsafe_preserve_version_counter(parameter)
        self._belongings: dict[Any, tuple[Mappings, Any, Contents]] = {}
        if mappings or vars(parameter):
            self.keep_belongings()
        self.left: dict[Any, Any] | None = None

    def keep_belongings(self) -> None:
        """Its attributes, and what is kept by it, as they are now: its own update begins, and values were saved before,
        with another parameter's."""
        self._belongings = {
            where: (mapping, key, Contents(mapping[key], self._host, self._parameter))
            for where, (mapping, key) in self._places().items()
        }

    def look(self) -> dict[Any, Any]:
        """Its attributes, and what is kept by it, as they are now, to be compared."""
        return {where: fingerprint(mapping[key]) for where, (mapping, key) in self._places().items()}

    def _places(self) -> Places:
        # A tensor of a wrapper class has its values in its attributes; any other one what an optimizer may keep of it.
        attributes = {} if hasattr(type(self._parameter), "__tensor_flatten__") else vars(self._parameter)
        return places_of(self._parameter, self._mappings, attributes)

    def _restore_belongings(self) -> None:
        optimizer, left = self._optimizer(), self.left
        if optimizer is not None and is_torchs_own(optimizer):
            return  # which writes nothing there: what is new is a hook's
        # Without an update to compare with, all is put back.
        theirs = frozenset[Any]() if left is None else frozenset(unlike(self.look(), left))
        for where, (mapping, key) in self._places().items():
            if where not in theirs and where not in self._belongings:
                del mapping[key]
        for where, (mapping, key, contents) in self._belongings.items():
            if where not in theirs:
                mapping[key] = contents.put_back()

    def restore(self) -> None:
        optimizer = self._optimizer()
        state = self._state if optimizer is None else optimizer.state
        entry = state.get(self._parameter)
        if self._entry is None:
            state.pop(self._parameter, None)
        elif entry is self._entry.value or not (entry is None or (isinstance(entry, Mapping) and not entry)):
            # Else somebody has taken it out meanwhile.
            state[self._parameter] = self._entry.put_back()
        restore(self._parameter, self._values)
        self._restore_belongings()
        # The bits are back: a graph that has saved them may run. torch has a private way to say so. After the state,
        # which may hold a view of the parameter.
        self._version.__exit__()


def _entry_of(optimizer: Optimizer, parameter: torch.Tensor) -> dict[Any, Any] | None:
    try:
        return optimizer.state.get(parameter)
    except RuntimeError as error:  # a number of the same hash is there, and torch compares the two
        raise TypeError("an entry under the id() of a parameter") from error


class KeptByParameter:
    """What an optimizer keeps of single parameters in mappings by parameter, outside of its ``state``.

    Args:
        only: what belongs to these alone is copied, by ``id``; by default all.
    """

    def __init__(self, mappings: Iterable[Mappings], only: Container[int] | None = None) -> None:
        self._kept: list[tuple[Mappings, set[int], list[tuple[torch.Tensor, Contents]]]] = []
        for mapping in mappings:
            tensors = [key for key in mapping if isinstance(key, torch.Tensor) and (only is None or id(key) in only)]
            self._kept.append((mapping, set(map(id, mapping)), [(key, Contents(mapping[key])) for key in tensors]))

    def restore(self) -> None:
        """Put it back, and take out what was added, for whichever parameter."""
        for mapping, keys, kept in self._kept:
            for key in [key for key in mapping if isinstance(key, torch.Tensor) and id(key) not in keys]:
                del mapping[key]
            for key, contents in kept:
                mapping[key] = contents.put_back()  # not by update(), which a Counter's adds to


class BeforeUpdate:
    """What an update of a foreign optimizer may write, as it is now: these parameters with their state, what it keeps
    of them in ``mappings``, and what the gradients hold.

    Args:
        gradients: whether it finds any. Without one it may write what it keeps of others, too.

    Raises:
        TypeError: one could not be put back.
    """

    def __init__(
        self, optimizer: Optimizer, tensors: Iterable[torch.Tensor], mappings: Iterable[Mappings], *, gradients: bool
    ) -> None:
        every = {id(tensor): tensor for tensor in tensors}
        self._saved = [SavedParameter(tensor, optimizer, host=False) for tensor in every.values()]
        self._others = KeptByParameter(mappings, every if gradients else None)
        there = [tensor.grad for tensor in every.values() if tensor.grad is not None] if gradients else []
        self._gradients = [(gradient, copy_of(gradient, False)) for gradient in there]

    @torch.no_grad()
    def put_back(self) -> None:
        for saved in reversed(self._saved):
            saved.restore()
        self._others.restore()
        for gradient, values in self._gradients:
            restore(gradient, values)


def keep_beside(optimizer: Optimizer) -> Callable[[], None]:
    """A step may be stopped, or is left out: what ``step()`` may write beside parameters and their state is kept.

    Returns:
        A function that puts it back.

    Raises:
        UnsupportedOptimizerError: something could not be put back.
    """
    return _kept_beside(optimizer).put_all_back


def keep_all(optimizer: Optimizer) -> Callable[[], None]:
    """The same of a foreign optimizer that finds no gradient: it may decay parameters, count and draw nevertheless. A
    copy of all parameters and their state is kept."""
    beside, groups, parameters = _kept_beside(optimizer), Groups(optimizer), list(parameters_of(optimizer))
    tables = Tables(optimizer)
    generators = Generators.of(optimizer, {memory_of(p).device for p in parameters})
    try:
        tensors = [*parameters, *beside.unseen, *in_functions(optimizer)]
        before = BeforeUpdate(optimizer, tensors, mappings_of(optimizer), gradients=False)
    except TypeError as error:
        raise _cannot_leave_out(optimizer, str(error)) from error

    def put_back() -> None:
        groups.put_back()
        tables.put_back()
        beside.put_all_back()
        before.put_back()
        generators.restore()

    return put_back


def _kept_beside(optimizer: Optimizer) -> Beside:
    name = class_name(optimizer)
    beside = Beside(name)
    beside.begin(optimizer, GroupLayout(name, optimizer.param_groups))
    if (why := beside.look_deeper(optimizer)) is not None:
        raise _cannot_leave_out(optimizer, why)
    return beside


def _cannot_leave_out(optimizer: Optimizer, why: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"what {class_name(optimizer)}.step() may write in a step that is left out, or stopped, could not be put back: "
        f"{why}. Use no undo and schedule='forward', and leave such steps out in the loop"
    )


def _cannot_put_back(optimizer: Optimizer, parameter: torch.Tensor, error: TypeError) -> UnsupportedOptimizerError:
    where = f"a parameter of the shape {tuple(parameter.shape)}"
    try:
        entry = _entry_of(optimizer, parameter) or {}
    except TypeError:
        entry = {}
    for key, value in entry.items():
        try:
            Contents(value, but=parameter)
        except TypeError:
            where = f"state[{key!r}] of {where}"
            break
    return UnsupportedOptimizerError(
        f"undo could not put back what {class_name(optimizer)} writes, {where}: {error}. Use schedule='forward', or "
        "no undo"
    )


class UndoCopies(Stage):
    """Copies of the parameters and their state are taken before an update writes them, and of parameters that a foreign
    optimizer reaches in another way than by its groups.

    Args:
        copies: of all optimizers of the step.
    """

    def __init__(self, copies: "Undo") -> None:
        self._copies = copies
        self._cannot: str | None = None  # why the state cannot be put back, once it was met
        self._reached: list[torch.Tensor] = []
        self._mappings: list[Mappings] = []

    def begin(self, optimizer: Optimizer, layout: GroupLayout) -> None:
        if not is_torchs_own(optimizer):
            self._reached, self._mappings = reached_by(optimizer, layout), mappings_of(optimizer)

    def end_step(self) -> None:
        self._reached, self._mappings = [], []

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        if is_captured(update.tensors[0].device):
            raise UnsupportedOptimizerError(
                "a CUDA graph is being recorded, and undo=True keeps copies that nothing has written before the graph "
                "is replayed: they could not be put back. Attach without undo before you record"
            )
        if self._cannot is not None:
            raise UnsupportedOptimizerError(self._cannot)
        try:
            self._copies.save([*update.owned, *self._reached], update.optimizer, self._mappings)
        except UnsupportedOptimizerError as error:
            # The next backward says so before anything is written: this step may be left to ``optimizer.step()``.
            self._cannot = str(error)
            raise
        yield
        if not is_torchs_own(update.optimizer):
            self._copies.updated(update.owned)


class Undo:
    """Copies taken before the first write of a step.

    Args:
        host: keep them in host memory, pinned where the parameters are on an accelerator.
    """

    def __init__(self, host: bool) -> None:
        self._host = host
        self._saved: dict[int, SavedParameter] = {}

    @property
    def devices(self) -> set[torch.device]:
        return {saved.device for saved in self._saved.values()}

    @torch.no_grad()
    def save(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer, mappings: Sequence[Mappings] = ()) -> None:
        """Copy ``parameters`` and their state, on the current stream, those aside that are saved already.

        Args:
            mappings: in which the optimizer may keep something by them.

        Raises:
            UnsupportedOptimizerError: some could not be put back. None of them is saved.
        """
        new: dict[int, SavedParameter] = {}
        for parameter in parameters:
            try:
                if (saved := self._saved.get(id(parameter))) is None:
                    new[id(parameter)] = SavedParameter(parameter, optimizer, self._host, mappings)
                elif saved.left is None:
                    saved.keep_belongings()
            except TypeError as error:
                raise _cannot_put_back(optimizer, parameter, error) from error
        self._saved.update(new)

    def updated(self, parameters: Iterable[torch.Tensor]) -> None:
        """Their update is over."""
        for parameter in parameters:
            if (saved := self._saved.get(id(parameter))) is not None:
                saved.left = saved.look()

    @torch.no_grad()
    def restore(self, device: torch.device) -> None:
        """Put back all that was saved of ``device``, on the current stream, and forget its copies."""
        # The last first: an object that entries of several parameters refer to comes back as the first has found it.
        for key in reversed([key for key, saved in self._saved.items() if saved.device == device]):
            self._saved[key].restore()  # first: where it raises, the copy is there for another call
            del self._saved[key]

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """These will not be put back any more."""
        for parameter in parameters:
            self._saved.pop(id(parameter), None)

    def drop_all(self) -> None:
        self._saved.clear()
