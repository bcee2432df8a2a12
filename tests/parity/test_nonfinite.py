"""``nonfinite=``: steps with a gradient that holds NaN or infinity."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import AttachError, NonFiniteGradientError, TornStepError
from tests.cases import Blocks, batch, optimizer_cases, two_groups, weights
from tests.judged import own_steps_are_judged
from tests.parity.lockstep import CLIP, SMALL, WAYS, Contender, lockstep, loss_of

BAD = [float("nan"), float("inf"), float("-inf")]
# 1e30 is finite, but its square, and so the norm, is not.
LARGE = 1e30


def poisoned(model: nn.Module, name: str, value: float) -> Callable[[], None]:
    """Puts ``value`` into one element of one gradient."""
    parameter = dict(model.named_parameters())[name]

    def put(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = value
        return gradient

    return parameter.register_hook(put).remove


def iteration(lane: Contender, i: int, name: str | None = None, value: float = 0.0) -> None:
    remove = (lambda: None) if name is None else poisoned(lane.model, name, value)
    x, y = batch(i)
    try:
        loss_of(lane.model(x), y).backward()
    finally:
        remove()


def skipping(name: str, value: float, bad_steps: tuple[int, ...] = (1, 3)) -> Callable[[Contender, int], None]:
    """The plain loop leaves the step out by hand."""

    def step(lane: Contender, i: int) -> None:
        iteration(lane, i, name if i in bad_steps else None, value)
        if lane.overlap is not None or i not in bad_steps:
            lane.step()
        lane.zero_grad()

    return step


def two_optimizers() -> tuple[nn.Module, Any]:
    model = Blocks()
    first, rest = list(model.inner.parameters()), [p for n, p in model.named_parameters() if "inner" not in n]
    return model, [torch.optim.AdamW(first, lr=1e-2), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


def build(case: Any = ("AdamW", torch.optim.AdamW, {"lr": 1e-2, "fused": True})) -> Callable[[], Any]:
    def make() -> tuple[nn.Module, Any]:
        model = Blocks()
        return model, case[1](two_groups(model), **case[2])

    return make


PLACES = ["outer.weight", "blocks.1.3.bias", "inner.weight"]
in_ways = pytest.mark.parametrize("way", ["forward", "late", "undo"])


@in_ways
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", BAD)
def test_skip(way: str, place: str, value: float) -> None:
    lane = lockstep(way, build(), skipping(place, value), nonfinite="skip")
    assert lane.overlap.skip_count == 2
    assert lane.overlap.step_count == 3


@in_ways
@pytest.mark.parametrize("case", list(optimizer_cases())[::4], ids=lambda case: case[0])
def test_skip_with_every_kind_of_optimizer(way: str, case: Any) -> None:
    lockstep(way, build(case), skipping("blocks.0.3.weight", BAD[0], bad_steps=(0, 2)), nonfinite="skip")


@in_ways
def test_the_first_step_left_out_makes_no_state(way: str) -> None:
    model, optimizer = build()()
    with instep.attach(model, optimizer, nonfinite="skip", **WAYS[way]) as overlap:
        lane = Contender(model, optimizer, {})
        iteration(lane, 0, "inner.weight", BAD[0])
        optimizer.step()
        overlap.synchronize()
        assert not optimizer.state
        assert overlap.skip_count == 1


@in_ways
def test_finite_gradients_whose_norm_overflows_are_not_left_out(way: str) -> None:
    """In the last step: some kernels make NaN of the state that it leaves."""

    def step(lane: Contender, i: int) -> None:
        iteration(lane, i, "inner.weight" if i == 4 else None, LARGE)
        lane.step()
        lane.zero_grad()

    assert lockstep(way, build(), step, nonfinite="skip").overlap.skip_count == 0


@in_ways
def test_clipped_with_the_norm_of_the_step_that_was_left_out(way: str) -> None:
    def step(lane: Contender, i: int) -> torch.Tensor:
        iteration(lane, i, "outer.bias" if i == 2 else None, float("inf"))
        norm = nn.utils.clip_grad_norm_(lane.model.parameters(), CLIP) if lane.overlap is None else None
        if lane.overlap is not None or i != 2:
            for optimizer in lane.optimizers:
                optimizer.step()
        norm = lane.overlap.grad_norm if norm is None else norm
        lane.zero_grad()
        return norm

    # The plain loop has clipped the gradients of the step that it leaves out, and clears them.
    lane = lockstep(way, build(), step, nonfinite="skip", clip=instep.ClipNorm(CLIP))
    assert lane.overlap.skip_count == 1


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, whatever gradients there are."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class BeginningLate(torch.optim.SGD):
    """Makes, in its first step, what it counts with: in place of ``None``, and where nothing was."""

    count: Any

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.total: Any = None
        for group in self.param_groups:
            group["seen"] = None

    def step(self, closure: Any = None) -> Any:
        self.total = torch.ones(()) if self.total is None else self.total + 1
        self.count = getattr(self, "count", 0) + 1
        self.state["all"] = {"count": self.count}  # type: ignore[index]  # its keys may be names, too
        for group in self.param_groups:
            group["seen"] = torch.ones(()) if group["seen"] is None else group["seen"] + 1
        return super().step(closure)


@in_ways
def test_what_a_step_without_gradients_would_begin_to_count_is_taken_away(way: str) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = Blocks()
        return model, BeginningLate(two_groups(model), lr=0.1)

    def counted(lane: Contender, i: int) -> Any:
        step(lane, i)
        optimizer = lane.optimizers[0]
        return vars(optimizer).get("total"), vars(optimizer).get("count")

    step = skipping("outer.weight", BAD[0], (0, 2))
    lockstep(way, make, counted, nonfinite="skip")


class WritesWithoutGradients(Counting):
    """Writes, without any gradient, what no other optimizer here does: parameters, an average in a module, lists, an
    entry of state, and generators."""

    def __init__(self, params: Any, average: nn.Module, **options: Any) -> None:
        super().__init__(params, **options)
        average.ticks = 0  # type: ignore[assignment]
        self.average: Any = average
        self._counts = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._counts[0] += 1
        self.average.ticks += 1
        self._counts.append(random.randrange(100))
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - 0.01 * torch.rand(()))
                self.state[p]["decayed"] = self._counts[0]
        for mean, p in zip(self.average.parameters(), self.param_groups[0]["params"], strict=False):
            mean.lerp_(p, 0.1)
        return super().step(closure)


@in_ways
@pytest.mark.parametrize("bad_steps", [(0, 2), (1, 3, 4)])
def test_what_a_foreign_step_without_gradients_writes_is_put_back(way: str, bad_steps: tuple[int, ...]) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = Blocks()
        # What is written in a module stays, wherever parts are compared: undo raises of it.
        average = nn.Module() if way == "undo" else copy.deepcopy(model)
        return model, WritesWithoutGradients(model.parameters(), average, lr=1e-2, momentum=0.9)

    def step(lane: Contender, i: int) -> tuple[Any, ...]:
        torch.manual_seed(i)
        random.seed(i)
        skipping("outer.weight", BAD[0], bad_steps)(lane, i)
        optimizer: Any = lane.optimizer
        average = torch.cat([torch.zeros(1), *(p.detach().flatten() for p in optimizer.average.parameters())])
        return list(optimizer._counts), optimizer.average.ticks, average, torch.get_rng_state(), random.random()

    with own_steps_are_judged():
        lane = lockstep(way, make, step, nonfinite="skip")
    assert lane.overlap.skip_count == len(bad_steps)


@in_ways
def test_a_step_that_one_of_two_optimizers_takes_does_not_answer_for_the_next(way: str) -> None:
    def step(lane: Contender, i: int) -> None:
        bad = i in (1, 3)
        iteration(lane, i, "inner.weight" if bad else None, float("inf"))
        if lane.overlap is not None or not bad:
            lane.optimizers[i % 2].step()
        lane.zero_grad()

    lockstep(way, two_optimizers, step, nonfinite="skip")


@in_ways
def test_two_optimizers_are_left_out_together(way: str) -> None:
    lane = lockstep(way, two_optimizers, skipping("inner.weight", BAD[0]), nonfinite="skip")
    assert lane.overlap.skip_count == 2


@in_ways
def test_gradients_stay_as_in_the_plain_loop(way: str) -> None:
    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        lane.zero_grad()
        iteration(lane, i, "outer.weight" if i == 1 else None, BAD[0])
        if lane.overlap is not None or i != 1:
            lane.step()
        return [torch.nan_to_num(p.grad) for p in lane.model.parameters()]

    lockstep(way, build(), step, nonfinite="skip")


def step_on(way: str, nonfinite: Any, place: str) -> Iterator[Any]:
    """Attached and trained for two steps, then a bad gradient: what ``backward`` and ``step`` raise."""
    torch.manual_seed(0)
    model, optimizer = build()()
    with instep.attach(model, optimizer, nonfinite=nonfinite, bucket_bytes=SMALL, **WAYS[way]) as overlap:
        lane = Contender(model, optimizer, {})
        for i in range(2):
            iteration(lane, i)
            optimizer.step()
            optimizer.zero_grad()
        overlap.synchronize()
        before = weights(model)

        def bad() -> None:
            iteration(lane, 2, place, BAD[0])
            optimizer.step()

        with pytest.raises(NonFiniteGradientError) as raised:
            bad()
        assert raised.value.parameter == place
        assert raised.value.rank == 0
        assert place in str(raised.value)
        yield model, optimizer, overlap, before


@in_ways
@pytest.mark.parametrize("place", PLACES)
def test_raise_before_anything_is_written(way: str, place: str) -> None:
    for model, optimizer, overlap, before in step_on(way, "raise", place):
        assert all(map(torch.equal, before, weights(model)))
        optimizer.zero_grad()
        lane = Contender(model, optimizer, {})
        iteration(lane, 3)
        optimizer.step()
        overlap.synchronize()
        assert overlap.step_count == 3
        assert not all(map(torch.equal, before, weights(model)))


@pytest.mark.parametrize("place", PLACES)
def test_raise_in_backward_tears_what_was_begun(place: str) -> None:
    for model, optimizer, overlap, before in step_on("backward", "raise", place):
        after = weights(model)
        written = [n for (n, _), a, b in zip(model.named_parameters(), before, after, strict=True) if not a.equal(b)]
        assert place not in written
        assert all(w.isfinite().all() for w in after)
        if not written:
            optimizer.zero_grad()
            iteration(Contender(model, optimizer, {}), 3)
            continue
        with pytest.raises(TornStepError) as torn:
            optimizer.step()
        assert set(written) == set(torn.value.applied)
        assert isinstance(torn.value.cause, NonFiniteGradientError)
        overlap.accept_torn()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "backward", "nonfinite": "stop"}, "nonfinite must be one of allow, skip, raise"),
        ({"schedule": "backward", "nonfinite": "skip"}, "schedule='forward', or undo=True"),
        (
            {
                "nonfinite": "skip",
                "schedule": "forward",
                "defer": True,
                "clip": instep.ClipNorm(1.0, error_if_nonfinite=True),
            },
            "error_if_nonfinite=True",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: Any, message: str) -> None:
    model, optimizer = build()()
    with pytest.raises(AttachError, match=message):
        instep.attach(model, optimizer, **options)


def test_an_error_survives_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(NonFiniteGradientError("text", "weight", 3)))
    assert (str(error), error.parameter, error.rank) == ("text", "weight", 3)
