"""Clipping on one device: by ``attach(clip=…)`` and by the loop itself, against the plain loop that clips."""

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import instep
from instep import ClipNorm, ClipValue
from instep._gradients.clipping import norms_of
from instep._optim.undo import Undo
from instep._torch.hooks import is_in_step
from instep._torch.placeholders import SpentGradient
from instep.errors import AttachError, InstepError, SpentGradientError, TornStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, Sometimes, batch, two_groups
from tests.devices import on_cpu_only
from tests.parity.lockstep import SMALL, WAYS, Contender, Step, lockstep, loss_of

EXACT: Mapping[str, Mapping[str, Any]] = {
    "forward": {},
    "late": {},
    "undo": {},
    "undo on the host": {"undo": "host"},
    "two_pass": {},
}
UNDO = ("undo", "undo on the host")
in_exact_ways = pytest.mark.parametrize("way", list(EXACT))
in_ways_that_keep_gradients = pytest.mark.parametrize("way", ["forward", "late", *UNDO])


def compare(way: str, build: Any, step: Step, steps: int = 5, clip: Any = None, **options: Any) -> Contender:
    """``lockstep``, with the clip in the form that the way takes."""
    if isinstance(clip, ClipNorm) and way == "two_pass":
        clip = ClipNorm(clip.max_norm, clip.norm_type, clip.error_if_nonfinite, mode="two_pass")
    return lockstep(way.split(" ")[0], build, step, steps, **{**EXACT.get(way, {}), **options, "clip": clip})


def blocks() -> tuple[Blocks, torch.optim.Optimizer]:
    model = Blocks(depth=2)
    return model, torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)


def two_optimizers() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Blocks(depth=2)
    matrices, rest = (group["params"] for group in two_groups(model))
    return model, [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)]


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 24)
        self.wide = nn.Linear(24, 24, dtype=torch.float64)
        self.narrow = nn.Linear(24, 24, dtype=torch.bfloat16)
        self.outer = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(torch.tanh(self.inner(x)).double())
        return self.outer(torch.tanh(self.narrow(x.bfloat16()).float()))


def mixed_dtypes() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MixedDtypes()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def loss(lane: Contender, i: int) -> torch.Tensor:
    """Every other one is large."""
    x, y = batch(i)
    return loss_of(lane.model(x), y) * (1 + 9 * (i % 2))


def clipping(clip: ClipNorm | ClipValue, loss: Callable[[Contender, int], torch.Tensor] = loss) -> Step:
    """Backward, clip, step: the plain loop clips itself. Returns the norm."""

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        lane.backward(loss(lane, i))
        return clip_and_step(clip, lane)

    return step


def clip_and_step(clip: ClipNorm | ClipValue, lane: Contender) -> torch.Tensor | None:
    norm = apply(clip, lane)
    for optimizer in lane.optimizers:
        optimizer.step()
    lane.zero_grad()
    return norm if lane.overlap is None else lane.overlap.grad_norm


def apply(clip: ClipNorm | ClipValue, lane: Contender) -> torch.Tensor | None:
    if lane.overlap is not None:
        return None
    if isinstance(clip, ClipValue):
        return clip_grad_value_(lane.model.parameters(), clip.clip_value)
    return clip_grad_norm_(lane.model.parameters(), clip.max_norm, clip.norm_type, clip.error_if_nonfinite)


# ``attach(clip=ClipNorm(…))``.

ALWAYS, SOMETIMES, NEVER = {1.0: 0.5, 2.0: 0.1, math.inf: 0.01}, {1.0: 60.0, 2.0: 4.0, math.inf: 1.0}, 1e6


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("limit", ["always", "sometimes", "never"])
@in_exact_ways
def test_clip_norm_is_clip_grad_norm(way: str, limit: str, norm_type: float) -> None:
    max_norm = {"always": ALWAYS[norm_type], "sometimes": SOMETIMES[norm_type], "never": NEVER}[limit]
    norms: list[torch.Tensor] = []

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        norm = clipping(clip)(lane, i)
        assert norm is not None
        norms.append(norm)
        return norm

    clip = ClipNorm(max_norm, norm_type)
    compare(way, blocks, step, clip=clip)
    assert {bool(norm > max_norm) for norm in norms} == {"always": {True}, "never": {False}}.get(limit, {True, False})


@pytest.mark.parametrize("way", ["forward", "undo"])
def test_a_number_is_clip_norm(way: str) -> None:
    compare(way, blocks, clipping(ClipNorm(ALWAYS[2.0])), clip=ALWAYS[2.0])


@pytest.mark.parametrize("build", [two_optimizers, mixed_dtypes])
@in_exact_ways
def test_clip_norm_measures_only_what_is_attached(way: str, build: Any) -> None:
    """A parameter in no optimizer has a gradient too."""

    def with_another() -> Any:
        model, optimizers = build()
        model.scale = nn.Parameter(torch.full((10,), 3.0))
        return model, optimizers

    def scaled(lane: Contender, i: int) -> torch.Tensor:
        x, y = batch(i)
        return loss_of(lane.model(x) * lane.model.scale, y)

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        lane.backward(scaled(lane, i))
        attached = [p for name, p in lane.model.named_parameters() if name != "scale"]
        norm = clip_grad_norm_(attached, 0.1) if lane.overlap is None else None
        for optimizer in lane.optimizers:
            optimizer.step()
        lane.model.zero_grad()
        return norm if lane.overlap is None else lane.overlap.grad_norm

    compare(way, with_another, step, clip=ClipNorm(0.1))


