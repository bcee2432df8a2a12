"""How often the host waits in regular steps."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import instep
from tests.accelerator.loops import MODELS, OPTIMIZERS, SMALL
from tests.accelerator.recording import Log, recorded
from tests.cases import batch

WARM_UP, STEPS = 2, 3
Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


class Asking(torch.optim.SGD):
    """Looks at each gradient on the host, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.abs().max().item() < 0:
                    raise AssertionError
        return super().step(closure)


def regular_steps(
    options: Mapping[str, Any] | None,
    *,
    model: str = "blocks",
    optimizers: str | Optimizers = "AdamW",
    micro_batches: int = 1,
    clip: float | None = None,
    scaler: Any = None,
    unscales: bool = True,
) -> tuple[Log, int]:
    """Steps after the warm-up, on data that is there before; and the number of buckets."""
    torch.manual_seed(0)
    build, loss = MODELS[model]
    with torch.device("emu"):
        made = build()
        data = [batch(i) for i in range((WARM_UP + STEPS) * micro_batches)]
    steppers = [OPTIMIZERS[optimizers](made.parameters())] if isinstance(optimizers, str) else optimizers(made)
    overlap = None if options is None else instep.attach(made, steppers, **{"bucket_bytes": SMALL, **options})
    by_steps = overlap is None or (options or {}).get("accumulation_steps") is not None

    def learn(i: int) -> None:
        for micro in range(micro_batches):
            value = loss(made, *data[i * micro_batches + micro])
            value = value if scaler is None else scaler.scale(value)
            with nullcontext() if overlap is None or by_steps or micro == micro_batches - 1 else overlap.accumulate():
                value.backward() if overlap is None else overlap.backward(value)
        for optimizer in steppers:
            if scaler is not None and unscales:
                scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(made.parameters(), clip)
        for optimizer in steppers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        for optimizer in steppers:
            optimizer.zero_grad()

    for i in range(WARM_UP):
        learn(i)
    with recorded() as log:
        for i in range(WARM_UP, WARM_UP + STEPS):
            learn(i)
    buckets = 0
    if overlap is not None:
        buckets = len(overlap.plan.buckets)
        overlap.detach()
    return log, buckets


def require_waits(
    options: Mapping[str, Any], more: int = 0, plain: Mapping[str, Any] | None = None, *, asks: bool = False, **how: Any
) -> None:
    """The host waits ``more`` often in a step than in the plain loop's, which has ``plain`` on top. It asks nothing,
    unless ``asks``: whether what it does not wait for is there."""
    expected, _ = regular_steps(None, **{**how, **(plain or {})})
    found, _ = regular_steps(options, **how)
    surplus = len(found.host_waits) - len(expected.host_waits)
    assert surplus == more * STEPS, "\n".join(found.host_waits)
    assert not expected.queries
    assert len(found.queries) <= (2 * STEPS if asks else 0)
