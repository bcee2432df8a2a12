"""Half a step is never committed: whatever error leaves a backward over weights that backward has stepped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import instep
from instep._torch import engine
from instep.errors import AccumulationError, TornStepError
from tests.parts import Parts, raising, values


def x() -> torch.Tensor:
    return torch.ones(3, 4, requires_grad=True)


def losses(model: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one graph, of which the model's own forward has returned nothing."""
    hidden = model.trunk(x())
    return model.first(hidden).square().sum(), model.second(hidden).square().sum()


def two_losses(model: Parts) -> None:
    first, second = losses(model)
    first.backward(retain_graph=True)
    second.backward()


def two_graphs(model: Parts) -> None:
    first, second = losses(model)[0], losses(model)[1]
    first.backward()
    second.backward()


def two_losses_checkpointed(model: Parts) -> None:
    hidden = model.trunk(x())
    first = model.first(hidden).square().sum()
    second = checkpoint(model.second, hidden, use_reentrant=True).square().sum()
    first.backward(retain_graph=True)
    second.backward()


def a_gradient(model: Parts) -> None:
    inputs = x()
    hidden = model.trunk(inputs)
    first, second = model.first(hidden).sum(), model.second(hidden).square().sum()
    first.backward(retain_graph=True)
    torch.autograd.grad(second, inputs)


def a_gradient_from_the_model_s_output(model: Parts) -> None:
    inputs = x()
    loss = model(inputs).square().sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, inputs)


def the_same_loss_twice(model: Parts) -> None:
    loss = model(x()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


SECOND: dict[str, Callable[[Parts], None]] = {
    one.__name__: one
    for one in (
        two_losses,
        two_graphs,
        two_losses_checkpointed,
        a_gradient,
        a_gradient_from_the_model_s_output,
        the_same_loss_twice,
    )
}


def attached(**options: Any) -> tuple[Parts, torch.optim.Optimizer, instep.Attachment]:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, instep.attach(model, optimizer, schedule="backward", bucket_bytes=1, **options)


def goes_on(model: Parts, optimizer: torch.optim.Optimizer, overlap: instep.Attachment) -> None:
    """Torn: ``step()`` says so and writes nothing, and what the weights are can be accepted."""
    assert overlap.state == "torn"
    before = values(model)
    with pytest.raises(TornStepError, match=r"step 1 is torn: \d parameters were updated"):
        optimizer.step()
    assert all(map(torch.equal, values(model), before))
    overlap.accept_torn()
    assert overlap.state == "idle"
    optimizer.zero_grad()
    model(x()).sum().backward()
    optimizer.step()
    assert overlap.step_count == 2


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", SECOND)
def test_a_second_backward_over_stepped_weights_says_what_to_write(name: str) -> None:
    model, optimizer, overlap = attached()
    said = r"before SGD\.step\(\).*already updated the weights|weights that the first backward has already updated"
    with pytest.raises(AccumulationError, match=said) as told:
        SECOND[name](model)
    for way in ("overlap.accumulate()", "add the losses and call backward() once", "overlap.keep_gradients()", "undo"):
        assert way in str(told.value)
    goes_on(model, optimizer, overlap)


@pytest.mark.parametrize("name", SECOND)
def test_undo_takes_it_as_it_is(name: str) -> None:
    model, optimizer, _ = attached(undo=True)
    plain = Parts()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for one, its in ((model, optimizer), (plain, plain_optimizer)):
            SECOND[name](one)
            its.step()
            its.zero_grad()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("undo", [False, True])
def test_an_error_of_the_loop_s_in_the_first_backward(error: type[BaseException], undo: bool) -> None:
    model, optimizer, overlap = attached(undo=undo)
    before = values(model)
    hidden = raising(model.trunk[:2](x()), error)
    with pytest.raises(error, match="the loop's own"):
        model.first(model.trunk[2:](hidden)).sum().backward()
    if not undo:
        goes_on(model, optimizer, overlap)
        return
    assert all(map(torch.equal, values(model), before))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("deep", [False, True])
def test_an_error_of_the_loop_s_in_a_second_backward(error: type[BaseException], deep: bool) -> None:
    """At its first node, or in a hook, where a gradient has been added that the first has not."""
    model, optimizer, overlap = attached()

    def fail(gradient: torch.Tensor) -> None:
        raise error("the loop's own")

    first, second = losses(model)
    first.backward(retain_graph=True)
    if deep:
        model.second.weight.register_hook(fail)
    with pytest.raises(error, match="the loop's own"):
        (second if deep else raising(second, error)).backward()
    goes_on(model, optimizer, overlap)


def test_an_error_under_undo_leaves_what_the_plain_loop_has() -> None:
    model, optimizer, _ = attached(undo=True)
    plain = Parts()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for one, its in ((model, optimizer), (plain, plain_optimizer)):
        first, second = losses(one)
        first.backward(retain_graph=True)
        with pytest.raises(ValueError, match="own"):
            raising(second, ValueError).backward()
        its.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_what_is_none_of_the_model_s_leaves_its_step() -> None:
    """As in the plain loop: a backward of another model, gradients of other tensors, ``autograd.grad`` of the loop's
    that raises by itself."""
    model, optimizer, overlap = attached()
    for _ in range(2):
        inputs, other = x(), nn.Linear(2, 2)
        output = model(inputs)
        output.sum().backward(retain_graph=True)
        with pytest.raises(ValueError, match="own"):
            raising(other(torch.ones(1, 2)), ValueError).sum().backward()
        with pytest.raises(ValueError, match="own"):
            torch.autograd.grad(raising(output, ValueError).sum(), inputs)
        with pytest.raises(ValueError, match="own"):
            raising(output, ValueError).sum().backward(inputs=[inputs])
        optimizer.step()
        optimizer.zero_grad()
    assert overlap.step_count == 2


def test_torch_s_function_is_its_own_again() -> None:
    plain: Any = vars(torch.autograd)[engine._RUN]
    assert plain is not engine._run
    first, second = attached(), attached()
    assert vars(torch.autograd)[engine._RUN] is engine._run
    first[2].detach()
    assert vars(torch.autograd)[engine._RUN] is engine._run
    second[2].detach()
    assert vars(torch.autograd)[engine._RUN] is plain
    third = attached()
    assert vars(torch.autograd)[engine._RUN] is engine._run
    del third
    assert vars(torch.autograd)[engine._RUN] is plain
    with instep.attach((model := Parts()), torch.optim.SGD(model.parameters(), lr=0.1)):
        assert vars(torch.autograd)[engine._RUN] is plain
