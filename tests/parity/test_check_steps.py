"""``check_steps``: the first steps taken both ways find what the probe cannot know, and nothing where all is well."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import instep
from instep.errors import AttachError, TornStepError, UnsupportedOptimizerError
from tests.cases import Blocks, Rotations, batch, optimizer_cases, two_groups
from tests.inside import schedule_of
from tests.parity.changes import LATE, MetTheOdd, Odd, couple
from tests.parity.lockstep import CLIP, WAYS, Contender, in_every_way, in_exact_ways, learn, lockstep, loss_of, ways

# Not by a thread: while one that has just been started runs, it may be that one that draws.
pytestmark = pytest.mark.timeout(600, method="signal")

BUCKET = 2_000
SCHEDULES = {name: options for name, options in WAYS.items() if name != "late"} | {
    "host": {"schedule": "backward", "undo": "host"}
}
in_every_schedule = pytest.mark.parametrize("way", list(SCHEDULES))


def draw(optimizer: Any, mine: list[torch.Tensor]) -> None:
    for p in mine:
        p.add_(torch.randn_like(p), alpha=1e-3)


def odd_loop(way: str, late: Any, **options: Any) -> tuple[Any, Any, Any, Callable[[int], None]]:
    torch.manual_seed(0)
    model = Odd()
    optimizer = MetTheOdd(model.parameters(), late)
    overlap = instep.attach(model, optimizer, bucket_bytes=BUCKET, **{**SCHEDULES[way], **options})

    def iteration(i: int) -> None:
        x, y = batch(i)
        overlap.backward(loss_of(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, overlap, iteration


@pytest.mark.parametrize("what", list(LATE))
@in_every_schedule
def test_what_begins_late_is_found_in_its_first_step(way: str, what: str) -> None:
    late, words = LATE[what]
    model, optimizer, overlap, iteration = odd_loop(way, late, check_steps=5)
    for i in range(2):
        iteration(i)
    assert "checked 2 of 5 steps" in repr(overlap)
    undo = SCHEDULES[way].get("undo")
    # Whose use nobody notices. With schedule="forward" a step is not put off while they are there.
    aliases = [p.detach() for p in model.parameters()] if undo else []
    before = [alias.clone() for alias in aliases]
    with pytest.raises(UnsupportedOptimizerError, match="MetTheOdd " + words) as found:
        iteration(2)
    if undo:
        assert all(map(torch.equal, before, aliases))  # put back
        assert repr(overlap).endswith("open>")
        optimizer.step()  # the plain one, with the gradients that are still there
        assert all(map(torch.equal, plain_loop(late).parameters(), model.parameters()))
        return
    for use in (lambda: model(batch(0)[0]), optimizer.step):
        with pytest.raises(TornStepError) as torn:
            use()
        # Told anew: the error that was raised refers to all that the loop holds.
        assert (type(torn.value.cause), str(torn.value.cause)) == (type(found.value), str(found.value))
        assert torn.value.step == 3
        assert set(torn.value.applied) == {name for name, _ in model.named_parameters()}
    overlap.accept_torn()
    assert overlap.step_count == 3


def plain_loop(late: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Odd()
    optimizer = MetTheOdd(model.parameters(), late)
    for i in range(3):
        x, y = batch(i)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_without_it_nobody_notices() -> None:
    """What the check is for."""
    model, _, _, iteration = odd_loop("backward", couple)
    for i in range(3):
        iteration(i)
    plain = plain_loop(couple)
    assert not all(map(torch.equal, plain.parameters(), model.parameters()))


def test_after_the_last_of_them_nothing_is_compared() -> None:
    _, _, overlap, iteration = odd_loop("backward", couple, check_steps=2)
    for i in range(4):
        iteration(i)
    assert "checked 2 steps, idle" in repr(overlap)


@pytest.mark.parametrize(("name", "cls", "options"), list(optimizer_cases()))
@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_no_false_alarm_with_optimizers_of_torch(way: str, name: str, cls: Any, options: dict[str, Any]) -> None:
    def build() -> Any:
        model = Blocks(depth=1)
        return model, cls(two_groups(model), **options)

    lane = lockstep(way, build, steps=4, check_steps=3)
    assert "checked 3 steps" in repr(lane.overlap)


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(two_groups(model), lr=1e-2)


def building(make: Callable[[Any], Any] = adamw) -> Callable[[], Any]:
    def build() -> Any:
        model = Blocks(depth=2)
        return model, make(model)

    return build


def accumulating(lane: Contender, i: int) -> Any:
    for part in range(3):
        x, y = batch(10 * i + part)
        holding = lane.overlap is not None and part < 2
        if holding:
            with lane.overlap.accumulate():
                lane.backward(loss_of(lane.model(x), y))
        else:
            lane.backward(loss_of(lane.model(x), y))
    lane.step()
    lane.zero_grad()


def with_closure(lane: Contender, i: int) -> Any:
    x, y = batch(i)

    def closure() -> torch.Tensor:
        lane.zero_grad()
        loss = loss_of(lane.model(x), y)
        lane.backward(loss)
        lane.clip()
        return loss

    return lane.optimizer.step(closure).detach()


def in_part(lane: Contender, i: int) -> Any:
    """Every other step leaves out some parameters."""
    x, y = batch(i)
    lane.model.blocks[0].requires_grad_(i % 2 == 0)
    return lane.learn(loss_of(lane.model(x), y))


LOOPS: dict[str, tuple[Any, Any]] = {
    "usual": (building(), learn),
    "accumulating": (building(), accumulating),
    "closure": (building(), with_closure),
    "in part": (building(), in_part),
    "several optimizers": (
        building(lambda m: [torch.optim.SGD(m.blocks.parameters(), lr=0.1, momentum=0.9), adamw_rest(m)]),
        learn,
    ),
}


def adamw_rest(model: Any) -> Any:
    return torch.optim.AdamW([*model.inner.parameters(), *model.outer.parameters()], lr=1e-2)


@pytest.mark.parametrize("loop", list(LOOPS))
@in_every_way
def test_no_false_alarm_in_loops_of_all_kinds(way: str, loop: str) -> None:
    build, step = LOOPS[loop]
    lane = lockstep(way, build, step, steps=4, check_steps=3)
    assert "checked 3 steps" in repr(lane.overlap) or way == "late"


@in_exact_ways
def test_no_false_alarm_with_clipping(way: str) -> None:
    lockstep(way, building(), steps=4, clip=instep.ClipNorm(CLIP), check_steps=3)


@ways("backward", "forward", "undo")
def test_no_false_alarm_with_clipped_values(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        lane.backward(loss_of(lane.model(x), y))
        if lane.overlap is None:
            nn.utils.clip_grad_value_(lane.model.parameters(), 0.01)
        lane.optimizer.step()
        lane.zero_grad()

    lane = lockstep(way, building(), step, steps=4, clip=instep.ClipValue(0.01), check_steps=3)
    assert "checked 3 steps" in repr(lane.overlap)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["forward", "undo"])
def test_no_false_alarm_with_a_scaler(way: str, fused: bool) -> None:
    def run(attached: bool) -> tuple[Any, str]:
        torch.manual_seed(0)
        model = Blocks(depth=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        options = {**WAYS[way], **({"scaler": scaler} if way == "undo" else {})}
        overlap = instep.attach(model, optimizer, bucket_bytes=BUCKET, check_steps=3, **options) if attached else None
        for i in range(4):
            x, y = batch(i)
            scaler.scale(loss_of(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if overlap is not None:
            overlap.synchronize()
        return model, repr(overlap)

    (plain, _), (model, said) = run(False), run(True)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert "checked 3 steps" in said


class Remembers(torch.optim.SGD):
    """Knows some of its parameters by attribute, and one by its class."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.known = [self.param_groups[0]["params"][0]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and (p is self.known[0] or isinstance(p, Unit)):
                    p.clamp_(-0.1, 0.1)


