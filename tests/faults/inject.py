"""How each point is reached and each fault is made, from outside of instep."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.distributed import fsdp
from torch.distributed.distributed_c10d import Work
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from instep._optim.parameters import calls_of
from instep._optim.stepper import PreparedUpdate, Stepper
from instep._ranks import vote
from instep._step import update as pending
from instep.sources.ddp.buckets import Reduction
from instep.sources.ddp.reducer import ReducerGroup
from tests.distributed.loops import work_of
from tests.faults.cases import ALL, NONFINITE, RAISES, STAGED_SGD, TIMEOUT, TURNS, Case
from tests.faults.program import Staged, staged_sgd

if TYPE_CHECKING:
    from tests.faults.rank import Run

HANG = TIMEOUT + 2.0
OF_FSDP2 = ("reduce_scatter_tensor", "reduce_scatter_single")
COLLECTIVES = {
    "ddp": ("all_reduce",),
    "joined": ("all_reduce",),
    "zero": ("all_to_all_single",),
    "fsdp2": OF_FSDP2,
    "2d": OF_FSDP2,
}
"""Of each source those that reduce a bucket."""


class InjectedError(Exception):
    """The fault itself."""


class Alarm(KeyboardInterrupt):
    """An interrupt from a timer, that no source of instep can have foreseen."""


class Trigger:
    """Fires once: in its step, on its rank, when its point is passed for the ``where``-th time."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.mine = bool(case.point) and case.rank in (rank, ALL)
        self.run: Run | None = None
        self._step = -1
        self._passed = 0
        self._fired = False

    def begin(self, step: int) -> None:
        self._step = step
        self._passed = 0

    @property
    def awaited(self) -> bool:
        """Whether the running step is the one, and its fault is still to come."""
        return self.mine and not self._fired and self._step == self.case.step

    def due(self) -> bool:
        """The point is passed. Whether this is where the fault belongs; it is, once."""
        if not self.awaited:
            return False
        self._passed += 1
        if self._passed - 1 != self.case.where:
            return False
        self._fired = True
        assert self.run is not None
        self.run.note("fault")
        return True

    def hit(self, *_: object) -> None:
        if self.due():
            self._fire()

    def _fire(self) -> None:
        kind = self.case.kind
        if kind == "raise":
            raise InjectedError("the fault")
        if kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):  # the handler runs between two instructions
                pass
        elif kind == "exit":
            sys.exit(3)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "hang":
            time.sleep(HANG)
        elif kind == "partition":
            assert self.run is not None
            subprocess.run(["ip", "link", "set", self.run.interface, "down"], check=True, capture_output=True)
        elif kind == "save":
            assert self.run is not None
            self.run.try_to_save()
        else:
            raise AssertionError(kind)


def _fail(future: torch.futures.Future[Any]) -> NoReturn:
    future.wait()
    raise InjectedError("the fault")


class _FailingWork(Work):
    """A collective that ends with an error."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future().then(_fail)

    def wait(self, *args: Any) -> bool:
        self._work.wait(*args)
        raise InjectedError("the fault")


def _failing_for_the_reducer(work: Any) -> Any:
    return work_of(work.get_future().then(_fail))


@contextmanager
def _collectives(trigger: Trigger, run: "Run") -> Iterator[None]:
    """Those that reduce a bucket: of DDP's reducer, of its communication hook, FSDP2's reduce-scatter."""
    point = trigger.case.point
    names = COLLECTIVES[trigger.case.source]
    if point in ("before rows", "rows in flight"):
        names = ("all_gather",)
    where: list[tuple[Any, str]] = [(dist, name) for name in names if hasattr(dist, name)]
    if trigger.case.source != "zero":
        where.append((ReducerGroup, "_reduce"))

    def wrapped(real: Callable[..., Any], failing: Callable[[Any], Work]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if point in ("before launch", "before rows"):
                trigger.hit()
            work = real(*args, **kwargs)
            if trigger.case.kind == "error":
                return failing(work) if trigger.due() else work
            if point in ("in flight", "rows in flight"):
                trigger.hit()
            return work

        return call

    patches = []
    for owner, name in where:
        failing = _failing_for_the_reducer if owner is ReducerGroup else _FailingWork
        patches.append(patch.object(owner, name, wrapped(getattr(owner, name), failing)))
    for one in patches:
        one.start()
    yield
    for one in patches:
        one.stop()


@contextmanager
def _vote(trigger: Trigger, run: "Run") -> Iterator[None]:
    """Before the ranks' vote is sent, and while it is on its way."""
    real = vote.VoteGroup.minimum

    def minimum(group: Any, box: torch.Tensor) -> Any:
        trigger.hit()
        work = real(group, box)
        trigger.hit()
        return work

    with patch.object(vote.VoteGroup, "minimum", minimum):
        yield


