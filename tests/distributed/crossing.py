"""A loop whose buckets cross into the next iteration, beside plain DDP."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.sources.cross_iteration import source as crossing
from instep.sources.cross_iteration.order import CrossingTrial
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, optimizer_cases, two_groups
from tests.inside import source_of

OPTIMIZERS = {name: (cls, kwargs) for name, cls, kwargs in optimizer_cases()}


STEPS = 9


def blocks(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x).float(), y)


class _Late:
    """Stands for the future of a collective."""

    def __init__(self, sent: "list[_Late]", launch: Callable[[], Any]) -> None:
        self._sent = sent
        self._launch = launch
        self._then: list[Callable[[Any], None]] = []
        sent.append(self)

    def wait(self) -> None:
        while self in self._sent:
            first = self._sent.pop(0)
            first._launch().wait()
            for call in first._then:
                call(first)

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        self._then.append(call)


@contextmanager
def late_arrivals() -> Iterator[None]:
    """Buckets that cross are sent as late as they can be: once somebody waits for one of them, or for a later one.
    Whatever was written into their memory by then is what is sent. For buckets of which each crosses."""
    sent: list[_Late] = []
    start = crossing._start

    def start_late(*args: Any) -> Any:
        return _Late(sent, partial(start, *args))

    with (
        patch.object(crossing, "_start", start_late),
        patch.object(CrossingTrial, "first", lambda trial, iteration: True),
    ):
        yield
    assert not sent, "nobody waited for a bucket"


class Loop:
    def __init__(
        self,
        attach: bool,
        make: Callable[[], nn.Module] = Blocks,
        loss: Callable[[nn.Module, int], torch.Tensor] = blocks,
        optimizer: str = "AdamW-0-fused",
        ddp: Any = None,
        options: Any = None,
        cast: Any = None,
    ) -> None:
        torch.manual_seed(0)
        module = make() if attach or cast is None else cast(make())
        wrapping = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.004, **(ddp or {})}
        self.model = DistributedDataParallel(module, **wrapping)
        self.loss = loss
        cls, kwargs = OPTIMIZERS[optimizer]
        self.optimizer = cls(two_groups(self.model), **kwargs)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda e: 1 / (1 + e))
        self.overlap: Any = None
        if attach:
            self.overlap = instep.attach(
                self.model, self.optimizer, schedule="forward", defer=True, cross_iteration=True, **(options or {})
            )

    def backward(self, i: int) -> None:
        self.loss(self.model, 1000 * dist.get_rank() + i).backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def step(self, i: int) -> Any:
        self.backward(i)
        self.finish()

    def state(self) -> Any:
        if self.overlap is not None:
            self.overlap.synchronize()
        return training_state(self.model, self.optimizer)


Step = Callable[[Loop, int], Any]


def compare(step: Step = Loop.step, **how: Any) -> str | None:
    """The first difference in words. Weights are looked at after some of the steps only: who looks waits."""
    plain, attached = Loop(False, **how), Loop(True, **how)
    found = []
    crossed = 0
    with attached.overlap:
        for i in range(STEPS):
            said = first_difference(iter([("said", step(plain, i))]), iter([("said", step(attached, i))]))
            crossed += len(source_of(attached.overlap).flights)
            found.append(said)
            if i % 4 == 3 or i == STEPS - 1:
                found.append(first_difference(plain.state(), attached.state()))
        assert crossed, "nothing crossed"
        assert attached.overlap.step_count == STEPS
    return next((text for text in found if text is not None), None)
