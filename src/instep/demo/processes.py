"""Where a process of the demo begins, and who starts, hears and ends it."""

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
import torch.distributed as dist

from instep._signals import STOPPING, blocked, waiting
from instep.demo.job import Alone, Answer, DemoError, Failed, Finished, InRank, Job, Turn
from instep.demo.loops import train_alone, train_in_lockstep

# Where a process of the demo begins.


GROUP_TIMEOUT = timedelta(minutes=10)
"""Long, for slow machines: the parent sees a rank that dies, and ends the others."""
TEXT_FILE = "text"
STORE_FILE = "store"


def serve(job: Job, directory: Path, pipe: Connection) -> None:
    """Do ``job``, and say so through ``pipe``; ``Failed`` if that cannot be done.

    ``directory`` holds the text, and is where ranks meet.
    """
    for number in STOPPING:  # a terminal sends Ctrl-C to all: the parent decides
        signal.signal(number, signal.SIG_IGN)
    _exit_with_parent(directory)
    try:
        text = (directory / TEXT_FILE).read_bytes()
        if isinstance(job, Alone):
            train_alone(job, text, _set_up(job.device, 0), pipe)
            return
        device = _set_up(job.placement.device, job.rank)
        with _process_group(job, directory, device):
            train_in_lockstep(job, text, device, pipe.send)
    except DemoError as error:
        pipe.send(Failed(str(error)))
    except Exception:
        pipe.send(Failed(f"{job.name} failed:\n{traceback.format_exc()}"))


