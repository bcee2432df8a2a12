"""What nobody but torch can step: the default line leaves it to torch, and says why. Other options refuse it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.devices import here
from tests.distributed.pool import RankPool

Made = tuple[Any, list[nn.Module], nn.Module]
"""What is attached, the modules that the loop calls in turn, and all of it."""


def inside_of_ddp() -> Made:
    ddp = DistributedDataParallel(Blocks().to(here()))
    return ddp.module, [ddp], ddp


def part_of_ddp() -> Made:
    ddp = DistributedDataParallel(Blocks().to(here()))
    return ddp.module.outer, [ddp], ddp


def two_that_share() -> Made:
    trunk = nn.Linear(16, 16)
    ddps = [DistributedDataParallel(nn.Sequential(trunk, nn.Linear(16, 10)).to(here())) for _ in range(2)]
    return ddps[0], list(ddps), nn.ModuleList(ddps)


def an_older_ddp() -> Made:
    model = Blocks().to(here())
    older = DistributedDataParallel(model)
    ddp = DistributedDataParallel(model)
    vars(ddp)["older"] = [older]  # somebody keeps it, where no module looks
    return ddp, [ddp], ddp


def flat() -> Made:
    model = FullyShardedDataParallel(Blocks().to(here()), use_orig_params=False, device_id=here())
    return model, [model], model


def sharded_in_a_list() -> Made:
    models: list[nn.Module] = [nn.Linear(16, 10).to(here()) for _ in range(2)]
    for model in models:
        fully_shard(model)
    return models, models, nn.ModuleList(models)


CASES: dict[str, tuple[Callable[[], Made], str]] = {
    "the module of a DDP": (inside_of_ddp, "Blocks is wrapped in a DistributedDataParallel"),
    "a part of it": (part_of_ddp, "Linear is wrapped in a DistributedDataParallel"),
    "two DDPs that share a part": (two_that_share, "shares parameters with another"),
    "a DDP from before": (an_older_ddp, "shares parameters with another"),
    "flat parameters": (flat, "use_orig_params=True"),
    "sharded modules in a list": (sharded_in_a_list, "model is a list"),
}


def compare(name: str, again: bool) -> tuple[str | None, str]:
    """The first difference from the plain loop, and the advice; ``again``: from another plain loop."""
    found = []
    for attach in (False, not again):
        torch.manual_seed(0)
        attached, called, everything = CASES[name][0]()
        optimizer = torch.optim.AdamW(everything.parameters(), lr=1e-2, fused=True)
        overlap = instep.attach(attached, optimizer) if attach else None
        for i in range(6):
            x, y = batch(100 * dist.get_rank() + i)
            model = called[i % len(called)]
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(everything.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append([(what, value) for what, value in training_state(everything, optimizer)])
        if overlap is not None:
            assert overlap.state == "idle"
            assert "steps taken at once (" in repr(overlap)
    said = "" if overlap is None else overlap.advice
    return first_difference(iter(found[0]), iter(found[1])), said


@pytest.mark.parametrize("name", CASES)
def test_the_default_line_is_the_plain_loop(two_ranks: RankPool, name: str) -> None:
    for difference, said in two_ranks.run(compare, name, False):
        assert difference is None
        assert said.startswith("Steps are taken at once (")
        assert CASES[name][1] in said


def refused(name: str, options: dict[str, Any]) -> str:
    attached, _, everything = CASES[name][0]()
    optimizer = torch.optim.AdamW(everything.parameters(), lr=1e-2, fused=True)
    try:
        instep.attach(attached, optimizer, **options)
    except AttachError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("options", [{"defer": True}, {"schedule": "backward"}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_other_options_refuse_it(two_ranks: RankPool, name: str, options: dict[str, Any]) -> None:
    for said in two_ranks.run(refused, name, options):
        assert CASES[name][1] in said or "is not a parameter of the model" in said
