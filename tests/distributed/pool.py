"""A few ranks, started once, that run test bodies together over gloo on loopback."""

import faulthandler
import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import tests.manual_seed  # noqa: F401
from tests import net
from tests.accelerator import EMULATED
from tests.forking import forking
from tests.judged import own_steps_are_proved

GROUP_SECONDS = 120
"""Of a collective. Only a rank that hangs is waited for so long."""
OTHERS_SECONDS = 5
"""For the errors of the others, once a rank has failed: they may be waiting for it."""


Body = TypeVar("Body", bound=Callable[..., Any])


class BodyFailedError(AssertionError):
    """A rank's body raised; the message is its traceback."""


RACES = "races"


def races(body: Body) -> Body:
    """A body that on an accelerator races with an update, and is told so: the order of launches is not checked."""
    setattr(body, RACES, True)
    return body


class RankPool:
    """``world_size`` processes in one process group. Started when first used, and again after a failure."""

    def __init__(
        self,
        world_size: int,
        body_seconds: float = net.SECONDS,
        group_seconds: float = GROUP_SECONDS,
        backend: str = "gloo",
        around: Callable[[bool], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """``around`` is what each body runs in. It is told whether all launches of the body must be ordered."""
        self.world_size = world_size
        self._backend, self._around = backend, around
        self._body_seconds = body_seconds
        self._group_seconds = group_seconds
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``body`` on every rank; its results in rank order. ``body`` is a module-level function."""
        self._send(body, args, kwargs)
        answers = self._answers()
        failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failed:
            self.stop()  # the ranks may be at different collectives now
            raise BodyFailedError("\n".join(failed))
        return [value for _, value in answers]

    def run_until_a_rank_dies(self, survivor: int, body: Callable[..., Any], *args: Any) -> Any:
        """Call ``body`` on every rank, one of which it ends; the survivor's result. The pool is stopped."""
        self._send(body, args, {})
        ok, value = self._answer(survivor)
        self.stop()
        assert ok, value
        return value

    def _send(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((body, args, kwargs))

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        context = forking()
        self._directory = tempfile.TemporaryDirectory(prefix="instep-ranks-")
        rendezvous = Path(self._directory.name) / "store"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, self._group_seconds, str(rendezvous), theirs, self._backend, self._around)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank in range(self.world_size):
            ok, value = self._answer(rank)
            assert ok, value

    def _answers(self) -> list[tuple[bool, Any]]:
        """Of all ranks, in rank order; or of some, once one has failed."""
        answers: dict[int, tuple[bool, Any]] = {}
        last = time.monotonic() + self._body_seconds
        while len(answers) < self.world_size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, max(0.0, last - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in enumerate(self._pipes) if pipe in ready]:
                answers[rank] = self._answer(rank)
                if not answers[rank][0]:
                    last = min(last, time.monotonic() + OTHERS_SECONDS)
        return [answers.get(rank, (False, "no answer")) for rank in range(self.world_size)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        if not pipe.poll(self._body_seconds):
            self.stop()
            raise BodyFailedError(f"rank {rank} of {self.world_size} did not answer within {self._body_seconds} s")
        try:
            answer: tuple[bool, Any] = pipe.recv()
        except EOFError:
            self._processes[rank].join(net.SECONDS)
            code = self._processes[rank].exitcode
            self.stop()
            raise BodyFailedError(f"rank {rank} of {self.world_size} died with exit code {code}") from None
        return answer


def _on_a_gpu(rank: int, world_size: int) -> None:
    """Where there are fewer GPUs than ranks, NCCL takes these for machines of their own, and lets them share one."""
    count = torch.cuda.device_count()
    torch.cuda.set_device(rank % count)
    if count < world_size:
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def _serve(
    rank: int,
    world_size: int,
    group_seconds: float,
    rendezvous: str,
    pipe: Connection,
    backend: str,
    around: Callable[[bool], AbstractContextManager[Any]],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    faulthandler.enable()  # a rank that crashes says where
    if "cuda" in backend:
        _on_a_gpu(rank, world_size)
    if backend == EMULATED:
        from tests.accelerator.backend import register

        register()
    timeout = timedelta(seconds=group_seconds)
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout
    )
    # What torch has loaded is there for good. attach() asks the garbage collector for DDP's instances, and to look
    # through all of it takes longer than most bodies.
    gc.collect()
    gc.freeze()
    pipe.send((True, None))
    while True:
        try:
            body, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            with around(not getattr(body, RACES, False)), own_steps_are_proved():
                result = body(*args, **kwargs)
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
