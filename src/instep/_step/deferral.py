"""``schedule="forward"``: whether steps are put off at all, and what ordinary steps show of what could be gained."""

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from instep._step.state import StepTimes
from instep._torch.hooks import WeakHook
from instep._torch.versions import are_plain
from instep._torch.watch import Watch

FIRST, LAST = 4, 7
"""The steps that are looked at: the first ones make state."""
_INSTANT = 1e-12
"""Seconds. No iteration takes less, but where somebody has stopped the clock, as in a test of the loop."""


class Iterations:
    """How long the iterations of a loop take, and what part of each is updates.

    Args:
        clock: in seconds.
        times: of the steps; ``None``: the host's clock does not show how long updates take.

    Attributes:
        begun: so many have begun.
        seconds: of each that has ended.
    """

    def __init__(self, clock: Callable[[], float], times: StepTimes | None) -> None:
        self.begun = 0
        self.seconds: list[float] = []
        self._shares: list[float] = []
        self._clock = clock
        self._times = times
        self._began = 0.0

    def begins(self) -> None:
        """One begins, and the one before it ends."""
        now = self._clock()
        if self.begun:
            self.seconds.append(now - self._began)
            if self._times is not None and (spent := self._times.spent) is not None:
                self._shares.append(spent / max(self.seconds[-1], _INSTANT))
        self._began = now
        self.begun += 1

    def share_of_updates(self, first: int, last: int) -> float | None:
        """In the median of the iterations from ``first`` to the one before ``last``; ``None``: not known of all."""
        shares = self._shares[max(first, 0) : last]
        return median(shares) if len(shares) == last - first else None


class Gains(NamedTuple):
    """What ordinary steps have shown.

    Attributes:
        leaves_gradients: whether the loop leaves gradients alone between backward and ``step()``.
        step: milliseconds of updates and in ``step()``, in the median.
        iteration: milliseconds from one step to the next.
    """

    leaves_gradients: bool
    step: float
    iteration: float


class Observed:
    """What a few ordinary steps show of what the loop could gain by another schedule.

    Attributes:
        uses_gradients: whether the loop has read or replaced a ``.grad`` between backward and ``step()``; ``None``: not
            known.
        is_compiled: whether the model has a part that ``torch.compile`` has wrapped: gradients are not looked at then.
            Such a wrapper warns of any hook that is on all modules.
    """

    def __init__(self, living: Callable[[], list[torch.Tensor]], times: StepTimes) -> None:
        self.is_compiled = False
        self.uses_gradients: bool | None = None
        self._iterations = Iterations(perf_counter, times)
        self._living = living
        self._watch = Watch(gradient=self._used)
        self._is_watching = False  # parameters are not kept: the loop may drop its model
        self._stop_listening: Callable[[], object] = int

    @property
    def gains(self) -> Gains | None:
        """``None``: not known yet."""
        share = self._iterations.share_of_updates(FIRST - 1, LAST)
        if share is None or self.uses_gradients is None:
            return None
        iteration = 1e3 * median(self._iterations.seconds[FIRST - 1 :])
        return Gains(not self.uses_gradients, share * iteration, iteration)

    @property
    def is_over(self) -> bool:
        """Whether all that there is to see was seen."""
        return self._iterations.begun > LAST and not self._is_watching

    def backward_ended(self) -> None:
        """The loop goes on, and may look at gradients."""
        looks = FIRST <= self._iterations.begun <= LAST
        if not looks or self.uses_gradients or self.is_compiled or torch.compiler.is_compiling():
            return
        parameters = [p for p in self._living() if p.requires_grad]
        if are_plain(parameters) and not self._is_watching:
            self._is_watching = True
            # torch leaves the fast path of attention out where a weight is of a class with a torch function: a part of
            # the model that runs by itself is to find plain ones, whatever module it is.
            handle = register_module_forward_pre_hook(WeakHook(self._part_runs))
            self._stop_listening = weakref.finalize(self, handle.remove)  # also where the loop drops everything here
            self._watch.start(parameters)

    def let_go(self) -> None:
        """A forward, or ``step()``, begins: neither is the loop's own use."""
        if self._is_watching:
            self._watch.stop(self._living())
            self._stop_listening()
            self._is_watching = False
            self.uses_gradients = bool(self.uses_gradients)

    def _part_runs(self, module: nn.Module, args: object) -> None:
        self.let_go()

    def step_begins(self) -> None:
        """The first optimizer of a step is about to update."""
        if self._iterations.begun <= LAST:
            self._iterations.begins()

    def _used(self, parameter: torch.Tensor, func: object) -> None:
        self.uses_gradients = True


