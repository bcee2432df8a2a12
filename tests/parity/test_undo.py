"""``undo``: a step that was taken on trial is put back bit for bit, and training goes on as if it had not been."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep import ClipNorm
from instep._optim import undo
from instep._optim.contents import Contents
from instep.errors import HyperparameterChangedError, InstepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, optimizer_cases, two_groups
from tests.inside import schedule_of
from tests.parity.lockstep import SMALL, UNDO, Contender, Step, learn, lockstep, loss_of

in_undo = pytest.mark.parametrize("way", UNDO)
OPTIMIZERS = {name: (cls, kwargs) for name, cls, kwargs in optimizer_cases()}
Built = tuple[nn.Module, torch.optim.Optimizer]


def blocks() -> Built:
    model = Blocks(depth=2)
    return model, torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)


def fresh(build: Callable[[], Built] = blocks) -> Built:
    torch.manual_seed(0)
    return build()


def loss(model: nn.Module, i: int) -> torch.Tensor:
    x, y = batch(i)
    return loss_of(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for i in steps:
        loss(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()


def state(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """A copy of all that a step changes."""
    yield from copy.deepcopy(list(training_state(model, optimizer)))


def assert_same(model: nn.Module, optimizer: Any, other: Any) -> None:
    """Bit for bit as ``other``: a copy of the state, or a model with its optimizer."""
    expected = iter(other) if isinstance(other, list) else training_state(*other)
    assert first_difference(expected, training_state(model, optimizer)) is None


def compare(way: str, step: Step, build: Any = blocks, steps: int = 5, **options: Any) -> Contender:
    return lockstep("undo", build, step, steps, **{**UNDO[way], **options})


# rollback()


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rollback_is_bit_for_bit_for_every_optimizer(name: str, before: int) -> None:
    """Also in the very first step, before which there was no state."""
    cls, kwargs = OPTIMIZERS[name]

    def build() -> Built:
        model = Blocks(depth=1)
        return model, cls(two_groups(model), **kwargs)

    model, optimizer = fresh(build)
    with instep.attach(model, optimizer, bucket_bytes=SMALL, undo=True, schedule="backward") as overlap:
        train(model, optimizer, range(before))
        old = list(state(model, optimizer))
        loss(model, 99).backward()
        overlap.rollback()
        assert_same(model, optimizer, old)
        assert all(p.grad is None for p in model.parameters())
        train(model, optimizer, range(before, before + 2))
    plain = fresh(build)
    train(*plain, range(before + 2))
    assert_same(model, optimizer, plain)


@pytest.mark.parametrize("clip", [None, ClipNorm(0.1), ClipNorm(1e6)], ids=str)
@pytest.mark.parametrize("options", [*UNDO.values(), {"schedule": "forward", "defer": True}], ids=str)
def test_training_after_rollback_is_that_of_a_loop_which_never_saw_the_batch(
    options: dict[str, Any], clip: ClipNorm | None
) -> None:
    model, optimizer = fresh()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, clip=clip, **options) as overlap:
        for i in range(4):
            loss(model, 50 + i).backward()
            overlap.rollback()
            loss(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
        overlap.synchronize()
        assert overlap.step_count == 4
    plain_model, plain_optimizer = fresh()
    for i in range(4):
        loss(plain_model, i).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(plain_model.parameters(), clip.max_norm)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert_same(model, optimizer, (plain_model, plain_optimizer))


@pytest.mark.parametrize("options", [*UNDO.values(), {"schedule": "forward", "defer": True}], ids=str)
def test_rollback_twice_and_with_nothing_to_roll_back(options: dict[str, Any]) -> None:
    model, optimizer = fresh()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **options) as overlap:
        overlap.rollback()
        train(model, optimizer, range(2))
        overlap.rollback()
        loss(model, 9).backward()
        overlap.rollback()
        overlap.rollback()
        train(model, optimizer, range(2, 4))
        overlap.synchronize()
    plain = fresh()
    train(*plain, range(4))
    assert_same(model, optimizer, plain)


@pytest.mark.parametrize("options", [*UNDO.values(), {"schedule": "forward", "defer": True}], ids=str)
def test_a_step_that_was_committed_stays(options: dict[str, Any]) -> None:
    model, optimizer = fresh()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **options) as overlap:
        train(model, optimizer, range(2))
        loss(model, 2).backward()
        optimizer.step()
        overlap.rollback()
        overlap.synchronize()
    plain = fresh()
    train(*plain, range(3))
    assert_same(model, optimizer, plain)


def test_rollback_under_forward_throws_the_gradients_away() -> None:
    model, optimizer = fresh()
    with instep.attach(model, optimizer, schedule="forward", defer=True) as overlap:
        old = list(state(model, optimizer))
        loss(model, 0).backward()
        overlap.rollback()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        overlap.synchronize()
        assert_same(model, optimizer, old)


@pytest.mark.parametrize("options", [*UNDO.values(), {"schedule": "forward", "defer": True}], ids=str)
def test_rollback_of_micro_batches(options: dict[str, Any]) -> None:
    model, optimizer = fresh()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **options) as overlap:
        with overlap.accumulate():
            loss(model, 50).backward()
        overlap.rollback()
        with overlap.accumulate():
            loss(model, 51).backward()
        loss(model, 52).backward()
        overlap.rollback()
        train(model, optimizer, range(3))
        overlap.synchronize()
    plain = fresh()
    train(*plain, range(3))
    assert_same(model, optimizer, plain)


def test_rollback_without_undo_raises_and_names_it() -> None:
    model, optimizer = fresh()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward") as overlap:
        loss(model, 0).backward()
        with pytest.raises(InstepError, match="undo=True"):
            overlap.rollback()
        optimizer.step()
        assert overlap.step_count == 1
    plain = fresh()
    train(*plain, range(1))
    assert_same(model, optimizer, plain)


@in_undo
@pytest.mark.parametrize("name", ["SGD-1-foreach", "Adam-1-foreach", "AdamW-0-fused", "NAdam-0-for-loop"])
def test_state_tensors_and_parameters_stay_the_same_objects(way: str, name: str) -> None:
    cls, kwargs = OPTIMIZERS[name]
    model, optimizer = fresh(lambda: (model := Blocks(depth=1), cls(model.parameters(), **kwargs)))
    parameters = list(model.parameters())
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **UNDO[way]) as overlap:
        train(model, optimizer, range(1))
        tensors = {key: (id(s), {k: id(v) for k, v in s.items()}) for key, s in optimizer.state.items()}
        pointers = [p.data_ptr() for p in parameters]
        loss(model, 1).backward()
        overlap.rollback()
        loss(model, 2).backward()
        parameters[0].sum()  # puts the step back, and has step() do it again
        optimizer.step()
        optimizer.zero_grad()
        assert overlap.redo_count == 2
        for key, entries in optimizer.state.items():
            assert tensors[key][0] == id(entries)
            for k, v in entries.items():
                assert tensors[key][1][k] == id(v) or not isinstance(v, torch.Tensor)
        assert [p.data_ptr() for p in parameters] == pointers
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


# Errors.


@in_undo
@pytest.mark.parametrize("position", range(16))
def test_an_error_in_backward_leaves_the_weights_as_they_were(way: str, position: int) -> None:
    """A hook raises in the place of each parameter's gradient, so after any number of buckets was stepped."""
    model, optimizer = fresh()
    parameter = list(model.parameters())[position]
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **UNDO[way]) as overlap:
        train(model, optimizer, range(2))
        old = list(state(model, optimizer))
        hook = parameter.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            loss(model, 99).backward()
        hook.remove()
        assert_same(model, optimizer, old)
        optimizer.zero_grad()
        train(model, optimizer, range(2, 4))
        assert overlap.step_count == 4
    plain = fresh()
    train(*plain, range(4))
    assert_same(model, optimizer, plain)