def _exit_with_parent(directory: Path) -> None:
    """Should the parent be killed, do what it can no longer do."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="instep-demo-parent", daemon=True).start()


def _set_up(kind: str, number: int) -> torch.device:
    if kind == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
        torch.use_deterministic_algorithms(True)
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)  # ranks share the cores; and a pool of threads stalls when another program takes one
    return torch.device("cpu")


@contextmanager
def _process_group(job: InRank, directory: Path, device: torch.device) -> Iterator[None]:
    backend = job.placement.backend
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interface = os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    try:
        dist.init_process_group(
            backend,
            init_method=(directory / STORE_FILE).as_uri(),
            rank=job.rank,
            world_size=job.placement.ranks,
            timeout=GROUP_TIMEOUT,
            device_id=device if backend == "nccl" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        over = f"gloo on interface {interface!r} (GLOO_SOCKET_IFNAME)" if backend == "gloo" else backend
        reason = str(error).splitlines()[0]
        raise DemoError(f"{job.name} could not meet the other ranks over {over}: {reason}") from error
    yield
    # Not after an error: the other ranks may be waiting in a collective, and the parent ends this process anyway.
    dist.destroy_process_group()


# Starts the processes of an act, listens to them, and leaves none behind.


EXIT_SECONDS = 20.0
"""For a process that has nothing more to do, or is dead. Only one that hangs takes so long: it is killed."""

GRACE_SECONDS = 1.0
"""For the reason why a rank fails: the death of another one, which is the error to show."""

_KEEP_MEMORY = {
    # glibc's malloc would hand the plain loop's gradients back to the kernel after each step and fault them in again:
    # that slows the plain loop down by more than the difference to be measured.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3),
    "MALLOC_TOP_PAD_": str(256 * 1024**2),
}


@contextmanager
def workers(jobs: Sequence[Job], text: bytes) -> "Iterator[Workers]":
    """A process for each of ``jobs``, for as long as the block runs.

    However it ends, no process and no file of theirs is left. SIGINT and SIGTERM stop it, and have their effect once
    nothing is left.
    """
    with waiting() as signalled, _workspace(text) as directory:
        started = Workers(signalled)
        try:
            started.start(jobs, directory)
            yield started
        finally:
            started.stop()


_QUIET = {
    # The profiler says on stderr that it began, that it ended, and that it will not tell of what was allocated before.
    "KINETO_LOG_LEVEL": "6",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class _StoppedError(BaseException):
    """A signal came."""


class Workers:
    """The processes of one act, by the number of their job. Whoever waits for an answer gets a ``DemoError`` when a
    process dies or fails."""

    def __init__(self, signalled: socket.socket) -> None:
        self._signalled = signalled
        self._names: list[str] = []
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []

    def start(self, jobs: Sequence[Job], directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        # A terminal sends Ctrl-C to all, and it must not interrupt a process that is still importing.
        # Files that torch makes in a process go with the directory: one that is killed removes none.
        with _environment({**_QUIET, **_KEEP_MEMORY, **os.environ, "TMPDIR": str(directory)}), blocked():
            for job in jobs:
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(job, directory, theirs), daemon=True)
                self._names.append(job.name)
                self._processes.append(process)
                self._pipes.append(ours)
                process.start()
                theirs.close()  # so that the pipe ends when the process does

    def tell(self, number: int, turn: Turn) -> None:
        with suppress(OSError):  # it is dead: its answer says so
            self._pipes[number].send(turn)

    def answer(self, number: int) -> Answer:
        """What the process says next."""
        self._ready([number])
        return self._receive(number)

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """All that they say, with their numbers, until each has finished."""
        running = set(range(len(self._pipes)))
        while running:
            for number in self._ready(running):
                message = self._receive(number)
                yield number, message
                if isinstance(message, Finished):
                    running.discard(number)

    def join(self) -> None:
        """Wait for processes that have said their last."""
        for process in self._processes:
            process.join(EXIT_SECONDS)

    def stop(self) -> None:
        """End every process that is still there. None of them holds anything that is not this one's to clean up."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()

    def _ready(self, numbers: Iterable[int]) -> list[int]:
        """Wait for answers of any of ``numbers``, or for a signal. Returns those who have answered."""
        by_pipe = {self._pipes[number]: number for number in numbers}
        ready = multiprocessing.connection.wait([self._signalled, *by_pipe])
        if self._signalled in ready:
            raise _StoppedError
        return [number for pipe, number in by_pipe.items() if pipe in ready]

    def _receive(self, number: int) -> Answer:
        try:
            message: Answer | Failed = self._pipes[number].recv()
        except (EOFError, OSError):
            self._processes[number].join(EXIT_SECONDS)
            raise self._death(number) from None
        if isinstance(message, Failed):
            # A rank that dies makes the others fail: theirs is not the error to show.
            dead = self._dead_beside(number)
            raise DemoError(message.message) if dead is None else self._death(dead)
        return message

    def _dead_beside(self, number: int) -> int | None:
        others = [process for other, process in enumerate(self._processes) if other != number]
        ended = multiprocessing.connection.wait([p.sentinel for p in others], GRACE_SECONDS) if others else []
        for process in others:
            if process.sentinel in ended:
                process.join(EXIT_SECONDS)
        return next((other for other, process in enumerate(self._processes) if process.exitcode), None)

    def _death(self, number: int) -> DemoError:
        code = self._processes[number].exitcode
        if code is None or code >= 0:
            return DemoError(f"{self._names[number]} ended before its training was done, with exit code {code}")
        name = signal.Signals(-code).name
        hint = ": by the system, if memory ran out" if name == "SIGKILL" else ""
        return DemoError(f"{self._names[number]} was killed by {name}{hint}")


@contextmanager
def _workspace(text: bytes) -> Iterator[Path]:
    """A directory that all processes see, with the text in it."""
    try:
        directory = tempfile.TemporaryDirectory(prefix="instep-demo-", ignore_cleanup_errors=True)
        (Path(directory.name) / TEXT_FILE).write_bytes(text)
    except OSError as error:
        raise DemoError(
            f"cannot make temporary files: {error.strerror}. Set TMPDIR to a directory with room"
        ) from error
    with directory:
        yield Path(directory.name)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set ``values`` for processes started meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
