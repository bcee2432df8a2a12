"""``random="keyed"``: an optimizer that draws is stepped by parameter, with the numbers of a plain loop that has an
optimizer for each parameter, and seeds torch's generators by a key before each of their steps."""

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep import ClipNorm, ClipValue
from instep._step.judging import EVERY
from instep.errors import AttachError, HyperparameterChangedError, InstepError, UnsupportedOptimizerError
from instep_tools.harness import first_difference
from tests.cases import batch
from tests.checkpoint import saved
from tests.devices import here, on_cpu_only
from tests.judged import own_steps_are_judged
from tests.parity.keyed import (
    RECIPES,
    SEED,
    ByHand,
    Dropping,
    Langevin,
    Make,
    Rounded,
    Whitened,
    generators,
    groups_of,
    key_of,
    names_of,
    state_of,
)

# Not by a thread: while one that has just been started runs, it may be that one that draws.
pytestmark = pytest.mark.timeout(600, method="signal")

KEYED: dict[str, Any] = {"random": "keyed", "seed": SEED}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "undo on the host": {"schedule": "backward", "undo": "host"},
    "forward": {"schedule": "forward"},
    "at once": {"schedule": "forward", "defer": False},
    "put off": {"schedule": "forward", "defer": True},
}
ANY_LOOP = ("undo", "forward", "at once", "put off")
in_every_way = pytest.mark.parametrize("way", list(WAYS))
in_exact_ways = pytest.mark.parametrize("way", ANY_LOOP)
MANY = 1 << 30