@in_undo
@pytest.mark.parametrize("position", [0, 7, 15])
def test_an_error_in_backward_whose_gradients_are_stepped_all_the_same(way: str, position: int) -> None:
    def step(lane: Contender, i: int) -> None:
        if i == 1:
            hook = list(lane.model.parameters())[position].register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                lane.backward(loss(lane.model, i))
            hook.remove()
            lane.step()
            lane.zero_grad()
        else:
            learn(lane, i)

    compare(way, step)


def fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


class Fails(torch.optim.SGD):
    """Raises when it has written to all parameters that it was given."""

    failing = False

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if Fails.failing and any(p.shape == (24, 16) for p in parameters):
            for p in parameters:
                p.detach().mul_(2)
            raise ZeroDivisionError("the update")
        return super().step(closure)


@pytest.fixture
def failing() -> Iterator[type[Fails]]:
    yield Fails
    Fails.failing = False


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def other_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def other_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def smaller_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def other_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for entry in optimizer.state.values():
        entry["momentum_buffer"].zero_()


def again(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    Fails.failing = False
    other_rate(model, optimizer)
    optimizer.step()


@in_undo
@pytest.mark.parametrize("answer", [nothing, other_rate, other_weights, smaller_weights, other_state, again])
def test_an_error_in_the_update(
    way: str, answer: Callable[[nn.Module, torch.optim.Optimizer], None], failing: type[Fails]
) -> None:
    """It comes from ``optimizer.step()`` and leaves what the plain loop's leaves, to which the loop may answer."""

    def build() -> Built:
        model = Blocks(depth=2)
        return model, Fails(model.parameters(), lr=0.1, momentum=0.9)

    def learn_with_an_error(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer, range(2))
        failing.failing = True
        loss(model, 2).backward()
        try:
            with pytest.raises(ZeroDivisionError, match="the update"):
                optimizer.step()
            answer(model, optimizer)
        finally:
            failing.failing = False
        optimizer.zero_grad()
        train(model, optimizer, range(3, 5))

    model, optimizer = fresh(build)
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **UNDO[way]) as overlap:
        learn_with_an_error(model, optimizer)
        assert overlap.redo_count == 1
    plain = fresh(build)
    learn_with_an_error(*plain)
    assert_same(model, optimizer, plain)


