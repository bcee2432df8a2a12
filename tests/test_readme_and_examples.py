"""What the README and the examples show runs as it stands."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from tests.cases import two_groups

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


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
    lines = [line for line in blocks("diff")[0].splitlines() if not line.startswith("-")]
    with_instep = "\n".join(line[1:] for line in lines)
    without = "\n".join(line[1:] for line in lines if not line.startswith("+"))
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


def test_the_block_for_one_device() -> None:
    exec(blocks("python")[0], {})


@pytest.mark.parametrize(
    "example", ["one_device.py", "verify_your_model.py", "in_backward.py", "fine_tune.py", "hf_trainer.py"]
)
def test_examples(example: str) -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / example)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for a busy core take ten times as long
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=alone)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("example", "said"),
    [("ddp.py", "step 50"), ("overlapped_optimizer.py", "SignVote step 60"), ("mixed_precision.py", "step 60")],
)
def test_examples_on_two_ranks(example: str, said: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / example)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
