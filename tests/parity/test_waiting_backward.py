"""``overlap.backward(loss, more=True)``: a loop that calls backward for each micro-batch, with one backward for all."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep import ClipNorm, ClipValue
from instep.errors import AccumulationError, InstepError, SpentGradientError, TornStepError
from tests.cases import Blocks, batch
from tests.devices import here
from tests.parity import test_micro_batches as by_verb
from tests.parity.lockstep import SMALL, Contender, in_every_way, lockstep, loss_of
from tests.parity.test_micro_batches import Loss, adamw, finish, most_gradients, of, plain_loss, usual

# The plain loop, bit for bit: the cases of ``micro_batches()``.


def accumulated(lane: Contender, loss: Loss, batches: Any) -> list[torch.Tensor]:
    """A step's micro-batches, each with its call of backward."""
    losses, batches = [], iter(batches)
    following = next(batches, None)
    while following is not None:
        found = loss(following)
        following = next(batches, None)  # before backward, as a loop that knows whether more follow
        if lane.overlap is not None:
            lane.overlap.backward(found, more=following is not None)
        else:
            found.backward()
        losses.append(found.detach())
    return losses


@pytest.fixture
def _by_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_verb, "accumulated", accumulated)


CASES: dict[str, tuple[Any, ...]] = {
    "test_sizes_that_change_from_step_to_step": (),
    "test_a_weight_that_is_used_twice": (3,),
    "test_graphs_that_differ_between_micro_batches": (),
    "test_parameters_that_only_some_micro_batches_use": (),
    "test_dropout_draws_in_the_order_of_the_loop": (True,),
    "test_batch_normalization_sees_the_micro_batches_in_order": (),
    "test_autocast": (False,),
    "test_one_block_of_autocast_around_many_steps": (),
    "test_complex_parameters": (),
    "test_layouts_of_convolutions": (),
    "test_sparse_gradients": (),
    "test_contributions_that_turn_out_to_be_none": ("backward", "twice"),
    "test_gradients_that_autograd_makes_fit": (),
    "test_a_gradient_penalty": (),
    "test_a_loss_scale": (),
    "test_gradients_that_are_kept": (),
    "test_one_micro_batch_is_an_ordinary_backward": (),
    "test_modes_see_the_forwards": (by_verb.Counting,),
}


@pytest.mark.usefixtures("_by_backward")
@pytest.mark.parametrize("case", CASES)
def test_as_by_the_verb(case: str) -> None:
    getattr(by_verb, case)(*CASES[case])


@pytest.mark.usefixtures("_by_backward")
@in_every_way
def test_every_way(way: str) -> None:
    lockstep(way, lambda: adamw(Blocks()), of(usual, 4))


@pytest.mark.usefixtures("_by_backward")
@pytest.mark.parametrize("clip", [ClipNorm(0.3, mode="per_bucket"), ClipValue(0.01)], ids=["per bucket", "value"])
def test_clipping(clip: Any) -> None:
    by_verb.test_clipping(clip)


@pytest.mark.usefixtures("_by_backward")
@pytest.mark.parametrize("way", ["undo", "forward"])
def test_zeroed_gradients(way: str) -> None:
    by_verb.test_zeroed_gradients(way)


def test_gradients_are_freed_while_backward_runs() -> None:
    def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(2):
            plain_loss(model, seed).backward()

    def attached(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL) as overlap:
            lane = Contender(model, optimizer, {})
            lane.overlap = overlap
            accumulated(lane, partial(plain_loss, model), range(4))
            finish(lane)
            assert overlap.stats()["freed_bytes"] > 0

    assert most_gradients(attached) < 0.3 * most_gradients(plain)


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_DISABLE", "1")
    monkeypatch.setattr(by_verb, "accumulated", accumulated)
    lockstep("backward", lambda: adamw(Blocks()), of(usual, 3))


# What a loop may do between the micro-batches of a step.


