"""Loops that plain torch trains, and in which nobody but torch can take the steps: the default line takes them, and
says so. Other options refuse them by name."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import AttachError, UnsupportedOptimizerError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch

Loop = tuple[nn.Module, list[torch.optim.Optimizer], Callable[[int], None]]


def loss_of(model: nn.Module, i: int) -> torch.Tensor:
    x, y = batch(i)
    return nn.functional.cross_entropy(model(x), y)


def usual(model: nn.Module, optimizer: Any) -> Loop:
    """A loop that is the usual one."""

    def step(i: int) -> None:
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, [optimizer], step


def master_weights() -> Loop:
    """A model in bfloat16; the optimizer steps copies in float32 that the loop keeps."""
    model = Blocks().to(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)

    def step(i: int) -> None:
        x, y = batch(i)
        nn.functional.cross_entropy(model(x.to(torch.bfloat16)), y).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 0.5)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        model.zero_grad()

    return model, [optimizer], step


def another_model() -> Loop:
    """The loop attaches the teacher, and the optimizer steps the student."""
    teacher, student = Blocks(), Blocks()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def step(i: int) -> None:
        (loss_of(student, i) + (teacher(batch(i)[0]) - student(batch(i)[0])).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return nn.ModuleDict({"teacher": teacher})["teacher"], [optimizer], step


def two_over_the_same() -> Loop:
    """Two optimizers of the same parameters, in turns."""
    model = Blocks()
    first, second = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i: int) -> None:
        loss_of(model, i).backward()
        (first if i % 2 else second).step()
        model.zero_grad()

    return model, [first, second], step


def lazy() -> Loop:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # makes state in the first step alone

    def step(i: int) -> None:
        torch.manual_seed(i)
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, [optimizer], step


def one_memory() -> Loop:
    """Two parameters of one memory, as some tie their weights."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10))
    model[2].weight.data = model[0].weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    return usual(model, optimizer)


