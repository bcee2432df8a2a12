"""What this machine reaches, measured in about two seconds."""

from collections.abc import Callable
from time import perf_counter

import torch

SECONDS = 0.7
"""For each rate, after a warm-up."""
SIDE = 768
"""Of the matrices: large enough for all cores, and quick on one."""
ELEMENTS = 4 << 20
"""That AdamW updates: more than fit in a CPU's caches."""
ARRAYS = 7
"""That AdamW reads or writes: gradient, weight and two moments, of which the last three are written, too."""


def measured_flops() -> float:
    """Operations a second of a product of float32 matrices."""
    matrix = torch.ones(SIDE, SIDE, device=_device())
    return 2 * SIDE**3 / _seconds(lambda: matrix @ matrix)


def measured_memory_bytes() -> float:
    """Bytes a second that a step of fused AdamW reads and writes."""
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS, device=_device()))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return ARRAYS * parameter.nbytes / _seconds(optimizer.step)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _seconds(work: Callable[[], object]) -> float:
    """Of one call: the least, since other programs only take time away."""
    best = float("inf")
    end = perf_counter() + SECONDS
    while best == float("inf") or perf_counter() < end:
        _wait()
        started = perf_counter()
        work()
        _wait()
        best = min(best, perf_counter() - started)
    return best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
