"""Does an optimizer of unknown make update each parameter by itself? It is tried on made-up parameters at attach."""

import logging
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from instep._optim.kinds import STEPPED_WHOLE, is_torchs_own, undecorated_step
from instep._optim.probe_trials import DivisionTrial, KeyedTrial, reads_loss, takes_aliases, what_is_kept, what_stays
from instep._optim.random_numbers import Generators
from instep._optim.shadow import parameters_of, step_plainly
from instep._optim.synthetic import (
    DIVISIONS,
    GRADIENT_PATTERNS,
    GradientPattern,
    Spec,
    SyntheticRuns,
    in_short,
    options_of,
    raises_without_gradients,
    specs_for,
)
from instep._torch.watch import plain_type
from instep.errors import UnsupportedOptimizerError

_logger = logging.getLogger("instep")


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
        stays: state that cannot live in host memory, in words; ``None``: none, as far as trying tells.
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
    stays: str | None = None

    @property
    def unproven(self) -> str | None:
        """What is not proven, in a sentence; ``None``: nothing."""
        return f"unproven: {self.optimizer}: {'; '.join(self.untried)}" if self.untried else None


def not_asked(optimizer: Optimizer) -> Separability:
    """Where ``step()`` is called as it is, nothing need be known of it. Only torch's own updates are ever put off."""
    evaluates_again = isinstance(optimizer, torch.optim.LBFGS)
    keeps_graph = any(group.get("differentiable", False) for group in optimizer.param_groups)
    contained = is_torchs_own(optimizer) and not evaluates_again and not keeps_graph
    return Separability(type(optimizer).__name__, contained)


def separability_of(
    optimizer: Optimizer,
    *,
    in_backward: bool = False,
    on_trial: bool = False,
    keyed: bool = False,
    offloaded: bool = False,
) -> Separability:
    """Step made-up parameters together, one by one and in other divisions, and compare bit for bit.

    For optimizers that are not torch's own. What was found of a class with the same options is remembered.
    What could not be tried is logged, and said in the result.

    Args:
        in_backward: whether it is to be stepped where nobody has a closure for it.
        on_trial: whether its steps may be put back.
        keyed: whether each parameter is stepped by itself, with draws of its own: then ``step()`` may draw.
        offloaded: whether its state is to live in host memory.

    Raises:
        UnsupportedOptimizerError: the divisions differ, ``step()`` draws random numbers, moves parameters without
            gradient, or fails where none is left; with ``in_backward`` also if it returns another value there, or
            updates by the loss that a closure returns; with ``on_trial`` if a step that was put back leaves a trace.
    """
    found = _remembered(optimizer, keyed=keyed)
    if isinstance(found, str):
        raise UnsupportedOptimizerError(found)
    if keyed or offloaded:
        _require_steps_apart(found, "random='keyed'" if keyed else "offload='host'")
    if found.stays is not None and offloaded:
        raise UnsupportedOptimizerError(found.stays)
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
        compared = "" if keyed else "; attach(…, check_steps=…) compares the first steps"
        _logger.warning(
            "%s. Whether it updates each parameter by itself could not be tried%s", found.unproven, compared
        )
    return found


def _require_steps_apart(found: Separability, option: str) -> None:
    """With ``option`` instep takes every step, whatever the schedule."""
    does = {
        "fails without a closure": found.needs_closure,
        "returns a value that depends on what it updates": found.returns,
        "updates by the loss that its closure returns": found.reads_loss,
    }
    for what, it_does in does.items():
        if it_does:
            raise UnsupportedOptimizerError(
                f"{found.optimizer}.step() {what}, and {option} has each parameter updated before step(). "
                f"{STEPPED_WHOLE}"
            )


_found: "weakref.WeakKeyDictionary[type, dict[Hashable, Separability | str]]" = weakref.WeakKeyDictionary()


def _remembered(optimizer: Optimizer, *, keyed: bool) -> Separability | str:
    known = _found.setdefault(type(optimizer), {})
    try:
        key = keyed, _key(optimizer)
    except TypeError:
        return _tried(optimizer, keyed=keyed)
    if key not in known:
        known[key] = _tried(optimizer, keyed=keyed)
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


def _tried(optimizer: Optimizer, *, keyed: bool) -> Separability | str:
    """The finding, or the words with which to refuse."""
    generators = Generators({p.device for p in parameters_of(optimizer)}, [optimizer])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Probe(optimizer, keyed=keyed).run()
    except UnsupportedOptimizerError as error:
        return str(error)
    except RecursionError:
        return (
            f"{type(optimizer).__name__} keeps values that hold themselves, which cannot be compared. {STEPPED_WHOLE}"
        )
    finally:
        generators.restore()