class Box:
    """A value of a class of the user's own."""

    def __init__(self) -> None:
        self.raised = 0


class Counts(Fails):
    """Changes an object in place, and then raises."""

    def __init__(self, parameters: Any, what: str) -> None:
        super().__init__(parameters, lr=0.1)
        box, kinds = Box(), {"dict": {"raised": 0}, "list": [], "tensor": torch.zeros(1), "module": nn.BatchNorm1d(1)}
        self.counts: Any = kinds.get(what, box)
        if what == "group":
            self.param_groups[0]["counts"] = box
        elif what == "state":
            state: Any = self.state
            state["counts"] = box

    def step(self, closure: Any = None) -> Any:
        if Fails.failing:
            if isinstance(self.counts, dict):
                self.counts["raised"] += 1
            elif isinstance(self.counts, list):
                self.counts.append(1)
            elif isinstance(self.counts, Box):
                self.counts.raised += 1
            elif isinstance(self.counts, nn.Module):
                mean: Any = self.counts.running_mean
                mean.add_(1)
            else:
                self.counts += 1
        return super().step(closure)

    def counted(self) -> int:
        counts = self.counts
        if isinstance(counts, (dict, Box)):
            return int(counts["raised"] if isinstance(counts, dict) else counts.raised)
        return len(counts) if isinstance(counts, list) else int(counts)


@in_undo
def test_an_update_that_cannot_be_put_back_raises_in_backward(way: str, failing: type[Fails]) -> None:
    """Done again, it would change that module a second time."""
    model = Blocks(depth=2)
    optimizer = Counts(model.parameters(), "module")
    with instep.attach(model, optimizer, **UNDO[way]):
        train(model, optimizer, range(2))
        old = list(state(model, optimizer))
        failing.failing = True
        with pytest.raises(ZeroDivisionError, match="the update"):
            loss(model, 99).backward()
        failing.failing = False
        assert_same(model, optimizer, old)


@in_undo
@pytest.mark.parametrize("then", ["taken", "left out"])
def test_an_error_in_the_update_on_trial_is_not_heard_of(way: str, then: str, failing: type[Fails]) -> None:
    """The plain loop's update raises in ``optimizer.step()``: not in a step that is left out, and not where the reason
    is gone by then."""

    def build() -> Built:
        model = Blocks(depth=2)
        return model, Fails(model.parameters(), lr=0.1, momentum=0.9)

    def learn_but_once(model: nn.Module, optimizer: torch.optim.Optimizer, fails: bool) -> None:
        train(model, optimizer, range(2))
        failing.failing = fails
        loss(model, 2).backward()
        failing.failing = False
        if then == "taken":
            optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(3, 5))

    model, optimizer = fresh(build)
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **UNDO[way]) as overlap:
        learn_but_once(model, optimizer, True)
        assert overlap.redo_count == 1
    plain = fresh(build)
    learn_but_once(*plain, False)
    assert_same(model, optimizer, plain)


# What the loop does between backward and step().


def weight(lane: Contender) -> Any:
    return lane.model.blocks[0][1].weight


def double(lane: Contender) -> None:
    with torch.no_grad():
        weight(lane).mul_(2)


def through_data(lane: Contender) -> None:
    weight(lane).data.mul_(2)


def other_data(lane: Contender) -> None:
    weight(lane).data = torch.full((24, 24), 0.01)


def set_item(lane: Contender) -> None:
    with torch.no_grad():
        weight(lane)[0, 0] = 3.0


def load(lane: Contender) -> None:
    lane.model.load_state_dict(copy.deepcopy(lane.model.state_dict()))


