"""``GradScaler`` on one device: the loop that scales its loss is the plain loop, whichever way the scale comes off."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

import instep
from instep import ClipNorm, ClipValue
from instep.errors import AttachError, SpentGradientError, TornStepError
from tests.cases import Blocks, batch, two_groups
from tests.devices import here
from tests.parity.lockstep import SMALL, Contender, Step, lockstep, loss_of

WAYS = ("forward", "late", "undo", "undo, scaler given", "undo on the host, scaler given")
in_every_way = pytest.mark.parametrize("way", WAYS)
in_main_ways = pytest.mark.parametrize("way", WAYS[1:4])
OVERFLOWS = (0, 3)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW for-loop": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=False),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "SGD foreach": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, foreach=True),
    "SGD fused": lambda groups: torch.optim.SGD(groups, lr=0.05, fused=True),
}
if here().type != "cuda":  # of which torch has no such kernel
    OPTIMIZERS["Adagrad fused"] = lambda groups: torch.optim.Adagrad(groups, lr=1e-2, fused=True)
GIVEN = "undo, scaler given"
FUSED = tuple(name for name in OPTIMIZERS if name.endswith("fused"))
NOT_FUSED = tuple(name for name in OPTIMIZERS if name not in FUSED)


class Scalers:
    """One scaler for each of the two loops, and how they use it."""

    def __init__(self, growth: float = 2.0, enabled: bool = True, interval: int = 2) -> None:
        def make() -> GradScaler:
            return GradScaler(
                "cpu",
                init_scale=2.0**12,
                growth_factor=growth,
                backoff_factor=0.5,
                growth_interval=interval,
                enabled=enabled,
            )

        self.plain, self.attached = make(), make()

    def of(self, lane: Contender) -> GradScaler:
        return self.plain if lane.overlap is None else self.attached

    def step(
        self,
        unscale: bool = False,
        clip: Callable[[Contender], Any] = lambda lane: None,
        overflows: tuple[int, ...] = OVERFLOWS,
        micro_batches: int = 1,
    ) -> Step:
        """An iteration of the loop. Returns what ``clip`` does, and the scale."""

        def step(lane: Contender, i: int) -> Any:
            scaler = self.of(lane)
            for micro in range(micro_batches):
                x, y = batch(micro_batches * i + micro)
                loss = loss_of(lane.model(x), y) * (math.inf if i in overflows else 1.0) / micro_batches
                lane.backward(scaler.scale(loss))
            if unscale:
                for optimizer in lane.optimizers:
                    scaler.unscale_(optimizer)
            norm = clip(lane)
            for optimizer in lane.optimizers:
                scaler.step(optimizer)
            scaler.update()
            lane.zero_grad()
            return norm, scaler.get_scale()

        return step


def build(optimizer: str) -> Callable[[], Any]:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks(depth=2)
        return model, OPTIMIZERS[optimizer](two_groups(model))

    return made


def two_optimizers() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Blocks(depth=2)
    matrices, rest = (group["params"] for group in two_groups(model))
    return model, [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2, fused=True)]


def compare(way: str, scalers: Scalers, made: Any, step: Step, steps: int = 6, **options: Any) -> Contender:
    if way.endswith("given"):
        options["scaler"] = scalers.attached
    if "host" in way:
        options["undo"] = "host"
    return lockstep(re.split(r"\W", way)[0], made, step, steps, **options)


@pytest.mark.parametrize(
    ("growth", "unscale"), [(2.0, False), (1.5, False), (1.5, True)], ids=["", "odd scale", "odd scale, unscale_"]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@in_every_way
def test_an_unmodified_loop_with_a_scaler(way: str, optimizer: str, unscale: bool, growth: float) -> None:
    scalers = Scalers(growth)
    lane = compare(way, scalers, build(optimizer), scalers.step(unscale))
    # A fused optimizer's step() is called and skips the update itself; how often others are called GradScaler decides.
    skips = getattr(lane.optimizer, "_step_supports_amp_scaling", False)  # not Adagrad's, in older torch
    assert lane.overlap.step_count == (6 if skips else 4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_forward_takes_the_scaler_too(optimizer: str) -> None:
    scalers = Scalers()
    compare("forward", scalers, build(optimizer), scalers.step(), scaler=scalers.attached)


@pytest.mark.parametrize(
    ("optimizer", "unscale"),
    [
        *((name, False) for name in FUSED),
        *((name, False) for name in NOT_FUSED),
        *((name, True) for name in OPTIMIZERS),
    ],
)
def test_undo_does_no_step_again_while_the_scaler_is_given_and_nothing_overflows(optimizer: str, unscale: bool) -> None:
    scalers = Scalers()
    lane = compare(GIVEN, scalers, build(optimizer), scalers.step(unscale, overflows=()))
    assert lane.overlap.redo_count == 0
    assert lane.overlap.step_count == 6


@pytest.mark.parametrize("optimizer", NOT_FUSED)
def test_nor_where_the_scale_is_no_power_of_two_unless_a_fused_kernel_divides_by_it(optimizer: str) -> None:
    scalers = Scalers(growth=1.5)
    lane = compare(GIVEN, scalers, build(optimizer), scalers.step(overflows=()))
    assert lane.overlap.redo_count == 0


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_undo_puts_back_exactly_the_steps_that_overflow(optimizer: str) -> None:
    scalers = Scalers()
    lane = compare(GIVEN, scalers, build(optimizer), scalers.step())
    assert lane.overlap.redo_count == len(OVERFLOWS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_undo_does_every_step_again_where_the_scaler_is_not_given(optimizer: str) -> None:
    scalers = Scalers()
    lane = compare("undo", scalers, build(optimizer), scalers.step())
    assert lane.overlap.redo_count == 6


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@in_every_way
def test_two_optimizers_and_one_scaler(way: str, unscale: bool) -> None:
    scalers = Scalers()
    compare(way, scalers, two_optimizers, scalers.step(unscale))


CLIPS = [ClipNorm(0.1), ClipNorm(1e6), ClipValue(0.01)]


@pytest.mark.parametrize(("growth", "unscale"), [(2.0, False), (1.5, True)], ids=["", "odd scale, unscale_"])
@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("optimizer", ["AdamW foreach", "AdamW fused"])
@in_main_ways
def test_clip_is_applied_without_the_scale(way: str, optimizer: str, clip: Any, growth: float, unscale: bool) -> None:
    """As the plain loop: ``unscale_``, clip, step. The attached one may leave out ``unscale_``."""
    scalers = Scalers(growth)

    def by_hand(lane: Contender) -> None:
        if isinstance(clip, ClipValue):
            nn.utils.clip_grad_value_(lane.model.parameters(), clip.clip_value)
        else:
            clip_grad_norm_(lane.model.parameters(), clip.max_norm)

    plain = scalers.step(True, by_hand)
    attached = scalers.step(unscale)

    def step(lane: Contender, i: int) -> Any:
        _, scale = plain(lane, i) if lane.overlap is None else attached(lane, i)
        return scale

    compare(way, scalers, build(optimizer), step, clip=clip)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@in_every_way
def test_grad_norm_is_that_without_the_scale(way: str, optimizer: str) -> None:
    scalers, clip = Scalers(), ClipNorm(0.1)

    def norm(lane: Contender) -> torch.Tensor | None:
        return clip_grad_norm_(lane.model.parameters(), 0.1) if lane.overlap is None else None

    def step(lane: Contender, i: int) -> Any:
        found, _ = scalers.step(lane.overlap is None, norm, overflows=())(lane, i)
        return found if lane.overlap is None else lane.overlap.grad_norm

    compare(way, scalers, build(optimizer), step, clip=clip)


def test_clip_norm_that_does_not_clip_costs_no_step_done_again() -> None:
    scalers = Scalers()
    step = scalers.step(overflows=())
    lane = compare(GIVEN, scalers, build("AdamW foreach"), step, clip=ClipNorm(1e6))
    assert lane.overlap.redo_count == 0


@pytest.mark.parametrize("optimizer", ["AdamW foreach", "AdamW fused"])
@in_every_way
def test_gradients_after_the_step_are_the_plain_ones(way: str, optimizer: str) -> None:
    """Without the scale where ``unscale_`` has taken it off, with it where a kernel has."""
    scalers = Scalers()
    iteration = scalers.step(overflows=())

    def step(lane: Contender, i: int) -> Any:
        lane.optimizer.zero_grad()
        zero, lane.zero_grad = lane.zero_grad, lambda: None  # type: ignore[method-assign]
        try:
            return iteration(lane, i)
        finally:
            lane.zero_grad = zero  # type: ignore[method-assign]

    compare(way, scalers, build(optimizer), step)


@pytest.mark.parametrize("read", [lambda p: p.grad.norm(), lambda p: p.grad.clone(), lambda p: repr(p.grad)])
@in_every_way
def test_a_scaled_gradient_that_is_read_is_the_plain_one(way: str, read: Callable[[Any], Any]) -> None:
    scalers = Scalers()

    def look(lane: Contender) -> Any:
        return read(lane.model.inner.weight)

    compare(way, scalers, build("AdamW foreach"), scalers.step(clip=look))


@in_every_way
def test_the_scale_is_changed_between_backward_and_step(way: str) -> None:
    scalers = Scalers()

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        scaler = scalers.of(lane)
        lane.backward(scaler.scale(loss_of(lane.model(x), y)))
        scaler._scale.mul_(3.0)  # type: ignore[union-attr]
        scaler.step(lane.optimizer)
        scaler.update()
        lane.zero_grad()
        return scaler.get_scale()

    compare(way, scalers, build("AdamW foreach"), step)


@in_every_way
def test_a_loss_that_was_not_scaled_in_some_steps(way: str) -> None:
    """A loop that turns its scaler off for a while, and steps by itself."""
    scalers = Scalers()
    iteration = scalers.step()

    def step(lane: Contender, i: int) -> Any:
        if i % 2:
            x, y = batch(i)
            return lane.learn(loss_of(lane.model(x), y))
        return iteration(lane, i)

    compare(way, scalers, build("AdamW foreach"), step)


@pytest.mark.parametrize("optimizer", ["AdamW foreach", "AdamW fused"])
def test_backward_refuses_a_scaler_with_the_choices(optimizer: str) -> None:
    model, opt = build(optimizer)()
    with pytest.raises(AttachError, match=r"schedule='forward'.*undo=True"):
        instep.attach(model, opt, scaler=GradScaler("cpu"), schedule="backward")
    assert instep.attached(model) is None


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_backward_with_a_scaler_anyway_is_torn_and_says_so(optimizer: str, unscale: bool) -> None:
    model, opt = build(optimizer)()
    with instep.attach(model, opt, bucket_bytes=SMALL, schedule="backward"):
        scaler = GradScaler("cpu")
        x, y = batch(0)
        scaler.scale(loss_of(model(x), y)).backward()
        with pytest.raises(SpentGradientError, match=r"still scaled.*schedule='forward'.*undo=True"):
            scaler.unscale_(opt) if unscale else scaler.step(opt)
        with pytest.raises(TornStepError):
            opt.step()
        with pytest.raises(TornStepError):
            model(x)


@pytest.mark.parametrize("optimizer", ["AdamW foreach", "AdamW fused"])
@pytest.mark.parametrize("way", ["backward", "forward", "undo", "undo on the host"])
def test_a_disabled_scaler_is_fine_everywhere(way: str, optimizer: str) -> None:
    scalers = Scalers(enabled=False)
    step = scalers.step(overflows=())
    lane = compare(way, scalers, build(optimizer), step, 4, scaler=scalers.attached)
    assert lane.overlap.redo_count == 0
    assert lane.overlap.step_count == 4


def test_a_bucket_that_was_frozen_after_the_forward() -> None:
    """Its parameters are announced, and have no gradients."""

    def trained(attached: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        if attached:
            instep.attach(model, optimizer, undo=True, scaler=scaler, bucket_bytes=1, schedule="backward")
        loss = model(torch.ones(2, 4)).square().sum()
        model[1].requires_grad_(False)  # the first bucket
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))
