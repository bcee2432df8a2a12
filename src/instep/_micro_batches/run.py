"""``overlap.micro_batches``: one step's micro-batches, each forward on a thread of its own, and one backward of all."""

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from instep._micro_batches.graphs import Graphs
from instep._optim.guards import in_threads
from instep._optim.random_numbers import Generators
from instep._torch.engine import graph_task
from instep._torch.worker import Worker
from instep._wiring.build import Parts
from instep._wiring.hooks import ACTING_FOR, this_thread
from instep.errors import AccumulationError, InstepError
from instep.sources.ddp.instance import look_from
from instep.sources.fsdp.micro_batches import OneBackward

# The state of torch that each thread has for itself: that of the loop's thread, for the threads of its forwards.
#
# Entered modes and hooks for saved tensors have no public function that reads them, or enters them once more without
# calling their ``__enter__``. ``tests/parity/test_micro_batches.py`` fails clearly when torch changes those used here.


_saving = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""``None`` in torch 2.6, which tells nobody of the hooks: they do not see these forwards."""


class ThreadState:
    """That of the thread that makes this: grad mode, autocast, default device, current stream, number of threads; and
    what was entered there: modes of ``__torch_function__`` and ``__torch_dispatch__``, hooks for saved tensors.

    Args:
        device: of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = threading.get_ident()
        self._grad = torch.is_grad_enabled()
        self._threads = torch.get_num_threads()
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)
        }
        self._modes = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        self._saving = None if _saving is None else _saving(True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On another thread, once, and for the rest of its life."""
        if threading.get_ident() == self._thread:  # the interpreter is about to end: there are no threads any more
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(in_threads(self._threads))
            for kind, dtype in self._autocast.items():  # to leave it clears the copies that it has kept of weights
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            self._enter_the_rest()
            yield

    def _enter_the_rest(self) -> None:
        torch.set_grad_enabled(self._grad)
        if self._stream is not None:
            torch.accelerator.set_device_index(self._stream.device_index)
            torch.accelerator.set_stream(self._stream)
        if self._saving is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._saving)
        functions, operations = self._modes
        for mode in functions:
            torch._C._push_on_torch_function_stack(mode)
        for mode in operations:
            torch._C._push_on_torch_dispatch_stack(mode)


# A backward that does more than compute gradients: for several micro-batches at once it does so in another order.


class BackwardDoes:
    """Random numbers that are drawn, and buffers that are written, from now on. The plain loop does both after each
    micro-batch's forward, before the next one's.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        devices = {a.spec.device for a in parts.schedule.parameters} - {torch.device("cpu")}
        # The engine's own thread draws on an accelerator. On the CPU another thread of the loop's may have drawn.
        self._on_devices = [(device, _state_of(device)) for device in devices]
        self._generators = Generators(())
        model = parts.held.model()
        self._buffers = {} if model is None else {name: (b, b._version) for name, b in model.named_buffers()}

    def require_nothing(self) -> None:
        """Raise, and leave the step torn if it has written weights."""
        model = self._parts.held.model()
        now = {} if model is None else dict(model.named_buffers())
        written = next(
            (name for name, before in self._buffers.items() if not _is_as_before(now.get(name), *before)), None
        )
        if written is not None:
            found = f"backward has written the buffer {written!r} (batch normalization in a checkpointed segment?)"
        elif self._has_drawn():
            found = "backward has drawn random numbers"
        else:
            return
        self._parts.schedule.stop(
            AccumulationError(
                f"{found}: with one backward for all micro-batches it does so after all forwards, and the plain loop "
                "after each. This step is not the plain loop's. Use overlap.accumulate() in place of micro_batches()"
            )
        )

    def _has_drawn(self) -> bool:
        drew = any(_state_of(device) != before for device, before in self._on_devices)
        return drew or self._generators.drawn() == "yes"


def _is_as_before(buffer: torch.Tensor | None, before: torch.Tensor, version: int) -> bool:
    return buffer is before and before._version == version


def _state_of(device: torch.device) -> list[int]:
    state: list[int] = torch.get_device_module(device).get_rng_state(device).tolist()
    return state


# The forward of one micro-batch, on a thread of its own, and otherwise as on the loop's.


_AHEAD = 256
"""So many nodes are made on the first micro-batch's thread before its forward, and one less on each later one. So
backward comes to each node of the first before it comes to the same node of the second, and a sum never has to keep
more than itself. With more micro-batches than this the sums are right all the same, and keep some terms."""


class Forward:
    """One forward that has run.

    Attributes:
        loss: as ``loss_of`` returned it.
        first: how many nodes the thread had made before.
    """

    __slots__ = ("first", "loss")

    def __init__(self, loss: object, first: int) -> None:
        self.loss = loss
        self.first = first


def run_forward(number: int, compute: Callable[[], object], state: ThreadState, thread: int) -> Forward:
    """Call ``compute`` on a new thread, in the caller's context, and return when the thread has ended.

    Autograd counts the nodes of each thread from 0: that is what the thread is for. An exception in ``compute`` is
    raised here. Ctrl-C is raised once the forward has returned: no thread is left behind.

    Args:
        thread: the thread that the forward counts as one of.
    """
    found: list[Forward] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            _make_nodes(max(0, _AHEAD - number))
            ACTING_FOR.set(thread)
            with state.entered():
                first = torch.autograd._get_sequence_nr()
                found.append(Forward(compute(), first))
        except BaseException as error:  # raised on the loop's thread
            errors.append(error)

    worker = Worker()
    task = worker.run(lambda: context.run(run))
    try:
        task.wait()
    finally:
        worker.stop()
    _take_over(context)
    try:
        if errors:
            raise errors[0]
        return found[0]
    finally:
        errors.clear()  # the traceback refers to this frame


def _make_nodes(count: int) -> None:
    one = torch.zeros(1, requires_grad=True, device="cpu")
    for _ in range(count):
        one.view_as(one)


def _take_over(context: contextvars.Context) -> None:
    """The forward may have set context variables of the user's."""
    for variable, value in context.items():
        if variable is not ACTING_FOR and variable.get(context) is not value:
            variable.set(value)


# ``overlap.micro_batches``: one step's micro-batches, by one backward for all of them or by one for each.


Batch = TypeVar("Batch")


def micro_batches(
    parts: Parts,
    loss_of: Callable[[Batch], torch.Tensor] | None,
    batches: Iterable[Batch] | None,
    *,
    together: bool,
) -> list[torch.Tensor]:
    """The losses, detached.

    Args:
        loss_of, batches: ``None``: the caller has forgotten it.
        together: one backward for all; else one for each.
    """
    if loss_of is None or batches is None:
        missing = "loss_of" if loss_of is None else "batches"
        raise InstepError(
            f"micro_batches() was given no {missing}: it runs forward and backward of a step itself, and is no context "
            "manager. Call losses = overlap.micro_batches(lambda batch: loss_of(batch) / n, batches), and behind it "
            "optimizer.step(). For the micro-batches of a loop of your own: `with overlap.accumulate():`"
        )
    _require_own_step(parts)
    marked = _marked(batches, needs_last=bool(parts.held.wrapped) or parts.sharding is not None)
    if together:
        _require_whole(parts)
        return _together(parts, loss_of, marked)
    return _one_by_one(parts, loss_of, marked)


def _one_by_one(
    parts: Parts, loss_of: Callable[[Batch], torch.Tensor], batches: Iterable[tuple[Batch, bool]]
) -> list[torch.Tensor]:
    losses = []
    for number, (batch, is_last) in enumerate(batches):
        with _added(parts, is_last):
            loss = _checked(number, loss_of(batch))
            parts.schedule.backward(loss, None, parts.late.adopt)
        losses.append(loss.detach())
    return losses


def _together(
    parts: Parts, loss_of: Callable[[Batch], torch.Tensor], batches: Iterable[tuple[Batch, bool]]
) -> list[torch.Tensor]:
    state, thread = ThreadState(parts.schedule.parameters[0].spec.device), this_thread()
    fsdp2 = OneBackward(parts.held.model())
    losses: list[torch.Tensor] = []
    firsts: list[int] = []
    for number, (batch, is_last) in enumerate(batches):
        with _added(parts, is_last), fsdp2.forward():
            forward = run_forward(number, partial(loss_of, batch), state, thread)
        losses.append(_checked(number, forward.loss))
        firsts.append(forward.first)
    if len(losses) < 2:
        for loss in losses:
            parts.schedule.backward(loss, None, parts.late.adopt)
        return [loss.detach() for loss in losses]
    graphs = Graphs(losses, firsts, partial(_name_of, parts))
    for ddp in _ddps(parts):
        look_from(ddp, losses)
    fsdp2.join(len(losses), graphs.nodes(), graphs.edges())
    graphs.add_in_order(fsdp2.wide)
    _require_no_gradients(parts, graphs)
    del graphs  # the nodes are freed as backward comes to them
    if parts.sharding is not None:
        parts.sharding.reduces_once()
    unlike = BackwardDoes(parts)
    try:
        parts.schedule.backward(losses, None, parts.late.adopt)
    finally:
        fsdp2.restore()
    unlike.require_nothing()
    return [loss.detach() for loss in losses]


def _added(parts: Parts, is_last: bool) -> AbstractContextManager[None]:
    """Around a micro-batch whose gradients are not reduced over the ranks."""
    return nullcontext() if is_last else parts.accumulation.hold()


def _marked(batches: Iterable[Batch], *, needs_last: bool) -> Iterator[tuple[Batch, bool]]:
    """Each with whether it is the last. It is taken when the one before is done, as a loop takes it: to make a batch
    may draw random numbers."""
    if not needs_last:
        yield from ((batch, True) for batch in batches)
        return
    if not isinstance(batches, Sized):
        raise InstepError(
            f"micro_batches() of a model on several ranks must know which micro-batch is the last: give a list, not "
            f"{type(batches).__name__}"
        )
    count, came = len(batches), 0
    for batch in batches:
        came += 1
        yield batch, came >= count
    if came < count:
        raise InstepError(
            f"micro_batches() was given {count} batches by len(), and {came} came: no micro-batch was the last, whose "
            "gradients are reduced over the ranks. Give a list"
        )


def _checked(number: int, loss: object) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InstepError(
            f"loss_of(batch) must return one loss, a tensor of one number: micro-batch {number + 1} gave {found}"
        )
    if loss.grad_fn is None:
        raise InstepError(
            f"the loss of micro-batch {number + 1} has no graph: micro_batches() is called within torch.no_grad(), or "
            "loss_of(batch) detaches the loss"
        )
    return loss


def _require_own_step(parts: Parts) -> None:
    """Raise unless a step of its own can begin and end here."""
    if graph_task() is not None:
        raise InstepError("micro_batches() was called within a backward: call it where the loop would call backward()")
    if parts.accumulation.steps > 1:
        raise AccumulationError(
            f"micro_batches() runs all micro-batches of a step, and attach(accumulation_steps="
            f"{parts.accumulation.steps}) counts backwards: leave out accumulation_steps"
        )
    if parts.accumulation.is_held:
        raise AccumulationError(
            "micro_batches() was called within overlap.accumulate() or no_sync(): it runs all micro-batches of a step, "
            "and holds back all but the last by itself. Call it outside"
        )


def _require_whole(parts: Parts) -> None:
    """Raise where one backward of several forwards is not a sum of backwards."""
    if parts.sharding is not None and parts.sharding.in_fsdp1:
        raise AccumulationError(
            "micro_batches() with schedule='backward' does not run with FSDP1 (FullyShardedDataParallel), which frees "
            "a layer's weights after each micro-batch's backward: use fully_shard (FSDP2), overlap.accumulate(), or "
            "schedule='forward'"
        )
    for ddp in _ddps(parts):
        if ddp.static_graph:
            raise AccumulationError(
                "micro_batches() with schedule='backward' does not run with "
                "DistributedDataParallel(static_graph=True), which counts the forwards of a backward: leave out "
                "static_graph"
            )


def _require_no_gradients(parts: Parts, graphs: Graphs) -> None:
    """Raise if the plain loop would add to gradients from before: (a + b) + c is not a + (b + c)."""
    for leaf in graphs.contributions:
        if leaf.grad is not None and bool(leaf.grad.ne(0).any()):
            raise AccumulationError(
                f"{_name_of(parts, leaf)} has a gradient from an earlier backward: micro_batches() runs all "
                "micro-batches of a step. Call zero_grad() before it, or run the step with overlap.accumulate()"
            )


def _ddps(parts: Parts) -> list[DistributedDataParallel]:
    return [one for one in parts.held.living_wrappers() if isinstance(one, DistributedDataParallel)]


def _name_of(parts: Parts, leaf: torch.Tensor) -> str:
    model = parts.held.model()
    name = None if model is None else next((name for name, p in model.named_parameters() if p is leaf), None)
    return f"a tensor of shape {tuple(leaf.shape)}" if name is None else repr(name)