class _Probe:
    """Tries one optimizer."""

    def __init__(self, optimizer: Optimizer, *, keyed: bool) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._runs = SyntheticRuns(optimizer, specs_for(optimizer), keyed=keyed)
        self._untried: list[str] = []

    def run(self) -> Separability:
        if self._needs_closure():
            return Separability(self._name, False, ("step() needs a closure",), needs_closure=True)
        self._leave_out_what_fails()
        tried = any(self._runs.specs)
        trial = self._divided() if tried else DivisionTrial(self._runs)
        classes = sorted(_own_classes(self._optimizer))
        as_plain = [f"its parameters of class {name} were tried as plain ones" for name in classes]
        loss = tried and reads_loss(self._runs)
        contained = trial.contained and tried and not self._holds_much() and takes_aliases(self._runs)
        return Separability(
            self._name,
            contained and not (trial.returns or loss),
            (*self._untried, *trial.untried, *as_plain),
            returns=trial.returns,
            reads_loss=loss,
            keeps=what_is_kept(self._runs) if tried else None,
            stays=what_stays(self._runs) if tried else None,
        )

    def _divided(self) -> DivisionTrial | KeyedTrial:
        if self._runs.keyed:
            keyed = KeyedTrial(self._runs)
            for weather in GRADIENT_PATTERNS:
                keyed.run(weather)
            return keyed
        trial = DivisionTrial(self._runs)
        first, *others = GRADIENT_PATTERNS
        trial.run(first, DIVISIONS)
        for weather in others:
            trial.run(weather, ["one by one"])
        return trial

    def _needs_closure(self) -> bool:
        """Raise if the first ``step()``, without gradients, fails for another reason."""
        failure = self._failure(given=False)
        if failure is None:
            return False
        if self._failure(given=True) is not None and self._failure(lambda: torch.ones(()), given=True) is None:
            return True
        raise UnsupportedOptimizerError(raises_without_gradients(self._optimizer, failure)) from failure

    def _failure(self, *closure: Callable[[], torch.Tensor], given: bool) -> Exception | None:
        """What the first step raises, on an optimizer that can be copied."""
        try:
            run = self._runs.anew()
        except Exception:
            return None  # said below
        if given:
            run.give(self._runs.gradients(GRADIENT_PATTERNS[1], 0))
        try:
            step_plainly(run.twin, *closure)
        except Exception as error:
            return error
        return None

    def _leave_out_what_fails(self) -> None:
        """Parameters on which the plain ``step()`` fails are not tried."""
        reason = self._fails(self._runs.specs)
        if reason is None:
            return
        distinct = dict.fromkeys(spec for mine in self._runs.specs for spec in mine)
        failing = {spec: why for spec in distinct if (why := self._fails(self._only(spec))) is not None}
        self._runs.specs = [[spec for spec in mine if spec not in failing] for mine in self._runs.specs]
        if not any(self._runs.specs) or self._fails(self._runs.specs) is not None:
            # Some take no parameters but those that fit one another.
            self._runs.specs = specs_for(self._optimizer, alike=True)
            if self._fails(self._runs.specs) is not None:
                self._runs.specs = [[] for _ in self._runs.specs]
            self._untried.append(f"step() fails on made-up parameters ({reason})")
            return
        reasons = dict.fromkeys(failing.values())
        self._untried += [
            f"step() fails on made-up parameters {', '.join(str(s) for s in failing if failing[s] == why)} ({why})"
            for why in reasons
        ]

    def _only(self, wanted: Spec) -> list[list[Spec]]:
        return [[spec for spec in mine if spec == wanted] for mine in self._runs.specs]

    def _fails(self, specs: Sequence[Sequence[Spec]]) -> str | None:
        """Why two plain steps do."""
        weather = GradientPattern((1.0, 1.0))
        try:
            run = self._runs.anew(specs)
            for step in range(2):
                run.give(weather.gradients([spec for mine in specs for spec in mine], step))
                run.step()
        except Exception as error:
            return in_short(error)
        return None

    def _holds_much(self) -> bool:
        """Whether an attribute holds what the loop may change before a step that is put off is applied."""
        return any(
            isinstance(value, (torch.Tensor, dict, list, set))
            for name, value in vars(self._optimizer).items()
            if name not in ("param_groups", "state", "defaults") and not name.startswith("_optimizer_")
        )
