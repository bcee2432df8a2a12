"""Autograd's engine: the running backward, and the order in which everything that waits for its end is called."""

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import skip_code
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import profiler
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._device import DeviceContext

from instep._torch.interrupts import heard, held

# What torch.compile sees of instep: it traces the hooks of modules and optimizers, and where a compiled function calls
# ``backward()``, each function that autograd calls.


Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """``function``, run as it is inside of what was compiled, with all that it calls.

    Not for the forward hooks of modules: a model could not be compiled as one graph with them.
    """

    def call(*args: Any) -> Any:
        return function(*args) if traced_by() is None else call_apart(function, *args)

    return not_traced(wraps(function)(call))  # type: ignore[return-value]


# ``torch.compiler.disable`` alone takes as long as the rest of a hook that has little to do. So torch's wrapper is only
# called where something that was compiled calls the hook; torch.compile is not to see the frame that decides it. The
# two names of torch's are private (tests/unit/test_untraced.py).


def not_traced(function: Function) -> Function:
    """``function``, whose own frame torch.compile leaves alone. What it calls is for itself to ``call_apart``."""
    skip_code(function.__code__)
    # The marks by which torch.compile knows what it is not to trace.
    vars(function).update((name, mark) for name, mark in vars(call_apart).items() if name.startswith("_torchdynamo"))
    return function


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_disable: Any = torch.compiler.disable  # which has no types
call_apart: Callable[..., Any] = _disable(_call)
traced_by: Callable[[], object] = get_eval_frame_callback
"""``None``: nothing that was compiled calls this."""


class Traced:
    """A hook that says whether torch.compile has traced it, and with it the ``step()`` that it was registered for.

    It does nothing else and uses none of its arguments: torch.compile makes few versions of one function, and gives up.
    """

    __slots__ = ("yes",)

    def __init__(self) -> None:
        self.yes = False  # set by the compiled code, each time

    def __call__(self, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.yes = True


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded: all that is launched for a step is to be in it, on the loop's stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def default_device() -> torch.device | None:
    """The device of a tensor that this thread makes without naming one; ``None``: torch's own, the CPU.

    Not in a hook of backward: torch takes its mode off the stack while ``Tensor.backward()`` runs, and an accelerator's
    thread of the engine has never had one. ``torch.get_default_device()`` does not see a block of ``torch.device`` in
    torch 2.6; the names of the stack are private.
    """
    if not torch._C._len_torch_function_stack():  # as mostly, and asked before each bucket
        return None
    modes = _get_current_function_mode_stack()
    return next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)


def set_default_device() -> torch.device | None:
    """What ``torch.set_default_device`` was told, also in a hook of backward; no block of ``torch.device``. It is a
    private variable, of all threads."""
    return _device.CURRENT_DEVICE


def as_default_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """Make ``device``, as ``default_device`` has told it, this thread's."""
    now = default_device()
    if now == device:
        return AS_IT_IS
    # torch's own way also writes a variable that all threads share.
    return _on_stack(DeviceContext(device)) if now is None else device or torch.device("cpu")


AS_IT_IS: AbstractContextManager[None] = nullcontext()


@contextmanager
def _on_stack(mode: Any) -> Iterator[None]:
    TorchFunctionMode.__enter__(mode)
    try:
        yield
    finally:
        TorchFunctionMode.__exit__(mode, None, None, None)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make ``stream`` current on its device, and its device, which may not be the loop's."""
    before = torch.accelerator.current_stream(stream.device)
    index = torch.accelerator.current_device_index()
    try:
        torch.accelerator.set_stream(stream)
        yield
    finally:
        torch.accelerator.set_stream(before)
        if index != before.device.index:
            torch.accelerator.set_device_index(index)


class Compiles(Protocol):
    """Something that must know before torch.compile traces a function."""

    def before_compile(self) -> None:
        """torch.compile is about to trace a function, whose arguments it has, and has not looked at yet."""


_listening: "weakref.WeakSet[Compiles]" = weakref.WeakSet()


def listen(to: Compiles) -> None:
    """Have ``to`` told before torch.compile traces a function. Held weakly."""
    _listening.add(to)
    # ``torch._dynamo.on_compile_start`` registers for good; ``torch._dynamo.reset()`` may let go of it.
    if told_of_compiling not in WHO_IS_TOLD:
        callback_handler.register_start_callback(told_of_compiling)


