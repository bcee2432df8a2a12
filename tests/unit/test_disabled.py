"""``INSTEP_DISABLE=1``: the same training without overlap, beside a loop that itself does what ``attach`` is told."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import instep
from instep import ClipNorm, ClipValue
from instep.errors import AttachError, NonFiniteGradientError, StaleAttachmentError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.checkpoint import saved

MAX_NORM, MAX_VALUE = 0.05, 0.003


@pytest.fixture(autouse=True)
def _disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_DISABLE", "1")


class Loop:
    def __init__(
        self, options: dict[str, Any] | None, *, optimizers: int = 1, micro: int = 1, scaled: str = ""
    ) -> None:
        torch.manual_seed(0)
        self.model = Blocks()
        parameters = list(self.model.parameters())
        self.optimizers = [
            torch.optim.AdamW(parameters[first::optimizers], lr=1e-2, fused=bool(scaled)) for first in range(optimizers)
        ]
        self.micro, self.scaled = micro, scaled
        self.scaler = GradScaler("cpu", init_scale=2.0**10, enabled=bool(scaled))
        self.plain = options is None
        self.overlap = (
            None
            if options is None
            else instep.attach(self.model, self.optimizers, **{"schedule": "backward", **options})
        )

    def step(self, i: int, clip: Callable[[list[nn.Parameter]], Any] | None, *, infinite: bool = False) -> None:
        for micro in range(self.micro):
            held = self.overlap is not None and micro < self.micro - 1
            with self.overlap.accumulate() if held and self.overlap is not None else nullcontext():
                x, y = batch(self.micro * i + micro)
                loss = self.scaler.scale(nn.functional.cross_entropy(self.model(x), y))
                self.backward(loss * (torch.inf if infinite else 1))
        if self.scaled == "unscale_" or (self.plain and self.scaled):
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if self.plain and clip is not None:
            clip(list(self.model.parameters()))
        if not (self.plain and infinite):
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        if self.overlap is None:
            loss.backward()
        else:
            self.overlap.backward(loss)

    def difference(self, other: "Loop") -> str | None:
        return first_difference(
            training_state(self.model, self.optimizers), training_state(other.model, other.optimizers)
        )


def by_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def by_value(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(parameters, MAX_VALUE)


CLIPS: dict[str, tuple[dict[str, Any], Any]] = {
    "no clip": ({}, None),
    "norm, undo": ({"clip": ClipNorm(MAX_NORM), "undo": True}, by_norm),
    "norm, forward": ({"clip": ClipNorm(MAX_NORM), "schedule": "forward", "defer": True}, by_norm),
    "norm, two passes": ({"clip": ClipNorm(MAX_NORM, mode="two_pass")}, by_norm),
    "value": ({"clip": ClipValue(MAX_VALUE)}, by_value),
}


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("clip", CLIPS)
def test_the_plain_loop(clip: str, optimizers: int, micro: int) -> None:
    options, by_hand = CLIPS[clip]
    plain, disabled = (Loop(given, optimizers=optimizers, micro=micro) for given in (None, options))
    assert disabled.overlap is not None
    for i in range(4):
        plain.step(i, by_hand)
        disabled.step(i, None)
        assert plain.difference(disabled) is None
        assert disabled.overlap.step_count == i + 1
        assert (disabled.overlap.grad_norm is not None) == (by_hand is by_norm)
        if disabled.overlap.grad_norm is not None:
            assert disabled.overlap.grad_norm > MAX_NORM


@pytest.mark.parametrize("scaled", ["step", "unscale_"])
@pytest.mark.parametrize("clip", [clip for clip in CLIPS if clip != "norm, two passes"])
def test_a_loss_scale(clip: str, scaled: str) -> None:
    """The scale is taken off first: by the loop, or for the kernel that would divide by it."""
    options, by_hand = CLIPS[clip]
    plain, disabled = (Loop(given, scaled=scaled) for given in (None, options))
    for i in range(3):
        plain.step(i, by_hand)
        disabled.step(i, None)
        assert plain.difference(disabled) is None


@pytest.mark.parametrize("scaled", ["step", "unscale_"])
def test_a_loss_scale_of_two_optimizers(scaled: str) -> None:
    """Values are clipped once their own optimizer's are unscaled: GradScaler may come to the others later."""
    options, by_hand = CLIPS["value"]
    plain, disabled = (Loop(given, optimizers=2, scaled=scaled) for given in (None, options))
    for i in range(3):
        plain.step(i, by_hand)
        disabled.step(i, None)
        assert plain.difference(disabled) is None


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{"schedule": "forward", "defer": True}, {"schedule": "backward", "undo": True, "clip": ClipNorm(MAX_NORM)}],
)
def test_steps_that_are_left_out(options: dict[str, Any], optimizers: int) -> None:
    plain = Loop(None, optimizers=optimizers)
    disabled = Loop({**options, "nonfinite": "skip"}, optimizers=optimizers)
    assert disabled.overlap is not None
    for i in range(4):
        plain.step(i, by_norm if "clip" in options else None, infinite=i in (0, 2))
        disabled.step(i, None, infinite=i in (0, 2))
        assert plain.difference(disabled) is None
    assert (disabled.overlap.step_count, disabled.overlap.skip_count) == (2, 2)


