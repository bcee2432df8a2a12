"""What ``attach`` finds out about an optimizer that it does not know, by trying it on made-up parameters."""

import logging
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep._optim import probe
from instep._optim.kinds import is_torchs_own
from instep.errors import UnsupportedOptimizerError
from tests.cases import Blocks, batch, grad_of, two_groups

# Not by a thread: while one that has just been started runs, it may be that one that draws.
pytestmark = pytest.mark.timeout(600, method="signal")


OUT_OF_SIGHT = torch.Generator()


class Plain(torch.optim.Optimizer):
    """Gradient descent, to be given something odd."""

    def __init__(self, params: Any, lr: float = 0.1, **attributes: Any) -> None:
        super().__init__(params, {"lr": lr})
        vars(self).update(attributes)

    def scale(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        scale = self.scale()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"] * scale)

    def update(self, p: torch.Tensor, lr: float) -> None:
        p.sub_(grad_of(p), alpha=lr)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def norm(self) -> float:
        return float(torch.stack([g.float().norm() for g in self.gradients()] or [torch.zeros(())]).norm())


class ClipsLargeGradients(Plain):
    """Nothing happens below a norm that small made-up gradients do not reach, nor above it where a loss overflows."""

    def scale(self) -> float:
        norm = self.norm()
        return 30.0 / norm if 30.0 < norm < 1e8 else 1.0


class ScalesUpTinyGradients(Plain):
    def scale(self) -> float:
        norm = self.norm()
        return 1 / norm if 0 < norm < 1.0 else 1.0


class Counts(Plain):
    """Counts its steps for each parameter, and does ``late`` from the step on that it was given."""

    def __init__(self, params: Any, begins: int, **options: Any) -> None:
        super().__init__(params, **options)
        self.begins = begins

    def steps(self) -> int:
        return max((int(s["step"]) for s in self.state.values()), default=0)

    def update(self, p: torch.Tensor, lr: float) -> None:
        self.state[p]["step"] = self.state[p].get("step", 0) + 1
        super().update(p, lr)


class CouplesLate(Counts):
    def scale(self) -> float:
        return 1 / (1 + self.norm()) if self.steps() >= self.begins else 1.0


class DrawsLate(Counts):
    def update(self, p: torch.Tensor, lr: float) -> None:
        super().update(p, lr)
        if self.state[p]["step"] > self.begins:
            p.add_(torch.randn_like(p), alpha=1e-3)


class CouplesLargeMatrices(Plain):
    def scale(self) -> float:
        large = [g for g in self.gradients() if g.dim() == 2 and min(g.shape) > 64]
        return 1 / (1 + float(sum(g.abs().sum() for g in large))) if large else 1.0


class StacksWhatHasOneShape(Plain):
    """Updates parameters of one shape together, by their mean gradient."""

    def joins(self, gradient: torch.Tensor) -> bool:
        return True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        shapes = {g.shape for g in self.gradients()}
        for shape in shapes:
            mine = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            same = [p for p in mine if p.shape == shape]
            mean = torch.stack([p.grad for p in same]).mean(0)
            for p in same:
                p.sub_(mean if self.joins(mean) else grad_of(p), alpha=0.1)


class StacksSmallMatrices(StacksWhatHasOneShape):
    """As one whose batched product of small matrices rounds in another way than the product of each."""

    def joins(self, gradient: torch.Tensor) -> bool:
        return gradient.dim() == 2 and gradient.numel() < 100


class StacksLargeMatrices(StacksWhatHasOneShape):
    def joins(self, gradient: torch.Tensor) -> bool:
        return gradient.dim() == 2 and gradient.numel() > 1000


class CouplesConvolutions(Plain):
    def scale(self) -> float:
        return 1.0 + sum(float(g.abs().sum()) for g in self.gradients() if g.dim() == 4)


class LeavesOut(Plain):
    """The whole step, if one gradient is not finite, or large."""

    most = math.inf

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if all(bool(g.isfinite().all()) and float(g.abs().max()) < self.most for g in self.gradients()):
            super().step()


class LeavesOutWhatIsLarge(LeavesOut):
    most = 1e6


class CouplesByOrder(Plain):
    """The first parameter of a call is stepped in another way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        mine = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for number, p in enumerate(mine):
            p.sub_(p.grad, alpha=0.2 if number == 0 else 0.1)


class DecaysAll(Plain):
    """Also parameters without gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


class CountsGradients(Plain):
    """What it keeps in its groups depends on how many parameters step together; no weight does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            count = sum(p.grad is not None for p in group["params"])
            group["seen"] = group.get("seen", 0) + count
        super().step()


class KeepsTheNorm(Plain):
    """Only its state shows it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        norm = self.norm()
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["norm"] = torch.tensor(norm)


@pytest.mark.parametrize(
    ("make", "dtype", "words"),
    [
        (ClipsLargeGradients, torch.float32, "couples parameters"),
        (ClipsLargeGradients, torch.bfloat16, "couples parameters"),
        (ScalesUpTinyGradients, torch.float32, "couples parameters"),
        (lambda p: CouplesLate(p, 5), torch.float32, "couples parameters"),
        (lambda p: CouplesLate(p, 11), torch.float32, "couples parameters"),
        (lambda p: DrawsLate(p, 5), torch.float32, "draws random numbers"),
        (lambda p: DrawsLate(p, 11), torch.bfloat16, "draws random numbers"),
        (CouplesLargeMatrices, torch.float32, "couples parameters"),
        (StacksWhatHasOneShape, torch.float32, "couples parameters"),
        (StacksSmallMatrices, torch.float32, "couples parameters"),
        (StacksLargeMatrices, torch.float32, "couples parameters"),
        (CouplesConvolutions, torch.float32, "couples parameters"),
        (CouplesByOrder, torch.float32, "couples parameters"),
        (LeavesOut, torch.float32, "couples parameters.*a gradient that holds 1e\\+10, inf, nan"),
        (LeavesOutWhatIsLarge, torch.bfloat16, "couples parameters"),
        (DecaysAll, torch.float32, "changes parameters that have no gradient"),
        (CountsGradients, torch.float32, "param_groups"),
        (KeepsTheNorm, torch.float32, "state of a parameter"),
    ],
)
def test_what_couples_parameters_is_refused_at_attach(make: Any, dtype: torch.dtype, words: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 4)).to(dtype)
    optimizer = make(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedOptimizerError, match=words):
        instep.attach(model, optimizer, schedule="backward")
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), state)


