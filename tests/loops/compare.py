"""A form trained once, and two runs of a form compared."""

import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from instep_tools.harness import first_difference
from tests.loops.form import Form, Run, Seen


def trained(
    form: Form,
    options: dict[str, Any] | None,
    *,
    every_step: bool = True,
    gradients: bool = True,
    during: AbstractContextManager[Any] | None = None,
) -> list[Seen]:
    """What each step of ``form`` has left; ``options`` are those of the line, ``None`` for the plain loop."""
    run = Run(options, every_step=every_step, gradients=gradients)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        with during or nullcontext():
            form.run(run)
            run.end()
    finally:
        run.detach()
    assert len(run.steps) > 4
    assert options is None or form.by_itself or run.stepped > 3, "instep took no step"
    return run.steps


def logged(steps: list[Seen]) -> list[Seen]:
    """Of all steps what the loop itself has logged, and of the end everything."""
    return [{k: v for k, v in step.items() if k.startswith("logged")} for step in steps[:-1]] + steps[-1:]


def require_same(plain: list[Seen], other: list[Seen]) -> None:
    """Every step has left the same, bit for bit."""
    assert len(plain) == len(other)
    for number, (a, b) in enumerate(zip(plain, other, strict=True)):
        difference = first_difference(iter(a.items()), iter(b.items()))
        assert difference is None, f"step {number}: {difference}"
