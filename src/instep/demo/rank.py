"""What runs in a rank's process."""

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from instep._signals import STOPPING
from instep.demo.errors import DemoError
from instep.demo.job import Failed, Job, Progress
from instep.demo.lockstep import train

GROUP_TIMEOUT = timedelta(minutes=10)
"""Long, for slow machines: the parent sees a rank that dies, and ends the others."""
TEXT_FILE = "text"
STORE_FILE = "store"


def serve(job: Job, rank: int, directory: Path, answers: Connection) -> None:
    """Train as ``rank`` of ``job``; send ``Progress`` (rank 0 alone), then ``Finished`` or ``Failed``.

    ``directory`` holds the text, and is where the ranks meet.
    """
    for number in STOPPING:  # a terminal sends Ctrl-C to all: the parent decides
        signal.signal(number, signal.SIG_IGN)
    _exit_with_parent(directory)
    try:
        device = _set_up(job, rank)
        with _process_group(job, rank, directory, device):
            text = (directory / TEXT_FILE).read_bytes()
            answers.send(train(job, text, rank, device, _teller(rank, answers)))
    except DemoError as error:
        answers.send(Failed(str(error)))
    except Exception:
        answers.send(Failed(f"rank {rank} failed:\n{traceback.format_exc()}"))


def _exit_with_parent(directory: Path) -> None:
    """Should the parent be killed, do what it can no longer do."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="instep-demo-parent", daemon=True).start()


def _teller(rank: int, answers: Connection) -> Callable[[Progress], None]:
    return answers.send if rank == 0 else lambda progress: None


def _set_up(job: Job, rank: int) -> torch.device:
    if job.placement.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
        torch.use_deterministic_algorithms(True)
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)  # ranks share the cores; and a pool of threads stalls when another program takes one
    return torch.device("cpu")


@contextmanager
def _process_group(job: Job, rank: int, directory: Path, device: torch.device) -> Iterator[None]:
    backend = job.placement.backend
    if backend is None:
        yield
        return
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interface = os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    try:
        dist.init_process_group(
            backend,
            init_method=(directory / STORE_FILE).as_uri(),
            rank=rank,
            world_size=job.placement.ranks,
            timeout=GROUP_TIMEOUT,
            device_id=device if backend == "nccl" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        over = f"gloo on interface {interface!r} (GLOO_SOCKET_IFNAME)" if backend == "gloo" else backend
        reason = str(error).splitlines()[0]
        raise DemoError(f"rank {rank} could not meet the other ranks over {over}: {reason}") from error
    yield
    # Not after an error: the other ranks may be waiting in a collective, and the parent ends this process anyway.
    dist.destroy_process_group()
