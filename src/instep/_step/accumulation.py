"""Micro-batches: when gradients only add up, and when a backward is the last of its step. Steps whose gradients are
kept for the loop to read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from instep._ranks.votes import StepVotes
from instep._torch.engine import Phase, current, graph_task
from instep.errors import AccumulationError


class Syncing(Protocol):
    """The part of ``DistributedDataParallel`` that says whether its next backward communicates; FSDP in its terms."""

    require_backward_grad_sync: bool

    # FSDP's have ``asks_in_backward``, too: no_sync() around backward is enough.
    def no_sync(self) -> AbstractContextManager[None]: ...


class Accumulation:
    """Whether the running backward only adds to the gradients.

    It does inside ``hold`` (and DDP's ``no_sync``), and in all but each ``steps``-th backward.

    Args:
        steps: backwards in one step; 1: every one steps.
        wrapped: the living DDP instances (and FSDP models), whose ``no_sync`` a backward that only adds is run in.

    Attributes:
        is_sharded: whether the model is sharded by FSDP.
        runs_stages: whether a run of a pipeline is under way, in which each stage only adds up the gradients of its
            micro-batches; ``None``: the model is in none.
        kept: how many ``keep`` this is inside of: gradients are reduced as ever, and are left to ``optimizer.step()``.
        waiting: returns how many micro-batches of the step wait, after their forward, for the last one's backward.
        finish: runs one backward for those, if no last one comes.
    """

    def __init__(
        self, steps: int, wrapped: Callable[[], Sequence[Syncing]], votes: StepVotes, *, is_sharded: bool
    ) -> None:
        self.steps = steps
        self.runs_stages: bool | None = None
        self.waiting: Callable[[], int] = int
        self.finish: Callable[[], object] = int
        self.is_sharded = is_sharded
        self._wrapped = wrapped
        self._votes = votes
        self._ranks_differ = False
        self._held = 0
        self.kept = 0
        self._backwards = 0
        self._outermost: int | None = None
        self._counted: int | None = None
        self._held_back: list[Syncing] = []

    @property
    def is_in_hold(self) -> bool:
        """Whether this is inside of ``hold``, or of the loop's ``no_sync``."""
        if self._held > 0:
            return True
        if self.runs_stages:
            return True
        wrapped = self._wrapped()
        return bool(wrapped) and any(
            not ddp.require_backward_grad_sync for ddp in wrapped if ddp not in self._held_back
        )

    @property
    def is_partial(self) -> bool:
        """Whether some of a step's backwards have been, and others are to come."""
        return self._backwards % self.steps != 0

    @property
    def next_only_adds(self) -> bool:
        """Whether the backward that is about to begin only adds."""
        return self.is_in_hold or (self.steps > 1 and self._is_before_last)

    @property
    def _is_before_last(self) -> bool:
        return not self._ranks_differ and (self._backwards + 1) % self.steps != 0

    @property
    def distributed(self) -> bool:
        """Whether there are such instances."""
        return bool(self._wrapped())

    @property
    def only_adds(self) -> bool:
        """Whether gradients of the running backward are left to add up."""
        return self.is_in_hold or self.is_partial

    @contextmanager
    def hold(self, *, forward: bool = False) -> Iterator[None]:
        """Around forward and backward of a micro-batch whose gradients only add up; ``forward``: around the forward
        alone, in which the loop may say to those that ask in backward how they are to reduce."""
        with ExitStack() as stack:
            for ddp in self._wrapped():
                if not (forward and getattr(ddp, "asks_in_backward", False)):
                    stack.enter_context(ddp.no_sync())
            self._held += 1
            try:
                yield
            finally:
                self._held -= 1

    @contextmanager
    def in_run(self, *, stages: bool = True) -> Iterator[None]:
        """Around a run of the pipeline, whose stages only add to gradients: torch tells DDP and FSDP which backward
        reduces them. Within it, ``stages=False``: around what is done when one of them is through."""
        before, self.runs_stages = self.runs_stages, stages
        try:
            yield
        finally:
            self.runs_stages = before

    @contextmanager
    def keep(self) -> Iterator[None]:
        self.kept += 1
        try:
            yield
        finally:
            self.kept -= 1

    def decide(self) -> None:
        """Whether the next backward communicates. DDP asks in its forward; FSDP in backward, before which there may
        have been several forwards."""
        self.communicate_again()
        if self.steps == 1:
            return
        # Ranks that count in different ways would never meet. So each of them reduces the first backward, the least
        # that a step can have, and raises behind it: in optimizer.step(), or in the forward of another one.
        self._ranks_differ = self._votes.differ()
        if self._is_before_last:
            # What the loop's own no_sync has set, it will put back itself.
            self._held_back = [ddp for ddp in self._wrapped() if ddp.require_backward_grad_sync]
            for ddp in self._held_back:
                ddp.require_backward_grad_sync = False

    def begin(self) -> None:
        """An engine run has begun, of a backward or of ``autograd.grad``, which gives no parameter a gradient."""
        if self.steps > 1:
            self._outermost = graph_task()
            current().at(Phase.SETTLED, self._ended, self._ended)
        if self.is_sharded:
            self.decide()

    def count(self) -> bool:
        """A parameter has got its gradient: its backward counts, once, with those that reentrant checkpointing nests in
        it where ``begin`` told of it. Returns whether gradients of this backward are left to add up."""
        if self.steps == 1:
            return self.is_in_hold
        task = graph_task() if self._outermost is None else self._outermost
        if task is not None and task != self._counted:
            self._counted = task
            self._backwards += 1
        return self.only_adds

    def _ended(self) -> None:
        self._outermost = None

    def require_reduced(self) -> None:
        """Before ``optimizer.step()``: raise ``AccumulationError`` if the mean of these gradients is still owed, or the
        gradients themselves."""
        if waiting := self.waiting():
            raise AccumulationError(
                f"optimizer.step() came while the backward of {waiting} micro-batches waits for that of the "
                "step's last one, with which gradients are reduced over the ranks. Nothing was updated. Call "
                "overlap.backward(loss) for the last, without more=True; or zero_grad(), to throw them away"
            )
        done = self._backwards % self.steps
        if done and self._wrapped():
            raise AccumulationError(
                f"optimizer.step() came after {done} of accumulation_steps={self.steps} backwards: these gradients are "
                "this rank's own, and the last one reduces them. Nothing was updated. Leave "
                "out incomplete steps (drop_last=True), or use `with overlap.accumulate():` in place of "
                "accumulation_steps"
            )

    def stepped(self) -> None:
        """``optimizer.step()`` came: the next backward is the first of its step."""
        self._backwards = 0

    def communicate_again(self) -> None:
        """Every backward communicates again."""
        for ddp in self._held_back:
            ddp.require_backward_grad_sync = True
        self._held_back = []
