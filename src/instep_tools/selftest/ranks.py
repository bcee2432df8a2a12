"""The same comparison on several ranks of one machine: DistributedDataParallel, ``replicate`` and ``fully_shard``."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from instep import attach, replicate
from instep_tools.output import CannotRunError
from instep_tools.processes import run_on_ranks
from instep_tools.selftest.features import STEPS, WAYS, Cell, Loop, adamw, failed, first_line, small_model, train, usual

TIMEOUT = 100.0
"""Seconds for all ranks together."""


_ddp = partial(DistributedDataParallel, bucket_cap_mb=0.02, gradient_as_bucket_view=True)
_replicated = partial(replicate, bucket_cap_mb=0.02)


def _sharded(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
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
Table = dict[str, dict[str, Cell]]


def compare_on_ranks(ranks: int, device: str) -> Table:
    """Train on ``ranks`` processes. Returns the cells by row and way: the first rank's that does not hold, if any."""
    try:
        return _joined(run_on_ranks(ranks, device, _compare_all, seconds=TIMEOUT))
    except CannotRunError as error:
        return {source: dict.fromkeys(WAYS, Cell("failed", first_line(error))) for source in SOURCES}


def _joined(tables: list[Table]) -> Table:
    joined = tables[0]
    for rank, table in enumerate(tables):
        for source, cells in table.items():
            for way, cell in cells.items():
                if joined[source][way].holds and not cell.holds:
                    joined[source][way] = Cell(cell.outcome, f"rank {rank}: {cell.said}")
    return joined


def _compare_all(device: torch.device, tell: Callable[..., None]) -> Table:
    """What each rank does."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of outputs that are views, which nobody writes on
    return {
        source: {way: _compare(wraps, options, device) for way, options in WAYS.items()}
        for source, wraps in SOURCES.items()
    }


def _compare(wraps: tuple[Wrap, Wrap], options: Mapping[str, Any], device: torch.device) -> Cell:
    try:
        plain, other = (_loop(wrap, device) for wrap in wraps)
        with attach(other.model, other.optimizers, **options) as overlap:
            other.overlap = overlap
            return train(usual, plain, other, STEPS * dist.get_rank())
    except Exception as error:
        return failed(error)


def _loop(wrap: Wrap, device: torch.device) -> Loop:
    torch.manual_seed(0)
    model = wrap(small_model().to(device))
    return Loop(model, adamw(model, foreach=True), device)
