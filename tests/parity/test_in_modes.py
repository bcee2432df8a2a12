"""What the loop is inside of when something of instep's is made, or asked: modes of torch's, in which the loop
attaches, or calls ``step()``."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import instep
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch

STEPS = 12  # the trial of the default begins after eight


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Overrides(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
    "dispatch": Dispatches,
    "function": Overrides,
}
NOTHING: dict[str, Any] = {}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": NOTHING,
    "defer": {"defer": True},
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "skip": {"nonfinite": "skip"},
}


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
@pytest.mark.parametrize("where", ["attach", "step"])
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("way", list(OPTIONS))
def test_a_loop_in_a_mode(way: str, mode: str, where: str, kernel: str) -> None:
    loops: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kernel == "fused", foreach=kernel == "foreach")
        loops.append((model, optimizer))
    with MODES[mode]() if where == "attach" else nullcontext():
        overlap = instep.attach(*loops[1], **OPTIONS[way])
    for i in range(STEPS):
        x, y = batch(i)
        for one, stepping in loops:
            nn.functional.cross_entropy(one(x), y).backward()
            with MODES[mode]() if where == "step" else nullcontext():
                try:
                    stepping.step()
                except RuntimeError as error:
                    if stepping is loops[0][1]:
                        pytest.skip(f"this torch does not step so: {error}")
                    raise
            stepping.zero_grad()
    overlap.synchronize()
    states = [training_state(*loop) for loop in loops]
    assert first_difference(*states) is None, first_difference(*states)
    overlap.detach()
