"""FSDP's own state after an exception: brought back to what it is between two iterations.

FSDP, 1 and 2, keeps on its modules how far a forward or backward has come: which weights are gathered, which gradients
are not reduced yet, what is in flight, and that the end of this backward is asked for. An exception leaves all of it
as it was, and the next iteration takes it for its own: after a failed backward FSDP2 raises nothing, and trains
nothing. torch 2.13 has ``reset_iter_state()`` of FSDP2 for this, to be called by the loop; it leaves this rank's own
gradients where they are, and the next backward adds to them.

All that is done here is local: peers may not have failed. Each private name of torch's that is used has a sentence;
``tests/distributed/test_fsdp_errors.py`` compares all state that FSDP has, and names what is not as before.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from instep._core.engine import graph_task
from instep._core.hooks import BoundHook
from instep._wrappers import fsdp1_in, fsdp2_groups, fsdp2_in, is_fsdp2

# On which FSDP2's shared context, and each FSDP1 instance, let their communication run.
_FSDP2_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
_FSDP1_STREAMS = ("_pre_unshard_stream", "_unshard_stream", "_post_backward_stream", "_all_reduce_stream")


class AfterErrors:
    """Rebuilds the FSDP state of ``model`` once a forward or backward of it was left by an exception.

    A backward tells of it (``backward_failed``). A forward does where torch calls hooks after an exception; an
    interrupted one, after which it calls none, is noticed before the next forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._sharded: list[weakref.ref[nn.Module]] = []
        # The outermost module with FSDP inside whose forward is running; FSDP1's parameters that earlier ones used.
        self._running: weakref.ref[nn.Module] | None = None
        self._awaited: frozenset[int] = frozenset()

    def connect(self) -> Iterator[RemovableHandle]:
        """Hooks around each forward that FSDP takes part in; they must come before all others."""
        model = self._model()
        assert model is not None
        sharded = [*fsdp2_in(model), *fsdp1_in(model)]
        self._sharded = [weakref.ref(module) for module in sharded]
        for module in {model: None, **dict.fromkeys(sharded)}:
            yield module.register_forward_pre_hook(BoundHook(self._begin), prepend=True)
            yield module.register_forward_hook(BoundHook(self._end))
            yield module.register_forward_hook(BoundHook(self._left), always_call=True)

    def backward_failed(self) -> None:
        self._rebuild(gradients=True)

    def _begin(self, module: nn.Module, args: object) -> None:
        # Inside a backward this is a checkpointed segment run again.
        if torch.compiler.is_compiling() or graph_task() is not None:
            return
        running = None if self._running is None else self._running()
        if running is not None and running is not module and self._contains(running, module):
            return
        if any(map(_is_in_backward, (ref() for ref in self._sharded))):
            self._rebuild(gradients=True)
        elif running is not None:
            self._rebuild(gradients=False)
        self._running = weakref.ref(module)
        self._awaited = frozenset(_awaiting_backward(ref() for ref in self._sharded))

    def _contains(self, outer: nn.Module, module: nn.Module) -> bool:
        return outer is self._model() or any(module is inner for inner in outer.modules())

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        if self._is_running(module):
            self._running = None

    def _left(self, module: nn.Module, args: object, output: object) -> None:
        """Called after ``_end``, and also where that was not called."""
        if self._is_running(module):
            self._running = None
            self._rebuild(gradients=False)

    def _is_running(self, module: nn.Module) -> bool:
        return (
            not torch.compiler.is_compiling()
            and graph_task() is None
            and self._running is not None
            and self._running() is module
        )

    def _rebuild(self, *, gradients: bool) -> None:
        model = self._model()
        if model is not None:
            self._running = None
            rebuild_fsdp2(model, gradients=gradients)
            rebuild_fsdp1(model, gradients=gradients, awaited=frozenset() if gradients else self._awaited)


def _is_in_backward(module: Any) -> bool:
    """Whether FSDP takes a backward to be running. It asks once for its end, and forgets so there."""
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


