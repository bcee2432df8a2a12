"""``attach``: the optimizer's step moves behind other work, and the loop stays as it is."""

import logging
import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from instep._arguments import optimizers_of, require_model
from instep._gradients.finite import Policy
from instep._gradients.policies import ClipNorm, ClipValue
from instep._optim.plan import MIB, Plan
from instep._refusals.rules import DISABLED, MODEL, OPTIONS, PARAMETERS, refuse
from instep._step.recorder import Recorder
from instep._wiring.build import build
from instep._wiring.connect import connect
from instep._wiring.held import living_parameters
from instep._wiring.recorded import record_attached, record_plain
from instep._wiring.resyncing import resync_from
from instep.errors import AttachError, InstepError, UncommittedStepError
from instep.options import Communication, Options
from instep.sources.ddp.hook_slot import CommHook
from instep.sources.fsdp.wrappers import put_shards_in_place
from instep.target import Target

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from instep.recording import Recording

_logger = logging.getLogger("instep")
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
    return record_plain(model, optimizers_of(optimizer, AttachError), steps)


def attachments() -> "list[Attachment]":
    """Of every model that is attached."""
    return list(_attachments.values())


def attached_parameters() -> "dict[int, Attachment]":
    """By ``id``: every parameter that is attached, with its attachment."""
    return {id(p): one for one in attachments() for p in living_parameters(one._parts.schedule)}


