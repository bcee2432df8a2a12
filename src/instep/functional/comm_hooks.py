"""DDP communication hooks that step what they have reduced, and the step of one parameter within backward.

A hook is a ``StepAfterReduction``, and starts the communication of each bucket. Where backward ends, before DDP's own
end, it waits for bucket after bucket and steps the parameters one by one. After DDP's own end it steps the parameters
that only other ranks used, drops the gradients, and raises what went wrong.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import GradBucket
from torch.utils.weak import WeakTensorKeyDictionary

from instep._optim.shadow import without_autocast
from instep._step.state import FirstError
from instep._step.streams import StepStreams
from instep._torch.engine import graph_task
from instep.comm_hooks import mean_allreduce
from instep.errors import AccumulationError, AttachError
from instep.sources.ddp.buckets import Reduction, Reductions, grad_as_left
from instep.sources.ddp.instance import Divisor, refuse_manual_finalization
from instep.sources.ddp.reducer import CommHook

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class OptimizerHookState:
    """The optimizer that ``hook_then_optimizer`` runs after a communication hook.

    Args:
        functional_optim: has a method ``step_param(param, grad)``, as the classes of
            ``torch.distributed.optim.functional_*`` do.
        params: the parameters it steps, ``None`` for all.

    Raises:
        AttachError: ``functional_optim`` has no ``step_param``; names its class. A ``ValueError``.

    Since 0.1.0.

    Example:
        ```python
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        class SGD:
            def step_param(self, param, grad):
                param.add_(grad, alpha=-0.1)

        only = list(ddp.module.layers[0].parameters())  # the other gradients stay in .grad
        state = instep.OptimizerHookState(SGD(), only)
        ddp.register_comm_hook(None, instep.hook_then_optimizer(allreduce_hook, state))
        ddp(batch).backward()
        ```
    """

    __slots__ = ("functional_optimizer", "params_to_optimize")

    def __init__(self, functional_optim: Any, params: Iterable[torch.Tensor] | None = None) -> None:
        if not callable(getattr(functional_optim, "step_param", None)):
            raise AttachError(
                "functional_optim must have a method step_param(param, grad), which hook_then_optimizer calls for each "
                f"parameter; {type(functional_optim)} has none. For a torch.optim.Optimizer use as_overlapped_optim or "
                "instep.attach"
            )
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)


def hook_then_optimizer(hook: Hook, optimizer_state: OptimizerHookState) -> Hook:
    """A communication hook that runs ``hook``, then ``step_param(param, grad)`` with the gradients in its future.

    Parameters are stepped where backward ends, bucket by bucket in the order of sending: while some are stepped the
    later ones are still on their way. A stepped parameter's ``.grad`` is ``None`` afterwards, so no ``zero_grad()`` is
    needed. A parameter that no rank used is not stepped; nor is any in ``no_sync``, whose gradients add up. If a
    communication or a step fails, ``backward()`` raises it, and neither that bucket nor any after it is written.

    ``hook`` may be any: torch's, one of its wrappers, PowerSGD, your own. Make one for each DDP instance, and register
    it with the state of ``hook``. The method is that of
    ``torch/distributed/algorithms/ddp_comm_hooks/optimizer_overlap_hooks.py``.

    Raises:
        AttachError: ``hook`` is no function, or ``optimizer_state`` no ``OptimizerHookState``.

    Since 0.1.0.

    Example:
        ```python
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        class SGD:
            def step_param(self, param, grad):
                param.add_(grad, alpha=-0.1)

        hook = instep.hook_then_optimizer(fp16_compress_hook, instep.OptimizerHookState(SGD()))
        ddp.register_comm_hook(None, hook)  # None: the state of fp16_compress_hook
        ddp(batch).backward()  # sends float16, and steps
        ```
    """
    if not callable(hook):
        raise AttachError(f"hook must be a function of (state, bucket), not {hook!r}")
    if not isinstance(optimizer_state, OptimizerHookState):
        raise AttachError(f"optimizer_state must be an OptimizerHookState, not {optimizer_state!r}")
    chosen, optimizer = optimizer_state.params_to_optimize, optimizer_state.functional_optimizer

    def step(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        with _as_a_step(parameter):
            optimizer.step_param(parameter, gradient)

    wanted = lambda parameter: chosen is None or parameter in chosen  # noqa: E731
    return StepAfterReduction("hook_then_optimizer", hook, wanted, step)


@dataclass
class OptimInBackwardHookState:
    """What torch's hook of the name ``apply_optim_in_backward_hook`` keeps, for code that names it. instep's hook keeps
    its stream itself.

    Attributes:
        optim_stream: the stream on which optimizers run on its device. ``None`` where there is no accelerator.
        wait_for_optim_stream_enqueued: whether the running backward will wait for that stream at its end.

    Since 0.1.0.

    Example:
        ```python
        # As torch makes it where there is no accelerator.
        state = instep.OptimInBackwardHookState(optim_stream=None, wait_for_optim_stream_enqueued=False)
        ```
    """

    optim_stream: torch.Stream | None
    wait_for_optim_stream_enqueued: bool


stepping_hooks: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The communication hooks that step in-backward optimizers. A DDP instance may have no other one beside these
optimizers."""