def load_other(lane: Contender) -> None:
    lane.model.load_state_dict({k: v * 0.5 for k, v in lane.model.state_dict().items()})


def reload_optimizer(lane: Contender) -> None:
    lane.optimizer.load_state_dict(copy.deepcopy(lane.optimizer.state_dict()))


def read(lane: Contender) -> Any:
    return weight(lane).detach().clone()


def read_all(lane: Contender) -> Any:
    return [p.norm().detach() for p in lane.model.parameters()]


def evaluate(lane: Contender) -> Any:
    with torch.no_grad():
        return lane.model(batch(77)[0])


def evaluate_a_part(lane: Contender) -> Any:
    with torch.no_grad():
        return lane.model.outer(torch.ones(1, 24))


def save(lane: Contender) -> Any:
    return list(copy.deepcopy(lane.model.state_dict()).values())


def save_the_optimizer(lane: Contender) -> Any:
    return str(lane.optimizer.state_dict())


def read_state(lane: Contender) -> Any:
    return str({k: v for s in lane.optimizer.state.values() for k, v in s.items()})


def read_a_gradient(lane: Contender) -> Any:
    return weight(lane).grad.clone()


def measure(lane: Contender) -> Any:
    return torch.nn.utils.get_total_norm([p.grad for p in lane.model.parameters()])


def clip(lane: Contender) -> Any:
    return nn.utils.clip_grad_norm_(lane.model.parameters(), 0.1)


def replace_a_gradient(lane: Contender) -> None:
    weight(lane).grad = torch.ones(24, 24)


def clear_a_gradient(lane: Contender) -> None:
    weight(lane).grad = None


def clear_all(lane: Contender) -> None:
    lane.zero_grad()


def zero_all(lane: Contender) -> None:
    lane.optimizer.zero_grad(set_to_none=False)


def lower_lr(lane: Contender) -> None:
    for group in lane.optimizer.param_groups:
        group["lr"] *= 0.5


def change_betas(lane: Contender) -> None:
    lane.optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def backward_again(lane: Contender) -> None:
    loss(lane.model, 55).backward()


def penalty(lane: Contender) -> None:
    sum((p.square().sum() for p in lane.model.parameters()), torch.zeros(())).backward()


def freeze(lane: Contender) -> None:
    weight(lane).requires_grad_(not weight(lane).requires_grad)


BETWEEN = [
    double,
    through_data,
    other_data,
    set_item,
    load,
    load_other,
    reload_optimizer,
    read,
    read_all,
    evaluate,
    evaluate_a_part,
    save,
    save_the_optimizer,
    read_state,
    read_a_gradient,
    measure,
    clip,
    replace_a_gradient,
    clear_a_gradient,
    clear_all,
    zero_all,
    lower_lr,
    change_betas,
    backward_again,
    penalty,
    freeze,
]


STATE = pytest.mark.xfail(strict=True, reason="nobody notices that the optimizer's state is used before step()")
in_between = pytest.mark.parametrize(
    "between",
    [pytest.param(between, marks=[STATE] * (between is read_state), id=between.__name__) for between in BETWEEN],
)


@in_undo
@in_between
def test_between_backward_and_step(way: str, between: Callable[[Contender], Any]) -> None:
    def step(lane: Contender, i: int) -> Any:
        lane.backward(loss(lane.model, i))
        result = between(lane) if i != 2 else None
        lane.step()
        lane.zero_grad()
        return result

    compare(way, step)


@in_undo
def test_state_written_between_backward_and_step_is_refused_and_put_back(way: str) -> None:
    """It was the state after the update that was written: what the plain loop would have now nobody knows."""
    model, optimizer = fresh()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **UNDO[way]):
        train(model, optimizer, range(2))
        old = list(state(model, optimizer))
        loss(model, 2).backward()
        for entries in optimizer.state.values():
            entries["exp_avg"].mul_(0.5)
        with pytest.raises(HyperparameterChangedError, match="state of AdamW was written"):
            optimizer.step()
        assert_same(model, optimizer, old)
        optimizer.step()
    plain = fresh()
    train(*plain, range(3))
    assert_same(model, optimizer, plain)


@in_undo
def test_nothing_in_between_is_no_reason_to_do_a_step_again(way: str) -> None:
    assert compare(way, learn).overlap.redo_count == 0


LOOKS = {
    "shapes": lambda lane: [(p.shape, p.dtype, p.requires_grad, p.numel()) for p in lane.model.parameters()],
    "names": lambda lane: [name for name, _ in lane.model.named_parameters()],
    "groups": lambda lane: [group["lr"] for group in lane.optimizer.param_groups],
    "modes": lambda lane: lane.model.train(),
    "hashes": lambda lane: len({*lane.model.parameters()}),
}


