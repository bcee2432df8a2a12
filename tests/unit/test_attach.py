"""What attach refuses: a typed error that names the parameter and the cure, and no hook left behind."""

from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.errors import AttachError, HyperparameterChangedError
from tests.cases import Blocks, batch

# Not by a thread: while one that has just been started runs, it may be that one that draws.
pytestmark = pytest.mark.timeout(600, method="signal")


def hooks_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[int]:
    """How many hooks are registered where instep registers its own."""
    counts = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    counts += [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    counts += [len(o._optimizer_step_pre_hooks) + len(o._optimizer_step_post_hooks) for o in optimizers]
    return counts


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner = inner


MODEL = Blocks()
OTHER = nn.Linear(3, 5)


def sgd(parameters: Any, **kwargs: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, **kwargs)


def with_replaced_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]  # the oddity
    return optimizer


def with_non_leaf(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.param_groups[0]["params"][1] = MODEL.inner.weight * 2
    return optimizer


def with_no_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.param_groups[0]["params"] = []
    return optimizer


def frozen() -> nn.Module:
    return Blocks().requires_grad_(False)


FROZEN = frozen()


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: sgd([*MODEL.parameters(), *OTHER.parameters()]), ["(5, 3)", "not a parameter of the model"]),
        (lambda: sgd(OTHER.parameters()), ["not a parameter of the model"]),
        (lambda: [sgd(MODEL.parameters()), sgd([MODEL.outer.bias])], ["'outer.bias'", "one optimizer, once"]),
        (lambda: with_non_leaf(sgd(MODEL.parameters())), ["not a leaf"]),
        (lambda: with_no_parameters(sgd(MODEL.parameters())), ["no parameters"]),
        (list, ["empty list"]),
        (lambda: ["AdamW"], ["not str"]),
        (lambda: [o := sgd(MODEL.parameters()), o], ["given twice"]),
        (lambda: torch.optim.LBFGS(MODEL.parameters()), ["LBFGS"]),
        (lambda: Lookahead(sgd(MODEL.parameters())), ["Lookahead", "inner: SGD", "inner optimizer"]),
        (lambda: with_replaced_step(sgd(MODEL.parameters())), ["SGD", "step method", "replaced"]),
        (lambda: sgd(MODEL.parameters(), differentiable=True), ["differentiable"]),
    ],
)
def test_bad_optimizers_are_refused_and_nothing_is_left_behind(optimizer: Any, words: list[str]) -> None:
    before = hooks_of(MODEL)
    with pytest.raises(AttachError) as refused:
        instep.attach(MODEL, optimizer(), schedule="backward")
    for word in words:
        assert word in str(refused.value)
    assert hooks_of(MODEL) == before
    assert instep.attached(MODEL) is None


def test_a_parameter_twice_in_one_group() -> None:
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = sgd([MODEL.outer.weight, MODEL.outer.weight])
    with pytest.raises(AttachError, match=r"'outer.weight'.*twice"):
        instep.attach(MODEL, optimizer, schedule="backward")


def test_nothing_but_frozen_parameters() -> None:
    with pytest.raises(AttachError, match=r"frozen \('inner.weight'"):
        instep.attach(FROZEN, sgd(FROZEN.parameters()), schedule="backward")


def test_a_lazy_module() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(AttachError, match="lazy"):
        instep.attach(model, sgd(model.parameters()), schedule="backward")


def test_attaching_twice() -> None:
    model = Blocks()
    optimizer = sgd(model.parameters())
    with instep.attach(model, optimizer, schedule="backward"):
        before = hooks_of(model, optimizer)
        with pytest.raises(AttachError, match=r"'inner.weight' is already attached"):
            instep.attach(model, sgd(model.parameters()), schedule="backward")
        with pytest.raises(AttachError, match="already attached"):
            instep.attach(model.blocks, sgd(model.blocks.parameters()), schedule="backward")
        assert hooks_of(model, optimizer) == before
    with instep.attach(model, optimizer, schedule="backward"):
        pass


def test_a_failure_in_the_middle_of_registration_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks()
    optimizer = sgd(model.parameters())
    before = hooks_of(model, optimizer)

    def refuse(*_: Any) -> None:
        raise OSError("no more hooks")

    monkeypatch.setattr(optimizer, "register_step_pre_hook", refuse)
    with pytest.raises(OSError, match="no more hooks"):
        instep.attach(model, optimizer, schedule="backward")
    assert hooks_of(model, optimizer) == before
    assert instep.attached(model) is None


def test_the_state_of_a_step() -> None:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        states.append(overlap.state)
        model(batch(0)[0]).sum().backward()
        states.append(overlap.state)
        optimizer.step()
        states.append(overlap.state)
        optimizer.zero_grad()
        model(batch(1)[0]).sum().backward()
        optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(HyperparameterChangedError):
            optimizer.step()
        states.append(overlap.state)
    assert [*states, overlap.state] == ["idle", "open", "idle", "torn", "detached"]


def test_what_the_attachment_says_of_itself() -> None:
    model = Blocks()
    optimizer = sgd(model.parameters())
    overlap = instep.attach(model, optimizer, bucket_bytes=4_000, schedule="backward")
    assert repr(overlap).startswith("<instep.Attachment Blocks with SGD: schedule='backward', ")
    assert "0 steps, idle" in repr(overlap)
    table = str(overlap.plan)
    assert "outer.bias" in table.splitlines()[1]
    assert table.splitlines()[-1].startswith("total")
    assert overlap.plan.nbytes == sum(p.nbytes for p in model.parameters())
    model(batch(0)[0]).sum().backward()
    assert "open" in repr(overlap)
    optimizer.step()
    overlap.synchronize()
    assert overlap.step_count == 1
    overlap.detach()
    assert "detached" in repr(overlap)
    overlap.detach()


