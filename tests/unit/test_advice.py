"""``overlap.advice``: whether steps are put off, and what the loop could gain."""

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks

import instep
from instep._step import deferral as observed
from tests.cases import Blocks, batch

STEPS = observed.LAST + 2


def layers() -> nn.Module:
    """2 MiB of gradients."""
    return nn.Sequential(nn.Linear(16, 256), *(nn.Linear(256, 256) for _ in range(8)))


class Loop:
    def __init__(self, make: Callable[[], nn.Module] = layers, **options: Any) -> None:
        self.model = make()
        self.steps_in_backward = options.get("schedule") == "backward"
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.overlap = instep.attach(self.model, self.optimizer, **options)

    def train(self, between: Callable[[nn.Module], Any], steps: int = STEPS) -> str:
        """What is advised in the end, after the sentence on what is put off."""
        for i in range(steps):
            self.model(batch(i)[0]).square().mean().backward()
            between(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
        said = self.overlap.advice.splitlines()
        if not self.steps_in_backward:
            assert said.pop(0).startswith("Steps are ")
        return "".join(said)


def nothing(model: nn.Module) -> None: ...


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


USES: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "a log": lambda model: [float(p.grad.norm()) for p in model.parameters() if p.grad is not None],
    "another gradient": replace,
}


@pytest.mark.parametrize("defer", ["auto", True, False])
def test_a_loop_that_leaves_gradients_alone(defer: Any) -> None:
    said = Loop(defer=defer).train(nothing)
    assert "leaves gradients alone" in said
    assert "schedule='backward' would free 1.8 of their 2.0 MiB" in said
    assert "ms of an iteration" in said


def test_a_loop_with_clip_norm_is_told_of_the_mode_that_frees_gradients() -> None:
    said = Loop(clip=instep.ClipNorm(2.0)).train(nothing)
    assert "schedule='backward' with clip=ClipNorm(2.0, mode='two_pass') would free 1.8 of their 2.0 MiB" in said
    assert "overlap.backward(loss) in place of loss.backward()" in said


def test_the_line_that_is_advised_does_what_it_says() -> None:
    said = Loop().train(nothing)
    freed, total = map(float, re.findall(r"free ([0-9.]+) of their ([0-9.]+) MiB", said)[0])
    loop = Loop(schedule="backward")
    assert loop.train(nothing) == ""
    largest = max(bucket.nbytes for bucket in loop.overlap.plan.buckets) / 2**20
    assert total - largest == pytest.approx(freed, abs=0.1)  # to a tenth, as it is said
    assert loop.overlap.stats()["freed_bytes"] / loop.overlap.step_count / 2**20 == pytest.approx(total, abs=0.1)


def clipped(max_norm: float, **options: Any) -> Any:
    return Loop(schedule="backward", undo=True, clip=instep.ClipNorm(max_norm), **options)


def test_steps_that_are_clipped() -> None:
    loop = clipped(1e-3)
    said = loop.train(nothing)
    assert loop.overlap.redo_count == 1
    assert f"{STEPS} of {STEPS} steps were clipped" in said
    assert "clip=ClipNorm(0.001, mode='two_pass') in place of undo" in said
    assert "No gradient was freed in backward: undo keeps them until optimizer.step()." in said


def test_what_is_said_of_copies_is_what_is_copied() -> None:
    """In place of ``undo`` the same numbers need none."""
    loop = clipped(1e9, bucket_bytes=2**20)
    said = loop.train(nothing)
    assert "steps were clipped" not in said
    assert "clip=ClipNorm(1000000000.0) without schedule='backward' and undo gives the same numbers" in said
    assert "clip=ClipNorm(1000000000.0, mode='two_pass') in place of undo" in said
    mib = float(re.findall(r"\(([0-9.]+) MiB in every step\)", said)[0])
    # SGD has no state.
    assert mib == pytest.approx(sum(p.nbytes for p in loop.model.parameters()) / 2**20, abs=0.05)


def test_what_is_advised_in_place_of_steps_that_are_taken_twice() -> None:
    loop = Loop(schedule="backward", clip=instep.ClipNorm(1e-3, mode="two_pass"), bucket_bytes=2**20)
    for i in range(STEPS):
        loop.overlap.backward(loop.model(batch(i)[0]).sum())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert loop.overlap.advice == ""
    assert loop.overlap.stats()["freed_bytes"] > 0


def test_the_loop_itself_has_steps_taken_twice() -> None:
    said = Loop(schedule="backward", undo=True).train(USES["clip_grad_norm_"])
    assert "steps were taken twice" in said
    assert "The loop changes gradients" in said


def test_steps_that_stand() -> None:
    said = Loop(schedule="backward", undo=True).train(nothing)
    assert said == "No gradient was freed in backward: undo keeps them until optimizer.step()."


