"""What torch calls in each iteration: around forwards, where backward begins and ends, and around ``step()``."""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from instep._optim.dtensor import is_sharded, shard_of
from instep._optim.parameters import AttachedParameter, Attribute, require_unchanged
from instep._optim.stepper import Stepper
from instep._step.deferred import ForwardSchedule
from instep._step.in_backward import BackwardSchedule
from instep._step.schedule import Schedule
from instep._step.step import RunningStep
from instep._torch.engine import Phase, Traced, current, graph_task, profiled, runs
from instep._torch.hooks import (
    BoundHook,
    PlainPickles,
    WeakHook,
    first_of_tensor_hooks,
    is_called_by_step,
    nodes_of,
    tensors_of,
)
from instep._torch.interrupts import look_for_handlers
from instep._torch.lifetime import weakly
from instep._torch.placeholders import SpentGradient, dtype_of_gradient
from instep._torch.watch import ModuleHooks
from instep._wiring.weak_refs import Handles, WeakRefs
from instep.buckets import ParameterSpec
from instep.errors import (
    ConcurrentBackwardError,
    HyperparameterChangedError,
    InstepError,
    StaleAttachmentError,
    UnsupportedOptimizerError,
)
from instep.naming import parameters_of
from instep.sources import Source
from instep.sources.ddp.reducer import forget_comm_hook
from instep.sources.ddp.source import DDPSource
from instep.sources.fsdp.modules import ShardedGroup, before_fsdp1_gathers, put_shards_in_place
from instep.sources.fsdp.recovery import AfterErrors
from instep.sources.local import ForwardCounts
from instep.target import Names, name_parameters

if TYPE_CHECKING:
    from instep.sources.zero.source import Zero


class SteppingItself:
    """Calls ``optimizer.step()`` where each backward ends, for loops that have no such call."""

    def __init__(self, optimizers: Sequence[Optimizer], schedule: Schedule, sources: Sequence[Source]) -> None:
        self._optimizers = list(optimizers)  # nobody else need hold one whose step() nobody calls
        self._schedule = schedule
        self._sources = sources
        self._due = False

    def ask(self) -> None:
        """A backward is running: step where it ends."""
        if not self._due:
            current().at(Phase.SETTLED, self._step, self._never_stepped)
            self._due = True  # now that its end will be heard of, whatever comes

    def _step(self) -> None:
        self._due = False
        # DDP sets gradients that no source announces, of parameters that only other ranks used, where it has reduced.
        reduced = [source.reduced() for source in self._sources if isinstance(source, DDPSource)]
        if self._schedule.state == "open" or any(reduced):
            for optimizer in self._optimizers:
                optimizer.step()
            self._clear()

    def _never_stepped(self) -> None:
        self._due = False
        self._clear()

    def _clear(self) -> None:
        for attached in self._schedule.parameters:
            if (parameter := attached.peek()) is not None:
                parameter.grad = None


ModuleParameters = tuple[nn.Module, list[AttachedParameter]]


class Readers:
    """What is done before a module that holds attached parameters itself reads them. With ``INSTEP_DISABLE=1`` nothing:
    weights are written in ``optimizer.step()`` alone.

    Attributes:
        while_open: those of its hooks that are there from the first gradient of a step to the next forward alone.
        hooks: what they are a part of. Weakly: that owns them.
    """

    def __init__(self) -> None:
        self.while_open = ModuleHooks()
        self.hooks: Callable[[], IterationHooks | None] = lambda: None

    def watch(self, model: nn.Module, owners: Sequence[ModuleParameters], handles: Handles) -> None:
        """Hooks on the modules that hold attached parameters themselves."""


ErrorForUse = Callable[[ParameterSpec, str], InstepError | None]


