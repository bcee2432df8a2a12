"""FSDP's own state after an exception: brought back to what it is between two iterations.

FSDP, 1 and 2, notes on its modules how far a forward or backward has come: which weights are gathered, which gradients
are not reduced yet, which communication is in flight, and that the end of this backward is asked for. An exception
leaves these notes as they are, and the next iteration takes them for its own: after a failed backward FSDP2 raises
nothing, and trains nothing. Since torch 2.13 or so FSDP2 has ``reset_iter_state()`` for this, to be called by the loop.
Which gradients it drops differs from one torch to the next: here gradients are kept or dropped beside it.

``AfterErrors`` notices that a forward or a backward was left, and has the notes rebuilt: ``rebuild_fsdp2``,
``rebuild_fsdp1``. All that is done here is local: peers may not have failed. Each private name of torch's that is used
has a sentence; ``tests/distributed/test_fsdp_errors.py`` compares all state that FSDP has, and names each difference.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from instep._torch.engine import graph_task
from instep._torch.hooks import Around, GuardedCall
from instep.sources.fsdp.modules import fsdp1_in, fsdp2_groups, fsdp2_in, is_fsdp2


class AfterErrors:
    """Rebuilds the FSDP state of ``model`` once a forward or backward of it was left by an exception, or a forward
    without gradients was run.

    The attachment tells of a backward that raised (``backward_failed``). Of a forward that raised nobody tells: torch
    calls hooks after an ``Exception`` only, not after Ctrl-C, and takes back what they raise. So the calls of the
    modules are guarded themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._sharded: list[weakref.ref[nn.Module]] = []
        self._drain_failed: Callable[[], None] = lambda: None
        self._running: _Forward | None = None  # of the outermost module with FSDP inside

    def connect(self, drain_failed: Callable[[], None]) -> Iterator[GuardedCall]:
        """A guard around each forward that FSDP takes part in.

        Args:
            drain_failed: returns once ``backward_failed`` was called for a backward that raised. On accelerators the
                engine's thread may call it only after the exception has reached the loop.
        """
        self._drain_failed = drain_failed
        model = self._model()
        assert model is not None
        sharded = [*fsdp2_in(model), *fsdp1_in(model)]
        self._sharded = [weakref.ref(module) for module in sharded]
        for module in {model: None, **dict.fromkeys(sharded)}:
            yield GuardedCall(module, self._called)

    def _called(self, module: nn.Module) -> Around | None:
        # Inside a backward this is a checkpointed segment run again.
        if graph_task() is not None:
            return None
        forward = _Forward(module)
        return Around(partial(self._begin, forward), partial(self._end, forward), partial(self._failed, forward))

    def _begin(self, forward: "_Forward") -> None:
        module, running = forward.module(), self._running
        if running is not None and not running.failed and self._contains(running.module(), module):
            return  # a part of the forward that runs
        self._drain_failed()
        if any(map(_is_in_backward, (ref() for ref in self._sharded))):
            self._rebuild(gradients=True)  # a backward was left, and nobody has told of it
        elif running is not None:
            self._rebuild(gradients=False)  # a forward was left, and its rebuilding has raised
        forward.awaited = frozenset(_awaiting_backward(ref() for ref in self._sharded))
        if not torch.is_grad_enabled():
            fsdp2 = (one for ref in self._sharded if (one := ref()) is not None and is_fsdp2(one))
            forward.noted = noted_forwards(cast(Any, one)._get_fsdp_state() for one in fsdp2)
        self._running = forward

    def _contains(self, outer: nn.Module | None, module: nn.Module | None) -> bool:
        if outer is None or module is None:
            return False
        return outer is self._model() or any(module is inner for inner in outer.modules())

    def _end(self, forward: "_Forward") -> None:
        if self._running is forward:
            forget_forwards(forward.noted)
            self._running = None

    def _failed(self, forward: "_Forward") -> None:
        if self._running is forward:
            forward.failed = True
            self._rebuild(gradients=False)

    def backward_failed(self) -> None:
        self._rebuild(gradients=True)

    def _rebuild(self, *, gradients: bool) -> None:
        model, running = self._model(), self._running
        if model is not None:
            awaited = frozenset() if gradients or running is None else running.awaited
            rebuild_fsdp2(model, gradients=gradients)
            rebuild_fsdp1(model, gradients=gradients, awaited=awaited)
        self._running = None  # last: what raises here is done again before the next forward


