"""The same comparison on several ranks of one machine: DistributedDataParallel, ``replicate`` and ``fully_shard``."""

import multiprocessing
import multiprocessing.connection
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from instep import attach, replicate
from instep_tools.selftest.features import STEPS, WAYS, Cell, Loop, Model, train, usual

TIMEOUT = 100.0
"""Seconds for all ranks together."""


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.02, gradient_as_bucket_view=True)


def _replicated(model: nn.Module) -> nn.Module:
    return replicate(model, bucket_cap_mb=0.02)


def _sharded(model: nn.Module) -> nn.Module:
    assert isinstance(model, Model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


Wrap = Callable[[nn.Module], nn.Module]
SOURCES: Mapping[str, tuple[Wrap, Wrap]] = {
    "DistributedDataParallel": (_ddp, _ddp),
    "instep.replicate, beside DDP": (_ddp, _replicated),
    "fully_shard (FSDP2)": (_sharded, _sharded),
}
"""The rows: what wraps the plain loop's model, and what the attached one's."""


def compare_on_ranks(ranks: int, device: str) -> dict[str, dict[str, Cell]]:
    """Train on ``ranks`` processes. Returns the cells by row and way: the first rank's that does not hold, if any.

    However it ends, no process is left.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="instep-selftest-", ignore_cleanup_errors=True) as directory:
        pipes: list[Connection] = []
        processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(rank, ranks, device, directory, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _joined([_answer(pipe) for pipe in pipes])
        finally:
            for process in processes:
                process.kill()
                process.join()


Table = dict[str, dict[str, Cell]]


def _answer(pipe: Connection) -> Table:
    failed = Cell("failed", f"a rank gave no answer in {TIMEOUT:.0f} s")
    try:
        if pipe.poll(TIMEOUT):
            found: Table = pipe.recv()
            return found
    except EOFError:
        failed = Cell("failed", "a rank has died")
    return {source: dict.fromkeys(WAYS, failed) for source in SOURCES}


def _joined(tables: list[Table]) -> Table:
    joined = tables[0]
    for rank, table in enumerate(tables):
        for source, cells in table.items():
            for way, cell in cells.items():
                if joined[source][way].holds and not cell.holds:
                    joined[source][way] = Cell(cell.outcome, f"rank {rank}: {cell.said}")
    return joined


def _serve(rank: int, ranks: int, device: str, directory: str, pipe: Connection) -> None:
    """What each process does."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    here = torch.device(device) if device == "cpu" else torch.device(device, rank)
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    backend = dist.get_default_backend_for_device(here)
    store = dist.FileStore(str(Path(directory) / "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT / 2))
    table: Table = {}
    for source, wraps in SOURCES.items():
        table[source] = {way: _compare(wraps, options, here) for way, options in WAYS.items()}
    pipe.send(table)
    dist.destroy_process_group()


def _compare(wraps: tuple[Wrap, Wrap], options: Mapping[str, Any], device: torch.device) -> Cell:
    try:
        plain, other = (_loop(wrap, device) for wrap in wraps)
        with attach(other.model, other.optimizers, **options) as overlap:
            other.overlap = overlap
            return train(usual, plain, other, STEPS * dist.get_rank())
    except Exception as error:
        return Cell("failed", f"{type(error).__name__}: {error}".splitlines()[0])


def _loop(wrap: Wrap, device: torch.device) -> Loop:
    torch.manual_seed(0)
    model = wrap(Model(0.0, False).to(device))
    return Loop(model, [AdamW(model.parameters(), lr=1e-2, foreach=True)], device)