WHO_IS_TOLD: list[Any] = callback_handler.start_callbacks
"""Whom torch.compile tells before it compiles something. ``torch._dynamo.reset()`` empties it."""


@untraced
def told_of_compiling(*_: object) -> None:
    # Untraced: a backward within a compiled function is compiled in there, and torch would trace this, and wait for its
    # own lock.
    for listener in list(_listening):
        listener.before_compile()


# The six things instep asks of the autograd engine that have no public name.
#
# torch's own code (DDP, FSDP, ``register_multi_grad_hook``) uses three; the fourth is the name of the engine's threads,
# the fifth says whether it runs what torch has compiled, and the sixth is the function that all its runs go through.
# ``tests/unit/test_engine.py``, for the names ``tests/accelerator/test_host.py``, fail clearly when torch changes them.


_NO_GRAPH_TASK = -1


graph_task_number: Callable[[], int] = torch._C._current_graph_task_id
"""The ``graph_task``, without a function of Python's; outside of a backward a number that none has."""


def graph_task() -> int | None:
    """The number of the backward this thread is running, ``None`` outside of one. Never used twice."""
    task = graph_task_number()
    return None if task == _NO_GRAPH_TASK else task


def is_of_backward(native_id: int) -> bool:
    """Whether this thread is the engine's own, which runs an accelerator's backwards. False where nobody tells."""
    try:
        name = Path(f"/proc/self/task/{native_id}/comm").read_text()
    except OSError:  # not Linux, or the thread has ended
        return False
    return name.startswith("pt_autograd")


def runs(node: Node) -> bool:
    """Whether the running backward comes to ``node``. Backwards that are nested in it (reentrant checkpointing) are
    others. False for a parameter that ``autograd.grad`` was asked about, which gets no ``.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # of a leaf that autograd.grad was asked about
        return False


_expected: dict[int, int] = {}
"""By ``id`` of each ``EndOfBackward`` that is still to be called or dropped: the number of its backward."""

_LET_GO_SECONDS = 10.0
"""How long a backward is waited for that another thread of the loop's may be running: a mistake, told of later."""


class _FailureCallbacks:
    """The ``failed`` callbacks of one backward that raised, which must run on the loop's thread: the engine's own
    must not touch ``.grad``."""

    __slots__ = ("__weakref__", "failed")

    def __init__(self) -> None:
        self.failed: list[Callable[[], None]] = []

    def run(self) -> None:
        while self.failed:
            failed = self.failed.pop(0)  # before: what is done may come to drain_failed() again
            with held(heard()):
                failed()


_failure_callbacks: "weakref.WeakValueDictionary[int, _FailureCallbacks]" = weakref.WeakValueDictionary()
"""By number of each backward that a ``Backwards`` has seen to begin on an accelerator."""
_making_ends = threading.Lock()


class Backwards:
    """The backwards of one attachment that were seen to begin, at an output of the model.

    One may run inside another (reentrant checkpointing), and the outputs of both are met in any order: each is known by
    the number of its graph task.

    On an accelerator each device has a thread of the engine's, which may let go of a backward that raised only when
    the exception has reached the loop. The loop may be clearing gradients by then, and torch does not bear two threads
    at one ``.grad``: what is left to be done waits for ``drain_failed``.

    Attributes:
        running: the graph task of the one that was seen to begin last; ``None``: it is over.
        threads: of the loop: those of its forward and its backward. Empty on an accelerator, where the engine's threads
            run backward, and before one was seen.
    """

    def __init__(self) -> None:
        self.running: int | None = None
        self.threads: frozenset[int] = frozenset()
        self._of_step: set[int | None] = set()  # tasks that have given gradients to the running step
        self._tasks: dict[int, _FailureCallbacks] = {}

    def is_new(self) -> bool:
        """An output of the model is about to get its gradient. Whether that is the first one in the running backward,
        and the backward is none that has been in this step before."""
        task = torch._C._current_graph_task_id()  # as ``graph_task``, which is asked for less often
        if task == self.running:
            return False
        self.running = task
        return task not in self._of_step

    def is_loops(self) -> bool:
        """Whether this thread is the loop's, or runs its backward, as far as that is known."""
        return not self.threads or threading.get_ident() in self.threads or graph_task() is not None

    def begins_step(self) -> None:
        """The running backward is the first of its step."""
        self._of_step = {self.running}

    def gives_gradients(self, device: torch.device) -> None:
        """The running backward, also one that nobody has seen to begin, has given the step gradients on ``device``."""
        self._of_step.add(torch._C._current_graph_task_id())  # as ``graph_task``, which is asked for less often
        if device.type != "cpu":
            self.begin(device)

    def begin(self, device: torch.device, thread: int | None = None) -> None:
        """The running backward has come to something on ``device``: to an output of a forward that was on ``thread``,
        or to a gradient."""
        if device.type == "cpu" and thread is not None:
            self.threads = frozenset((thread, threading.get_ident()))
        if device.type != "cpu" and (task := graph_task()) is not None:  # on the CPU the engine's thread is the loop's
            with _making_ends:
                self._tasks[task] = _failure_callbacks.setdefault(task, _FailureCallbacks())

    def drain_failed(self) -> None:
        """Wait until the engine has let go of every backward that raised (10 s at most), and run here the ``failed``
        callbacks that its own thread must not run. At once, where a backward is running."""
        if not self._tasks or graph_task() is not None:
            return
        last = time.monotonic() + _LET_GO_SECONDS
        while not self._tasks.keys().isdisjoint(_expected.copy().values()) and time.monotonic() < last:
            time.sleep(0.0001)
        for unsaid in list(self._tasks.values()):
            unsaid.run()
        self._tasks.clear()


