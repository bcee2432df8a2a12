"""A foreign optimizer is judged by its first real updates: taken in parts, each put back, and then as a whole.

Nobody knows what an update that is not torch's own couples. A norm over all parameters, a counter, a draw, the weights
of a neighbour: stepped bucket by bucket, the numbers would be others. So the first three updates of such an optimizer
are left to ``optimizer.step()``, which takes them as in the plain loop. Nothing stands beside the first one: what it
finds out once, and keeps where nobody looks (a cached method, a variable of a module), it finds out over all
parameters. Right before each of the other two, parts are stepped alone, by the same object that steps buckets later;
what each part has become is kept as a digest, and the part is put back (``parts.py``). In the second update each
parameter is a part, in the order of the groups, and in the third each bucket. When ``step()`` has returned, the digests
are compared with what it has made of the same parameters. Memory: two parts, beside the gradients, which are all there,
as in the plain loop.

Equal: from the fourth step on buckets are stepped in backward. Not equal: every step is left to ``optimizer.step()``,
which is right, and saves nothing; the log says so once, with the road that the coupling takes. An optimizer that keeps
what nobody can put back (a counter in a closure, a generator of a module) is told by a part that comes out differently
when it is stepped once more: then an error is raised, before anything of the step is written.

A parameter that gets its first gradient later is left once, and compared. Where more parameters require a gradient than
before (a layer was unfrozen, a group added), all begins anew: one alone shows no coupling. Where one that was compared
misses an update, what counts updates counts its own apart from there on, which may couple what did not before: steps
are left until it is back, and compared with it.

A coupling may begin later: so of every ``EVERY``-th step two buckets are left to ``optimizer.step()``, other ones each
time, and compared in the same way.

Where nobody takes a step as a whole (``random="keyed"``, ``offload``, ``shard_state``), each part, from the first
update on, is compared with itself stepped together with the next one. With keys parts are parameters, as each update
then is of one.
"""

import logging
from collections.abc import Iterable, Sequence

import torch

from instep._optim.belongings import BelongingsGuard, mappings_of
from instep._optim.beside import Beside
from instep._optim.kinds import STEPPED_WHOLE
from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._optim.proved import is_proved
from instep._optim.reached import Tables
from instep._optim.shadow import GroupLayout, parameters_of
from instep._optim.stepper import Stepper
from instep._step.parts import HOOKS, PartsOfUpdate
from instep._step.state import gradient_of
from instep._torch.hooks import has_global_step_hooks
from instep.errors import UnsupportedOptimizerError

_logger = logging.getLogger("instep")

FIRST = 2
"""Updates that are compared as a whole."""
LEFT = 1 + FIRST
"""Updates that are left to ``optimizer.step()``: one before them, beside which nothing stands."""
EVERY = 50
"""Of each so many-th step after them two buckets are compared."""


class Arrivals:
    """What a foreign optimizer's update would find in backward, where gradients arrive, and what ``step()`` finds after
    it: what there is as the first gradient arrives, and what is kept of each parameter as its own does.

    A step that is judged is taken after backward, where all is there that hooks of the backward write: the squares of
    single samples that a library puts on parameters, the statistics of a layer. In backward some of it is the last
    step's still, and no comparison after backward can show it.
    """

    def __init__(self, stepper: Stepper) -> None:
        optimizer = stepper.optimizer()
        self._belongings = BelongingsGuard(stepper.name, [*mappings_of(optimizer), optimizer.state])
        self._tables = Tables(optimizer)
        self._beside = Beside(stepper.name)
        self._beside.begin(optimizer, GroupLayout(stepper.name, optimizer.param_groups))

    def come(self, parameters: Sequence[torch.Tensor]) -> None:
        """Their gradients have arrived."""
        self._belongings.note(parameters)

    def differ(self) -> str | None:
        """``step()`` is called. What it finds otherwise, in words; ``None``: nothing."""
        what = self._belongings.changed() or self._beside.changed()
        if what is None and (self._beside.wrote_unseen() or self._tables.have_changed()):
            what = "a module to which it refers"
        return None if what is None else f"{what} is written in backward, after gradients that arrive before"


