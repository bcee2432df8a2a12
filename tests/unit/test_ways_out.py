"""The messages of ``schedule="backward"`` name the user's call and the ways out, and each way out works when taken."""

import copy
import io
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import instep
from instep import ClipNorm, ClipValue
from instep.errors import AccumulationError, SpentGradientError, UncommittedStepError
from tests.cases import Blocks, batch
from tests.parity.lockstep import Contender, Refused, lockstep, loss_of

Around = Callable[[Contender], AbstractContextManager[Any]]
Loop = Callable[[Contender, int, Around], Any]
KEEP = "`with overlap.keep_gradients():`"


def blocks() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Blocks(depth=2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def two_networks() -> tuple[nn.Module, Any]:
    """Whose optimizers step in turn."""
    model = nn.ModuleDict({"actor": Blocks(depth=1), "critic": Blocks(depth=1)})
    return model, [
        torch.optim.AdamW(model["actor"].parameters(), lr=1e-2),
        torch.optim.SGD(model["critic"].parameters(), lr=1e-2),
    ]


def loss(lane: Contender, i: int) -> torch.Tensor:
    x, y = batch(i)
    return loss_of(lane.model(x), y)


def nothing(lane: Contender) -> AbstractContextManager[Any]:
    return nullcontext()


def keep(lane: Contender) -> AbstractContextManager[Any]:
    return nullcontext() if lane.overlap is None else lane.overlap.keep_gradients()


def accumulate(lane: Contender) -> AbstractContextManager[Any]:
    return nullcontext() if lane.overlap is None else lane.overlap.accumulate()


def between(do: Callable[[Contender], Any]) -> Loop:
    """A loop that does something between backward and ``step()``."""

    def loop(lane: Contender, i: int, around: Around) -> Any:
        with around(lane):
            loss(lane, i).backward()
        found = do(lane)
        lane.optimizer.step()
        lane.optimizer.zero_grad()
        return found if isinstance(found, torch.Tensor) else None

    return loop


def save(lane: Contender) -> None:
    torch.save(list(lane.model.parameters()), io.BytesIO())


def load(lane: Contender) -> None:
    lane.model.load_state_dict({name: torch.ones(p.shape) for name, p in lane.model.named_parameters()}, strict=False)


def write(lane: Contender) -> None:
    lane.extra[0].mul_(0.5)


def throw_away(lane: Contender) -> None:
    for parameter in lane.model.parameters():
        parameter.grad = None


def with_alias(lane: Contender, i: int, around: Around) -> None:
    """A write through another tensor of the memory of a weight."""
    lane.extra = [next(lane.model.parameters()).detach()]
    between(write)(lane, i, around)


def norm_of_each(lane: Contender) -> torch.Tensor:
    return torch.stack([p.grad.norm() for p in lane.model.parameters() if p.grad is not None]).norm()


def another_optimizer(lane: Contender) -> None:
    torch.optim.SGD(lane.model.parameters(), lr=0.1).step()


def never_cleared(lane: Contender, i: int, around: Around) -> None:
    with around(lane):
        loss(lane, i).backward()
    lane.optimizer.step()


def logged_after_the_step(lane: Contender, i: int, around: Around) -> Any:
    with around(lane):
        loss(lane, i).backward()
    lane.optimizer.step()
    found = norm_of_each(lane)
    lane.optimizer.zero_grad()
    return found


def evaluated(lane: Contender, i: int, around: Around) -> Any:
    with around(lane):
        loss(lane, i).backward()
    with torch.no_grad():
        found = loss(lane, 100 + i)
    lane.optimizer.step()
    lane.optimizer.zero_grad()
    return found


def second_backward(lane: Contender, i: int, around: Around) -> None:
    for micro in range(2):
        with around(lane) if micro == 0 or around is keep else nullcontext():
            (loss(lane, 2 * i + micro) / 2).backward()
    lane.optimizer.step()
    lane.optimizer.zero_grad()


def two_losses(lane: Contender, i: int, around: Around) -> None:
    x, y = batch(i)
    out = lane.model(x)
    with around(lane):
        loss_of(out, y).backward(retain_graph=True)
    with around(lane) if around is keep else nullcontext():
        out.square().mean().backward()
    lane.optimizer.step()
    lane.optimizer.zero_grad()


def in_turn(lane: Contender, i: int, around: Around) -> None:
    """The critic's loss gives gradients to the actor too."""
    x, y = batch(i)
    model: Any = lane.model
    actor, critic = lane.optimizers
    with around(lane):
        loss_of(model["critic"](model["actor"](x).repeat(1, 2)[:, :16]), y).backward()
    critic.step()
    lane.zero_grad()
    with around(lane):
        loss_of(model["actor"](x), y).backward()
    actor.step()
    lane.zero_grad()


def unscaled(lane: Contender, i: int, around: Around) -> None:
    lane.extra = lane.extra or GradScaler("cpu", init_scale=8.0)
    with around(lane):
        lane.extra.scale(loss(lane, i)).backward()
    lane.extra.unscale_(lane.optimizer)
    lane.extra.step(lane.optimizer)
    lane.extra.update()
    lane.optimizer.zero_grad()


@dataclass(frozen=True)
class Mistake:
    """
    Attributes:
        says: in the message, beside the ways out.
        then: what has become of the step.
        others: other ways out, by what the message says of them.
        undo: whether ``undo=True`` is one.
    """

    loop: Loop
    error: type[Exception]
    says: str
    then: Any = "open"
    others: Mapping[str, Around] | None = None
    build: Callable[[], Any] = blocks
    undo: bool = True


MISTAKES: Mapping[str, Mistake] = {
    "clip_grad_norm_": Mistake(
        between(lambda lane: clip_grad_norm_(lane.model.parameters(), 0.1)),
        SpentGradientError,
        r"^clip_grad_norm_\(\) was called .*Remove the loop's own clipping, and attach with clip=instep.ClipNorm",
    ),
    "clip_grad_value_": Mistake(
        between(lambda lane: clip_grad_value_(lane.model.parameters(), 0.01)),
        SpentGradientError,
        r"^clip_grad_value_\(\) was called .*Remove the loop's own clipping, and attach with clip=instep.ClipValue",
    ),
    "a norm of each gradient": Mistake(
        between(norm_of_each), SpentGradientError, r"^Tensor\.norm\(\) was called .*read overlap\.grad_norm"
    ),
    "gradients written": Mistake(
        between(lambda lane: torch._foreach_mul_([p.grad for p in lane.model.parameters()], 0.5)),
        SpentGradientError,
        r"^_foreach_mul_ was called",
    ),
    "gradients zeroed before the step": Mistake(
        between(lambda lane: lane.optimizer.zero_grad(set_to_none=False)),
        SpentGradientError,
        r"^AdamW\.zero_grad\(\) was called .*Call zero_grad\(\) after optimizer\.step\(\)",
    ),
    "gradients cleared before the step": Mistake(
        between(throw_away), SpentGradientError, r"was cleared or replaced between", "torn"
    ),
    "another optimizer": Mistake(
        between(another_optimizer), UncommittedStepError, r"by SGD\.step\(\), .*not the attached one"
    ),
    "gradients never cleared": Mistake(
        never_cleared, SpentGradientError, r"^AdamW\.step\(\) met .*Call zero_grad\(\)", "idle"
    ),
    "gradients logged after the step": Mistake(
        logged_after_the_step, SpentGradientError, r"^Tensor\.norm\(\) met", "idle"
    ),
    "GradScaler": Mistake(unscaled, SpentGradientError, r"^GradScaler\.unscale_\(\) found", "torn"),
    "an evaluation": Mistake(evaluated, UncommittedStepError, r"and AdamW\.step\(\) has not been called since"),
    "a part of the model": Mistake(
        between(lambda lane: lane.model.blocks[0][1](torch.ones(1, 24))),
        UncommittedStepError,
        r"and AdamW\.step\(\) has not been called since",
    ),
    "optimizers in turn": Mistake(
        in_turn,
        UncommittedStepError,
        r"and AdamW\.step\(\) has not been called since.*Losses of 2 optimizers .*freeze the others'",
        build=two_networks,
    ),
    "the model saved": Mistake(between(save), UncommittedStepError, r"optimizer\.step\(\), by torch\.save\(\)"),
    "the model copied": Mistake(
        between(lambda lane: copy.deepcopy(lane.model)), UncommittedStepError, r"by copy\.deepcopy\(\)"
    ),
    "weights loaded": Mistake(
        between(load), UncommittedStepError, r"^Blocks\.load_state_dict\(\) was called between(?!.*use_reentrant)"
    ),
    "the state saved": Mistake(
        between(lambda lane: lane.optimizer.state_dict()),
        UncommittedStepError,
        r"state_dict\(\) or load_state_dict\(\) of AdamW",
    ),
    "a norm of a weight": Mistake(
        between(lambda lane: next(lane.model.parameters()).norm()),
        UncommittedStepError,
        r"by Tensor\.norm\(\), (?!.*use_reentrant)",
    ),
    "a weight written through an alias": Mistake(
        with_alias,
        UncommittedStepError,
        r"was written between backward\(\) and optimizer\.step\(\)",
        "torn",
        undo=False,
    ),
    "micro-batches": Mistake(
        second_backward,
        UncommittedStepError,
        r"AdamW\.step\(\) has not been called since",
        others={"`with overlap.accumulate():`": accumulate},
    ),
    "two losses": Mistake(
        two_losses,
        AccumulationError,
        r"^a second backward began before AdamW\.step\(\)",
        "torn",
        others={"`with overlap.accumulate():`": accumulate},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_the_message(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep._step.remedies.is_used", lambda: True)  # of pipelines: messages name them, too, then
    messages: list[str] = []

    def step(lane: Contender, i: int) -> Any:
        try:
            return mistake.loop(lane, i, nothing)
        except mistake.error as error:
            messages.append(str(error))
            raise

    lockstep("backward", mistake.build, step, refused={"backward": Refused(mistake.error, mistake.then)})
    (message,) = messages
    assert len(message.split()) <= 60, message
    assert re.search(mistake.says, message, re.DOTALL), message
    for way in (KEEP, "schedule='forward'", *(mistake.others or ())):
        assert way in message, message
    assert ("undo=True" in message) == mistake.undo, message


@pytest.mark.parametrize("way", ["keep", "forward", "undo"])
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_each_way_out_works(mistake: Mistake, way: str) -> None:
    if way == "undo" and not mistake.undo:
        pytest.skip("the message does not name it")
    around = keep if way == "keep" else nothing
    lockstep("backward" if way == "keep" else way, mistake.build, partial(_taken, mistake.loop, around))


@pytest.mark.parametrize("mistake", [m for m in MISTAKES.values() if m.others], ids=lambda m: m.loop.__name__)
def test_each_other_way_out_works(mistake: Mistake) -> None:
    for around in (mistake.others or {}).values():
        lockstep("backward", mistake.build, partial(_taken, mistake.loop, around))


def _taken(loop: Loop, around: Around, lane: Contender, i: int) -> Any:
    return loop(lane, i, around)


@pytest.mark.parametrize(
    ("clip", "by_hand"),
    [
        (ClipNorm(0.1, mode="two_pass"), lambda model: clip_grad_norm_(model.parameters(), 0.1)),
        (ClipValue(0.01), lambda model: clip_grad_value_(model.parameters(), 0.01)),
    ],
    ids=["ClipNorm", "ClipValue"],
)
def test_clip_takes_the_place_of_the_loop_s_own_clipping(clip: Any, by_hand: Callable[[nn.Module], Any]) -> None:
    def step(lane: Contender, i: int) -> None:
        lane.backward(loss(lane, i))
        if lane.overlap is None:
            by_hand(lane.model)
        lane.optimizer.step()
        lane.optimizer.zero_grad()

    lockstep("backward", blocks, step, clip=clip)


def test_clipping_beside_clip() -> None:
    model, optimizer = blocks()
    overlap = instep.attach(model, optimizer, schedule="backward", clip=ClipValue(0.1))
    model(batch(0)[0]).sum().backward()
    with pytest.raises(SpentGradientError, match=r"It was clipped as clip= says: remove the loop's own clipping"):
        clip_grad_value_(model.parameters(), 0.1)
    overlap.detach()
