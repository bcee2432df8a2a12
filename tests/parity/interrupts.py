"""Ctrl-C at any point of a step at which Python runs a signal's handler, in instep's code, torch's and the loop's."""

import copy
import dis
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import torch

import instep
from instep._torch import interrupts
from instep.errors import InstepError, UncommittedStepError
from instep_tools.harness import first_difference
from tests.checkpoint import saved
from tests.parity.oracle import snapshot
from tests.parity.programs import Loop, Program

WayOut = Literal["accept_torn", "load"]
ROOT = str(Path(instep.__file__).parent)
HANDLED = ("call", "c_return")
"""Python runs handlers when a function begins, and when one of C has returned."""


@contextmanager
def interrupting(install: Callable[[Any], None], tracer: Any) -> Iterator[None]:
    """With ``tracer`` installed, by ``sys.setprofile`` or ``sys.settrace``, which may raise ``KeyboardInterrupt``."""
    # A handler that runs while an object is freed raises into nothing.
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    on_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler) if on_main else None
    interrupts.look_for_handlers()  # as in a forward, or a step, of a loop that has this handler all the time
    grad = torch.is_grad_enabled()  # where torch.no_grad() is interrupted while it is entered it stays, as in any loop
    install(tracer)
    try:
        yield
    finally:
        install(None)
        sys.unraisablehook = before
        if on_main:
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler is not back"
            signal.signal(signal.SIGINT, handler)
        torch.set_grad_enabled(grad)
        # Else no weight is watched any more in this process, and the tests behind this one would fail.
        assert torch._C._is_torch_function_enabled(), "a context has stayed"


def press_ctrl_c() -> None:
    """As the operating system does: the handler runs here, unless it is to wait."""
    signal.raise_signal(signal.SIGINT)


def send_an_exception() -> None:
    """As another thread does (``PyThreadState_SetAsyncExc``): nothing makes it wait."""
    raise KeyboardInterrupt


class Interrupter:
    """Presses Ctrl-C at the ``where``-th point. Counts the points it passes."""

    def __init__(self, where: int | None = None) -> None:
        self.points = 0
        self.place: CodeType | None = None
        self._where = where

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in HANDLED or "importlib" in frame.f_code.co_filename:
            return
        self.points += 1
        if self.points - 1 == self._where:
            self.place = frame.f_code
            press_ctrl_c()

    def watching(self) -> AbstractContextManager[None]:
        return interrupting(sys.setprofile, self)


class LineInterrupter:
    """Presses Ctrl-C before the ``where``-th line of instep's that runs. Counts those that it passes.

    Args:
        function: count the lines of this one alone, without those of what it calls.
        interrupt: in place of Ctrl-C.
    """

    def __init__(
        self,
        where: int | None = None,
        function: Callable[..., Any] | None = None,
        interrupt: Callable[[], None] = press_ctrl_c,
    ) -> None:
        self.lines = 0
        self._interrupt = interrupt
        self.place: str | None = None
        self._where = where
        self._code = None if function is None else function.__code__

    def in_function(self, frame: FrameType, event: str, arg: object) -> Any:
        if self._interrupt is send_an_exception and frame.f_code.co_filename == interrupts.__file__:
            return None  # no lock that is written in Python can be taken, or given back, in one go
        counts = frame.f_code.co_filename.startswith(ROOT) if self._code is None else frame.f_code is self._code
        return self.at_line if counts else None

    def at_line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and not runs_no_handler(frame):
            self.lines += 1
            if self.lines - 1 == self._where:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                self._interrupt()
        return self.at_line

    def watching(self) -> AbstractContextManager[None]:
        return interrupting(sys.settrace, self.in_function)

    def interrupt(self, act: Callable[[], object]) -> InstepError | None:
        """Call ``act``, and catch the interrupt. Returns what is told at once, where the interrupt was lost."""
        try:
            with self.watching():
                act()
        except KeyboardInterrupt:
            pass
        except InstepError as error:
            return error
        return None


def runs_no_handler(frame: FrameType) -> bool:
    """Whether no interrupt comes here. The interpreter runs no handler where ``__exit__`` is about to be called without
    an exception, nor where a ``try`` begins, which the compiler leaves out of the blocks around it: what a context is
    for would stay."""
    return frame.f_lasti in without_handlers(frame.f_code)


@cache
def without_handlers(code: CodeType) -> frozenset[int]:
    found = list(dis.get_instructions(code))
    loads = [one.argval is None and one.opname in ("LOAD_CONST", "DUP_TOP") for one in found]
    exits = [number for number in range(len(found)) if loads[number : number + 3] == [True] * 3]
    # What a return in the block has found lies on the stack, and is put below them.
    exits += [number - 1 for number in exits if found[number - 1].opname in ("SWAP", "ROT_TWO")]
    begins = [number for number in range(len(found)) if found[number].opname == "NOP"]
    return frozenset(found[number].offset for number in exits + begins)


def once(interrupts: Callable[..., Any]) -> Callable[..., Any]:
    """Ctrl-C in the first call, before it does anything."""
    rest = iter([KeyboardInterrupt()])

    def call(*args: Any, **kwargs: Any) -> Any:
        for error in rest:
            raise error
        return interrupts(*args, **kwargs)

    return call