class DrawsFrom(Plain):
    """Draws with what it was given."""

    draw: Callable[[Any], torch.Tensor]

    def update(self, p: torch.Tensor, lr: float) -> None:
        p.add_(self.draw(self), alpha=1e-3)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


class Holder:
    def __init__(self, generator: Any) -> None:
        self.generator = generator


DRAWS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], float]]] = {
    "torch": (lambda o: None, lambda o: float(torch.rand(()))),
    "random": (lambda o: None, lambda o: random.random()),
    "numpy": (lambda o: None, lambda o: float(np.random.rand())),
    "an attribute": (lambda o: setattr(o, "own", seeded()), lambda o: float(torch.rand((), generator=o.own))),
    "a list": (lambda o: setattr(o, "own", [seeded()]), lambda o: float(torch.rand((), generator=o.own[0]))),
    "an object": (
        lambda o: setattr(o, "own", Holder(seeded())),
        lambda o: float(torch.rand((), generator=o.own.generator)),
    ),
    "a group": (
        lambda o: o.param_groups[0].update(own=seeded()),
        lambda o: float(torch.rand((), generator=o.param_groups[0]["own"])),
    ),
    "state": (
        lambda o: None,
        lambda o: float(torch.rand((), generator=o.state["own"].setdefault("generator", seeded()))),
    ),
    "python's own": (lambda o: setattr(o, "own", random.Random(1)), lambda o: o.own.random()),
    "numpy's own": (lambda o: setattr(o, "own", np.random.default_rng(1)), lambda o: o.own.random()),
}


@pytest.mark.parametrize("where", list(DRAWS))
def test_draws_are_called_draws_and_the_generators_are_put_back(where: str) -> None:
    prepare, draw = DRAWS[where]
    model = Blocks(depth=1)
    optimizer = DrawsFrom(model.parameters(), draw=draw)
    prepare(optimizer)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(UnsupportedOptimizerError, match="draws random numbers"):
        instep.attach(model, optimizer, schedule="backward")
    drawn = float(torch.rand(())), random.random(), float(np.random.rand())
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    assert drawn == (float(torch.rand(())), random.random(), float(np.random.rand()))


@pytest.mark.parametrize("where", [where for where in DRAWS if where not in ("torch", "random", "numpy", "state")])
def test_a_generator_from_which_nobody_draws_is_no_draw(where: str) -> None:
    """As one that was drawn from in the constructor."""
    prepare, draw = DRAWS[where]
    model = Blocks(depth=1)
    optimizer, other = (DrawsFrom(model.parameters(), draw=lambda _: torch.zeros(())) for _ in range(2))
    prepare(optimizer)
    prepare(other)
    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=2_000) as overlap:
        assert overlap.plan.unproven == ()
        model(batch(0)[0]).sum().backward()
        optimizer.step()
        assert overlap.step_count == 1
    assert draw(optimizer) == draw(other)


