"""Does an optimizer of unknown make update each parameter by itself? It is tried on made-up parameters at attach."""

import logging
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from instep._autograd.watch import plain_type
from instep._optim.calling import undecorated_step
from instep._optim.generators import Generators
from instep._optim.made_up import STEPS, WEATHERS, Spec, Weather, is_finite, options_of, specs_for
from instep._optim.shadow import alias_of
from instep._optim.stepper import Stepper
from instep._optim.twins import different, parameters_of, shared_state, step_plainly, twin_of
from instep._optim.undo import Undo
from instep.errors import UnsupportedOptimizerError

_logger = logging.getLogger("instep")

KEPT = 3
"""Steps that are put back, and taken again."""


@dataclass(frozen=True, slots=True)
class Separability:
    """What is known of whether an optimizer updates each parameter by itself.

    Attributes:
        optimizer: the name of its class.
        contained: whether it writes nothing but parameters and their own state, and takes other tensors of the same
            memory in their place: then its step can be put off.
        needs_closure: whether ``step()`` takes one, and fails without. Then it can only be called by the loop.
        returns: whether ``step()`` returns a value that depends on how much it finds to update.
        reads_loss: whether ``step()`` updates otherwise when a closure returns it a loss.
        keeps: what is left of a step that was put back, in words; ``None``: nothing, as far as trying tells.
        untried: what could not be tried on made-up parameters, with the reasons. Empty: separable, as far as trying
            tells, or known.
    """

    optimizer: str
    contained: bool
    untried: tuple[str, ...] = ()
    needs_closure: bool = False
    returns: bool = False
    reads_loss: bool = False
    keeps: str | None = None

    @property
    def unproven(self) -> str | None:
        """What is not proven, in a sentence; ``None``: nothing."""
        return f"unproven: {self.optimizer}: {'; '.join(self.untried)}" if self.untried else None


class _CannotBeTriedError(Exception):
    """The plain ``step()`` fails on made-up parameters."""


def separability_of(optimizer: Optimizer, *, in_backward: bool = False, on_trial: bool = False) -> Separability:
    """Step made-up parameters together, one by one and in other divisions, and compare bit for bit.

    torch's own optimizers are known and not asked. What was found of a class with the same options is remembered.
    What could not be tried is logged, and said in the result.

    Args:
        in_backward: whether it is to be stepped where nobody has a closure for it.
        on_trial: whether its steps may be put back.

    Raises:
        UnsupportedOptimizerError: the divisions differ, ``step()`` draws random numbers, moves parameters without
            gradient, or fails where none is left; with ``in_backward`` also if it returns another value there, or
            updates by the loss that a closure returns; with ``on_trial`` if a step that was put back leaves a trace.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return Separability(type(optimizer).__name__, contained=True)
    found = _remembered(optimizer)
    if isinstance(found, str):
        raise UnsupportedOptimizerError(found)
    if found.needs_closure and in_backward:
        raise UnsupportedOptimizerError(
            f"{found.optimizer}.step() fails without a closure, and backward has none for it. Use schedule='forward'"
        )
    if found.returns and in_backward:
        raise UnsupportedOptimizerError(
            f"{found.optimizer}.step() returns a value that depends on what it updates, and after backward nothing is "
            "left to update. Use schedule='forward'"
        )
    if found.reads_loss and in_backward:
        raise UnsupportedOptimizerError(
            f"{found.optimizer}.step() updates by the loss that its closure returns, and backward has none for it. Use "
            "schedule='forward'"
        )
    if found.keeps is not None and on_trial:
        raise UnsupportedOptimizerError(found.keeps)
    if found.unproven is not None:
        _logger.warning(
            "%s. Whether it updates each parameter by itself could not be tried; attach(…, check_steps=…) compares "
            "the first steps",
            found.unproven,
        )
    return found


_found: "weakref.WeakKeyDictionary[type, dict[Hashable, Separability | str]]" = weakref.WeakKeyDictionary()


def _remembered(optimizer: Optimizer) -> Separability | str:
    known = _found.setdefault(type(optimizer), {})
    try:
        key = _key(optimizer)
    except TypeError:
        return _tried(optimizer)
    if key not in known:
        known[key] = _tried(optimizer)
    return known[key]


def _key(optimizer: Optimizer) -> Hashable:
    """What the outcome depends on. ``TypeError``: something that cannot be told from something else."""
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state", "step") and not name.startswith("_optimizer_")
    }
    groups = [options_of(optimizer, group) for group in optimizer.param_groups]
    classes = sorted(_own_classes(optimizer))
    specs = tuple(map(tuple, specs_for(optimizer)))
    return undecorated_step(type(optimizer)), specs, _hashable(groups), _hashable(attributes), tuple(classes)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, dict):
        return dict, tuple((_hashable(key), _hashable(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_hashable, value))
    if isinstance(value, torch.Tensor) and value.numel() <= 16:
        return value.dtype, value.device, repr(value.tolist())
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)):
        return type(value), value
    raise TypeError


def _own_classes(optimizer: Optimizer) -> set[str]:
    """Of parameters that made-up ones do not have."""
    kinds = {plain_type(p) for p in parameters_of(optimizer)}
    return {kind.__name__ for kind in kinds - {torch.Tensor, torch.nn.Parameter}}


def _tried(optimizer: Optimizer) -> Separability | str:
    """The finding, or the words with which to refuse."""
    generators = Generators({p.device for p in parameters_of(optimizer)}, [optimizer])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Probe(optimizer).run()
    except UnsupportedOptimizerError as error:
        return str(error)
    except RecursionError:
        return (
            f"{type(optimizer).__name__} keeps values that hold themselves, which cannot be compared. Use this "
            "optimizer without instep"
        )
    finally:
        generators.restore()


_BUSY = "whether step() draws random numbers could not be told from what other threads draw"

Divide = Callable[[Sequence[Any]], Iterable[Sequence[Any]]]


def _one_by_one(parameters: Sequence[Any]) -> Iterator[Sequence[Any]]:
    yield from ([parameter] for parameter in reversed(parameters))


def _in_pairs(parameters: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The last with the first, and so on: of several groups, backwards."""
    half = len(parameters) // 2
    yield from zip(reversed(parameters[-half:]), parameters[:half], strict=True)
    yield parameters[half : len(parameters) - half]


