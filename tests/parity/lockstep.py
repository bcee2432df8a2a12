"""Two loops side by side: the plain one, and the attached one in each of the ways there are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import nn

import instep
from instep.errors import TornStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import batch
from tests.devices import here
from tests.late import late_updates

SMALL = 2_000  # bytes: several buckets even in small models
CLIP = 0.3
WAYS: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "late": {"schedule": "forward", "defer": True},  # no update runs before somebody waits for it
    "undo": {"schedule": "backward", "undo": True},
    "two_pass": {"schedule": "backward", "clip": instep.ClipNorm(CLIP, mode="two_pass")},
}
UNDO: dict[str, dict[str, Any]] = {
    "undo": {"schedule": "backward", "undo": True},
    "undo on the host": {"schedule": "backward", "undo": "host"},
}
EXACT = ("forward", "late", "undo")  # whatever the plain loop does
in_every_way = pytest.mark.parametrize("way", list(WAYS))
in_exact_ways = pytest.mark.parametrize("way", EXACT)
loss_of = nn.functional.cross_entropy


def ways(*names: str, **failing: str) -> pytest.MarkDecorator:
    """Parametrize over the ways named, or all; ``failing`` says why some are known to fail."""
    marks = {way: [pytest.mark.xfail(strict=True, reason=reason)] for way, reason in failing.items()}
    return pytest.mark.parametrize("way", [pytest.param(way, marks=marks.get(way, ())) for way in names or WAYS])


class Contender:
    """One of the two loops."""

    def __init__(self, model: Any, optimizers: Any, options: Mapping[str, Any]) -> None:
        self.model = model
        self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self.optimizer: Any = self.optimizers[0]
        self.options = options
        self.overlap: Any = None
        self.overlaps: list[Any] = []
        self.extra: Any = None  # whatever a loop likes to keep

    def backward(self, loss: torch.Tensor, **how: Any) -> None:
        if self.overlap is not None and not how:
            self.overlap.backward(loss)
        else:
            loss.backward(**how)

    def step(self) -> None:
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step()

    def clip(self) -> None:
        """What the plain loop has in place of ``clip=``."""
        if self.overlap is None and self.options.get("clip") is not None:
            mine = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
            nn.utils.clip_grad_norm_([p for p in self.model.parameters() if id(p) in mine], CLIP)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def finish(self) -> None:
        self.step()
        self.zero_grad()

    def learn(self, loss: torch.Tensor) -> torch.Tensor:
        """The rest of a usual iteration."""
        self.backward(loss)
        self.finish()
        return loss.detach()


@dataclass(frozen=True)
class Refused:
    """What an attached loop raises, and what has become of the step: nothing of this iteration was written; nothing
    is open; a backward's update stands, not committed; the step is torn."""

    error: type[BaseException] | tuple[type[BaseException], ...]
    then: Literal["untouched", "idle", "pending", "open", "torn"]
    match: str = ""


Build = Callable[[], tuple[nn.Module, Any]]
Step = Callable[[Contender, int], Any]


def learn(lane: Contender, i: int) -> torch.Tensor:
    """An iteration of the usual kind."""
    x, y = batch(i)
    return lane.learn(loss_of(lane.model(x), y))


Loss = Callable[[Any], torch.Tensor]


def accumulated(lane: Contender, loss: Loss, batches: Any) -> list[torch.Tensor]:
    """A step's micro-batches: by the verb, or by the loop that it stands for."""
    if lane.overlap is not None:
        losses: list[torch.Tensor] = lane.overlap.micro_batches(loss, batches)
        return losses
    losses = []
    for one in batches:
        found = loss(one)
        found.backward()
        losses.append(found.detach())
    return losses


def in_micro_batches(model_loss: Callable[[Contender, int], torch.Tensor], count: int = 3) -> Step:
    """An iteration of ``count`` micro-batches; ``model_loss`` is given the number of each."""

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        losses = accumulated(lane, lambda seed: model_loss(lane, seed) / count, range(count * i, count * (i + 1)))
        lane.finish()
        return losses

    return step


