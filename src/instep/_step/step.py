"""The step that runs in one attachment, with those who take part in it.

With ``schedule="backward"`` all of this folder is the exact version of ten lines, which nobody must disturb:

    def count(parameter):                      # its gradient is final
        bucket = bucket_of[parameter]
        bucket.missing -= 1
        if bucket.missing == 0:                # those of all of its parameters are
            optimizer.update(bucket)           # as step() would update these parameters alone
            bucket.missing = len(bucket)
            for p in bucket:
                p.grad = None                  # freed; and step() finds none
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)

What is around them answers: may this bucket be written now (``in_backward``, ``accumulation``, ``judging``, ``norms``);
what becomes of a step that fails in part (``state``, ``writes``, ``on_trial``); who reads or writes in between
(``writes``, ``deferred``); and what ``optimizer.step()`` is still to do (``step_calls``). With ``schedule="forward"``
``optimizer.step()`` prepares the same updates, and whoever reads a weight waits for its own (``deferred``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from instep._gradients.clipping import Clipping
from instep._gradients.scaling import Policy
from instep._optim.parameters import AttachedParameter
from instep._optim.shadow import asks_for_state
from instep._optim.stepper import Stepper
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation
from instep._step.judging import Judge
from instep._step.norms import Passes
from instep._step.state import Gather, GradientOf, Ledger, Round, StepMembers, StepTimes
from instep._step.streams import StepStreams
from instep._torch.engine import Backwards
from instep._torch.interrupts import StepLock
from instep.errors import InstepError, StepMismatchError, UnsupportedOptimizerError


def gradients_in(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Those that its ``step()`` would find. Of parameters that the loop may have replaced since they were attached."""
    return (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def finds_gradient(optimizer: Optimizer) -> bool:
    """Whether there is one of them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


class RunningStep:
    """The step that runs in one attachment, with everything that takes part in it.

    Attributes:
        backwards: those that were seen to begin.
        judge: of foreign optimizers, whether they may be stepped in parts; ``None``: there are none.
        buckets: those of the plan, by the indices of their parameters.
        freed_bytes: of gradients that backward has freed before ``optimizer.step()``, in all steps.
        has_gradients: whether sources have offered gradients since the last step, or, with ``schedule="forward"``, a
            backward was seen to begin.
        gather: with ``shard_state``, where each rank steps its own shard of parameters: gets the others' shards.
        lock: held by whoever changes any of this.
    """

    def __init__(
        self,
        members: StepMembers,
        votes: StepVotes,
        accumulation: Accumulation,
        clipping: Clipping,
        judge: Judge | None,
        nonfinite: Policy,
    ) -> None:
        self.members = members
        self.ledger = Ledger(votes, nonfinite)
        self.round = Round()
        self.streams = StepStreams()
        self.passes = Passes(clipping, members, self.streams)
        self.accumulation = accumulation
        self.backwards = Backwards()
        self.judge = judge
        self.buckets: Callable[[], Iterable[Sequence[int]] | None] = tuple
        self.times = StepTimes()
        self.freed_bytes = 0
        self.has_gradients = False
        self.gather: Gather | None = None
        self.lock = StepLock()

    @property
    def number(self) -> int:
        """Of this step, counted from 1."""
        return self.ledger.step_count + 1

    def tear_last(self, cause: BaseException) -> None:
        """The last step was committed here, and is not known to stand on the other ranks. Here it is whole: what other
        ranks have updated of it was written when all had said that they had."""
        # Where ranks have taken unequally many steps, all of them go on from the highest number.
        reached = max(self.ledger.step_count, self.ledger.votes.furthest if isinstance(cause, StepMismatchError) else 0)
        names = [a.spec.name for a in self.members.all]
        self.ledger.tear(self.ledger.step_count, names, [], cause, accepted=reached)

    def hear(self, torn: Callable[[], object] = int, *, wait: bool) -> None:
        """What the ranks have said of the last step, for which this may ``wait``: raise, if it does not stand on all
        of them. ``torn`` is called before."""
        if self.ledger.votes.ranks is None:
            return  # as mostly, and asked several times in each step
        error = self.ledger.votes.heard(wait=wait)
        if self.judge is not None and self.ledger.votes.objected_on is not None:
            self.judge.object(
                f"rank {self.ledger.votes.objected_on} has found parameters to be coupled: its log says how"
            )
        try:
            if error is not None and self.ledger.torn is None:  # else it is known to stand in part
                self.tear_last(error)
                torn()
                if isinstance(error, StepMismatchError):
                    raise error
                self.ledger.require_whole()
        finally:
            del error  # or it would refer to itself, by way of this frame

    @property
    def leaves_all(self) -> bool:
        """Whether all of this step is left to ``optimizer.step()``."""
        return self.accumulation.kept > 0 or (self.judge is not None and self.judge.leaves_all)

    def before_update(self, stepper: Stepper, left: Iterable[AttachedParameter]) -> None:
        """``step()`` is about to update ``left``: an update that is judged is taken in parts before, which are put
        back."""
        if self.judge is None:
            return
        try:
            self.judge.before_update(stepper, left, self.members.all, self.buckets() or ())
        except UnsupportedOptimizerError:
            self.ledger.votes.say_failed(self.number)  # the others wait for what this rank says of it
            raise

    def is_in_loop(self, optimizer: Optimizer, gradients: Iterable[torch.Tensor]) -> bool:
        """Whether a ``step()`` with these gradients is one of a training loop: else whoever made them wants the state
        now."""
        return self.has_gradients or not asks_for_state(optimizer, gradients, first=self.ledger.step_count == 0)

    def count_gradients(self, stepper: Stepper, gradient_of: GradientOf) -> None:
        """``optimizer.step()`` finds gradients that no source has offered, or that were left to it: they make a step,
        too, unless no backward is known of, and the call only asks for state."""
        pairs = [(a.stepper, g) for a in self.members.all if (g := gradient_of(a)) is not None]
        if not pairs and self.is_owed_without_gradients:
            self.round.steppers_left.update(self.members.steppers)
            return
        if self.is_in_loop(stepper.optimizer(), (g for _, g in pairs)):
            self.has_gradients = bool(pairs)
            self.round.steppers_left.update(s for s, _ in pairs)

    @property
    def is_owed_without_gradients(self) -> bool:
        """Whether the other ranks wait for this step, in which this rank's stages have no gradient."""
        return self.accumulation.runs_stages is not None and self.ledger.votes.owes

    def require_run(self) -> None:
        """A stage of the pipeline runs backward outside of its runs: raise if the ranks vote on these."""
        if self.ledger.votes.voting is not None:
            raise InstepError(
                "a stage ran backward outside of schedule.step(…) of the schedule that was given to attach(…, "
                "pipeline=…): another schedule has run it, or the loop itself. Nothing was updated. To train with "
                "another schedule: overlap.detach(), and attach with pipeline= that one"
            )

    def end_step(self) -> None:
        """The step is over, or was none."""
        self.members.end_step()
        self.round.end_step()
        self.has_gradients = False
        self.passes.end_step()
        if self.judge is not None:
            self.judge.end_step()
        for stepper in self.members.steppers:
            stepper.abort()
