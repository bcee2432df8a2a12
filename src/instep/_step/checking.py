"""The first steps taken both ways: beside instep's own, copies are stepped by the optimizer's plain ``step()``.

What a step needs is copied where it is about to be used: each parameter with its state and the gradient that is
applied right before its bucket is stepped, or, where ``optimizer.step()`` is left to step it, right before that.
"""

import copy
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import STEPPED_WHOLE
from instep._optim.local_shard import LocalShard
from instep._optim.parameters import AttachedParameter, calls_of
from instep._optim.random_numbers import Generators
from instep._optim.shadow import autocast_of, clone_of, parameters_of, shared_state, step_plainly
from instep._optim.stages import Stage, Update
from instep._optim.stepper import Stepper
from instep._optim.values import values_differ
from instep._torch.versions import memory_of
from instep._torch.watch import plain_type
from instep.errors import UnsupportedOptimizerError

Gradient = Callable[[AttachedParameter], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Copy:
    """One parameter, or this rank's shard of it, as it was before the step, with the gradient that is applied."""

    tensor: torch.Tensor
    shard: LocalShard | None
    state: dict[Any, Any] | None


class _Step:
    """One optimizer's running step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.copies: dict[int, _Copy] = {}
        self.comparable = True
        own = {id(p): p for p in parameters_of(optimizer)}
        # In the place of parameters their ids: what stands in for them is made bucket by bucket.
        groups = [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups]
        self._before = clone_of(optimizer, groups, shared_state(optimizer), own)
        self._stepped: Optimizer | None = None
        self.autocast: torch.dtype | None = None
        self.drew = False

    def keep(
        self,
        tensors: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        shards: Sequence[LocalShard | None] | None,
        state: Mapping[Any, Any],
    ) -> None:
        for tensor, parameter, shard in zip(tensors, parameters, shards or [None] * len(tensors), strict=True):
            self.add(parameter, tensor, tensor.grad, shard, state)

    def add(
        self,
        parameter: torch.Tensor,
        tensor: torch.Tensor,
        gradient: torch.Tensor | None,
        shard: LocalShard | None,
        state: Mapping[Any, Any],
    ) -> None:
        stand_in = _stand_in(parameter, tensor)
        stand_in.grad = None if gradient is None else gradient.detach().clone()
        entry = state.get(parameter)
        if entry is not None:
            entry = {key: value if shard is None else shard.of_state(value) for key, value in entry.items()}
            entry = copy.deepcopy(entry, {id(parameter): stand_in})
        self.copies[id(parameter)] = _Copy(stand_in, shard, entry)

    def plain(self) -> Optimizer:
        """The copies, after a plain ``step()``. The loop's generators are left as they were."""
        if self._stepped is None:
            self._stepped = self._make()
            devices = {p.device for p in parameters_of(self._stepped)}
            generators = Generators(devices, [self._stepped])
            try:
                step_plainly(self._stepped, autocast=self.autocast)
                self.drew = generators.drawn() == "yes"
            finally:
                generators.restore()
        return self._stepped

    def _make(self) -> Optimizer:
        tensors = {key: one.tensor for key, one in self.copies.items()}
        groups = [{**group, "params": [tensors[key] for key in group["params"]]} for group in self._before.param_groups]
        twin = clone_of(self._before, groups, self._before.state, tensors)
        twin.state.update((one.tensor, one.state) for one in self.copies.values() if one.state is not None)
        return twin


class Check:
    """The comparison of the first steps of one attachment with plain ones.

    Args:
        steps: how many to compare.

    Attributes:
        done: how many have been.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.done = 0
        self._running: dict[Stepper, _Step] = {}
        self._compared = False

    @property
    def due(self) -> bool:
        """Whether the running step is to be compared."""
        return self.done < self.steps

    def keep(self, stepper: Stepper, update: Update) -> None:
        """An update is about to run, with what is in the ``.grad`` of its tensors. The update's own optimizer is asked
        for state: who asks the user's may have to wait for this very step."""
        if self.due:
            with _named(stepper):
                self._step_of(stepper).keep(update.tensors, update.owned, update.shards, update.optimizer.state)

    def keep_rest(
        self,
        stepper: Stepper,
        mine: Iterable[AttachedParameter],
        bucketed: Container[AttachedParameter],
        gradient: Gradient,
    ) -> None:
        """The optimizer's ``step()`` is about to run: it may step whatever no bucket does.

        Args:
            mine: the attached parameters of this optimizer.
            bucketed: those of them that are stepped in buckets.
        """
        if not self.due:
            return
        with _named(stepper):
            self._keep_rest(stepper, list(mine), bucketed, gradient)

    def _keep_rest(
        self,
        stepper: Stepper,
        mine: Sequence[AttachedParameter],
        bucketed: Container[AttachedParameter],
        gradient: Gradient,
    ) -> None:
        optimizer, step = stepper.optimizer(), self._step_of(stepper)
        step.autocast = autocast_of(mine[0].get().device.type)
        given = {a: gradient(a) for a in mine if a not in bucketed}
        rest = [(a, g) for a, g in given.items() if g is not None]
        for call in calls_of([a for a, _ in rest], [g for _, g in rest], alias=False):
            step.keep(call.tensors, call.parameters, call.shards, optimizer.state)
        for attached in given:
            parameter, shard = attached.get(), attached.shard
            if id(parameter) not in step.copies:
                whole = parameter if shard is None else shard.of(parameter)
                assert whole is not None, "a part is made for its parameter's own layout"
                step.add(parameter, whole, None, shard, optimizer.state)
        known = {id(a.peek()) for a in mine}
        for parameter in parameters_of(optimizer):
            if id(parameter) not in known:  # not the model's
                step.add(parameter, parameter, parameter.grad, None, optimizer.state)

    def error(
        self, stepper: Stepper, number: int, parameters: Sequence[AttachedParameter], *, groups: bool = True
    ) -> UnsupportedOptimizerError | None:
        """What differs first between instep's step and a plain one; ``None`` if nothing does, or nothing was kept.

        Args:
            number: of the step.
            parameters: to compare.
            groups: whether the optimizer's groups and shared state are those of after the step, too.
        """
        step = self._running.get(stepper)
        if step is None or not step.copies:
            return None
        optimizer = stepper.optimizer()
        try:
            plain = step.plain()
            with torch._C.DisableTorchFunctionSubclass():
                difference = _difference(step, optimizer, plain, parameters, groups)
        except KeyboardInterrupt:
            del self._running[stepper]  # the copies may have been stepped in part: not compared
            raise
        except Exception as error:
            return UnsupportedOptimizerError(
                f"check_steps: {stepper.name}.step() could not be taken on copies of step {number} "
                f"({type(error).__name__}: {error}). Leave out check_steps"
            )
        if groups:
            del self._running[stepper]
            self._compared = True
        if not step.drew and difference is None:
            return None
        found = difference or "nothing that is compared"
        why = "draws random numbers in step()" if step.drew else "couples parameters"
        instead = "random='keyed' with a seed gives each parameter draws of its own. " if step.drew else ""
        return UnsupportedOptimizerError(
            f"{stepper.name} {why}: step {number} was taken again on copies, with the same gradients, by its plain "
            f"step(), and differs from it in {found}. {instead}{STEPPED_WHOLE}, and leave out check_steps"
        )

    def stepped(self) -> None:
        """A step has been committed."""
        self.done += self._compared and self.due
        self.forget()

    def forget(self) -> None:
        """The running step is left to the plain loop, or given up."""
        self._running.clear()
        self._compared = False

    def __str__(self) -> str:
        return f"checked {self.done} steps" if not self.due else f"checked {self.done} of {self.steps} steps"

    def _step_of(self, stepper: Stepper) -> _Step:
        if stepper not in self._running:
            self._running[stepper] = _Step(stepper.optimizer())
        return self._running[stepper]


class CheckedSteps(Stage):
    """Each update of the steps that are compared is copied before: see ``Check``.

    Args:
        stepper: of the user's own optimizer, which has this; held weakly.
    """

    place = 1  # after the copies of ``undo``

    def __init__(self, check: Check, stepper: Stepper) -> None:
        self._check = check
        self._stepper = weakref.ref(stepper)

    @contextmanager
    def around(self, update: Update) -> Iterator[None]:
        if (stepper := self._stepper()) is not None:
            self._check.keep(stepper, update)
        yield


@contextmanager
def _named(stepper: Stepper) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"check_steps: {stepper.name} could not be copied ({type(error).__name__}: {error}). Leave out check_steps"
        ) from error


