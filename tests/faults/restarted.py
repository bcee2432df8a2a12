"""A job for torchrun that is killed once and started again: ``restarted.py plain|torch|instep FOLDER FAULT``."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.sources.ddp.reducer import ReducerGroup
from tests.cases import Blocks, batch
from tests.checkpoint import saved
from tests.faults import program

STEPS = 12
KILLED_AT = 5


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, file: Path) -> None:
    """What a loop does by itself."""
    new = file.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
    new.rename(file)


def save_by_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, overlap: instep.Attachment, folder: Path) -> None:
    """On all ranks, into a folder that gets its name once it is whole."""
    new = folder / f"unfinished-{overlap.step_count}"
    saved.save(new, model, optimizer, overlap)
    if dist.get_rank() == 0:
        new.rename(folder / f"step-{overlap.step_count:06}")
    dist.barrier()


def load_by_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, overlap: instep.Attachment, folder: Path) -> int:
    """The step to go on with."""
    if found := sorted(folder.glob("step-*")):
        saved.load(found[-1], model, optimizer, overlap)
    return overlap.step_count


def load(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> int:
    """The step to go on with."""
    if not file.exists():
        return 0
    found = torch.load(file, weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return int(found["step"])


def kill_in_flight() -> None:
    """The next collective of a bucket is this process's last."""
    for owner, name in ((dist, "all_reduce"), (ReducerGroup, "_reduce")):
        real = getattr(owner, name)

        def call(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, call)


def main(way: str, folder: Path, fault: bool) -> None:
    # A store of its own for each attempt: that of torchrun still has the addresses of the last one.
    store = f"file://{folder}/store{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    place: dict[str, Any] = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", init_method=store, timeout=timedelta(seconds=60), **place)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = DistributedDataParallel(Blocks(), bucket_cap_mb=program.BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    file, once = folder / "checkpoint", folder / "killed"
    overlap = instep.attach(model, optimizer, schedule="backward") if way == "instep" else None
    first = load(model, optimizer, file) if overlap is None else load_by_dcp(model, optimizer, overlap, folder)
    if way == "torch":
        overlapped = program.with_torchs_own_overlap(model)  # noqa: F841  # kept for as long as it is used
    for step in range(first, STEPS):
        if fault and rank == 1 and step == KILLED_AT and not once.exists():
            once.touch()
            if way == "plain":
                os.kill(os.getpid(), signal.SIGKILL)
            kill_in_flight()
        x, y = batch(1000 * rank + step)
        nn.functional.cross_entropy(model(x), y).backward()
        if way != "torch":
            optimizer.step()
        optimizer.zero_grad()
        if overlap is not None:
            save_by_dcp(model, optimizer, overlap, folder)
        elif rank == 0:
            save(model, optimizer, step + 1, file)
        if way == "torch":
            time.sleep(0.005)
    if rank == 0:
        print("weights", program.digest(model.parameters()), flush=True)
    dist.barrier()
    os._exit(0)  # destroying the group of a job that was started again hangs now and then


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "1")