@pytest.mark.parametrize("way", ["accumulate", "steps", "micro_batches"])
def test_gradients_that_are_kept_between_micro_batches(way: str) -> None:
    loop = Loop(schedule="backward", accumulation_steps=2 if way == "steps" else 1)
    overlap = loop.overlap
    for i in range(STEPS):
        if way == "micro_batches":
            overlap.micro_batches(lambda k: loop.model(batch(k)[0]).square().mean(), [2 * i, 2 * i + 1])
        else:
            with overlap.accumulate() if way == "accumulate" else nullcontext():
                loop.model(batch(2 * i)[0]).square().mean().backward()
            loop.model(batch(2 * i + 1)[0]).square().mean().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    said = f"All gradients ({overlap.plan.nbytes / 2**20:.1f} MiB) are kept from the first micro-batch of a step"
    assert (said in overlap.advice) == (way != "micro_batches")


@pytest.mark.parametrize("schedule", ["forward", "backward"])
@pytest.mark.parametrize(
    ("dtype", "optimizer", "says"),
    [
        (torch.bfloat16, torch.optim.AdamW, True),
        (torch.bfloat16, instep.masters(torch.optim.AdamW), False),
        (torch.bfloat16, type("Own", (torch.optim.AdamW,), {"step": lambda self, closure=None: None}), False),
        (torch.float32, torch.optim.AdamW, False),
    ],
)
def test_updates_that_are_rounded_away(dtype: torch.dtype, optimizer: Any, says: bool, schedule: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    made = optimizer(model.parameters())
    with instep.attach(model, made, schedule=schedule) as overlap:
        said = overlap.advice
        del made
        assert "fp32" not in overlap.advice  # of an optimizer that is gone
    assert ("AdamW steps bfloat16 weights without fp32 masters" in said) == says


def test_all_is_left_to_the_step() -> None:
    loop = Loop(schedule="backward")
    for i in range(STEPS):
        with loop.overlap.keep_gradients():
            loop.model(batch(i)[0]).sum().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert loop.overlap.advice.startswith(f"No gradient was freed in backward in {STEPS} steps")


@pytest.mark.parametrize("defer", ["auto", True])
@pytest.mark.parametrize("use", USES)
def test_a_loop_that_uses_gradients(use: str, defer: Any) -> None:
    assert Loop(defer=defer).train(USES[use]) == ""


def test_a_loop_that_logs_now_and_then_within_the_steps_that_are_looked_at() -> None:
    seen = iter(range(STEPS))

    def sometimes(model: nn.Module) -> None:
        if next(seen) == observed.LAST:
            USES["a log"](model)

    assert Loop().train(sometimes) == ""


def test_nothing_is_said_before_it_is_known() -> None:
    assert Loop().train(nothing, steps=observed.LAST) == ""


def test_nothing_can_be_freed_of_one_bucket() -> None:
    assert Loop(Blocks).train(nothing) == ""


def test_parameters_are_of_their_own_class_whenever_the_loop_looks_at_weights() -> None:
    loop = Loop()
    for i in range(STEPS):
        loss = loop.model(batch(i)[0]).sum()
        assert all(type(p) is nn.Parameter for p in loop.model.parameters())
        loss.backward()
        loop.optimizer.step()
        assert all(type(p) is nn.Parameter for p in loop.model.parameters())
        loop.optimizer.zero_grad()


def test_a_compiled_model_does_not_warn_of_hooks() -> None:
    """torch's wrapper warns of any hook of all modules, and warnings are errors here."""

    def compiled() -> Any:
        return torch.compile(layers(), backend="eager")

    assert Loop(compiled).train(nothing) == ""


@pytest.mark.parametrize("drops", [True, False])
def test_no_hook_of_every_module_stays(drops: bool) -> None:
    """There is one between a backward that is looked at and whatever comes next."""
    loop = Loop()
    for i in range(observed.FIRST + 1):
        loop.model(batch(i)[0]).sum().backward()
        loop.model(batch(i)[0]).sum().backward()
        if i < observed.FIRST:
            assert not _global_forward_pre_hooks
            loop.optimizer.step()
    assert len(_global_forward_pre_hooks) == 1
    if drops:
        del loop
        gc.collect()
    else:
        with torch.no_grad():
            part = next(loop.model.children())
            assert type(part.weight) is not nn.Parameter
            part(batch(0)[0])
            assert type(part.weight) is nn.Parameter
    assert not _global_forward_pre_hooks


def test_weights_are_those_of_the_step_where_a_closure_runs_backward() -> None:
    """The end of its backward lies in ``step()``: whoever reads weights after it waits for them all the same."""
    loops = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        loops.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
        if attach:
            instep.attach(*loops[-1], defer=True, bucket_bytes=2_000)
    for i in range(STEPS):
        for model, optimizer in loops:

            def closure(model: nn.Module = model, optimizer: Any = optimizer, i: int = i) -> Any:
                optimizer.zero_grad()
                loss = model(batch(i)[0]).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        plain, found = ([p.detach().clone() for p in model.parameters()] for model, _ in loops)
        assert all(map(torch.equal, plain, found)), i


def test_the_schedule_that_was_asked_for_is_not_the_question() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        assert overlap.advice == ""
