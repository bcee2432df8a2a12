"""The recording of some iterations of a loop, from ``record`` to a file.

A ``Recording`` is the user's context manager. While its block runs, a ``_Running`` holds the hooks and the profiler: a
``Clock`` notes forwards and backwards (of a pipeline a ``StageClock``), ``LiveGradients`` counts gradients, and instep
tells a ``_Recorder`` of its buckets. At the end of the block the profiler's trace is read (``trace.py``), and all of it
becomes this rank's part of a ``Run``. ``save`` and ``run`` gather the parts of all ranks.
"""

import gc
import logging
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from instep import __version__
from instep.errors import AttachError, InstepError
from instep_tools.recording.gradients import LiveGradients, storage_of
from instep_tools.recording.trace import Trace
from instep_tools.report.figures import COMPUTE
from instep_tools.report.run import Rank, Run, Setup, TraceEvent, rank_from
from instep_tools.report.spans import Interval, Span, intervals, outside, title

if TYPE_CHECKING:
    from instep._wiring.recorded import RecordedLoop

_logger = logging.getLogger("instep")
RankPart = tuple[Setup, Rank, list[TraceEvent]]
"""The recording of one rank."""


class Recording:
    """What ``instep.record`` and ``Attachment.record`` return: a context manager around the loop.

    It begins with the first forward inside, of a pipeline with its first run, and ends after so many steps, or on
    leaving. Training goes on as ever, more slowly while it is recorded: ``torch.profiler`` runs.

    Since 0.1.0.

    Example:
        ```python
        recording = instep.record(model, optimizer, steps=4)
        with recording:
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        recording.save("plain.json.gz")  # then: instep report plain.json.gz
        ```
    """

    def __init__(self, loop: "RecordedLoop", steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise AttachError(f"steps must be a whole number, at least 1, not {steps!r}")
        # Until it has been recorded: a finished recording keeps no model alive.
        self._loop: RecordedLoop | None = loop
        self._gather_all = loop.gather
        self._steps = steps
        self._running: _Running | None = None
        self._found: RankPart | None = None

    def __enter__(self) -> "Recording":
        if self._running is not None or self._loop is None:
            raise InstepError("this recording has begun before: make another with record()")
        # A second profiler would start all the same, and end the first. Nothing public tells whether one runs, on this
        # thread or another.
        if profiler._is_profiler_enabled:
            raise InstepError("torch.profiler is running already: record() needs it for itself. Stop the other first")
        self._running = _Running(self._loop, self._steps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        running, self._running = self._running, None
        loop, self._loop = self._loop, None
        if running is None or loop is None:
            return
        try:
            running.stop()
            if running.clock.forwards:
                self._found = describe(loop, sorted(running.clock.given)), *running.found()
        except Exception:
            # The loop's own error is the one to raise.
            if error is None:
                raise
            _logger.exception("the loop has failed, and its recording could not be read:")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to ``path``: a Chrome trace, for ``instep report`` and for trace viewers such as Perfetto.

        Where ``torch.distributed`` is initialized all ranks must call this: their recordings become one, which the
        first rank writes. A name that ends in ``.gz`` is compressed. The file is written whole or not at all.

        Raises:
            InstepError: nothing was recorded.
            OSError: the file cannot be written.
        """
        together = self._gather()
        if together is not None:
            run, events = together
            run.save(Path(path), events)

    def run(self) -> Run | None:
        """What ``save`` would write, without the single operations, on the first rank; ``None`` on the others. All
        ranks must call this."""
        together = self._gather()
        return None if together is None else together[0]

    def _gather(self) -> "tuple[Run, list[list[TraceEvent]]] | None":
        """Return what all ranks recorded, on the first rank; ``None`` on the others."""
        if self._found is None:
            raise InstepError(
                "nothing was recorded: leave the `with` block first, and run at least one forward of the model that "
                "was given to record() in it"
            )
        if not (dist.is_available() and dist.is_initialized()):
            return _together([self._found])
        setup, rank, events = self._found
        parts = self._gather_all([asdict(setup), asdict(rank), events])
        if parts is None:
            return None
        return _together([(Setup(**setup), rank_from(rank), events) for setup, rank, events in parts])


class _Iterations:
    """The iterations that are recorded. Each begins with the first forward after a step, the first one with the first
    forward. In a pipeline the beginning of a run is the one of a forward: the micro-batches in it are one.

    Attributes:
        began: when each began, in ``perf_counter`` seconds.
    """

    def __init__(self, steps: int) -> None:
        self.began: list[float] = []
        self._left = steps
        self._due = True  # the next forward begins an iteration

    def forward_begins(self) -> bool:
        """Note a forward. Return ``False`` if all steps have been taken before it, so that the recording is over."""
        if self._due:
            if self._left == 0:
                return False
            self._due = False
            self.began.append(perf_counter())
        return True

    def step_ended(self) -> None:
        """Note that a step of the loop has returned."""
        self._left -= 1
        self._due = True

    def until(self, ends: float) -> list[Interval]:
        """Return when each began and ended: where the next one begins, so it includes loading of data. One that has not
        come to its step when the recording ends is left out, unless it is the only one."""
        found = list(zip(self.began, [*self.began[1:], ends], strict=True))
        return found if self._due or len(found) < 2 else found[:-1]


class _Recorder:
    """Collects the spans that instep tells of, in ``perf_counter`` seconds, and hears of the gradients that another
    thread will let go of."""

    def __init__(self, gradients: LiveGradients) -> None:
        self.spans: list[Span] = []
        self.handed_over = gradients.handed_over

    def __call__(self, kind: str, names: Sequence[str], start: float, end: float) -> None:
        # On any thread: communication ends on the backend's own. An append needs no lock.
        self.spans.append(Span(kind, title(names), start, end, threading.get_native_id(), tuple(names)))


class _Running:
    """A recording while it runs: the profiler, and all hooks on the loop.

    Attributes:
        clock: the forwards and backwards that were seen.
    """

    def __init__(self, loop: "RecordedLoop", steps: int) -> None:
        model, optimizers = loop.model, loop.optimizers
        self._loop = loop
        self._main = threading.get_native_id()
        self._iterations = _Iterations(steps)
        self._ends: float | None = None
        self._profile: profile | None = None
        # The profiler tells the time of day, hooks and instep ``perf_counter`` seconds.
        self._offset = time.time() - perf_counter()
        self._undo = ExitStack()
        # The last that was begun ends first. Whatever fails in here, nothing stays on the loop.
        try:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._undo.callback(self._stop_profile)  # first, for Ctrl-C
            self._profile.start()
            self._gradients = LiveGradients(model)
            self._undo.callback(self._gradients.stop)
            self._undo.callback(loop.leave_out_of_copies())
            self.clock = loop.watch(self._forward_begins, self._gradients.look)
            self._undo.callback(self.clock.stop)
            self._undo.callback(optimizers[0].register_step_post_hook(self._step_ended).remove)
            self._recorder = _Recorder(self._gradients)
            loop.listen(self._recorder)
            self._undo.callback(loop.stop_listening)
        except BaseException:
            self._undo.close()
            raise

    def _stop_profile(self) -> None:
        """Another profiler, which the loop has started since, has ended this one, and torch dies of reading it."""
        if self._profile is not None and profiler._is_profiler_enabled:
            self._profile.stop()
        else:
            self._profile = None

    def _forward_begins(self) -> None:
        self._gradients.look()
        if self._ends is None and not self._iterations.forward_begins() and threading.get_native_id() == self._main:
            self.stop()  # the profiler ends on the thread on which it began

    def _step_ended(self, optimizer: Optimizer, *_: Any) -> None:
        # A class's ``step()`` may call the one that it inherits, and both run this hook: the inner one is no step.
        if not self._loop.is_inner(optimizer):
            self._iterations.step_ended()
            self._gradients.look()

    def stop(self) -> None:
        """Take the hooks off, once: the forward after the last step calls this, or else the end of the block."""
        if self._ends is None:
            self._ends = perf_counter()
            self._undo.close()

    def found(self) -> tuple[Rank, list[TraceEvent]]:
        """Return what this rank did, in seconds of the time of day, and the operations for a trace viewer."""
        if self._profile is None:
            raise InstepError(
                "another torch.profiler ran while this was recorded, and has ended the recording: leave one of them out"
            )
        clock: Any = self.clock
        stages = getattr(clock, "stages", None)  # of a pipeline
        if stages is None and self._main not in {thread for *_, thread in clock.forwards}:
            raise InstepError(
                "the loop ran on another thread than the one that has entered the block, which the profiler follows: "
                "put the `with` block around the loop on its own thread"
            )
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            was_on = gc.isenabled()
            gc.disable()  # of a million new objects it would look at each again and again
            try:
                trace = Trace(path, self._offset)
            finally:
                gc.enable() if was_on else None
        assert self._ends is not None
        spans = sorted(self._spans(trace, self._recorder.spans), key=lambda span: span.start)
        iterations = self._iterations.until(self._ends)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        here = Rank(rank, platform.node(), self._main, iterations, spans, self._gradients.most, stages or ())
        return _shifted(here, self._offset), trace.shown(-self._offset)

    def _spans(self, trace: Trace, told: Sequence[Span]) -> list[Span]:
        """Put the spans that instep told of, those of the profiler and those of the clock together."""
        # The profiler sees the communication itself. What instep calls communication is from hand-over to arrival.
        spans = [span._replace(kind="flight") if span.kind == "communication" else span for span in told]
        spans += trace.communication()
        steps = trace.steps()
        if hasattr(self.clock, "stages"):
            spans = _of_stages(self.clock, spans + steps)
        else:
            spans += [Span("forward", "forward", *forward) for forward in self.clock.forwards]
            spans += _backwards(self.clock.backwards, trace, spans + steps)
            spans += _without_closures(steps, spans)
        assert self._ends is not None
        return [span for span in spans if span.start < self._ends]


def _of_stages(clock: Any, seen: Sequence[Span]) -> list[Span]:
    """Return ``seen``, where steps are of a stage, with what the stages computed."""
    found = [one._replace(stage=clock.stage_of.get((*one.parameters, "")[0])) for one in seen]
    computed = (*clock.forwards, *clock.backwards)
    return found + [Span(one.kind, one.name, one.start, one.end, one.thread, (), one.stage) for one in computed]


def _backwards(times: Sequence[Any], trace: Trace, others: Sequence[Span]) -> Iterator[Span]:
    """Yield each backward, and the waiting at its end.

    Args:
        others: among them the steps.
    """
    before = 0.0
    for one in times:
        # Backward begins with the first node since anything else ran on its thread, or the backward before it.
        before = max(before, trace.last_outside_of_nodes(one.reached, one.thread))
        began = min(trace.first_node(before), one.reached)
        yield Span("backward", "backward", began, one.nodes, one.thread)
        steps = intervals(s for s in others if s.kind == "step" and s.thread == one.thread)
        # Between its last node and its return backward waits, or steps buckets on its thread.
        for piece in outside([(one.nodes, one.returned)], steps):
            yield Span("waiting", "end of backward", *piece, one.thread)
        before = one.returned


def _without_closures(steps: Sequence[Span], spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of the calls of ``optimizer.step()`` in which no closure ran the model."""
    computed = [span for span in spans if span.kind in COMPUTE]
    for step in steps:
        inside = [s for s in computed if s.thread == step.thread and step.start <= s.start and s.end <= step.end]
        for start, end in outside([(step.start, step.end)], intervals(inside)):
            yield step._replace(start=start, end=end)


def _together(parts: Sequence[RankPart]) -> tuple[Run, list[list[TraceEvent]]]:
    """Make one run of the parts. Its times count from when the first rank began."""
    zero = min(rank.iterations[0][0] for _, rank, _ in parts)
    # Each rank of a pipeline has stages of its own: what is trained is that of all. Ranks with the same stages have
    # one.
    setups = list({tuple(rank.stages): setup for setup, rank, _ in reversed(parts)}.values())
    dtypes = sorted({dtype for setup in setups for dtype in setup.dtypes})
    whole = replace(parts[0][0], count=sum(setup.count for setup in setups), dtypes=dtypes)
    run = Run(whole, [_shifted(rank, -zero) for _, rank, _ in parts])
    return run, [[{**event, "ts": event["ts"] - 1e6 * zero} for event in events] for _, _, events in parts]


def _shifted(rank: Rank, by: float) -> Rank:
    """Return ``rank`` with ``by`` seconds added to all of its times."""
    return replace(
        rank,
        iterations=[(start + by, end + by) for start, end in rank.iterations],
        spans=[span._replace(start=span.start + by, end=span.end + by) for span in rank.spans],
    )


def describe(loop: "RecordedLoop", batch: Sequence[str]) -> Setup:
    """Describe the loop that is recorded.

    Args:
        batch: the inputs that forwards were given, in words.
    """
    model, optimizers = loop.model, loop.optimizers
    trained = [p for p in model.parameters() if p.requires_grad]
    state = tree_leaves([list(one.state.values()) for one in optimizers])
    device = trained[0].device if trained else torch.device("cpu")
    return Setup(
        label=loop.label,
        options=loop.options,
        model=", ".join(dict.fromkeys(map(_name_of_module, loop.modules()))),
        count=sum(p.numel() for p in trained),
        dtypes=sorted({str(p.dtype).removeprefix("torch.") for p in trained}),
        batch=batch,
        ranks=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        optimizer=", ".join(_name_of_class(optimizer) for optimizer in optimizers),
        wrapper=_wrapper(model),
        nbytes={
            "parameters": _bytes_of(model.parameters()),
            "gradients": _bytes_of(trained),
            "optimizer state": _bytes_of(value for value in state if isinstance(value, torch.Tensor)),
        },
        versions={"instep": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of what these tensors have on this rank, shared memory counted once."""
    storages = (storage for tensor in tensors if (storage := storage_of(tensor)) is not None)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _name_of_module(module: nn.Module) -> str:
    # FSDP2 gives a module a class of its own.
    return next(c.__name__ for c in type(module).__mro__ if not c.__module__.startswith("torch.distributed."))


def _name_of_class(optimizer: Optimizer) -> str:
    """Return the optimizer's class, with its implementation."""
    name = type(optimizer).__name__
    for implementation in ("fused", "foreach"):
        if optimizer.defaults.get(implementation):
            return f"{name}({implementation}=True)"
    return name


def _wrapper(model: nn.Module) -> str:
    """Return what trains the model on several ranks; empty if nothing does."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return "DistributedDataParallel"
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return "DTensor"
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    is_fsdp1 = fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules())
    return "FullyShardedDataParallel" if is_fsdp1 else ""
