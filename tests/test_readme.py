"""The README's loop with several optimizers. Its blocks: ``test_docs.py``; the examples: ``test_examples.py``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from tests.cases import two_groups
from tests.documentation import blocks_of, sides

ROOT = Path(__file__).parents[1]
DIFF = next(block.code for block in blocks_of(ROOT / "README.md") if block.language == "diff")


def muon_or_nothing(model: nn.Module) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")
    return torch.optim.Muon(two_groups(model)[0]["params"], lr=1e-2)


def optimi_lion(model: nn.Module) -> torch.optim.Optimizer:
    return pytest.importorskip("optimi").Lion(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        muon_or_nothing,
        optimi_lion,
    ],
    ids=["AdamW(fused=True)", "SGD(momentum=0.9)", "Muon", "optimi.Lion"],
)
def test_the_loop_in_the_diff_is_that_of_the_plain_loop(optimizer: Callable[[nn.Module], Any]) -> None:
    without, with_instep = sides(DIFF)
    assert "instep" in with_instep
    assert "instep" not in without
    found = [train(code, optimizer) for code in (without, with_instep)]
    assert all(map(torch.equal, *found))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def train(code: str, make: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    """Run a README loop with another optimizer in place of the one it builds."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = make(model)
    names = {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "loader": [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(6)],
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    }
    code = "\n".join(line for line in code.splitlines() if not line.startswith("optimizer ="))
    exec(code, names)
    overlap = instep.attached(model)
    assert overlap is None or overlap.step_count == 6
    return [p.detach() for p in model.parameters()]


def test_every_example_is_run_somewhere() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("test_*.py"))
    assert not [path.name for path in (ROOT / "examples").glob("*.py") if path.name not in tests]
