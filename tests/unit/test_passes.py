"""How many calls instep makes for each parameter in an iteration: counted, not timed."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import instep

ROOM = "/instep/"


class Many(nn.Module):
    """Small parameters, each used once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sum() for p in self.all]).sum()


def calls_in_iteration(count: int, options: dict[str, Any]) -> Counter[str]:
    """Calls of Python functions and of C functions out of instep's files, in one iteration, when the order of gradients
    is known: of instep's own functions, and of those of torch and Python that instep calls."""
    model = Many(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    overlap = instep.attach(model, optimizer, **options)
    x = torch.randn(4)

    def iteration() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        iteration()
    found: Counter[str] = Counter()

    def count_call(frame: FrameType, event: str, arg: object) -> None:
        by_instep = ROOM in frame.f_code.co_filename
        by_caller = frame.f_back is not None and ROOM in frame.f_back.f_code.co_filename
        if event == "call" and (by_instep or by_caller):
            found["Python"] += 1
        elif event == "c_call" and by_instep:
            found["C"] += 1

    sys.setprofile(count_call)
    try:
        iteration()
    finally:
        sys.setprofile(None)
    overlap.detach()
    return found


@pytest.mark.parametrize(
    ("options", "python", "c"),
    [
        pytest.param({"schedule": "backward"}, 5, 8, id="backward"),
        # The worker's calls are not among them: sys.setprofile is of one thread.
        pytest.param({"schedule": "forward", "defer": True}, 40, 35, id="forward"),
    ],
)
def test_calls_for_each_parameter(options: dict[str, Any], python: int, c: int) -> None:
    few, many = calls_in_iteration(100, options), calls_in_iteration(300, options)

    assert (many["Python"] - few["Python"]) / 200 <= python
    assert (many["C"] - few["C"]) / 200 <= c


def test_calls_are_counted() -> None:
    assert calls_in_iteration(10, {"schedule": "backward"})["Python"] > 20
