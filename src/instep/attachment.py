"""``attach``: the optimizer's step moves behind other work, and the loop stays as it is."""

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from instep._arguments import optimizers_of, require_model
from instep._autograd.backward import Phase, current
from instep._autograd.engine import graph_task, runs
from instep._autograd.hooks import BoundHook, UntracedHook, first_of_post_hooks, is_called_by_step, last_of_pre_hooks
from instep._autograd.outputs import nodes_of
from instep._autograd.pickles import PlainPickles
from instep._autograd.placeholders import SpentGradient
from instep._autograd.precision import LowPrecision
from instep._autograd.tracing import Traced
from instep._gradients.clipping import Clipping
from instep._gradients.finite import Policy
from instep._gradients.policies import ClipNorm, ClipValue
from instep._gradients.scaling import LossScale
from instep._life.life import Owners
from instep._life.weak import weakly
from instep._optim.dtensor import is_sharded, local_numel, mesh_of, part_of
from instep._optim.parameters import AttachedParameter, require_unchanged
from instep._optim.plan import MIB, ParameterSpec, Plan
from instep._optim.probe import separability_of
from instep._optim.stepper import Stepper
from instep._optim.undo import Undo
from instep._ranks.group_votes import GroupVotes, groups_of, in_join
from instep._ranks.messages import broadcast_json
from instep._ranks.resync import resync
from instep._ranks.votes import StepVotes
from instep._refusals.rules import DISABLED, MODEL, OPTIONS, PARAMETERS, refuse
from instep._step.accumulation import Accumulation, Syncing
from instep._step.backward_schedule import BackwardSchedule
from instep._step.checking import Check
from instep._step.forward_schedule import ForwardSchedule
from instep._step.measuring import MeasuringSink
from instep._step.pending import InFlightBucket
from instep._step.plain_schedule import PlainSchedule
from instep._step.reading import ReadHook
from instep._step.recorder import Recorder
from instep._step.schedule import Schedule
from instep.errors import (
    AttachError,
    ConcurrentBackwardError,
    HyperparameterChangedError,
    InstepError,
    StaleAttachmentError,
    UncommittedStepError,
    UnsupportedOptimizerError,
)
from instep.options import Communication, Options
from instep.sources import Sink, Source
from instep.sources.crossing.source import CrossingSource
from instep.sources.ddp.hook_slot import CommHook
from instep.sources.ddp.source import DDPSource
from instep.sources.fsdp.after_errors import AfterErrors
from instep.sources.fsdp.source import FSDP1Source
from instep.sources.fsdp.wrappers import (
    BeforeFSDP1Gathers,
    FSDP1Sync,
    FSDP2Sync,
    fsdp1_in,
    fsdp2_reading_streams,
    put_shards_in_place,
)
from instep.sources.local import ForwardCounts, LocalSource
from instep.sources.replicate.source import Replicated, ReplicatedSource
from instep.target import Names, Target, Wrapped, name_parameters, reduced_by

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from instep.recording import Recording
    from instep.sources.zero.source import Zero