def apply_optim_in_backward_hook(gradient_is_bucket_view: bool, *, comm_hook: CommHook | None = None) -> Hook:
    """The hook that reduces as DDP does without one, and steps the in-backward optimizers of what it reduced.

    DDP instances with parameters of ``apply_optimizer_in_backward`` get it before their first forward. To compose
    it with a hook of your own, register it yourself: ``ddp.register_comm_hook(weakref.ref(ddp),
    apply_optim_in_backward_hook(ddp.gradient_as_bucket_view, comm_hook=(state, hook)))``. Parameters without
    in-backward optimizers are reduced and left alone. What is said of unused parameters, ``no_sync`` and failures in
    ``hook_then_optimizer`` holds here too. The divisor is the world size, or in
    ``join(divide_by_initial_world_size=False)`` the number of ranks still active.

    Args:
        gradient_is_bucket_view: DDP's option of that name. Gradients are handled alike, whatever it is.
        comm_hook: ``(state, hook)``, which reduces in place of DDP's mean.

    Raises:
        AttachError: an argument is something else.

    Since 0.1.0.

    Example:
        ```python
        import weakref

        instep.apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 1e-2})
        hook = instep.apply_optim_in_backward_hook(ddp.gradient_as_bucket_view, comm_hook=(state, powerSGD_hook))
        ddp.register_comm_hook(weakref.ref(ddp), hook)
        ddp(batch).backward()  # reduces by PowerSGD, and steps
        ```
    """
    if not isinstance(gradient_is_bucket_view, bool):
        raise AttachError(f"gradient_is_bucket_view must be True or False, not {gradient_is_bucket_view!r}")
    if comm_hook is not None and not (isinstance(comm_hook, tuple) and len(comm_hook) == 2 and callable(comm_hook[1])):
        raise AttachError(f"comm_hook must be a tuple (state, hook), not {comm_hook!r}")
    divisor = Divisor()

    def reduce(hook_state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp = hook_state() if isinstance(hook_state, weakref.ref) else None
        if ddp is None:
            raise AttachError(
                "the state of apply_optim_in_backward_hook must be a weakref to the DistributedDataParallel: "
                f"ddp.register_comm_hook(weakref.ref(ddp), …); it is {hook_state!r}"
            )
        refuse_manual_finalization(ddp)
        if comm_hook is None:
            return mean_allreduce(bucket.buffer(), ddp.process_group, divisor(ddp, bucket))
        return comm_hook[1](comm_hook[0], bucket)

    made = StepAfterReduction("apply_optim_in_backward_hook", reduce, has_in_backward_optimizers, step_with)
    stepping_hooks.add(made)
    return made


class NotCopied:
    """What is copied and pickled as ``None``: a copy of a DDP instance carries its hooks and their states, and does not
    register them."""

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class StepAfterReduction(NotCopied):
    """A communication hook that steps the parameters of DDP's buckets one by one, where backward ends, in the order in
    which buckets were sent.

    Unlike ``DDPSource`` this has no ``Sink``: every backward is a step, of parameters that need not be attached, and is
    not taken back. Gradients are dropped after it, since no loop calls ``zero_grad()``.

    Args:
        name: of the hook, which DDP logs.
        reduce: the hook that reduces.
        wanted: whether to step a parameter. The gradients of others are left alone.
        step: steps one parameter: ``step(parameter, gradient)``.
        streams: has the stream that parameters are stepped on.
        settled: is called once nothing of a backward is left to do, also where the backward has raised.
    """

    def __init__(
        self,
        name: str,
        reduce: Hook,
        wanted: Callable[[torch.Tensor], bool],
        step: Callable[[torch.Tensor, torch.Tensor], None],
        streams: StepStreams | None = None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self._reduce = reduce
        self._wanted = wanted
        self._step_one = step
        self._streams = streams or StepStreams()
        self._settled = settled
        self._failure = FirstError()
        self._reductions = Reductions(self._step, self._settle, self._raised)

    def __call__(self, hook_state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = self._reduce(hook_state, bucket)
        self._reductions.launched(bucket, Reduction(bucket, future))
        return future

    def _step(self, reductions: Sequence[Reduction]) -> None:
        """Backward's own work is done, and DDP's own end is next. An error raised here would leave the DDP instance
        unusable, so it is kept for ``_settle``."""
        self._failure.error = None
        try:
            for reduction in reductions:
                with self._streams.on(reduction.members[0].device):
                    # Where none is wanted, too: if it fails, none after it is stepped.
                    self._step_all(zip(reduction.parameters, reduction.gradients(), strict=True))
        except BaseException as error:
            self._failure.keep(error)
        # DDP's own end of backward is next, on the loop's stream. It copies from the buckets, which an update on the
        # side stream may have written, and makes tensors in memory that an update has given back.
        self._streams.join()

    def _settle(self, reductions: Sequence[Reduction]) -> None:
        """DDP's own end has been, and has set the gradients of parameters that only other ranks used: step these, drop
        all gradients, and raise what went wrong."""
        try:
            for reduction in reductions if self._failure.error is None else ():
                late = [(p, p.grad) for p in reduction.unused if p.grad is not None]
                if late:
                    with self._streams.on(late[0][0].device):
                        self._step_all(late)
        finally:
            self._drop(reductions)
        self._failure.raise_if_any()

    def _drop(self, reductions: Sequence[Reduction]) -> None:
        """Drop the gradients, also after a step or a backward that failed: the next backward would add to them."""
        for reduction in reductions:
            for parameter in filter(self._wanted, (*reduction.parameters, *reduction.unused)):
                parameter.grad = None
        self._streams.join()
        self._settled()

    def _raised(self, reductions: Sequence[Reduction]) -> None:
        """Backward has raised, so DDP's own end does not come."""
        self._drop(reductions)
        self._streams.finish()

    def _step_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for parameter, gradient in pairs:
            if self._wanted(parameter):
                self._step_one(parameter, gradient)


OPTIMIZERS = "_in_backward_optimizers"
"""The attribute of a parameter that torch's DDP and FSDP1 look for: a list of its optimizers, in the order in which
they run."""


def has_in_backward_optimizers(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` was given to ``apply_optimizer_in_backward``."""
    return hasattr(parameter, OPTIMIZERS)


def step_with(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Run the parameter's own optimizers on ``gradient``, and leave ``.grad`` as it was: DDP's own end of backward may
    be still to come."""
    with grad_as_left([parameter]):
        parameter.grad = gradient
        step_in_backward(parameter)


_last_backward: Any = WeakTensorKeyDictionary()
"""By parameter: the number of the backward that has stepped it last, as the engine counts them."""


def step_in_backward(parameter: torch.Tensor) -> None:
    """Run the parameter's own optimizers on its ``.grad``, in order.

    Raises:
        AccumulationError: the same backward has stepped the parameter already.
    """
    task = graph_task()
    if task is not None and _last_backward.get(parameter) == task:
        raise AccumulationError(
            f"a parameter of shape {tuple(parameter.shape)} got two gradients in one backward, and was stepped with "
            "the first: two DistributedDataParallel instances reduce it. Call backward() for each of them"
        )
    _last_backward[parameter] = task
    with _as_a_step(parameter):
        # A copy: a step hook may register another optimizer.
        for optimizer in tuple(getattr(parameter, OPTIMIZERS, ())):
            optimizer.step()


@contextmanager
def _as_a_step(parameter: torch.Tensor) -> Iterator[None]:
    """Around a step in backward, which must run as ``optimizer.step()`` runs after backward: without autograd, and
    outside of an autocast block that may be around ``backward()``."""
    with torch.no_grad(), without_autocast(parameter.device.type):
        yield
    # Fused kernels do not count their write. A node that is still to run may have saved the weight, and autograd would
    # not notice that the weight has changed.
    torch.autograd.graph.increment_version((parameter,))