def _difference(
    step: _Step, optimizer: Optimizer, plain: Optimizer, parameters: Sequence[AttachedParameter], groups: bool
) -> str | None:
    for attached in parameters:
        parameter = attached.get()
        if (one := step.copies.get(id(parameter))) is None:
            continue
        if values_differ(parameter if one.shard is None else one.shard.of(parameter), one.tensor):
            return f"parameter {attached.spec.name!r}"
        entry, its = optimizer.state.get(parameter) or {}, plain.state.get(one.tensor) or {}
        if one.shard is not None:
            entry = {key: one.shard.of_state(value) for key, value in entry.items()}
        for key in _different_keys(entry, its):
            return f"the state {key!r} of parameter {attached.spec.name!r}"
    if not groups:
        return None
    for index, (group, its) in enumerate(zip(optimizer.param_groups, plain.param_groups, strict=True)):
        for key in _different_keys({**group, "params": None}, {**its, "params": None}):
            return f"param_groups[{index}][{key!r}]"
    for key in _different_keys(shared_state(optimizer), shared_state(plain)):
        return f"the state {key!r}"
    return None


def _different_keys(mine: Mapping[Any, Any], its: Mapping[Any, Any]) -> Iterator[Any]:
    for key in dict.fromkeys([*mine, *its]):
        if key not in mine or key not in its or values_differ(mine[key], its[key]):
            yield key


def _stand_in(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` that its optimizer takes for ``parameter``."""
    with torch._C.DisableTorchFunctionSubclass():
        copied = tensor.detach().clone()
    kind = plain_type(parameter)
    if memory_of(copied) is copied and issubclass(kind, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, requires_grad=False)
        copied.__class__ = kind
    copied.requires_grad_(parameter.requires_grad)
    vars(copied).update(copy.deepcopy(vars(parameter), {id(parameter): copied}))  # some keep their state there
    return copied