def come_and_go() -> Loop:
    """The optimizer begins with a stranger, and takes the model's parameters in later; then some leave it."""
    model, stranger = Blocks(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([stranger], lr=1e-2)

    def step(i: int) -> None:
        if i == 1:
            optimizer.add_param_group({"params": list(model.parameters()), "lr": 1e-3})
        if i == 4:
            del optimizer.param_groups[1]["params"][3:5]
        (loss_of(model, i) + stranger.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()

    return model, [optimizer], step


def stepping_themselves() -> Loop:
    """One parameter has an optimizer in backward, as torch's ``_apply_optimizer_in_backward`` leaves it."""
    model = Blocks()
    weight: Any = model.inner.weight
    weight._in_backward_optimizers = [torch.optim.SGD([weight], lr=0.1)]

    def in_backward(p: Any) -> None:
        for one in p._in_backward_optimizers:
            one.step()
        p.grad = None

    weight.register_post_accumulate_grad_hook(in_backward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    return usual(model, optimizer)


def not_made_yet() -> Loop:
    """One head that is loaded later has no memory so far."""
    model = Blocks()
    with torch.device("meta"):
        model.add_module("later", nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    return usual(model, optimizer)


def gradients_in_float32() -> Loop:
    model = Blocks().to(torch.bfloat16)
    for p in model.parameters():
        p.grad_dtype = torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step(i: int) -> None:
        x, y = batch(i)
        nn.functional.cross_entropy(model(x.to(torch.bfloat16)), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, [optimizer], step


def scripted() -> Loop:
    model: Any = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    return usual(model, optimizer)


class Lookahead:
    """Written by hand, around an optimizer of torch's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]
        self.steps = 0

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            parameters = [p for group in self.inner.param_groups for p in group["params"]]
            for p, slow in zip(parameters, self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


def no_optimizer_of_torchs() -> Loop:
    model = Blocks()
    optimizer: Any = Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-2))

    return usual(model, optimizer)


LOOPS: dict[str, tuple[Callable[[], Loop], str]] = {
    "master weights": (master_weights, "is not a parameter of the model"),
    "another model": (another_model, "is not a parameter of the model"),
    "two over the same": (two_over_the_same, "it would be stepped twice"),
    "lazy": (lazy, "has no shape yet"),
    "not made yet": (not_made_yet, "is on the meta device"),
    "gradients in float32": (gradients_in_float32, "has grad_dtype=torch.float32, and is torch.bfloat16"),
    "scripted": (scripted, "is a torch.jit module"),
    "one memory": (one_memory, "share memory"),
    "come and go": (come_and_go, "is not a parameter of the model"),
    "no optimizer of torch's": (no_optimizer_of_torchs, "no torch.optim.Optimizer"),
    "stepping themselves": (stepping_themselves, "has optimizers of its own"),
}


def has_values(entry: tuple[str, Any]) -> bool:
    return not (isinstance(entry[1], torch.Tensor) and entry[1].is_meta)


NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "gradients in float32" and not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has none"
        ),
    )
    for name in LOOPS
]


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("disabled", ["", "1"])
@pytest.mark.parametrize("name", NAMES)
def test_the_default_takes_it(
    name: str, disabled: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTEP_DISABLE", disabled)
    make, reason = LOOPS[name]
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        loops.append(make())
    model, optimizers, _ = loops[1]
    with caplog.at_level(logging.INFO, "instep"), instep.attach(model, optimizers) as overlap:
        said = [record.getMessage() for record in caplog.records if record.name == "instep"]
        assert len(said) == 1
        assert said[0].startswith("the step is taken at once: ")
        assert reason in said[0]
        for i in range(7):
            for _, _, step in loops:
                step(i)
            states = [
                (
                    entry
                    for entry in training_state(one, [getattr(o, "inner", o) for o in stepping])
                    if has_values(entry)
                )
                for one, stepping, _ in loops
            ]
            assert first_difference(*states) is None, (i, first_difference(*states))
            assert overlap.step_count == (0 if "torch's" in name else i + 1)
        assert "steps taken at once" in repr(overlap)
        assert reason in repr(overlap)


class Unmade(torch.optim.Optimizer):
    """Leaves out ``Optimizer.__init__``, and has as much of an optimizer as it needs itself."""

    has: tuple[str, ...] = ("param_groups",)

    def __init__(self, model: nn.Module) -> None:
        self.mine = list(model.parameters())
        own: dict[str, Any] = {"param_groups": [{"params": self.mine}], "state": {}, "defaults": {}}
        vars(self).update({name: own[name] for name in self.has})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.mine:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.mine:
            p.grad = None


@pytest.mark.parametrize(
    "has", [(), ("param_groups",), ("param_groups", "state"), ("param_groups", "state", "defaults")]
)
def test_an_optimizer_made_without_its_parents_constructor(has: tuple[str, ...]) -> None:
    """The default takes it, as plain torch does. What splits a step refuses it by name, before anything changes."""
    made = type("Unmade", (Unmade,), {"has": has})

    def loop() -> Loop:
        torch.manual_seed(0)
        model = Blocks()
        return usual(model, made(model))

    (plain, _, plain_step), (model, optimizers, step) = loop(), loop()
    refused: dict[str, dict[str, Any]] = {"backward": {"schedule": "backward"}}
    refused |= {"undo": {"schedule": "backward", "undo": True}}
    refused |= {"clip": {"clip": instep.ClipNorm(1.0)}, "keyed": {"schedule": "backward", "random": "keyed", "seed": 1}}
    for options in refused.values():
        with pytest.raises(
            (AttachError, UnsupportedOptimizerError), match=r"made without\s+torch\.optim\.Optimizer\.__init__"
        ):
            instep.attach(model, optimizers, **options)
    with instep.attach(model, optimizers):
        for i in range(3):
            plain_step(i)
            step(i)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


@pytest.mark.parametrize(
    "options", [{"schedule": "backward"}, {"clip": instep.ClipNorm(1.0)}, {"defer": True}], ids=str
)
@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_other_options_refuse_it(name: str, options: dict[str, Any]) -> None:
    make, reason = LOOPS[name]
    model, optimizers, _ = make()
    # The argument is refused for what it is before it is asked what it steps.
    with pytest.raises(AttachError, match="must be a torch.optim.Optimizer" if "torch's" in name else reason):
        instep.attach(model, optimizers, **options)
