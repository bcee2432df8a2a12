"""What torch calls in each iteration: around the model's forward, where backward begins, and around ``step()``."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep._autograd.engine import graph_task
from instep._autograd.hooks import UntracedHook, first_of_tensor_hooks, is_called_by_step
from instep._autograd.outputs import nodes_of, tensors_of
from instep._autograd.tracing import Traced
from instep._life.weak import weakly
from instep._optim.stepper import Stepper
from instep._optim.unchanged import require_unchanged
from instep._profile import profiled
from instep._ranks.votes import StepVotes
from instep._step.accumulation import Accumulation
from instep._step.schedule import Schedule
from instep._wiring.held import Handles, Held, living_parameters
from instep._wiring.late import LateParameters
from instep._wiring.plain import PlainHooks
from instep._wiring.sharding import Sharding
from instep._wiring.stepping_itself import SteppingItself
from instep._wiring.threads import Threads, this_thread
from instep.errors import (
    HyperparameterChangedError,
    InstepError,
    StaleAttachmentError,
    UnsupportedOptimizerError,
)
from instep.sources import Source
from instep.sources.local.parts import ForwardCounts

if TYPE_CHECKING:
    from instep.sources.zero.source import Zero


class BackwardHooks:
    """
    Attributes:
        in_forward: whether the model's own forward is running.
    """

    def __init__(
        self,
        schedule: Schedule,
        sources: Sequence[Source],
        accumulation: Accumulation,
        threads: Threads,
        sharding: Sharding | None,
        stepping: SteppingItself | None,
        uses: ForwardCounts,
        handles: Handles,
    ) -> None:
        self.in_forward = False
        self._schedule = schedule
        self._sources = sources
        self._accumulation = accumulation
        self._threads = threads
        self._sharding = sharding
        self._stepping = stepping
        self._uses = uses
        self._handles = handles

    def see_backward_from(self, output: object) -> None:
        """A forward has returned ``output``, at which a backward may begin."""
        before_backward = UntracedHook(weakly(self.before_backward, this_thread()))
        for node in nodes_of(output):
            node.register_prehook(before_backward)
        if self._sharding is not None:
            # FSDP gathers weights in a hook on the same tensors, before the nodes' own. It raises there if a peer is
            # gone, and nobody would have heard of this backward.
            for tensor in tensors_of(output):
                first_of_tensor_hooks(tensor, before_backward)

    def before_backward(self, thread: int, gradients: object) -> None:
        """An output of the model is about to get its gradient. Its forward was on ``thread``."""
        if not self._handles:
            return  # detached since this graph was made
        self._threads.begin_backward(thread, self._end, self._failed)
        self.in_forward = False  # a forward that raised has not said that it is over
        self._schedule.begin_on_device()
        if self._schedule.begin_backward():
            if self._sharding is not None:
                self._accumulation.count()  # no hook of FSDP2's parameters is called while gradients only add up
            for source in self._sources:
                source.before_backward()
        # Asked for here it is the outermost backward's end; in a hook on a parameter, maybe that of one nested in it.
        if self._stepping is not None:
            self._stepping.ask()

    def begin_step(self) -> None:
        """The first gradient of a step is about to be announced."""
        if self._stepping is not None:
            self._stepping.ask()
        for source in self._sources:
            source.begin_step()

    def _end(self) -> None:
        self._threads.end_backward()
        self._schedule.end_backward()
        self._uses.clear()

    def _failed(self) -> None:
        self._end()
        self._schedule.backward_failed()
        if self._sharding is not None:
            self._sharding.backward_failed()
            self._accumulation.stepped()  # what the micro-batches before had added up is gone, too


class ForwardHooks:
    def __init__(
        self,
        held: Held,
        schedule: Schedule,
        sources: Sequence[Source],
        accumulation: Accumulation,
        threads: Threads,
        late: LateParameters,
        backwards: BackwardHooks,
        votes: StepVotes,
        *,
        is_sharded: bool,
    ) -> None:
        self._held = held
        self._schedule = schedule
        self._sources = sources
        self._accumulation = accumulation
        self._threads = threads
        self._late = late
        self._backwards = backwards
        self._votes = votes
        self._is_sharded = is_sharded

    def before_forward(self, module: nn.Module, args: object) -> None:
        """The model is about to run."""
        # Inside a backward this is a checkpointed segment run again.
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        follows = self._schedule.follows
        if follows:
            _unless_given_up(self._schedule, self._require_alone)
        self._schedule.before_forward()
        if follows:
            _unless_given_up(self._schedule, self._look)
        if torch.is_grad_enabled():
            self._begin_micro_batch()
        self._backwards.in_forward = True

    def after_forward(self, module: nn.Module, args: object, output: object) -> None:
        """The model's forward has returned."""
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        self._backwards.in_forward = False
        self._schedule.after_forward()
        self._backwards.see_backward_from(output)

    def _require_alone(self) -> None:
        """Raise if the model was wrapped since, or is trained by another thread."""
        self._refuse_late_ddp()
        if torch.is_grad_enabled():
            self._threads.require_one(this_thread(), "forward")

    def _look(self) -> None:
        """Raise if the parameters are not those that were attached any more. Take in those that were added."""
        require_unchanged(self._schedule.parameters)
        if self._schedule.state != "open":
            self._late.adopt()
            for source in self._sources:
                source.refresh()

    def _begin_micro_batch(self) -> None:
        self._votes.begin_forward()
        accumulation = self._accumulation
        # The loop may have given these micro-batches up. zero_grad() does not clear what FSDP2 adds up.
        given_up = accumulation.is_partial and not self._is_sharded
        if given_up and all(p.grad is None for p in living_parameters(self._schedule)):
            accumulation.stepped()
        accumulation.decide()

    def _refuse_late_ddp(self) -> None:
        # torch's own record of the DDP instance whose forward is running; dynamo reads it too.
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None and not any(ref() is ddp for ref in self._held.wrapped):
            raise StaleAttachmentError(
                f"{self._held.name} is run by a DistributedDataParallel that was not attached: its own gradients are "
                "those of this rank alone. detach(), wrap the model in DistributedDataParallel (not in torch's "
                "composable replicate(), which hides it), and attach that"
            )


