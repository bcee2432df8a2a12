"""``attach``: the optimizer's step moves into backward, and the loop stays as it is."""

import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from instep._core.engine import at_end_of_backward, graph_task
from instep._core.hooks import BoundHook
from instep._core.parameters import AttachedParameter, require_unchanged
from instep._core.plan import MIB, ParameterSpec, Plan
from instep._core.precision import LowPrecision
from instep._core.probe import require_separable
from instep._core.spent import SpentGradient
from instep._core.stepper import Stepper
from instep._core.transaction import Recorder, Transaction
from instep._validation import (
    Names,
    fsdp1_in,
    is_sharded,
    name_parameters,
    refuse_communication,
    refuse_optimizers,
    refuse_options,
    refuse_parameters,
    refuse_wrappers,
)
from instep.errors import StaleAttachmentError
from instep.sources import Source
from instep.sources.ddp import CommHook, DDPSource
from instep.sources.fsdp import FSDP1Source
from instep.sources.local import LocalSource

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

DEFAULT_BUCKET_BYTES = 16 * MIB

_logger = logging.getLogger("instep")
_attachments: "weakref.WeakKeyDictionary[nn.Module, Attachment]" = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    schedule: str = "backward",
    bucket_bytes: int | None = None,
    comm_hook: CommHook | None = None,
    mixed_precision: "MixedPrecisionPolicy | None" = None,
) -> "Attachment":
    """Step the parameters of ``model`` during ``loss.backward()``, with the user's own ``optimizer``.

    The loop stays as it is: ``optimizer.step()`` after backward steps what backward left (parameters whose gradient
    only DDP's end of backward knows, buckets that were not full) and commits the step. Parameters, optimizer state
    and ``param_groups`` are after each step bit for bit those of the plain loop. The optimizer object is neither
    replaced nor wrapped; schedulers, ``state_dict`` and checkpoints are the plain ones.

    On one device a bucket is stepped as soon as its last gradient is accumulated, and its gradients are freed. Under
    ``DistributedDataParallel`` DDP's own buckets are stepped as they arrive, while later ones are in flight.

    Args:
        model: any module, or a ``DistributedDataParallel``, already on its device and in its dtype.
        optimizer: one ``torch.optim.Optimizer`` or several, of parameters of ``model``. Frozen ones are left alone
            until they are unfrozen.
        schedule: when a bucket steps. ``"backward"``: as soon as its gradients are final.
        bucket_bytes: bytes of gradient at which a bucket is full; 16 MiB unless told. Not under DDP, whose own
            ``bucket_cap_mb`` decides.
        comm_hook: under DDP, ``(state, hook)`` as for ``register_comm_hook``: ``hook(state, bucket)`` reduces each
            bucket, in place of DDP's own mean, and what its future holds is stepped. The two must be given here: DDP
            takes one hook. It stays after ``detach()``.
        mixed_precision: a ``torch.distributed.fsdp.MixedPrecisionPolicy``. The forward and backward of ``model`` then
            compute with copies of its parameters in ``param_dtype``, DDP's mean is computed and sent in
            ``reduce_dtype`` (``param_dtype`` unless told), and the parameters, their gradients and the step stay as
            they are, usually float32. Frozen parameters are cast too; buffers and batch normalization are not.
            Floating-point inputs of ``model`` are cast to ``param_dtype`` unless ``cast_forward_inputs=False``, its
            outputs to ``output_dtype`` if given.

    Returns:
        The attachment. It lives as long as the model does, whether or not it is kept.

    Raises:
        AttachError: something about the arguments, named in the message. No hook was left behind.
        UnsupportedOptimizerError: the optimizer's update couples parameters, or it wraps another optimizer.

    With ``INSTEP_DISABLE=1`` in the environment nothing is attached, and a warning says so.
    """
    if os.environ.get("INSTEP_DISABLE", "") not in ("", "0"):
        _logger.warning("INSTEP_DISABLE is set: attach() left the model and the optimizer as they are")
        return Attachment(model, [], {}, _ddps_in(model))
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    refuse_options(model, optimizers, schedule, bucket_bytes)
    return _attach(model, optimizers, bucket_bytes=bucket_bytes, comm_hook=comm_hook, mixed_precision=mixed_precision)