def test_an_error_for_a_gradient_that_is_not_finite() -> None:
    disabled, plain = Loop({"nonfinite": "raise"}), Loop(None)
    with pytest.raises(NonFiniteGradientError, match="Nothing of the step was applied") as caught:
        disabled.step(0, None, infinite=True)
    assert caught.value.parameter is not None
    assert plain.difference(disabled) is None
    for loop in (disabled, plain):
        loop.model.zero_grad()
        loop.step(1, None)
    assert plain.difference(disabled) is None


def test_a_norm_that_is_not_finite_raises_before_the_step() -> None:
    disabled = Loop({"clip": ClipNorm(MAX_NORM, error_if_nonfinite=True), "undo": True})
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        disabled.step(0, None, infinite=True)
    assert Loop(None).difference(disabled) is None


def test_closures() -> None:
    loops = Loop(None), Loop({"clip": ClipNorm(MAX_NORM), "undo": True})
    for i in range(3):
        for loop in loops:

            def closure(loop: Loop = loop, i: int = i) -> torch.Tensor:
                x, y = batch(i)
                loop.model.zero_grad()
                loss = nn.functional.cross_entropy(loop.model(x), y)
                loss.backward()
                if loop.plain:
                    by_norm(list(loop.model.parameters()))
                return loss

            loop.optimizers[0].step(closure)
        assert loops[0].difference(loops[1]) is None


def test_a_step_that_raises_is_no_step() -> None:
    """The next one is clipped as any other."""
    plain, disabled = Loop(None), Loop({"clip": ClipNorm(MAX_NORM), "undo": True})
    assert disabled.overlap is not None
    for loop in (plain, disabled):
        handle = loop.optimizers[0].register_step_post_hook(lambda *_: 1 / 0)  # type: ignore[arg-type]  # it raises
        loop.optimizers[0]._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            loop.step(0, by_norm)
        handle.remove()
        loop.model.zero_grad()
        loop.step(1, by_norm)
    assert plain.difference(disabled) is None


def test_parameters_that_are_added_are_clipped_too() -> None:
    plain, disabled = Loop(None), Loop({"clip": ClipNorm(MAX_NORM), "undo": True})
    for loop in (plain, disabled):
        loop.step(0, by_norm)
        loop.model.added = nn.Linear(16, 16)
        nn.init.ones_(loop.model.added.weight)
        nn.init.zeros_(loop.model.added.bias)
        loop.optimizers[0].add_param_group({"params": list(loop.model.added.parameters())})
        x, _ = batch(1)
        loop.model.added(loop.model.added(x)).square().mean().backward()
        loop.step(1, by_norm)
    assert plain.difference(disabled) is None


def test_what_it_says_of_itself(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        loop = Loop({"schedule": "backward", "undo": True})
    assert "INSTEP_DISABLE is set: Blocks trains without overlap" in caplog.text
    overlap = loop.overlap
    assert overlap is not None
    assert instep.attached(loop.model) is overlap
    assert "Blocks with AdamW: schedule='backward', 0 buckets of 0.00 MiB, 0 steps, disabled" in repr(overlap)
    assert overlap.plan.buckets == ()
    with overlap.record(steps=1) as recording:
        loop.step(0, None)
    recording.save(tmp_path / "run.json")
    saved.save(tmp_path / "run", loop.model, loop.optimizers, overlap)
    saved.load(tmp_path / "run", loop.model, loop.optimizers, overlap)
    assert overlap.step_count == 1
    overlap.synchronize()
    overlap.accept_torn()
    loop.model(batch(1)[0]).sum().backward()
    overlap.rollback()
    assert all(p.grad is None for p in loop.model.parameters())
    assert (overlap.step_count, overlap.redo_count, overlap.skip_count) == (1, 0, 0)
    overlap.detach()
    assert "detached" in repr(overlap)
    assert instep.attached(loop.model) is None


def test_nothing_stays() -> None:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, clip=ClipValue(MAX_VALUE), schedule="backward"):
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"comm_hook": (None, lambda state, bucket: None)}, "comm_hook"),
        ({"mixed_precision": object()}, "mixed_precision"),
        ({"schedule": "sideways"}, "sideways"),
    ],
)
def test_what_the_plain_loop_cannot_have_is_refused(options: dict[str, Any], name: str) -> None:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AttachError, match=name):
        instep.attach(model, optimizer, **{"schedule": "backward", **options})
    with instep.attach(model, optimizer, schedule="backward"), pytest.raises(AttachError, match="already attached"):
        instep.attach(model, optimizer, schedule="backward")


def test_a_loop_that_changes_its_parameters_goes_on() -> None:
    """As the default line goes on, which leaves the steps to torch then."""
    loops = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loops.append((model, optimizer, instep.attach(model, optimizer) if attached else None))
    for i in range(5):
        for model, optimizer, _ in loops:
            if i == 2:
                del optimizer.param_groups[0]["params"][3:5]
            x, y = batch(i)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.zero_grad()
        assert first_difference(*(training_state(model, optimizer) for model, optimizer, _ in loops)) is None
    overlap = loops[1][2]
    assert overlap is not None
    assert "is no longer in AdamW.param_groups" in repr(overlap)
    assert overlap.step_count == 5


def test_what_was_asked_for_needs_its_parameters() -> None:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with instep.attach(model, optimizer, clip=ClipNorm(1.0)):
        del optimizer.param_groups[0]["params"][3:5]
        nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        with pytest.raises(StaleAttachmentError, match="is no longer in AdamW"):
            optimizer.step()
