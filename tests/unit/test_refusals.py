"""Loops that would silently train wrong raise instead, before anything more is written."""

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import instep
from instep.errors import (
    AccumulationError,
    HyperparameterChangedError,
    SpentGradientError,
    StaleAttachmentError,
    TornStepError,
    UncommittedStepError,
)
from tests.cases import Blocks, batch, weights
from tests.inside import before_updates

SMALL = 2_000


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Blocks()


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture
def overlap(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward") as overlap:
        yield overlap


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x), y)


def assert_untouched(model: nn.Module, before: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, weights(model), before))


def test_a_second_backward_that_reaches_fresh_parameters_first(overlap: Any, model: nn.Module) -> None:
    """Two heads on one trunk: the second head has no gradient yet when the second backward reaches it."""
    heads = nn.ModuleDict({"trunk": nn.Linear(16, 16), "a": nn.Linear(16, 4), "b": nn.Linear(16, 4)})
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
    with instep.attach(heads, optimizer, bucket_bytes=1, schedule="backward"):
        trunk = heads["trunk"](batch(0)[0])
        heads["a"](trunk).sum().backward(retain_graph=True)
        before = weights(heads)
        with pytest.raises(AccumulationError, match=r"'trunk.bias' arrived again"):
            heads["b"](trunk).sum().backward()
        assert_untouched(heads, before)


def test_a_second_loss_on_the_same_outputs(model: nn.Module, overlap: Any) -> None:
    """No weight lies between the outputs and either loss, so only the second arrival tells."""
    layer = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with instep.attach(layer, optimizer, schedule="backward"):
        out = {"logits": layer(batch(0)[0])}["logits"]
        out.sum().backward(retain_graph=True)
        before = weights(layer)
        with pytest.raises(AccumulationError):
            out.square().sum().backward()
        assert_untouched(layer, before)