@in_undo
@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_what_is_no_value_is_no_reason_to_do_a_step_again(way: str, look: str) -> None:
    def step(lane: Contender, i: int) -> None:
        lane.backward(loss(lane.model, i))
        LOOKS[look](lane)
        lane.step()
        lane.zero_grad()

    assert compare(way, step).overlap.redo_count == 0


@in_undo
@pytest.mark.parametrize("clear", [True, False])
def test_steps_that_are_left_out(way: str, clear: bool) -> None:
    def step(lane: Contender, i: int) -> None:
        lane.backward(loss(lane.model, i))
        if i % 2:
            lane.step()
        if clear or i % 2:
            lane.zero_grad()

    compare(way, step, steps=6)


@in_undo
def test_detach_between_backward_and_step_leaves_the_step_to_the_optimizer(way: str) -> None:
    """The gradients are all there: ``optimizer.step()`` does the plain step."""
    model, optimizer = fresh()
    overlap = instep.attach(model, optimizer, bucket_bytes=SMALL, **UNDO[way])
    train(model, optimizer, range(2))
    loss(model, 2).backward()
    overlap.detach()
    optimizer.step()
    optimizer.zero_grad()
    plain = fresh()
    train(*plain, range(3))
    assert_same(model, optimizer, plain)
    assert all(type(p) is nn.Parameter for p in model.parameters())


@in_undo
def test_copies_are_freed_by_the_step(way: str) -> None:
    model, optimizer = fresh()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, **UNDO[way]) as overlap:
        train(model, optimizer, range(2))
        writes = schedule_of(overlap)._writes
        assert not writes._rollback.copies._saved
        assert not writes._kept
        assert all(type(p) is nn.Parameter for p in model.parameters())


class Curvature(torch.optim.Optimizer):
    """Draws a direction for each parameter, then asks for the gradient's own gradient, which a trial has none of."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        mine = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        ways = [torch.randn_like(p) for p in mine]
        curvatures = [
            torch.autograd.grad(p.grad, p, way, retain_graph=True)[0] for p, way in zip(mine, ways, strict=True)
        ]
        with torch.no_grad():
            for p, curvature in zip(mine, curvatures, strict=True):
                p.addcdiv_(p.grad, curvature.abs() + 1, value=-0.1)


@pytest.mark.filterwarnings("ignore:Using backward")
@in_undo
def test_what_a_trial_has_drawn_before_it_raises_is_drawn_again(way: str) -> None:
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        optimizer = Curvature(model.parameters())
        if attached:
            instep.attach(model, optimizer, bucket_bytes=64, **UNDO[way])
        for i in range(4):
            torch.manual_seed(i)
            model(torch.full((3, 6), 1.0 + i)).square().mean().backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            found.append([torch.get_rng_state(), *(p.detach().clone() for p in model.parameters())])
    for i in range(4):
        assert all(map(torch.equal, found[i], found[4 + i])), f"step {i}"


def test_an_error_leaves_the_rest_to_a_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = fresh()
    train(model, optimizer, range(2))
    before = list(state(model, optimizer))
    saved = undo.Undo(host=False)
    saved.save(list(model.parameters()), optimizer)
    train(model, optimizer, range(2, 3))

    def stopped(self: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError

    monkeypatch.setattr(undo.SavedParameter, "restore", stopped)
    (device,) = saved.devices
    with pytest.raises(ZeroDivisionError):
        saved.restore(device)
    saved.restore(device)
    assert_same(model, optimizer, before)


class _AsksNot(torch.Tensor):
    """A tensor whose class does not know whether memory is pinned, as ``DTensor`` with a torch built for CUDA."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.is_pinned:
            raise NotImplementedError("aten.is_pinned.default does not have a sharding strategy registered")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_state_of_a_class_that_does_not_know_of_pinned_memory() -> None:
    held = torch.ones(3).as_subclass(_AsksNot)
    saved = Contents(held)
    held.add_(1)
    assert saved.put_back() is held
    assert held.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.filterwarnings("error")  # what a finalizer raises is one
def test_a_model_that_is_dropped_while_a_step_stands_on_trial() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    overlap = instep.attach(model, optimizer, schedule="backward", undo=True)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    weight, stepped_by = weakref.ref(model.weight), weakref.ref(optimizer)
    del model, optimizer, overlap
    gc.collect()
    assert weight() is None
    assert stepped_by() is None
