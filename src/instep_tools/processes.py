"""The device and the ranks that a command runs on, and the processes of the ranks.

``run_on_ranks`` has each rank do its work in a process of its own. However it ends, no process is left, and no file:
``torch.multiprocessing`` ends all ranks when one fails, and, on Linux, when the parent is killed.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from instep_tools.output import CannotRunError
from instep_tools.signals import STOPPING, waiting

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def device_of(given: str | None) -> torch.device:
    """Return the device with this name, ``None``: the accelerator that torch finds, or the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if given is None:
        return torch.device("cpu") if found is None else torch.device(found.type, 0)
    try:
        wanted = torch.device(given)
    except RuntimeError as error:
        raise CannotRunError(f"--device {given}: torch does not know it. Give cpu, cuda, mps or xpu") from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    if found is None or found.type != wanted.type:
        there = "no accelerator" if found is None else f"{found.type} and the CPU"
        raise CannotRunError(f"--device {given}: this torch finds {there}. See `instep env`")
    if (wanted.index or 0) >= torch.accelerator.device_count():
        raise CannotRunError(f"--device {given}: there are {torch.accelerator.device_count()} of them")
    return torch.device(wanted.type, wanted.index or 0)


def ranks_of(given: int | None, device: torch.device) -> int:
    """Return how many ranks there are to be on this kind of device; ``None``: two, where there are two devices."""
    if given is not None and given < 1:
        raise CannotRunError(f"--ranks {given}: give 1 for one device, or 2 and more for data parallel training")
    if not dist.is_available():
        if given is not None and given > 1:
            raise CannotRunError(f"--ranks {given}: this torch was built without torch.distributed")
        return 1
    if device.type != "cpu":
        there = torch.accelerator.device_count()
        if given is not None and given > there:
            raise CannotRunError(f"--ranks {given}: each rank takes a device, and there are {there}")
        return min(2, there) if given is None else given
    cores = os.cpu_count() or 1
    most = max(4, cores)  # a few ranks may share cores; more take longer than anybody waits
    if given is not None and given > most:
        raise CannotRunError(f"--ranks {given}: at most {most} on this machine, which has {cores} CPU cores")
    return given or 2


def name_of(device: torch.device) -> str:
    """Return the device, with the name of its model where the backend tells one."""
    told = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if told is None else f"{device} ({told(device)})"


@contextmanager
def deterministic() -> Iterator[None]:
    """The same program gives the same bits in this block."""
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault(_CUBLAS, ":4096:8")  # cuBLAS reads it when it is used first
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU torch computes with one thread in this block: a pool stalls when another program takes one of its."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_ENVIRONMENT = {
    # glibc's malloc would hand the plain loop's gradients back to the kernel after each step and fault them in again:
    # that slows the plain loop down by more than the difference to be measured.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3),
    "MALLOC_TOP_PAD_": str(256 * 1024**2),
    # The profiler says on stderr that it began, that it ended, and that it will not tell of what was allocated before.
    "KINETO_LOG_LEVEL": "6",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Without a name gloo asks for the address of the host's name, which a laptop may not resolve.
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
}
SECONDS = 600.0
"""How long ranks wait for each other, and for how long they may say nothing; long, for slow machines."""


def run_on_ranks(
    count: int,
    kind: str,
    work: Callable[..., Any],
    *arguments: Any,
    told: Callable[..., object] = print,
    seconds: float = SECONDS,
) -> list[Any]:
    """Have ``count`` processes do ``work``, and return what each has returned, in the order of ranks.

    Args:
        kind: of device.
        work: is given the rank's device, a function that tells the parent something, and ``arguments``.
        told: is told what ranks tell.

    Raises:
        CannotRunError: a rank has failed, has died, or has said nothing for ``seconds``.
    """
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="instep-", ignore_cleanup_errors=True) as directory:
        answers = mp.get_context("spawn").SimpleQueue()
        # Files that torch makes in a process go with the directory: one that is killed removes none.
        with waiting(), patch.dict(os.environ, {**_ENVIRONMENT, **os.environ, "TMPDIR": directory}), _blocked():
            job = (count, kind, directory, seconds, answers, work, arguments)
            started = mp.start_processes(_serve, job, count, join=False, daemon=True, start_method="spawn")
        try:
            last = perf_counter()
            while len(results) < count:
                has_ended = started.join(timeout=0.1)
                while not answers.empty():
                    last = perf_counter()
                    rank, is_result, said = answers.get()
                    if isinstance(said, CannotRunError):
                        raise said
                    if is_result:
                        results[rank] = said
                    else:
                        told(*said)
                if perf_counter() - last > seconds or (has_ended and len(results) < count):
                    raise CannotRunError(f"a rank gave no answer in {perf_counter() - last:.0f} s")
        except ProcessRaisedException as error:
            raise CannotRunError(f"rank {error.error_index} failed:{error}") from error
        except ProcessExitedException as error:
            how = f"was killed by {error.signal_name}" if error.signal_name else f"ended with {error.exit_code}"
            hint = ": by the system, if memory ran out" if error.signal_name == "SIGKILL" else ""
            raise CannotRunError(f"rank {error.error_index} {how}{hint}") from error
        finally:
            for process in started.processes:
                process.kill()
                process.join()
    return [results[rank] for rank in range(count)]


@contextmanager
def _blocked() -> Iterator[None]:
    """Processes that are started in this block get neither signal before they ask for it: a terminal sends Ctrl-C to
    all, and one that still imports would print where it was."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # else Python 3.11 unblocks both with the first process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(
    rank: int, count: int, kind: str, directory: str, seconds: float, answers: Any, work: Any, arguments: Any
) -> None:
    """What each process does."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it at once, wherever it is
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    if kind == "cpu":
        torch.set_num_threads(1)  # ranks share the cores; and a pool of threads stalls when another program takes one
    else:
        torch.accelerator.set_device_index(rank)
    try:
        with deterministic():
            if count > 1:
                backend = dist.get_default_backend_for_device(device)
                store = dist.FileStore(os.path.join(directory, "store"), count)
                timeout = timedelta(seconds=seconds / 2)
                dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
            result = work(device, lambda *said: answers.put((rank, False, said)), *arguments)
            answers.put((rank, True, result))
            if count > 1:
                dist.destroy_process_group()
    except CannotRunError as error:
        answers.put((rank, True, error))
