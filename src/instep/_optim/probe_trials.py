"""Trials of an optimizer on made-up parameters, each by comparing two runs bit for bit."""

import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch.optim import Optimizer

from instep._optim.foreign import draws_in_step, draws_out_of_sight
from instep._optim.kinds import STEPPED_WHOLE, has_ids
from instep._optim.offload import DeviceEntries
from instep._optim.random_numbers import Generators, TorchGenerators
from instep._optim.shadow import autocast_of, parameters_of, step_plainly
from instep._optim.synthetic import (
    DIVISIONS,
    GRADIENT_PATTERNS,
    STEPS,
    GradientPattern,
    Spec,
    SyntheticRun,
    SyntheticRuns,
    in_short,
    is_finite,
    one_by_one,
    specs_for,
)
from instep._optim.values import values_differ
from instep.errors import UnsupportedOptimizerError

# An autocast block around ``optimizer.step()``: does it change the update? In backward, and behind the next forward,
# updates run outside of it.


_found: "weakref.WeakKeyDictionary[Optimizer, dict[torch.dtype, bool]]" = weakref.WeakKeyDictionary()


def autocast_matters(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step()``, called here, would compute other numbers than outside of every autocast block.

    Tried on made-up parameters, once for each optimizer and dtype of autocast. Where that fails, the answer is yes.
    """
    first = next(parameters_of(optimizer), None)
    dtype = None if first is None else autocast_of(first.device.type)
    if dtype is None:
        return False
    found = _found.setdefault(optimizer, {})
    if dtype not in found:
        found[dtype] = _tried(optimizer, dtype)
    return found[dtype]


def _tried(optimizer: Optimizer, dtype: torch.dtype) -> bool:
    generators = Generators({p.device for p in parameters_of(optimizer)}, [optimizer])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            specs = specs_for(optimizer)
            answer = _differs(optimizer, specs, dtype)
            if answer is None:  # some take no parameters but those that fit one another
                answer = _differs(optimizer, specs_for(optimizer, alike=True), dtype)
            return answer is not False
    finally:
        generators.restore()


def _differs(optimizer: Optimizer, specs: list[list[Spec]], dtype: torch.dtype) -> bool | None:
    """``None``: made-up parameters cannot be stepped."""
    generators = TorchGenerators(spec.device for mine in specs for spec in mine)
    try:
        outside, inside = SyntheticRun(optimizer, specs), SyntheticRun(optimizer, specs)
        for step in range(STEPS):
            gradients = GRADIENT_PATTERNS[1].gradients([spec for mine in specs for spec in mine], step)
            outside.give(gradients)
            inside.give(gradients)
            generators.seed(step)
            outside.step()
            generators.seed(step)
            step_plainly(inside.twin, autocast=dtype)
    except Exception:
        return None
    finally:
        generators.restore()
    return inside.differs_from(outside) is not None


# Trials of an optimizer on made-up parameters, each by comparing two runs bit for bit.


KEPT = 3
"""Steps that are put back, and taken again."""

_BUSY = "whether step() draws random numbers could not be told from what other threads draw"


class CannotBeTriedError(Exception):
    """The plain ``step()`` fails on made-up parameters."""


class ProbeTrial:
    """What the trials of an optimizer find, step after step.

    Args:
        runs: makes the parameters.

    Attributes:
        untried: what could not be tried, with the reasons.
        contained: whether no update wrote anything but parameters and their own state.
        returns: whether ``step()`` returned other values than when it updated all parameters.
    """

    def __init__(self, runs: SyntheticRuns) -> None:
        self._runs = runs
        self._name = runs.name
        self.untried: list[str] = []
        self.contained = True
        self.returns = False

    def _could_not(self, reason: str) -> None:
        if reason not in self.untried:
            self.untried.append(reason)

    def _fails(self, weather: GradientPattern, error: CannotBeTriedError) -> None:
        if not weather.odd:  # else so does the loop's
            self._could_not(f"step() fails with {weather} ({error})")

    def _require_finite(self, weather: GradientPattern, parameters: Iterable[torch.Tensor]) -> None:
        if not weather.odd and not all(map(is_finite, parameters)):
            self._could_not(f"with {weather} it makes parameters NaN or infinite")


class DivisionTrial(ProbeTrial):
    """Steps parameters together, and beside that divided into buckets: the results must be the same."""

    def run(self, weather: GradientPattern, divisions: Iterable[str]) -> None:
        """Take the steps of ``weather`` together, and divided in each of these ways.

        Raises:
            UnsupportedOptimizerError: a result differs, or the optimizer does what excludes stepping in buckets.
        """
        together = self._runs.anew()
        divided = {how: self._runs.anew() for how in divisions}
        drawn = []
        for step in range(len(weather.scales)):
            gradients = self._runs.gradients(weather, step)
            generators = Generators(self._runs.devices, [together.twin])
            try:
                step_together(self._name, together, gradients)
            except CannotBeTriedError as error:
                self._fails(weather, error)
                return
            drawn.append(generators.drawn())
            if drawn[-1] == "yes":
                generators.restore()  # while it is sure that nobody else has drawn
                raise draws_in_step(self._name)
            for how, run in divided.items():
                run.give(gradients)
                step_divided(self._name, run, how)
                self._require_same(together, run, weather, step, how)
                self.returns |= values_differ(together.returned, run.returned)
        self.contained = self.contained and all(run.contained for run in divided.values())
        if set(drawn) != {"no"}:
            self._could_not(_BUSY)
        self._require_finite(weather, together.parameters)

    def _require_same(
        self, together: SyntheticRun, run: SyntheticRun, weather: GradientPattern, step: int, how: str
    ) -> None:
        if (what := run.differs_from(together)) is None:
            return
        if self._differs_from_itself(weather, step):
            raise draws_out_of_sight(self._name)
        raise UnsupportedOptimizerError(
            f"{self._name} couples parameters: stepped {how} they get other values than stepped together (in step "
            f"{step + 1} with {weather}: {what}), so stepping them apart would differ from the plain loop. "
            f"{STEPPED_WHOLE}"
        )

    def _differs_from_itself(self, weather: GradientPattern, last: int) -> bool:
        """Whether two runs of the plain ``step()`` come out differently: as of one that draws from a generator which
        nothing that it holds refers to."""
        one, other = self._runs.anew(), self._runs.anew()
        for step in range(last + 1):
            for run in (one, other):
                step_together(self._name, run, self._runs.gradients(weather, step))
        return one.differs_from(other) is not None


def step_together(name: str, run: SyntheticRun, gradients: Sequence[torch.Tensor | None]) -> None:
    """Call the plain ``step()`` of the optimizer called ``name``, and look at what that has done.

    Raises:
        CannotBeTriedError: it has raised.
        UnsupportedOptimizerError: it has done what excludes stepping in buckets.
    """
    run.give(gradients)
    idle = [p for p in run.parameters if p.grad is None]
    before = [p.detach().clone() for p in idle]
    try:
        run.step()
    except Exception as error:
        raise CannotBeTriedError(in_short(error)) from error
    if has_ids(run.twin.state, run.parameters):
        raise UnsupportedOptimizerError(
            f"{name} keeps the state of a parameter under its id(). instep takes it under the parameter, as torch's "
            f"own optimizers have it: state[p] = {{...}}. {STEPPED_WHOLE}"
        )
    for entry in map(run.twin.state.get, run.parameters):
        if entry is not None and not isinstance(entry, dict):
            raise UnsupportedOptimizerError(
                f"{name} keeps the state of a parameter as a {type(entry).__name__}. instep takes dicts there, as "
                f"torch's own optimizers have: state[p] = {{...}}. {STEPPED_WHOLE}"
            )
    if any(map(values_differ, idle, before)):
        raise UnsupportedOptimizerError(
            f"{name}.step() changes parameters that have no gradient (weight decay of all parameters?): it would "
            f"change them once with each bucket, and once more in step(). {STEPPED_WHOLE}"
        )


def step_divided(name: str, run: SyntheticRun, how: str) -> None:
    """Step as an attached loop does, divided in this way.

    Raises:
        UnsupportedOptimizerError: that cannot be done.
    """
    try:
        run.step_divided(DIVISIONS[how])
    except UnsupportedOptimizerError:
        raise
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"{name} cannot be stepped bucket by bucket: on a few of its parameters ({how}) its step() raises "
            f"{in_short(error)}. {STEPPED_WHOLE}"
        ) from error


def reads_loss(runs: SyntheticRuns) -> bool:
    """Whether steps with a closure, whose loss changes from step to step, update otherwise than steps without."""
    without, given = runs.anew(), runs.anew()
    for step in range(STEPS):
        gradients = runs.gradients(GRADIENT_PATTERNS[1], step)
        loss = partial(torch.tensor, 10.0 ** (step % 4))
        try:
            without.give(gradients)
            without.step()
            given.give(gradients)
            given.step(loss)
        except Exception:
            return False  # so does the loop's
    return given.differs_from(without) is not None


def takes_aliases(runs: SyntheticRuns) -> bool:
    """Whether the optimizer steps other tensors of the same memory alike. Some know a parameter by the object."""
    together, aliased = runs.anew(), runs.anew()
    for step in range(STEPS):
        gradients = runs.gradients(GRADIENT_PATTERNS[0], step)
        together.give(gradients)
        aliased.give(gradients)
        try:
            if runs.keyed:  # a parameter draws otherwise together with others
                together.step_divided(one_by_one)
            else:
                together.step()
            aliased.step_divided(one_by_one, alias=True)
        except Exception:
            return False
    # The loop would find the old gradients in .grad.
    return not aliased.replaces_gradients and aliased.differs_from(together) is None


def what_is_kept(runs: SyntheticRuns) -> str | None:
    """What a step that was put back leaves anywhere, in words; ``None``: nothing. Some steps are put back and taken
    again, beside a run in which each is taken once."""
    once, again = runs.anew(), runs.anew()
    for step in range(KEPT):
        gradients = runs.gradients(GRADIENT_PATTERNS[0], step)
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
                f"{runs.name}.step() raises after a step that was put back ({in_short(error)}): it may keep "
                "something outside of its state. Use schedule='forward', or no undo"
            )
        if (difference := again.differs_from(once)) is not None:
            return (
                f"{runs.name} keeps values of single parameters outside of its state, which undo does not put "
                f"back: a step that was put back and taken again differs in {difference}. Use schedule='forward', "
                "or no undo"
            )
    return None


def what_stays(runs: SyntheticRuns) -> str | None:
    """State of one step that cannot live in host memory, in words; ``None``: none. It is tried on an accelerator."""
    run = runs.anew()
    run.give(runs.gradients(GRADIENT_PATTERNS[0], 0))
    try:
        run.step()
    except Exception:
        return None  # so does the loop's
    for parameter in run.parameters:
        if parameter.device.type in ("cpu", "meta"):
            continue
        beside = [tensor for tensor in (parameter, parameter.grad) if tensor is not None]
        try:
            DeviceEntries(runs.name, (), parameter.device).take_back([run.twin.state.get(parameter)], beside)
        except UnsupportedOptimizerError as error:
            return str(error)
    return None


# ``random="keyed"``: a trial of an optimizer that may draw random numbers, on made-up parameters.
#
# What one call draws serves its parameters in order. So only the first parameter of a call draws what it draws alone,
# from generators in the same state. Each kind of parameter is in first place once.


class KeyedTrial(ProbeTrial):
    """Steps a parameter by itself, by its plain ``step()`` and as an attached loop does, and together with others."""

    def run(self, weather: GradientPattern) -> None:
        """Take the steps of ``weather`` with each kind of parameter in first place.

        Raises:
            UnsupportedOptimizerError: a result differs, or the optimizer does what excludes a call by parameter.
        """
        self._step_all(weather)
        for number, mine in enumerate(self._runs.specs):
            for spec in dict.fromkeys(mine):
                self._try(weather, number, spec, [spec, next((one for one in mine if one != spec), spec)])

    def _step_all(self, weather: GradientPattern) -> None:
        """What calls write beside parameters and their state must be the same for all of them."""
        plain, stepped = self._runs.anew(), self._runs.anew()
        for step in range(len(weather.scales)):
            gradients = self._runs.gradients(weather, step)
            try:
                step_together(self._name, plain, gradients)
            except CannotBeTriedError as error:
                self._fails(weather, error)
                return
            stepped.give(gradients)
            step_divided(self._name, stepped, "one by one")
        self.contained = self.contained and stepped.contained

    def _try(self, weather: GradientPattern, number: int, spec: Spec, others: Sequence[Spec]) -> None:
        """
        Args:
            number: of the group.
            others: of the same group, to be stepped together with the first.
        """
        groups: list[list[Spec]] = [[] for _ in self._runs.specs]
        alone = [*groups[:number], [spec], *groups[number + 1 :]]
        plain, stepped = self._runs.anew(alone), self._runs.anew(alone)
        together = self._runs.anew([*groups[:number], [spec, *others], *groups[number + 1 :]])
        for step in range(len(weather.scales)):
            gradients = weather.gradients([spec, *others], step)
            try:
                step_together(self._name, plain, gradients[:1])
                step_together(self._name, together, gradients)
            except CannotBeTriedError as error:
                self._fails(weather, error)
                return
            stepped.give(gradients[:1])
            step_divided(self._name, stepped, "one by one")
            self.returns |= values_differ(plain.returned, stepped.returned)
            when = f"step {step + 1} with {weather}"
            if (what := stepped.differs_from(plain)) is not None:
                raise UnsupportedOptimizerError(
                    f"{self._name} cannot be stepped by parameter: one that is stepped before step() gets other values "
                    f"than in step() (in {when}: {what}). Perhaps it draws random numbers elsewhere: random='keyed' "
                    f"seeds torch's default generators alone. {STEPPED_WHOLE}"
                )
            if (what := _first_differs(together, plain)) is not None:
                raise UnsupportedOptimizerError(
                    f"{self._name} couples parameters: stepped together with others, and drawing first, one gets other "
                    f"values than stepped by itself (in {when}: {what}). {STEPPED_WHOLE}"
                )
        self._require_finite(weather, plain.parameters)


def _first_differs(together: SyntheticRun, alone: SyntheticRun) -> str | None:
    mine, its = together.parameters[0], alone.parameters[0]
    what = f"a parameter of shape {tuple(mine.shape)}"
    if values_differ(mine, its):
        return what
    if values_differ(together.twin.state.get(mine), alone.twin.state.get(its)):
        return f"the state of {what}"
    return None
