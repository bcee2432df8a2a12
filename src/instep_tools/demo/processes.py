"""The processes of the demo: the parent starts them, hears them and ends them (``workers``), and each does its job
(``serve``).

Whatever happens, no process and no file is left. The parent decides about signals: a terminal sends Ctrl-C to all
processes, and the children ignore it. A process that dies or fails is a ``DemoError`` in the parent, and if the parent
is killed, its children end themselves.
"""

import gc
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
from typing import NamedTuple

import torch
import torch.distributed as dist

from instep_tools.demo.job import Alone, Answer, DemoError, InRank, ProcessJob, RankResult, Turn
from instep_tools.signals import STOPPING, blocked, waiting

TEXT_FILE = "text"
STORE_FILE = "store"


@contextmanager
def workers(jobs: Sequence[ProcessJob], text: bytes) -> "Iterator[Workers]":
    """Run a process for each of ``jobs``, for as long as the block runs.

    However the block ends, no process and no file of theirs is left. SIGINT and SIGTERM stop the block, and have their
    effect once nothing is left.
    """
    with waiting() as signalled, _workspace(text) as directory:
        started = Workers(signalled, directory)
        try:
            started.give(jobs)
            yield started
        finally:
            started.stop()


@contextmanager
def _workspace(text: bytes) -> Iterator[Path]:
    """Yield a directory that all processes see, with the text in it."""
    try:
        directory = tempfile.TemporaryDirectory(prefix="instep-demo-", ignore_cleanup_errors=True)
        (Path(directory.name) / TEXT_FILE).write_bytes(text)
    except OSError as error:
        raise DemoError(
            f"cannot make temporary files: {error.strerror}. Set TMPDIR to a directory with room"
        ) from error
    with directory:
        yield Path(directory.name)


EXIT_SECONDS = 20.0
"""How long a process may take to end that has nothing more to do, or is dead. One that hangs is killed."""
GRACE_SECONDS = 1.0
"""How long to wait for the death of another rank when one fails: that death is the reason, and the error to show."""
_KEEP_MEMORY = {
    # glibc's malloc would hand the plain loop's gradients back to the kernel after each step and fault them in again:
    # that slows the plain loop down by more than the difference to be measured.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3),
    "MALLOC_TOP_PAD_": str(256 * 1024**2),
}
_QUIET = {
    # The profiler says on stderr that it began, that it ended, and that it will not tell of what was allocated before.
    "KINETO_LOG_LEVEL": "6",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class _StoppedError(BaseException):
    """A signal came while the parent waited. No ``Exception``: only the end of ``workers`` may handle it."""


class _Worker(NamedTuple):
    """A process, with the pipe to it."""

    name: str
    process: SpawnProcess
    pipe: Connection


class Workers:
    """The processes of the demo, by the number of their job. Waiting for an answer raises a ``DemoError`` when a
    process dies or fails."""

    def __init__(self, signalled: socket.socket, directory: Path) -> None:
        self._signalled = signalled
        self._directory = directory
        self._workers: list[_Worker] = []
        self._jobs = 0

    def give(self, jobs: Sequence[ProcessJob]) -> None:
        """Give a job to each of as many processes. Those that are there have sent their last answer, and do it next: a
        new process imports torch for seconds."""
        self._jobs = len(jobs)
        for number, (worker, job) in enumerate(zip(self._workers, jobs, strict=False)):
            self._workers[number] = worker._replace(name=job.name)
            self._send(number, job)
        self._start(jobs[len(self._workers) :])

    def _start(self, jobs: Sequence[ProcessJob]) -> None:
        context = multiprocessing.get_context("spawn")
        # A terminal sends Ctrl-C to all, and must not interrupt a process that is still importing: hence ``blocked``.
        # Files that torch makes in a process go with the directory: one that is killed removes none.
        with _environment({**_QUIET, **_KEEP_MEMORY, **os.environ, "TMPDIR": str(self._directory)}), blocked():
            for job in jobs:
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(job, self._directory, theirs), daemon=True)
                # Before it starts: ``stop`` must find it, whatever is raised from here on.
                self._workers.append(_Worker(job.name, process, ours))
                process.start()
                theirs.close()  # so that the pipe ends when the process does

    def tell(self, number: int, turn: Turn) -> None:
        """Tell a process what to do next."""
        self._send(number, turn)

    def _send(self, number: int, said: Turn | ProcessJob | None) -> None:
        with suppress(OSError):  # it is dead: its answer says so
            self._workers[number].pipe.send(said)

    def answer(self, number: int) -> Answer:
        """Wait for the next answer of a process."""
        self._ready([number])
        return self._receive(number)

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Yield all answers, with the numbers of their processes, until each rank has sent its result."""
        running = set(range(self._jobs))
        while running:
            for number in self._ready(running):
                answer = self._receive(number)
                yield number, answer
                if isinstance(answer, RankResult):
                    running.discard(number)

    def join(self) -> None:
        """End processes that have sent their last answer, and wait for their ends."""
        for number in range(len(self._workers)):
            self._send(number, None)
        for worker in self._workers:
            worker.process.join(EXIT_SECONDS)

    def stop(self) -> None:
        """Kill every process that is still there. None of them holds anything that the parent does not clean up."""
        started = [worker.process for worker in self._workers if worker.process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()

    def _ready(self, numbers: Iterable[int]) -> list[int]:
        """Wait for answers of any of ``numbers``, or for a signal. Return those that have answered."""
        by_pipe = {self._workers[number].pipe: number for number in numbers}
        ready = multiprocessing.connection.wait([self._signalled, *by_pipe])
        if self._signalled in ready:
            raise _StoppedError
        return [number for pipe, number in by_pipe.items() if pipe in ready]

    def _receive(self, number: int) -> Answer:
        worker = self._workers[number]
        try:
            answer: Answer | DemoError = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(EXIT_SECONDS)
            raise _death(worker) from None
        if isinstance(answer, DemoError):
            # A rank that dies makes the others fail: theirs is not the error to show.
            dead = self._dead_beside(worker)
            raise answer if dead is None else _death(dead)
        return answer

    def _dead_beside(self, failed: _Worker) -> _Worker | None:
        """Return a process that died, after a moment in which another one than ``failed`` may do so."""
        others = [worker.process for worker in self._workers if worker is not failed]
        ended = multiprocessing.connection.wait([p.sentinel for p in others], GRACE_SECONDS) if others else []
        for process in others:
            if process.sentinel in ended:
                process.join(EXIT_SECONDS)  # its exit code is known after that only
        return next((worker for worker in self._workers if worker.process.exitcode), None)


def _death(worker: _Worker) -> DemoError:
    code = worker.process.exitcode
    if code is None or code >= 0:
        return DemoError(f"{worker.name} ended before its training was done, with exit code {code}")
    name = signal.Signals(-code).name
    hint = ": by the system, if memory ran out" if name == "SIGKILL" else ""
    return DemoError(f"{worker.name} was killed by {name}{hint}")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set ``values`` in the environment of processes that the block starts."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


GROUP_TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for each other; long, for slow machines: the parent sees a rank that dies, and ends the rest."""