# ``schedule="forward"``: whether a step is put off: where that was found to be faster, or was asked for.
#
# The trial compares iterations in pairs: one whose step was taken at once, and one whose step was put off, in the order
# ABBA ABBA, so that a machine that gets slower or faster favours neither. A clock cannot tell a difference of a
# percent; undecided means at once.


_logger = logging.getLogger("instep")

WARM_UP = 8
"""Steps before the trial: optimizers make their state, kernels are chosen, caches fill."""
PAIRS = 16
LEAST_GAIN = 0.05
"""Of an iteration, in the median."""
LEAST_WINS = 13
"""Of the pairs. By chance alone so many are won in one trial of a hundred."""
LOOKS = 4
"""The last steps before the trial, which show how much of an iteration updates take: more cannot be gained."""
ASKED = frozenset(1 << n for n in range(11))
"""A rank that gains looks at these of its backwards, counted from when it knows, for what the others have found. If
they have not all said so by the last, no step is put off."""


class OtherRanks(Protocol):
    """The other ranks. None of them is waited for."""

    def say(self, gains: bool) -> None:
        """Tell them whether this rank gains."""

    def all_found(self) -> bool | None:
        """Whether all ranks gain; ``None``: not known yet."""


class Wording(NamedTuple):
    """What is said of updates that run apart.

    Attributes:
        later: after "the step is", where they do.
        otherwise: the same, where they do not.
        remedy: what a loop does before it changes what an update reads.
        written: that somebody has written ``{what}``, which an update reads or writes, ``{through}`` something.
    """

    later: str
    otherwise: str
    remedy: str
    written: str


PUT_OFF = Wording(
    "put off",
    "taken at once",
    "Call overlap.synchronize() before such a change",
    "{what} was written after optimizer.step(), through {through}, while the update was due: in the plain loop it had "
    "been applied by then. Call overlap.synchronize() before such a write",
)
BESIDE_BACKWARD = Wording(
    "taken beside backward",
    "taken in backward",
    "Make such a change before backward() or after optimizer.step()",
    "{what} was written in backward, through {through}, while its update was under way beside backward: the plain loop "
    "would have updated what was written. Write before backward() or after optimizer.step(), or attach with "
    "schedule='forward'",
)


class Deferring:
    """The decision, for each step, whether it is put off: always, where that is ``asked`` for, or never.
    ``DeferralTrial`` finds it out.

    Args:
        why: of the decision, in words.
        asked: whether updates are put off, too, that cannot run beside the loop; and a loop that cannot be followed is
            told so.
        otherwise: what takes a loop that cannot be followed, in words; ``None``: nothing else does.

    Attributes:
        puts_off: whether the running step is put off.
        decided: whether that stays so.
    """

    def __init__(self, why: str, *, asked: bool = False, otherwise: str | None = None) -> None:
        self.why = why
        self.asked = self.puts_off = asked
        self.otherwise = otherwise
        self.decided = True

    @property
    def never(self) -> bool:
        """Whether no further step will be put off."""
        return self.decided and not self.puts_off

    def backward_begins(self) -> None:
        """One that reduces gradients over all ranks, if there are several."""

    def step_begins(self) -> None:
        """``optimizer.step()`` of the first optimizer is called."""

    def cannot(self, reason: str) -> None:
        """The loop does what a step that is put off could not follow."""

    def must_not(self, reason: str) -> None:
        """From now on no step is put off, whatever was asked for: numbers would differ."""
        if self.puts_off:
            self.puts_off, self.why = False, reason
            _logger.warning("the step is taken at once from now on, in spite of defer=True: %s", reason)


