"""What one rank finds to be coupled, all ranks leave to ``optimizer.step()``."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep_tools.harness import first_difference, training_state
from tests.distributed.pool import RankPool
from tests.judged import own_steps_are_judged

STEPS = 5


class Descends(torch.optim.Optimizer):
    """What it returns is, on one rank, taken from all parameters. What it writes never is."""

    def __init__(self, params: Any, coupled: bool) -> None:
        super().__init__(params, {"lr": 0.05})
        self.coupled = coupled

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        those = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in those:
            p.sub_(p.grad, alpha=0.05)
        return sum(p.grad.norm().item() for p in those if p.grad is not None) if self.coupled else None


def loop(coupled_on: int | None, way: str | None) -> tuple[Any, str, list[int]]:
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model = DistributedDataParallel(bare, bucket_cap_mb=0.0003)
    optimizer = Descends(model.parameters(), coupled_on == dist.get_rank())
    overlap = None if way is None else instep.attach(model, optimizer, schedule="backward", undo=way == "undo")
    freed = []
    for i in range(STEPS):
        torch.manual_seed(10 * i + dist.get_rank())
        model(torch.randn(4, 8)).square().sum().backward()
        freed.append(sum("Spent" in repr(p.grad) for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    state = list(training_state(bare, optimizer))
    said = ""
    if overlap is not None:
        said = "\n".join(overlap.plan.judged)
        overlap.detach()
    return state, said, freed


def same_as_plain(coupled_on: int | None, way: str) -> tuple[str | None, str, list[int]]:
    with own_steps_are_judged():
        plain, _, _ = loop(coupled_on, None)
        state, said, freed = loop(coupled_on, way)
    return first_difference(iter(plain), iter(state)), said, freed


@pytest.mark.parametrize("way", ["backward", "undo"])
def test_all_ranks_hear_of_what_one_has_found(two_ranks: RankPool, way: str) -> None:
    for rank, (difference, said, freed) in enumerate(two_ranks.run(same_as_plain, 1, way)):
        assert difference is None
        assert not any(freed)
        assert ("rank 1 has found" if rank == 0 else "returns a value that depends on what it updates") in said


def test_ranks_that_find_nothing_step_in_backward(two_ranks: RankPool) -> None:
    for difference, said, freed in two_ranks.run(same_as_plain, None, "backward"):
        assert difference is None
        assert not said
        assert freed[:2] == [0, 0]
        assert freed[-1] == 8