def attach_stepping_itself(model: nn.Module, optimizer: Optimizer) -> "Attachment":
    """Attach so that nobody has to call ``optimizer.step()``: it is called where each backward ends.

    Gradients that were applied are ``None`` afterwards, and no ``zero_grad()`` is needed. ``model`` may also be one
    that ``fully_shard`` has been applied to, or a ``FullyShardedDataParallel`` with ``use_orig_params=True``.

    Raises as :func:`attach` does.
    """
    return _attach(model, [optimizer], steps_itself=True)


def _attach(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    bucket_bytes: int | None = None,
    comm_hook: CommHook | None = None,
    mixed_precision: "MixedPrecisionPolicy | None" = None,
    steps_itself: bool = False,
) -> "Attachment":
    refuse_optimizers(optimizers)
    wrapped = _ddps_in(model)
    refuse_communication(model, wrapped, bucket_bytes, comm_hook, mixed_precision)
    names = name_parameters(model)
    refuse_parameters(names, optimizers, attached_parameters(), sharded=steps_itself)
    refuse_wrappers(model, names, sharded=steps_itself)
    for optimizer in optimizers:
        require_separable(optimizer)
    attachment = Attachment(
        model,
        optimizers,
        names,
        wrapped,
        bucket_bytes=bucket_bytes or DEFAULT_BUCKET_BYTES,
        comm_hook=comm_hook,
        mixed_precision=mixed_precision,
        steps_itself=steps_itself,
    )
    attachment._connect()
    _attachments[model] = attachment
    return attachment


def attached(model: nn.Module) -> "Attachment | None":
    """The attachment of ``model``, ``None`` if it has none."""
    return _attachments.get(model)


def attached_parameters() -> "dict[int, Attachment]":
    """By ``id``: every parameter that is attached, with its attachment."""
    return {id(p): attachment for attachment in _attachments.values() for p in attachment._parameters()}