class _Met:
    """What was there to be compared.

    Attributes:
        unproved: the optimizers that are compared.
        compared: parameters, by their indices.
        requiring: those that required a gradient when all began.
        lagging: those that were compared, and have missed an update since.
        returns: how many updates in which one of these is back are still to be compared.
        waits: whether one that lags requires a gradient, and is to be compared.
        arrivals: of a step that is left: what there was as gradients arrived.
    """

    def __init__(self) -> None:
        self.unproved: set[Stepper] = set()
        self.compared: set[int] = set()
        self.requiring: set[int] = set()
        self.lagging: set[int] = set()
        self.returns = FIRST
        self.waits = False
        self.arrivals: dict[Stepper, Arrivals] = {}

    @property
    def compares_all(self) -> bool:
        """Whether none is left that was never compared."""
        return not self.unproved or self.requiring <= self.compared

    def note_lag(self, left: Sequence[AttachedParameter], there: Sequence[AttachedParameter], total: int) -> None:
        """An optimizer with ``total`` parameters steps, ``there`` those of ``left`` that have a gradient."""
        if len(there) == len(left) or (not there and len(left) == total):
            return  # as mostly; or nothing is stepped
        known = self.compared - {attached.spec.index for attached in there}
        for attached in left:
            if attached.spec.index in known:
                self.lagging.add(attached.spec.index)
                self.waits |= attached.get().requires_grad

    def has_compared(self, indices: set[int]) -> None:
        self.compared |= indices
        if not self.lagging.isdisjoint(indices):
            self.lagging -= indices
            self.returns -= 1
            self.waits = self.returns > 0 and bool(self.lagging)

    def is_new(self, bucket: AttachedParameters) -> bool:
        """Whether a parameter in it was never compared."""
        return not self.unproved.isdisjoint(bucket.steppers) and not self.compared.issuperset(bucket.indices)


