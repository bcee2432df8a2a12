"""FSDP's modules around or inside of a model, 1 and 2, and what instep asks of them beside their gradients.

Which modules there are, and which parameters are gathered together; that shards are in place; whether the next backward
reduces; and when weights are gathered. No wrapper's module is imported before the loop has done so.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from instep._torch.pipelining import StageCall

T = TypeVar("T")


def instances_of(wrapper: type[T]) -> list[T]:
    """All living instances of a distributed wrapper. A module does not show a wrapper that is around it."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    classes: list[type] = [wrapper]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    # An object refers to its class. Asked which objects do, the collector searches without running any Python.
    return [instance for instance in gc.get_referrers(*classes) if isinstance(instance, wrapper)]


def fsdp2_in(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_fsdp2(module)]


def is_fsdp2(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def fsdp2_groups(state: Any) -> Sequence[Any]:
    """FSDP2's own groups of a module, given its state: one before torch 2.9 or so, several since."""
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def defers_all_reduce(group: Any) -> bool:
    """Whether the next backward reduces a group of HSDP's over the shards, and not yet over the replicas."""
    return bool(group.reduce_grads and not group.all_reduce_grads and group.mesh_info.replicate_mesh_dim is not None)


def fsdp1_in(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FullyShardedDataParallel)]


