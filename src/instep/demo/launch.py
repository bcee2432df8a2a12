"""Starts the ranks, listens to them, and leaves none behind."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from instep._signals import blocked, waiting
from instep.demo.errors import DemoError
from instep.demo.job import Failed, Finished, Job, Progress
from instep.demo.rank import TEXT_FILE, serve

EXIT_SECONDS = 20.0
"""For a rank that has nothing more to do, or is dead. Only a rank that hangs takes so long: it is killed."""

GRACE_SECONDS = 1.0
"""For what makes a rank fail: the death of another one, which is the error to show."""

_KEEP_MEMORY = {
    # glibc's malloc would hand the plain loop's gradients back to the kernel after each step and fault them in again.
    # That slows it down by more than the difference to be measured, and is not what instep is about.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3),
    "MALLOC_TOP_PAD_": str(256 * 1024**2),
}


def launch(job: Job, text: bytes, tell: Callable[[Progress], None]) -> list[Finished]:
    """Run ``job`` in one process per rank; the ranks' answers in rank order.

    However it ends, no process and no file of it is left. Raises ``DemoError`` when a rank dies or fails. SIGINT and
    SIGTERM stop it, and have their effect once nothing is left.
    """
    with waiting() as signalled, _workspace(text) as directory:
        ranks = _Ranks(signalled)
        try:
            ranks.start(job, directory)
            return ranks.listen(tell)
        finally:
            ranks.stop()


_QUIET = {
    # The profiler says on stderr that it began, that it ended, and that it will not tell of what was allocated before.
    "KINETO_LOG_LEVEL": "6",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class _StoppedError(BaseException):
    """A signal came."""


class _Ranks:
    def __init__(self, signalled: socket.socket) -> None:
        self._signalled = signalled
        self._processes: list[SpawnProcess] = []
        self._answers: list[Connection] = []

    def start(self, job: Job, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        # A terminal sends Ctrl-C to all, and it must not interrupt a rank that is still importing.
        # Files that torch makes in a rank go with the directory: a rank that is killed removes none.
        with _environment({**_QUIET, **_KEEP_MEMORY, **os.environ, "TMPDIR": str(directory)}), blocked():
            for rank in range(job.placement.ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=serve, args=(job, rank, directory, theirs), daemon=True)
                self._processes.append(process)
                self._answers.append(ours)
                process.start()
                theirs.close()  # so that the pipe ends when the rank does

    def listen(self, tell: Callable[[Progress], None]) -> list[Finished]:
        finished: dict[int, Finished] = {}
        while len(finished) < len(self._answers):
            for rank in self._ready(set(range(len(self._answers))) - finished.keys()):
                message = self._receive(rank)
                if isinstance(message, Finished):
                    finished[rank] = message
                else:
                    tell(message)
        for process in self._processes:
            process.join(EXIT_SECONDS)
        return [finished[rank] for rank in sorted(finished)]

    def stop(self) -> None:
        """End every process that is still there. None of them holds anything that is not this one's to clean up."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()

    def _ready(self, ranks: Iterable[int]) -> list[int]:
        """Wait for answers of any of ``ranks``, or for a signal. Returns those who have answered."""
        by_answers: dict[object, int] = {self._answers[rank]: rank for rank in ranks}
        ready = multiprocessing.connection.wait([self._signalled, *(self._answers[rank] for rank in ranks)])
        if self._signalled in ready:
            raise _StoppedError
        return [by_answers[answers] for answers in ready]

    def _receive(self, rank: int) -> Progress | Finished:
        try:
            message = self._answers[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(EXIT_SECONDS)
            raise self._death(rank) from None
        if isinstance(message, Failed):
            # A rank that dies makes the others fail: theirs is not the error to show.
            dead = self._dead_beside(rank)
            raise DemoError(message.message) if dead is None else self._death(dead)
        answer: Progress | Finished = message
        return answer

    def _dead_beside(self, rank: int) -> int | None:
        others = [process for other, process in enumerate(self._processes) if other != rank]
        ended = multiprocessing.connection.wait([p.sentinel for p in others], GRACE_SECONDS) if others else []
        for process in others:
            if process.sentinel in ended:
                process.join(EXIT_SECONDS)
        return next((other for other, process in enumerate(self._processes) if process.exitcode), None)

    def _death(self, rank: int) -> DemoError:
        code = self._processes[rank].exitcode
        if code is None or code >= 0:
            return DemoError(f"rank {rank} ended before its training was done, with exit code {code}")
        name = signal.Signals(-code).name
        hint = ": by the system, if memory ran out" if name == "SIGKILL" else ""
        return DemoError(f"rank {rank} was killed by {name}{hint}")


@contextmanager
def _workspace(text: bytes) -> Iterator[Path]:
    """A directory that all ranks see, with the text in it."""
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
