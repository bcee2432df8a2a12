"""A body run on fresh ranks, of which some may die, forked from the process that has imported everything."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests import net
from tests.faults.cases import TIMEOUT
from tests.faults.harness import preload


def forked(world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``body`` on ``world`` ranks of one group; what each returned. A rank that died: ``None``.

    Raises ``AssertionError`` with the traceback if ``body`` raised.
    """
    preload()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="instep-fault-") as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(rank, world, folder, theirs, body, args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_answer(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(pipe: Connection) -> Any:
    try:
        error, value = pipe.recv() if pipe.poll(net.SECONDS / 2) else (f"no answer in {net.SECONDS / 2} s", None)
    except EOFError:
        return None
    assert error is None, error
    return value


def _serve(rank: int, world: int, folder: str, pipe: Connection, body: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    method = f"file://{Path(folder) / 'store'}"
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=timeout)
    try:
        pipe.send((None, body(*args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    pipe.close()
    os._exit(0)
