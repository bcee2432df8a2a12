"""When buckets are stepped, as seen from outside: the attachment holds one schedule."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from instep._optim.keyed import KeyedDraws
from instep._optim.owners import Owners
from instep._optim.parameters import AttachedParameter
from instep._optim.plan import Bucket
from instep._optim.stepper import Stepper
from instep._step.observed import Gains
from instep._step.passes import Losses
from instep._step.pending import InFlightBucket
from instep._step.recorder import Recorder
from instep._step.times import StepTimes
from instep._step.writes import Gather
from instep.errors import InstepError


class Schedule(Protocol):
    """One attachment's steps: ``BackwardSchedule``, ``ForwardSchedule`` or ``PlainSchedule``.

    Attributes:
        parameters: those that are attached, in the model's order.
        step_count: how many committed steps wrote anything.
        recorder: told of each bucket's step and communication; ``None`` when nobody listens.
        gather: with ``shard_state``: exchanges the shards that the ranks have stepped.
    """

    parameters: tuple[AttachedParameter, ...]
    step_count: int
    recorder: Recorder | None
    gather: Gather | None

    @property
    def redo_count(self) -> int:
        """The user asks how many steps were put back."""

    @property
    def skip_count(self) -> int:
        """The user asks how many steps were left out."""

    @property
    def times(self) -> StepTimes:
        """The user asks, and ``optimizer.step()`` tells, how long steps take the loop."""

    @property
    def freed_bytes(self) -> int:
        """The user asks how many bytes of gradients backward has freed before ``optimizer.step()``."""

    @property
    def state(self) -> str:
        """Hooks and checkpoints ask: ``"idle"``, ``"open"``, ``"pending"``, ``"torn"``, ``"disabled"``."""

    @property
    def follows(self) -> bool:
        """Whether it must know of parameters that are replaced or added, and of threads. Where ``step()`` does what the
        plain loop does, it need not."""

    @property
    def deferral(self) -> str | None:
        """Whether steps are put off, and why; ``None``: that is not the question."""

    @property
    def gains(self) -> Gains | None:
        """What the loop could gain by another schedule, as far as its steps show."""

    def lost(self, error: InstepError) -> None:
        """The loop does what the schedule cannot follow: raise ``error``, or leave all further steps to torch."""

    def stop(self, error: InstepError) -> None:
        """The backward that has just ended did not compute the plain loop's step: ``error`` says why, and is raised."""

    # What torch's hooks call.

    def before_forward(self) -> None:
        """The model's forward is about to run."""

    def after_forward(self) -> None:
        """The model's forward has returned."""

    def before_gather(self, parameters: Sequence[AttachedParameter]) -> None:
        """FSDP is about to gather these parameters."""

    def begin_on_device(self) -> None:
        """A backward has come to an output of the model, before ``begin_backward``."""

    def begin_backward(self) -> bool:
        """The same; ``True`` for the first output of each backward."""

    def end_backward(self) -> None:
        """The backward has ended, or raised."""

    def backward_failed(self) -> None:
        """The backward that ``begin_backward`` told of has raised."""

    def let_go_of_backwards(self) -> None:
        """FSDP's state is about to be rebuilt: return once a backward that raised has ended on every device."""

    def begin_step(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is called."""

    def leave_to_optimizer(self, stepper: Stepper, error: InstepError) -> None:
        """This ``optimizer.step()`` computes otherwise than a bucket's step: ``error`` says how."""

    def begin_flush(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to update, after its closure."""

    def commit(self, stepper: Stepper) -> None:
        """``optimizer.step()`` is about to return."""

    def before_state(self, stepper: Stepper, *, saving: bool) -> None:
        """``state_dict()`` or ``load_state_dict()`` of the optimizer is called."""

    def before_save(self) -> None:
        """``state_dict()`` of the model is called."""

    def before_load(self, model: str) -> None:
        """``load_state_dict()`` of the model, of this class, is called."""

    # What the user's verbs, checkpoints and recordings call.

    def backward(self, loss: Losses, gradient: torch.Tensor | None, adopt: Callable[[], None]) -> None:
        """``torch.autograd.backward(loss, gradient)``; twice, if the norm is measured in a backward of its own.
        ``adopt`` takes in the parameters that were added to an optimizer since the forward: these are measured too."""

    @property
    def draws(self) -> KeyedDraws | None:
        """With ``random="keyed"``: what updates draw from."""

    def draw_by(self, seed: int) -> None:
        """From now on each update draws by its key, with this seed."""

    def planned(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets of the plan, given those of the sources."""

    def synchronize(self) -> None:
        """Wait until parameters hold what the steps so far have written."""

    def require_whole(self) -> None:
        """Raise ``TornStepError`` if the last step was applied in part."""

    def last_complete_step(self) -> int | None:
        """The number of the last step, if all of it was applied on this rank."""

    def rollback(self) -> None:
        """Go back to where the last ``optimizer.step()`` left everything."""

    def accept(self) -> bool:
        """Take a torn step as it is; ``False``: there is none."""

    def forget(self, *, gradients: bool) -> None:
        """Give up a step that is open or torn; with ``gradients``, clear all of them."""

    def abandon(self) -> None:
        """The optimizers are gone."""

    def close(self) -> None:
        """The attachment is detached."""

    # What the attachment says once, when it is built, and when its model is gone.

    def read_by(self, streams: Callable[[], Iterable[torch.Stream]]) -> None:
        """FSDP2 reads shards on these streams."""

    def divides(self, owners_in_views: Owners) -> None:
        """Under DDP and ``replicate``: gradients may be views of buckets, whose memory has so many owners."""

    def crosses(self, in_flight: Callable[[], Sequence[InFlightBucket]], at_once: Callable[[], bool]) -> None:
        """With ``cross_iteration``: the buckets in flight, and whether nothing is to be put off."""