class Unit(nn.Parameter):
    pass


def test_copies_are_taken_for_the_parameters_that_they_stand_for() -> None:
    def build() -> Any:
        model = Blocks(depth=1)
        model.outer.weight = Unit(model.outer.weight.detach())
        return model, Remembers(model.parameters())

    lane = lockstep("backward", build, steps=4, check_steps=3)
    assert "checked 3 steps" in repr(lane.overlap)
    assert "unproven" not in repr(lane.overlap)


def test_complex_parameters() -> None:
    lane = lockstep("backward", lambda: (m := Rotations(), torch.optim.Adam(m.parameters())), check_steps=3)
    assert "checked 3 steps" in repr(lane.overlap)


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_the_loops_random_numbers_stay(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        loss = learn(lane, i)
        return loss, torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.rand())

    def build() -> Any:
        random.seed(0)
        np.random.seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 10))
        return model, torch.optim.AdamW(model.parameters())

    def seeded(lane: Contender, i: int) -> Any:
        random.seed(i)
        np.random.seed(i)
        return step(lane, i)

    lockstep(way, build, seeded, steps=4, check_steps=3)


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_what_the_copies_draw_is_not_drawn_from_the_loops_numbers(way: str) -> None:
    drawn = []
    for check_steps in (0, 3):
        _, _, overlap, iteration = odd_loop(way, draw, check_steps=check_steps)
        torch.manual_seed(0)
        with pytest.raises(UnsupportedOptimizerError, match="draws random numbers"):  # noqa: PT012
            for i in range(3):
                iteration(i)
            overlap.synchronize()
        drawn.append(torch.rand(4))
        overlap.detach()
    assert torch.equal(*drawn)