@pytest.mark.parametrize(
    "options",
    [{"schedule": "backward"}, {"schedule": "backward", "undo": True}, {"schedule": "forward", "defer": True}],
    ids=str,
)
def test_detach_between_forward_and_backward(options: dict[str, Any]) -> None:
    """The graph is of the attached model, and its backward the plain one."""
    results = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        overlap = instep.attach(model, optimizer, bucket_bytes=1, **options) if attached else None
        for i in range(5):
            loss = model(torch.full((3, 4), i / 4)).square().mean()
            if overlap is not None and i == 3:
                overlap.detach()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(list(model.parameters()))
    assert all(map(torch.equal, *results))


def test_detach_restores_the_model() -> None:
    model = Blocks()
    optimizer = sgd(model.parameters())
    before = hooks_of(model, optimizer)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    overlap = instep.attach(model, optimizer, schedule="backward")
    assert hooks_of(model, optimizer) != before
    model(batch(0)[0]).sum().backward()
    overlap.detach()
    assert hooks_of(model, optimizer) == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(p.grad is None for p in model.parameters())
    model(batch(0)[0]).sum().backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


@pytest.mark.parametrize("option", ["clip", "comm_hook", "mixed_precision"])
def test_verify_refuses_what_changes_the_numbers(option: str) -> None:
    def build() -> Any:
        raise AssertionError("nothing is built")

    options: dict[str, Any] = {"schedule": "backward", option: object()}
    with pytest.raises(AttachError, match=f"{option} changes the numbers"):
        instep.verify(build, **options)


class Box:
    """As the projectors of GaLore: an object in the state that holds a tensor."""

    tensor: torch.Tensor


class Boxed(torch.optim.Optimizer):
    def __init__(self, params: Any, scale: list[float]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.scale = scale.pop(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    box = self.state[p].setdefault("box", Box())
                    box.tensor = p.grad * self.scale
                    p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("scales", [[1.0, 1.0], [1.0, 2.0]], ids=str)
def test_verify_compares_what_objects_in_the_state_hold(scales: list[float]) -> None:
    equal, scales = scales[0] == scales[1], list(scales)

    def build() -> Any:
        model = nn.Linear(4, 4)
        optimizer = Boxed(model.parameters(), scales)

        def step(i: int) -> None:
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    assert instep.verify(build).equal is equal


@pytest.mark.parametrize(("given", "warns"), [(1, False), (25, True), (1024, False)])
def test_bytes_that_seem_to_be_meant_as_mebibytes(given: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Blocks()
    with instep.attach(model, sgd(model.parameters()), schedule="backward", bucket_bytes=given):
        said = "makes a bucket of every parameter: it counts bytes. For 25 MiB: bucket_bytes=25 * 2**20"
        assert (said in caplog.text) is warns


def test_what_is_logged_again_and_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of a loop that attaches for each fold."""
    model = Blocks()
    for _ in range(3):
        instep.attach(model, sgd(model.parameters()))
    with caplog.at_level("INFO", "instep"):
        said = [record.getMessage() for record in caplog.records if "is detached" in record.getMessage()]
        assert len(said) == 1
    found = instep.attached(model)
    assert found is not None
    found.detach()


def test_the_line_again_takes_the_place_of_the_line(caplog: pytest.LogCaptureFixture) -> None:
    """A cell of a notebook that is run once more; a second stage of training with another optimizer."""
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    before = hooks_of(model, optimizer)
    first = instep.attach(model, optimizer, defer=True)
    once = hooks_of(model, optimizer)
    model(batch(0)[0]).sum().backward()
    optimizer.step()
    assert first.state == "pending"
    second = instep.attach(model, optimizer)
    assert "an earlier instep.attach() of these parameters is detached" in caplog.text
    assert first.state == "detached"
    assert hooks_of(model, optimizer) == once
    third = instep.attach(model, sgd(model.parameters()))
    assert (second.state, instep.attached(model)) == ("detached", third)
    assert hooks_of(model, optimizer) != once
    third.detach()
    assert hooks_of(model, optimizer) == before


def test_an_option_is_not_lost_by_the_line() -> None:
    model = Blocks()
    with instep.attach(model, sgd(model.parameters()), schedule="backward") as overlap:
        with pytest.raises(AttachError, match=r"'inner.weight' is already attached"):
            instep.attach(model, sgd(model.parameters()))
        assert instep.attached(model) is overlap
    with (
        instep.attach(model, sgd(model.parameters())) as overlap,
        pytest.raises(AttachError, match=r"'inner.weight' is already attached"),
    ):
        instep.attach(model, sgd(model.parameters()), clip=instep.ClipNorm(1.0))


def test_another_call_that_is_refused_detaches_nothing() -> None:
    model = Blocks()
    wrong = sgd(model.parameters())
    wrong.param_groups[0]["params"][1] = model.inner.weight * 2
    with instep.attach(model, sgd(model.parameters())) as overlap:
        with pytest.raises(AttachError, match="not a leaf"):
            instep.attach(model, wrong)
        assert instep.attached(model) is overlap
        assert overlap.state == "idle"
