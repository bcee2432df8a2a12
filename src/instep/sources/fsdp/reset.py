"""FSDP2's own notes of an iteration, taken back: ``FSDPModule.reset_iter_state()`` for a torch that has none (before
2.13 or so), and the notes of forwards that no backward follows."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from instep.sources.fsdp.wrappers import fsdp2_groups, fsdp2_in

# The streams on which FSDP2 communicates, in the context that all modules of a root share.
_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")


def reset_iter_state(states: Iterable[Any]) -> None:
    """Bring ``states``, which ``fully_shard`` keeps of the modules of one root, to where they are between two
    iterations. Gradients stay as they are, but for those that HSDP has summed among the shards only: these are
    dropped."""
    for state in states:
        shared, communication = state._state_ctx, state._comm_ctx
        shared.iter_forward_root = None  # the root whose forward runs: the next forward would not be taken for a root's
        shared.post_backward_final_callback_queued = False  # or no backward ever asks for its end again
        wait_for(communication, _STREAMS, state._device_handle)
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


def reset_group(group: Any) -> None:
    if group._all_gather_result is not None:  # gathered ahead, and not used
        wait_for_work(group._all_gather_result.all_gather_work)
        group._all_gather_result = None
    # The rest of what was in flight, and events of streams that are waited for now.
    group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
    group._post_forward_indices.clear()  # its places in post_forward_order
    group._partial_reduce_output = None
    for parameter in group.fsdp_params:
        parameter.to_sharded()
    group._sharded_state = type(group._sharded_state).SHARDED
    group._training_state = type(group._training_state).IDLE


def is_lazily_made(root: Any) -> bool:
    """Whether FSDP2 has made all that it makes in the first forward of ``root``, the state of an outermost module. It
    takes that for made once it has begun (``_is_root``). The hooks around ``state_dict()`` come last."""
    groups = [group for state in root._state_ctx.all_states for group in fsdp2_groups(state)]
    hooks = [(group._module_to_pre_save_state_dict_hook_handle, _modules_of(group)) for group in groups]
    loading = [group._module_to_pre_load_state_dict_hook_handle for group in groups]
    # The states are in the list one by one, too.
    found = {id(state) for state in root._state_ctx.all_states}
    every = all(id(state) in found for state in states_in(root._modules[0]))
    return every and all(map(len, loading)) and all(len(made) == len(of) for made, of in hooks)


def states_in(module: nn.Module) -> Iterator[Any]:
    """What ``fully_shard`` keeps of ``module`` and the modules in it."""
    return (cast(Any, one)._get_fsdp_state() for one in fsdp2_in(module))


def _modules_of(group: Any) -> set[nn.Module]:
    return {parameter._module_info.module for parameter in group.fsdp_params}


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


def noted_forwards(states: Iterable[Any]) -> list[tuple[Any, int]]:
    """Each of ``states`` with how many forwards its root has noted, from which backward knows what to gather ahead."""
    # The list is made in the first forward.
    return [(state, len(getattr(state._comm_ctx, "post_forward_order", ()))) for state in states]


def forget_forwards(noted: Iterable[tuple[Any, int]]) -> None:
    """Forget the forwards since then. FSDP2 notes those without gradients, too: a backward that comes to an end would
    gather ahead of them, and read the weights of its own last layer, which may have been stepped."""
    for state, count in noted:
        del state._comm_ctx.post_forward_order[count:]
        for group in fsdp2_groups(state):
            group._post_forward_indices[:] = [index for index in group._post_forward_indices if index < count]


def wait_for(owner: Any, streams: Iterable[str], device_handle: Any) -> None:
    """Have the device's current stream wait for the ``streams`` of ``owner``, before the memory they use is freed."""
    for name in streams:
        stream = getattr(owner, name, None)  # made in the first forward
        if stream is not None:
            device_handle.current_stream().wait_stream(stream)


def wait_for_work(work: Any) -> None:
    if isinstance(work, dist.Work):
        # Its peer may be gone, or may never have come. The loop is told of the error that led here, not of this one.
        with suppress(RuntimeError):
            work.wait()
