"""Buckets that are prepared before the first one of a step: equal to the plain loop whatever changes between steps, and
what changes in backward after that is found in ``optimizer.step()``, or sends a bucket the other way."""

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import instep
from instep._step.in_backward import BucketSink
from instep._step.writes import FinalWrites
from instep.errors import HyperparameterChangedError, InstepError, NonFiniteGradientError, TornStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, two_groups
from tests.parity.lockstep import loss_of


class Loop:
    def __init__(self, cls: Any = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Blocks(depth=2)
        if cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
            options = {"fused": True, **options}
        self.optimizer = cls(two_groups(self.model), lr=1e-2, **options)
        self.overlap: instep.Attachment | None = None

    def attach(self, **options: Any) -> "Loop":
        self.overlap = instep.attach(self.model, self.optimizer, schedule="backward", bucket_bytes=1, **options)
        return self

    def backward(self, i: int) -> None:
        inputs, targets = batch(i)
        loss = loss_of(self.model(inputs), targets)
        if self.overlap is None:
            loss.backward()
        else:
            self.overlap.backward(loss)

    def step(self, i: int) -> None:
        self.backward(i)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def middle(self) -> nn.Parameter:
        every = list(self.model.parameters())
        return every[len(every) // 2]

    def last(self) -> nn.Parameter:
        """Its gradient is the last to come, or nearly."""
        return next(self.model.parameters())


def require_equal(plain: Loop, attached: Loop) -> None:
    states = [training_state(one.model, one.optimizer) for one in (plain, attached)]
    assert first_difference(*states) is None


SETTLED = 3


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"fused": None}),
        (torch.optim.AdamW, {"fused": None, "foreach": True}),
        (torch.optim.SGD, {"fused": None, "momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RMSprop, {"foreach": True}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_every_bucket_of_a_step_is_prepared(cls: Any, options: dict[str, Any], prepared: list[bool]) -> None:
    plain, attached = Loop(cls, **options), Loop(cls, **options).attach()
    for i in range(6):
        plain.step(i)
        del prepared[:]
        attached.step(i)
        require_equal(plain, attached)
    assert attached.overlap is not None
    assert prepared == [True] * len(attached.overlap.plan.buckets)
    attached.overlap.detach()


OPTIONS: dict[str, dict[str, Any]] = {
    "norm": {"clip": instep.ClipNorm(math.inf)},
    "two_pass": {"clip": instep.ClipNorm(0.1, mode="two_pass")},
    "value": {"clip": instep.ClipValue(0.01)},
    "nonfinite": {"nonfinite": "raise"},
}


@pytest.mark.parametrize("options", list(OPTIONS))
def test_also_where_gradients_are_clipped_or_looked_at(
    options: str, prepared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    others, attached = Loop(), Loop()
    for loop in (others, attached):
        loop.attach(**OPTIONS[options])
    for i in range(6):
        monkeypatch.setattr(FinalWrites, "are_prepared", False)
        others.step(i)
        monkeypatch.setattr(FinalWrites, "are_prepared", True)
        del prepared[:]
        attached.step(i)
        require_equal(others, attached)
    assert attached.overlap is not None
    assert prepared == [True] * len(attached.overlap.plan.buckets)
    for loop in (others, attached):
        assert loop.overlap is not None
        loop.overlap.detach()


@pytest.mark.parametrize("options", ["nonfinite", "two_pass"])
def test_a_gradient_that_is_not_finite(options: str, prepared: list[bool]) -> None:
    loop = Loop().attach(**OPTIONS["nonfinite"] | OPTIONS[options])
    assert loop.overlap is not None
    for i in range(SETTLED):
        loop.step(i)
    handle = loop.middle().register_hook(lambda gradient: gradient * torch.nan)
    before = loop.middle().detach().clone()
    with pytest.raises(NonFiniteGradientError):
        loop.backward(SETTLED)
    handle.remove()
    assert torch.equal(before, loop.middle())
    loop.overlap.accept_torn()
    loop.overlap.detach()


@pytest.mark.parametrize(
    ("way", "to_none"), [("alone", True), ("alone", False), ("accumulate", True), ("micro_batches", True)]
)
def test_the_last_of_several_micro_batches(way: str, to_none: bool, prepared: list[bool]) -> None:
    plain, attached = Loop(), Loop().attach()
    assert attached.overlap is not None
    count = 1 if way == "alone" else 3
    for i in range(6):
        del prepared[:]
        batches = [batch(count * i + k) for k in range(count)]
        for loop in (plain, attached):
            loss = partial(loss_in, loop.model, count)
            if loop.overlap is not None and way == "micro_batches":
                loop.overlap.micro_batches(loss, batches)
            else:
                for k, some in enumerate(batches):
                    adds = loop.overlap is not None and k < count - 1
                    with loop.overlap.accumulate() if loop.overlap is not None and adds else nullcontext():
                        loss(some).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=to_none)
        require_equal(plain, attached)
    assert prepared == [True] * len(attached.overlap.plan.buckets)
    attached.overlap.detach()


class EitherWay(nn.Module):
    """Four layers, the first two of which come in one order or in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, *others = self.layers
        for layer in (second, first, *others) if self.turned else (first, second, *others):
            x = torch.tanh(layer(x))
        return x


def test_gradients_that_come_in_another_order_to_those_of_earlier_micro_batches(prepared: list[bool]) -> None:
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = EitherWay()
        loops.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)))
    with instep.attach(*loops[1], schedule="backward", bucket_bytes=128) as overlap:
        for i in range(8):
            for model, optimizer in loops:
                for k in range(2):
                    model.turned = i > SETTLED and k == 1
                    with overlap.accumulate() if model is loops[1][0] and k == 0 else nullcontext():
                        model(torch.full((2, 4), 1.0 + i + k)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            states = [training_state(*loop) for loop in loops]
            assert first_difference(*states) is None
    assert True in prepared


def loss_in(model: nn.Module, count: int, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return loss_of(model(inputs), targets) / count


def reload(loop: Loop) -> None:
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


def other_rates(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.7


def largest_moments(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["amsgrad"] = True
    for entry in loop.optimizer.state.values():
        entry["max_exp_avg_sq"] = torch.zeros_like(entry["exp_avg_sq"])


def unfused(loop: Loop) -> None:
    loop.optimizer.param_groups[1]["fused"] = False


def moved_state(loop: Loop) -> None:
    for entry in loop.optimizer.state.values():
        entry.update({name: value.clone() for name, value in entry.items()})


def other_order(loop: Loop) -> None:
    for entry in loop.optimizer.state.values():
        for name in sorted(entry):
            entry[name] = entry.pop(name)


def state_is_gone(loop: Loop) -> None:
    loop.optimizer.state.clear()


def one_is_gone(loop: Loop) -> None:
    del loop.optimizer.state[loop.last()]


def frozen(loop: Loop) -> None:
    loop.last().requires_grad_(not loop.last().requires_grad)


def written(loop: Loop) -> None:
    with torch.no_grad():
        loop.last().mul_(0.5)
    loop.optimizer.state[loop.last()]["exp_avg"].zero_()


CHANGES = [
    reload, other_rates, largest_moments, unfused, moved_state, other_order, state_is_gone, one_is_gone, frozen, written
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fused", [True, None])
def test_what_changes_between_steps(change: Callable[[Loop], None], fused: bool | None, prepared: list[bool]) -> None:
    plain, attached = Loop(fused=fused), Loop(fused=fused).attach()
    for i in range(9):
        for loop in (plain, attached):
            if i in (SETTLED, SETTLED + 2):
                change(loop)
            loop.step(i)
        require_equal(plain, attached)
    assert True in prepared
    assert attached.overlap is not None
    attached.overlap.detach()


def test_state_that_moves_to_another_entry_between_steps() -> None:
    """Under the same name: of all entries together, one after the other, nothing is changed."""
    plain, attached = Loop(torch.optim.SGD), Loop(torch.optim.SGD)
    for loop in (plain, attached):
        first, second = sorted(loop.optimizer.param_groups, key=lambda group: len(group["params"]))
        first["momentum"], second["momentum"] = 0.9, 0.0
        loop.optimizer.state.update({p: {} for group in (first, second) for p in group["params"]})
    attached.attach()
    for i in range(SETTLED + 2):
        for loop in (plain, attached):
            if i == SETTLED:
                first, second = sorted(loop.optimizer.param_groups, key=lambda group: len(group["params"]))
                state = loop.optimizer.state
                for one, other in zip(first["params"], second["params"][: len(first["params"])], strict=True):
                    state[other]["momentum_buffer"] = state[one].pop("momentum_buffer")
            loop.step(i)
        require_equal(plain, attached)
    assert attached.overlap is not None
    attached.overlap.detach()


def test_a_kernel_that_asks_for_more_of_the_state_that_is_there(prepared: list[bool]) -> None:
    plain, attached = Loop(amsgrad=True), Loop(amsgrad=True)
    for loop in (plain, attached):
        loop.step(0)
        loop.optimizer.param_groups[0]["amsgrad"] = loop.optimizer.param_groups[1]["amsgrad"] = False
    attached.attach()
    for i in range(1, SETTLED + 3):
        for loop in (plain, attached):
            if i == SETTLED:
                loop.optimizer.param_groups[0]["amsgrad"] = True
            loop.step(i)
        require_equal(plain, attached)
    assert True in prepared
    assert attached.overlap is not None
    attached.overlap.detach()


def test_a_moment_that_is_written_between_backward_and_step() -> None:
    loop = Loop().attach()
    assert loop.overlap is not None
    for i in range(SETTLED):
        loop.step(i)
    loop.backward(SETTLED)
    moment(loop)
    with pytest.raises(HyperparameterChangedError, match="state of AdamW was written"):
        loop.optimizer.step()
    loop.overlap.accept_torn()
    loop.overlap.detach()


def named(loop: Loop) -> None:
    for number, entry in enumerate(loop.optimizer.state.values()):
        entry["name"] = f"the {number}th"


def no_buffers(loop: Loop) -> None:
    for p in loop.model.parameters():
        loop.optimizer.state[p] = {"momentum_buffer": None}


@pytest.mark.parametrize(("cls", "change"), [(torch.optim.AdamW, named), (torch.optim.SGD, no_buffers)])
def test_state_that_is_no_tensor(cls: Any, change: Callable[[Loop], None]) -> None:
    """A checkpoint may hold some."""
    plain, attached = Loop(cls), Loop(cls)
    for loop in (plain, attached):
        loop.step(0)
        change(loop)
    attached.attach()
    for i in range(1, 5):
        plain.step(i)
        attached.step(i)
        require_equal(plain, attached)
    assert attached.overlap is not None
    attached.backward(5)
    attached.optimizer.state[attached.last()]["momentum_buffer"] = torch.ones(())
    with pytest.raises(HyperparameterChangedError, match="state of"):
        attached.optimizer.step()
    attached.overlap.accept_torn()
    attached.overlap.detach()


def test_after_an_error_nothing_more_is_stepped(prepared: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop().attach()
    assert loop.overlap is not None
    for i in range(SETTLED):
        loop.step(i)
    calls: list[int] = []

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        raise ZeroDivisionError("the kernel")

    monkeypatch.setattr(torch, "_fused_adamw_", fails)
    with pytest.raises(ZeroDivisionError):
        loop.backward(SETTLED)
    monkeypatch.undo()
    assert calls == [1]
    loop.overlap.accept_torn()
    loop.overlap.detach()


def test_an_error_before_anything_is_written(prepared: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is dropped, and what comes after it in the same backward is none of another one."""
    loop = Loop().attach()
    assert loop.overlap is not None
    for i in range(SETTLED):
        loop.step(i)
    before = [p.detach().clone() for p in loop.model.parameters()]
    first: list[int] = []

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("before the update")

    def only_the_first(self: BucketSink, *args: Any, **kwargs: Any) -> bool:
        first.append(1)
        return len(first) > 1 and step_prepared(self, *args, **kwargs)

    step_prepared = BucketSink.step_prepared
    monkeypatch.setattr(BucketSink, "step_prepared", only_the_first)
    monkeypatch.setattr("instep._step.in_backward.require_in_place", fails)
    del prepared[:]
    with pytest.raises(ZeroDivisionError):
        loop.backward(SETTLED)
    assert True not in prepared
    assert all(map(torch.equal, before, loop.model.parameters()))
    assert loop.overlap.state == "idle"
    loop.overlap.detach()


def test_a_step_that_is_torn_in_backward(prepared: list[bool]) -> None:
    """By a hook that writes a gradient which is spent, and takes the error for nothing."""
    loop = Loop().attach()
    assert loop.overlap is not None
    for i in range(SETTLED):
        loop.step(i)
    *_, early = loop.model.parameters()
    middle, before = loop.middle(), loop.last().detach().clone()

    def writes(_: object) -> None:
        with suppress(InstepError):
            assert early.grad is not None
            early.grad.add_(torch.ones(early.shape))

    handle = middle.register_post_accumulate_grad_hook(writes)
    with suppress(InstepError):
        loop.backward(SETTLED)
    handle.remove()
    assert loop.overlap.state == "torn"
    assert torch.equal(before, loop.last())
    assert prepared[-1] is False
    loop.overlap.accept_torn()
    loop.overlap.detach()


def test_two_optimizers() -> None:
    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = Blocks(depth=2)
        groups = two_groups(model)
        return model, [torch.optim.AdamW([group], lr=1e-2, fused=True) for group in groups]

    plain, attached = build(), build()
    with instep.attach(*attached, schedule="backward", bucket_bytes=1):
        for i in range(2 * SETTLED):
            for model, optimizers in (plain, attached):
                inputs, targets = batch(i)
                loss_of(model(inputs), targets).backward()
                for optimizer in optimizers[:: 1 if i % 2 else -1]:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            states = [training_state(model, optimizers) for model, optimizers in (plain, attached)]
            assert first_difference(*states) is None


def weight(loop: Loop) -> None:
    with torch.no_grad():
        loop.last().mul_(0.5)


def moment(loop: Loop) -> None:
    loop.optimizer.state[loop.last()]["exp_avg"].zero_()


def another_moment(loop: Loop) -> None:
    loop.optimizer.state[loop.last()]["exp_avg"] = torch.zeros_like(loop.last())


def renamed_moment(loop: Loop) -> None:
    entry = loop.optimizer.state[loop.last()]
    entry["other"] = entry.pop("step")


def rate(loop: Loop) -> None:
    other_rates(loop)


def mapping(loop: Loop) -> None:
    loop.optimizer.state = dict(loop.optimizer.state)


@pytest.mark.parametrize(
    ("change", "said", "fused"),
    [
        (another_moment, "state of AdamW was written", True),
        (renamed_moment, "state of AdamW was written", True),
        (rate, r"\['lr'\] changed", True),
        (rate, r"\['lr'\] changed", None),
        (mapping, "state of AdamW was replaced", True),
        (mapping, "state of AdamW was replaced", None),
    ],
)
def test_what_a_hook_changes_after_the_first_bucket_tears_the_step(
    change: Callable[[Loop], None], said: str, fused: bool | None
) -> None:
    """Also where its bucket is still to come: nothing of it is looked at again before ``step()``."""
    loop = Loop(fused=fused).attach()
    assert loop.overlap is not None
    *_, early = loop.model.parameters()
    for i in range(SETTLED):
        loop.step(i)
    handle = early.register_post_accumulate_grad_hook(lambda _: change(loop) if loop.last().grad is None else None)
    loop.backward(SETTLED)
    handle.remove()
    with pytest.raises(HyperparameterChangedError, match=said):
        loop.optimizer.step()
    assert loop.overlap.state == "torn"
    loop.overlap.detach()


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("write", [weight, moment])
def test_what_a_hook_writes_before_its_bucket_is_followed(
    write: Callable[[Loop], None], fused: bool | None, prepared: list[bool]
) -> None:
    loops = Loop(fused=fused), Loop(fused=fused)
    writes = False
    for loop in loops:
        *_, early = loop.model.parameters()
        early.register_post_accumulate_grad_hook(lambda _, loop=loop: write(loop) if writes else None)
    loops[1].attach()
    for i in range(SETTLED + 2):
        writes = i == SETTLED
        for loop in loops:
            loop.step(i)
        require_equal(*loops)
    assert True in prepared
    assert loops[1].overlap is not None
    loops[1].overlap.detach()


class Seen(TorchDispatchMode):
    """As a meter of memory has it: in it torch may count writes otherwise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_around_the_loop(prepared: list[bool]) -> None:
    plain, attached = Loop(), Loop().attach()
    for i in range(SETTLED + 2):
        plain.step(i)
        with Seen():
            attached.step(i)
        require_equal(plain, attached)
    assert True in prepared
    assert attached.overlap is not None
    attached.overlap.detach()


def test_a_gradient_that_a_hook_takes_away(prepared: list[bool]) -> None:
    """The bucket is found to be another one, and is left to ``optimizer.step()``."""
    plain, attached, takes = Loop(), Loop(), False

    def take(parameter: torch.Tensor) -> None:
        if takes:
            parameter.grad = None

    for loop in (plain, attached):
        loop.last().register_post_accumulate_grad_hook(take)
    attached.attach()
    for i in range(6):
        takes = i == SETTLED
        plain.step(i)
        attached.step(i)
        require_equal(plain, attached)
    assert False in prepared
    assert attached.overlap is not None
    attached.overlap.detach()


def test_an_update_that_raises_in_the_middle(monkeypatch: pytest.MonkeyPatch, prepared: list[bool]) -> None:
    loop = Loop().attach()
    assert loop.overlap is not None
    for i in range(SETTLED):
        loop.step(i)
    del prepared[:]
    kernel: Any = torch._fused_adamw_
    calls: list[int] = []

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("the kernel")
        kernel(*args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", fails)
    with pytest.raises(ZeroDivisionError):
        loop.backward(SETTLED)
    assert loop.overlap.state == "torn"
    with pytest.raises(TornStepError) as raised:
        loop.optimizer.step()
    assert len(raised.value.applied) >= 2
    assert prepared[:3] == [True] * 3
    monkeypatch.undo()
    loop.overlap.accept_torn()
    loop.overlap.detach()
