"""What is still there once a loop has let go of its model and optimizer, at some point of a step."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

import instep
from instep._torch import lifetime as life
from instep._torch import worker
from instep._torch.worker import NAME
from tests.cases import batch

PATIENCE = 10.0
Made = tuple[nn.Module, torch.optim.Optimizer, instep.Attachment | None]


class LoopError(Exception):
    """Of the loop's own model."""


def backward(made: Made, seed: int) -> None:
    model, _, overlap = made
    loss = model(batch(seed)[0]).sum()
    if overlap is None:
        loss.backward()
    else:
        overlap.backward(loss)


def train(made: Made, steps: int = 2) -> None:
    for seed in range(steps):
        backward(made, seed)
        made[1].step()
        made[1].zero_grad()


def raised(made: Made) -> None:
    """In the middle of backward; who goes on is told, if the step is torn."""
    train(made)
    first = next(made[0].parameters())

    def fail(gradient: torch.Tensor) -> None:
        raise LoopError

    handle = first.register_hook(fail)
    with suppress(LoopError):
        backward(made, 2)
    handle.remove()
    with suppress(RuntimeError):  # an InstepError is one, and DDP's own
        made[0](batch(3)[0])


def stepped(made: Made) -> None:
    train(made)
    backward(made, 2)
    made[1].step()


def detached(made: Made) -> None:
    stepped(made)
    if made[2] is not None:
        made[2].detach()


def detached_in_a_step(made: Made) -> None:
    train(made)
    backward(made, 2)
    if made[2] is not None:
        made[2].detach()


def in_a_step(made: Made) -> None:
    train(made)
    backward(made, 2)


POINTS: dict[str, Callable[[Made], Any]] = {
    "attached": lambda made: None,
    "forward": lambda made: made[0](batch(0)[0]),  # whose graph is still there
    "first backward": lambda made: backward(made, 0),
    "backward": in_a_step,
    "raised": raised,
    "stepped": stepped,
    "zeroed": train,
    "detached": detached,
    "detached in a step": detached_in_a_step,
}


@contextmanager
def no_gc() -> Iterator[None]:
    # The first optimizer of a process has torch import its compiler, and the frames of that are kept with it.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle() -> None:
    """Return when no step is due any more that nobody waits for, and the threads that applied one have let go of it."""
    patience = time.monotonic() + PATIENCE
    while life._unsettled or _threads_without_a_worker() > 0:
        assert time.monotonic() < patience, "what is due is not applied"
        time.sleep(0.001)
    for found in list(worker._workers):
        if found.started:
            found.run(lambda: None).wait()


def _threads_without_a_worker() -> int:
    """The worker of such a thread has been dropped: the thread ends soon, and may still refer to its last task."""
    return sum(thread.name == NAME for thread in threading.enumerate()) - sum(
        found.started for found in list(worker._workers)
    )


def _references(made: Made) -> dict[str, Callable[[], object]]:
    model, optimizer, _ = made
    found: dict[str, Callable[[], object]] = {"model": weakref.ref(model), "optimizer": weakref.ref(optimizer)}
    found |= {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        entry = optimizer.state.get(parameter, {})
        found |= {f"{name} {key}": weakref.ref(value) for key, value in list(entry.items())}
    return found


def survivors(make: Callable[[], Made], point: str, *, keep: bool = False, collect: bool = False) -> list[str]:
    """What is not freed with the last reference to model and optimizer, or with ``collect`` not by the collector.

    Args:
        keep: whether the attachment is kept.
    """
    with no_gc():
        made = make()
        output = POINTS[point](made)
        found = _references(made)
        kept = made[2] if keep else None
        del made, output
        settle()
        if collect:
            gc.collect()
        left = [name for name, ref in found.items() if ref() is not None]
        del kept
        return left