def fsdp1_of(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """The ``FullyShardedDataParallel`` instances that shard any of ``parameters``."""
    if not any(getattr(p, "_fsdp_flattened", False) for p in parameters):  # FSDP1's own mark
        return []
    ours = {id(parameter) for parameter in parameters}
    wrappers = instances_of(sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel)
    return [wrapper for wrapper in wrappers if any(id(p) in ours for p in wrapper.parameters())]


class ShardedGroup(NamedTuple):
    """One module that FSDP, 1 or 2, was applied to, with the parameters that are gathered and reduced with it.

    Attributes:
        members: the parameters, by ``id``.
    """

    module: "weakref.ref[nn.Module]"
    members: frozenset[int]


def sharded_groups(model: nn.Module) -> list[ShardedGroup]:
    """A group for each module in ``model`` that FSDP was applied to, without the parameters of such modules inside of
    it."""
    groups: list[ShardedGroup] = []
    seen: set[int] = set()
    for module in reversed([*fsdp2_in(model), *fsdp1_in(model)]):  # those inside of another one first
        members = frozenset(map(id, module.parameters())) - seen
        seen |= members
        groups.insert(0, ShardedGroup(weakref.ref(module), members))
    return groups


def put_shards_in_place(model: nn.Module) -> None:
    """Register the sharded parameters in the modules, where the gathered ones still are: ``fully_shard`` leaves these
    there after a forward without a backward, and after ``unshard``."""
    for module in fsdp2_in(model):
        cast(Any, module).reshard()


class FSDPSync:
    """Whether the next backward of a model reduces gradients, in the terms of ``DistributedDataParallel``.

    Attributes:
        asks_in_backward: whether that is asked in backward alone (FSDP2), and a forward may be outside of ``no_sync``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.asks_in_backward = bool(fsdp2_in(model))

    @property
    def require_backward_grad_sync(self) -> bool:
        reduces = map(_reduces, self._modules())
        return any(reduces) if self.asks_in_backward else all(reduces)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        for module in self._modules():
            set_reduces(module, value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """The loop may have set it for each module by itself."""
        before = [(module, _reduces(module)) for module in self._modules()]
        try:
            self.require_backward_grad_sync = False
            yield
        finally:
            for module, value in before:
                set_reduces(module, value)

    def _modules(self) -> Sequence[Any]:
        model = self._model()
        return [] if model is None else [*fsdp2_in(model), *fsdp1_in(model)]


def _reduces(module: Any) -> bool:
    # FSDP1 has no public name for it but no_sync(), a context; FSDP2 a public way to set it, and none to ask for it.
    if not is_fsdp2(module):
        return bool(module._sync_gradients)
    return any(group.reduce_grads for group in fsdp2_groups(module._get_fsdp_state()))


def set_reduces(module: Any, value: bool) -> None:
    """Set whether a module reduces its gradients. Whether over HSDP's replicas, too, stays what it is:
    ``set_requires_gradient_sync`` alone sets both."""
    if not is_fsdp2(module):
        module._sync_gradients = value
        return
    over_replicas = all(group.all_reduce_grads for group in fsdp2_groups(module._get_fsdp_state()))
    module.set_requires_gradient_sync(value, recurse=False)
    module.set_requires_all_reduce(over_replicas, recurse=False)


class DeferredAllReduce:
    """The switches of a model of HSDP whose gradients are reduced over the replicas with a step's last micro-batch:
    before it the loop calls ``set_requires_all_reduce(False)``."""

    def __init__(self, model: nn.Module | None) -> None:
        self._modules: list[Any] = [] if model is None else fsdp2_in(model)

    @property
    def is_set(self) -> bool:
        """Whether each group whose gradients the next backward reduces leaves the replicas out."""
        groups = [group for module in self._modules for group in fsdp2_groups(module._get_fsdp_state())]
        reduced = [group for group in groups if group.reduce_grads]
        return bool(reduced) and all(map(defers_all_reduce, reduced))

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Around the backward of the last one."""
        modules = [m for m in self._modules if any(map(defers_all_reduce, fsdp2_groups(m._get_fsdp_state())))]
        try:
            for module in modules:
                module.set_requires_all_reduce(True, recurse=False)
            yield
        finally:
            for module in modules:
                module.set_requires_all_reduce(False, recurse=False)


class ReplicaSums:
    """What FSDP2's groups keep of their all-reduce over the replicas (HSDP), each until backward ends: the buffer of
    which the group's gradients are views, or, with a ``reduce_dtype`` of its own, were cast from. All gradients of the
    model would stay in memory together, however early each was applied.

    torch keeps a buffer so that no later reduction gets its memory while the all-reduce runs on another stream (pytorch
    pull requests 140044 and 180900). An update of the gradients waits for that stream, and the streams that make
    gradients wait for the update: from then on nobody needs the buffer.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        groups = [group for module in modules for group in fsdp2_groups(module._get_fsdp_state())]
        # Weakly: a group keeps its module, and a source keeps no part of the model.
        self._group_of = {
            id(parameter.sharded_param): weakref.ref(group)
            for group in groups
            if getattr(group.mesh_info, "replicate_mesh_dim", None) is not None
            for parameter in group.fsdp_params
        }
        self._applied: dict[weakref.ref[Any], None] = {}

    def applied(self, parameter: torch.Tensor) -> None:
        """All gradients of the bucket of ``parameter`` were applied. Drop the buffers of the groups before: this one's
        comes into its place once the hooks that tell of its gradients are through. By now the streams that make
        gradients wait for the updates before this one."""
        ref = self._group_of.get(id(parameter))
        for before in [other for other in self._applied if other is not ref]:
            del self._applied[before]
            if (group := before()) is not None:
                group._all_reduce_state = None  # no public name; FSDP2 itself sets it to None where backward ends
        if ref is not None:
            self._applied[ref] = None


def fsdp2_reading_streams(model: Callable[[], nn.Module | None]) -> Iterator[torch.Stream]:
    """The streams on which FSDP2 copies shards to gather them. FSDP2 has them wait once, where the root's forward
    begins, or for the event that ``set_post_optim_event`` was given. It has no public name for these streams, and no
    way to have one group wait."""
    for module in () if (root := model()) is None else fsdp2_in(root):
        communication = cast(Any, module)._get_fsdp_state()._comm_ctx
        stream = getattr(communication, "all_gather_copy_in_stream", None)  # made in the first forward
        if isinstance(stream, torch.Stream):
            yield stream


def before_fsdp1_gathers(wrapper: Any, call: Callable[[], None]) -> list[StageCall]:
    """Have ``call`` made before the weights of one ``FullyShardedDataParallel`` are gathered, until what is returned is
    removed.

    FSDP1 has no hook for this, and gathers for many reasons: before a forward, ahead of one, in ``state_dict()`` and in
    ``summon_full_params()``. All go through ``pre_unshard`` and then ``unshard`` of its ``FlatParamHandle``
    (``torch/distributed/fsdp/_runtime_utils.py``, ``_unshard``), each on a stream of its own. So ``call`` comes before
    both.
    """

    def first(gather: Callable[[], Any], options: object) -> Any:
        call()
        return gather()

    handle = wrapper._handle
    return [] if handle is None else [StageCall(handle, name, first) for name in ("pre_unshard", "unshard")]