class Lane:
    """One of two loops, with random numbers of its own: each goes on with those that it had."""

    def __init__(self, make: Make, model: Callable[[], nn.Module], options: Mapping[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model: Any = model()
        self.names = names_of(self.model)
        groups = groups_of(self.model)
        self.overlap: Any = None
        self.optimizer: Any
        if options is None:
            self.optimizer = ByHand(make, groups, self.names)
        else:
            self.optimizer = make(groups)
            self.overlap = instep.attach(self.model, self.optimizer, **KEYED, **options)
        torch.manual_seed(3)
        self._drawn = [generator.get_state() for generator in generators()]

    @property
    def plain(self) -> bool:
        return self.overlap is None

    def run(self, step: Callable[["Lane", int], Any], i: int) -> Any:
        for generator, state in zip(generators(), self._drawn, strict=True):
            generator.set_state(state)
        result = step(self, i)
        self._drawn = [generator.get_state() for generator in generators()]
        return result

    def loss(self, i: int) -> torch.Tensor:
        x, y = batch(i)
        return nn.functional.cross_entropy(self.model(x.to(here())), y.to(here()))

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward() if self.plain else self.overlap.backward(loss)

    def state(self) -> Any:
        found = self.optimizer.state() if self.plain else state_of(self.optimizer, self.names)
        yield from found
        for number, drawn in enumerate(self._drawn):
            yield f"generator {number}", drawn


def learn(lane: Lane, i: int) -> torch.Tensor:
    loss = lane.loss(i)
    lane.backward(loss)
    lane.optimizer.step()
    lane.optimizer.zero_grad()
    return loss.detach()


def learn_to_the_end(lane: Lane, i: int) -> None:
    learn(lane, i)
    lane.overlap.synchronize()


def compare(
    way: str,
    make: Make = Rounded,
    step: Callable[[Lane, int], Any] = learn,
    model: Callable[[], nn.Module] = Dropping,
    steps: int = 5,
    **options: Any,
) -> Lane:
    """Fail at the first difference from the loop that is written by hand."""
    plain, lane = Lane(make, model, None), Lane(make, model, {"bucket_bytes": 2_000, **WAYS[way], **options})
    with lane.overlap:
        for i in range(steps):
            expected, found = plain.run(step, i), lane.run(step, i)
            lane.overlap.synchronize()
            assert first_difference(plain.state(), lane.state()) is None, i
            assert first_difference(iter([("result", expected)]), iter([("result", found)])) is None, i
    return lane


@pytest.mark.parametrize("bucket_bytes", [1, None, MANY], ids=["one by one", "default", "all together"])
@pytest.mark.parametrize("recipe", list(RECIPES))
@in_every_way
def test_every_update_draws_by_its_key(way: str, recipe: str, bucket_bytes: int | None) -> None:
    lane = compare(way, RECIPES[recipe], bucket_bytes=bucket_bytes)
    assert lane.overlap.step_count == 5


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("way", ["backward", "undo", "forward"])
def test_what_draws_by_its_key_couples_nothing(way: str, recipe: str) -> None:
    """Its groups are in another order than its buckets: what is compared must not draw by another one's key."""
    with own_steps_are_judged():
        lane = compare(way, RECIPES[recipe])
    assert lane.overlap.step_count == 5


def test_the_key() -> None:
    """Computed here by its description."""
    assert instep.draw_key(SEED, 0, "outer.weight") == key_of(0, "outer.weight")
    assert instep.draw_key(0, 10**9, "ä.b", 3) == key_of(10**9, "ä.b", 3, seed=0)
    assert instep.draw_key(2**63 - 1, 7, "") == key_of(7, "", seed=2**63 - 1)
    parts = [
        (1, 0, "w", None),
        (1, 0, "w", 0),
        (1, 1, "w", None),
        (11, 0, "w", None),
        (1, 0, "v", None),
        (1, 0, "w", 1),
    ]
    keys = {instep.draw_key(*part) for part in parts}
    assert len(keys) == len(parts)
    assert all(0 <= key < 2**63 for key in keys)
    assert instep.draw_key(1234, 0, "layers.0.weight") == 0x66A736D9811BD3FB


def clip_by_hand(lane: Lane, i: int) -> None:
    lane.backward(lane.loss(i))
    if lane.plain:
        nn.utils.clip_grad_norm_(lane.model.parameters(), 0.1)
    lane.optimizer.step()
    lane.optimizer.zero_grad()


def clip_values_by_hand(lane: Lane, i: int) -> None:
    lane.backward(lane.loss(i))
    if lane.plain:
        nn.utils.clip_grad_value_(lane.model.parameters(), 1e-3)
    lane.optimizer.step()
    lane.optimizer.zero_grad()


@in_every_way
def test_clipped(way: str) -> None:
    mode: Any = "two_pass" if way == "backward" else "exact"

    def without_dropout() -> nn.Module:
        return Dropping(torch.float32).eval()

    compare(way, Langevin, clip_by_hand, model=without_dropout, clip=ClipNorm(0.1, mode=mode))
    compare(way, Langevin, clip_values_by_hand, clip=ClipValue(1e-3))


def in_micro_batches(lane: Lane, i: int) -> None:
    for micro in range(3):
        with lane.overlap.accumulate() if not lane.plain and micro < 2 else nullcontext():
            lane.backward(lane.loss(3 * i + micro))
    lane.optimizer.step()
    lane.optimizer.zero_grad()


def by_the_verb(lane: Lane, i: int) -> None:
    def loss_of(seed: int) -> torch.Tensor:
        return lane.loss(seed)

    seeds = [3 * i + micro for micro in range(3)]
    if lane.plain:
        for seed in seeds:
            loss_of(seed).backward()
    else:
        lane.overlap.micro_batches(loss_of, seeds)
    lane.optimizer.step()
    lane.optimizer.zero_grad()


@pytest.mark.parametrize("step", [in_micro_batches, by_the_verb])
@in_every_way
def test_accumulated(way: str, step: Callable[[Lane, int], Any]) -> None:
    compare(way, Whitened, step)


@in_every_way
def test_torchaos_stochastic_rounding(way: str) -> None:
    optim = pytest.importorskip("torchao.optim")
    compare(way, lambda groups: optim._AdamW(groups, bf16_stochastic_round=True), learn)


@in_every_way
def test_a_group_that_is_added_between_backward_and_step(way: str) -> None:
    """Its parameter has a gradient by then, and is stepped with the others."""

    def late(lane: Lane, i: int) -> None:
        if i == 0:
            lane.model.late = nn.Linear(10, 10, bias=False, device=here(), dtype=torch.bfloat16)
            with torch.no_grad():
                lane.model.late.weight.fill_(0.1)
            lane.names.update(names_of(lane.model))
        x, y = batch(i)
        out = lane.model.late(lane.model(x.to(here())).bfloat16()).float()
        lane.backward(nn.functional.cross_entropy(out, y.to(here())))
        if i == 2:
            group = {"params": [lane.model.late.weight], "lr": 0.02}
            lane.optimizer.add(group, lane.names) if lane.plain else lane.optimizer.add_param_group(group)
        lane.optimizer.step()
        lane.model.zero_grad()

    compare(way, Rounded, late)


@in_every_way
def test_gradients_that_the_loop_writes(way: str) -> None:
    """No backward has given them: ``step()`` finds them."""

    def write(lane: Lane, i: int) -> None:
        if i % 2:
            for number, p in enumerate(lane.model.parameters()):
                p.grad = torch.full_like(p, 0.01 * number)
            lane.optimizer.step()
            lane.optimizer.zero_grad()
        else:
            learn(lane, i)

    compare(way, Langevin, write)


@in_every_way
def test_parameters_that_are_not_used(way: str) -> None:
    def some(lane: Lane, i: int) -> None:
        lane.model.blocks[1].requires_grad_(i % 2 == 0)
        learn(lane, i)

    compare(way, Whitened, some)


@pytest.mark.parametrize("way", ["forward", "at once", "put off", "undo"])
def test_with_a_closure(way: str) -> None:
    def with_closure(lane: Lane, i: int) -> Any:
        if lane.plain:
            return learn(lane, i)

        def closure() -> torch.Tensor:
            loss = lane.loss(i)
            loss.backward()
            return loss.detach()

        loss = lane.optimizer.step(closure)
        lane.optimizer.zero_grad()
        return loss

    compare(way, Rounded, with_closure)


@in_exact_ways
def test_a_step_that_is_left_out_does_not_count(way: str) -> None:
    def infinite_now_and_then(lane: Lane, i: int) -> None:
        loss = lane.loss(i) * (float("inf") if i in (1, 3) else 1.0)
        lane.backward(loss)
        if not lane.plain or i not in (1, 3):
            lane.optimizer.step()
        lane.optimizer.zero_grad()

    lane = compare(way, Rounded, infinite_now_and_then, nonfinite="skip")
    assert (lane.overlap.step_count, lane.overlap.skip_count) == (3, 2)


@in_exact_ways
def test_scaled(way: str) -> None:
    """A step that ``GradScaler`` leaves out does not count either. The scale is a power of two: nothing is rounded."""
    scaler = torch.amp.GradScaler(here().type, init_scale=2.0**10, growth_interval=100)

    def scaled(lane: Lane, i: int) -> None:
        loss = lane.loss(i) * (float("inf") if i in (1, 3) else 1.0)
        if lane.plain:
            loss.backward()
            if i not in (1, 3):
                lane.optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(lane.optimizer)
            scaler.update()
        lane.optimizer.zero_grad()

    given: dict[str, Any] = {"scaler": scaler} if way == "undo" else {}
    lane = compare(way, Rounded, scaled, model=lambda: Dropping(torch.float32), **given)
    assert lane.overlap.step_count == 3


def test_a_step_that_was_put_back_draws_the_same_when_it_is_taken_again() -> None:
    def rolled_back(lane: Lane, i: int) -> None:
        if not lane.plain:
            before = [generator.get_state() for generator in generators()]
            lane.backward(lane.loss(i))
            lane.overlap.rollback()
            for generator, state in zip(generators(), before, strict=True):
                generator.set_state(state)
        learn(lane, i)

    compare("undo", Whitened, rolled_back)


def test_torchs_own_optimizers_are_stepped_as_ever() -> None:
    """They draw nothing."""
    states = []
    for options in ({}, KEYED):
        torch.manual_seed(0)
        model = Dropping(torch.float32)
        optimizer = torch.optim.AdamW(groups_of(model))
        with instep.attach(model, optimizer, schedule="backward", bucket_bytes=MANY, **options) as overlap:
            torch.manual_seed(1)
            calls = 0
            for i in range(3):
                before = overlap.step_count
                nn.functional.cross_entropy(model(batch(i)[0].to(here())), batch(i)[1].to(here())).backward()
                optimizer.step()
                optimizer.zero_grad()
                calls += overlap.step_count - before
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert first_difference(iter(states[0].items()), iter(states[1].items())) is None


class Wrapper(nn.Module):
    """As activation checkpointing and torch.compile name what they wrap."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, module)
        self.wrapped_as = name

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self, self.wrapped_as)(x)


@pytest.mark.parametrize("name", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_wrappers_are_in_no_name(name: str) -> None:
    def wrapped(lane: Lane, i: int) -> None:
        if i == 0 and not lane.plain:
            lane.overlap.detach()
            lane.model = Wrapper(lane.model, name)
            lane.overlap = instep.attach(lane.model, lane.optimizer, schedule="backward", **KEYED)
        learn(lane, i)

    compare("backward", Langevin, wrapped)


# Resuming.


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize(("way", "then"), [("backward", "forward"), ("put off", "backward"), ("undo", "at once")])
def test_resumed(tmp_path: Path, way: str, then: str, after: int) -> None:
    """At any step, and with the other schedule."""

    def resumed(lane: Lane, i: int) -> None:
        if i == after and not lane.plain:
            saved.save(tmp_path, lane.model, lane.optimizer, lane.overlap)
            with torch.random.fork_rng(enabled=here().type == "cpu"):
                before = [generator.get_state() for generator in generators()]
                lane.overlap.detach()
                lane.model = Dropping()
                lane.optimizer = Langevin(groups_of(lane.model))
                lane.names = names_of(lane.model)
                lane.overlap = instep.attach(lane.model, lane.optimizer, **WAYS[then], **KEYED)
                for generator, state in zip(generators(), before, strict=True):
                    generator.set_state(state)
            saved.load(tmp_path, lane.model, lane.optimizer, lane.overlap)
            assert lane.overlap.step_count == after
        learn(lane, i)

    compare(way, Langevin, resumed)


# What is refused.


class Odd(Rounded):
    """With something that no key reaches, or that couples parameters."""

    def draw(self) -> Any:
        raise NotImplementedError

    def update(self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any, begun: Any) -> None:
        p.add_(gradient, alpha=-group["lr"])
        p.mul_(1 + 1e-3 * float(self.draw()))


class OfPython(Odd):
    def draw(self) -> Any:
        return random.random()


class OfNumPy(Odd):
    def draw(self) -> Any:
        return np.random.rand()


class OfItsOwn(Odd):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator(here()).manual_seed(0)

    def draw(self) -> Any:
        return torch.rand([], generator=self.generator, device="cpu")


class Coupled(Rounded):
    """Scales by the norm of all gradients."""

    def begin(self) -> float:
        found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return float(sum(gradient.float().square().sum() for gradient in found)) ** 0.5

    def update(self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any, begun: Any) -> None:
        super().update(p, gradient / (1 + begun), state, group, begun)


class Counting(Rounded):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return sum(p.grad is not None for group in self.param_groups for p in group["params"])


@pytest.mark.parametrize("way", ["backward", "forward", "put off"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (OfPython, "draws random numbers"),
        (OfNumPy, "draws random numbers"),
        (OfItsOwn, "draws random numbers"),
        (Coupled, "together with"),
        (Counting, "returns a value that depends on what it updates"),
    ],
)
def test_what_no_key_reaches_is_refused(way: str, make: Make, words: str) -> None:
    """By the first step, before anything of it is written."""
    model = Dropping(torch.float32)
    optimizer = make(groups_of(model))
    with own_steps_are_judged():
        overlap = instep.attach(model, optimizer, **WAYS[way], **KEYED)
    with overlap:
        before = [p.detach().clone() for p in model.parameters()]
        nn.functional.cross_entropy(model(batch(0)[0].to(here())), batch(0)[1].to(here())).backward()
        drawn = random.getstate(), torch.get_rng_state()
        with pytest.raises(UnsupportedOptimizerError, match=words) as raised:
            optimizer.step()
        assert "schedule='forward'" in str(raised.value)
        assert random.getstate() == drawn[0]
        assert torch.equal(torch.get_rng_state(), drawn[1])
        assert all(map(torch.equal, before, model.parameters()))
        optimizer.zero_grad()


class LateDraw(Rounded):
    """Draws from Python's generator after the first 20 steps: longer than its first updates are compared."""

    def update(self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any, begun: Any) -> None:
        super().update(p, gradient, state, group, begun)
        if state["step"] > 20:
            p.mul_(1 + 1e-3 * random.random())


def test_a_draw_without_key_is_found_while_training() -> None:
    """By the next step of which two buckets are compared."""
    with own_steps_are_judged():
        lane = Lane(LateDraw, Dropping, {**WAYS["backward"], "bucket_bytes": 2_000})
    for i in range(EVERY - 1):
        lane.run(learn, i)
    with pytest.raises(UnsupportedOptimizerError, match=r"it draws random numbers in step\(\)"):
        lane.run(learn, EVERY - 1)
    lane.overlap.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for i in range(3):
        nn.functional.cross_entropy(model(batch(i)[0].to(here())), batch(i)[1].to(here())).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"random": "seeded", "seed": 1}, "random must be None or 'keyed', not 'seeded'"),
        ({"random": True, "seed": 1}, "random must be None or 'keyed', not True"),
        ({"random": "keyed"}, "random='keyed' needs a seed"),
        ({"seed": 1}, "seed=1 is for random='keyed'"),
        ({"random": "keyed", "seed": True}, "seed must be a whole number from 0 to 2\\*\\*63 - 1, not True"),
        ({"random": "keyed", "seed": -1}, "seed must be a whole number"),
        ({"random": "keyed", "seed": 2**63}, "seed must be a whole number"),
        ({"random": "keyed", "seed": "1"}, "seed must be a whole number"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], words: str) -> None:
    model = Dropping()
    with pytest.raises(AttachError, match=words):
        instep.attach(model, Rounded(groups_of(model)), **options)
    assert instep.attached(model) is None


