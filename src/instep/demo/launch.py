"""Starts the ranks, listens to them, and leaves none behind."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from instep.demo.errors import DemoError
from instep.demo.job import Failed, Finished, Job, Progress
from instep.demo.rank import TEXT_FILE, serve

EXIT_SECONDS = 5.0

_KEEP_MEMORY = {
    # glibc's malloc would hand the plain loop's gradients back to the kernel after each step and fault them in again.
    # That slows it down by more than the difference to be measured, and is not what instep is about.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3),
    "MALLOC_TOP_PAD_": str(256 * 1024**2),
}


def launch(job: Job, text: bytes, tell: Callable[[Progress], None]) -> list[Finished]:
    """Run ``job`` in one process per rank; the ranks' answers in rank order.

    However it ends, no process and no file of it is left. Raises ``DemoError`` when a rank dies or fails.
    """
    with _workspace(text) as directory:
        ranks = _Ranks()
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


class _Ranks:
    def __init__(self) -> None:
        self._processes: list[SpawnProcess] = []
        self._answers: list[Connection] = []

    def start(self, job: Job, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        # What is ignored stays ignored in a new process: Ctrl-C must not interrupt it while it is importing.
        with _environment({**_QUIET, **_KEEP_MEMORY}), _ignored(signal.SIGINT):
            for rank in range(job.placement.ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=serve, args=(job, rank, directory, theirs), daemon=True)
                self._processes.append(process)
                self._answers.append(ours)
                process.start()
                theirs.close()  # so that the pipe ends when the rank does

    def listen(self, tell: Callable[[Progress], None]) -> list[Finished]:
        finished: dict[int, Finished] = {}
        waiting: dict[object, int] = {answers: rank for rank, answers in enumerate(self._answers)}
        while waiting:
            for answers in multiprocessing.connection.wait([self._answers[rank] for rank in waiting.values()]):
                message = self._receive(waiting[answers])
                if isinstance(message, Finished):
                    finished[waiting.pop(answers)] = message
                else:
                    tell(message)
        for process in self._processes:
            process.join(EXIT_SECONDS)
        return [finished[rank] for rank in sorted(finished)]

    def stop(self) -> None:
        """End every process that is still there: by SIGTERM, then by SIGKILL."""
        with _ignored(signal.SIGINT, signal.SIGTERM):
            started = [process for process in self._processes if process.pid is not None]
            for process in started:
                process.terminate()
            for process in started:
                process.join(EXIT_SECONDS)
                process.kill()
                process.join()

    def _receive(self, rank: int) -> Progress | Finished:
        try:
            message = self._answers[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(EXIT_SECONDS)
            raise self._death(rank) from None
        if isinstance(message, Failed):
            # A rank that dies makes the others fail: theirs is not the error to show.
            dead = [other for other, process in enumerate(self._processes) if process.exitcode]
            raise self._death(dead[0]) if dead else DemoError(message.message)
        answer: Progress | Finished = message
        return answer

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
    """Set those of ``values`` that the user has not set, for processes started meanwhile."""
    added = values.keys() - os.environ.keys()
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _ignored(*signals: signal.Signals) -> Iterator[None]:
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