class WithHidden(nn.Module):
    """Returns every hidden state, as large language models may: most outputs lie deep in the graph."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = []
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True).tanh() if self.reentrant else layer(x).tanh()
            hidden.append(x)
        return {"out": x, "hidden": tuple(hidden)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_outputs_deep_in_the_graph_are_no_second_backward(reentrant: bool) -> None:
    model = WithHidden(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, bucket_bytes=1, schedule="backward") as overlap:
        for i in range(3):
            out = model(batch(i)[0].requires_grad_())
            (out["out"].sum() + sum(h.square().sum() for h in out["hidden"])).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert overlap.step_count == 3


@pytest.mark.parametrize(
    "touch",
    [
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True),
        lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
        lambda m: nn.utils.get_total_norm([p.grad for p in m.parameters()]),
        lambda m: m.inner.weight.grad.norm(),
        lambda m: m.inner.weight.grad.mul_(2),
        lambda m: m.inner.weight.grad.data,
        lambda m: m.inner.weight.grad.clone(),
        lambda m: m.inner.weight.grad + 1,
        lambda m: torch.stack([m.outer.bias.grad, m.outer.bias.grad]),
        lambda m: m.zero_grad(set_to_none=False),
        lambda m: copy.deepcopy(m.inner.weight.grad),
    ],
)
def test_gradients_are_spent_between_backward_and_step(model: nn.Module, overlap: Any, touch: Any) -> None:
    loss_of(model).backward()
    before = weights(model)
    with pytest.raises(SpentGradientError, match="applied during backward"):
        touch(model)
    assert_untouched(model, before)


def test_a_spent_gradient_can_be_looked_at_but_not_read(model: Any, overlap: Any) -> None:
    loss_of(model).backward()
    grad = model.inner.weight.grad
    assert "inner.weight" in repr(grad)
    assert grad.shape == model.inner.weight.shape
    assert grad.dtype == torch.float32


def test_a_clip_in_a_step_pre_hook_sees_spent_gradients_whenever_it_was_registered(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward"):

        def clip(*_: object) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        optimizer.register_step_pre_hook(clip)
        loss_of(model).backward()
        with pytest.raises(SpentGradientError):
            optimizer.step()


def test_a_hyperparameter_changed_between_backward_and_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, overlap: Any
) -> None:
    loss_of(model).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(HyperparameterChangedError, match=r"param_groups\[0\]\['lr'\] changed to 0.5"):
        optimizer.step()
    with pytest.raises(TornStepError):
        model(batch(0)[0])


def write_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)


@pytest.mark.parametrize(
    "use",
    [
        write_in_place,
        lambda m: m.load_state_dict({"inner.bias": torch.zeros(24)}, strict=False),
        lambda m: m.inner.weight.data.clamp_(-1, 1),
        lambda m: m.inner.weight.norm(),
        lambda m: m.state_dict(),
        lambda m: torch._foreach_norm(list(m.parameters())),
        lambda m: m.double(),
        lambda m: copy.deepcopy(m),
        lambda m: pickle.dumps(m),
        lambda m: m.share_memory(),
    ],
)
def test_weights_used_between_backward_and_step(
    model: Any, optimizer: torch.optim.Optimizer, overlap: Any, use: Any
) -> None:
    """The plain loop would find the old ones. Nothing has happened to them, so the step can go on."""
    loss_of(model).backward()
    before = weights(model)
    with pytest.raises(
        UncommittedStepError, match=r"inner\.(weight|bias)' was used between backward|load_state_dict\(\) was called"
    ):
        use(model)
    assert_untouched(model, before)
    optimizer.step()
    model.inner.weight.norm()


def test_a_weight_written_through_an_alias_between_backward_and_step(
    model: Any, optimizer: torch.optim.Optimizer, overlap: Any
) -> None:
    """The plain loop would update what was written."""
    alias = model.inner.weight.detach()
    loss_of(model).backward()
    alias.mul_(0.9)
    with pytest.raises(UncommittedStepError, match="written between backward"):
        optimizer.step()
    with pytest.raises(TornStepError):
        model(batch(0)[0])


@pytest.mark.parametrize(
    "reach",
    [
        lambda m: torch.from_dlpack(m.inner.weight.grad),
        lambda m: m.inner.weight.grad.untyped_storage(),
        lambda m: setattr(m.inner.weight.grad, "data", torch.zeros(24, 16)),
    ],
)
def test_a_spent_gradient_has_no_storage_to_reach_for(model: nn.Module, overlap: Any, reach: Any) -> None:
    loss_of(model).backward()
    with pytest.raises(SpentGradientError):
        reach(model)


def test_a_use_without_another_way_is_told_what_to_do(model: nn.Module, overlap: Any) -> None:
    loss_of(model).backward()
    weight: Any = model.get_parameter("inner.weight")
    with pytest.raises(SpentGradientError, match=r"clip or change\. Put `with overlap\.keep_gradients"):
        weight.grad.mean()


def test_gradients_that_are_never_cleared(model: nn.Module, optimizer: torch.optim.Optimizer, overlap: Any) -> None:
    """The plain loop would step the sum of this gradient and the one before."""
    for i in range(2):
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    before = weights(model)
    loss_of(model, 3).backward()
    with pytest.raises(SpentGradientError, match=r"^\w+\.step\(\) met .* Call zero_grad\(\)"):
        optimizer.step()
    assert_untouched(model, before)
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    optimizer.step()
    assert overlap.step_count == 4


def replace(model: Any) -> None:
    model.inner.weight = nn.Parameter(torch.zeros(24, 16))


def untie(model: Any) -> None:
    model.inner = nn.Linear(16, 24)


def convert(model: Any) -> None:
    model.double()


def assign(model: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def enlarge(model: Any) -> None:
    model.inner.weight.data = torch.zeros(30, 16)


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.inner)


@pytest.mark.parametrize("change", [replace, untie, convert, assign, parametrize, enlarge])
def test_a_parameter_that_is_no_longer_the_attached_one(
    model: nn.Module, optimizer: torch.optim.Optimizer, overlap: Any, change: Any
) -> None:
    loss_of(model).backward()
    optimizer.step()
    change(model)
    with pytest.raises(StaleAttachmentError, match=r"inner.weight|inner.bias"):
        model(batch(0)[0])


def test_a_weight_that_was_resized_in_place(model: Any, optimizer: torch.optim.Optimizer, overlap: Any) -> None:
    """What helps is said: the attachment is made anew, and the optimizer goes on."""
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.outer.weight.data = torch.zeros(12, 24)
    model.outer.bias.data = torch.zeros(12)
    with pytest.raises(StaleAttachmentError, match=r"shape \(10, 24\) when .* has \(12, 24\) now .* detach\(\), give"):
        loss_of(model)
    overlap.detach()
    for p in (model.outer.weight, model.outer.bias):
        optimizer.state.pop(p, None)
    with instep.attach(model, optimizer, schedule="backward") as again:
        loss_of(model).backward()
        optimizer.step()
        assert again.step_count == 1


def test_a_model_may_move_between_steps_and_back(model: Any, optimizer: torch.optim.Optimizer, overlap: Any) -> None:
    """As a loop does that saves on another device, and clears its gradients only at the start of an iteration."""
    loss_of(model).backward()
    optimizer.step()
    model.double().float()
    assert "SpentGradient" in repr(model.inner.weight.grad)
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    assert overlap.step_count == 2


def test_a_parameter_moved_to_another_device(model: nn.Module, overlap: Any) -> None:
    model.inner.to("meta")
    with pytest.raises(StaleAttachmentError, match=r"inner.weight"):
        model(batch(0)[0])


@pytest.mark.parametrize(
    "way",
    [{"schedule": "backward"}, {"schedule": "backward", "undo": True}, {"schedule": "forward", "defer": True}],
    ids=str,
)
def test_another_optimizer_of_the_same_parameters_that_is_not_attached(way: dict[str, Any]) -> None:
    found = []
    for options in (None, way):
        torch.manual_seed(0)
        model = Blocks()
        first, second = (torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.01))
        overlap = None if options is None else instep.attach(model, first, **options)
        nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        first.step()
        if options == {"schedule": "backward"}:
            with pytest.raises(
                SpentGradientError, match=r"SGD.step\(\) met .*not attached.*schedule='forward'.*undo=True"
            ):
                second.step()
            return
        second.step()
        if overlap is not None:
            overlap.detach()
        found.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_reentrant_checkpointing_that_visits_a_parameter_twice(
    model: Any, optimizer: torch.optim.Optimizer, overlap: Any
) -> None:
    x = batch(0)[0].requires_grad_()
    x = model.inner(x)
    for _ in range(2):
        x = checkpoint(model.blocks[0], x, use_reentrant=True)
    with pytest.raises(AccumulationError, match="use_reentrant=False"):
        model.outer(x).sum().backward()
    with pytest.raises(TornStepError):
        optimizer.step()


def test_a_weight_read_outside_of_its_gradient_path_is_noticed_with_a_fused_step(model: nn.Module) -> None:
    """torch's fused kernels do not bump the version counter by themselves."""
    layer = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    with instep.attach(layer, optimizer, bucket_bytes=1, schedule="backward"):
        hidden = batch(0)[0] @ layer.weight.detach().requires_grad_()
        source = batch(1)[0].requires_grad_()
        out = layer(source @ layer.weight.detach()) + hidden
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