class Adamish(torch.optim.Optimizer):
    """Separable, with a warm-up, decay, counters in groups, and another way for matrices."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            rate = group["lr"] * min(1.0, group["count"] / 5)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["square"] = torch.zeros_like(p)
                state["square"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                update = p.grad / (state["square"].sqrt() + 1e-8)
                if p.dim() == 2:
                    update = update / (1 + update.norm())
                p.mul_(1 - rate * group["decay"]).sub_(update, alpha=rate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lr", [1e-2, 0.0])
def test_what_is_separable_is_taken(lr: float, dtype: torch.dtype) -> None:
    model = Blocks().to(dtype)
    with instep.attach(model, Adamish(two_groups(model), lr=lr), schedule="backward") as overlap:
        assert "unproven" not in repr(overlap)
        assert overlap.plan.unproven == ()


def test_a_learning_rate_of_zero_hides_nothing() -> None:
    """A warm-up begins with it."""
    model = Blocks()
    with pytest.raises(UnsupportedOptimizerError, match="couples parameters"):
        instep.attach(model, ClipsLargeGradients(model.parameters(), lr=0.0), schedule="backward")


class NeedsAFriend(Plain):
    """Knows its parameters, and no others."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = {id(p): 0.1 for group in self.param_groups for p in group["params"]}

    def update(self, p: torch.Tensor, lr: float) -> None:
        super().update(p, self.rates[id(p)])


class NoLongVectors(Plain):
    def update(self, p: torch.Tensor, lr: float) -> None:
        if p.dim() == 1 and len(p) > 200:
            raise NotImplementedError("too long")
        super().update(p, lr)


class Pairs(Plain):
    """Updates one with the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        mine = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for a, b in zip(mine[::2], mine[1::2], strict=False):
            a.sub_(a.grad * b.grad)


def test_parameters_that_must_fit_one_another() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UnsupportedOptimizerError, match="couples parameters"):
        instep.attach(model, Pairs(model.parameters()), schedule="backward")


class CountsInState(Plain):
    """As some do whose constructor writes into ``state``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["total"] = 0  # type: ignore[index]

    def scale(self) -> float:
        self.state["total"] = self.state["total"] + 1  # type: ignore[index]
        return 1.0


def test_what_the_constructor_left_in_state_is_there() -> None:
    model = Blocks(depth=1)
    optimizer = CountsInState(model.parameters())
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        assert overlap.plan.unproven == ()
    assert dict(optimizer.state) == {"total": 0}


class Unit(nn.Parameter):
    pass