class Judge:
    """Judges the first updates of each foreign optimizer of an attachment, and parts of later ones.

    Args:
        in_parts: whether buckets are stepped in backward.

    Attributes:
        verdict: why every step is left to ``optimizer.step()``; ``None``: buckets are stepped.
        leaves_all: whether all of the running step is left to ``optimizer.step()``.
        has_compared: whether parts of the last step were compared: on another rank they may have been found to differ.
        due: of each foreign optimizer, how many updates are still to be compared.
    """

    def __init__(self, steppers: Sequence[Stepper], *, in_parts: bool) -> None:
        self.verdict: str | None = None
        self._in_parts = in_parts
        self.due: dict[Stepper, int] = {}
        self.leaves_all = False
        self._running: dict[Stepper, PartsOfUpdate] = {}
        self._has_begun: set[Stepper] = set()  # to be judged: its first update was compared, one by one
        self._is_warm: set[Stepper] = set()  # those that have taken a step
        self._met = _Met()
        self._meets_new = False  # whether a bucket of the running step is left that was never compared
        self._apart: list[Sequence[int]] = []  # buckets of the running step that are left, to be compared
        self._steps_others = False  # whether backward steps other ones of it
        self._objects = False
        self.has_compared = self._compared = False
        for stepper in steppers:
            if stepper.is_foreign:
                self.meet(stepper)

    # In backward.

    def meet(self, stepper: Stepper) -> None:
        """An optimizer is foreign."""
        self.due[stepper] = 0 if is_proved(stepper.optimizer()) else FIRST
        if self.due[stepper]:
            self._met.unproved.add(stepper)
        self._decide()

    def look(self, every: Iterable[AttachedParameter]) -> None:
        """A forward begins."""
        self._met.arrivals.clear()
        if self.verdict is not None or not self._met.unproved or not self._in_parts:
            return
        requiring = {a.spec.index for a in every if a.get().requires_grad}
        if not requiring <= self._met.requiring:
            self._met.requiring |= requiring
            for stepper in self._met.unproved:
                self.due[stepper] = FIRST
                self._has_begun.discard(stepper)
        self._met.waits = self._met.returns > 0 and not self._met.lagging.isdisjoint(requiring)
        self._decide()

    def _decide(self) -> None:
        due = self._in_parts and (self._met.waits or any(self.due.values()))
        self.leaves_all = due or self.verdict is not None

    def step_opens(self, number: int, buckets: Iterable[Sequence[int]]) -> None:
        """The first final gradient of step ``number`` has come.

        Args:
            buckets: those of the plan, by the indices of their parameters. Those that backward steps may be others, and
                come in another order on each rank: the ranks must leave the same.
        """
        self._apart, self._steps_others, self._meets_new = [], False, False
        for stepper in self.due if self.verdict is None else ():
            if has_global_step_hooks():
                self._objects_to(stepper, HOOKS)
        if number % EVERY == 0 and len(every := [*buckets]) > 1:
            first = number // EVERY % (len(every) - 1)
            self._apart = every[first : first + 2]

    def leaves(self, bucket: AttachedParameters) -> bool:
        """Whether this bucket is left to ``optimizer.step()``, to be compared."""
        if self.leaves_all:  # since this step began
            return True
        if not any(stepper.is_foreign for stepper in bucket.steppers):
            return False
        is_new = self._met.is_new(bucket)
        self._meets_new |= is_new
        leaves = is_new or not all(map(set(bucket.indices).isdisjoint, self._apart))
        self._steps_others |= not leaves
        if leaves:
            self.come(bucket)
        return leaves

    @property
    def leaves_some(self) -> bool:
        """Whether buckets of the running step may be left to ``optimizer.step()``, to be compared."""
        return self.leaves_all or bool(self._apart) or not self._met.compares_all

    def come(self, parameters: AttachedParameters) -> None:
        """Their gradients have arrived, and are left to ``optimizer.step()``."""
        for stepper in parameters.steppers if self.verdict is None else ():
            if stepper in self._met.unproved:
                arrivals = self._met.arrivals.get(stepper) or self._met.arrivals.setdefault(stepper, Arrivals(stepper))
                arrivals.come([a.get() for a in parameters if a.stepper is stepper])

    # Around ``optimizer.step()``.

    def before_update(
        self,
        stepper: Stepper,
        left: Iterable[AttachedParameter],
        every: Sequence[AttachedParameter],
        buckets: Iterable[Sequence[int]],
    ) -> None:
        """``step()`` is about to update all of ``left`` that have a gradient.

        Args:
            buckets: those of the plan, by the indices of their parameters.

        Raises:
            UnsupportedOptimizerError: the optimizer keeps what cannot be put back, or, where nobody but instep can take
                its steps, couples parameters. Nothing of the step is written.
        """
        if self.verdict is not None or stepper not in self.due:
            return
        left = [a for a in left if a.shard is None or a.shard.is_owner]
        there = [a for a in left if gradient_of(a) is not None]
        returns = bool(there) and not self._met.lagging.isdisjoint(a.spec.index for a in there)
        if stepper in self._met.unproved and self._met.returns:
            self._met.note_lag(left, there, sum(a.stepper is stepper for a in every))
        if not (self.due.get(stepper) or self._apart or self._meets_new or (returns and self._met.returns)):
            return
        in_pairs = stepper.steps_every_parameter or any(a.is_divided for a in there)
        if stepper not in self._is_warm and not in_pairs:
            return
        is_first = bool(self.due.get(stepper)) and stepper not in self._has_begun
        # With keys each update is of one parameter: stepped together, the second would draw by the key of the first.
        by_one = is_first or stepper.keyed is not None
        of_plan = buckets if self._meets_new or not self._apart else self._apart
        parts = _one_by_one(stepper, there) if by_one else in_buckets(there, of_plan)
        if not parts:
            return
        running = PartsOfUpdate(stepper, parts, every)
        arrivals = self._met.arrivals.pop(stepper, None)
        running.take(
            twice=bool(self.due.get(stepper)) and stepper.is_foreign,
            is_warm=stepper in self._is_warm,
            in_pairs=in_pairs,
            reason=None if arrivals is None else arrivals.differ(),
        )
        if in_pairs and running.reason is not None:
            raise UnsupportedOptimizerError(f"{stepper.name}: {running.reason}. {STEPPED_WHOLE}")
        if in_pairs:
            running.only_counts()
        self._running[stepper] = running

    def wants_whole(self, stepper: Stepper) -> bool:
        """Parts of the update that is about to be taken are known to come out otherwise than the whole: whether buckets
        of it were stepped in backward on trial, and are now to be put back."""
        running = self._running.get(stepper)
        if running is None or running.reason is None or not self._steps_others:
            return False
        self._objects_to(stepper, running.reason)
        return True

    def after_update(self, stepper: Stepper) -> UnsupportedOptimizerError | None:
        """``step()`` has returned. The error that tears the step, where a part of it was taken in backward, and should
        not have been."""
        self._is_warm.add(stepper)
        running = self._running.pop(stepper, None)
        if running is None:
            self._decide()  # a parameter may have missed this update
            return None
        self._compared = True
        if (reason := running.compare()) is not None:
            self._objects_to(stepper, reason)
            if self._steps_others:
                return UnsupportedOptimizerError(
                    f"{stepper.name} has begun to couple parameters: {reason}. Backward had stepped the other buckets "
                    f"of this step. Load a checkpoint. {STEPPED_WHOLE}"
                )
        elif running.counts:
            stepper.came_out_alike()
            self._met.has_compared(set(running.indices))
            self._has_begun.add(stepper)
            self.due[stepper] = max(0, self.due.get(stepper, 0) - 1)
            self._decide()
        return None

    def committed(self) -> bool:
        """A step stands. Whether this rank has found in it that steps must be left whole, which the others are to
        know."""
        objects, self._objects = self._objects, False
        self.has_compared, self._compared = self._compared, False
        return objects

    def _objects_to(self, stepper: Stepper, reason: str) -> None:
        self.object(f"{stepper.name}: {reason}")
        self._objects = True

    def object(self, reason: str) -> None:
        """From now on every step is left to ``optimizer.step()``."""
        if self.verdict is None:
            self.verdict, self.leaves_all = reason, True
            _logger.warning(
                "%s. Every step is left to optimizer.step(), as in the plain loop: the numbers are right, and no "
                "gradient is freed in backward",
                reason,
            )

    def end_step(self) -> None:
        """The running step was none, or is given up."""
        self._running.clear()
        self._met.arrivals.clear()
        self._apart, self._steps_others, self._meets_new = [], False, False

    def __str__(self) -> str:
        if self.verdict is not None:
            return f"left to optimizer.step(): {self.verdict}"
        due = {stepper: number for stepper, number in self.due.items() if number} if self._in_parts else {}
        if not due and self._met.waits:
            return "steps are taken in optimizer.step() until a parameter that has missed some has a gradient again"
        if not due:
            return ""
        # Of one whose steps somebody takes as a whole, the first is left, too, and not compared.
        cold = [stepper for stepper in due if stepper not in self._is_warm and not stepper.steps_every_parameter]
        steps = max(number + (stepper in cold) for stepper, number in due.items())
        names = " and ".join(stepper.name for stepper in due)
        what, parts = ("steps are", "their parts") if steps > 1 else ("step is", "its parts")
        which = f"the last {max(due.values())} are " if cold else ""
        number = f"{steps} " if steps > 1 else ""
        return f"{names}: the next {number}{what} taken in optimizer.step(), and {which}compared with {parts}"


def in_buckets(there: Sequence[AttachedParameter], buckets: Iterable[Sequence[int]]) -> list[AttachedParameters]:
    """``there`` in the buckets of the plan, which are given by the indices of their parameters."""
    by_index = {attached.spec.index: attached for attached in there}
    parts = [AttachedParameters(by_index.pop(i) for i in bucket if i in by_index) for bucket in buckets]
    return [part for part in [*parts, AttachedParameters(by_index.values())] if part]


def _one_by_one(stepper: Stepper, there: Iterable[AttachedParameter]) -> list[AttachedParameters]:
    """Each parameter by itself, in the order of the groups: what an update compiles is compiled in that order."""
    by_id = {id(attached.get()): attached for attached in there}
    in_order = (by_id.get(id(parameter)) for parameter in parameters_of(stepper.optimizer()))
    return [AttachedParameters((attached,)) for attached in in_order if attached is not None]
