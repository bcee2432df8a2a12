"""``torch.compile`` around ``optimizer.step()``, and around more of the training loop."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep._torch.engine import Traced
from instep.errors import InstepError, TornStepError, UnsupportedOptimizerError
from tests.cases import batch
from tests.parity.lockstep import Contender, Refused, lockstep, loss_of

pytestmark = [
    pytest.mark.usefixtures("_fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # dynamo's own reading
    pytest.mark.filterwarnings("ignore:Guards may run slower"),  # on Python 3.13.0
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # in torch's own compiler
]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def built(**kwargs: Any) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer]]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **kwargs)

    return build


Compile = Callable[..., Any]


def the_step_alone(lane: Contender, compiled: Compile) -> Callable[..., Any]:
    take = compiled(lane.optimizer.step)

    def iteration(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(lane.model(x), y)
        loss.backward()
        take()
        lane.zero_grad()
        return loss.detach()

    return iteration


def a_function_that_steps(lane: Contender, compiled: Compile) -> Callable[..., Any]:
    def step_and_clear() -> None:
        lane.optimizer.step()
        lane.optimizer.zero_grad()

    take = compiled(step_and_clear)

    def iteration(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(lane.model(x), y)
        loss.backward()
        take()
        return loss.detach()

    return iteration


def all_but_the_forward(lane: Contender, compiled: Compile) -> Callable[..., Any]:
    def learn(loss: torch.Tensor) -> None:
        loss.backward()
        lane.optimizer.step()
        lane.optimizer.zero_grad()

    rest = compiled(learn)

    def iteration(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(lane.model(x), y)
        rest(loss)
        return loss.detach()

    return iteration


def everything(lane: Contender, compiled: Compile) -> Callable[..., Any]:
    model, optimizer = lane.model, lane.optimizer

    def iteration(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return compiled(iteration)


REFUSED = Refused(UnsupportedOptimizerError, "torn", match="AdamW.step() was compiled")
PARTS = [the_step_alone, a_function_that_steps, all_but_the_forward, everything]


def in_lockstep(way: str, part: Callable[..., Any], backend: str, **options: Any) -> Contender:
    def step(lane: Contender, i: int) -> Any:
        if lane.extra is None:
            lane.extra = part(lane, lambda function: torch.compile(function, backend=backend))
        return lane.extra(*batch(i))

    return lockstep(way, built(), step, bucket_bytes=1, refused={"backward": REFUSED}, **options)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("way", ["backward", "forward", "late", "undo"])
def test_a_compiled_step(way: str, part: Callable[..., Any]) -> None:
    """Adam computes its bias corrections in another way where it is compiled: a step that was taken in part by either
    is neither the compiled loop's nor the plain one's."""
    in_lockstep(way, part, "aot_eager")


def learned_in_a_graph(lane: Contender, i: int) -> Any:
    """Forward and backward are compiled, and the step is not."""
    if lane.extra is None:
        model = lane.model

        def learn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model(x), y)
            loss.backward()
            return loss.detach()

        lane.extra = torch.compile(learn, backend="aot_eager")
    loss = lane.extra(*batch(i))
    lane.step()
    lane.zero_grad()
    return loss


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_a_compiled_forward_and_backward_with_a_step_that_is_not(way: str) -> None:
    """Nothing is refused: all of the step is taken outside of what is compiled."""
    lane = lockstep(way, built(), learned_in_a_graph, bucket_bytes=1)
    if way != "forward":
        assert lane.overlap.step_count == 5


def test_training_goes_on_after_a_compiled_step_was_refused() -> None:
    model, optimizer = built()()
    overlap = instep.attach(model, optimizer, bucket_bytes=1, schedule="backward")
    x, y = batch(0)
    loss_of(model(x), y).backward()
    with pytest.raises(UnsupportedOptimizerError, match="outside of what is compiled"):
        torch.compile(optimizer.step, backend="eager")()
    with pytest.raises(TornStepError, match="was compiled"):
        model(x)
    overlap.detach()
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()


def test_torch_says_whether_a_hook_was_traced() -> None:
    """For many optimizers in one process, too, where torch.compile gives up compiling a function anew."""
    config = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({limit: 2}):
        for _ in range(4):
            optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
            traced = Traced()
            optimizer.register_step_pre_hook(traced)
            optimizer.step()
            assert not traced.yes
            torch.compile(optimizer.step, backend="eager")()
            assert traced.yes


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_compiled_autograd(way: str) -> None:
    """The backward itself is compiled, and reads weights when some have been stepped."""
    compiled = Refused(InstepError, "untouched", match="backward is compiled")
    with torch._dynamo.config.patch(compiled_autograd=True):
        lockstep(way, built(), learned_in_a_graph, bucket_bytes=1, refused={"backward": compiled})
