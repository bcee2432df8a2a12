"""The recording of some iterations of a loop: when they begin and end, and what is recorded of them in words."""

import hashlib
import logging
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from instep._arguments import require_count
from instep._ranks.collectives import gather_json
from instep._torch.engine import Backward, Phase, current
from instep._torch.hooks import is_called_by_step, nodes_of, tensors_in
from instep._torch.watch import plain_type
from instep._version import __version__
from instep.errors import AttachError, InstepError
from instep.naming import modules_of, parameters_of
from instep.recording.profile import (
    PARAMETERS,
    STATE,
    Event,
    GradientNotes,
    Trace,
    held_before,
    memory_of,
    state_beside_parameters,
    storages,
    tensors_in_state,
)
from instep.report.memory import GRADIENTS
from instep.report.run import Job, Rank, Run, Setup, rank_from, setup_from
from instep.report.spans import Span, SpanRecorder, outside
from instep.sources.fsdp.modules import fsdp1_in

# When iterations, forwards and backwards of a model begin and end, by its hooks.


class EndOfBackward(NamedTuple):
    """Attributes:
    nodes: when the last node of the graph had run.
    returned: when backward returned: what waits for communication waits between the two.
    """

    nodes: float
    returned: float
    thread: int


class Clock:
    """Watches a model until ``stop``. All times are ``perf_counter`` seconds.

    Args:
        forward_begins: called when an outermost forward is about to begin.

    Attributes:
        forwards: when each began and ended, and on which thread.
        given: shapes and dtypes of the tensors that forwards were given, and what autocast computes in: each once.
    """

    def __init__(self, model: nn.Module, forward_begins: Callable[[], None]) -> None:
        self.forwards: list[tuple[float, float, int]] = []
        self.backwards: list[EndOfBackward] = []
        self._forward_begins = forward_begins
        self._depth = 0
        self._began = 0.0
        self._backward: Backward | None = None  # the last one that was seen
        self.given: set[str] = set()
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        if self._depth == 0:
            self._forward_begins()
            self._note((args, kwargs))
            self._began = perf_counter()
        self._depth += 1

    def _after_forward(self, module: nn.Module, inputs: object, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        self.forwards.append((self._began, perf_counter(), threading.get_native_id()))
        for node in nodes_of(output):
            node.register_prehook(self._backward_runs)

    def _note(self, inputs: object) -> None:
        device = "cpu"
        for tensor in tensors_in(inputs):
            device = tensor.device.type
            self.given.add(f"{tuple(tensor.shape)} {_dtype_name(tensor.dtype)}")
        if torch.is_autocast_enabled(device):
            self.given.add(f"autocast in {_dtype_name(torch.get_autocast_dtype(device))}")

    def _backward_runs(self, gradients: object) -> None:
        if (backward := current()) is self._backward:
            return
        self._backward = backward
        nodes: list[float] = []
        backward.at(Phase.BEFORE_DDP, lambda: nodes.append(perf_counter()))
        backward.at(Phase.LAST, partial(self._backward_ended, nodes))

    def _backward_ended(self, nodes: list[float]) -> None:
        self.backwards.append(EndOfBackward(nodes[0], perf_counter(), threading.get_native_id()))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Digests of the weights: two recordings show by them whether their loops have trained the same model.


class Weights:
    """This rank's part of the parameters of ``optimizers``, in the order of their groups."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._digests: list[str] = []

    def look(self) -> None:
        """Take the digest of the weights as they are now."""
        self._digests.append(self._digest())

    @property
    def digests(self) -> Sequence[str]:
        """One of each look; none if one of the looks could not tell."""
        return self._digests if all(self._digests) else ()

    def _digest(self) -> str:
        """SHA-256. Empty for FSDP1, whose parameters are views that it moves about, and for tensors of an unknown
        kind."""
        if fsdp1_in(self._model):
            return ""
        found = hashlib.sha256()
        for parameter in (
            p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]
        ):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # a DTensor
            known = plain_type(local) in (nn.Parameter, torch.Tensor)
            if not known or local.layout is not torch.strided or local.is_meta:
                return ""
            found.update(f"{tuple(local.shape)} {local.dtype}".encode())
            # Of a copy: once NumPy has had a parameter's own memory, nobody can tell any more whether others have it.
            found.update(local.detach().clone().to("cpu").flatten().view(torch.uint8).numpy())
        return found.hexdigest()


# What is recorded, in words and bytes.


def describe(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batch: Sequence[str],
    label: str,
    options: Mapping[str, str],
    buckets: Sequence[Sequence[str]],
    gradients: Mapping[str, int] | None = None,
) -> Setup:
    """A description of what is recorded.

    Args:
        batch: what forwards were given.
        gradients: bytes, of the names in ``buckets``; unless given, of the model's own names.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    ddps = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    state = {address: n for o in optimizers for tensor in tensors_in_state(o) for address, n in storages(tensor)}
    return Setup(
        job=_job(model, trained, batch),
        label=label,
        options=options,
        optimizer=", ".join(_name_of_class(optimizer) for optimizer in optimizers),
        fused=all(bool(optimizer.defaults.get("fused")) for optimizer in optimizers),
        wrapper="DistributedDataParallel" if ddps else _sharding(model),
        bucket_view=all(ddp.gradient_as_bucket_view for ddp in ddps),
        buckets=buckets,
        gradients={name: sum(n for _, n in storages(p)) for name, p in model.named_parameters() if p.requires_grad}
        if gradients is None
        else gradients,
        nbytes={
            PARAMETERS: sum(n for p in model.parameters() for _, n in storages(p)),
            GRADIENTS: sum(n for p in trained for _, n in storages(p)),
            STATE: sum(state.values()),
        },
        versions={"instep": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )


def _job(model: nn.Module, trained: Sequence[nn.Parameter], batch: Sequence[str]) -> Job:
    described = [f"{one.name} {tuple(one.tensor.shape)} {one.tensor.dtype}" for one in parameters_of(model)]
    *_, inner = (module for prefix, module in modules_of(model) if not prefix)
    device = trained[0].device if trained else torch.device("cpu")
    return Job(
        # FSDP2 gives a module a class of its own.
        model=next(c.__name__ for c in type(inner).__mro__ if not c.__module__.startswith("torch.distributed.")),
        parameters=hashlib.sha256("\n".join(described).encode()).hexdigest()[:16],
        count=sum(p.numel() for p in trained),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
        batch=tuple(batch),
        ranks=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )


def _name_of_class(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    for implementation in ("fused", "foreach"):
        if optimizer.defaults.get(implementation):
            return f"{name}({implementation}=True)"
    return name


def _sharding(model: nn.Module) -> str:
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return "DTensor"
    return "FullyShardedDataParallel" if fsdp1_in(model) else ""


# The recording of some iterations of a loop.


_logger = logging.getLogger("instep")


Listen = Callable[[SpanRecorder | None], None]
Describe = Callable[[Sequence[str]], Setup]
"""Is given what forwards were given: see ``Clock``."""


class Recording:
    """What ``instep.record`` and ``Attachment.record`` return: a context manager around the loop.

    It begins with the first forward inside, and ends after so many steps, or on leaving. Training goes on as ever,
    more slowly while it is recorded: ``torch.profiler`` runs.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        steps: int,
        describe: Describe,
        listen: Listen,
    ) -> None:
        require_count("steps", steps, AttachError)
        # What is recorded, until it has been: the result keeps nobody alive.
        self._loop: tuple[nn.Module, list[Optimizer], Listen, Describe] | None
        self._loop = model, list(optimizers), listen, describe
        self._steps = steps
        self._running: _Running | None = None
        self._found: tuple[Setup, Rank, list[Event]] | None = None

    def __enter__(self) -> "Recording":
        if self._running is not None or self._loop is None:
            raise InstepError("this recording has begun before: make another with record()")
        # A second one would start all the same, and end the first. Nothing public tells.
        if torch._C._autograd._profiler_enabled():
            raise InstepError("torch.profiler is running already: record() needs it for itself. Stop the other first")
        model, optimizers, listen, _ = self._loop
        self._running = _Running(model, optimizers, self._steps, listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        running, self._running = self._running, None
        if running is not None and self._loop is not None:
            running.stop()
            if running.clock.forwards:
                describe, self._loop = self._loop[-1], None
                try:
                    self._found = describe(sorted(running.clock.given)), *running.found()
                except Exception:
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

    def _gather(self) -> "tuple[Run, list[list[Event]]] | None":
        if self._found is None:
            raise InstepError(
                "nothing was recorded: leave the `with` block first, and run at least one forward of the model that "
                "was given to record() in it"
            )
        everything = _gathered(self._found)
        return None if everything is None else _together(everything)


class _Iterations:
    """When each began: with the first forward, and with the first one after each step.

    Attributes:
        began: times, in ``perf_counter`` seconds.
    """

    def __init__(self, steps: int) -> None:
        self.began: list[float] = []
        self._left = steps
        self._due = True

    def forward_begins(self) -> bool:
        """``False``: all steps have been."""
        if self._due:
            self._due = False
            if self._left == 0:
                return False
            self.began.append(perf_counter())
        return True

    def step_ended(self) -> None:
        self._left -= 1
        self._due = True


class _Running:
    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        steps: int,
        listen: Listen,
    ) -> None:
        self._optimizers = optimizers
        self._main = threading.get_native_id()
        self._recorder = SpanRecorder()
        self._iterations = _Iterations(steps)
        self._ends: float | None = None
        self._offset = time.time() - perf_counter()
        self._undo = ExitStack()
        try:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._weights = Weights(model, optimizers)
            self._weights.look()
            self._profile = profile(activities=activities, profile_memory=True, record_shapes=True)
            self._profile.start()
            self._undo.callback(self._profile.stop)
            self._began = perf_counter()
            self._held = held_before(model, optimizers)
            self._notes = GradientNotes(model)
            self._undo.callback(self._notes.stop)
            self.clock = Clock(model, self._forward_begins)
            self._undo.callback(self.clock.stop)
            self._undo.callback(optimizers[0].register_step_post_hook(self._step_ended).remove)
            listen(self._recorder)
            self._undo.callback(listen, None)
        except BaseException:
            self._undo.close()
            raise

    def _forward_begins(self) -> None:
        if self._ends is None and not self._iterations.forward_begins():
            self.stop()

    def _step_ended(self, optimizer: Optimizer, *_: Any) -> None:
        if not is_called_by_step(optimizer):
            self._iterations.step_ended()

    def stop(self) -> None:
        """Look no more."""
        if self._ends is None:
            self._ends = perf_counter()
            self._undo.close()
            self._state = state_beside_parameters(self._optimizers)
            self._weights.look()

    def found(self) -> tuple[Rank, list[Event]]:
        """This rank's part, in seconds of the time of day, and the operations to show."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = Trace(path, self._offset)
        assert self._ends is not None
        spans = self._spans(trace, self._recorder.take())
        memory = memory_of(trace, spans, self._held, self._notes, self._state, (self._began, self._ends))
        began = self._iterations.began
        iterations = list(zip(began, [*began[1:], self._ends], strict=True))
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        spans = sorted(spans, key=lambda span: span.start)
        here = Rank(rank, platform.node(), self._main, iterations, spans, memory, self._weights.digests)
        return _shifted(here, self._offset), trace.shown(-self._offset)

    def _spans(self, trace: Trace, told: Sequence[Span]) -> list[Span]:
        # The profiler sees communication itself; what instep tells of it is from end to end.
        spans = [span._replace(kind="flight") if span.kind == "communication" else span for span in told]
        spans += trace.steps() + trace.communication()
        spans += [Span("forward", "forward", *forward) for forward in self.clock.forwards]
        nodes = trace.nodes()
        before = self._began
        for end in self.clock.backwards:
            began = next((time for time in nodes if before < time < end.nodes), end.nodes)
            spans.append(Span("backward", "backward", began, end.nodes, end.thread))
            steps = [(s.start, s.end) for s in spans if s.kind == "step" and s.thread == end.thread]
            for piece in outside([(end.nodes, end.returned)], steps):
                spans.append(Span("waiting", "end of backward", *piece, end.thread))
            before = end.returned
        assert self._ends is not None
        return [span for span in spans if span.start < self._ends]


Part = tuple[Setup, Rank, list[Event]]


def _gathered(part: Part) -> list[Part] | None:
    """Those of all ranks, on the first; ``None`` on the others."""
    if not (dist.is_available() and dist.is_initialized()):
        return [part]
    setup, rank, events = part
    assert dist.group.WORLD is not None
    parts = gather_json([asdict(setup), asdict(rank), events], dist.group.WORLD)
    return None if parts is None else [(setup_from(setup), rank_from(rank), events) for setup, rank, events in parts]


def _together(parts: Sequence[Part]) -> tuple[Run, list[list[Event]]]:
    """Times count from when the first rank began."""
    zero = min(rank.iterations[0][0] for _, rank, _ in parts)
    run = Run(parts[0][0], [_shifted(rank, -zero) for _, rank, _ in parts])
    return run, [[{**event, "ts": event["ts"] - 1e6 * zero} for event in events] for _, _, events in parts]


def _shifted(rank: Rank, by: float) -> Rank:
    memory = rank.memory
    return Rank(
        rank.rank,
        rank.host,
        rank.main,
        [(start + by, end + by) for start, end in rank.iterations],
        [span._replace(start=span.start + by, end=span.end + by) for span in rank.spans],
        replace(memory, times=[t + by for t in memory.times], peak_at=memory.peak_at + by),
        rank.weights,
    )