def test_refused_where_torch_takes_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_DISABLE", "1")
    model = Dropping()
    with pytest.raises(AttachError, match="random='keyed' for Rounded does not go with INSTEP_DISABLE=1"):
        instep.attach(model, Rounded(groups_of(model)), **KEYED)
    instep.attach(model, torch.optim.AdamW(groups_of(model)), **KEYED).detach()  # draws nothing


def test_verify_has_no_oracle() -> None:
    def build() -> Any:
        model = Dropping()
        return model, Rounded(groups_of(model)), lambda i: None

    with pytest.raises(AttachError, match="random changes the numbers themselves"):
        instep.verify(build, **KEYED)


@pytest.mark.parametrize("way", ["backward", "forward", "put off"])
def test_a_parameter_that_is_not_the_models(way: str) -> None:
    """At ``attach`` and later: it has no name."""
    model, other = Dropping(), nn.Parameter(torch.zeros(3, device=here()))
    with pytest.raises(AttachError, match="is not a parameter of the model"):
        instep.attach(model, Rounded([*groups_of(model), {"params": [other]}]), **WAYS[way], **KEYED)
    lane = Lane(Rounded, Dropping, WAYS[way])
    lane.run(learn, 0)
    lane.optimizer.add_param_group({"params": [other]})
    learn(lane, 1)  # without a gradient nothing draws
    other.grad = torch.ones_like(other)
    lane.loss(2).backward()
    with pytest.raises(
        InstepError, match=r"random='keyed': Rounded.param_groups\[2\] holds a parameter of shape \(3,\)"
    ):
        lane.optimizer.step()
    assert torch.equal(other, torch.zeros_like(other))
    if way != "backward":
        other.grad = None
        lane.optimizer.step()
        lane.overlap.synchronize()
        assert lane.overlap.step_count == 3
    lane.overlap.detach()