_logger = logging.getLogger("instep")
_Described = tuple[str, dict[str, str], list[list[str]], dict[str, int] | None]
_attachments: "weakref.WeakKeyDictionary[nn.Module, Attachment]" = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    schedule: str = "backward",
    bucket_bytes: int | None = None,
    clip: ClipNorm | ClipValue | None = None,
    accumulation_steps: int = 1,
    scaler: GradScaler | None = None,
    undo: bool | Literal["host"] = False,
    nonfinite: Policy = "allow",
    comm_hook: CommHook | None = None,
    mixed_precision: "MixedPrecisionPolicy | None" = None,
    cross_iteration: bool = False,
    shard_state: bool = False,
    check_steps: int = 0,
) -> "Attachment":
    """Step the parameters of ``model`` behind backward, or behind the next forward, with the user's ``optimizer``.

    The loop stays as it is. Parameters, optimizer state and ``param_groups`` are after each step bit for bit those of
    the plain loop. The optimizer object is neither replaced nor wrapped; schedulers, ``state_dict`` and checkpoints
    are the plain ones.

    With ``schedule="backward"``, on one device, a bucket is stepped as soon as its last gradient is accumulated, and
    its gradients are freed; under ``DistributedDataParallel`` DDP's own buckets are stepped as they arrive, while
    later ones are in flight. ``optimizer.step()`` steps what backward left (parameters whose gradient only DDP's end
    of backward knows, buckets that were not full) and commits the step.

    With ``schedule="forward"`` everything up to ``optimizer.step()`` is the plain loop, so gradients may be clipped,
    scaled and accumulated by the loop itself; ``step()`` returns at once, and each bucket is stepped before the module
    that reads it runs, or before anybody else uses one of its parameters in Python.

    Args:
        model: any module, already on its device and in its dtype; a ``DistributedDataParallel``; what
            ``instep.replicate`` returned; a model that ``fully_shard``, ``FullyShardedDataParallel`` (with
            ``use_orig_params=True``) or tensor parallelism was applied to.
        optimizer: one ``torch.optim.Optimizer`` or several, of parameters of ``model``. Frozen ones are left alone
            until they are unfrozen.
        schedule: when a bucket steps. ``"backward"``: as soon as its gradients are final. ``"forward"``: after
            ``optimizer.step()``, behind the next forward; on CPU that hides the step of fused optimizers only.
        bucket_bytes: bytes of gradient at which a bucket is full; 16 MiB unless told. Not under DDP and
            ``replicate``, whose own ``bucket_cap_mb`` decides, nor with FSDP, whose groups are the buckets.
        clip: clip the gradients of all attached parameters before they are applied.
        accumulation_steps: every so many backwards step; the others only add to the gradients, under DDP in
            ``no_sync``. For loops that cannot be given ``with overlap.accumulate():``.
        scaler: the ``torch.amp.GradScaler`` of the loop. ``schedule="backward"`` needs it, and ``undo``, to apply
            gradients without the scale; ``"forward"`` does without.
        undo: with ``schedule="backward"``, keep all gradients, and copies of parameters and their state from before
            the step (``"host"``: in host memory), until ``optimizer.step()``. Backward then steps on trial. Whatever
            shows that the plain loop would have done otherwise (clipping, an infinite gradient, a step that is left
            out, a gradient or weight that is used in between, an error) has it put back bit for bit, and
            ``optimizer.step()`` steps as the plain loop does.
        nonfinite: what becomes of a step with a gradient that holds NaN or infinity. ``"allow"``: what the plain loop
            does. ``"skip"``: it is left out on all ranks, and parameters, state and groups stay bit for bit as they
            were; with ``schedule="forward"`` or ``undo``. ``"raise"``: ``NonFiniteGradientError``
            from ``optimizer.step()``, and nothing of the step is applied; with ``schedule="backward"`` and no
            ``undo`` from ``backward()``, and the bucket that holds it is not applied, but others are: the step is torn.
        comm_hook: under DDP, ``(state, hook)`` as for ``register_comm_hook``: ``hook(state, bucket)`` reduces each
            bucket, in place of DDP's own mean, and what its future holds is stepped. The two must be given here: DDP
            takes one hook. It stays after ``detach()``.
        mixed_precision: a ``torch.distributed.fsdp.MixedPrecisionPolicy``. The forward and backward of ``model`` then
            compute with copies of its parameters in ``param_dtype``, DDP's mean is computed and sent in
            ``reduce_dtype`` (``param_dtype`` unless told), and the parameters, their gradients and the step stay as
            they are, usually float32. Frozen parameters are cast too; buffers and batch normalization are not.
            Floating-point inputs of ``model`` are cast to ``param_dtype`` unless ``cast_forward_inputs=False``, its
            outputs to ``output_dtype`` if given.
        cross_iteration: with ``schedule="forward"`` under DDP, backward does not wait for communication: buckets are
            reduced and stepped while the next forward runs, each before the module that reads it, in an order that
            suits that. ``optimizer.step()`` takes over gradients that are still on their way; whoever uses one before
            waits for all of them. Needs ``gradient_as_bucket_view=True``. All ranks must attach: they make a process
            group of their own.
        shard_state: under DDP, each rank keeps the optimizer's state of its own rows of every parameter, steps those,
            and gets the others' from the other ranks: 1/N of state and step on N ranks (ZeRO-1). Where the update is
            not elementwise, or not known to be, each parameter is one rank's. ``optimizer.state_dict()`` is the plain
            optimizer's, and ``detach()`` makes the optimizer so again; all ranks must call them.
        check_steps: so many of the first steps are taken twice: beside instep's own, copies of parameters and state are
            stepped by the optimizer's plain ``step()`` with the same gradients, and every parameter, every entry of
            state and every value of a group is compared bit for bit. For optimizers that ``overlap.plan`` calls
            unproven. In these steps the gradients and copies of parameters and state are held until
            ``optimizer.step()`` returns, which with ``schedule="forward"`` waits for the update. Forward and backward
            run once, and random numbers stay the loop's. ``UnsupportedOptimizerError`` from ``optimizer.step()`` names
            the first tensor that differs; the step is torn, or with ``undo`` put back.

    Returns:
        The attachment. It lives as long as the model does, whether or not it is kept.

    Raises:
        AttachError: something about the arguments, named in the message; a ``ValueError``. No hook was left behind.
        UnsupportedOptimizerError: the optimizer's update couples parameters, or it wraps another optimizer.

    With ``INSTEP_DISABLE=1`` in the environment the same training runs without overlap, and a warning says so: torch
    takes each step, and gradients are clipped and looked at where ``optimizer.step()`` begins. What cannot be had that
    way is refused: ``ClipNorm(mode="per_bucket")``, ``comm_hook`` and ``mixed_precision``.
    """
    require_model(model, AttachError)
    optimizers = optimizers_of(optimizer, AttachError)
    if isinstance(scaler, GradScaler) and not scaler.is_enabled():
        scaler = None
    options = Options(
        schedule,
        bucket_bytes,
        clip,
        accumulation_steps,
        scaler,
        undo,
        nonfinite,
        Communication(comm_hook, mixed_precision, cross_iteration, shard_state),
        check_steps,
        disabled=os.environ.get("INSTEP_DISABLE", "") not in ("", "0"),
    )
    return _attach(Target(model, optimizers, attached_parameters()), options)


def attach_stepping_itself(model: nn.Module, optimizer: Optimizer) -> "Attachment":
    """Attach so that nobody has to call ``optimizer.step()``: it is called where each backward ends.

    Gradients that were applied are ``None`` afterwards, and no ``zero_grad()`` is needed. ``model`` may also be one
    that ``fully_shard`` has been applied to, or a ``FullyShardedDataParallel`` with ``use_orig_params=True``.

    Raises as ``attach`` does.
    """
    return _attach(Target(model, [optimizer], attached_parameters()), Options(steps_itself=True))


def _attach(target: Target, options: Options) -> "Attachment":
    refuse(OPTIONS, target, options)
    if options.disabled:
        refuse(DISABLED, target, options)
        _logger.warning("INSTEP_DISABLE is set: %s trains without overlap", type(target.model).__name__)
    else:
        refuse(MODEL, target, options)
        put_shards_in_place(target.model)
        refuse(PARAMETERS, target, options)
    attachment = Attachment(target, options)
    attachment._connect(target.model)
    _attachments[target.model] = attachment
    return attachment


def attached(model: nn.Module) -> "Attachment | None":
    """The attachment of ``model``, ``None`` if it has none.

    Raises:
        AttachError: ``model`` is no ``torch.nn.Module``.
    """
    require_model(model, AttachError)
    return _attachments.get(model)