class EndOfBackward:
    """One end of the running backward: called once the backward has ended, dropped without a call when the backward
    raises.

    Whatever keeps it must be freed by the engine together with the backward. On CPU the engine frees a failed
    backward's callbacks before the exception reaches Python, so ``failed`` has run by the time the user's ``except``
    clause does. On an accelerator ``Backwards.drain_failed`` waits for that, and calls it where the engine's own
    thread was the last to have the callbacks.
    """

    __slots__ = ("__weakref__", "_end", "_failed", "thread")

    def __init__(self, end: Callable[[], None], failed: Callable[[], None]) -> None:
        self._end = end
        self.thread = threading.get_ident()
        _expected[id(self)] = torch._C._current_graph_task_id()
        self._failed: Callable[[], None] | None = failed
        _ends.add(self)

    def run(self) -> None:
        """An end that raises has noted what it was to note. Ctrl-C may have come before it could: ``failed`` is called,
        too, when this is dropped."""
        try:
            self._end()
        except Exception:
            self._failed = None
            _expected.pop(id(self), None)
            raise
        self._failed = None
        _expected.pop(id(self), None)

    @untraced
    def __call__(self) -> None:
        self.run()

    @not_traced
    def __del__(self) -> None:
        # Ctrl-C is lost in here, as in any ``__del__``; it may have come while this was made.
        if getattr(self, "_failed", None) is not None:
            call_apart(self.drop)

    def drop(self) -> None:
        """The backward has raised."""
        failed, self._failed = getattr(self, "_failed", None), None  # Ctrl-C may have come while this was made
        if failed is None:
            return
        with held(heard()):
            unsaid = _failure_callbacks.get(_expected.get(id(self), _NO_GRAPH_TASK))
            if unsaid is not None and is_of_backward(threading.get_native_id()):
                unsaid.failed.append(failed)
            else:
                failed()
            _expected.pop(id(self), None)

    @property
    def is_on_cpu(self) -> bool:
        """Whether no thread of the engine's has to do with it."""
        return _expected.get(id(self), _NO_GRAPH_TASK) not in _failure_callbacks


_ends: "weakref.WeakSet[EndOfBackward]" = weakref.WeakSet()


def _drop_ends() -> None:
    """A backward of this thread has raised. Its ends were dropped with it, but for those that the traceback keeps:
    Ctrl-C may have come in one. Whoever keeps the exception would have a later backward told of this one."""
    me = threading.get_ident()
    for end in list(_ends):
        if end.thread == me and end.is_on_cpu:
            end.drop()


def is_compiled() -> bool:
    """Whether the running backward is one that torch has compiled (compiled autograd). torch has no public name for
    that: ``torch.compiler.is_compiling`` is of a function that is traced."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


call_at_end: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Has the engine call a function after the running backward's last node, on the thread that called ``backward()``:
behind those that are in its queue by then.

An exception in it surfaces from ``backward()`` with its own type. The engine frees all of them with the backward,
called or not.
"""


# What leaves the engine with an error, also where no hook was called: a graph that has saved a weight that was written
# since raises at its first node.