class _Forward:
    """One running forward that FSDP takes part in.

    Attributes:
        module: the module that the loop has called.
        awaited: FSDP1's parameters, by ``id``, of earlier forwards that are still to go backward.
        noted: FSDP2's notes of earlier forwards.
        failed: whether it was left by an exception, and FSDP's state is to be rebuilt.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.awaited: frozenset[int] = frozenset()
        self.noted: list[tuple[Any, int]] = []
        self.failed = False


def _is_in_backward(module: Any) -> bool:
    """Whether FSDP takes a backward to be running: FSDP has asked the engine for the backward's end, and that end has
    not come."""
    if module is None:
        return False
    if is_fsdp2(module):
        return bool(module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)
    return bool(getattr(module, "_post_backward_callback_queued", False))  # of an FSDP1 root, after its first forward


def _awaiting_backward(modules: Iterable[Any]) -> Iterator[int]:
    """FSDP1's parameters, by ``id``, whose next gradient FSDP1 has a hook for: since the first forward that used them
    after a backward."""
    for module in modules:
        handle = None if module is None or is_fsdp2(module) else module._handle
        if handle is not None and hasattr(handle.flat_param, "_post_backward_hook_state"):
            yield id(handle.flat_param)


# FSDP2: ``fully_shard``.


def rebuild_fsdp2(model: nn.Module, *, gradients: bool) -> None:
    """Make every parameter that ``fully_shard`` was applied to the sharded one again, with nothing in flight.

    Args:
        gradients: also drop gradients that are not reduced yet, of this backward and of the micro-batches before it:
            some groups have added to them, others have not, and ``zero_grad()`` does not reach them. Reduced gradients
            stay until ``zero_grad()``, as in any loop.
    """
    for root, states in _fsdp2_roots(model):
        groups = [group for state in states for group in fsdp2_groups(state)]
        # FSDP2's own reset drops all gradients (of torch 2.13: some).
        kept = [GroupGradients(group, unreduced=not gradients) for group in groups]
        if root is None:
            for group in groups:
                reset_group(group)  # it may have been gathered by unshard(), which needs no root
        elif hasattr(root, "reset_iter_state"):
            try:
                root.reset_iter_state()
            except RuntimeError:  # of weights gathered ahead, from a peer that is gone or did not come
                for group in groups:
                    drop_gathered(group)
                root.reset_iter_state()
        else:
            reset_iter_state(states)
        for one in kept:
            one.restore()


def _fsdp2_roots(model: nn.Module) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The outermost modules that ``fully_shard`` was applied to, each with the states that ``fully_shard`` keeps of all
    modules in it. Such a module may be above ``model``. ``None``: no forward has begun, or an interrupt has stopped the
    first one before all was made that FSDP2 makes there."""
    seen: set[int] = set()
    modules: Sequence[Any] = fsdp2_in(model)
    for module in modules:
        state = module._get_fsdp_state()
        if state._is_root and not is_lazily_made(state):
            unmake(states_in(module))
    for module in modules:
        state = module._get_fsdp_state()
        context = state._state_ctx  # one for all states of a root, which are found in the first forward
        if id(context) not in seen:
            seen.add(id(context))
            root = next((one for one in context.all_states if one._is_root), None)
            yield (None, [state]) if root is None else (root._modules[0], context.all_states)


def is_lazily_made(root: Any) -> bool:
    """Whether FSDP2 has made all that it makes in the first forward of ``root``, the state of an outermost module. It
    takes that for made once it has begun (``_is_root``). The hooks around ``state_dict()`` come last."""
    # The states are in the list one by one, too.
    found = {id(state) for state in root._state_ctx.all_states}
    if not all(id(state) in found for state in states_in(root._modules[0])):
        return False
    for group in (group for state in root._state_ctx.all_states for group in fsdp2_groups(state)):
        modules = {parameter._module_info.module for parameter in group.fsdp_params}
        if len(group._module_to_pre_save_state_dict_hook_handle) != len(modules):
            return False
        if not group._module_to_pre_load_state_dict_hook_handle:
            return False
    return True


def states_in(module: nn.Module) -> Iterator[Any]:
    """What ``fully_shard`` keeps of ``module`` and the modules in it."""
    return (cast(Any, one)._get_fsdp_state() for one in fsdp2_in(module))