def draw_for_several(optimizer: Any, mine: list[torch.Tensor]) -> None:
    if len(mine) > 4:
        draw(optimizer, mine)


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_what_only_the_copies_draw_is_not_drawn_from_the_loops_numbers(way: str) -> None:
    """In buckets nothing is drawn: there are too few parameters in each."""
    _, _, overlap, iteration = odd_loop(way, draw_for_several, check_steps=3)
    assert max(len(bucket.parameters) for bucket in overlap.plan.buckets) <= 4
    torch.manual_seed(0)
    with pytest.raises(UnsupportedOptimizerError, match=r"draws random numbers in step.*was taken again on copies"):  # noqa: PT012
        for i in range(3):
            iteration(i)
        overlap.synchronize()
    drawn = torch.rand(4)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(4))
    overlap.detach()


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_nothing_is_kept_after_the_last(way: str) -> None:
    _, _, overlap, iteration = odd_loop(way, lambda optimizer, mine: None, check_steps=2)
    for i in range(3):
        iteration(i)
    assert not schedule_of(overlap)._step.check._running


@pytest.mark.parametrize("number", [-1, True, 1.0, "3", None])
def test_what_is_not_a_number_of_steps_is_refused(number: Any) -> None:
    model = Blocks()
    with pytest.raises(AttachError, match="check_steps must be a number of steps"):
        instep.attach(model, adamw(model), check_steps=number, schedule="backward")


class Uncopyable(MetTheOdd):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lambda optimizer, mine: None)
        self.lock = (_ for _ in ())


@pytest.mark.parametrize("way", ["backward", "undo", "forward"])
def test_an_optimizer_that_cannot_be_copied_is_refused_before_a_write(way: str) -> None:
    model = Odd()
    optimizer = Uncopyable(model.parameters())
    overlap = instep.attach(model, optimizer, bucket_bytes=BUCKET, check_steps=2, **SCHEDULES[way])
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnsupportedOptimizerError, match="check_steps: Uncopyable could not be copied"):  # noqa: PT012
        loss_of(model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
    assert repr(overlap).split(", ")[-1] in ("idle>", "open>")
    overlap.detach()
    assert all(map(torch.equal, before, model.parameters()))


def count(optimizer: Any, mine: list[torch.Tensor]) -> None:
    optimizer.param_groups[0]["seen"] = len(mine)


def count_in_state(optimizer: Any, mine: list[torch.Tensor]) -> None:
    optimizer.state["seen"] = len(mine)


@pytest.mark.parametrize(
    ("late", "words"), [(count, r"param_groups\[0\]\['seen'\]"), (count_in_state, "the state 'seen'")]
)
@pytest.mark.parametrize("way", ["backward", "forward"])
def test_what_is_kept_beside_parameters_is_compared(way: str, late: Any, words: str) -> None:
    """Buckets of one parameter each agree on it, and are wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 41), nn.Linear(41, 37), nn.Linear(37, 10)).requires_grad_(False)
    model[1].weight.requires_grad_(True)
    model[2].weight.requires_grad_(True)
    optimizer = MetTheOdd(model.parameters(), lambda o, mine: late(o, mine) if len(mine) > 1 else None, begins=1)
    overlap = instep.attach(model, optimizer, bucket_bytes=1, check_steps=1, **WAYS[way])
    with pytest.raises(UnsupportedOptimizerError, match=words):  # noqa: PT012
        loss_of(model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
    assert repr(overlap).endswith("torn>")
    overlap.detach()


class WritesGradients(torch.optim.Optimizer):
    """Decay by way of the gradient, in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.1)
                    p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_gradients_that_step_writes_are_kept_as_they_were(way: str) -> None:
    lane = lockstep(way, building(lambda m: WritesGradients(m.parameters())), steps=4, check_steps=3)
    assert "checked 3 steps" in repr(lane.overlap)


class Doubled(nn.Module):
    """One weight is of a class that holds two tensors."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(16, 16) / 4
        self.weight: Any = nn.Parameter(TwoTensor(weight, weight.clone()))
        self.outer = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x @ self.weight)


class OfMine(torch.optim.SGD): ...


@pytest.mark.parametrize("make", [torch.optim.SGD, OfMine])
@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_parameters_of_a_wrapper_class(way: str, make: Any) -> None:
    """Their copies have copies of what they hold, and what they hold is no state that undo does not know."""
    models = [Doubled(), Doubled()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [make(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    with instep.attach(models[1], optimizers[1], check_steps=2, **WAYS[way]) as overlap:
        for i in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                x, y = batch(i)
                loss_of(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            overlap.synchronize()
            plain, attached = ([m.weight.a, m.weight.b, m.outer.weight, m.outer.bias] for m in models)
            assert all(map(torch.equal, plain, attached))
        assert overlap.step_count == 4