def record(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], steps: int = 5) -> "Recording":
    """Record what runs when in a training loop, and what memory it holds: ``with instep.record(model, optimizer):``
    around it. Of an attached model it is the attachment's ``Attachment.record``.

    Args:
        model: whose forward begins an iteration; what the loop calls, with its wrappers.
        optimizer: whose ``step()`` ends one.
        steps: after so many the recording ends, and the loop goes on; or on leaving the block.

    Returns:
        A recording: ``recording.save(path)`` after the block, for ``instep report`` and for trace viewers.

    Raises:
        AttachError: ``model``, ``optimizer`` or ``steps`` is something else; a ``ValueError``.
        InstepError: on entering the block: ``torch.profiler`` is running already.
    """
    found = attached(model)
    if found is not None:
        return found.record(steps)
    return _recording(model, optimizers_of(optimizer, AttachError), steps, *_PLAIN)


def _said_of_plain() -> _Described:
    return "plain", {}, [], None


def _reading_streams(model: "weakref.ref[nn.Module]") -> list[torch.Stream]:
    found = model()
    return [] if found is None else list(fsdp2_reading_streams(found))


def _nobody_listens(recorder: Recorder | None) -> None: ...


_PLAIN = _said_of_plain, _nobody_listens


def _recording(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    steps: int,
    described: "Callable[[], _Described]",
    listen: Callable[[Recorder | None], None],
) -> "Recording":
    from instep.recording import Recording  # imports torch.profiler
    from instep.recording.setup import describe

    return Recording(model, optimizers, steps, lambda: describe(model, optimizers, *described()), listen)


def attached_parameters() -> "dict[int, Attachment]":
    """By ``id``: every parameter that is attached, with its attachment."""
    return {id(p): attachment for attachment in _attachments.values() for p in attachment._parameters()}