def lockstep(
    way: str,
    build: Build,
    step: Step = learn,
    steps: int = 5,
    refused: Mapping[str, Refused] | None = None,
    parts: Callable[[Contender], list[tuple[nn.Module, Any]]] | None = None,
    **options: Any,
) -> Contender:
    """Run ``step`` plain and attached and compare, bit for bit, after every iteration; also what ``step`` returns.

    Args:
        refused: by way: what is expected in place of equality.
        parts: what to attach, each with its optimizers; the whole model unless told.
        options: for ``attach``, on top of those of the way.
    """
    options = {"bucket_bytes": SMALL, **WAYS[way], **options}
    lanes = []
    for _ in range(2):
        torch.manual_seed(0)
        lanes.append(Contender(*build(), options))
    plain, lane = lanes
    with late_updates() if way == "late" else nullcontext(), ExitStack() as stack:
        for model, optimizers in [(lane.model, lane.optimizers)] if parts is None else parts(lane):
            lane.overlaps.append(stack.enter_context(instep.attach(model, optimizers, **options)))
        lane.overlap = lane.overlaps[0]
        before: list[tuple[str, Any]] = []
        results: list[tuple[Iterator[tuple[str, Any]], Iterator[tuple[str, Any]]]] = []
        for i in range(steps):
            if refused and way in refused and _state_of(lane) == "idle":
                before = list(_state(lane, copy=True))
            torch.manual_seed(i)
            expected = step(plain, i)
            torch.manual_seed(i)
            if refused is not None and way in refused:
                try:
                    found = step(lane, i)
                    if refused[way].then == "torn":
                        lane.overlap.synchronize()
                except refused[way].error as error:
                    _assert_refused(lane, refused[way], error, before)
                    return lane
            else:
                found = step(lane, i)
            results.append((_named(expected), _named(found)))
            # On an accelerator whoever compares has the host wait, and with it all that is launched later.
            if (way == "late" or (here().type != "cpu" and refused is None)) and i < steps - 1:
                continue
            for number, both in enumerate(results, i + 1 - len(results)):
                difference = first_difference(*both)
                assert difference is None, f"iteration {number}: {difference}"
            results.clear()
            if refused and way in refused and _state_of(lane) == "open":
                continue
            for overlap in lane.overlaps:
                overlap.synchronize()
            exact = way in EXACT
            difference = first_difference(_state(plain, gradients=exact), _state(lane, gradients=exact))
            assert difference is None, f"after iteration {i}: {difference}"
        assert refused is None or way not in refused, f"nothing was refused: {refused}"
    return lane


def _assert_refused(lane: Contender, refused: Refused, error: BaseException, before: list[tuple[str, Any]]) -> None:
    assert refused.match in str(error)
    assert _state_of(lane) == {"untouched": "idle"}.get(refused.then, refused.then), error
    if refused.then == "untouched" or lane.options.get("undo"):
        difference = first_difference(iter(before), _state(lane))
        assert difference is None, difference
    if refused.then == "torn":
        with pytest.raises(TornStepError):
            lane.step()


def _state_of(lane: Contender) -> str:
    return repr(lane.overlap).rstrip(">").split(", ")[-1]


def _state(lane: Contender, *, copy: bool = False, gradients: bool = False) -> Iterator[tuple[str, Any]]:
    for name, value in training_state(lane.model, lane.optimizers):
        yield name, value.clone() if copy and isinstance(value, torch.Tensor) else value
    if gradients:
        for name, parameter in lane.model.named_parameters():
            yield f"gradient of {name!r}", parameter.grad


def _named(result: Any) -> Iterator[tuple[str, Any]]:
    values: Sequence[Any] = result if isinstance(result, (list, tuple)) else (result,)
    for number, value in enumerate(values):
        yield f"result {number}", value