class Attachment:
    """What :func:`attach` returns. As a context manager it detaches on leaving."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        names: Names,
        wrapped: Sequence[DistributedDataParallel],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        comm_hook: CommHook | None = None,
        mixed_precision: "MixedPrecisionPolicy | None" = None,
        steps_itself: bool = False,
    ) -> None:
        self._model = weakref.ref(model)
        self._model_name = type(model).__name__
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._ddps = [weakref.ref(ddp) for ddp in wrapped]
        self._steppers = [Stepper(optimizer) for optimizer in optimizers]
        self._transaction = Transaction(self._steppers, _rank)
        if wrapped:
            self._transaction.in_no_sync = self._in_no_sync
        self._steps_itself = steps_itself
        self._step_due = False
        # Nobody else need hold an optimizer whose step() nobody calls.
        self._kept = list(optimizers) if steps_itself else []
        fsdp1 = fsdp1_in(model)
        self._transaction.parameters = self._gather(optimizers, names, bool(fsdp1))
        self._transaction.on_open = self._begin_step
        self._mixed_precision = mixed_precision
        self._precision: LowPrecision | None = None
        self._handles: list[RemovableHandle] = []
        self._pre_hooks: list[RemovableHandle] = []
        self._sources: list[Source] = []
        local = {a.spec.index: a for a in self._transaction.parameters}
        for ddp in wrapped:
            managed = _managed(ddp)
            mine = [a for a in local.values() if id(a.get()) in managed]
            local = {index: a for index, a in local.items() if a not in mine}
            if mine:
                self._sources.append(DDPSource(self._transaction, mine, ddp, comm_hook, _reduce_dtype(mixed_precision)))
        if local and fsdp1:
            self._sources.append(FSDP1Source(self._transaction, list(local.values()), fsdp1))
        elif local:
            self._sources.append(LocalSource(self._transaction, list(local.values()), bucket_bytes))

    # What the user sees.

    @property
    def plan(self) -> Plan:
        """The buckets as they are now. They change after the first steps, when the order of gradients is known."""
        return Plan(tuple(bucket for source in self._sources for bucket in source.buckets))

    @property
    def step_count(self) -> int:
        """How many steps have been committed by ``optimizer.step()`` and wrote anything."""
        return self._transaction.step_count

    @property
    def recorder(self) -> Recorder | None:
        """Told of every bucket's step and communication; ``None``, the default, costs nothing."""
        return self._transaction.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._transaction.recorder = recorder

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around forward and backward of every micro-batch but the last: gradients add up, nothing steps.

        Under DDP this is ``no_sync()`` too.
        """
        with ExitStack() as stack:
            for ref in self._ddps:
                if (ddp := ref()) is not None:
                    stack.enter_context(ddp.no_sync())
            outer, self._transaction.accumulating = self._transaction.accumulating, True
            try:
                yield
            finally:
                self._transaction.accumulating = outer

    def synchronize(self) -> None:
        """Return when every parameter holds what the steps so far have written, for the device's current stream.

        After ``backward()`` has returned, this is already so: call it before reading weights from another stream.
        """
        self._transaction.streams.join()

    def accept_torn(self) -> None:
        """Take the weights as they are after a step that was applied only in part, and train on.

        Call it after loading model and optimizer from a checkpoint, or to go on from the torn weights. Clears the
        gradients. Does nothing when no step is torn.
        """
        if self._transaction.state == "torn":
            _logger.warning("the torn step %d was accepted", self.step_count + 1)
            self._transaction.forget(gradients=True)

    def detach(self) -> None:
        """Give the model and the optimizer back as they came. Safe to call twice, and with a step open or torn.

        One thing stays: DDP cannot let go of a communication hook. It becomes the plain mean that DDP computes
        without one, or the ``comm_hook`` that was given, and a later ``attach`` takes it up again.
        """
        for source in self._sources:
            source.disconnect()
        for handle in (*self._handles, *self._pre_hooks):
            handle.remove()
        if self._precision is not None:
            self._precision.remove()
        self._handles.clear()
        self._pre_hooks.clear()
        self._transaction.forget(gradients=False)
        model = self._model()
        if model is not None and _attachments.get(model) is self:
            del _attachments[model]

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        optimizers = ", ".join(stepper.name for stepper in self._steppers)
        plan = self.plan
        state = self._transaction.state if self._handles else "detached"
        return (
            f"<instep.Attachment {self._model_name} with {optimizers}: schedule='backward', "
            f"{len(plan.buckets)} buckets of {plan.nbytes / MIB:.2f} MiB, {self.step_count} steps, {state}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model is not attached: what refers to its attachment refers to nothing."""
        return

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    # What torch calls.

    def _connect(self) -> None:
        model = self._model()
        assert model is not None
        try:
            for source in self._sources:
                source.connect()
            self._handles.append(model.register_forward_pre_hook(BoundHook(self._before_forward)))
            self._handles.append(model.register_forward_hook(BoundHook(self._after_forward)))
            for owner, mine in self._owners():
                hook = BoundHook(functools.partial(self._before_read, mine))
                self._handles.append(owner.register_forward_pre_hook(hook))
            for ref, stepper in zip(self._optimizers, self._steppers, strict=True):
                optimizer = ref()
                assert optimizer is not None
                commit = BoundHook(functools.partial(self._after_step, stepper))
                self._handles.append(optimizer.register_step_post_hook(commit))
            self._register_pre_hooks()
            if self._mixed_precision is not None:
                self._precision = LowPrecision(model, self._mixed_precision)
        except BaseException:
            self.detach()
            raise

    def _register_pre_hooks(self) -> None:
        """Ours run last: the user's see the gradients as spent, and raise rather than find none."""
        for handle in self._pre_hooks:
            handle.remove()
        self._pre_hooks.clear()
        for ref, stepper in zip(self._optimizers, self._steppers, strict=True):
            if (optimizer := ref()) is not None:
                flush = BoundHook(functools.partial(self._before_step, stepper))
                self._pre_hooks.append(optimizer.register_step_pre_hook(flush))

    def _begin_step(self) -> None:
        self._ask_for_step()
        self._register_pre_hooks()
        for source in self._sources:
            source.begin_step()

    def _before_forward(self, module: nn.Module, args: object) -> None:
        # Inside a backward this is a checkpointed segment run again.
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        self._refuse_late_ddp()
        self._transaction.require_readable()
        require_unchanged(self._transaction.parameters)
        if self._transaction.state == "idle":
            for source in self._sources:
                source.refresh()

    def _before_read(self, mine: Sequence[AttachedParameter], module: nn.Module, args: object) -> None:
        # A part of the model may be called by itself. Inside the model's own forward this has been asked already.
        if torch.compiler.is_compiling() or self._transaction.state != "open" or graph_task() is not None:
            return
        if any(map(self._transaction.is_applied, mine)):
            self._transaction.require_readable()

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        for node in _nodes(output):
            node.register_prehook(self._before_backward)

    def _before_backward(self, gradients: object) -> None:
        self._transaction.begin_backward(gradients)
        # Asked for here it is the outermost backward's end; in a hook on a parameter, maybe that of one nested in it.
        self._ask_for_step()

    def _ask_for_step(self) -> None:
        if self._steps_itself and not self._step_due:
            self._step_due = True
            _after_the_sources(self._step, self._never_stepped)

    def _step(self) -> None:
        self._step_due = False
        # DDP sets gradients that no source announces, of parameters that only other ranks used, where it has reduced.
        reduced = [source.reduced() for source in self._sources if isinstance(source, DDPSource)]
        if self._transaction.state == "open" or any(reduced):
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

    def _in_no_sync(self) -> bool:
        return any(not ddp.require_backward_grad_sync for ref in self._ddps if (ddp := ref()) is not None)

    def _before_step(
        self, stepper: Stepper, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._transaction.begin_flush(stepper)
            return None

        @functools.wraps(closure)
        def then_flush() -> Any:
            loss = closure()
            self._transaction.begin_flush(stepper)
            return loss

        if len(args) > 1:
            return (args[0], then_flush, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_flush}

    def _after_step(
        self, stepper: Stepper, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._transaction.commit(stepper)

    def _owners(self) -> list[tuple[nn.Module, list[AttachedParameter]]]:
        """The modules that hold attached parameters themselves, the model aside."""
        owners: dict[nn.Module, list[AttachedParameter]] = {}
        for attached in self._transaction.parameters:
            for place in attached.places:
                if (owner := place.module()) is not None and owner is not self._model():
                    owners.setdefault(owner, []).append(attached)
        return list(owners.items())

    def _parameters(self) -> Iterator[torch.Tensor]:
        for attached in self._transaction.parameters:
            if (parameter := attached.peek()) is not None:
                yield parameter

    def _gather(self, optimizers: Sequence[Optimizer], names: Names, in_fsdp1: bool) -> tuple[AttachedParameter, ...]:
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
            nbytes = parameter.numel() * parameter.element_size()
            spec = ParameterSpec(len(parameters), name, parameter.shape, parameter.dtype, parameter.device, nbytes)
            misuse = functools.partial(self._transaction.misuse, spec)
            spent = None if self._steps_itself else SpentGradient(parameter, name, misuse)
            # A sharded model puts other tensors in the parameters' places while it computes.
            held = () if in_fsdp1 or is_sharded(parameter) else places
            parameters.append(AttachedParameter(parameter, spec, held, owner[id(parameter)], spent))
        return tuple(parameters)


def _after_the_sources(end: Callable[[], None], failed: Callable[[], None]) -> None:
    """Call ``end`` where the current backward ends, after what the sources have asked for by then, twice over."""
    again = functools.partial(at_end_of_backward, end, failed)
    at_end_of_backward(functools.partial(at_end_of_backward, again, failed), failed)


def _nodes(output: object) -> Iterator[Node]:
    """The autograd nodes of the tensors in a module's output: backward starts at them."""
    if isinstance(output, torch.Tensor):
        if output.grad_fn is not None:
            yield output.grad_fn
    elif isinstance(output, Mapping):
        yield from _nodes(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _nodes(item)


def _reduce_dtype(policy: "MixedPrecisionPolicy | None") -> torch.dtype | None:
    return None if policy is None else policy.reduce_dtype or policy.param_dtype


def _ddps_in(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _managed(ddp: DistributedDataParallel) -> set[int]:
    """The parameters that ``ddp`` may reduce. Those that were frozen when it was built never come in a bucket, and are
    left to ``optimizer.step()``."""
    return {id(p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
