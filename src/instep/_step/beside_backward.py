"""``schedule="backward"`` on a CPU with an idle core: a worker updates buckets while backward computes more gradients.

An update in a hook holds backward up. Here the hook hands the bucket over, and counts it as applied: its gradients are
gone from ``.grad``, whoever uses one of the parameters in Python is told so (``FinalWrites``), and a graph that has
saved an old weight refuses to run. So nobody in backward reads what the worker writes, and nobody can tell when. What
was handed over is waited for where backward ends or raises, and before anybody is told what became of the step.
"""

from collections.abc import Callable, Iterator

import torch
from torch.optim import Optimizer

from instep._optim.parameters import AttachedParameters
from instep._optim.stepper import Stepper, look_at_masters
from instep._step.deferrable import by_optimizer, can_run_beside
from instep._step.deferral import BESIDE_BACKWARD, Deferring
from instep._step.step import RunningStep
from instep._step.update import Outcome, PartOfStep, Update
from instep._torch.lifetime import WeakMethod
from instep._torch.watch import StateWatch
from instep._torch.worker import Worker

MOST = 2
"""Buckets that may be handed over and not updated yet. Their gradients are alive, beside those of the bucket that is
being filled. With one alone the worker would wait for work wherever a bucket takes longer to fill than to update, and
backward would wait for the worker at the next one."""


class UpdatesBeside:
    """The updates of the running backward that a worker makes beside it.

    Attributes:
        takes_some: whether the running step may have some.
        failed: the first that has failed, until the step is said to be torn.
        steps: of each optimizer of which a bucket was handed over in the running backward. Cleared when all are noted:
            they hold the optimizer and parameters, which a loop may drop.
    """

    def __init__(self, step: RunningStep, deferring: Deferring, wait: Callable[[], None]) -> None:
        self.takes_some = False
        self.failed: Update | None = None
        self.steps: dict[Stepper, PartOfStep] = {}
        self._deferring = deferring
        self._step = step
        self._wait = WeakMethod(wait)
        self._state_watch = StateWatch(self._used_state)
        self._worker: Worker | None = None
        self._under_way: list[Update] = []

    @property
    def said(self) -> str | None:
        """That buckets are updated beside backward, and why; ``None``: they are not, or that is still being tried."""
        deferring = self._deferring
        if not (deferring.decided and deferring.puts_off):
            return None
        return f"{BESIDE_BACKWARD.later} ({deferring.why})"

    def backward_begins(self) -> None:
        """A backward that is to give a step begins: an iteration of the trial ends, and the next one begins."""
        deferring = self._deferring
        deferring.backward_begins()
        deferring.step_begins()
        self.takes_some = deferring.puts_off

    def takes(self, bucket: AttachedParameters) -> bool:
        """Whether all of ``bucket`` can be updated beside backward."""
        return can_run_beside(bucket, is_first_step=self._step.ledger.step_count == 0)

    def hand_over(self, bucket: AttachedParameters) -> None:
        """Have the worker update ``bucket``, whose gradients are in ``.grad``, and may be taken off."""
        parts = list(by_optimizer(bucket))
        for stepper, part in parts:
            # Here, and not on the worker: what the loop changes in a hook is noticed at the next bucket, as in hooks.
            stepper.look_at_settings(part.tensors())
            look_at_masters(stepper, part.tensors())
            self._step_of(stepper)  # which looks at all of them, in the first bucket
        # Before the update notes what it finds. A graph that has saved an old weight refuses to run from here on: an
        # update that has run counts its write, too, but a node may read the weight before that.
        torch.autograd.graph.increment_version(bucket.tensors())
        worker = self._worker = self._worker or Worker()
        for stepper, part in parts:
            handed = Update(part, self._step_of(stepper), None)
            self._under_way.append(handed)  # before the worker has it: what is listed here is waited for
            handed.give_to(worker)

    def finished(self, most: int = 0) -> Iterator[Update]:
        """Those that were handed over first, each when it was updated or has failed, until ``most`` are left."""
        while len(self._under_way) > most and self._worker is not None:
            handed = self._under_way[0]
            handed.wait_for(self._worker)
            if self._under_way and self._under_way[0] is handed:  # else a signal's handler has noted it
                yield handed
                del self._under_way[0]

    @property
    def is_here(self) -> bool:
        """Whether this is the worker's thread, which may run anybody's code: that of an object that is freed."""
        return self._worker is not None and self._worker.is_here

    def end_step(self) -> None:
        """All were noted. What is left of them refers to one another, and to the optimizer and parameters: whoever
        drops these is to get them freed at once."""
        for step in self.steps.values():
            if (optimizer := step.optimizer()) is not None:
                self._state_watch.stop(optimizer)
            step.outstanding.clear()
            step.outcome.failure = None
        self.failed = None
        self.steps.clear()

    def close(self) -> None:
        """The attachment is detached."""
        if self._worker is not None:
            self._worker.stop()

    def _step_of(self, stepper: Stepper) -> PartOfStep:
        beside = self.steps.get(stepper)
        if beside is None:
            step = self._step
            # Not a copy: the groups stay, and ``optimizer.step()`` raises if they were changed since the first bucket.
            outcome, members = Outcome(step.number, None, {}), step.members.of(stepper)
            beside = PartOfStep(stepper, members, outcome, step.times, put_off=False, wording=BESIDE_BACKWARD)
            self.steps[stepper] = beside
            self._state_watch.start(stepper.optimizer())
        return beside

    def _used_state(self, optimizer: Optimizer) -> None:
        """The optimizer's ``state`` is about to be read, replaced or copied."""
        if (wait := self._wait()) is not None:
            wait()