def test_a_backward_that_raises_after_a_bucket_was_stepped_is_torn(
    model: Any, optimizer: torch.optim.Optimizer, overlap: Any
) -> None:
    x = Boom.apply(model.inner(batch(0)[0]))
    for block in model.blocks:
        x = x + block(x)
    with pytest.raises(ValueError, match="boom"):
        model.outer(x).sum().backward()
    after = weights(model)
    for use in (lambda: model(batch(0)[0]), optimizer.step):
        with pytest.raises(TornStepError) as torn:
            use()
        assert torn.value.step == 1
        assert "outer.weight" in torn.value.applied
        assert "inner.weight" not in torn.value.applied
    assert_untouched(model, after)
    overlap.accept_torn()
    assert all(p.grad is None for p in model.parameters())
    loss_of(model).backward()
    optimizer.step()
    assert overlap.step_count == 2  # the torn one counts


class Fails(torch.optim.SGD):
    """Raises when it is about to step a parameter of the given shape."""

    def __init__(self, params: Any, shape: tuple[int, ...]) -> None:
        super().__init__(params, lr=0.1)
        self.shape = shape

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any(tuple(p.shape) == self.shape and p.grad is not None for p in group["params"]):
                raise ZeroDivisionError("the update")
        return super().step(closure)


def test_an_error_in_the_flush_is_torn(model: Any) -> None:
    """The unused parameter keeps its bucket from filling, so optimizer.step() itself meets the error."""
    model.extra = nn.Parameter(torch.zeros(3))
    optimizer = Fails(model.parameters(), (24, 16))
    with instep.attach(model, optimizer, schedule="backward"):
        loss_of(model).backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        with pytest.raises(TornStepError, match=r"Fails.step\(\) raised") as torn:
            model(batch(0)[0])
        assert torn.value.applied == ()
        assert torn.value.pending == ()
        assert torn.value.unsure == tuple(name for name, _ in model.named_parameters() if name != "extra")