def serve(job: ProcessJob, directory: Path, pipe: Connection) -> None:
    """Do ``job`` in this process, and those that come through ``pipe``. Answer through it; with a ``DemoError`` if a
    job cannot be done.

    ``directory`` holds the text, and is where ranks meet.
    """
    for number in STOPPING:  # a terminal sends Ctrl-C to all: the parent decides
        signal.signal(number, signal.SIG_IGN)
    _exit_with_parent(directory)
    from instep_tools.demo.loops import (  # takes seconds, and the parent has no use for it
        train_alone,
        train_in_lockstep,
    )

    try:
        text = (directory / TEXT_FILE).read_bytes()
        doing: ProcessJob | None = job
        while doing is not None:
            if isinstance(doing, Alone):
                train_alone(doing, text, _set_up(doing.device, 0), pipe)
            else:
                device = _set_up(doing.placement.device, doing.rank)
                with _process_group(doing, directory, device):
                    train_in_lockstep(doing, text, device, pipe.send)
            gc.collect()  # the last job's model: an accelerator's peak counts all that is alive
            doing = pipe.recv()
    except EOFError:  # the parent is gone, or about to kill this process
        return
    except DemoError as error:
        pipe.send(error)
    except Exception:
        pipe.send(DemoError(f"{job.name} failed:\n{traceback.format_exc()}"))


def _exit_with_parent(directory: Path) -> None:
    """Remove the files and end this process as soon as the parent is dead, which can no longer do so."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        # All children do this at once, and each may find files gone. No clean-up of Python's: a thread may hang.
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="instep-demo-parent", daemon=True).start()


def _set_up(kind: str, number: int) -> torch.device:
    """Return this process's device, on which the same program gives the same bits."""
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
    """Meet the other ranks, for as long as the block runs."""
    backend = job.placement.backend
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # Without a name gloo asks for the address of the host's name, which a laptop may not resolve.
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