def rebuild_fsdp2(model: nn.Module, *, gradients: bool) -> None:
    """Make every parameter that ``fully_shard`` was applied to the sharded one again, with nothing in flight.

    Args:
        gradients: also drop what is not reduced yet, of this backward and of the micro-batches before it: some groups
            have added to it, others have not, and ``zero_grad()`` does not reach it. Reduced gradients stay, as in any
            loop, until ``zero_grad()``.
    """
    states: dict[int, Any] = {}
    module: Any
    for module in fsdp2_in(model):
        state = module._get_fsdp_state()  # what fully_shard keeps of a module
        # One context of all states of a root, which may be above ``model``; empty before the first forward.
        states |= {id(one): one for one in (state, *state._state_ctx.all_states)}
    for state in states.values():
        shared, communication = state._state_ctx, state._comm_ctx
        shared.iter_forward_root = None  # whose forward is running: the next one would not be taken for a root's
        shared.post_backward_final_callback_queued = False  # or no backward ever asks for its end again
        _wait_for(communication, _FSDP2_STREAMS, state._device_handle)
        communication.all_gather_state = None  # buffers that were kept for what is waited for now
        if hasattr(communication, "reduce_scatter_states"):
            communication.reduce_scatter_states.clear()
            communication._last_post_reduce_events.clear()
        else:  # before torch 2.12 or so
            communication.reduce_scatter_state = None
        communication.post_forward_order.clear()  # from which backward knows what to gather ahead
        state._training_state = type(state._training_state).IDLE
        state._modules_to_run_forward.clear()  # of a group of modules, those whose forward has not ended
        for group in fsdp2_groups(state):
            _rebuild_group(group, gradients)


def _rebuild_group(group: Any, gradients: bool) -> None:
    if group._all_gather_result is not None:  # gathered ahead, and not used
        _wait_for_work(group._all_gather_result.all_gather_work)
        group._all_gather_result = None
    # The rest of what was in flight, and events of streams that are waited for now.
    group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
    group._post_forward_indices.clear()  # its places in post_forward_order
    if gradients:
        group._partial_reduce_output = None  # HSDP: reduced among the shards, not among the replicas
    for parameter in group.fsdp_params:
        if gradients:
            parameter.unsharded_accumulated_grad = None  # micro-batches, in reduce_dtype
            if hasattr(parameter, "_unsharded_param"):  # since it was first gathered
                parameter._unsharded_param.grad = None
        if parameter.grad_offload_event is not None:  # a copy to the host
            parameter.grad_offload_event.synchronize()
            parameter.grad_offload_event = None
        # Registers the parameter that the optimizer holds, and frees the gathered one. Asked of each: an interrupt may
        # have come between two of a group.
        parameter.to_sharded()
    group._sharded_state = type(group._sharded_state).SHARDED
    group._training_state = type(group._training_state).IDLE


def rebuild_fsdp1(model: nn.Module, *, gradients: bool, awaited: frozenset[int] = frozenset()) -> None:
    """The same of ``FullyShardedDataParallel`` instances, with ``use_orig_params=True``.

    ``awaited``: parameters, by ``id``, of which an earlier forward is still to go backward. Without sharding
    (``NO_SHARD``) all gradients stay, as those of ``DistributedDataParallel`` do.
    """
    for wrapper in fsdp1_in(model):
        if wrapper._is_root is None:  # before its first forward
            continue
        _wait_for(wrapper, _FSDP1_STREAMS, wrapper._device_handle)
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
    """``torch/distributed/fsdp/_runtime_utils.py``, ``_post_backward_final_callback``, is what this does otherwise."""
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
        if hasattr(flat, "_saved_grad_shard"):  # what is reduced, and that of backwards before this one
            # Or it is thrown away: as zero_grad() will have meant that has taken the views of it off.
            flat._post_backward_called = any(p.grad is not None for p in flat._params)
            handle.prepare_gradient_for_optim()
        flat._post_backward_called = False
    if whole and not gradients:
        handle._use_unsharded_grad_views()  # micro-batches, in no_sync
    else:
        handle._use_sharded_grad_views()


def _wait_for(owner: Any, streams: Iterable[str], device_handle: Any) -> None:
    """Let the device's current stream wait for ``owner``'s, before the memory they use is freed."""
    for name in streams:
        stream = getattr(owner, name, None)  # made in the first forward
        if stream is not None:
            device_handle.current_stream().wait_stream(stream)


def _wait_for_work(work: Any) -> None:
    if isinstance(work, dist.Work):
        # Of a peer that is gone, or did not come: the error that is being handled is the one to tell.
        with suppress(RuntimeError):
            work.wait()