@pytest.mark.parametrize(
    ("clip", "options"),
    [
        (ClipNorm(1.0), {"schedule": "forward", "defer": True}),
        (ClipNorm(1.0), {"schedule": "backward", "undo": True}),
        (ClipNorm(1.0, mode="two_pass"), {"schedule": "backward"}),
        (ClipNorm(math.inf), {"schedule": "backward"}),
    ],
)
def test_grad_norm_is_none_before_the_first_step(clip: ClipNorm, options: dict[str, Any]) -> None:
    model, optimizer = blocks()
    with instep.attach(model, optimizer, clip=clip, **options) as overlap:
        assert overlap.grad_norm is None
        overlap.backward(loss_of(model(batch(0)[0]), batch(0)[1]))
        optimizer.step()
        assert overlap.grad_norm is not None


def test_grad_norm_is_none_without_clip_norm() -> None:
    clip = ClipValue(1.0)
    assert compare("backward", blocks, clipping(clip), clip=clip).overlap.grad_norm is None


@pytest.mark.parametrize("way", ["forward", "late"])
def test_on_one_device_step_takes_the_norms_in_one_call(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for anything in backward, where each would be a call of its own."""
    calls: list[int] = []

    def counting(gradients: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
        calls.append(len(gradients))
        return norms_of(gradients, norm_type)

    monkeypatch.setattr("instep._gradients.clipping.norms_of", counting)
    clip = ClipNorm(0.5)
    lane = compare(way, blocks, clipping(clip), 3, clip=clip)
    assert calls == [len(list(lane.model.parameters()))] * 3


@pytest.mark.parametrize("way", UNDO)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_undo_puts_back_the_steps_that_are_clipped_but_none_after_one(way: str, norm_type: float) -> None:
    """After a step that was clipped backward updates nothing: the next one will be clipped, too, most likely."""
    clip = ClipNorm(SOMETIMES[norm_type], norm_type)
    is_clipped = [False, True, True, True, False, False, True, False, True]

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        lane.backward(loss(lane, i) * (1e3 if is_clipped[i] else 1e-3))
        norm = apply(clip, lane)
        lane.optimizer.step()
        lane.zero_grad()
        norm = norm if lane.overlap is None else lane.overlap.grad_norm
        assert norm is not None
        assert bool(norm > clip.max_norm) == is_clipped[i]
        return norm

    lane = compare(way, blocks, step, len(is_clipped), clip=clip)
    assert lane.overlap.redo_count == [*pairwise(is_clipped)].count((False, True))
    assert lane.overlap.step_count == len(is_clipped)


@on_cpu_only  # on an accelerator the host does not wait for a norm in backward
def test_undo_stops_where_the_norm_is_above_the_limit_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of backward is neither copied nor updated, only to be put back."""
    saved: list[int] = []
    save = Undo.save

    def counting(
        copies: Undo, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, *mappings: Any
    ) -> None:
        if not is_in_step(optimizer):
            saved.append(len(parameters))
        save(copies, parameters, optimizer, *mappings)

    monkeypatch.setattr(Undo, "save", counting)
    clip = ClipNorm(1e-9)
    lane = compare("undo", blocks, clipping(clip), 2, clip=clip)
    assert (saved, lane.overlap.redo_count) == ([], 1), "the first bucket has such a norm by itself"
    clip = ClipNorm(NEVER)
    lane = compare("undo", blocks, clipping(clip), 1, clip=clip)
    buckets = len(lane.overlap.plan.buckets)
    assert len(saved) == buckets
    saved.clear()
    clip = ClipNorm(0.97 * float(lane.overlap.grad_norm))
    compare("undo", blocks, clipping(clip), 1, clip=clip)
    assert 0 < len(saved) < buckets


# A norm that is not finite.


def weights(lane: Contender) -> list[torch.Tensor]:
    return [p.detach().clone() for p in lane.model.parameters()]


def stopping(clip: ClipNorm, bad: float) -> Step:
    """Leaves out a step whose norm is not finite. Returns what was raised."""

    def step(lane: Contender, i: int) -> str:
        before = weights(lane)
        try:
            lane.backward(loss(lane, i) * (bad if i in (0, 3) else 1.0))
            apply(clip, lane)
            lane.optimizer.step()
        except RuntimeError as error:
            lane.zero_grad()
            return f"{type(error).__name__} with weights as before: {all(map(torch.equal, before, weights(lane)))}"
        lane.zero_grad()
        return "stepped"

    return step


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@in_exact_ways
def test_error_if_nonfinite_raises_updates_nothing_and_training_goes_on(way: str, bad: float) -> None:
    clip = ClipNorm(0.5, error_if_nonfinite=True)
    lane = compare(way, blocks, stopping(clip, bad), 6, clip=clip)
    assert lane.overlap.step_count == 4


@in_exact_ways
def test_error_if_nonfinite_says_what_was_found(way: str) -> None:
    def step(lane: Contender, i: int) -> None:
        if lane.overlap is not None:
            with pytest.raises(RuntimeError, match=r"norm of order 2.* is (nan|inf).*Nothing was updated"):
                lane.learn(loss(lane, i) * math.inf)
            lane.zero_grad()

    compare(way, blocks, step, 1, clip=ClipNorm(0.5, error_if_nonfinite=True))


# Two passes.

TWO_PASS = ClipNorm(0.5, mode="two_pass")


def micro_batches(count: int, how: str) -> Step:
    def step(lane: Contender, i: int) -> torch.Tensor | None:
        for micro in range(count):
            if lane.overlap is not None and how == "accumulate" and micro < count - 1:
                with lane.overlap.accumulate():
                    lane.backward(loss(lane, count * i + micro) / count)
            else:
                lane.backward(loss(lane, count * i + micro) / count)
        norm = apply(TWO_PASS, lane)
        lane.optimizer.step()
        lane.zero_grad()
        return norm if lane.overlap is None else lane.overlap.grad_norm

    return step


def test_two_pass_with_accumulate() -> None:
    compare("two_pass", blocks, micro_batches(3, "accumulate"), clip=TWO_PASS)


def test_two_pass_with_accumulation_steps() -> None:
    compare("two_pass", blocks, micro_batches(3, "count"), clip=TWO_PASS, accumulation_steps=3)


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def set_another(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clamp(-0.01, 0.01)


def add_noise(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01 + 0.01 * random.random())


def clear_vectors(parameter: torch.Tensor) -> None:
    if parameter.ndim == 1:
        parameter.grad = None


HOOKS = (halve, set_another, add_noise, clear_vectors)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("count", [1, 3])
def test_two_pass_with_hooks_that_change_gradients(hook: Callable[[torch.Tensor], None], count: int) -> None:
    """They run in both passes, on what earlier micro-batches left and this one adds, and draw the same."""

    def build() -> Any:
        random.seed(1)
        model, optimizer = blocks()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        return model, optimizer

    def step(lane: Contender, i: int) -> Any:
        random.seed(i)
        return micro_batches(count, "count")(lane, i), torch.rand(1), random.random()

    compare("two_pass", build, step, clip=TWO_PASS, accumulation_steps=count)


@pytest.mark.parametrize("hook", HOOKS[:3])
def test_two_pass_with_a_hook_that_comes_after_instep(hook: Callable[[torch.Tensor], None]) -> None:
    """The first pass has measured the gradient already; nothing was written, and the step can be run without."""
    model, optimizer = blocks()
    with instep.attach(model, optimizer, clip=TWO_PASS, schedule="backward") as overlap:
        handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
        x, y = batch(0)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(SpentGradientError, match="first of two passes has measured"):
            overlap.backward(loss_of(model(x), y))
        for handle in handles:
            handle.remove()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        optimizer.zero_grad()
        overlap.backward(loss_of(model(x), y))
        optimizer.step()


@pytest.mark.parametrize("again", [False, True], ids=["detached", "attached again"])
@pytest.mark.parametrize("clip", [TWO_PASS, ClipValue(0.001)], ids=["norm", "value"])
def test_detach_in_a_step_that_was_applied_in_part(clip: ClipNorm | ClipValue, again: bool) -> None:
    """What is left of it is clipped as the rest was."""
    models = [Sometimes(), Sometimes()]
    models[1].load_state_dict(models[0].state_dict())
    plain, attached = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models)
    overlap = instep.attach(
        models[1], attached, clip=clip, accumulation_steps=2, bucket_bytes=SMALL, schedule="backward"
    )
    for micro, expert in enumerate((0, 1)):
        x, y = batch(micro)
        loss_of(models[0](x, expert), y).backward()
        overlap.backward(loss_of(models[1](x, expert), y))
    apply(clip, Contender(models[0], plain, {}))
    assert not isinstance(models[1].experts[0].weight.grad, SpentGradient)
    assert isinstance(models[1].trunk.weight.grad, SpentGradient)
    overlap.detach()
    if again:
        overlap = instep.attach(models[1], attached, clip=clip, schedule="backward")
    plain.step()
    attached.step()
    overlap.detach()
    assert first_difference(training_state(models[0], plain), training_state(models[1], attached)) is None


def checkpointed(lane: Contender, i: int) -> torch.Tensor:
    x, y = batch(i)
    x = lane.model.inner(x)
    for block in lane.model.blocks:
        x = x + checkpoint(block, x, use_reentrant=False)
    return loss_of(lane.model.outer(x), y)


class Dropping(Blocks):
    def __init__(self) -> None:
        super().__init__(depth=2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.inner(x))
        for block in self.blocks:
            x = x + self.drop(block(x))
        return self.outer(x)


def dropping() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Dropping()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def checkpointed_dropout(lane: Contender, i: int) -> torch.Tensor:
    x, y = batch(i)
    x = lane.model.inner(x)
    for block in lane.model.blocks:
        x = x + checkpoint(nn.Sequential(block, lane.model.drop), x, use_reentrant=False)
    return loss_of(lane.model.outer(x), y)


def test_two_pass_with_checkpointed_dropout() -> None:
    compare("two_pass", dropping, clipping(TWO_PASS, checkpointed_dropout), clip=TWO_PASS)


class WritesBuffers(nn.Module):
    """In a segment that each backward computes once more."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(size))

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.get_buffer("seen").add_(1)
        return torch.tanh(self.norm(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: Any = checkpoint(self.segment, x, use_reentrant=False)
        logits: torch.Tensor = self.last(hidden)
        return logits


def test_two_pass_with_a_checkpointed_segment_that_writes_buffers() -> None:
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = WritesBuffers()
        loops.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    with instep.attach(*loops[1], schedule="backward", clip=ClipNorm(0.1, mode="two_pass")) as overlap:
        for i in range(4):
            for model, optimizer in loops:
                torch.manual_seed(i)
                loss = model(torch.randn(5, 4)).square().sum()
                if model is loops[0][0]:
                    loss.backward()
                    clip_grad_norm_(model.parameters(), 0.1)
                else:
                    overlap.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            plain, other = (training_state(*loop) for loop in loops)
            assert first_difference(plain, other) is None


def test_two_pass_with_a_large_buffer_that_is_written() -> None:
    model = WritesBuffers(2 * 1024 * 1024)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with instep.attach(model, optimizer, schedule="backward", clip=ClipNorm(0.1, mode="two_pass")) as overlap:
        with pytest.raises(InstepError, match="has written a buffer of shape"):
            overlap.backward(model(torch.ones(5, 4)).square().sum())
        assert overlap.state == "idle"
    assert all(map(torch.equal, before, model.parameters()))


class Reentrant(nn.Module):
    """A reentrant checkpoint. Behind a layer torch refuses it, since its segment is computed; else nothing asks for the
    segment's gradients, all of which are a part of others where it is tied."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.before: nn.Module = nn.Linear(4, 4) if where == "behind a layer" else nn.Identity()
        self.after = nn.Linear(4, 4)
        self.segment = self.after if where == "tied" else nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.after(checkpoint(self.segment, self.before(x), use_reentrant=True))
        return found


@pytest.mark.parametrize("where", ["in front", "behind a layer", "tied"])
def test_two_pass_refuses_reentrant_checkpoints_before_any_write(where: str) -> None:
    """Its gradients would be missing in the norm."""
    model = Reentrant(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with instep.attach(model, optimizer, schedule="backward", clip=TWO_PASS) as overlap:
        for _ in range(2):
            with pytest.raises(InstepError, match="use_reentrant=False"):
                overlap.backward(model(torch.ones(2, 4, requires_grad=True)).sum())
            assert overlap.state == "idle"
            assert all(map(torch.equal, before, model.parameters()))


class InTheSecondPass(torch.autograd.Function):
    """Of two backwards of one graph the first gives no gradient."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor | None:
        InTheSecondPass.calls += 1
        return None if InTheSecondPass.calls % 2 else gradients[0]


@pytest.mark.parametrize("bucket_bytes", [1, 10_000], ids=["a full bucket", "left to step()"])
def test_two_pass_where_a_gradient_comes_in_the_second_alone(bucket_bytes: int) -> None:
    InTheSecondPass.calls = 0
    model = nn.ParameterList([torch.ones(3), torch.ones(3), torch.ones(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward", clip=TWO_PASS, bucket_bytes=bucket_bytes) as overlap:
        first, hidden, unused = model
        loss = (first * InTheSecondPass.apply(hidden)).sum() + 0 * unused.detach().sum()
        with pytest.raises(InstepError, match=r"'1' a gradient, and the first gave it none"):
            overlap.backward(loss)
        assert torch.equal(hidden, torch.ones(3))
        overlap.accept_torn()


class OtherTheSecondTime(torch.autograd.Function):
    """Its second backward gives twice the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.calls = 0
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        ctx.calls += 1
        return ctx.calls * gradients[0]


@on_cpu_only  # elsewhere a later step says so: tests/accelerator/test_one_device.py
@pytest.mark.parametrize("bucket_bytes", [1, 10_000], ids=["full buckets", "left to step()"])
def test_two_pass_where_the_second_gives_another_gradient(bucket_bytes: int) -> None:
    model = nn.ParameterList([torch.ones(3), torch.ones(3), torch.ones(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward", clip=TWO_PASS, bucket_bytes=bucket_bytes) as overlap:
        first, other, unused = model
        with pytest.raises(InstepError, match=r"second backward .* gave '1' another gradient than the first"):
            overlap.backward((first * OtherTheSecondTime.apply(other)).sum() + 0 * unused.detach().sum())
        assert torch.equal(other, torch.ones(3))
        overlap.accept_torn()


@pytest.fixture
def _compiled_for_two_backwards() -> Iterator[None]:
    torch._dynamo.reset()
    with functorch_config.patch(donated_buffer=False):
        yield
    torch._dynamo.reset()


def compiling(backward: Callable[[Any, Any], Callable[..., Any]]) -> Any:
    """A backend of torch.compile that runs forward graphs as they are, backward's by ``backward``."""
    return aot_autograd(fw_compiler=as_it_is, bw_compiler=backward)


def as_it_is(graph: Any, inputs: Any) -> Callable[..., Any]:
    return boxed(graph.forward)


def boxed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Called with a list of arguments."""

    def call(arguments: list[Any]) -> Any:
        return run(*arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def writes_over_what_it_saved(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A compiled backward that runs right once, as inductor's does that donates its buffers."""
    calls = 0

    def run(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return [g if g is None or calls % 2 else 2 * g for g in graph.forward(*arguments)]

    return boxed(run)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # in torch's own compiler
@pytest.mark.parametrize("again", [False, True], ids=["the first code", "code that comes later"])
@pytest.mark.usefixtures("_compiled_for_two_backwards")
def test_two_pass_over_compiled_code_that_runs_once(again: bool) -> None:
    """Found before anything is written."""
    backend = compiling(writes_over_what_it_saved)
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with instep.attach(model, optimizer, schedule="backward", clip=TWO_PASS, bucket_bytes=1) as overlap:
        if again:
            overlap.backward(torch.compile(model, backend="aot_eager")(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
        before = copy.deepcopy(dict(training_state(model, optimizer)))
        loss = torch.compile(model, backend=backend)(torch.ones(2, 4)).sum()
        with pytest.raises(InstepError, match=r"another gradient than the first.*TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"):
            overlap.backward(loss)
        assert first_difference(iter(before.items()), training_state(model, optimizer)) is None
        assert overlap.state == "idle"
        overlap.backward(model(torch.ones(2, 4)).sum())  # the loop goes on
        optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_two_pass_over_code_that_torch_runs_once() -> None:
    """Its first backward, before ``attach``, was one that kept no graph."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torch.compile(model, backend=compiling(as_it_is))
    run(torch.ones(2, 4)).sum().backward()
    optimizer.zero_grad()
    with instep.attach(model, optimizer, schedule="backward", clip=TWO_PASS) as overlap:
        loss = run(torch.ones(2, 4)).sum()
        with pytest.raises(InstepError, match=r"Nothing was updated.*donated_buffer = False.*DISABLE_CACHES=1"):
            overlap.backward(loss)
        assert overlap.state == "idle"
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.usefixtures("_compiled_for_two_backwards")
def test_two_pass_proves_compiled_code_once() -> None:
    """Three backwards in its first step, two in each other; equal to the compiled plain loop that clips."""
    calls = 0

    def counted(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return graph.forward(*arguments)

        return boxed(run)

    backend = compiling(counted)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    run = [torch.compile(model, backend=backend) for model in models]
    with instep.attach(models[1], optimizers[1], schedule="backward", clip=TWO_PASS, bucket_bytes=1) as overlap:
        for expected in (3, 2, 2):
            run[0](torch.ones(2, 4)).sum().backward()
            clip_grad_norm_(models[0].parameters(), 0.5)
            calls = 0
            overlap.backward(run[1](torch.ones(2, 4)).sum())
            assert calls == expected
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_two_pass_with_a_gradient_for_an_output_that_is_no_scalar() -> None:
    def step(lane: Contender, i: int) -> torch.Tensor | None:
        output, gradient = lane.model(batch(i)[0]), torch.randn(8, 10)
        if lane.overlap is None:
            output.backward(gradient)
        else:
            lane.overlap.backward(output, gradient)
        norm = apply(TWO_PASS, lane)
        lane.optimizer.step()
        lane.zero_grad()
        return norm if lane.overlap is None else lane.overlap.grad_norm

    compare("two_pass", blocks, step, clip=TWO_PASS)


def test_two_pass_does_not_touch_gradients_of_what_is_not_attached() -> None:
    """The first pass is for the attached parameters alone: an input's gradient is added once."""

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        x, y = batch(i)
        x.requires_grad_()
        lane.backward(loss_of(lane.model(x), y))
        apply(TWO_PASS, lane)
        lane.optimizer.step()
        lane.zero_grad()
        return x.grad

    compare("two_pass", blocks, step, clip=TWO_PASS)


@pytest.mark.parametrize("fused", [True, False])
def test_two_pass_refuses_a_plain_backward_before_any_write(fused: bool) -> None:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    with instep.attach(model, optimizer, bucket_bytes=SMALL, clip=TWO_PASS, schedule="backward") as overlap:
        for i in range(3):
            x, y = batch(i)
            before = list(copy.deepcopy(dict(training_state(model, optimizer))).items())
            with pytest.raises(InstepError, match=r"overlap\.backward\(loss\)"):
                loss_of(model(x), y).backward()
            assert first_difference(iter(before), training_state(model, optimizer)) is None
            optimizer.zero_grad()
            overlap.backward(loss_of(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert overlap.step_count == 3


def test_two_pass_never_has_all_gradients_alive() -> None:
    torch.manual_seed(0)
    model = Blocks(depth=6)
    alive: list[int] = []

    def count(_: torch.Tensor) -> None:
        gradients = [p.grad for p in model.parameters()]
        alive.append(sum(g.nbytes for g in gradients if type(g) is torch.Tensor))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with instep.attach(model, optimizer, bucket_bytes=SMALL, clip=TWO_PASS, schedule="backward") as overlap:
        for i in range(3):
            x, y = batch(i)
            overlap.backward(loss_of(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert max(alive) <= max(bucket.nbytes for bucket in overlap.plan.buckets) < overlap.plan.nbytes / 4
    assert len(alive) == 3 * 2 * len(list(model.parameters()))


class Added(nn.Module):
    """Its last layer is in no optimizer before somebody adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.outer = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def added() -> tuple[Any, torch.optim.Optimizer]:
    model = Added()
    return model, torch.optim.AdamW(model.inner.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m.forward(x)], ids=["whole", "forward"])
@in_exact_ways
def test_clip_norm_where_layers_are_frozen_before_and_after_the_forward(way: str, call: Any) -> None:
    """A layer that is thawed has no hook in a step whose forward nobody has seen; one that is frozen after the forward
    has one, and gets no gradient."""
    clip = ClipNorm(0.1)

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        x, y = batch(i)
        lane.model.blocks[0].requires_grad_(i % 2 == 1)
        lane.model.blocks[1].requires_grad_(True)
        value = loss_of(call(lane.model, x), y)
        lane.model.blocks[1].requires_grad_(i % 3 != 1)
        lane.backward(value)
        return clip_and_step(clip, lane)

    compare(way, blocks, step, 6, clip=clip)


def test_two_pass_where_nothing_attached_gets_a_gradient() -> None:
    model, optimizer = added()
    with instep.attach(model, optimizer, clip=TWO_PASS, schedule="backward") as overlap:
        for part, frozen in ((model.outer, False), (model, True)):
            model.inner.requires_grad_(not frozen)
            overlap.backward(part(torch.ones(2, 16)).sum())
            assert model.outer.weight.grad is not None
            optimizer.step()
            assert overlap.grad_norm is not None
            assert overlap.grad_norm.item() == 0
        model.outer.requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require grad"):
            overlap.backward(model(torch.ones(2, 16)).sum())


def given(model: Any, optimizer: Any) -> None:
    model.experts[1].weight.grad = torch.full((16, 16), 0.1)


def written(model: Any, optimizer: Any) -> None:
    model.out.weight.grad.mul_(3.0)


def taken_away(model: Any, optimizer: Any) -> None:
    model.out.weight.grad = None


def added_to_the_optimizer(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": list(model.out.parameters())})


@pytest.mark.parametrize("change", [given, written, taken_away, added_to_the_optimizer])
def test_two_pass_where_gradients_change_before_the_step(change: Callable[[Any, Any], None]) -> None:
    """Where nothing was applied, in one bucket that is never full, ``step()`` takes the norm anew. Else others have
    been clipped without the change."""
    adds = change is added_to_the_optimizer

    def build() -> Any:
        model = Sometimes()
        model.out.register_parameter("unused", nn.Parameter(torch.ones(3)))
        mine = [p for name, p in model.named_parameters() if not (adds and name.startswith("out."))]
        return model, torch.optim.AdamW(mine, lr=1e-2)

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        x, y = batch(i)
        lane.backward(loss_of(lane.model(x, 0), y))
        if i == 0 or not adds:
            change(lane.model, lane.optimizer)
        norm = apply(TWO_PASS, lane)
        lane.optimizer.step()
        lane.zero_grad()
        return norm if lane.overlap is None else lane.overlap.grad_norm

    compare("two_pass", build, step, clip=TWO_PASS, bucket_bytes=25_000_000)

    torch.manual_seed(0)
    model, optimizer = build()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, clip=TWO_PASS, schedule="backward") as overlap:
        x, y = batch(0)
        overlap.backward(loss_of(model(x, 0), y))
        change(model, optimizer)
        with pytest.raises(SpentGradientError, match=r"between overlap\.backward\(\) and optimizer\.step\(\)"):
            optimizer.step()
        after = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(TornStepError):
            optimizer.step()
        assert all(map(torch.equal, after, model.parameters()))


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_overlap_backward_is_the_plain_backward_in_all_other_modes(way: str) -> None:
    passes = 0

    def count(_: torch.Tensor) -> None:
        nonlocal passes
        passes += 1

    clip = ClipNorm(math.inf if way == "backward" else 0.5)
    model, optimizer = blocks()
    with instep.attach(model, optimizer, clip=clip, **WAYS[way]) as overlap:
        model.inner.weight.register_hook(count)
        overlap.backward(loss_of(model(batch(0)[0]), batch(0)[1]))
        optimizer.step()
    assert passes == 1


# ``attach(clip=ClipValue(…))``.


@pytest.mark.parametrize("limit", [1e-3, 0.05, 1e6])
@pytest.mark.parametrize("build", [blocks, two_optimizers, mixed_dtypes])
@pytest.mark.parametrize("way", ["backward", "forward", "late", *UNDO])
def test_clip_value_is_clip_grad_value_in_every_schedule(way: str, build: Any, limit: float) -> None:
    clip = ClipValue(limit)
    lane = compare(way, build, clipping(clip), clip=clip)
    assert lane.overlap.redo_count == 0


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_clip_value_in_a_step_without_gradients(way: str) -> None:
    """Plain ``clip_grad_value_`` raises where there are none; there is nothing to clip."""
    clip = ClipValue(0.01)

    def step(lane: Contender, i: int) -> None:
        if i != 1:
            lane.backward(loss(lane, i))
            apply(clip, lane)
        lane.optimizer.step()
        lane.zero_grad()

    compare(way, blocks, step, clip=clip)


# The norm alone.


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("build", [blocks, two_optimizers, mixed_dtypes])
@pytest.mark.parametrize("way", ["backward", "forward", "late", *UNDO])
def test_an_infinite_limit_takes_the_norm_and_scales_nothing(way: str, build: Any, norm_type: float) -> None:
    """Also where backward writes weights before the norm is known."""
    clip = ClipNorm(math.inf, norm_type)
    lane = compare(way, build, clipping(clip), clip=clip)
    assert lane.overlap.redo_count == 0
    assert lane.overlap.grad_norm is not None


@pytest.mark.parametrize("way", ["forward", "backward", "undo"])
def test_a_norm_that_is_not_finite_makes_all_gradients_nan_where_it_is_known_in_time(way: str) -> None:
    """As ``clip_grad_norm_`` does, whose factor is NaN then. Backward has applied the others by then."""
    model, optimizer = blocks()
    with instep.attach(model, optimizer, clip=ClipNorm(math.inf), bucket_bytes=SMALL, **WAYS[way]) as overlap:
        handle = next(iter(model.parameters())).register_hook(lambda gradient: gradient * math.inf)
        loss_of(model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
        overlap.synchronize()
        handle.remove()
        assert overlap.grad_norm is not None
        assert not overlap.grad_norm.isfinite()
        assert all(p.isnan().all() for p in model.parameters()) is (way != "backward")
        assert all(p.isfinite().all() for p in [*model.parameters()][-2:]) is (way == "backward")


# The loop clips by itself.


def clip_norm_by_hand(model: Any) -> torch.Tensor:
    return clip_grad_norm_(model.parameters(), 4.0)


def clip_value_by_hand(model: Any) -> None:
    clip_grad_value_(model.parameters(), 0.05)


def unmodified(clip: Callable[[Any], Any]) -> Step:
    def step(lane: Contender, i: int) -> Any:
        loss(lane, i).backward()
        result = clip(lane.model)
        for optimizer in lane.optimizers:
            optimizer.step()
        lane.zero_grad()
        return result

    return step


@pytest.mark.parametrize("build", [blocks, two_optimizers, mixed_dtypes])
@pytest.mark.parametrize("clip", [clip_norm_by_hand, clip_value_by_hand])
@in_ways_that_keep_gradients
def test_a_loop_that_clips_by_itself(way: str, clip: Callable[[Any], Any], build: Any) -> None:
    compare(way, build, unmodified(clip))


@pytest.mark.parametrize("clip", [clip_norm_by_hand, clip_value_by_hand])
@pytest.mark.parametrize("way", ["forward", "late", "undo"])
def test_a_loop_that_clips_by_itself_after_attach_has(way: str, clip: Callable[[Any], Any]) -> None:
    """Clipped twice: by the loop first, then by ``clip=``."""

    def step(lane: Contender, i: int) -> Any:
        lane.backward(loss(lane, i))
        result = clip(lane.model)
        norm = apply(both, lane)
        lane.optimizer.step()
        lane.zero_grad()
        return result, norm if lane.overlap is None else lane.overlap.grad_norm

    both = ClipNorm(1.0)
    compare(way, blocks, step, clip=both)


@pytest.mark.parametrize("clip", [clip_norm_by_hand, clip_value_by_hand])
def test_a_loop_that_clips_by_itself_meets_spent_gradients_in_backward(clip: Callable[[Any], Any]) -> None:
    model, optimizer = blocks()
    with instep.attach(model, optimizer, bucket_bytes=SMALL, schedule="backward"):
        loss_of(model(batch(0)[0]), batch(0)[1]).backward()
        with pytest.raises(SpentGradientError, match=r"attach with clip="):
            clip(model)


# Gradients that change after they were measured.


def multiplied(weight: Any) -> None:
    weight.grad.mul_(3.0)


def multiplied_through_data(weight: Any) -> None:
    weight.grad.data.mul_(3.0)


def replaced(weight: Any) -> None:
    weight.grad = torch.full_like(weight, 0.2)


def replaced_by_its_own(weight: Any) -> None:
    weight.grad = weight.grad


def cleared(weight: Any) -> None:
    weight.grad = None


def with_values_replaced(weight: Any) -> None:
    weight.grad.data = torch.full_like(weight, 0.2)


CHANGES = [multiplied, multiplied_through_data, replaced, replaced_by_its_own, cleared, with_values_replaced]


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("change", CHANGES)
@in_ways_that_keep_gradients
def test_a_gradient_changed_after_it_was_measured(way: str, change: Callable[[Any], None], max_norm: float) -> None:
    clip = ClipNorm(max_norm)

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        lane.backward(loss(lane, i))
        change(lane.model.blocks[i % 2][1].weight)
        return clip_and_step(clip, lane)

    compare(way, blocks, step, clip=clip)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@in_ways_that_keep_gradients
def test_a_gradient_changed_through_another_reference_to_it(way: str, max_norm: float) -> None:
    """Taken in a hook, before it was measured: ``.grad`` itself is not asked for again."""
    clip = ClipNorm(max_norm)
    taken: list[torch.Tensor] = []

    def build() -> Any:
        model, optimizer = blocks()
        model.outer.weight.register_post_accumulate_grad_hook(lambda p: taken.append(p.grad))
        return model, optimizer

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        taken.clear()
        lane.backward(loss(lane, i))
        taken.pop().mul_(3.0)
        return clip_and_step(clip, lane)

    compare(way, build, step, clip=clip)


def fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("clear", [True, False], ids=["cleared", "not cleared"])
@pytest.mark.parametrize(
    ("way", "position"), [(way, position) for way in ("forward", "undo", "two_pass") for position in range(16)]
)
def test_clip_norm_after_a_backward_that_raised(way: str, position: int, clear: bool) -> None:
    """A hook raises in the place of each parameter's gradient, so after any number of gradients was measured."""
    clip = ClipNorm(0.5)

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        if i == 2:
            hook = list(lane.model.parameters())[position].register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                lane.backward(loss(lane, 50))
            hook.remove()
            if clear:
                lane.zero_grad()
        return clipping(clip)(lane, i)

    if way == "two_pass" and not clear:
        pytest.skip("the pass that measures leaves no gradients")
    compare(way, blocks, step, 4, clip=clip)


# More than one optimizer, more than one gradient, none at all.


@pytest.mark.parametrize("clip", [ClipNorm(0.1), ClipNorm(1e6), ClipValue(0.01)], ids=str)
@in_ways_that_keep_gradients
def test_gradients_after_the_step_are_the_clipped_ones(way: str, clip: Any) -> None:
    def step(lane: Contender, i: int) -> None:
        lane.zero_grad()
        lane.backward(loss(lane, i))
        apply(clip, lane)
        lane.optimizer.step()

    compare(way, blocks, step, clip=clip)


@pytest.mark.parametrize("max_norm", [0.1, 4.0, 1e6])
@in_ways_that_keep_gradients
def test_a_gradient_changed_between_the_steps_of_two_optimizers(way: str, max_norm: float) -> None:
    clip = ClipNorm(max_norm)

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        lane.backward(loss(lane, i))
        norm = apply(clip, lane)
        lane.optimizers[i % 2].step()
        for group in lane.optimizers[1 - i % 2].param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2.0)
        lane.optimizers[1 - i % 2].step()
        lane.zero_grad()
        return norm if lane.overlap is None else lane.overlap.grad_norm

    compare(way, two_optimizers, step, clip=clip)


@in_exact_ways
def test_clip_norm_in_a_closure(way: str) -> None:
    clip = ClipNorm(0.5)

    def step(lane: Contender, i: int) -> Any:
        def closure() -> torch.Tensor:
            lane.zero_grad()
            found = loss(lane, i)
            lane.backward(found)
            apply(clip, lane)
            return found.detach()

        found = lane.optimizer.step(closure)
        lane.zero_grad()
        return found

    compare(way, blocks, step, clip=clip)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@in_ways_that_keep_gradients
def test_clip_norm_of_gradients_that_autograd_grad_returned(way: str, max_norm: float) -> None:
    clip = ClipNorm(max_norm)

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        parameters = list(lane.model.parameters())
        gradients = torch.autograd.grad(loss(lane, i), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return clip_and_step(clip, lane)

    compare(way, blocks, step, clip=clip)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@in_ways_that_keep_gradients
def test_clip_norm_of_gradients_made_without_autograd(way: str, max_norm: float) -> None:
    clip = ClipNorm(max_norm)

    def step(lane: Contender, i: int) -> torch.Tensor | None:
        for parameter in lane.model.parameters():
            parameter.grad = torch.randn_like(parameter) * (i + 1)
        return clip_and_step(clip, lane)

    compare(way, blocks, step, clip=clip)


# What is refused.


def parameters_of(model: nn.Module) -> Iterator[Any]:
    for parameter in model.parameters():
        yield parameter._backward_hooks, parameter._post_accumulate_grad_hooks, type(parameter)


CHOICES = r"schedule='forward'.*undo=True.*two_pass.*overlap\.backward\(loss\)"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "text as clip": (
        {"clip": "1"},
        r"clip must be a number, an instep\.ClipNorm, an instep\.ClipValue or None, not '1'",
    ),
    "true as clip": ({"clip": True}, "clip=True: ClipNorm: max_norm must be a number that is not negative, not True"),
    "a number below 0 as clip": ({"clip": -1.0}, r"clip=-1\.0: ClipNorm: max_norm must be .*, not -1\.0"),
    "no accumulation steps": ({"accumulation_steps": 0}, "accumulation_steps must be .* at least 1, not 0"),
    "accumulation steps that are true": ({"accumulation_steps": True}, "accumulation_steps must be .*, not True"),
    "accumulation steps in parts": ({"accumulation_steps": 1.5}, r"accumulation_steps must be .*, not 1\.5"),
    "a number as scaler": (
        {"scaler": 65536.0, "undo": True},
        r"scaler must be a torch\.amp\.GradScaler or None, not 65536",
    ),
    "undo somewhere": ({"undo": "disk"}, "undo must be True, False or 'host', not 'disk'"),
    "undo and forward": (
        {"undo": True, "schedule": "forward", "defer": True},
        r"undo=True does not go with schedule='forward': nothing .*Leave it out",
    ),
    "undo on the host and forward": (
        {"undo": "host", "schedule": "forward", "defer": True},
        "undo='host' does not go with schedule='forward'",
    ),
    "two passes and forward": (
        {"clip": ClipNorm(1.0, mode="two_pass"), "schedule": "forward", "defer": True},
        r"ClipNorm\(mode='two_pass'\) does not go with schedule='forward'.*mode='exact'",
    ),
    "exact and backward": ({"clip": ClipNorm(1.0)}, CHOICES),
    "the norm alone, but for an error": ({"clip": ClipNorm(math.inf, error_if_nonfinite=True)}, CHOICES),
    "two passes and undo": (
        {"clip": ClipNorm(1.0, mode="two_pass"), "undo": True},
        r"ClipNorm\(mode='two_pass'\) does not go with undo=True.*mode='exact'.*leave out undo",
    ),
    "a scaler and backward": (
        {"scaler": GradScaler("cpu")},
        r"scaler does not go with .*schedule='forward'.*undo=True",
    ),
    "an unknown schedule": (
        {"schedule": "sideways"},
        "schedule must be 'backward' or 'forward', not 'sideways'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused_with_the_choices(case: str) -> None:
    options, message = REFUSED[case]
    model, optimizer = blocks()
    before = list(parameters_of(model))
    with pytest.raises(AttachError, match=message):
        instep.attach(model, optimizer, **{"schedule": "backward", **options})
    assert list(parameters_of(model)) == before
    assert instep.attached(model) is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClipNorm(-1.0), "ClipNorm: max_norm must be a number that is not negative"),
        (lambda: ClipNorm(math.nan), "ClipNorm: max_norm"),
        (lambda: ClipNorm(True), "ClipNorm: max_norm"),
        (lambda: ClipNorm("1"), "ClipNorm: max_norm"),  # type: ignore[arg-type]
        (lambda: ClipNorm(1.0, norm_type=-2.0), "ClipNorm: norm_type"),
        (lambda: ClipNorm(1.0, mode="sometimes"), "exact, two_pass"),  # type: ignore[arg-type]
        (lambda: ClipValue(-0.1), "ClipValue: clip_value"),
        (lambda: ClipValue(math.nan), "ClipValue: clip_value"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(AttachError, match=message):
        make()


class OwnParameter(nn.Parameter):
    """Of a class of its own: an update of it is not put off."""


def test_forward_clips_what_it_does_not_put_off() -> None:
    def trained(attached: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        first = nn.Linear(4, 4)
        first.weight = OwnParameter(first.weight.detach())
        model = nn.Sequential(first, nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        overlap = (
            instep.attach(model, optimizer, schedule="forward", defer=True, clip=ClipNorm(1e-2)) if attached else None
        )
        for i in range(3):
            model(torch.full((2, 4), 1.0 + i)).square().mean().backward()
            if not attached:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
        if overlap is not None:
            overlap.detach()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, trained(False), trained(True)))