class LogsNorms(torch.optim.SGD):
    """In the third step: of no gradient there is none."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.count == 3:
            torch.stack(norms)
        return super().step(closure)


def test_a_step_that_needs_gradients_and_finds_none_is_told_so() -> None:
    model = nn.Linear(2, 2)
    optimizer = LogsNorms(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        for _ in range(2):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="non-empty"):
            optimizer.step()
        with pytest.raises(TornStepError, match=r"LogsNorms.step\(\) raised, where it found no gradient"):
            model(torch.ones(2, 2))
        overlap.accept_torn()


def stops(parameters: list[torch.Tensor]) -> None:
    """For an update: it raises at a parameter of this shape."""
    if any(parameter.shape == (3,) for parameter in parameters):
        raise ZeroDivisionError("the update")


@pytest.mark.parametrize("schedule", ["backward", "forward"])
@pytest.mark.parametrize("cleared", [False, True], ids=["", "cleared"])
def test_of_what_step_was_left_to_do_nobody_says_that_it_was_not_done(model: Any, schedule: Any, cleared: bool) -> None:
    model.extra = nn.Parameter(torch.zeros(3))
    alias = model.extra.detach()  # schedule="forward" leaves it to step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: dict[str, Any] = {"defer": True} if schedule == "forward" else {}
    with (
        before_updates(stops),
        instep.attach(model, optimizer, bucket_bytes=SMALL, schedule=schedule, **how) as overlap,
    ):
        loss_of(model).backward()
        model.extra.grad = torch.ones(3)  # no source has offered it
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        if cleared:
            optimizer.zero_grad()
        with pytest.raises(TornStepError, match=r" may have been updated or not \(") as torn:
            model(batch(0)[0])
        applied, unsure = torn.value.applied, torn.value.unsure
        assert sorted([*applied, *unsure]) == sorted(name for name, _ in model.named_parameters())
        assert torn.value.pending == ()
        assert "extra" in unsure  # with schedule="backward" the others of its bucket, too
        assert applied
        assert overlap.state == "torn"
        overlap.accept_torn()
    del alias


def test_what_a_first_optimizer_has_stepped_is_updated_when_the_second_raises() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with before_updates(stops), instep.attach(model, [first, second], schedule="backward") as overlap:
        with overlap.keep_gradients():
            model(torch.ones(1, 2)).sum().backward()
        first.step()
        with pytest.raises(ZeroDivisionError):
            second.step()
        with pytest.raises(TornStepError) as torn:
            model(torch.ones(1, 2))
        assert torn.value.applied == ("0.weight", "0.bias")
        assert torn.value.unsure == ("1.weight", "1.bias")
        overlap.accept_torn()


def test_a_torn_step_error_can_be_pickled_and_made_by_position() -> None:
    alone = TornStepError(3, ["a"], ["b"], 0, ValueError("why"))
    assert str(alone).startswith("step 3 is torn: 1 parameters were updated (a)")  # there is no other rank
    error = TornStepError(3, ["a"], ["b"], 1, ValueError("why"))
    assert str(error).startswith("step 3 is torn on rank 1: ")
    assert error.unsure == ()
    assert "may have been updated" not in str(error)
    unsure = TornStepError(3, ["a"], ["b"], 1, ValueError("why"), ["c", "d"])
    assert "1 were left (b), and 2 may have been updated or not (c, d), because ValueError: why" in str(unsure)
    for one in (error, unsure):
        copied = pickle.loads(pickle.dumps(one))
        assert str(copied) == str(one)
        assert (copied.step, copied.applied, copied.pending) == (one.step, one.applied, one.pending)
        assert (copied.rank, str(copied.cause), copied.unsure) == (one.rank, str(one.cause), one.unsure)


def test_an_interrupt_in_the_update_is_not_swallowed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward"):
        monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model).backward()


def test_step_without_backward_is_the_plain_step(model: nn.Module, optimizer: Any, overlap: Any) -> None:
    """Tools that create state by a step of their own, with gradients no source announced, must keep working."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))
    assert overlap.step_count == 0


def test_a_step_put_off_in_part_that_raises(model: nn.Module) -> None:
    """Of one parameter somebody has an alias: it is left to ``optimizer.step()``, which raises at it; the others were
    handed over by then."""
    inner = model.get_parameter("inner.weight")
    alias = inner.detach()

    def fails(parameters: list[torch.Tensor]) -> None:
        if any(parameter.shape == inner.shape for parameter in parameters):
            raise ZeroDivisionError("the update")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="forward", defer=True, bucket_bytes=SMALL) as overlap:
        loss_of(model).backward()
        with before_updates(fails), pytest.raises(ZeroDivisionError):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(TornStepError) as torn:
            loss_of(model)
        assert torn.value.unsure == ("inner.weight",)
        assert torn.value.pending == ()
        assert set(torn.value.applied) == {name for name, _ in model.named_parameters()} - {"inner.weight"}
        overlap.accept_torn()
        loss_of(model)
    del alias