def _every_other(parameters: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The rest is left to ``step()``."""
    yield from ([parameter] for parameter in parameters[::2])


_DIVISIONS: dict[str, Divide] = {
    "one by one": _one_by_one,
    "in pairs": _in_pairs,
    "in part": _every_other,
}


class MadeUpRun:
    """Made-up parameters of one optimizer, and what steps them."""

    def __init__(self, optimizer: Optimizer, specs: Sequence[Sequence[Spec]]) -> None:
        numbers = iter(range(sum(map(len, specs))))
        groups = [
            {**options_of(optimizer, group), "params": [spec.make(next(numbers)) for spec in mine]}
            for group, mine in zip(optimizer.param_groups, specs, strict=True)
        ]
        for number, (group, theirs) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            if "param_names" in theirs:
                group["param_names"] = [f"made_up.{number}.{at}" for at in range(len(group["params"]))]
        self.twin = twin_of(optimizer, groups, shared_state(optimizer), {id(p): p for p in parameters_of(optimizer)})
        self.parameters = list(parameters_of(self.twin))
        self.contained = True
        self.replaces_gradients = False
        self.returned: Any = None

    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def step(self) -> None:
        self.returned = step_plainly(self.twin)

    def step_divided(self, divide: Divide, *, alias: bool = False) -> None:
        """As an attached loop does: buckets, then the user's ``step()``, which finds what is left."""
        stepper = Stepper(self.twin)
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
            raise UnsupportedOptimizerError(_raises_without_gradients(self.twin, error)) from error
        stepper.commit()

    def step_in_vain(self) -> None:
        """As an attached loop does with ``undo``, which then has the step put back."""
        stepper, undo = Stepper(self.twin), Undo(host=False)
        parameters = [p for p in self.parameters if p.grad is not None]
        if not parameters:
            return
        before = stepper.look_elsewhere(parameters)
        undo.save([*parameters, *stepper.reached()], self.twin)
        stepper.step(parameters)
        stepper.require_all_in_state(before)
        for device in undo.devices:
            undo.restore(device)
        stepper.abort()

    def differs_from(self, other: "MadeUpRun") -> str | None:
        """The first thing that does, in words."""
        for mine, its in zip(self.parameters, other.parameters, strict=True):
            if different(mine, its):
                return f"a parameter of shape {tuple(mine.shape)}"
            if different(self.twin.state.get(mine), other.twin.state.get(its)):
                return f"the state of a parameter of shape {tuple(mine.shape)}"
        if different(*map(shared_state, (self.twin, other.twin))):
            return "what it keeps in its state beside parameters"
        if different(*map(_options, (self.twin, other.twin))):
            return "what it keeps in its param_groups"
        return None


class _Probe:
    """Tries one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._specs = specs_for(optimizer)
        self._untried: list[str] = []
        self._contained = True
        self._returns = False
        # Kept until the end: an optimizer may remember parameters by their ids.
        self._runs: list[MadeUpRun] = []

    def run(self) -> Separability:
        if self._needs_closure():
            return Separability(self._name, False, ("step() needs a closure",), needs_closure=True)
        self._leave_out_what_fails()
        if any(self._specs):
            first, *others = WEATHERS
            self._try(first, _DIVISIONS)
            for weather in others:
                self._try(weather, ["one by one"])
        self._untried += [
            f"its parameters of class {name} were tried as plain ones" for name in sorted(_own_classes(self._optimizer))
        ]
        reads_loss = any(self._specs) and self._reads_loss()
        contained = self._contained and any(self._specs) and not self._holds_much() and self._takes_aliases()
        contained = contained and not (self._returns or reads_loss)
        return Separability(
            self._name,
            contained,
            tuple(self._untried),
            returns=self._returns,
            reads_loss=reads_loss,
            keeps=self._keeps() if any(self._specs) else None,
        )

    def _run_anew(self) -> MadeUpRun:
        run = MadeUpRun(self._optimizer, self._specs)
        self._runs.append(run)
        return run

    def _keeps(self) -> str | None:
        """What is left of steps that were put back, wherever it is kept: each is taken again, beside steps that are
        taken once."""
        once, again = self._run_anew(), self._run_anew()
        for step in range(KEPT):
            gradients = WEATHERS[0].gradients(self._flat, step)
            once.give(gradients)
            again.give(gradients)
            try:
                once.step()
                again.step_in_vain()
                again.give(gradients)
                again.step()
            except UnsupportedOptimizerError as error:
                return str(error)
            except Exception as error:
                return (
                    f"{self._name}.step() raises after a step that was put back ({_in_short(error)}): it keeps values "
                    "of single parameters outside of its state. Use schedule='forward', or no undo"
                )
            if (difference := again.differs_from(once)) is not None:
                return (
                    f"{self._name} keeps values of single parameters outside of its state, which undo does not put "
                    f"back: a step that was put back and taken again differs in {difference}. Use schedule='forward', "
                    "or no undo"
                )
        return None

    @property
    def _flat(self) -> list[Spec]:
        return [spec for mine in self._specs for spec in mine]

    def _needs_closure(self) -> bool:
        """Raise if the first ``step()``, without gradients, fails for another reason."""
        failure = self._failure(given=False)
        if failure is None:
            return False
        if self._failure(given=True) is not None and self._failure(lambda: torch.ones(()), given=True) is None:
            return True
        raise UnsupportedOptimizerError(_raises_without_gradients(self._optimizer, failure)) from failure

    def _failure(self, *closure: Callable[[], torch.Tensor], given: bool) -> Exception | None:
        """What the first step raises, on an optimizer that can be copied."""
        try:
            run = self._run_anew()
        except Exception:
            return None  # said below
        if given:
            run.give(WEATHERS[1].gradients(self._flat, 0))
        try:
            step_plainly(run.twin, *closure)
        except Exception as error:
            return error
        return None

    def _leave_out_what_fails(self) -> None:
        """Parameters on which the plain ``step()`` fails are not tried."""
        reason = self._fails(self._specs)
        if reason is None:
            return
        distinct = dict.fromkeys(spec for mine in self._specs for spec in mine)
        failing = {spec: why for spec in distinct if (why := self._fails(self._only(spec))) is not None}
        self._specs = [[spec for spec in mine if spec not in failing] for mine in self._specs]
        if not any(self._specs) or self._fails(self._specs) is not None:
            # Some take no parameters but those that fit one another.
            self._specs = specs_for(self._optimizer, alike=True)
            if self._fails(self._specs) is not None:
                self._specs = [[] for _ in self._specs]
            self._untried.append(f"step() fails on made-up parameters ({reason})")
            return
        reasons = dict.fromkeys(failing.values())
        self._untried += [
            f"step() fails on made-up parameters {', '.join(str(s) for s in failing if failing[s] == why)} ({why})"
            for why in reasons
        ]

    def _only(self, wanted: Spec) -> list[list[Spec]]:
        return [[spec for spec in mine if spec == wanted] for mine in self._specs]

    def _fails(self, specs: Sequence[Sequence[Spec]]) -> str | None:
        """Why two plain steps do."""
        weather = Weather((1.0, 1.0))
        try:
            run = MadeUpRun(self._optimizer, specs)
            self._runs.append(run)
            for step in range(2):
                run.give(weather.gradients([spec for mine in specs for spec in mine], step))
                run.step()
        except Exception as error:
            return _in_short(error)
        return None

    def _try(self, weather: Weather, divisions: Iterable[str]) -> None:
        together = self._run_anew()
        divided = {how: self._run_anew() for how in divisions}
        drawn = []
        for step in range(len(weather.scales)):
            gradients = weather.gradients(self._flat, step)
            generators = Generators({spec.device for spec in self._flat}, [together.twin])
            try:
                self._step_together(together, gradients)
            except _CannotBeTriedError as error:
                if weather.odd:
                    return  # so does the loop's
                self._untried.append(f"step() fails with {weather} ({error})")
                return
            drawn.append(generators.drawn())
            if drawn[-1] == "yes":
                generators.restore()  # while it is sure that nobody else has drawn
                raise UnsupportedOptimizerError(
                    f"{self._name} draws random numbers in step(): bucket by bucket they would go to other parameters "
                    "than in the plain loop. Use this optimizer without instep"
                )
            for how, run in divided.items():
                run.give(gradients)
                self._step(run, how)
                self._require_same(together, run, f"step {step + 1} with {weather}", how)
                self._returns |= different(together.returned, run.returned)
        self._contained = self._contained and all(run.contained for run in divided.values())
        if set(drawn) != {"no"} and _BUSY not in self._untried:
            self._untried.append(_BUSY)
        if not weather.odd and not all(map(is_finite, together.parameters)):
            self._untried.append(f"with {weather} it makes parameters NaN or infinite")

    def _step_together(self, run: MadeUpRun, gradients: Sequence[torch.Tensor | None]) -> None:
        run.give(gradients)
        idle = [p for p in run.parameters if p.grad is None]
        before = [p.detach().clone() for p in idle]
        try:
            run.step()
        except Exception as error:
            raise _CannotBeTriedError(_in_short(error)) from error
        for entry in map(run.twin.state.get, run.parameters):
            if entry is not None and not isinstance(entry, dict):
                raise UnsupportedOptimizerError(
                    f"{self._name} keeps the state of a parameter as a {type(entry).__name__}. instep takes dicts "
                    "there, as torch's own optimizers have: state[p] = {...}"
                )
        if any(map(different, idle, before)):
            raise UnsupportedOptimizerError(
                f"{self._name}.step() changes parameters that have no gradient (weight decay of all parameters?): it "
                "would change them once with each bucket, and once more in step(). Use this optimizer without instep"
            )

    def _step(self, run: MadeUpRun, how: str) -> None:
        try:
            run.step_divided(_DIVISIONS[how])
        except UnsupportedOptimizerError:
            raise
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"{self._name} cannot be stepped bucket by bucket: on a few of its parameters ({how}) its step() "
                f"raises {_in_short(error)}. Use this optimizer without instep"
            ) from error

    def _require_same(self, together: MadeUpRun, run: MadeUpRun, when: str, how: str) -> None:
        if (what := run.differs_from(together)) is not None:
            raise UnsupportedOptimizerError(
                f"{self._name} couples parameters: stepped {how} they get other values than stepped together (in "
                f"{when}: {what}), so stepping during backward would differ from the plain loop. Use this optimizer "
                "without instep"
            )

    def _reads_loss(self) -> bool:
        """Whether steps with a closure that returns a loss, which changes, are others than steps without."""
        without, given = self._run_anew(), self._run_anew()
        for step in range(STEPS):
            gradients = WEATHERS[1].gradients(self._flat, step)
            loss = partial(torch.tensor, 10.0 ** (step % 4))
            try:
                without.give(gradients)
                without.step()
                given.give(gradients)
                step_plainly(given.twin, loss)
            except Exception:
                return False  # so does the loop's
        return given.differs_from(without) is not None

    def _takes_aliases(self) -> bool:
        """Whether it can be stepped on other tensors of the same memory. Some know a parameter by the object it is."""
        together, aliased = self._run_anew(), self._run_anew()
        for step in range(STEPS):
            gradients = WEATHERS[0].gradients(self._flat, step)
            together.give(gradients)
            aliased.give(gradients)
            try:
                together.step()
                aliased.step_divided(_one_by_one, alias=True)
            except Exception:
                return False
        # The loop would find the old gradients in .grad.
        return not aliased.replaces_gradients and aliased.differs_from(together) is None

    def _holds_much(self) -> bool:
        """Whether an attribute holds what the loop may change before a step that is put off is applied."""
        return any(
            isinstance(value, (torch.Tensor, dict, list, set))
            for name, value in vars(self._optimizer).items()
            if name not in ("param_groups", "state", "defaults") and not name.startswith("_optimizer_")
        )


def _raises_without_gradients(optimizer: Optimizer, error: Exception) -> str:
    return (
        f"{type(optimizer).__name__}.step() raises when no parameter has a gradient ({_in_short(error)}), as it is "
        "after backward has stepped them all. Use this optimizer without instep"
    )


def _in_short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:150]}" if text else type(error).__name__


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