@dataclass(eq=False)
class ParametersOfModel:
    """The parameters of the model that an attached optimizer has: at first, and those that ``add_param_group`` adds.

    Attributes:
        groups: into which FSDP has divided the model.
        zero: with ``shard_state``: knows the rows of this rank.
        told: is called with each of the model's parameters, and its name in the bare model; ``None``: nobody asks.
        error_for_use: what the use of a gradient that was applied raises; ``None``: nothing is put in its place.
        sources: of their gradients; none yet, at first.
    """

    refs: WeakRefs
    schedule: Schedule
    groups: Sequence[ShardedGroup]
    in_fsdp1: bool
    zero: "Zero | None"
    told: Callable[[torch.Tensor, str], None] | None
    error_for_use: ErrorForUse | None
    readers: Readers
    sources: Sequence[Source]
    handles: Handles

    def __post_init__(self) -> None:
        self._grouped = _parameters_in(self.refs.optimizers())

    def gather(
        self, optimizers: Sequence[Optimizer], names: Names, first_index: int = 0
    ) -> tuple[AttachedParameter, ...]:
        """Those of ``names`` that one of the attached ``optimizers`` has, numbered from ``first_index``."""
        if self.told is not None and (model := self.refs.model()) is not None:
            for name, parameter in parameters_of(model):
                self.told(parameter, name)
        owner = {
            id(p): stepper
            for optimizer, stepper in zip(optimizers, self.refs.steppers, strict=True)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        owned = (
            (parameter, places)
            for parameter, places in names.values()
            if id(parameter) in owner and not is_lazy(parameter)  # those are left to torch, whole
        )
        return tuple(
            self._attached(parameter, places, index, owner[id(parameter)])
            for index, (parameter, places) in enumerate(owned, first_index)
        )

    def _attached(
        self, parameter: torch.Tensor, places: tuple[Attribute, ...], index: int, stepper: Stepper
    ) -> AttachedParameter:
        name = places[0].name
        of_gradient = dtype_of_gradient(parameter)
        nbytes = getattr(parameter, "_local_tensor", parameter).numel() * of_gradient.itemsize
        group = next((n for n, g in enumerate(self.groups) if id(parameter) in g.members), None)
        spec = ParameterSpec(index, name, parameter.shape, parameter.dtype, parameter.device, nbytes, group)
        spent = None
        if self.error_for_use is not None:
            spent = SpentGradient(parameter, name, weakly(self.error_for_use, spec), dtype=of_gradient)
        # A sharded model puts other tensors in the parameters' places while it computes.
        held = () if self.in_fsdp1 or (group is not None and is_sharded(parameter)) else places
        zero = self.zero
        find = zero.shards.shard_of if zero is not None and id(parameter) in zero.reduced else shard_of
        shard, mesh = find(parameter, stepper.optimizer()), getattr(parameter, "device_mesh", None)
        return AttachedParameter(parameter, spec, held, stepper, spent, shard, mesh)

    def buckets(self) -> Iterator[Sequence[int]]:
        """Those of the sources, by the indices of their parameters."""
        for source in self.sources:
            for bucket in source.buckets:
                yield [spec.index for spec in bucket.parameters]

    def watch(self, model: nn.Module, parameters: Sequence[AttachedParameter]) -> None:
        """Hooks on the modules that hold ``parameters`` themselves."""
        owners: dict[nn.Module, list[AttachedParameter]] = {}
        for attached in parameters:
            for place in attached.places:
                if (owner := place.module()) is not None:
                    owners.setdefault(owner, []).append(attached)
        self.readers.watch(model, list[ModuleParameters](owners.items()), self.handles)

    def adopt(self) -> None:
        """Between steps: take in the model's parameters that were added to an optimizer (``add_param_group``) since."""
        optimizers = self.refs.optimizers()
        grouped = _parameters_in(optimizers)
        model = self.refs.model()
        if grouped == self._grouped or model is None or len(optimizers) < len(self.refs.steppers):
            return
        self._require_in_place(grouped)
        put_shards_in_place(model)
        names = name_parameters(model)
        _require_once(grouped, names)
        self._grouped = grouped
        known = {id(attached.peek()): attached for attached in self.schedule.parameters}
        others = {key: names[key] for key in names if key not in known}
        added: Sequence[AttachedParameter] = self.gather(optimizers, others, len(known))
        everything = {**known, **{id(attached.get()): attached for attached in added}}
        self.schedule.parameters = tuple(everything[key] for key in names if key in everything)
        for source in self.sources:
            added = source.adopt(added)
        self.watch(model, added)
        self.handles.append(PlainPickles(model.modules()))

    def _require_in_place(self, grouped: Sequence[Sequence[int]]) -> None:
        for stepper, ids in zip(self.refs.steppers, map(set, grouped), strict=True):
            for attached in self.schedule.parameters:
                if attached.stepper is stepper and id(attached.peek()) not in ids:
                    raise StaleAttachmentError(
                        f"parameter {attached.spec.name!r} is no longer in {stepper.name}.param_groups. detach() "
                        "before taking parameters out of an optimizer, or now, and attach again after"
                    )


def _require_once(grouped: Sequence[Sequence[int]], names: Names) -> None:
    for key, count in Counter(chain.from_iterable(grouped)).items():
        if count > 1 and key in names:
            raise StaleAttachmentError(
                f"parameter {names[key][1][0].name!r} has come into param_groups a second time: it would be stepped "
                "twice. Take it out of the groups it has come into"
            )


def _parameters_in(optimizers: Sequence[Optimizer]) -> list[list[int]]:
    """By ``id``, of each optimizer."""
    return [list(map(id, chain.from_iterable(map(_PARAMS, optimizer.param_groups)))) for optimizer in optimizers]


_PARAMS = itemgetter("params")


@dataclass(frozen=True, eq=False)
class Sharding:
    """Hooks around the groups into which FSDP has divided a model: before a group is gathered, and after errors.

    Attributes:
        uses: told of each group's forwards.
    """

    groups: Sequence[ShardedGroup]
    schedule: Schedule
    uses: ForwardCounts
    after_errors: AfterErrors
    in_fsdp1: bool

    def connect(self, handles: Handles) -> None:
        for number, group in enumerate(self.groups):
            module = group.module()
            assert module is not None
            shards = [a for a in self.schedule.parameters if a.spec.group == number]
            if self.in_fsdp1:
                # It gathers in the model's own forward, of which ``"backward"`` has been told.
                if isinstance(self.schedule, ForwardSchedule):
                    before_read = BoundHook(functools.partial(self.schedule.before_read, shards))
                    handles.extend(before_fsdp1_gathers(module, before_read))
            else:
                before = BoundHook(functools.partial(self._before_gather, number, shards))
                handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.extend(self.after_errors.connect(weakly(self.schedule.drain_failed_backwards)))

    def reduces_once(self) -> None:
        """The next backward reduces each group's gradients once, however many forwards it is of; or one has ended."""
        self.uses.clear()

    def _before_gather(self, number: int, shards: Sequence[AttachedParameter], module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        if torch.is_grad_enabled():
            self.uses.ran(number)
        self.schedule.before_gather(shards)


class IterationHooks:
    """What torch calls around a model's forward, where a backward of it begins and ends, around ``optimizer.step()``,
    and before state or weights are saved or loaded.

    A model is trained on one thread: an error says so where another one begins a forward or a backward meanwhile.

    Attributes:
        in_forward: whether the model's own is running.
        in_backward: whether a backward is.
    """

    def __init__(
        self,
        refs: WeakRefs,
        step: RunningStep,
        schedule: Schedule,
        parameters: ParametersOfModel,
        zero: "Zero | None",
        sharding: Sharding | None,
        stepping: SteppingItself | None,
        handles: Handles,
    ) -> None:
        self.parameters = parameters
        self.in_forward = self.in_backward = False
        self._refs = refs
        self._schedule = schedule
        self._members, self._votes, self._accumulation = step.members, step.ledger.votes, step.accumulation
        self._zero = zero
        self._sharding = sharding
        self._stepping = stepping
        self._handles = handles
        # The thread whose forward the running backward, or the open step, belongs to.
        self._thread: int | None = None

    # Forward.

    def before_forward(self, module: object, args: object) -> None:
        """The model is about to run."""
        # Inside a backward this is a checkpointed segment run again. What a micro-batch of a pipeline asks for was done
        # when the run began.
        if torch.compiler.is_compiling() or self._schedule.rests:
            return
        if graph_task() is not None or self._accumulation.runs_stages:
            return
        look_for_handlers()
        follows = self._schedule.follows
        if follows:
            _unless_given_up(self._schedule, self._require_alone)
        self._schedule.before_forward()
        if follows:
            _unless_given_up(self._schedule, self._look)
        if torch.is_grad_enabled():
            self._begin_micro_batch()
        if self.parameters.readers.while_open.are_there:
            self.parameters.readers.while_open.stop()
        self.in_forward = True

    def after_forward(self, module: object, args: object, output: object) -> None:
        """The model's forward has returned."""
        if torch.compiler.is_compiling() or self._schedule.rests or graph_task() is not None:
            return
        if self._accumulation.runs_stages:
            if self._accumulation.is_sharded:
                self.see_backward_from(output)  # after an error in it FSDP's state is rebuilt
            return
        self.in_forward = False
        self._schedule.after_forward()
        self.see_backward_from(output)

    def after_wrapped(self, *_: object) -> None:
        """The forward of what DDP wraps has returned: wait for the buckets that this forward did not read, as
        ``Schedule.after_forward`` does, of which nobody hears where the loop calls ``forward()`` of the wrapper."""
        if not torch.compiler.is_compiling() and graph_task() is None and torch.is_grad_enabled():
            self._schedule.synchronize()

    def _require_alone(self) -> None:
        """Raise if the model was wrapped since, or is trained by another thread."""
        # torch's own record of the DDP instance whose forward is running; dynamo reads it too.
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None and not any(ref() is ddp for ref in self._refs.wrapped):
            raise StaleAttachmentError(
                f"{self._refs.name} is run by a DistributedDataParallel that was not attached: its own gradients are "
                "those of this rank alone. detach(), wrap the model in DistributedDataParallel (not in torch's "
                "composable replicate(), which hides it), and attach that"
            )
        if torch.is_grad_enabled():
            self._require_one_thread(threading.get_ident(), "forward")

    def _look(self) -> None:
        """Raise if the parameters are not those that were attached any more. Take in those that were added."""
        # Without gradients others may stand in for a moment, as a target network's, and none is trained. And torch.jit
        # notes what is read while it traces, and traces once more without gradients, to compare the two.
        if torch.is_grad_enabled() and not torch.jit.is_tracing():
            require_unchanged(self._schedule.parameters)
        if self._schedule.state != "open":
            self.parameters.adopt()
            for source in self.parameters.sources:
                source.refresh()

    def _begin_micro_batch(self) -> None:
        self._votes.begin_forward()
        accumulation = self._accumulation
        # The loop may have given these micro-batches up. zero_grad() does not clear what FSDP2 adds up.
        given_up = accumulation.is_partial and not accumulation.is_sharded
        if given_up and all(p.grad is None for p in self._members.living()):
            accumulation.stepped()
        accumulation.decide()

    # Backward.

    def see_backward_from(self, output: object) -> None:
        """A forward has returned ``output``, at which a backward may begin."""
        before_backward = WeakHook(self.before_backward, threading.get_ident())
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
        self._begin_backward(thread)
        self.in_forward = False  # a forward that raised has not said that it is over
        self._schedule.begin_on_device(thread)
        if self._schedule.begin_backward():
            if self._sharding is not None:
                self._accumulation.count()  # no hook of FSDP2's parameters is called while gradients only add up
            for source in self.parameters.sources:
                source.before_backward()
        # Asked for here it is the outermost backward's end; in a hook on a parameter, maybe that of one nested in it.
        if self._stepping is not None:
            self._stepping.ask()

    def count(self, parameter: object) -> None:
        """A gradient was accumulated."""
        self._accumulation.count()

    def communicates(self) -> bool:
        """Whether the running backward gives an attached parameter its gradient: ``autograd.grad`` gives none."""
        with torch._C.DisableTorchFunctionSubclass():  # no value is used, and nobody who watches need be told
            return any(runs(get_gradient_edge(p).node) for p in self._members.living() if p.requires_grad)

    def stand_aside(self) -> None:
        """The running backward, which has sent nothing yet, reduces gradients as torch does without instep."""
        for source in self.parameters.sources:
            source.disconnect()
        for ddp in self._refs.ddps():
            forget_comm_hook(ddp)

    def _begin_backward(self, thread: int) -> None:
        """For the first output ask for the backward's end.

        Without a lock, which Ctrl-C might leave taken: on accelerators the threads of two devices may both ask, and the
        second call of ``_end`` finds nothing to do.
        """
        try:
            self._require_one_thread(thread, "backward")
        except ConcurrentBackwardError as error:
            self._schedule.lost(error)
        self._thread = thread
        if not self.in_backward:
            current().at(Phase.SETTLED, self._end, self._failed)
            self.in_backward = True  # now that its end will be heard of, whatever comes

    def _require_one_thread(self, thread: int, what: str) -> None:
        """A forward, or a backward whose forward was on ``thread``, is about to begin: raise
        ``ConcurrentBackwardError`` while the step of another thread is open."""
        if self._thread not in (None, thread) and (self.in_backward or self._schedule.state == "open"):
            raise ConcurrentBackwardError(
                f"a {what} of {self._refs.name} began on one thread while the step of another one is open: their "
                "gradients would be mixed. Train a model on one thread at a time, or give each thread a model and an "
                "optimizer of its own"
            )

    def _end(self) -> None:
        self.in_backward = False
        self._schedule.end_backward()
        if self._sharding is not None:
            self._sharding.reduces_once()

    def _failed(self) -> None:
        self._end()
        self._schedule.backward_failed()
        if self._sharding is not None:
            self._sharding.after_errors.backward_failed()
            self._accumulation.stepped()  # what the micro-batches before had added up is gone, too

    # ``optimizer.step()``, and what is saved or loaded.

    def before_step(
        self, stepper: Stepper, compiled: Traced, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """``optimizer.step()`` is called. A closure is followed by what is done right before the update."""
        if not self._handles or is_called_by_step(optimizer):
            return None  # Ctrl-C in ``attach`` has left this hook alone; or the call has begun already
        if self._schedule.rests and len(args) == 1 and not kwargs:
            self._schedule.calls.begin_at_rest(stepper)
            return None
        self._votes.require_same()
        self._schedule.calls.begin(stepper)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if len(args) > 2 or kwargs.keys() - {"closure"} or (closure is not None and not callable(closure)):
            error: InstepError = HyperparameterChangedError(
                f"{stepper.name}.step() was called with arguments, but backward had already stepped parameters without "
                "them. Use undo=True or schedule='forward'"
            )
            self._leave(stepper, error, "called with arguments")
        elif compiled.yes:
            error = UnsupportedOptimizerError(
                f"{stepper.name}.step() was compiled (torch.compile), but backward had already stepped parameters "
                "without the compiler, which computes some values in another way. Call optimizer.step() outside of "
                "what is compiled; or use undo=True or schedule='forward', with which a compiled step() steps all "
                "parameters"
            )
            self._leave(stepper, error, "compiled (torch.compile)")
        if not callable(closure):
            self._before_update(stepper)
            return None

        @functools.wraps(closure)
        def then_update() -> Any:
            loss = closure()
            if self._handles:  # else the closure has detached
                self._schedule.closure_ran(stepper)
                self._before_update(stepper)
            return loss

        if len(args) > 1:
            return (args[0], then_update, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_update}

    def _leave(self, stepper: Stepper, error: InstepError, how: str) -> None:
        """``step()`` is about to do otherwise than instep does."""
        self._schedule.calls.leave_to_optimizer(stepper, error)
        if stepper.steps_every_parameter:
            raise UnsupportedOptimizerError(
                f"{stepper.name}.step() was {how}, and with offload='host' or random='keyed' instep takes every step: "
                "it does not know of that. Call optimizer.step() without arguments and outside of what is compiled, or "
                "attach without offload and random"
            )

    def after_step(self, stepper: Stepper, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``optimizer.step()`` is about to return."""
        if self._handles and not is_called_by_step(optimizer):
            with profiled("after update"):
                self._schedule.calls.returned(stepper)
            self._schedule.times.step_returns()

    def _before_update(self, stepper: Stepper) -> None:
        self._accumulation.finish()
        self._schedule.times.step_begins()
        if self._schedule.follows:
            _unless_given_up(self._schedule, self.parameters.adopt)
        if self._zero is not None:
            self._zero.require_reduced(a for a in self._schedule.parameters if a.stepper is stepper)
        with profiled("before update"):
            self._schedule.calls.before_update(stepper)

    def before_state(self, stepper: Stepper, saving: bool, *_: object) -> None:
        """The optimizer's ``state_dict()`` or ``load_state_dict()`` is called."""
        self._schedule.before_state(stepper, saving=saving)

    def before_load(self, module: nn.Module, *_: object) -> None:
        """The model's ``load_state_dict()`` is called."""
        self._schedule.before_load(type(module).__name__)

    def before_model_state(self, *_: object) -> None:
        """The model's ``state_dict()`` is called."""
        self._schedule.before_save()


class PlainHooks(IterationHooks):
    """With ``INSTEP_DISABLE=1`` micro-batches are counted, and backwards seen to begin."""

    def before_forward(self, module: object, args: object) -> None:
        if torch.compiler.is_compiling() or graph_task() is not None or self._accumulation.runs_stages:
            return
        if torch.is_grad_enabled():
            self._votes.begin_forward()
            self._accumulation.decide()

    def after_forward(self, module: object, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or graph_task() is not None or self._accumulation.runs_stages:
            return
        self.see_backward_from(output)

    def before_backward(self, thread: int, gradients: object) -> None:
        if self._handles and self._schedule.begin_backward() and self._accumulation.is_sharded:
            self._accumulation.count()  # no hook of FSDP2's parameters is called while gradients only add up


def _unless_given_up(schedule: Schedule, look: Callable[[], None]) -> None:
    try:
        look()
    except InstepError as error:
        schedule.lost(error)


class CheckedReaders(Readers):
    """``schedule="backward"``: a part of the model that runs by itself may read what an open step has written.

    A module that has a hook is called by a longer way, and a model may have hundreds. So on a CPU, where no stream is
    to be noted, hooks are there from the first gradient of a step to the next forward alone. With ``undo`` they always
    are: a part may run before the backward that is undone.
    """

    def __init__(self, schedule: BackwardSchedule, on_trial: bool) -> None:
        super().__init__()
        self._schedule = schedule
        self._on_trial = on_trial

    def watch(self, model: nn.Module, owners: Sequence[ModuleParameters], handles: Handles) -> None:
        for owner, parameters in owners:
            if owner is not model:
                device = parameters[0].spec.device
                seen = None if device.type == "cpu" else self._schedule.streams.producers.known(device)
                before_read = weakly(self._before_read, parameters)
                hook = ReaderHook(before_read, self.hooks, device, seen)  # ``while_open`` may have it in a list
                handle = owner.register_forward_pre_hook(hook)
                handles.append(handle)
                if seen is None and not self._on_trial:
                    self.while_open.add(handle, hook)

    def _before_read(self, parameters: Sequence[AttachedParameter], module: nn.Module, args: object) -> None:
        schedule, hooks = self._schedule, self.hooks()
        if graph_task() is not None or hooks is None:
            return
        schedule.streams.producers.note_current(parameters[0].spec.device)
        if any(map(schedule.is_applied, parameters)):
            schedule.before_forward()
        if self._on_trial and torch.is_grad_enabled():
            self._see_backward_of(module, hooks)

    def _see_backward_of(self, part: nn.Module, hooks: IterationHooks) -> None:
        """A backward may begin at what ``part``, which runs by itself, is about to return, and go through weights that
        an earlier one has written on trial."""

        def see(part: nn.Module, args: object, output: object) -> None:
            once.remove()
            see_backward_from(output)

        see_backward_from = weakly(hooks.see_backward_from)
        once = part.register_forward_hook(BoundHook(see))


class ReaderHook(BoundHook):
    """Called before a part of the model reads its parameters. In the model's own forward, where the model has asked
    already what is to be asked, it notes the stream, and nothing else: it is called for each of hundreds of modules.

    Args:
        before_read: is called where the part runs by itself.
        hooks: those of the iteration, which know whether the model's forward runs; ``None``: they are gone.
        seen: the streams of ``device`` that use weights, to which the current one is added; ``None``: it has none.
    """

    __slots__ = ("_hooks", "_index", "_seen")

    def __init__(
        self,
        before_read: Callable[..., None],
        hooks: Callable[[], IterationHooks | None],
        device: torch.device,
        seen: set[torch.Stream] | None,
    ) -> None:
        super().__init__(before_read)
        self._hooks, self._index, self._seen = hooks, device.index, seen

    def __call__(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        hooks = self._hooks()
        if hooks is None or not hooks.in_forward:
            super().__call__(module, args)
        elif self._seen is not None:
            self._seen.add(torch.accelerator.current_stream(self._index))


class WaitingReaders(Readers):
    """``schedule="forward"``: a module waits for the buckets that it reads."""

    def __init__(self, schedule: ForwardSchedule) -> None:
        super().__init__()
        self._schedule = schedule

    def watch(self, model: nn.Module, owners: Sequence[ModuleParameters], handles: Handles) -> None:
        schedule = self._schedule
        # torch.compile runs the hooks of what it wraps only once, when it traces. Its own wrapper's run each time.
        compiled = _compiled_in(model)
        schedule.observed.is_compiled = bool(compiled)
        inside = {module for wrapper in compiled for module in wrapper.modules()}
        for wrapper in compiled:
            below = {id(p) for p in wrapper.parameters()}
            parameters = [a for a in schedule.parameters if id(a.get()) in below]
            handles.append(schedule.watch_reader(wrapper, parameters))
        for owner, parameters in owners:
            if owner not in inside:
                reader = schedule.watch_reader(owner, parameters)
                schedule.readers.append(reader)
                handles.append(reader)


def _compiled_in(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` that ``torch.compile`` has wrapped."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported: not used
    if dynamo is None:
        return []
    return [module for module in model.modules() if isinstance(module, dynamo.OptimizedModule)]