class Attachment:
    """What ``attach`` returns. As a context manager it detaches on leaving."""

    def __init__(self, target: Target, options: Options) -> None:
        self._options = options
        self._parts = build(target, options)
        try:
            connect(self._parts, target, options)
        except BaseException:
            self.detach()
            raise

    @property
    def plan(self) -> Plan:
        """The buckets as they are now. They change after the first steps, when the order of gradients is known."""
        return self._parts.planned.now()

    @property
    def state(self) -> str:
        """``"open"``: backward has stepped parameters, or ``undo`` holds a step, until ``optimizer.step()``;
        ``"pending"``: buckets of the last step are still due; ``"torn"``: a step was applied in part only;
        ``"idle"``: none of these; ``"disabled"``, with ``INSTEP_DISABLE=1``; ``"detached"``."""
        return self._parts.schedule.state if self._parts.handles else "detached"

    @property
    def step_count(self) -> int:
        """How many steps have been committed by ``optimizer.step()`` and wrote anything."""
        return self._parts.schedule.step_count

    @property
    def redo_count(self) -> int:
        """With ``undo``: how many steps were put back, to be done again as the plain loop does, or not at all."""
        return self._parts.schedule.redo_count

    @property
    def skip_count(self) -> int:
        """With ``nonfinite="skip"``: how many steps were left out, for a gradient that was not finite."""
        return self._parts.schedule.skip_count

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """With ``clip=ClipNorm(…)``: the norm of all gradients of the last step before they were clipped, 0-dim, as
        ``clip_grad_norm_`` returns it; ``None`` before the first step."""
        return self._parts.clipping.grad_norm

    @property
    def recorder(self) -> Recorder | None:
        """Told of every bucket's step and communication; ``None``, the default, costs nothing."""
        return self._parts.schedule.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        if recorder is not None and not callable(recorder):
            raise InstepError(f"recorder must be a function of (kind, names, start, end) or None, not {recorder!r}")
        self._parts.schedule.recorder = recorder

    def record(self, steps: int = 5) -> "Recording":
        """Record what runs when in the loop, and what memory it holds: ``with overlap.record() as recording:`` around
        it, and ``recording.save(path)`` afterwards. See ``instep.record``."""
        model, optimizers = self._parts.held.model(), self._parts.held.optimizers()
        if model is None or not optimizers:
            raise InstepError("there is nothing to record: the model or the optimizer is gone")
        if self._options.disabled:
            return record_plain(model, optimizers, steps)
        listen = partial(setattr, self, "recorder")
        return record_attached(model, optimizers, steps, self._options, self._parts.planned.now, listen)

    def accumulate(self) -> AbstractContextManager[None]:
        """Around forward and backward of every micro-batch but the last: gradients add up, nothing steps.

        Under DDP this is ``no_sync()`` too.
        """
        return self._parts.accumulation.hold()

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
        self._parts.schedule.backward(loss, gradient, self._parts.late.adopt)

    def rollback(self) -> None:
        """Go back to where the last ``optimizer.step()`` left parameters and state, bit for bit, and clear all
        gradients.

        With ``schedule="forward"`` nothing is written before ``optimizer.step()``, and only gradients are thrown
        away. A step that was committed stays.

        Raises:
            InstepError: ``schedule="backward"`` without ``undo``.
        """
        self._parts.schedule.rollback()

    def synchronize(self) -> None:
        """Return when every parameter holds what the steps so far have written, for the device's current stream.

        With ``schedule="backward"`` this is so when ``backward()`` has returned: call it before reading weights from
        another stream. With ``"forward"``, call it before reading weights or optimizer state in a way that Python
        does not see: an alias made earlier (``weight.detach()``, a NumPy array, an entry of ``optimizer.state``).
        """
        self._parts.schedule.synchronize()

    def accept_torn(self) -> None:
        """Take the weights as they are after a step that was applied only in part, and train on.

        Call it after loading model and optimizer from a checkpoint, or to go on from the torn weights; on all ranks.
        Clears the gradients, and counts the step if anything of it was written. A step that backward has written, and
        that no ``optimizer.step()`` has committed (after an interrupt), is given up in the same way: call it first
        then, and load after. Does nothing where no step is torn or written, nor with ``undo`` to one that is not torn.
        """
        if self._parts.schedule.accept():
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
        resync_from(self._parts, rank)

    def require_committed(self) -> None:
        """Wait for what is due, and raise unless parameters and state are those of the last committed step.

        Raises:
            TornStepError: a step was applied to some of the parameters only.
            UncommittedStepError: a backward has been that ``optimizer.step()`` has not committed.
        """
        schedule = self._parts.schedule
        schedule.synchronize()
        schedule.require_whole()
        gradients = any(p.grad is not None for p in living_parameters(schedule))
        if schedule.state == "open" or (self._parts.accumulation.holding and gradients):
            raise UncommittedStepError(
                f"step {self.step_count + 1} is under way: a checkpoint is of committed steps. Save after "
                "optimizer.step(), or before the backward"
            )

    @property
    def previous_norm(self) -> torch.Tensor | None:
        """With ``ClipNorm(mode="previous_norm")``: the norm that the next step clips by; else ``None``."""
        return self.grad_norm if self._parts.clipping.mode == "previous_norm" else None

    def restore(self, step_count: int, previous_norm: torch.Tensor | None = None) -> None:
        """Begin again where a checkpoint was taken. A step that is open or torn is given up, and gradients are cleared.
        Parameters and state are the caller's to write, right after."""
        schedule, clipping = self._parts.schedule, self._parts.clipping
        schedule.forget(gradients=True)
        schedule.step_count = step_count
        if clipping.mode == "previous_norm":
            device = next(living_parameters(schedule)).device
            clipping.grad_norm = None if previous_norm is None else previous_norm.to(device)
            clipping.begin()

    def state_parts(self) -> dict[int, Any]:
        """With ``shard_state``: by ``id`` of each parameter in DDP's buckets, this rank's part of it."""
        parameters = self._parts.schedule.parameters
        return {id(a.get()): a.shard for a in parameters if a.shard is not None and a.shard.state_is_sharded}

    def detach(self) -> None:
        """Give the model and the optimizer back as they came. Safe to call twice, and with a step open or torn. What
        ``optimizer.step()`` was called for is finished first. Of a step that backward has applied in part, the
        gradients that are left are clipped with ``clip=`` as those were that backward applied: the plain
        ``optimizer.step()`` completes the step. Weights that backward has updated stay so, and nobody is told who uses
        them before that ``step()``. Otherwise nothing is clipped any more.

        One thing stays: DDP cannot let go of a communication hook. It becomes the plain mean that DDP computes
        without one, or the ``comm_hook`` that was given, and a later ``attach`` takes it up again.
        """
        parts = self._parts
        for source in parts.sources:
            source.disconnect()
        for handle in parts.handles:
            handle.remove()
        parts.handles.clear()
        parts.accumulation.close()
        if parts.zero is not None:
            parts.schedule.synchronize()
            parts.zero.close()
        model = parts.held.model()
        if model is not None and _attachments.get(model) is self:
            del _attachments[model]
        try:
            parts.schedule.close()
        finally:
            if not parts.threads.in_backward:
                parts.planned.keep()
                for attached in parts.schedule.parameters:
                    attached.let_go()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        optimizers = ", ".join(stepper.name for stepper in self._parts.held.steppers)
        plan = self.plan
        return (
            f"<instep.Attachment {self._parts.held.name} with {optimizers}: schedule={self._options.schedule!r}, "
            f"{len(plan.buckets)} buckets of {plan.nbytes / MIB:.2f} MiB, {self.step_count} steps, "
            f"{''.join(f'{said}, ' for said in self._parts.planned.said())}{self.state}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model is not attached: what refers to its attachment refers to nothing."""
        return

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