def unmake(states: Iterable[Any]) -> None:
    """FSDP2 makes again, in the next forward, what it had begun to make for ``states`` in the first one."""
    for state in states:
        state._is_root = None
        state._state_ctx.all_states.clear()
        state._state_ctx.iter_forward_root = None
        state._training_state = type(state._training_state).IDLE
        for group in fsdp2_groups(state):
            group._module_fqn = None  # for messages: another one would be added to it
            for name in ("_module_to_pre_save_state_dict_hook_handle", "_module_to_pre_load_state_dict_hook_handle"):
                handles = getattr(group, name)  # it makes these only where there are none
                for handle in handles.values():
                    handle.remove()
                handles.clear()


# The streams on which FSDP2 communicates, in the context that all modules of a root share.
_FSDP2_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")


def reset_iter_state(states: Iterable[Any]) -> None:
    """Bring ``states``, which ``fully_shard`` keeps of the modules of one root, to where they are between two
    iterations. Gradients stay as they are, but for those that HSDP has summed among the shards only: these are
    dropped."""
    for state in states:
        shared, communication = state._state_ctx, state._comm_ctx
        shared.iter_forward_root = None  # the root whose forward runs: the next forward would not be taken for a root's
        shared.post_backward_final_callback_queued = False  # or no backward ever asks for its end again
        wait_for(communication, _FSDP2_STREAMS, state._device_handle)
        communication.all_gather_state = None  # buffers of communication, which is waited for by now
        if hasattr(communication, "reduce_scatter_states"):
            communication.reduce_scatter_states.clear()
            communication._last_post_reduce_events.clear()
        else:  # before torch 2.12 or so
            communication.reduce_scatter_state = None
        communication.post_forward_order.clear()  # from which backward knows what to gather ahead
        state._training_state = type(state._training_state).IDLE
        state._modules_to_run_forward.clear()  # of a group of modules, those whose forward has not ended
        for group in fsdp2_groups(state):
            reset_group(group)


def drop_gathered(group: Any) -> None:
    """Drop weights that were gathered ahead, and not used."""
    if group._all_gather_result is not None:
        work = group._all_gather_result.all_gather_work
        if isinstance(work, dist.Work):
            # Its peer may be gone, or may never have come. The loop is told of the error that led here, not of this
            # one.
            with suppress(RuntimeError):
                work.wait()
        group._all_gather_result = None


def reset_group(group: Any) -> None:
    drop_gathered(group)
    # The rest of what was in flight, and events of streams that are waited for now.
    group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
    group._post_forward_indices.clear()  # its places in post_forward_order
    group._partial_reduce_output = None
    for parameter in group.fsdp_params:
        parameter.to_sharded()
    group._sharded_state = type(group._sharded_state).SHARDED
    group._training_state = type(group._training_state).IDLE


# HSDP's sums among the shards that are not summed among the replicas yet, and where in them each parameter's lie.
_LAYOUT = "_partial_reduce_output_layout"
_PARTIAL = ("_partial_reduce_output", _LAYOUT)


