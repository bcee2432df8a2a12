"""Data parallelism without permanent buckets: the module that ``replicate`` returns, and the source of its gradients.

``Replicated`` runs the forward and has its gradients averaged in backward (``TransientBuckets``), attached or not.
Attached, ``ReplicatedSource`` is told of each bucket that has arrived: its gradients are final, and stepped while later
buckets are on their way.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from instep._optim.parameters import AttachedParameter, AttachedParameters
from instep._ranks.collectives import broadcast, require_the_same
from instep._torch.engine import Phase, current, graph_task
from instep.buckets import Bucket
from instep.errors import AttachError, InstepError, class_name
from instep.sources import Sink, Source, WrappedParameters, as_bucket, deliver, record_arrival, step_all
from instep.sources.replicate.buckets import TransientBuckets

# A module that is inside of one has no sign of it, so that all that there are can be asked.
living: "weakref.WeakSet[Replicated]" = weakref.WeakSet()


class Replicated(nn.Module):
    """The module that ``instep.replicate`` returns: ``module``, whose gradients are the mean over all ranks after
    backward.

    Attributes:
        module: the model that was given.
        require_backward_grad_sync: whether the backward of the next forward averages; see ``no_sync``.

    Since 0.1.0.

    Example:
        ```python
        model = instep.replicate(model)
        with model.no_sync():
            (model(loader[0]) / 2).backward()
        (model(loader[1]) / 2).backward()  # averages the sum over the ranks
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.module.state_dict(), "model.pt")
        ```
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        _refuse(module, bucket_cap_mb)
        group = _group(process_group)
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.bucket_cap_mb = bucket_cap_mb
        options = {"bucket_cap_mb": bucket_cap_mb, "broadcast_buffers": broadcast_buffers}
        require_the_same(module, options, group)
        with torch.no_grad():
            broadcast([*module.parameters(), *(module.buffers() if broadcast_buffers else ())], group)
        self._connect(group)

    def _connect(self, group: dist.ProcessGroup) -> None:
        self.process_group = group
        self.require_backward_grad_sync = True
        self._sync_buffers_next = True
        parameters = list(self.module.named_parameters())
        modules = [m for m in self.module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
        weights = {id(m.weight) for m in modules}
        sparse = frozenset(number for number, (_, p) in enumerate(parameters) if id(p) in weights)
        self._buckets = TransientBuckets(parameters, sparse, group, self.bucket_cap_mb)
        living.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``module(*args, **kwargs)``. Before it buffers are made those of the first rank, where they may differ."""
        # A forward that backward runs again (checkpointing) finds the buffers as they are.
        if self._sync_buffers_next and self.broadcast_buffers and graph_task() is None:
            with torch.no_grad():
                broadcast(self.module.buffers(), self.process_group)
        output = self.module(*args, **kwargs)
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._buckets.after_forward(output, reduces=reduces)
        self._sync_buffers_next = reduces
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward: gradients add up on each rank, and the next backward outside averages them."""
        before = self.require_backward_grad_sync
        try:
            self.require_backward_grad_sync = False
            yield
        finally:
            self.require_backward_grad_sync = before

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not _group(None):
            raise InstepError(
                "a Replicated with a process_group of its own can be neither copied nor pickled: the group exists in "
                "its processes only. Copy .module, and replicate the copy"
            )
        state: dict[str, Any] = super().__getstate__()
        del state["_buckets"], state["process_group"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has buckets of its own, in the default group. Nothing is broadcast: all ranks have made one."""
        super().__setstate__(state)
        self._connect(_group(None))


def _group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise AttachError(
            "replicate needs a process group: call torch.distributed.init_process_group on every rank first, or start "
            "the script with torchrun"
        )
    group = process_group or dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise AttachError("replicate: this rank is not in process_group. Call it on the ranks of the group only")
    return group


def _refuse(module: nn.Module, bucket_cap_mb: Any) -> None:
    """Raise ``AttachError`` for what ``replicate`` does not take, before anything is sent."""
    if not isinstance(module, nn.Module):
        raise AttachError(f"replicate takes a torch.nn.Module, not {class_name(module, in_full=True)}")
    is_number = isinstance(bucket_cap_mb, (int, float)) and not isinstance(bucket_cap_mb, bool)
    if bucket_cap_mb is not None and not (is_number and bucket_cap_mb > 0):
        raise AttachError(f"replicate: bucket_cap_mb must be a positive number of MiB or None, not {bucket_cap_mb!r}")
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: not used
    wrappers = (DistributedDataParallel, Replicated, *(() if fsdp is None else (fsdp.FullyShardedDataParallel,)))
    for name, inside in module.named_modules():
        if isinstance(inside, wrappers):
            raise AttachError(
                f"replicate: {name or 'the model'!r} is a {type(inside).__name__}, which reduces gradients itself. "
                "Give replicate the plain module"
            )
    _refuse_parameters(module)


def _refuse_parameters(module: nn.Module) -> None:
    parameters = dict(module.named_parameters())
    if not any(p.requires_grad for p in parameters.values()):
        raise AttachError(
            f"replicate: {type(module).__name__} has no parameter that requires a gradient, so there is nothing to "
            "average. Use the module as it is, or set requires_grad before"
        )
    tensors = sys.modules.get("torch.distributed.tensor")
    replicated = {id(p) for wrapper in living for p in wrapper.parameters()}
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise AttachError(f"replicate: parameter {name!r} has no shape yet (lazy module). Run one forward first")
        if tensors is not None and isinstance(parameter, tensors.DTensor):
            raise AttachError(
                f"replicate: parameter {name!r} is a DTensor, and is reduced by what made it one (fully_shard, tensor "
                "parallel). Give replicate a module of plain parameters"
            )
        if id(parameter) in replicated:
            raise AttachError(
                f"replicate: parameter {name!r} is replicated already, and would be averaged twice. Use what the "
                "earlier call returned, or drop it first"
            )
        if getattr(parameter, "_in_backward_optimizers", None):
            raise AttachError(
                f"replicate: parameter {name!r} has optimizers of its own (apply_optimizer_in_backward), which would "
                "step from this rank's gradient alone. Replicate a model without them, and attach"
            )
    devices = {parameter.device: name for name, parameter in parameters.items()}
    if len(devices) > 1:
        listed = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise AttachError(
            f"replicate takes a model on one device, and this one has {listed}. Use DistributedDataParallel"
        )


class ReplicatedSource(Source):
    """The gradients of a ``Replicated``, stepped while backward runs and later buckets are on their way.

    Args:
        reduce_dtype: what the mean is computed and sent in; ``None``: as the gradients are.
    """

    def __init__(
        self,
        sink: Sink,
        parameters: Sequence[AttachedParameter],
        replicated: Replicated,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.reduce_dtype = reduce_dtype
        self._sink = sink
        self._replicated = weakref.ref(replicated)
        self._parameters = WrappedParameters(parameters)
        self._waiting: list[AttachedParameter] = []  # of a sink that waits for all: delivered, and not offered yet
        self._delivered = False  # whether the running backward has delivered any gradient
        self._writes = True  # whether buckets may be stepped: not after an error, nor in a second backward of a step

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        replicated = self._replicated()
        buckets = () if replicated is None else replicated._buckets.buckets
        own = (as_bucket("replicated", self._parameters.among(bucket.members)) for bucket in buckets)
        return tuple(bucket for bucket in own if bucket.parameters)

    def connect(self) -> None:
        replicated = self._replicated()
        assert replicated is not None
        if replicated._buckets.receiver is not None:
            raise AttachError(
                "this Replicated is already attached. Give all its optimizers to one call: "
                "attach(model, [first, second])"
            )
        replicated._buckets.receiver = self

    def adopt(self, parameters: Sequence[AttachedParameter]) -> Sequence[AttachedParameter]:
        replicated = self._replicated()
        reduced = set() if replicated is None else {id(p) for p in replicated.parameters()}
        return self._parameters.adopt(parameters, reduced)

    def begin_step(self) -> None:
        self._writes = True

    # In backward: what ``TransientBuckets`` calls.

    def launched(self, parameters: Sequence[torch.Tensor], future: torch.futures.Future[Any]) -> None:
        """The bucket with the gradients of ``parameters`` was sent."""
        record_arrival(self._sink, self._parameters.among(parameters), future)

    def delivered(self, parameters: Sequence[torch.Tensor]) -> None:
        """A bucket has arrived: ``.grad`` of ``parameters`` is the mean of all ranks, and final."""
        self._delivered = True
        members = self._parameters.among(parameters)
        if self._sink.waits_for_all:
            self._waiting += members
        elif members:
            # Asked for _writes only once these were offered: ``begin_step`` is called by the first offer of a step.
            self._writes = deliver(self._sink, members, lambda: self._writes and self._sink.apply_and_free(members))
            applied = {id(a.get()) for a in members if self._sink.is_applied(a)}
            _keep_alone([p for p in parameters if id(p) not in applied], parameters)

    def ended(self) -> None:
        """Backward ends: all gradients of it were delivered."""
        self._delivered = False
        waiting = AttachedParameters(self._waiting)
        self._waiting.clear()
        if waiting:
            deliver(self._sink, waiting, partial(step_all, self._sink, waiting))
        # A later backward of this step has been computed with new weights. If it comes to parameters that were stepped,
        # the offer of their gradients raises; the other parameters are left to optimizer.step().
        self._writes = False
        self._sink.join()
        # Not at once: an error before the end of a DDP instance in the same backward would leave the instance unusable.
        current().at(Phase.AFTER_DDP, self._sink.raise_failure, self._sink.backward_raised)

    def failed(self, error: BaseException) -> None:
        """A communication failed: nothing more is delivered, and ``backward()`` raises ``error``."""
        self._sink.fail(error)
        self._delivered = True
        self.raised()

    def raised(self) -> None:
        """Backward raises, for whatever reason: nothing more is delivered."""
        self._waiting.clear()
        if self._delivered:  # else the backward was refused before it began, and the step of an earlier one is whole
            self._delivered = False
            self._sink.backward_raised()

    def disconnect(self) -> None:
        replicated = self._replicated()
        if replicated is not None and replicated._buckets.receiver is self:
            replicated._buckets.receiver = None


def _keep_alone(left: Sequence[torch.Tensor], delivered: Sequence[torch.Tensor]) -> None:
    """Copy the gradients ``left`` out of their bucket: the others of the bucket were freed, and a view of the bucket
    would keep the memory of them all."""
    if left and len(left) < len(delivered):
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in left:
                if parameter.grad is not None and parameter.grad._is_view():
                    parameter.grad = parameter.grad.clone()
