"""Processes forked from one that has imported everything: a rank then starts in milliseconds.

On a GPU they are spawned: what is imported asks CUDA for its devices, and who has done so cannot be forked.
"""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from tests.accelerator import ACCELERATOR, EMULATED

ROOT = Path(__file__).parents[1]


def forking() -> ForkServerContext | SpawnContext:
    """A context of ``multiprocessing``. The process to fork from is started with the first."""
    if ACCELERATOR != EMULATED:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # One thread: a child has none of the others, and would wait for them.
    changed = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        context.set_forkserver_preload(["tests.warm"])
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context