class GroupGradients:
    """The gradients of one of FSDP2's groups, to be put back.

    Args:
        unreduced: whether to keep those that are not reduced yet: of micro-batches and, in HSDP, among the replicas.
            If not, they are dropped.
    """

    def __init__(self, group: Any, *, unreduced: bool) -> None:
        self._group = group
        parameters = [p.sharded_param for p in group.fsdp_params]
        gathered = [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        self._gradients = [(p, p.grad) for p in (*parameters, *(gathered if unreduced else ()))]
        self._partial = {name: getattr(group, name) for name in _PARTIAL if unreduced and hasattr(group, name)}
        if _LAYOUT in self._partial:
            self._partial[_LAYOUT] = dict(self._partial[_LAYOUT])  # a copy: FSDP2 empties its own
        for parameter in group.fsdp_params if not unreduced else ():
            if hasattr(parameter, "_unsharded_param"):  # since it was first gathered
                parameter._unsharded_param.grad = None
            if "unsharded_accumulated_grad" in vars(
                parameter
            ):  # until torch 2.13 or so: micro-batches, in reduce_dtype
                parameter.unsharded_accumulated_grad = None

    def restore(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for name, value in self._partial.items():
            setattr(self._group, name, value)
        for parameter in self._group.fsdp_params:
            if parameter.grad_offload_event is not None:  # a copy to the host
                parameter.grad_offload_event.synchronize()
                parameter.grad_offload_event = None
            # Registers the parameter that the optimizer holds, and frees the gathered one. Each of a group is asked: an
            # interrupt may have come between two of them.
            parameter.to_sharded()


def noted_forwards(states: Iterable[Any]) -> list[tuple[Any, int]]:
    """Each of ``states``, with how many forwards its root has noted: from them backward knows what to gather ahead."""
    # The list is made in the first forward.
    return [(state, len(getattr(state._comm_ctx, "post_forward_order", ()))) for state in states]


def forget_forwards(noted: Iterable[tuple[Any, int]]) -> None:
    """Forget the forwards after those that ``noted`` counts. FSDP2 notes forwards without gradients, too: a backward
    that comes to an end would gather ahead of them, and read the weights of its own last layer, which may have been
    stepped."""
    for state, count in noted:
        del state._comm_ctx.post_forward_order[count:]
        for group in fsdp2_groups(state):
            group._post_forward_indices[:] = [index for index in group._post_forward_indices if index < count]


# FSDP1: ``FullyShardedDataParallel``.


# The streams on which each FSDP1 instance communicates.
_FSDP1_STREAMS = ("_pre_unshard_stream", "_unshard_stream", "_post_backward_stream", "_all_reduce_stream")


def rebuild_fsdp1(model: nn.Module, *, gradients: bool, awaited: frozenset[int] = frozenset()) -> None:
    """As ``rebuild_fsdp2``, of ``FullyShardedDataParallel`` instances with ``use_orig_params=True``.

    Without sharding (``NO_SHARD``) all gradients stay, as those of ``DistributedDataParallel`` do.

    Args:
        awaited: by ``id``, the parameters that an earlier forward has used, and whose backward is still to come.
    """
    for wrapper in fsdp1_in(model):
        if wrapper._is_root is None:  # before its first forward
            continue
        wait_for(wrapper, _FSDP1_STREAMS, wrapper._device_handle)
        wrapper.training_state = type(wrapper.training_state).IDLE
        wrapper._unshard_event = None
        if wrapper._is_root:
            wrapper._post_backward_callback_queued = False  # or no backward asks for its end
            order = wrapper._exec_order_data  # from which it knows what to gather ahead
            order.handles_post_forward_order.clear()
            order.current_order_index = 0
        if wrapper._handle is not None:
            _rebuild_handle(wrapper._handle, gradients, awaited)


def _rebuild_handle(handle: Any, gradients: bool, awaited: frozenset[int]) -> None:
    """Does for one instance's parameters what FSDP1 does where a backward ends
    (``torch/distributed/fsdp/_runtime_utils.py``, ``_post_backward_final_callback``)."""
    flat = handle.flat_param
    handle._prefetched = handle._needs_pre_forward_unshard = False  # gathered ahead, and to be
    handle._post_forward_index = None  # its place in handles_post_forward_order
    handle._training_state = type(handle._training_state).IDLE
    if id(flat) not in awaited:
        handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = False
    handle.reshard(handle.uses_sharded_strategy)  # registers the sharded views that the optimizer holds
    handle.post_reshard()
    hooks = getattr(flat, "_post_backward_hook_state", None)
    if hooks is not None and id(flat) not in awaited:
        # With low precision the next forward's gradient would not come to it, and FSDP1 would make no other.
        hooks[-1].remove()
        del flat._post_backward_hook_state
    if not handle.uses_sharded_strategy:
        flat._post_backward_called = False
        return
    whole = flat.grad is not None and flat.grad.shape == flat._unpadded_unsharded_size
    if gradients:
        if whole:
            flat.grad = None
        if hasattr(flat, "_saved_grad_shard"):  # the reduced gradient, with that of earlier backwards
            # It is kept where the loop has its views in .grad. Where zero_grad() has taken them off, it is thrown away.
            flat._post_backward_called = any(p.grad is not None for p in flat._params)
            handle.prepare_gradient_for_optim()
        flat._post_backward_called = False
    if whole and not gradients:
        handle._use_unsharded_grad_views()  # micro-batches, in no_sync
    else:
        handle._use_sharded_grad_views()


def wait_for(owner: Any, streams: Iterable[str], device_handle: Any) -> None:
    """Have the device's current stream wait for the ``streams`` of ``owner``, before the memory they use is freed."""
    for name in streams:
        stream = getattr(owner, name, None)  # made in the first forward
        if stream is not None:
            device_handle.current_stream().wait_stream(stream)