class Attachment:
    """What ``attach`` returns. As a context manager it detaches on leaving."""

    def __init__(self, target: Target, options: Options) -> None:
        model, optimizers, wrapped, fsdp1 = target.model, target.optimizers, target.wrapped, target.fsdp1
        self._model = weakref.ref(model)
        self._model_name = type(model).__name__
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._ddps = [weakref.ref(ddp) for ddp in wrapped]
        self._steppers = [Stepper(optimizer) for optimizer in optimizers]
        self._options = options
        self._groups = target.groups
        self._in_fsdp1 = bool(fsdp1)
        self._uses = ForwardCounts()
        self._after_errors = AfterErrors(model)
        syncs: list[Syncing] = [] if not self._groups else [FSDP1Sync(model) if fsdp1 else FSDP2Sync(model)]
        self._accumulation = Accumulation(options.accumulation_steps, _living(self._ddps, syncs))
        self._clipping = Clipping(options.clip)
        self._ranks = StepVotes(_rank)
        separable = [] if options.disabled else optimizers
        in_backward = options.schedule == "backward"
        self._separability = [
            separability_of(optimizer, in_backward=in_backward, on_trial=bool(options.undo)) for optimizer in separable
        ]
        self._check = Check(options.check_steps) if options.check_steps and not options.disabled else None
        self._step: Schedule
        self._arrival: MeasuringSink | None = None
        sink: Sink | None
        if options.disabled:
            self._step = PlainSchedule(
                self._steppers, self._ranks, self._accumulation, self._clipping, options.nonfinite
            )
            sink = None
        elif options.schedule == "forward":
            contained = [s for s, found in zip(self._steppers, self._separability, strict=True) if found.contained]
            self._step = ForwardSchedule(
                self._steppers,
                contained,
                self._ranks,
                self._accumulation,
                self._clipping,
                options.bytes_of_a_bucket,
                options.nonfinite,
                self._check,
            )
            self._arrival = MeasuringSink(self._accumulation, self._clipping, self._begin_step)
            sink = self._arrival if isinstance(options.clip, ClipNorm) else None
        else:
            undo = Undo(host=options.undo == "host") if options.undo else None
            scale = None if options.scaler is None else LossScale(options.scaler)
            sink = self._step = BackwardSchedule(
                self._steppers,
                self._ranks,
                self._accumulation,
                self._clipping,
                undo,
                scale,
                options.nonfinite,
                self._check,
            )
            self._step.on_open = weakly(self._begin_step)
        self._last_plan: Plan | None = None  # of one that is detached
        # The thread whose forward the running backward, or the open step, belongs to.
        self._thread: int | None = None
        self._in_forward = self._in_backward = False
        self._thread_lock = threading.Lock()
        self._step_due = False
        # Nobody else need hold an optimizer whose step() nobody calls.
        self._kept = list(optimizers) if options.steps_itself else []
        self._grouped = _parameters_in(optimizers)
        self._zero = _zero(target.ddps[0]) if options.communication.shard_state and not options.disabled else None
        if self._zero is not None:
            self._step.gather = self._zero.shards.gather
        self._step.parameters = tuple(self._gather(optimizers, target.names))
        self._precision: LowPrecision | None = None
        self._handles: list[RemovableHandle | BeforeFSDP1Gathers | Owners | PlainPickles] = []
        self._sources = [] if options.disabled else self._make_sources(wrapped, fsdp1, sink)
        crossing = [s for s in self._sources if isinstance(s, CrossingSource)]
        if self._groups and not fsdp1:
            self._step.read_by(functools.partial(_reading_streams, self._model))
        if crossing:
            self._step.crosses(functools.partial(_flights, crossing), functools.partial(_waited, crossing))

    # What the user sees.

    @property
    def plan(self) -> Plan:
        """The buckets as they are now. They change after the first steps, when the order of gradients is known."""
        if self._last_plan is not None:
            return self._last_plan
        own = self._options.schedule == "backward" or self._options.communication.cross_iteration
        buckets = [bucket for source in self._sources for bucket in source.buckets if own]
        return Plan(self._step.planned(buckets), self._unproven)

    @property
    def _unproven(self) -> tuple[str, ...]:
        if self._check is not None and not self._check.due:
            return ()
        return tuple(found.unproven for found in self._separability if found.unproven is not None)

    @property
    def step_count(self) -> int:
        """How many steps have been committed by ``optimizer.step()`` and wrote anything."""
        return self._step.step_count

    @property
    def redo_count(self) -> int:
        """With ``undo``: how many steps were put back, to be done again as the plain loop does, or not at all."""
        return self._step.redo_count

    @property
    def skip_count(self) -> int:
        """With ``nonfinite="skip"``: how many steps were left out, for a gradient that was not finite."""
        return self._step.skip_count

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """With ``clip=ClipNorm(…)``: the norm of all gradients of the last step before they were clipped, 0-dim, as
        ``clip_grad_norm_`` returns it; ``None`` before the first step."""
        return self._clipping.grad_norm

    @property
    def recorder(self) -> Recorder | None:
        """Told of every bucket's step and communication; ``None``, the default, costs nothing."""
        return self._step.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        if recorder is not None and not callable(recorder):
            raise InstepError(f"recorder must be a function of (kind, names, start, end) or None, not {recorder!r}")
        self._step.recorder = recorder
        if self._arrival is not None:
            self._arrival.recorder = recorder

    def record(self, steps: int = 5) -> "Recording":
        """Record what runs when in the loop, and what memory it holds: ``with overlap.record() as recording:`` around
        it, and ``recording.save(path)`` afterwards. See ``instep.record``."""
        model = self._model()
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        if model is None or not optimizers:
            raise InstepError("there is nothing to record: the model or the optimizer is gone")
        if self._options.disabled:
            return _recording(model, optimizers, steps, *_PLAIN)
        return _recording(model, optimizers, steps, self._described, functools.partial(setattr, self, "recorder"))

    def _described(self) -> _Described:
        said = self._options.said()
        label = ", ".join(f"{name}={value}" for name, value in said.items())
        buckets = [[spec.name for spec in bucket.parameters] for bucket in self.plan.buckets]
        gradients = {spec.name: spec.nbytes for bucket in self.plan.buckets for spec in bucket.parameters}
        return f"instep, {label}", said, buckets, gradients

    def accumulate(self) -> AbstractContextManager[None]:
        """Around forward and backward of every micro-batch but the last: gradients add up, nothing steps.

        Under DDP this is ``no_sync()`` too.
        """
        return self._accumulation.hold()

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """``loss.backward(gradient)``; with ``ClipNorm(mode="two_pass")`` twice, first to measure and then to step.

        Both passes run all hooks, and recompute what is checkpointed. They must compute the same gradients, bit for
        bit: use deterministic kernels. Under DDP, whose buckets hold all gradients anyway, one pass does.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set. Nothing was updated.
            InstepError: ``loss`` is no tensor.
        """
        if not isinstance(loss, torch.Tensor):
            raise InstepError(f"loss must be the tensor that backward() begins from, not {type(loss).__name__}")
        step = self._step
        if not isinstance(step, BackwardSchedule) or self._clipping.mode != "two_pass" or self._accumulation.holds_next:
            loss.backward(gradient)
            return
        if step.state != "open":
            self._adopt()  # those that were added since the forward count for the norm, too
        if self._ddps:
            with step.measured(waits_for_all=True):
                loss.backward(gradient)
        else:
            with step.measuring() as parameters:
                if parameters:  # all that are attached may be frozen
                    torch.autograd.backward(loss, gradient, retain_graph=True, inputs=parameters)
            with step.measured():
                loss.backward(gradient)

    def rollback(self) -> None:
        """Go back to where the last ``optimizer.step()`` left parameters and state, bit for bit, and clear all
        gradients.

        With ``schedule="forward"`` nothing is written before ``optimizer.step()``, and only gradients are thrown
        away. A step that was committed stays.

        Raises:
            InstepError: ``schedule="backward"`` without ``undo``.
        """
        self._step.rollback()

    def synchronize(self) -> None:
        """Return when every parameter holds what the steps so far have written, for the device's current stream.

        With ``schedule="backward"`` this is so when ``backward()`` has returned: call it before reading weights from
        another stream. With ``"forward"``, call it before reading weights or optimizer state in a way that Python
        does not see: an alias made earlier (``weight.detach()``, a NumPy array, an entry of ``optimizer.state``).
        """
        self._step.synchronize()

    def accept_torn(self) -> None:
        """Take the weights as they are after a step that was applied only in part, and train on.

        Call it after loading model and optimizer from a checkpoint, or to go on from the torn weights; on all ranks.
        Clears the gradients, and counts the step if anything of it was written. A step that backward has written, and
        that no ``optimizer.step()`` has committed (after an interrupt), is given up in the same way: call it first
        then, and load after. Does nothing where no step is torn or written, nor with ``undo`` to one that is not torn.
        """
        if self._step.accept():
            _logger.warning("step %d was taken as it is", self.step_count)

    def resync_from(self, rank: int) -> None:
        """Take parameters, buffers, optimizer state, ``param_groups`` and the number of steps from another rank, and
        clear the gradients and a torn step. All ranks must call this.

        For models that every rank has as a whole: ``DistributedDataParallel`` and ``instep.replicate``.

        Args:
            rank: one on which the last step stands as a whole, of ``torch.distributed``'s default group.

        Raises:
            InstepError: there is no such copy: the model or the state is sharded, ``rank`` is not one of its ranks, or
                its own step is torn in the middle. On all ranks, and nothing was changed.
        """
        model = self._model()
        wrapped = [ddp for ref in self._ddps if (ddp := ref()) is not None]
        if model is None or not wrapped or self._groups or self._zero is not None:
            raise InstepError(
                "resync_from() needs a whole copy of model and optimizer on every rank: DistributedDataParallel or "
                "replicate, without shard_state. Load a checkpoint instead"
            )
        group: dist.ProcessGroup = wrapped[0].process_group
        ranks = dist.get_process_group_ranks(group)
        if rank not in ranks:
            raise InstepError(f"resync_from({rank!r}): the ranks that share this model are {ranks}")
        step = broadcast_json(self._step.last_complete_step(), group, ranks.index(rank))
        if step is None:
            raise InstepError(
                f"resync_from({rank}): the last step was applied only in part on that rank. Name one where it was "
                "applied as a whole, or load a checkpoint"
            )
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        self._step.forget(gradients=True)
        self._ranks.forget()
        resync(model, optimizers, group, ranks.index(rank))
        self._step.step_count = step

    def require_committed(self) -> None:
        """Wait for what is due, and raise unless parameters and state are those of the last committed step.

        Raises:
            TornStepError: a step was applied to some of the parameters only.
            UncommittedStepError: a backward has been that ``optimizer.step()`` has not committed.
        """
        self._step.synchronize()
        self._step.require_whole()
        gradients = any(p.grad is not None for p in self._parameters())
        if self._step.state == "open" or (self._accumulation.holding and gradients):
            raise UncommittedStepError(
                f"step {self.step_count + 1} is under way: a checkpoint is of committed steps. Save after "
                "optimizer.step(), or before the backward"
            )

    @property
    def previous_norm(self) -> torch.Tensor | None:
        """With ``ClipNorm(mode="previous_norm")``: the norm that the next step clips by; else ``None``."""
        return self.grad_norm if self._clipping.mode == "previous_norm" else None

    def restore(self, step_count: int, previous_norm: torch.Tensor | None = None) -> None:
        """Begin again where a checkpoint was taken. A step that is open or torn is given up, and gradients are cleared.
        Parameters and state are the caller's to write, right after."""
        self._step.forget(gradients=True)
        self._step.step_count = step_count
        if self._clipping.mode == "previous_norm":
            device = next(self._parameters()).device
            self._clipping.grad_norm = None if previous_norm is None else previous_norm.to(device)
            self._clipping.begin()

    def state_parts(self) -> dict[int, Any]:
        """With ``shard_state``: by ``id`` of each parameter in DDP's buckets, this rank's part of it."""
        return {id(a.get()): a.part for a in self._step.parameters if a.part is not None and a.part.state_is_sharded}

    def detach(self) -> None:
        """Give the model and the optimizer back as they came. Safe to call twice, and with a step open or torn. What
        ``optimizer.step()`` was called for is finished first. Of a step that backward has applied in part, the
        gradients that are left are clipped with ``clip=`` as those were that backward applied: the plain
        ``optimizer.step()`` completes the step. Weights that backward has updated stay so, and nobody is told who uses
        them before that ``step()``. Otherwise nothing is clipped any more.

        One thing stays: DDP cannot let go of a communication hook. It becomes the plain mean that DDP computes
        without one, or the ``comm_hook`` that was given, and a later ``attach`` takes it up again.
        """
        for source in self._sources:
            source.disconnect()
        for handle in self._handles:
            handle.remove()
        if self._precision is not None:
            self._precision.remove()
        self._handles.clear()
        self._accumulation.close()
        if self._zero is not None:
            self._step.synchronize()
            self._zero.close()
        model = self._model()
        if model is not None and _attachments.get(model) is self:
            del _attachments[model]
        if self._arrival is not None:
            self._arrival.close()
        try:
            self._step.close()
        finally:
            if not self._in_backward:
                self._last_plan = self.plan
                for attached in self._step.parameters:
                    attached.let_go()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        optimizers = ", ".join(stepper.name for stepper in self._steppers)
        plan = self.plan
        state = self._step.state if self._handles else "detached"
        return (
            f"<instep.Attachment {self._model_name} with {optimizers}: schedule={self._options.schedule!r}, "
            f"{len(plan.buckets)} buckets of {plan.nbytes / MIB:.2f} MiB, {self.step_count} steps, "
            f"{''.join(f'{said}, ' for said in (*plan.unproven, self._check) if said)}{state}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model is not attached: what refers to its attachment refers to nothing."""
        return

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    # What torch calls.

    def _connect(self, model: nn.Module) -> None:
        if self._options.disabled:
            self._connect_plainly(model)
            return
        try:
            for source in self._sources:
                source.connect()
            # Before FSDP2's, which gathers the weights.
            before = BoundHook(self._before_forward)
            self._handles.append(model.register_forward_pre_hook(before, prepend=bool(self._groups)))
            self._handles.append(model.register_forward_hook(BoundHook(self._after_forward)))
            self._watch_readers(model, self._owners(self._step.parameters))
            self._watch_groups()
            if self._groups:
                self._handles += self._after_errors.connect(weakly(self._let_go))
            for ref, stepper in zip(self._optimizers, self._steppers, strict=True):
                optimizer = ref()
                assert optimizer is not None
                self._watch_steps(stepper, optimizer)
                if self._zero is not None:
                    self._handles += self._zero.connect(optimizer, functools.partial(_parameters_of, self._step))
                if not self._options.steps_itself:
                    saving = UntracedHook(functools.partial(self._before_state, stepper, True))
                    loading = UntracedHook(functools.partial(self._before_state, stepper, False))
                    self._handles.append(optimizer.register_state_dict_pre_hook(saving))
                    self._handles.append(optimizer.register_load_state_dict_pre_hook(loading))
            for saved in {model, *(ddp.module for ref in self._ddps if (ddp := ref()) is not None)}:
                before_state = BoundHook(self._before_model_state)
                self._handles.append(saved.register_state_dict_pre_hook(before_state))
            self._count_in_no_sync()
            if (policy := self._options.communication.mixed_precision) is not None:
                self._precision = LowPrecision(model, policy)
            optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
            self._handles.append(Owners(optimizers, weakly(self._step.abandon)))
            self._handles.append(Owners([model, *optimizers], weakly(self._abandoned)))
            self._handles.append(PlainPickles(model.modules()))
            self._ranks.voting = self._voting(model)
            self._ranks.communicates = weakly(self._communicates)
        except BaseException:
            self.detach()
            raise

    def _connect_plainly(self, model: nn.Module) -> None:
        self._handles.append(model.register_forward_pre_hook(BoundHook(self._before_plain_forward)))
        self._handles.append(model.register_forward_hook(BoundHook(self._after_plain_forward)))
        for ref, stepper in zip(self._optimizers, self._steppers, strict=True):
            optimizer = ref()
            assert optimizer is not None
            self._watch_steps(stepper, optimizer)
        self._handles.append(PlainPickles(model.modules()))
        self._count_in_no_sync()
        if self._options.nonfinite != "allow":
            self._ranks.voting = self._voting(model)

    def _before_plain_forward(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling() and graph_task() is None and torch.is_grad_enabled():
            self._accumulation.decide()

    def _after_plain_forward(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling() and graph_task() is None:
            before_backward = UntracedHook(weakly(self._before_plain_backward))
            for node in nodes_of(output):
                node.register_prehook(before_backward)

    def _before_plain_backward(self, gradients: object) -> None:
        if self._handles and self._step.begin_backward() and self._groups:
            self._accumulation.decide()
            self._accumulation.count()  # no hook of FSDP2's parameters is called while gradients only add up

    def _watch_steps(self, stepper: Stepper, optimizer: Optimizer) -> None:
        handle = optimizer.register_step_post_hook(UntracedHook(functools.partial(self._after_step, stepper)))
        first_of_post_hooks(optimizer, handle)
        self._handles.append(handle)
        compiled = Traced()
        self._handles.append(optimizer.register_step_pre_hook(compiled))
        before_step = UntracedHook(functools.partial(self._before_step, stepper, compiled))
        handle = optimizer.register_step_pre_hook(before_step)
        last_of_pre_hooks(optimizer, handle)
        self._handles.append(handle)

    def _count_in_no_sync(self) -> None:
        if self._options.accumulation_steps > 1 and self._ddps:
            # DDP's own hook is not called in no_sync.
            for parameter in self._parameters():
                if parameter.requires_grad:
                    count = UntracedHook(weakly(self._count))
                    self._handles.append(parameter.register_post_accumulate_grad_hook(count))

    def _voting(self, model: nn.Module) -> GroupVotes | None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        wrapped = [*(ddp for ref in self._ddps if (ddp := ref()) is not None), *fsdp1_in(model)]
        groups = groups_of(wrapped, self._parameters())
        if not groups:
            return None
        options, ddps = self._options, [weakref.ref(one) for one in wrapped if isinstance(one, DistributedDataParallel)]
        settings = [options.schedule, options.clip, options.accumulation_steps, options.undo, options.nonfinite]
        settings += [options.communication.cross_iteration, options.check_steps]
        # FSDP1's parameters are what a rank has of them.
        shapes = [() if self._in_fsdp1 else tuple(a.spec.shape) for a in self._step.parameters]
        specs = [(a.spec.name, shape, a.spec.dtype) for a, shape in zip(self._step.parameters, shapes, strict=True)]
        return GroupVotes(groups, (settings, specs), lambda: in_join(ref() for ref in ddps))

    def _communicates(self) -> bool:
        if self._groups:
            return True  # FSDP gathers the weights for autograd.grad, too
        with torch._C.DisableTorchFunctionSubclass():  # no value is used, and nobody who watches need be told
            return any(runs(get_gradient_edge(p).node) for p in self._parameters() if p.requires_grad)

    def _abandoned(self) -> None:
        """Model and optimizers are gone: whoever keeps this keeps nothing of them."""
        self._last_plan = self.plan
        self._sources.clear()
        self._step.crosses(tuple, bool)

    def _count(self, parameter: torch.Tensor) -> None:
        self._accumulation.count()

    def _begin_step(self) -> None:
        self._ask_for_step()
        for source in self._sources:
            source.begin_step()

    def _before_forward(self, module: nn.Module, args: object) -> None:
        # Inside a backward this is a checkpointed segment run again.
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        self._refuse_late_ddp()
        if torch.is_grad_enabled():
            self._require_one_thread(threading.get_ident(), "forward")
        self._step.before_forward()
        require_unchanged(self._step.parameters)
        if self._step.state != "open":
            self._adopt()
            for source in self._sources:
                source.refresh()
        if torch.is_grad_enabled():
            # The loop may have given these micro-batches up. zero_grad() does not clear what FSDP2 adds up.
            if self._accumulation.is_partial and not self._groups and all(p.grad is None for p in self._parameters()):
                self._accumulation.stepped()
            self._accumulation.decide()
        self._in_forward = True

    def _before_read(self, mine: Sequence[AttachedParameter], module: nn.Module, args: object) -> None:
        # A part of the model may be called by itself. Inside the model's own forward this has been asked already.
        step = self._step
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        assert isinstance(step, BackwardSchedule)
        step.streams.makers.saw(mine[0].spec.device)
        if self._in_forward:
            return
        if any(map(step.is_applied, mine)):
            step.before_forward()
        if self._options.undo and torch.is_grad_enabled():
            self._see_backward_of(module)

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        self._in_forward = False
        self._step.after_forward()
        self._see_backward_from(output)

    def _see_backward_of(self, part: nn.Module) -> None:
        """A backward may begin at what ``part``, which runs by itself, is about to return, and go through weights that
        an earlier one has written on trial."""

        def see(part: nn.Module, args: object, output: object) -> None:
            once.remove()
            see_backward_from(output)

        see_backward_from = weakly(self._see_backward_from)
        once = part.register_forward_hook(BoundHook(see))

    def _see_backward_from(self, output: object) -> None:
        before_backward = UntracedHook(weakly(self._before_backward, threading.get_ident()))
        for node in nodes_of(output):
            node.register_prehook(before_backward)

    def _require_one_thread(self, thread: int, what: str) -> None:
        if self._thread not in (None, thread) and (self._in_backward or self._step.state == "open"):
            raise ConcurrentBackwardError(
                f"a {what} of {self._model_name} began on one thread while the step of another one is open: their "
                "gradients would be mixed. Train a model on one thread at a time, or give each thread a model and an "
                "optimizer of its own"
            )

    def _let_go(self) -> None:
        """Of a backward that raised."""
        self._step.let_go_of_backwards()

    def _end_backward(self) -> None:
        self._in_backward = False
        self._step.end_backward()
        self._uses.clear()

    def _backward_failed(self) -> None:
        self._end_backward()
        if self._groups:
            self._after_errors.backward_failed()
            self._accumulation.stepped()  # what the micro-batches before had added up is gone, too

    def _before_backward(self, thread: int, gradients: object) -> None:
        if not self._handles:
            return  # detached since this graph was made
        with self._thread_lock:
            self._require_one_thread(thread, "backward")
            self._thread = thread
            self._in_forward = False  # a forward that raised has not said that it is over
            if not self._in_backward:
                self._in_backward = True
                current().at(Phase.SETTLED, self._end_backward, self._backward_failed)
        self._step.begin_on_device()
        if self._step.begin_backward():
            if self._groups:
                self._accumulation.decide()
                self._accumulation.count()  # no hook of FSDP2's parameters is called while gradients only add up
            for source in self._sources:
                source.before_backward()
        # Asked for here it is the outermost backward's end; in a hook on a parameter, maybe that of one nested in it.
        self._ask_for_step()

    def _ask_for_step(self) -> None:
        if self._options.steps_itself and not self._step_due:
            self._step_due = True
            current().at(Phase.SETTLED, self._step_itself, self._never_stepped)

    def _step_itself(self) -> None:
        self._step_due = False
        # DDP sets gradients that no source announces, of parameters that only other ranks used, where it has reduced.
        reduced = [source.reduced() for source in self._sources if isinstance(source, DDPSource)]
        if self._step.state == "open" or any(reduced):
            for optimizer in self._kept:
                optimizer.step()
            for parameter in self._parameters():
                parameter.grad = None

    def _never_stepped(self) -> None:
        self._step_due = False
        for parameter in self._parameters():
            parameter.grad = None

    def _refuse_late_ddp(self) -> None:
        # torch's own record of the DDP instance whose forward is running; dynamo reads it too.
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None and not any(ref() is ddp for ref in self._ddps):
            raise StaleAttachmentError(
                f"{self._model_name} was wrapped in a DistributedDataParallel after attach: its own gradients are "
                "those of this rank alone. detach(), wrap the model first, and attach the DistributedDataParallel"
            )

    def _before_step(
        self, stepper: Stepper, compiled: Traced, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if is_called_by_step(optimizer):
            return None  # which has begun already
        self._step.begin_step(stepper)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if len(args) > 2 or kwargs.keys() - {"closure"} or (closure is not None and not callable(closure)):
            self._step.leave_to_optimizer(stepper, _called_with_arguments(stepper))
        elif compiled.yes:
            self._step.leave_to_optimizer(stepper, _compiled(stepper))
        if not callable(closure):
            self._flush(stepper)
            return None

        @functools.wraps(closure)
        def then_flush() -> Any:
            loss = closure()
            if self._handles:  # else the closure has detached
                self._flush(stepper)
            return loss

        if len(args) > 1:
            return (args[0], then_flush, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_flush}

    def _after_step(
        self, stepper: Stepper, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not is_called_by_step(optimizer):
            self._step.commit(stepper)

    def _flush(self, stepper: Stepper) -> None:
        self._adopt()
        if self._zero is not None:
            self._zero.require_reduced(a for a in self._step.parameters if a.stepper is stepper)
        if self._arrival is not None:
            self._arrival.close()
        self._step.begin_flush(stepper)

    def _before_state(self, stepper: Stepper, saving: bool, *_: object) -> None:
        self._step.before_state(stepper, saving=saving)

    def _before_model_state(self, *_: object) -> None:
        self._step.before_save()

    def _watch_groups(self) -> None:
        """Hooks before FSDP gathers a group's weights."""
        for number, group in enumerate(self._groups):
            module = group.module()
            assert module is not None
            mine = [a for a in self._step.parameters if a.spec.group == number]
            if not self._in_fsdp1:
                before = BoundHook(functools.partial(self._before_gather, number, mine))
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            elif isinstance(self._step, ForwardSchedule):
                before_read = BoundHook(functools.partial(self._step.before_read, mine))
                self._handles.append(BeforeFSDP1Gathers(module, before_read))

    def _before_gather(self, number: int, mine: Sequence[AttachedParameter], module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        if torch.is_grad_enabled():
            self._uses.ran(number)
        self._step.before_gather(mine)

    def _watch_readers(self, model: nn.Module, owners: Sequence[tuple[nn.Module, list[AttachedParameter]]]) -> None:
        """Hooks on the modules that hold attached parameters themselves."""
        step = self._step
        if isinstance(step, BackwardSchedule):
            for owner, mine in owners:
                if owner is not model:
                    hook = BoundHook(functools.partial(self._before_read, mine))
                    self._handles.append(owner.register_forward_pre_hook(hook))
            return
        if not isinstance(step, ForwardSchedule):
            return
        # torch.compile runs the hooks of what it wraps only once, when it traces. Its own wrapper's run each time.
        compiled = _compiled_in(model)
        inside = {module for wrapper in compiled for module in wrapper.modules()}
        for wrapper in compiled:
            below = {id(p) for p in wrapper.parameters()}
            mine = [a for a in step.parameters if id(a.get()) in below]
            self._handles.append(wrapper.register_forward_pre_hook(BoundHook(ReadHook(mine, step.before_read))))
        for owner, mine in owners:
            if owner not in inside:
                step.readers.append(ReadHook(mine, step.before_read))
                self._handles.append(owner.register_forward_pre_hook(BoundHook(step.readers[-1])))

    def _make_sources(self, wrapped: Sequence[Wrapped], fsdp1: Sequence[Any], sink: Sink | None) -> list[Source]:
        options, communication = self._options, self._options.communication
        dtype = communication.reduce_dtype
        sources: list[Source] = []
        local = {a.spec.index: a for a in self._step.parameters}
        for ddp in wrapped:
            reduced = reduced_by(ddp)
            mine = [a for a in local.values() if id(a.get()) in reduced]
            local = {index: a for index, a in local.items() if a not in mine}
            if self._zero is not None and mine and not isinstance(ddp, Replicated):
                in_rows = [a for a in mine if a.part is not None]
                told = sink or self._arrival
                assert told is not None
                sources.append(self._zero.source(told, in_rows, ddp, self._accumulation, dtype))
            elif mine and communication.cross_iteration and isinstance(ddp, DistributedDataParallel):
                recorder = functools.partial(_recorder_of, weakref.ref(self._step))
                sources.append(CrossingSource(mine, ddp, dtype, recorder))
            elif mine and (sink is not None or communication.comm_hook is not None or dtype is not None):
                told = sink or self._arrival
                assert told is not None
                if isinstance(ddp, Replicated):
                    sources.append(ReplicatedSource(told, mine, ddp, dtype))
                else:
                    sources.append(DDPSource(told, mine, ddp, communication.comm_hook, dtype))
        if sink is not None and local:
            if fsdp1:
                sources.append(FSDP1Source(sink, list(local.values()), fsdp1))
            else:
                sources.append(LocalSource(sink, list(local.values()), options.bytes_of_a_bucket, self._uses))
        return sources

    def _adopt(self) -> None:
        """Take in the model's parameters that were added to an optimizer (``add_param_group``) since."""
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        grouped = _parameters_in(optimizers)
        model = self._model()
        if grouped == self._grouped or model is None or len(optimizers) < len(self._optimizers):
            return
        self._require_in_place(grouped)
        self._grouped = grouped
        put_shards_in_place(model)
        names = name_parameters(model)
        known = {id(attached.peek()): attached for attached in self._step.parameters}
        added = self._gather(optimizers, {key: names[key] for key in names if key not in known}, len(known))
        everything = {**known, **{id(attached.get()): attached for attached in added}}
        self._step.parameters = tuple(everything[key] for key in names if key in everything)
        for source in self._sources:
            added = source.adopt(added)
        self._watch_readers(model, self._owners(added))
        self._handles.append(PlainPickles(model.modules()))

    def _require_in_place(self, grouped: Sequence[Sequence[int]]) -> None:
        for stepper, found in zip(self._steppers, map(set, grouped), strict=True):
            for attached in self._step.parameters:
                if attached.stepper is stepper and id(attached.peek()) not in found:
                    raise StaleAttachmentError(
                        f"parameter {attached.spec.name!r} is no longer in {stepper.name}.param_groups. detach() "
                        "before taking parameters out of an optimizer, and attach again after"
                    )

    def _owners(self, parameters: Sequence[AttachedParameter]) -> list[tuple[nn.Module, list[AttachedParameter]]]:
        """The modules that hold ``parameters`` themselves."""
        owners: dict[nn.Module, list[AttachedParameter]] = {}
        for attached in parameters:
            for place in attached.places:
                if (owner := place.module()) is not None:
                    owners.setdefault(owner, []).append(attached)
        return list(owners.items())

    def _parameters(self) -> Iterator[torch.Tensor]:
        for attached in self._step.parameters:
            if (parameter := attached.peek()) is not None:
                yield parameter

    def _gather(
        self, optimizers: Sequence[Optimizer], names: Names, first_index: int = 0
    ) -> Sequence[AttachedParameter]:
        owner = {
            id(p): stepper
            for optimizer, stepper in zip(optimizers, self._steppers, strict=True)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        parameters: list[AttachedParameter] = []
        for parameter, places in names.values():
            if id(parameter) not in owner:
                continue
            name = places[0].name
            nbytes = local_numel(parameter) * parameter.element_size()
            index = first_index + len(parameters)
            group = next((n for n, g in enumerate(self._groups) if id(parameter) in g.members), None)
            spec = ParameterSpec(index, name, parameter.shape, parameter.dtype, parameter.device, nbytes, group)
            spent = None
            if isinstance(self._step, BackwardSchedule) and not self._options.steps_itself and not self._options.undo:
                spent = SpentGradient(parameter, name, weakly(self._step.error_for_use, spec))
            # A sharded model puts other tensors in the parameters' places while it computes.
            held = () if self._in_fsdp1 or (group is not None and is_sharded(parameter)) else places
            stepper = owner[id(parameter)]
            part = part_of(parameter, stepper.optimizer())
            if self._zero is not None and id(parameter) in self._zero.reduced:
                part = self._zero.shards.part_of(parameter, stepper.optimizer())
            parameters.append(AttachedParameter(parameter, spec, held, stepper, spent, part, mesh_of(parameter)))
        return tuple(parameters)


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


def _parameters_in(optimizers: Sequence[Optimizer]) -> list[list[int]]:
    """By ``id``, of each optimizer."""
    return [
        list(map(id, chain.from_iterable(group["params"] for group in optimizer.param_groups)))
        for optimizer in optimizers
    ]


def _parameters_of(step: Schedule) -> Sequence[AttachedParameter]:
    return step.parameters


def _recorder_of(step: "weakref.ref[Schedule]") -> Recorder | None:
    return None if (found := step()) is None else found.recorder


def _flights(sources: Sequence[CrossingSource]) -> list[InFlightBucket]:
    return [flight for source in sources for flight in source.flights]


def _waited(sources: Sequence[CrossingSource]) -> bool:
    return all(source.waited for source in sources)


def _zero(ddp: DistributedDataParallel) -> "Zero":
    from instep.sources.zero.source import Zero  # imports DTensor, which takes a while

    return Zero(ddp)


def _compiled_in(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` that ``torch.compile`` has wrapped."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported: not used
    if dynamo is None:
        return []
    return [module for module in model.modules() if isinstance(module, dynamo.OptimizedModule)]


def _living(wrapped: "Sequence[weakref.ref[Wrapped]]", others: Sequence[Syncing]) -> Callable[[], list[Syncing]]:
    return lambda: [*(one for ref in wrapped if (one := ref()) is not None), *others]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