def with_a_unit(model: Any) -> torch.optim.Optimizer:
    model.outer.weight = Unit(model.outer.weight.detach())
    return Plain(model.parameters())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda m: NeedsAFriend(m.parameters()), "NeedsAFriend: step() fails on made-up parameters (KeyError"),
        (lambda m: NoLongVectors(m.parameters()), "float32 (300,) (NotImplementedError: too long)"),
        (lambda m: Plain(m.parameters(), lock=(_ for _ in ())), "step() fails on made-up parameters (TypeError"),
        (with_a_unit, "its parameters of class Unit were tried as plain ones"),
    ],
)
def test_what_could_not_be_tried_is_said(make: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Blocks(depth=1)
    optimizer = make(model)
    with caplog.at_level(logging.WARNING, "instep"), instep.attach(model, optimizer, schedule="backward") as overlap:
        assert reason in repr(overlap)
        assert repr(overlap).endswith("idle>")
        assert reason in str(overlap.plan)
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert reason in caplog.text
        assert "check_steps" in caplog.text
        model(batch(0)[0]).sum().backward()
        optimizer.step()


class FailsWithout(Plain):
    """As one that makes an attribute with the first parameter of a step, and reads it after the last."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.rates:
            self.total = grad_of(p).sum()
            p.sub_(grad_of(p))
        self.total.item()

    @property
    def rates(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


class FailsOnFew(Plain):
    def scale(self) -> float:
        count = len(self.gradients())
        if 0 < count < 3:
            raise ValueError("too few")
        return 1.0


class NeedsAClosure(Plain):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


class SaysHowMany(Plain):
    """Returns how many parameters it has updated."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        return len(self.gradients())


class SaysItsName(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        return "plain"


@pytest.mark.parametrize(
    "options",
    [{"schedule": "backward"}, {"schedule": "backward", "undo": True}, {"schedule": "forward", "defer": True}],
)
def test_what_step_returns(options: Any) -> None:
    model = Blocks(depth=1)
    optimizer = SaysHowMany(model.parameters())
    if options["schedule"] != "forward":
        with pytest.raises(UnsupportedOptimizerError, match="returns a value that depends on what it updates"):
            instep.attach(model, optimizer, **options)
    else:
        instep.attach(model, optimizer, **options)
        model(torch.ones(2, 16)).sum().backward()
        assert optimizer.step() == len(list(model.parameters()))


class SlowsDownWithTheLoss(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["lr"] = 0.1 if loss is None else 0.1 / (1 + float(loss.detach()))
        super().step()
        return loss


@pytest.mark.parametrize(
    "options",
    [{"schedule": "backward"}, {"schedule": "backward", "undo": True}, {"schedule": "forward", "defer": True}],
)
def test_an_update_by_the_loss_that_the_closure_returns(options: Any) -> None:
    weights = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = Blocks(depth=1)
        optimizer = SlowsDownWithTheLoss(model.parameters(), lr=0.1)
        if attach and options["schedule"] != "forward":
            with pytest.raises(UnsupportedOptimizerError, match=r"updates by the loss.*schedule='forward'"):
                instep.attach(model, optimizer, **options)
            return
        if attach:
            instep.attach(model, optimizer, **options)

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 16)).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    "options",
    [{"schedule": "backward"}, {"schedule": "backward", "undo": True}, {"schedule": "forward", "defer": True}],
)
def test_a_value_that_is_always_the_same(options: Any) -> None:
    model = Blocks(depth=1)
    optimizer = SaysItsName(model.parameters())
    instep.attach(model, optimizer, **options)
    model(torch.ones(2, 16)).sum().backward()
    assert optimizer.step() == "plain"


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (FailsWithout, "FailsWithout.step\\(\\) raises when no parameter has a gradient \\(AttributeError"),
        (FailsOnFew, "FailsOnFew cannot be stepped bucket by bucket: .* raises ValueError: too few"),
        (NeedsAClosure, "fails without a closure.*schedule='forward'"),
    ],
)
def test_what_would_fail_in_step_is_refused_before(cls: Any, words: str) -> None:
    model = Blocks(depth=1)
    with pytest.raises(UnsupportedOptimizerError, match=words):
        instep.attach(model, cls(model.parameters()), schedule="backward")


TORCHS = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)]


@pytest.mark.parametrize(
    "cls", [cls for cls in TORCHS if cls is not torch.optim.Optimizer], ids=lambda cls: cls.__name__
)
def test_what_an_optimizer_of_torch_writes_is_known(cls: type[torch.optim.Optimizer]) -> None:
    class Other(cls):  # type: ignore[misc,valid-type]
        pass

    parameter = nn.Parameter(torch.zeros(2, 2))
    assert is_torchs_own(cls([parameter]))  # type: ignore[call-arg]
    assert not is_torchs_own(Other([parameter]))


def test_a_class_with_the_same_options_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def run(self: Any) -> Any:
        tried.append(1)
        return probe.Separability("Fresh", True)

    monkeypatch.setattr(probe._Probe, "run", run)

    class Fresh(Plain):
        pass

    for make in (lambda p: Fresh(p), lambda p: Fresh(p), lambda p: Fresh(p, lr=0.2), lambda p: Fresh(p, other=1)):
        model = Blocks(depth=1)
        instep.attach(model, make(model.parameters()), schedule="backward").detach()
    assert len(tried) == 3
    model = Blocks(depth=1).double()
    instep.attach(model, Fresh(model.parameters()), schedule="backward").detach()
    assert len(tried) == 4


class DrawsOutOfSight(Plain):
    """From a generator of its module's, which no optimizer has."""

    def update(self, p: torch.Tensor, lr: float) -> None:
        assert p.grad is not None
        p.sub_(p.grad * torch.rand(p.shape, generator=OUT_OF_SIGHT), alpha=lr)


def test_numbers_from_a_generator_that_nothing_refers_to() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(UnsupportedOptimizerError, match=r"from a generator that instep does not find"):
        instep.attach(model, DrawsOutOfSight(model.parameters()), schedule="backward")


def test_an_update_that_couples_parameters_is_called_so() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    class Coupled(Plain):
        def scale(self) -> float:
            found = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
            return 1 / (1 + float(torch.stack(found).norm())) if found else 1.0

    with pytest.raises(UnsupportedOptimizerError, match=r"^Coupled couples parameters"):
        instep.attach(model, Coupled(model.parameters()), schedule="backward")