@pytest.mark.parametrize("way", ["backward", "forward", "put off"])
def test_a_graph_that_is_recorded(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(Rounded, Dropping, WAYS[way])
    lane.run(learn, 0)
    monkeypatch.setattr("instep._optim.random_numbers.is_captured", lambda device: True)
    with lane.overlap, pytest.raises(UnsupportedOptimizerError, match="a CUDA graph that is being recorded"):
        learn_to_the_end(lane, 1)


class Raising(Rounded):
    """In the first update of its third step."""

    raises = False

    def update(self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any, begun: Any) -> None:
        torch.rand(3, device=p.device)
        if Raising.raises and tuple(p.shape) == (10,):
            raise ValueError("enough")
        super().update(p, gradient, state, group, begun)


@in_every_way
def test_an_update_that_raises_leaves_the_loops_generators(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(Raising, Dropping, WAYS[way])
    lane.run(learn, 0)
    lane.overlap.synchronize()
    lane.loss(1)
    before = [generator.get_state() for generator in generators()]
    monkeypatch.setattr(Raising, "raises", True)
    lane.model.eval()  # so that the loop draws nothing
    with pytest.raises(ValueError, match="enough"):
        learn_to_the_end(lane, 1)
    assert all(torch.equal(g.get_state(), state) for g, state in zip(generators(), before, strict=True))
    monkeypatch.setattr(Raising, "raises", False)
    if "undo" in way:  # the plain loop's step() has raised: the step was put back, and may be taken again
        lane.optimizer.step()
        assert lane.overlap.step_count == 2
    lane.overlap.detach()


@on_cpu_only
def test_on_a_cpu_nothing_is_put_off() -> None:
    """Another thread would draw from the generator that the loop draws from."""
    lane = Lane(Rounded, Dropping, WAYS["put off"])
    for i in range(2):  # in the first step some are stepped at once in any case: they make the state
        lane.run(learn, i)
        assert lane.overlap.state == "idle"


def test_a_loop_that_is_told_why_no_step_is_put_off() -> None:
    lane = Lane(Langevin, Dropping, WAYS["forward"])
    lane.run(learn, 0)
    assert "Langevin is stepped by parameter" in repr(lane.overlap)


class Multiplied(Rounded):
    """With a product of matrices, which autocast computes in its own dtype."""

    def update(self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any, begun: Any) -> None:
        if p.dim() == 2:
            gradient = gradient @ (gradient.mT @ gradient)
        super().update(p, gradient, state, group, begun)


@pytest.mark.parametrize("make", [Rounded, Multiplied])
@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_a_step_in_an_autocast_block(way: str, make: Make) -> None:
    """Updates run outside of it, and no step that is taken inside is there to be compared with: whatever the update
    does, nothing of it is written."""

    def in_autocast(lane: Lane, i: int) -> None:
        for number, p in enumerate(lane.model.parameters()):
            p.grad = torch.full_like(p, 0.01 * number)
        with torch.autocast(here().type, torch.bfloat16):
            lane.optimizer.step()
        lane.optimizer.zero_grad()

    lane = Lane(make, lambda: Dropping(torch.float32), WAYS[way])
    before = [p.detach().clone() for p in lane.model.parameters()]
    with pytest.raises(HyperparameterChangedError, match="inside an autocast block"):
        in_autocast(lane, 0)
    assert all(map(torch.equal, before, lane.model.parameters()))
    learn(lane, 1)
    assert lane.overlap.step_count == 1
    lane.overlap.detach()