def run_interrupted(program: Program, number: int, share: float, way_out: WayOut) -> str:
    """Interrupt step ``number`` after ``share`` of it, go on, and compare. What the loop was told.

    The step is then not taken, or taken as a whole; or an ``InstepError`` says that it is torn, and the documented
    way out of that works.
    """
    where = int(share * _points(program, number))
    loop = Loop(program, True)
    assert loop.overlap is not None
    with loop.overlap, tempfile.TemporaryDirectory(prefix="instep-interrupted-") as directory:
        for before in range(number):
            loop.step(before)
        loop.overlap.synchronize()
        if way_out == "load" and not _can_be_loaded(loop):
            way_out = "accept_torn"
        if way_out == "load":
            saved.save(directory, loop.model, loop.optimizer, loop.overlap)
        interrupter = Interrupter(where)
        try:
            with interrupter.watching():
                loop.step(number)
        except KeyboardInterrupt:
            pass
        except InstepError:
            # What is told at once, where the interrupt was lost. Without one, nothing is refused.
            if interrupter.place is None:
                raise
        try:
            return _go_on(program, loop, number, directory, way_out)
        except AssertionError as error:
            raise AssertionError(f"interrupted at point {where}, in {interrupter.place}: {error}") from error


def _can_be_loaded(loop: Loop) -> bool:
    """torch makes the state of an optimizer that has none, to save it, by a step; and into an optimizer with more
    entries than were saved DCP loads nothing."""
    optimizer = loop.optimizer
    if isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups):
        return True
    return all(p in optimizer.state for group in optimizer.param_groups for p in group["params"])


def _points(program: Program, number: int) -> int:
    loop = Loop(program, True)
    assert loop.overlap is not None
    with loop.overlap:
        for before in range(number):
            loop.step(before)
        interrupter = Interrupter()
        with interrupter.watching():
            loop.step(number)
        return interrupter.points


def _go_on(program: Program, loop: Loop, number: int, directory: str, way_out: WayOut) -> str:
    without, whole = (_plain(program, number, skip=skip) for skip in (True, False))
    assert loop.overlap is not None
    try:
        loop.optimizer.zero_grad()
        # Who uses the model is told; with undo, a step that is not committed is put back.
        loop.model(*loop.example())
        loop.overlap.synchronize()
        taken = _taken(loop, number, without, whole)
        _compare_the_rest(loop, number, (without, whole)[taken])
        return ("not taken", "taken")[taken]
    except InstepError as error:
        told = error
    left_open = isinstance(told, UncommittedStepError)
    # The plain loop that was compared may have gone on.
    committed = _plain(program, number, skip=False) if left_open else None
    return _out(program, loop, number, directory, way_out, told, committed)


def _out(
    program: Program, loop: Loop, number: int, directory: str, way_out: WayOut, told: InstepError, whole: Loop | None
) -> str:
    """The documented way out: a checkpoint is loaded; a step that was only left uncommitted is committed."""
    assert loop.overlap is not None
    reached = _plain(program, number, skip=True)
    try:
        if way_out == "load":
            loop.model.requires_grad_(True)  # torch loads no state of frozen parameters; each step says what is frozen
            saved.load(directory, loop.model, loop.optimizer, loop.overlap)
        elif whole is None or not _committed(loop):
            _load_by_hand(loop, reached)
            loop.overlap.accept_torn()
        else:
            reached = whole
        loop.optimizer.zero_grad()
        _compare_the_rest(loop, number, reached)
    except InstepError as error:
        raise AssertionError(f"after {told!r} the way out by {way_out} does not work: {error!r}") from error
    return type(told).__name__


def _committed(loop: Loop) -> bool:
    try:
        loop.optimizer.step()
    except InstepError:
        return False  # torn, or torn now: its gradients have been cleared
    return True


def _plain(program: Program, number: int, skip: bool) -> Loop:
    """A plain loop that has taken its steps up to ``number``, with or without that one."""
    loop = Loop(program, False)
    for before in range(number if skip else number + 1):
        loop.step(before)
    return loop


def _taken(loop: Loop, number: int, without: Loop, whole: Loop) -> bool:
    found = snapshot(loop)
    differences = [first_difference(iter(snapshot(one).items()), iter(found.items())) for one in (without, whole)]
    assert None in differences, f"step {number + 1} was taken in part, and nobody says so: {differences}"
    return differences[0] is not None


def _compare_the_rest(loop: Loop, number: int, plain: Loop) -> None:
    assert loop.overlap is not None
    for rest in range(number + 1, len(loop.program.steps)):
        plain.step(rest)
        loop.step(rest)
        loop.overlap.synchronize()
        difference = first_difference(iter(snapshot(plain).items()), iter(snapshot(loop).items()))
        assert difference is None, f"after step {rest + 1}, after the interrupt: {difference}"


def _load_by_hand(loop: Loop, other: Loop) -> None:
    loop.model.load_state_dict(other.model.state_dict())
    loop.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
