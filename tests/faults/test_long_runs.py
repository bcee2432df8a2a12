"""Long runs: attach and detach, other schedules, checkpoints and faults in between, step after step.

Nothing grows, and at the end the weights are the plain loop's.
"""

import copy
import gc
import os
import shutil
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import NonFiniteGradientError, TornStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import batch
from tests.checkpoint import saved
from tests.distributed.pool import RankPool

PERIOD = 50  # steps between two attachments
OPTIONS: list[dict[str, Any]] = [
    {"schedule": "backward"},
    {"schedule": "forward", "defer": True},
    {"schedule": "backward", "undo": True},
    {"schedule": "forward", "defer": True, "clip": instep.ClipNorm(0.5), "nonfinite": "skip"},
    {"schedule": "backward", "undo": True, "clip": instep.ClipNorm(0.5), "nonfinite": "raise"},
]


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 10))
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model, bucket_cap_mb=0.001)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.overlap: Any = None

    def loss(self, i: int) -> torch.Tensor:
        x, y = batch(2 * i + (dist.get_rank() if dist.is_initialized() else 0))
        return nn.functional.cross_entropy(self.model(x), y)

    def learn(self, i: int, clip: Any) -> None:
        self.loss(i).backward()
        if self.overlap is None and clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def fail(loop: Loop, i: int, options: dict[str, Any], folder: Path) -> None:
    """A gradient that is infinite, on all ranks: left out, put back, or torn and then loaded."""
    handle = next(loop.model.parameters()).register_hook(lambda g: g / 0)
    try:
        (loop.loss(i)).backward()
        if options.get("nonfinite") is None and options["schedule"] == "backward":
            raise ZeroDivisionError
        if options.get("nonfinite") is None:
            loop.optimizer.zero_grad()
            return
        loop.optimizer.step()
    except (ZeroDivisionError, NonFiniteGradientError):
        pass
    finally:
        handle.remove()
    if options.get("nonfinite") is None and not options.get("undo"):
        with pytest.raises((TornStepError, RuntimeError)):
            loop.loss(i)  # the step was never committed
        saved.load(folder, loop.model, loop.optimizer, loop.overlap)
    loop.optimizer.zero_grad()


def resources() -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "tensors": sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def run(steps: int, folder: str) -> tuple[str | None, dict[str, int], dict[str, int]]:
    plain, loop = Loop(), Loop()
    before: dict[str, int] = {}
    for start in range(0, steps, PERIOD):
        options = OPTIONS[start // PERIOD % len(OPTIONS)]
        loop.overlap = instep.attach(loop.model, loop.optimizer, **options)
        for i in range(start, start + PERIOD):
            plain.learn(i, options.get("clip"))
            loop.learn(i, options.get("clip"))
            if i == start + PERIOD // 2:
                checkpoint = Path(folder) / str(i)
                saved.save(checkpoint, loop.model, loop.optimizer, loop.overlap)
                fail(loop, 10 * steps, options, checkpoint)
                if not dist.is_initialized():
                    shutil.rmtree(checkpoint)
        loop.overlap.detach()
        loop.overlap = None
        if start // PERIOD == 2 * len(OPTIONS) - 1:
            before = resources()
    difference = first_difference(
        training_state(plain.model, [plain.optimizer]), training_state(loop.model, [loop.optimizer])
    )
    assert not loop.model._forward_pre_hooks
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert all(p.grad is None for p in loop.model.parameters())
    return difference, before, resources()


def assert_nothing_grew(before: dict[str, int], after: dict[str, int], steps: int) -> None:
    assert (after["threads"], after["files"]) == (before["threads"], before["files"])
    assert after["tensors"] <= before["tensors"], "fewer: what other tests had left in this process is freed meanwhile"
    # Allocators keep what they had once: a few MiB, however long it runs. A leak of one of the model's tensors per
    # step would be more than 1 KiB of each.
    assert after["bytes"] - before["bytes"] < 8 * 2**20 + 200 * steps


def alone() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))


@pytest.mark.parametrize("steps", [1_500, pytest.param(20_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_on_one_device(steps: int, tmp_path: Path) -> None:
    """In a process of its own: memory of one that has run other tests grows and shrinks with what they have left."""
    with alone() as process:
        difference, before, after = process.submit(run, steps, str(tmp_path)).result()
    assert difference is None
    assert_nothing_grew(before, after, steps)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [1_000, 20_000])
def test_on_two_ranks(steps: int, tmp_path: Path) -> None:
    pool = RankPool(2, body_seconds=3_000)
    try:
        for difference, before, after in pool.run(run, steps, str(tmp_path)):
            assert difference is None
            assert_nothing_grew(before, after, steps)
    finally:
        pool.stop()


def leak() -> tuple[dict[str, int], dict[str, int]]:
    before = resources()
    kept = [copy.deepcopy(torch.zeros(8)) for _ in range(3)]
    after = resources()
    assert kept
    return before, after


def test_a_leak_would_be_found() -> None:
    """In a process of its own too: elsewhere, what other tests had left and is freed meanwhile would hide the leak."""
    with alone() as process:
        before, after = process.submit(leak).result()
    assert after["tensors"] == before["tensors"] + 3
    with pytest.raises(AssertionError):
        assert_nothing_grew(before, after, 1)