class StepHooks:
    def __init__(
        self,
        schedule: Schedule,
        votes: StepVotes,
        late: LateParameters,
        zero: "Zero | None",
        forwards: ForwardHooks | PlainHooks,
        handles: Handles,
    ) -> None:
        self._schedule = schedule
        self._votes = votes
        self._late = late
        self._zero = zero
        self._forwards = forwards  # kept: a graph may go backward when the model is gone, and its optimizer is not
        self._handles = handles

    def before_step(
        self, stepper: Stepper, compiled: Traced, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """``optimizer.step()`` is called. A closure is followed by what is done right before the update."""
        if not self._handles or is_called_by_step(optimizer):
            return None  # Ctrl-C in ``attach`` has left this hook alone; or the call has begun already
        self._votes.require_same()
        self._schedule.begin_step(stepper)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if len(args) > 2 or kwargs.keys() - {"closure"} or (closure is not None and not callable(closure)):
            self._leave(stepper, _called_with_arguments(stepper), "called with arguments")
        elif compiled.yes:
            self._leave(stepper, _compiled(stepper), "compiled (torch.compile)")
        if not callable(closure):
            self._before_update(stepper)
            return None

        @functools.wraps(closure)
        def then_update() -> Any:
            loss = closure()
            if self._handles:  # else the closure has detached
                self._before_update(stepper)
            return loss

        if len(args) > 1:
            return (args[0], then_update, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_update}

    def _leave(self, stepper: Stepper, error: InstepError, how: str) -> None:
        """``step()`` is about to do otherwise than instep does."""
        self._schedule.leave_to_optimizer(stepper, error)
        if stepper.takes_all:
            raise UnsupportedOptimizerError(
                f"{stepper.name}.step() was {how}, and with offload='host' or random='keyed' instep takes every step: "
                "it does not know of that. Call optimizer.step() without arguments and outside of what is compiled, or "
                "attach without offload and random"
            )

    def after_step(self, stepper: Stepper, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``optimizer.step()`` is about to return."""
        if self._handles and not is_called_by_step(optimizer):
            with profiled("after update"):
                try:
                    self._schedule.commit(stepper)
                except KeyboardInterrupt:
                    # The step stands. It is brought to its end before the loop clears the gradients that it finds.
                    self._schedule.commit(stepper)
                    raise
            self._schedule.times.step_returns()

    def _before_update(self, stepper: Stepper) -> None:
        self._schedule.times.step_begins()
        if self._schedule.follows:
            _unless_given_up(self._schedule, self._late.adopt)
        if self._zero is not None:
            self._zero.require_reduced(a for a in self._schedule.parameters if a.stepper is stepper)
        with profiled("before update"):
            self._schedule.begin_flush(stepper)

    def before_state(self, stepper: Stepper, saving: bool, *_: object) -> None:
        """The optimizer's ``state_dict()`` or ``load_state_dict()`` is called."""
        self._schedule.before_state(stepper, saving=saving)

    def before_load(self, module: nn.Module, *_: object) -> None:
        """The model's ``load_state_dict()`` is called."""
        name = type(module).__name__
        if torch.__future__.get_swap_module_params_on_conversion():
            # torch writes a parameter, and then fails to swap it, since instep refers to it weakly.
            raise StaleAttachmentError(
                f"{name}.load_state_dict() would put other tensors into the parameters that are attached "
                "(torch.__future__.set_swap_module_params_on_conversion(True)). Nothing was loaded into it. detach() "
                "before it, and attach again after"
            )
        self._schedule.before_load(name)

    def before_model_state(self, *_: object) -> None:
        """The model's ``state_dict()`` is called."""
        self._schedule.before_save()


def _unless_given_up(schedule: Schedule, look: Callable[[], None]) -> None:
    try:
        look()
    except InstepError as error:
        schedule.lost(error)


def _called_with_arguments(stepper: Stepper) -> InstepError:
    return HyperparameterChangedError(
        f"{stepper.name}.step() was called with arguments, but backward had already stepped parameters without "
        "them. Use undo=True or schedule='forward'"
    )


def _compiled(stepper: Stepper) -> InstepError:
    return UnsupportedOptimizerError(
        f"{stepper.name}.step() was compiled (torch.compile), but backward had already stepped parameters without the "
        "compiler, which computes some values in another way. Call optimizer.step() outside of what is compiled; or "
        "use undo=True or schedule='forward', with which a compiled step() steps all parameters"
    )
