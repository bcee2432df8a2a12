"""An optimizer class of the loop's own: its ``step()`` runs inside of ``optimizer.step()``, in every schedule that does
not step in backward. What it raises comes from there, and leaves what the plain loop has then."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.judged import own_steps_are_judged


@pytest.fixture(autouse=True)
def as_users_have_it() -> Iterator[None]:
    with own_steps_are_judged():
        yield


class NotFiniteError(Exception):
    pass


class Guards(torch.optim.AdamW):
    """Looks for NaN before torch's update, as real loops do."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not all(bool(g.isfinite().all()) for g in gradients):
            raise NotFiniteError
        return super().step(closure)


class LooksAfterwards(torch.optim.AdamW):
    """Looks at the weights that torch's update has written."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if not all(bool(p.isfinite().all()) for group in self.param_groups for p in group["params"]):
            raise NotFiniteError
        return loss


class HalfWay(torch.optim.Optimizer):
    """Stops at the first gradient that is not finite, and has written the parameters before it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not bool(p.grad.isfinite().all()):
                    raise NotFiniteError
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.sub_(p.grad, alpha=group["lr"])


DEFAULT: dict[str, Any] = {}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "defer": {"defer": True},
    "forward": {"schedule": "forward", "defer": True, "bucket_bytes": 4_000},
    "clip": {"defer": True, "clip": instep.ClipNorm(1.0)},
}
CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "before": Guards,
    "after": LooksAfterwards,
    "half way": HalfWay,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, i: int, clip: bool) -> str:
    """One iteration, in the third of which a gradient in the middle of the model is NaN. What ``step()`` raised."""
    x, y = batch(i)
    nn.functional.cross_entropy(model(x), y).backward()
    if i == 2:
        gradient = model.get_parameter("blocks.1.0.weight").grad
        assert gradient is not None
        gradient.view(-1)[0] = torch.nan
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    try:
        optimizer.step()
    except NotFiniteError as error:
        return type(error).__name__
    finally:
        optimizer.zero_grad()
    return "nothing"


@pytest.mark.parametrize("kind", list(CLASSES))
@pytest.mark.parametrize("options", list(OPTIONS))
def test_an_error_comes_out_of_step(options: str, kind: str) -> None:
    loops: list[tuple[Any, torch.optim.Optimizer]] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Blocks()
        loops.append((model, CLASSES[kind](model.parameters(), lr=1e-2)))
    with instep.attach(*loops[1], **OPTIONS[options]) as overlap:
        for i in range(5):
            said = [train(*loop, i, options == "clip" and loop is loops[0]) for loop in loops]
            raises = i == 2 or (i > 2 and kind == "after")  # NaN stays in the weights
            assert said == ["NotFiniteError" if raises else "nothing"] * 2
            states = [training_state(*loop) for loop in loops]
            assert first_difference(*states) is None, (i, first_difference(*states))
        assert overlap.state == "idle"


class Logs(torch.optim.SGD):
    """Keeps the weights that it has written."""

    seen: torch.Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.seen = self.param_groups[0]["params"][0].detach().clone()
        return loss


@pytest.mark.parametrize("options", list(OPTIONS))
def test_it_steps_inside_of_step(options: str) -> None:
    """What it counts, logs or looks at is there when ``step()`` has returned."""
    model = Blocks()
    optimizer = Logs(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, **OPTIONS[options]) as overlap:
        for i in range(2):
            before = next(model.parameters()).detach().clone()
            assert train(model, optimizer, i, clip=False) == "nothing"
            assert optimizer.seen is not None
            assert not torch.equal(optimizer.seen, before)
            assert torch.equal(optimizer.seen, next(model.parameters()))
        if options != "default":
            assert "steps taken at once (Logs.step() is of a class of your own" in repr(overlap)


class Inherits(torch.optim.AdamW):
    """Whose ``step()`` is torch's."""


def test_a_class_that_inherits_step_is_stepped_where_the_loop_calls_it() -> None:
    model = Blocks()
    optimizer = Inherits(model.parameters(), lr=1e-2)
    with instep.attach(model, optimizer, defer=True, bucket_bytes=1_000) as overlap:
        weight = model.get_parameter("inner.weight")
        before = weight.detach().clone()
        assert train(model, optimizer, 0, clip=False) == "nothing"
        assert overlap.state == "idle"
        assert not torch.equal(weight, before)


def test_nothing_is_tried_of_it() -> None:
    """The trial of ``attach`` is for what is stepped in parts."""
    model = Blocks()
    tried = []

    class Couples(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            tried.append(self)
            gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm)

    optimizer = Couples(model.parameters())
    with instep.attach(model, optimizer, defer=True):
        assert not tried
        assert train(model, optimizer, 0, clip=False) == "nothing"
        assert tried == [optimizer]


def test_a_class_that_gets_a_step_of_its_own_after_attach() -> None:
    class Later(torch.optim.AdamW):
        pass

    torch.optim.AdamW([torch.ones(1)])  # torch calls the hooks in its step() from now on, also where another calls it
    calls: list[int] = []

    def step(self: torch.optim.AdamW, closure: Any = None) -> Any:
        calls.append(len(calls))
        return torch.optim.AdamW.step(self, closure)

    loops: list[tuple[Any, torch.optim.Optimizer]] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Blocks()
        loops.append((model, Later(model.parameters(), lr=1e-2)))
    with instep.attach(*loops[1], defer=True, bucket_bytes=1_000) as overlap:
        Later.step = step  # type: ignore[method-assign, assignment]
        for i in range(2):
            for loop in loops:
                assert train(*loop, i, clip=False) == "nothing"
            assert len(calls) == 2 * (i + 1)
        overlap.synchronize()
        states = [training_state(*loop) for loop in loops]
        assert first_difference(*states) is None
