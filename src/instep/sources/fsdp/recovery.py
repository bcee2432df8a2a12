"""FSDP's own state after an exception: brought back to what it is between two iterations, or said to be broken.

FSDP, 1 and 2, notes on its modules how far a forward or backward has come: which weights are gathered, which gradients
are not reduced yet, which communication is in flight, and that the end of this backward is asked for. An exception
leaves these notes as they are, and the next iteration takes them for its own: after a failed backward FSDP2 raises
nothing, and trains nothing. Since torch 2.13 or so FSDP2 has ``reset_iter_state()`` for this, to be called by the loop;
gradients are kept or dropped beside it here. Before that, and in FSDP1, the next forward says that the model must be
built anew.

``AfterErrors`` notices that a forward or a backward was left. All that is done here is local: peers may not have
failed. ``tests/distributed/test_fsdp_errors.py`` compares all state that FSDP2 has, and names each difference.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from instep._torch.engine import graph_task
from instep._torch.hooks import Around, GuardedCall
from instep._torch.interrupts import heard, held
from instep.errors import InstepError
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
        # The running call of the outermost module with FSDP inside; whether it was left by an exception, and FSDP's
        # state is to be rebuilt; and, where it makes no graph, FSDP2's notes of the forwards before it.
        self._running: object | None = None
        self._has_failed = False
        self._noted: Sequence[tuple[Any, int]] = ()
        self._is_broken = False

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
        for module in dict.fromkeys([model, *sharded]):
            yield GuardedCall(module, self._called)

    def _called(self, module: nn.Module) -> Around | None:
        # Inside a backward this is a checkpointed segment run again.
        if graph_task() is not None:
            return None
        call = object()
        return Around(partial(self._begin, call, module), partial(self._end, call), partial(self._failed, call))

    def _begin(self, call: object, module: nn.Module) -> None:
        if is_fsdp2(module) and _state_of(module)._is_root is None:
            # FSDP2 makes much in the first forward, and takes it for made once it has begun: Ctrl-C waits.
            with held(heard()):
                _state_of(module)._lazy_init()
        if self._running is not None and not self._has_failed:
            return  # a part of the forward that runs
        self._drain_failed()
        sharded = [m for ref in self._sharded if (m := ref()) is not None]
        if any(map(_is_in_backward, sharded)):
            self._rebuild(gradients=True)  # a backward was left, and nobody has told of it
        elif self._running is not None:
            self._rebuild(gradients=False)  # a forward was left, and its rebuilding has raised
        if self._is_broken:
            raise InstepError(
                "an exception has left FSDP in the middle of a forward or backward, and this version of it cannot go "
                "on: build and attach the model anew, and load a checkpoint. With torch 2.13 or newer, fully_shard "
                "(FSDP2) goes on after an exception"
            )
        states = () if torch.is_grad_enabled() else map(_state_of, filter(is_fsdp2, sharded))
        self._noted, self._has_failed, self._running = noted_forwards(states), False, call

    def _end(self, call: object) -> None:
        if self._running is call:
            forget_forwards(self._noted)
            self._running = None

    def _failed(self, call: object) -> None:
        if self._running is call:
            self._has_failed = True
            self._rebuild(gradients=False)

    def backward_failed(self) -> None:
        self._rebuild(gradients=True)

    def _rebuild(self, *, gradients: bool) -> None:
        model = self._model()
        if model is not None:
            self._is_broken |= any(m.training_state.name != "IDLE" or _is_in_backward(m) for m in fsdp1_in(model))
            self._is_broken |= not rebuild_fsdp2(model, gradients=gradients)
        self._running = None  # last: what raises here is done again before the next forward


def _is_in_backward(module: Any) -> bool:
    """Whether FSDP takes a backward to be running: FSDP has asked the engine for the backward's end, and that end has
    not come."""
    if is_fsdp2(module):
        return bool(module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)
    return bool(getattr(module, "_post_backward_callback_queued", False))  # of an FSDP1 root, after its first forward


def rebuild_fsdp2(model: nn.Module, *, gradients: bool) -> bool:
    """Make every parameter that ``fully_shard`` was applied to the sharded one again, with nothing in flight.

    Args:
        gradients: also drop gradients that are not reduced yet, of this backward and of the micro-batches before it:
            some groups have added to them, others have not, and ``zero_grad()`` does not reach them. Reduced gradients
            stay until ``zero_grad()``, as in any loop.

    Returns:
        Whether this torch can, where there is anything to do.
    """
    contexts = dict.fromkeys(_state_of(module)._state_ctx for module in fsdp2_in(model))
    for context in contexts:  # one for all states of a root, which may be above ``model``
        root = next((state._modules[0] for state in context.all_states if state._is_root), None)
        if root is None:
            continue  # no forward has begun
        if not hasattr(root, "reset_iter_state"):
            if context.iter_forward_root is not None or context.post_backward_final_callback_queued:
                return False
            continue
        groups = [group for state in context.all_states for group in fsdp2_groups(state)]
        with ExitStack() as stack:
            # FSDP2's own reset drops all gradients (of torch 2.13: some).
            for group in groups:
                stack.enter_context(_gradients_kept(group, unreduced=not gradients))
            try:
                root.reset_iter_state()
            except RuntimeError:  # of weights gathered ahead, from a peer that is gone or did not come
                for group in groups:
                    _drop_gathered(group)
                root.reset_iter_state()
    return True


def _state_of(module: nn.Module) -> Any:
    """What ``fully_shard`` keeps of ``module``."""
    return cast(Any, module)._get_fsdp_state()


def _drop_gathered(group: Any) -> None:
    """Drop weights that were gathered ahead, and not used."""
    if group._all_gather_result is not None:
        work = group._all_gather_result.all_gather_work
        if isinstance(work, dist.Work):
            # Its peer may be gone, or may never have come. The loop is told of the error that led here, not of this
            # one.
            with suppress(RuntimeError):
                work.wait()
        group._all_gather_result = None


# HSDP's sums among the shards that are not summed among the replicas yet, and where in them each parameter's lie.
_LAYOUT = "_partial_reduce_output_layout"
_PARTIAL = ("_partial_reduce_output", _LAYOUT)


@contextmanager
def _gradients_kept(group: Any, *, unreduced: bool) -> Iterator[None]:
    """Around FSDP2's own reset: the gradients of a group are put back after it.

    Args:
        unreduced: whether to keep those that are not reduced yet: of micro-batches and, in HSDP, among the replicas.
            If not, they are dropped.
    """
    gathered = [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]  # of a first forward
    if not unreduced:
        for parameter in gathered:
            parameter.grad = None
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # until torch 2.13 or so: in reduce_dtype
                parameter.unsharded_accumulated_grad = None
    gradients = [(p, p.grad) for p in (*(p.sharded_param for p in group.fsdp_params), *gathered)]
    partial_sums = {name: getattr(group, name) for name in _PARTIAL if unreduced and hasattr(group, name)}
    if _LAYOUT in partial_sums:
        partial_sums[_LAYOUT] = dict(partial_sums[_LAYOUT])  # a copy: FSDP2 empties its own
    yield
    for parameter, gradient in gradients:
        parameter.grad = gradient
    for name, value in partial_sums.items():
        setattr(group, name, value)
    for parameter in group.fsdp_params:
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