def attached_model(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, instep.Attachment]:
    torch.manual_seed(0)
    model, optimizer = adamw(Blocks().to(here()))
    return model, optimizer, instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL, **options)


@pytest.mark.parametrize("clear", ["of the optimizer", "of the model", "to zeros"])
def test_what_waits_is_thrown_away_by_zero_grad(clear: str) -> None:
    """As a loop does that leaves a batch out, after an error, or because its loss is not finite."""

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        for seed in range(2):
            loss = usual(lane, 100 + seed)
            loss.backward() if lane.overlap is None else lane.overlap.backward(loss, more=True)
        if clear == "of the model":
            lane.model.zero_grad()
        else:
            lane.optimizer.zero_grad(set_to_none=clear != "to zeros")
        losses = accumulated(lane, partial(usual, lane), range(3 * i, 3 * i + 3))
        finish(lane)
        return losses

    lockstep("backward", lambda: adamw(Blocks()), step)


def test_a_forward_without_gradients_and_one_that_raises() -> None:
    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        def loss(seed: int) -> torch.Tensor:
            with torch.no_grad():
                usual(lane, seed + 7)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                lane.model(torch.zeros(3, 5, device=here()))
            return usual(lane, seed)

        losses = accumulated(lane, loss, range(3 * i, 3 * i + 3))
        finish(lane)
        return losses

    lockstep("backward", lambda: adamw(Blocks()), step)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: model.inner.weight.grad.norm(),
        lambda model: plain_loss(model, 5).backward(),
        lambda model: model.inner.weight.grad.mul_(2),
    ],
    ids=["clip", "read", "another backward", "write"],
)
def test_who_uses_gradients_that_wait_is_told(use: Callable[[Any], object]) -> None:
    model, optimizer, overlap = attached_model()
    old = [p.detach().clone() for p in model.parameters()]
    with overlap:
        overlap.backward(plain_loss(model, 0), more=True)
        with pytest.raises(AccumulationError, match=r"not there yet: .* leave out overlap\.backward\(more=True\)"):
            use(model)
        assert all(map(torch.equal, old, model.parameters()))
        optimizer.zero_grad()
        by_verb.accumulated(_lane(model, optimizer, overlap), partial(plain_loss, model), range(2))
        optimizer.step()
        assert overlap.step_count == 1


def _lane(model: nn.Module, optimizer: torch.optim.Optimizer, overlap: Any) -> Contender:
    lane = Contender(model, optimizer, {})
    lane.overlap = overlap
    return lane


def test_a_step_before_the_last_is_refused() -> None:
    model, optimizer, overlap = attached_model()
    old = [p.detach().clone() for p in model.parameters()]
    with overlap:
        for seed in range(2):
            overlap.backward(plain_loss(model, seed), more=True)
        with pytest.raises(AccumulationError, match=r"the backward of 2 micro-batches waits .* without more=True"):
            optimizer.step()
        assert all(map(torch.equal, old, model.parameters()))
        overlap.backward(plain_loss(model, 2))  # nothing is lost
        optimizer.step()
        assert overlap.step_count == 1
        assert overlap.state == "idle"


def test_some_gradients_are_cleared_and_others_not() -> None:
    model, _, overlap = attached_model()
    with overlap:
        overlap.backward(plain_loss(model, 0), more=True)
        model.get_submodule("inner").zero_grad()
        with pytest.raises(AccumulationError, match=r"'inner\.weight' was cleared, and others were not"):
            overlap.backward(plain_loss(model, 1))
        assert all(p.grad is None for p in model.parameters())