@dataclass(frozen=True, eq=False)
class Run:
    """A run of the engine that Python has asked for. It is there for as long as the engine runs.

    Attributes:
        call: what the user has called: ``"backward()"`` or ``"torch.autograd.grad()"``.
        accumulates: whether it accumulates gradients in ``.grad``.
        inputs: the only tensors that it computes the gradients of; empty: all leaves.
        creates_graph: whether the gradients have a graph of their own.
    """

    call: str
    accumulates: bool
    inputs: Sequence[Any]
    creates_graph: bool
    _outputs: Sequence[Any]

    @staticmethod
    def of(outputs: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Run":
        """Given what the engine is called with."""
        accumulates = bool(kwargs.get("accumulate_grad"))
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        call = "backward()" if accumulates else "torch.autograd.grad()"
        creates_graph = bool(args[2] if len(args) > 2 else kwargs.get("create_graph"))
        return Run(call, accumulates, tuple(inputs or ()), creates_graph, outputs)

    @property
    def nodes(self) -> list[Any]:
        """Where it begins. An output is a tensor, or an edge of the graph (``GradientEdge``)."""
        nodes = (getattr(output, "node", None) or getattr(output, "grad_fn", None) for output in self._outputs)
        return [node for node in nodes if node is not None]

    @cached_property
    def input_ids(self) -> frozenset[int]:
        return frozenset(map(id, self.inputs))

    @cached_property
    def reached(self) -> "Counter[Any]":
        """How often each node of its graph is reached, by edges and as a beginning. Nothing, if a part of the graph is
        still to be made: a segment that is checkpointed with ``use_reentrant=True`` hides its own."""
        found = Counter[Any](self.nodes)
        for node in _nodes_from(list(found)):
            if node.name().startswith(HIDES_ITS_OWN):
                return Counter()
            found.update(following for following, _ in node.next_functions if following is not None)
        return found

    @property
    def is_traced(self) -> bool:
        """Whether it is torch.compile's own: over stand-ins for tensors."""
        return any(isinstance(output, (FakeTensor, FunctionalTensor)) for output in self._outputs)

    def comes_to(self, leaves: Iterable[torch.Tensor]) -> bool:
        """Whether one of ``leaves`` is in its graph. A segment that is checkpointed with ``use_reentrant=True`` hides
        its own: there may be some."""
        known = {id(leaf) for leaf in leaves}
        if not known.isdisjoint(map(id, self._outputs)):
            return True
        return leads_to(self.nodes, known, hidden=True)


def has_reentrant(outputs: Iterable[torch.Tensor]) -> bool:
    """Whether a segment of the graph from ``outputs`` on is checkpointed with ``use_reentrant=True``."""
    return leads_to([node for output in outputs if (node := output.grad_fn) is not None], (), hidden=True)


def compiled_in(outputs: Iterable[torch.Tensor]) -> set[type]:
    """The classes of the nodes that run compiled code, in the graph from ``outputs`` on. torch makes one for each piece
    of code."""
    nodes = _nodes_from(node for output in outputs if (node := output.grad_fn) is not None)
    return {type(node) for node in nodes if node.name() == COMPILED}


COMPILED = "CompiledFunctionBackward"  # torch/_functorch/_aot_autograd/runtime_wrappers.py


HIDES_ITS_OWN = "CheckpointFunction"
"""How the name of a segment that is checkpointed with ``use_reentrant=True`` begins: its graph is made in backward."""


def leads_to(nodes: Iterable[Any], leaves: Collection[int], *, hidden: bool = False) -> bool:
    """Whether the graph from ``nodes`` on comes to one of ``leaves``, given by ``id``; with ``hidden`` also: to a
    segment that is checkpointed with ``use_reentrant=True``, which hides its own."""
    return any(
        id(getattr(node, "variable", None)) in leaves or (hidden and node.name().startswith(HIDES_ITS_OWN))
        for node in _nodes_from(nodes)
    )


def _nodes_from(nodes: Iterable[Any]) -> Iterator[Any]:
    seen = set(nodes)
    due = list(seen)
    while due:
        node = due.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        due.extend(new)


class HearsErrors(Protocol):
    """Something that must know of every backward that raises."""

    def run_raised(self, run: Run, error: BaseException) -> BaseException | None:
        """The outermost ``run`` of the engine on this thread has raised ``error``. Returns what is to be raised in its
        place; ``None``: the same."""


_RUN = "_engine_run_backward"
"""What ``torch.autograd.backward`` and ``torch.autograd.grad`` call in the module that they are in."""


class RunErrors:
    """Tells ``listener`` of every run of the engine that raises, until it is removed. Held weakly."""

    def __init__(self, listener: HearsErrors) -> None:
        self._listener = weakref.ref(listener, _tell_no_more)
        _told.append(self._listener)
        _hear_runs()

    def remove(self) -> None:
        _tell_no_more(self._listener)


class BeforeRuns:
    """Calls ``do`` before every run of the engine that Python asks for, between ``start`` and ``stop``: also before one
    that comes to no output of the model, and adds to gradients."""

    def __init__(self, do: Callable[[Run], None]) -> None:
        self.do = do

    def start(self) -> None:
        if self not in _before:
            _before.append(self)
            _hear_runs()

    def stop(self) -> None:
        if self in _before:
            _before.remove(self)
            _hear_no_more()


_told: "list[weakref.ref[HearsErrors]]" = []
_before: list[BeforeRuns] = []
_engine_run: Callable[..., Any] = getattr(torch.autograd, _RUN)


def _tell_no_more(ref: "weakref.ref[HearsErrors]") -> None:
    if _told is None or torch is None or torch.autograd is None:  # the interpreter ends, and has taken names
        return
    _told[:] = [other for other in _told if other is not ref]
    _hear_no_more()


def _hear_runs() -> None:
    global _engine_run
    current = getattr(torch.autograd, _RUN)
    if current is not _run:
        _engine_run = current
        setattr(torch.autograd, _RUN, _run)


def _hear_no_more() -> None:
    # Where somebody else's stands before this one, it stays.
    if not _told and not _before and getattr(torch.autograd, _RUN) is _run:
        setattr(torch.autograd, _RUN, _engine_run)


_count = 0


def count_of_runs() -> int:
    """How often the engine was called while anybody was told of its errors."""
    return _count


def _run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    global _count
    _count += 1
    if _before:
        run = Run.of(outputs, args, kwargs)  # in a variable of its own: it lives until this returns
        for before in [*_before]:
            before.do(run)
    try:
        return _engine_run(outputs, *args, **kwargs)
    except BaseException as error:
        instead = None
        if graph_task() is None:
            _drop_ends()
            instead = _tell_of_error(error, outputs, args, kwargs)
        try:
            if instead is not None:
                raise instead from error
            raise
        finally:
            del instead  # or it would refer to itself, by way of this frame


@untraced
def _tell_of_error(
    error: BaseException, outputs: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> BaseException | None:
    run = Run.of(outputs, args, kwargs)
    replacements = [listener.run_raised(run, error) for ref in list(_told) if (listener := ref()) is not None]
    return next((instead for instead in replacements if instead is not None), None)


def is_of_written(error: BaseException) -> bool:
    """Whether autograd has found that a tensor which a graph has saved was written since: it has no class of error."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


class Phase(IntEnum):
    """When an end is called, after the backward's last node. Ends of one phase are called in the order of asking."""

    BEFORE_DDP = 0
    """Before DDP's own end, if it is asked for at or before DDP's last bucket: DDP asks for its end right after that.
    torch's ends that were asked for earlier, such as FSDP2's, have run. ``.grad`` must stay as DDP's hooks have left
    it, and under DDP nothing may be raised."""
    AFTER_DDP = 1
    """The ends of DDP and FSDP have run: ``.grad`` is theirs no more, and errors may be raised."""
    SETTLED = 2
    """Every source has handed over its gradients and raised its errors: the books of this backward are closed, and an
    optimizer that steps itself does so."""
    LAST = 3
    """Nothing of instep's is left to run in this backward: recorders note when it ended."""


class _Turn(Enum):
    """What the engine will do next about the phases of a backward."""

    NONE = auto()
    """All that was asked for has been called."""
    IDLE = auto()
    """A turn is in the engine's queue, and will call nothing."""
    DUE = auto()
    """A turn is in the engine's queue, and will call the ends of the earliest phase that has any."""
    RUNNING = auto()


class Backward:
    """One run of the engine, from when ``current`` was first asked for it. A backward that reentrant checkpointing
    nests in another has an object of its own.

    The engine has a queue of callbacks, which it calls in order, and to which a callback may add. ``BEFORE_DDP`` goes
    straight into it. Later phases must come after DDP's end, which DDP asks for while gradients arrive, or
    (``static_graph``) in a callback: maybe later than ``at`` is called. So each ``at`` makes the turn that is in the
    queue already do nothing but queue another one, behind everything that is there; and that one calls the ends of the
    earliest phase.

    It may be kept: the ends are the engine's alone (``_Ends``).
    """

    __slots__ = ("_ends", "_turn")

    def __init__(self, task: int) -> None:
        ends = _Ends(self, task)
        # Its referent is there while this backward runs, since the engine keeps it. Never in a variable: the traceback
        # of an exception would keep it, and with it the ends from being dropped.
        self._ends: Callable[[], Any] = weakref.ref(ends)
        self._turn = _Turn.IDLE
        call_at_end(ends)

    def at(self, phase: Phase, end: Callable[[], None], failed: Callable[[], None] = lambda: None) -> None:
        """Call ``end`` in ``phase`` of this backward, or ``failed`` if the backward, or an end before this one, raises.

        To be called while the backward runs, or by one of its ends: one that an end asks for in its own phase is called
        in that phase. An exception in ``end`` surfaces from ``backward()`` with its own type.
        """
        if phase is Phase.BEFORE_DDP:
            call_at_end(EndOfBackward(end, failed))
            if self._turn is _Turn.DUE:
                self._turn = _Turn.IDLE
            return
        self._ends().phases[EndOfBackward(end, failed)] = phase
        if self._turn is _Turn.NONE:
            call_at_end(self._take_turn)
        if self._turn is not _Turn.RUNNING:
            self._turn = _Turn.IDLE

    @untraced
    def _take_turn(self) -> None:
        due, self._turn = self._turn is _Turn.DUE, _Turn.RUNNING
        if due:
            phase = min(self._ends().phases.values())
            while (end := self._next(phase)) is not None:
                end.run()
        self._turn = _Turn.DUE if self._ends().phases else _Turn.NONE
        if self._turn is _Turn.DUE:
            call_at_end(self._take_turn)

    def _next(self, phase: Phase) -> EndOfBackward | None:
        end: EndOfBackward
        for end, wanted in self._ends().phases.items():
            if wanted is phase:
                del self._ends().phases[end]
                return end
        return None


class _Ends:
    """Keeps the ends of a backward. Nothing but the engine keeps this: where the backward raises, they are dropped.

    Attributes:
        phases: in the order of asking, in which a ``dict`` lets go of them, too.
    """

    __slots__ = ("__weakref__", "_backward", "_task", "phases")

    def __init__(self, backward: Backward, task: int) -> None:
        self.phases: dict[EndOfBackward, Phase] = {}
        self._backward = backward
        self._task = task

    def __call__(self) -> None:
        self._backward._take_turn()

    def __del__(self) -> None:
        _running.pop(getattr(self, "_task", -1), None)  # Ctrl-C may have come while this was made


_running: dict[int, Backward] = {}
"""By number, as ``graph_task`` has it: those whose ends the engine keeps."""
_making = threading.RLock()


def current() -> Backward:
    """The backward that this thread runs. ``RuntimeError`` outside of one."""
    task = torch._C._current_graph_task_id()
    backward = _running.get(task)
    if backward is None:
        with _making:  # on accelerators the engine runs one thread for each device
            backward = _running.get(task)
            if backward is None:
                backward = _running[task] = Backward(task)
    return backward


# What torch's profiler shows of instep: ranges named ``instep::…``, on the thread that the work runs on.


def is_profiled() -> bool:
    """Whether any profiler is on. Private, as torch's own code asks: tests/unit/test_profile.py fails if torch renames
    it."""
    return profiler._is_profiler_enabled


def profiled(part: str, first: str = "") -> AbstractContextManager[Any]:
    """Around a part of a step: a range in the trace of a running profiler, else nothing.

    Args:
        first: the first parameter that it is about, which the trace has as the range's input.
    """
    if not profiler._is_profiler_enabled:  # as ``is_profiled``: each range would cost some microseconds
        return AS_IT_IS
    return profiler.record_function(f"instep::{part}", first or None)


@contextmanager
def unseen_by_profiler() -> Iterator[None]:
    """Around the start of a collective on CPU tensors that may still run when the loop stops its profiler.

    gloo's thread notes when the collective begins and ends, in lists of the profiler that this thread had when it
    launched it. A profiler that stops reads these lists and frees them without asking that thread: it would read them
    half written, and gloo's thread would write to memory that is somebody else's by then.
    """
    if not profiler._is_profiler_enabled:
        yield
        return
    # Private: torch has no public way to leave something out of a profile. A collective takes this setting along.
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)