class _AtAnOperation(TorchDispatchMode):
    def __init__(self, hit: Callable[[], None]) -> None:
        super().__init__()
        self._hit = hit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._hit()
        return func(*args, **(kwargs or {}))


@contextmanager
def _update(trigger: Trigger, run: "Run") -> Iterator[None]:
    """A bucket's update. Buckets are taken one by one, as they would be on a slow network."""
    point, whole, prepared = trigger.case.point, Stepper.step, PreparedUpdate.run
    nested: list[bool] = []  # whether a step runs, which may run a prepared update itself

    def divide(*args: Any, **kwargs: Any) -> Any:
        if point == "before write":
            trigger.hit()
        return calls_of(*args, **kwargs)

    def write(real: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if point == "in the update" and trigger.awaited:
            with _AtAnOperation(trigger.hit):
                real(*args, **kwargs)
        else:
            real(*args, **kwargs)
        if point == "after write":
            trigger.hit()

    def step(self: Stepper, *args: Any, **kwargs: Any) -> None:
        if point == "after completion":
            trigger.hit()
        nested.append(True)
        try:
            write(whole, self, *args, **kwargs)
        finally:
            nested.pop()

    def run_prepared(self: PreparedUpdate, gradients: list[torch.Tensor]) -> None:
        if nested:
            return prepared(self, gradients)  # in ``step``, which has hit
        if point in ("before write", "after completion"):
            trigger.hit()
        write(prepared, self, gradients)
        return None

    staged = trigger.case.optimizer == STAGED_SGD
    with (
        patch.object(sys.modules["torch.optim.sgd"], "sgd", staged_sgd) if staged else nullcontext(),
        patch("instep._step.writes.calls_of", divide),
        patch.object(Stepper, "step", step),
        patch.object(PreparedUpdate, "run", run_prepared),
        patch.object(Reduction, "arrived", property(lambda self: False)),
        patch.object(Staged, "between", trigger.hit if point == "between state and parameter" else lambda: None),
    ):
        yield


@contextmanager
def _blocks(trigger: Trigger, run: "Run") -> Iterator[None]:
    leaves = [module for module in run.model.modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_pre_hook(trigger.hit) for module in leaves]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def _in_fsdp(trigger: Trigger, run: "Run") -> Iterator[None]:
    place = str(Path(fsdp.__file__).parent)

    def called(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and run.phase == "forward" and frame.f_code.co_filename.startswith(place):
            trigger.hit()

    run.at["begin"] = lambda: sys.setprofile(called) if trigger.awaited else None
    run.at["end"] = lambda: sys.setprofile(None)
    yield


def nodes_of(loss: torch.Tensor) -> list[Node]:
    """The nodes of the graph that an operation made, those near the loss first."""
    assert loss.grad_fn is not None
    found = [loss.grad_fn]
    for node in found:
        found += [n for n, _ in node.next_functions if n is not None and n not in found]
    return [node for node in found if node.name() != "torch::autograd::AccumulateGrad"]


@contextmanager
def _graph(trigger: Trigger, run: "Run") -> Iterator[None]:
    def armed(loss: torch.Tensor) -> None:
        if trigger.awaited:
            nodes = nodes_of(loss)
            if trigger.case.where < len(nodes):
                hit = trigger.hit
                # One node alone, so that "where" is a place and not a time.
                nodes[trigger.case.where].register_prehook(lambda _: hit() if trigger.awaited else None)
                trigger._passed = trigger.case.where

    run.before_backward = armed
    yield


@contextmanager
def _end_of_backward(trigger: Trigger, run: "Run") -> Iterator[None]:
    """``where``: 0 is the first of the engine's callbacks; each more is asked for by the one before it."""
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def asked(turns: int) -> Callable[[], None]:
        return trigger.hit if turns == 0 else lambda: queue(asked(turns - 1))

    def armed(loss: torch.Tensor) -> None:
        if trigger.awaited:
            trigger._passed = trigger.case.where
            loss.register_hook(lambda _: queue(asked(trigger.case.where)))

    run.before_backward = armed
    yield


VALUES = dict(zip(NONFINITE, (float("nan"), float("inf"), float("-inf")), strict=True))


@contextmanager
def _gradient(trigger: Trigger, run: "Run") -> Iterator[None]:
    parameter = run.parameters[trigger.case.where]

    def poison(gradient: torch.Tensor) -> torch.Tensor | None:
        if not trigger.awaited:
            return None
        trigger._passed = trigger.case.where
        trigger.due()
        gradient = gradient.clone()
        gradient.view(-1)[0] = VALUES[trigger.case.kind]
        return gradient

    if isinstance(parameter, DTensor):  # FSDP2 calls no hook of a sharded parameter: it comes with what its module made
        owner = next(m for m in run.model.modules() if id(parameter) in map(id, m.parameters(recurse=False)))
        handle = owner.register_forward_hook(lambda _, __, made: made.register_hook(poison) and None)
    else:
        handle = parameter.register_hook(poison)
    yield
    handle.remove()


@contextmanager
def _in_step(trigger: Trigger, run: "Run") -> Iterator[None]:
    handle = run.optimizer.register_step_pre_hook(trigger.hit)
    yield
    handle.remove()


@contextmanager
def _handing_over(trigger: Trigger, run: "Run") -> Iterator[None]:
    real = pending.calls_of  # type: ignore[attr-defined]  # where it is looked up

    def calls_of(*args: Any, **kwargs: Any) -> Any:
        if run.phase == "step":
            trigger.hit()
        return real(*args, **kwargs)

    with patch.object(pending, "calls_of", calls_of):
        yield


@contextmanager
def _in_the_loop(trigger: Trigger, run: "Run") -> Iterator[None]:
    run.at[trigger.case.point] = trigger.hit
    yield


@contextmanager
def _timer(trigger: Trigger, run: "Run") -> Iterator[None]:
    """A step is taken to be as long as the shortest before it: on every machine the interrupt falls into the step."""
    began, length = 0.0, math.inf

    def ring(*_: object) -> NoReturn:
        trigger._passed = trigger.case.where
        trigger.due()
        raise Alarm("the fault")

    def begin() -> None:
        nonlocal began
        began = time.monotonic()
        if trigger.awaited:
            signal.setitimer(signal.ITIMER_REAL, max(length * trigger.case.where / TURNS, 1e-6))

    def end() -> None:
        nonlocal length
        signal.setitimer(signal.ITIMER_REAL, 0)
        length = min(length, time.monotonic() - began)

    before = signal.signal(signal.SIGALRM, ring)
    run.at["begin"], run.at["end"] = begin, end
    yield
    signal.signal(signal.SIGALRM, before)


@contextmanager
def _attach(trigger: Trigger, run: "Run") -> Iterator[None]:
    """The options differ from the start (``program.options``). The time counts from the first step."""

    def begin() -> None:
        trigger._passed = trigger.case.where
        trigger.due()

    run.at["begin"] = begin
    yield


Seam = Callable[[Trigger, "Run"], AbstractContextManager[None]]
SEAMS: dict[str, Seam] = {
    "forward": _blocks,
    "in FSDP's forward": _in_fsdp,
    "model": _graph,
    "gradient": _gradient,
    "before launch": _collectives,
    "in flight": _collectives,
    "before rows": _collectives,
    "rows in flight": _collectives,
    "after completion": _update,
    "before write": _update,
    "in the update": _update,
    "between state and parameter": _update,
    "after write": _update,
    "end of backward": _end_of_backward,
    "before step": _in_the_loop,
    "handing over": _handing_over,
    "in step": _in_step,
    "after step": _in_the_loop,
    "vote": _vote,
    "attach": _attach,
    "any time": _timer,
}

__all__ = ["RAISES", "SEAMS", "Alarm", "InjectedError", "Trigger"]