def test_a_gradient_from_before() -> None:
    model, optimizer, overlap = attached_model()
    with overlap:
        with overlap.accumulate():
            plain_loss(model, 0).backward()
        overlap.backward(plain_loss(model, 1), more=True)
        with pytest.raises(AccumulationError, match="has a gradient from an earlier backward"):
            overlap.backward(plain_loss(model, 2))
        optimizer.zero_grad()
        overlap.backward(plain_loss(model, 1))
        optimizer.step()
        with pytest.raises(SpentGradientError, match=r"Call zero_grad\(\) between"):
            overlap.backward(plain_loss(model, 1), more=True)
        optimizer.zero_grad()


def test_what_cannot_wait() -> None:
    model, optimizer, overlap = attached_model()
    with overlap:
        with pytest.raises(InstepError, match="gradient was given for one of several micro-batches"):
            overlap.backward(plain_loss(model, 0), torch.ones((), device=here()), more=True)
        with pytest.raises(InstepError, match=r"of shape \(8, 10\)"):
            overlap.backward(model(batch(0)[0]), more=True)
        assert all(p.grad is None for p in model.parameters())
        overlap.backward(plain_loss(model, 0), more=True)
        with pytest.raises(AccumulationError, match=r"and 1 wait for the last, by backward\(more=True\)"):
            overlap.micro_batches(partial(plain_loss, model), range(2))
        with pytest.raises(InstepError, match="gradient was given for one of several micro-batches"):
            overlap.backward(plain_loss(model, 1), torch.ones((), device=here()))
        model.get_parameter("inner.weight").register_hook(lambda gradient: gradient)
        with pytest.raises(AccumulationError, match=r"'inner\.weight' has a hook"):
            overlap.backward(plain_loss(model, 1))
        assert all(p.grad is None for p in model.parameters())
        assert overlap.state == "idle"
    counted = instep.attach(model, optimizer, schedule="backward", accumulation_steps=2)
    with counted, pytest.raises(AccumulationError, match="leave out accumulation_steps"):
        counted.backward(plain_loss(model, 0), more=True)


@pytest.mark.parametrize("end", ["detach", "rollback"])
def test_what_waits_at_the_end_is_thrown_away(end: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, overlap = attached_model(undo=end == "rollback")
    with overlap:
        overlap.backward(plain_loss(model, 0), more=True)
        getattr(overlap, end)()
        assert all(p.grad is None for p in model.parameters())
        plain_loss(model, 1).backward()
        optimizer.step()
    assert ("detach() has thrown away 1 micro-batches," in caplog.text) == (end == "detach")


def test_nothing_keeps_what_waited() -> None:
    model, _, overlap = attached_model()
    kept: list[Any] = []
    with overlap:
        gc.disable()
        try:
            for seed in range(3):
                loss = plain_loss(model, seed)
                kept.append(weakref.ref(loss))
                overlap.backward(loss, more=seed < 2)
            del loss
            assert [ref() for ref in kept] == [None] * 3
        finally:
            gc.enable()


def test_a_failure_in_the_backward_of_all_tears_the_step() -> None:
    model, optimizer, overlap = attached_model()
    with overlap:
        overlap.backward(plain_loss(model, 0), more=True)
        loss = plain_loss(model, 1)
        handle = model.get_parameter("inner.weight").register_post_accumulate_grad_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            overlap.backward(loss)
        handle.remove()
        with pytest.raises(TornStepError):
            optimizer.step()
        overlap.accept_torn()
        optimizer.zero_grad()
        overlap.backward(plain_loss(model, 0), more=True)
        overlap.backward(plain_loss(model, 1))
        optimizer.step()


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_two_optimizers_of_one_attachment() -> None:
    """Each has an optimizer, and one loss goes through both."""

    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.ModuleList([Blocks(), nn.Linear(10, 10)])
        return model, [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in model]

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        def loss(seed: int) -> torch.Tensor:
            x, y = batch(seed)
            return loss_of(lane.model[1](lane.model[0](x)), y)

        losses = accumulated(lane, loss, range(3 * i, 3 * i + 3))
        finish(lane)
        return losses

    lockstep("backward", build, step, parts=lambda lane: [(lane.model, lane.optimizers)])