class DeferralTrial(Deferring):
    """``defer="auto"``.

    Args:
        prevented: why no step can gain from being put off, found out as the first backward begins; ``None``: one may.
        others: the other ranks; ``None``: there are none.
        clock: in seconds.
        wording: of the two ways that it compares.
        times: of the steps; ``None``: the host's clock does not show how long updates take.
    """

    def __init__(
        self,
        prevented: Callable[[], str | None],
        others: OtherRanks | None = None,
        clock: Callable[[], float] = perf_counter,
        wording: Wording = PUT_OFF,
        times: StepTimes | None = None,
    ) -> None:
        super().__init__("not decided yet")
        self.decided = False
        self._prevented = prevented
        self._others = others
        self._wording = wording
        self._reason: str | None = None
        self._has_begun = False
        self._waited = 0  # backwards since this rank knows that it gains
        self._iterations = Iterations(clock, times)

    def backward_begins(self) -> None:
        if self.decided:
            return
        if not self._has_begun:
            self._has_begun = True
            if (reason := self._prevented()) is not None:
                self.cannot(reason)
                return
        gains = self._found
        if gains and self._others is not None:
            gains = self._ask(self._others)
        if gains is not None:
            self._decide(gains)

    def _ask(self, others: OtherRanks) -> bool | None:
        """This rank gains: whether all others do."""
        self._waited += 1
        if self._waited not in ASKED:
            return None
        try:
            if self._waited == 1:
                others.say(True)
            all_gain = others.all_found()
        except RuntimeError:  # the rank that keeps what they say has ended
            return False
        return False if all_gain is None and self._waited == max(ASKED) else all_gain

    def step_begins(self) -> None:
        if self.decided:
            return
        self._iterations.begins()
        number = self._iterations.begun - 1 - WARM_UP
        share = self._iterations.share_of_updates(WARM_UP - LOOKS, WARM_UP) if number == 0 else None
        if share is not None and share < LEAST_GAIN:
            self.cannot(
                f"updates take {100 * share:.1f}% of an iteration, and a step is {self._wording.later} where that "
                f"saves {100 * LEAST_GAIN:.0f}%"
            )
            return
        self.puts_off = 0 <= number < 2 * PAIRS and number % 4 in (1, 2)

    def cannot(self, reason: str) -> None:
        if self.decided and not self.puts_off:
            return
        self._reason, self.puts_off = reason, False
        self._decide(False)

    def must_not(self, reason: str) -> None:
        self.cannot(reason)

    @property
    def _found(self) -> bool | None:
        """Whether this rank gains; ``None``: not known yet."""
        if len(self._iterations.seconds) < WARM_UP + 2 * PAIRS:
            return None
        gains = self._gains()
        return median(gains) >= LEAST_GAIN and sum(gain > 0 for gain in gains) >= LEAST_WINS

    def _gains(self) -> list[float]:
        """Of each pair: the part of the iteration that is saved by putting the step off."""
        gains: list[float] = []
        seconds = self._iterations.seconds[WARM_UP : WARM_UP + 2 * PAIRS]
        for first, second in zip(seconds[::2], seconds[1::2], strict=True):
            at_once, put_off = (first, second) if len(gains) % 2 == 0 else (second, first)
            gains.append((at_once - put_off) / max(at_once, _INSTANT))
        return gains

    def _decide(self, gains: bool) -> None:
        if self._others is not None and not gains:
            with suppress(RuntimeError):  # as above
                self._others.say(False)
        self.decided, self.puts_off, self.why = True, gains, self._words(gains)
        _logger.info("the step is %s: %s", self._wording.later if gains else self._wording.otherwise, self.why)

    def _words(self, gains: bool) -> str:
        if self._reason is not None:
            return self._reason
        saved = self._gains()
        middle = 100 * median(saved)
        measured = (
            f"in {sum(gain > 0 for gain in saved)} of {PAIRS} pairs an iteration was shorter with the step "
            f"{self._wording.later}; in the median it was {abs(middle):.1f}% {'shorter' if middle > 0 else 'longer'}"
        )
        if gains:
            return measured
        least = f"{LEAST_WINS} of {PAIRS} and {100 * LEAST_GAIN:.0f}%"
        others = "" if self._others is None else ", on all ranks"
        return f"{measured}; it is {self._wording.later} from {least} on{others}"
