"""Where a process of the demo begins."""

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from instep._signals import STOPPING
from instep.demo.alone import train_alone
from instep.demo.errors import DemoError
from instep.demo.job import Alone, Failed, InRank, Job
from instep.demo.lockstep import train_in_lockstep

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
