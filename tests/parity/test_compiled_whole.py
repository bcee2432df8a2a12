"""A model that torch.compile has compiled as a whole: gradients are handed over while backward runs, and the weights
are those of the compiled plain loop."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import utils as inductor_utils
from torch.utils.checkpoint import checkpoint

import instep
from instep._optim.stepper import PreparedUpdate
from instep._torch.handing_over import TELLS_OF_BACKWARD, HandedOver
from instep._torch.placeholders import SpentGradient
from instep.errors import AccumulationError, InstepError, TornStepError
from tests.devices import on_cpu_only

pytestmark = [
    on_cpu_only,  # inductor knows no emulated device
    pytest.mark.usefixtures("_fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # in torch's own compiler
    pytest.mark.filterwarnings("ignore:Guards may run slower"),  # on Python 3.13.0
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:Skipping serialization"),  # torch 2.6, of its own settings
    pytest.mark.filterwarnings(
        "ignore:Trying to prepend a node to itself"
    ),  # torch 2.6, of a backward that is compiled
]
WIDTH, DEPTH, STEPS = 64, 4, 4
TAKEN = DEPTH if TELLS_OF_BACKWARD else 0


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    HandedOver.has_code = False  # there is none any more


class Net(nn.Module):
    """Matrices of 16 KiB, each with a bias that is too small to be handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Twice(Net):
    """One matrix is used twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.layers[1].requires_grad_(False)


class Recomputed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


class Broken(Net):
    """In two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, *others = self.layers
        x = torch.tanh(second(torch.tanh(first(x))))
        torch._dynamo.graph_break()
        for layer in others:
            x = torch.tanh(layer(x))
        return x


class ReadAgain(Net):
    """Weights that backward needs for more than the gradient of what they are multiplied with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            weight: Any = layer.weight
            scale = weight.square().sum(1).rsqrt()  # pointwise, of the weight
            x = torch.tanh(nn.functional.linear(x, weight)) * scale + torch.sin(weight).sum(0)
        return x


class Dropped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        return x


class Halved(nn.Module):
    """In bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        widths = (WIDTH, 2 * WIDTH, 2 * WIDTH, 2 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.bfloat16)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@dataclass
class Lane:
    """A loop, plain or attached.

    Attributes:
        model: what the loop calls.
        bare: the module that was compiled.
        extra: for the loop to keep.
    """

    model: Any
    bare: Any
    optimizer: Any
    overlap: instep.Attachment | None
    extra: dict[str, Any] = field(default_factory=dict)
    seen: int | None = None  # the backward that ``taken`` has told of

    @property
    def taken(self) -> int:
        """How many gradients the last backward has handed over."""
        assert self.overlap is not None
        (source,) = self.overlap._parts.sources
        handed: Any = source.compiled.handed_over  # type: ignore[attr-defined]  # of a LocalSource
        last, self.seen = self.seen, None if handed is None else handed.task
        return 0 if handed is None or handed.task == last else len(handed.taken)


def x_of(i: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(i))


def usual(lane: Lane, i: int) -> None:
    lane.model(x_of(i)).square().mean().backward()


def head_outside(lane: Lane, i: int) -> None:
    """A matrix of the compiled code, used once more outside of it."""
    (lane.model(x_of(i)) @ lane.bare.layers[1].weight.T).square().mean().backward()


def decayed_in_the_loss(lane: Lane, i: int) -> None:
    decay = sum(p.square().sum() for p in lane.bare.parameters())
    (lane.model(x_of(i)).square().mean() + 1e-3 * decay).backward()


def two_losses(lane: Lane, i: int) -> None:
    (lane.model(x_of(i)).square().mean() + lane.model(x_of(i + 100)).abs().mean()).backward()


def two_losses_in_some_steps(lane: Lane, i: int) -> None:
    loss = lane.model(x_of(i)).square().mean()
    if i % 2:
        loss = loss + lane.bare.layers[2](x_of(i)).abs().mean()
    loss.backward()


def rows_that_change(lane: Lane, i: int) -> None:
    lane.model(x_of(i, 4 + 2 * i)).square().mean().backward()


def looks_without_gradients(lane: Lane, i: int) -> None:
    with torch.no_grad():
        lane.model(x_of(i + 50))
    loss = lane.model(x_of(i)).square().mean()
    lane.model.eval()
    with torch.no_grad():
        lane.model(x_of(i + 60))
    lane.model.train()
    loss.backward()


def gradient_there(lane: Lane, i: int) -> None:
    if i != 1:
        lane.bare.layers[1].weight.grad = torch.full((WIDTH, WIDTH), 0.01)
    usual(lane, i)


def frozen_in_some_steps(lane: Lane, i: int) -> None:
    lane.bare.layers[0].requires_grad_(i % 3 != 1)
    usual(lane, i)


def frozen_after_the_forward(lane: Lane, i: int) -> None:
    loss = lane.model(x_of(i)).square().mean()
    lane.bare.layers[1].requires_grad_(i != 1)
    loss.backward()
    lane.bare.layers[1].requires_grad_(True)


def tensor_hook(lane: Lane, i: int) -> None:
    if i == 1:
        lane.bare.layers[1].weight.register_hook(lambda gradient: 3 * gradient)
    usual(lane, i)


def post_accumulate_hook(lane: Lane, i: int) -> None:
    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 0.5

    if lane.overlap is None and i == 0:  # where it is attached the hook comes before instep's own: in front of attach
        lane.bare.layers[1].weight.register_post_accumulate_grad_hook(halve)
    usual(lane, i)


def hook_of_the_leaf(lane: Lane, i: int) -> None:
    loss = lane.model(x_of(i)).square().mean()
    if i:
        node = torch.autograd.graph.get_gradient_edge(lane.bare.layers[1].weight).node
        node.register_prehook(lambda gradients: (gradients[0] * 2,))
    loss.backward()


def hook_of_the_code(lane: Lane, i: int) -> None:
    """It sees what the compiled code gives to all parameters, and changes it."""
    y = lane.model(x_of(i))
    if i % 2:
        y.grad_fn.register_hook(lambda given, _: tuple(None if g is None else g * 2 for g in given))
    y.square().mean().backward()


def gradients_by_hand(lane: Lane, i: int) -> None:
    parameters = list(lane.bare.parameters())
    if i % 2:
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(lane.model(x_of(i)).square().mean(), parameters), strict=True
        ):
            parameter.grad = gradient
    else:
        usual(lane, i)


def some_inputs(lane: Lane, i: int) -> None:
    lane.model(x_of(i)).square().mean().backward(inputs=[lane.bare.layers[1].weight, lane.bare.layers[2].bias])


def anomaly_looked_for(lane: Lane, i: int) -> None:
    with torch.autograd.set_detect_anomaly(i % 2 == 1):
        usual(lane, i)


def checkpointed_outside(lane: Lane, i: int) -> None:
    torch.manual_seed(7)
    outside = lane.extra.setdefault("outside", nn.Linear(WIDTH, WIDTH))
    y = checkpoint(outside, x_of(i).requires_grad_(), use_reentrant=True)
    lane.model(y).square().mean().backward()


def kept(lane: Lane, i: int) -> None:
    with nullcontext() if lane.overlap is None or i % 2 else lane.overlap.keep_gradients():
        usual(lane, i)


def accumulated(lane: Lane, i: int) -> None:
    with nullcontext() if lane.overlap is None else lane.overlap.accumulate():
        usual(lane, i + 30)
    usual(lane, i)


def accumulated_by_views(lane: Lane, i: int) -> None:
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = lane.model(x).square().mean()
        return loss

    batches = [x_of(i), x_of(i + 40)]
    if lane.overlap is None:
        for x in batches:
            loss_of(x).backward()
    else:
        lane.overlap.micro_batches(loss_of, batches)


def clipped_by_value(lane: Lane, i: int) -> None:
    usual(lane, i)
    if lane.overlap is None:
        nn.utils.clip_grad_value_(lane.bare.parameters(), 1e-4)


def clipped_in_two_passes(lane: Lane, i: int) -> None:
    loss = lane.model(x_of(i)).square().mean()
    if lane.overlap is None:
        loss.backward()
        lane.extra["norm"] = nn.utils.clip_grad_norm_(lane.bare.parameters(), 1e-2)
    else:
        lane.overlap.backward(loss)
        lane.extra["norm"] = lane.overlap.grad_norm


def lost_graphs(lane: Lane, i: int) -> None:
    """A forward that nobody goes back through, and one of a graph that is kept."""
    lane.extra["kept"] = lane.model(x_of(i + 70))
    usual(lane, i)


def on_autocast(lane: Lane, i: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = lane.model(x_of(i)).square().mean()
    loss.backward()


def adamw(model: nn.Module, kernel: str = "fused") -> torch.optim.Optimizer:
    options: dict[str, Any] = {kernel: True}
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True)


def with_masters(model: nn.Module, gradients: Any = None) -> torch.optim.Optimizer:
    return instep.masters(torch.optim.AdamW, gradients=gradients)(model.parameters(), lr=1e-2, fused=True)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[::2], "lr": 1e-3}, {"params": parameters[1::2]}]
    return torch.optim.RMSprop(groups, lr=1e-2)


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Step = Callable[[Lane, int], object]
COMPILED_FIRST, ATTACHED_FIRST, IN_PLACE = "compiled, then attached", "attached, then compiled", "in place"


@dataclass(frozen=True)
class Program:
    """A loop, and what is handed over of it.

    Attributes:
        taken: in each step, the number of gradients.
        said: by ``advice``, of gradients that the last backward has kept until its end; empty: nothing.
    """

    model: type[nn.Module]
    step: Step
    taken: tuple[int, ...]
    said: str = ""
    optimizer: MakeOptimizer = adamw
    how: str = COMPILED_FIRST
    bucket_bytes: int | None = 1
    options: Mapping[str, Any] = field(default_factory=dict)


ALL, NONE = (DEPTH,) * STEPS, (0,) * STEPS
OF_ONE = "(1, as _orig_mod.layers.{}.weight's)"
ELSEWHERE, OTHER_RUN = "something else in the graph leads there", "it is run by autograd.grad, with create_graph"
HOOK = "there is a hook on it"
PROGRAMS = {
    "usual": Program(Net, usual, ALL),
    "attached-first": Program(Net, usual, ALL, how=ATTACHED_FIRST),
    "in-place": Program(Net, usual, ALL, how=IN_PLACE),
    "momentum": Program(Net, usual, ALL, optimizer=sgd),
    "foreach": Program(Net, usual, ALL, optimizer=partial(adamw, kernel="foreach")),
    "groups": Program(Net, usual, ALL, optimizer=two_groups),
    "few-buckets": Program(Net, usual, NONE, "fewer than 4 buckets of 1048576", bucket_bytes=1 << 20),
    "twice": Program(Twice, usual, ALL),
    "unused": Program(Unused, usual, (DEPTH - 1,) * STEPS),
    "recomputed": Program(Recomputed, usual, ALL),
    "broken": Program(Broken, usual, ALL),
    "read-again": Program(ReadAgain, usual, NONE, "it may read each weight until then"),
    "dropout": Program(Dropped, usual, ALL),
    "head-outside": Program(Net, head_outside, (DEPTH - 1,) * STEPS, ELSEWHERE),
    "decay": Program(Net, decayed_in_the_loss, NONE, ELSEWHERE),
    "two-losses": Program(Net, two_losses, NONE, ELSEWHERE),
    "some-steps": Program(Net, two_losses_in_some_steps, (DEPTH, DEPTH - 1, DEPTH, DEPTH - 1), OF_ONE.format(2)),
    "rows": Program(Net, rows_that_change, ALL),
    "looks": Program(Net, looks_without_gradients, ALL),
    "gradient-there": Program(Net, gradient_there, (DEPTH - 1, DEPTH, 0, 0), "a gradient in its .grad"),
    "frozen": Program(Net, frozen_in_some_steps, (DEPTH, DEPTH - 1, DEPTH, DEPTH)),
    "frozen-later": Program(Net, frozen_after_the_forward, (DEPTH, DEPTH - 1, DEPTH, DEPTH)),
    "tensor-hook": Program(Net, tensor_hook, (DEPTH, DEPTH - 1, DEPTH - 1, DEPTH - 1), OF_ONE.format(1)),
    "leaf-hook": Program(Net, hook_of_the_leaf, (DEPTH, DEPTH - 1, DEPTH - 1, DEPTH - 1), HOOK),
    "code-hook": Program(Net, hook_of_the_code, (DEPTH, 0, DEPTH, 0), "the node of the compiled code has a hook"),
    "by-hand": Program(Net, gradients_by_hand, (DEPTH, 0, DEPTH, 0), OTHER_RUN),
    "inputs": Program(Net, some_inputs, (1,) * STEPS),
    "clip-value": Program(Net, clipped_by_value, ALL, options={"clip": instep.ClipValue(1e-4)}),
    "two-passes": Program(
        Net, clipped_in_two_passes, ALL, options={"clip": instep.ClipNorm(1e-2, mode="two_pass"), "nonfinite": "raise"}
    ),
    "masters": Program(Halved, usual, ALL, optimizer=with_masters),
    "anomaly": Program(Net, anomaly_looked_for, (DEPTH, 0, DEPTH, 0), OTHER_RUN),
    "checkpoint-outside": Program(Net, checkpointed_outside, NONE, ELSEWHERE),
    "accumulated": Program(Net, accumulated, NONE, "a gradient in its .grad"),
    "kept": Program(Net, kept, (0, DEPTH, 0, DEPTH)),
    "micro-batches": Program(Net, accumulated_by_views, NONE, "the node of the compiled code has a hook"),
    "lost-graphs": Program(Net, lost_graphs, ALL),
    "autocast": Program(Net, on_autocast, ALL),
}


def lane_of(program: Program, *, attach: bool) -> Lane:
    torch._dynamo.reset()  # else one lane would run the code that was compiled for the other
    torch.manual_seed(0)
    bare = program.model()
    optimizer = program.optimizer(bare)

    def attached(model: nn.Module) -> instep.Attachment | None:
        if not attach:
            return None
        return instep.attach(
            model, optimizer, schedule="backward", bucket_bytes=program.bucket_bytes, **program.options
        )

    if program.how == ATTACHED_FIRST:
        overlap = attached(bare)
        return Lane(torch.compile(bare), bare, optimizer, overlap)
    if program.how == IN_PLACE:
        bare.compile()
        return Lane(bare, bare, optimizer, attached(bare))
    model: Any = torch.compile(bare)
    return Lane(model, bare, optimizer, attached(model))


def state_of(lane: Lane) -> list[torch.Tensor]:
    found = [p.detach().clone() for p in lane.bare.parameters()]
    found += [lane.extra["norm"]] if "norm" in lane.extra else []
    for p in lane.bare.parameters():
        found += [v.clone() for v in lane.optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    return found


def run(program: Program, *, attach: bool) -> tuple[list[list[torch.Tensor]], tuple[int, ...], str]:
    """What is in the model after each step, how many gradients each has handed over, and what is said of the others."""
    twice = program.step is clipped_in_two_passes  # as docs/clipping.md says it of compiled code
    with (
        torch._functorch.config.patch(donated_buffer=not twice),
        torch._inductor.config.patch(force_disable_caches=twice),
    ):
        return _run(program, attach=attach)


def _run(program: Program, *, attach: bool) -> tuple[list[list[torch.Tensor]], tuple[int, ...], str]:
    lane, after, taken, said = lane_of(program, attach=attach), list[list[torch.Tensor]](), list[int](), ""
    try:
        for i in range(STEPS):
            torch.manual_seed(1000 + i)
            program.step(lane, i)
            taken += [lane.taken] if attach else []
            lane.optimizer.step()
            lane.optimizer.zero_grad()
            after.append(state_of(lane))
        said = "" if lane.overlap is None else said_by(lane.overlap)
    finally:
        if lane.overlap is not None:
            lane.overlap.detach()
    return after, tuple(taken), said


def said_by(overlap: instep.Attachment) -> str:
    """Of gradients that are kept until backward ends."""
    return "\n".join(line for line in overlap.advice.splitlines() if "until its backward ends" in line)


if hasattr(torch.Tensor, "grad_dtype"):  # from torch 2.10 on
    PROGRAMS["masters-fp32"] = Program(
        Halved, usual, NONE, "they are of another dtype", optimizer=partial(with_masters, gradients="float32")
    )


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program(name: str) -> None:
    program = PROGRAMS[name]
    expected, *_ = run(program, attach=False)
    found, taken, said = run(program, attach=True)
    for i, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert len(one) == len(other)
        assert all(map(torch.equal, one, other)), f"step {i}"
    assert taken == (program.taken if TELLS_OF_BACKWARD else NONE)
    if TELLS_OF_BACKWARD:
        assert program.said in said
        assert bool(program.said) == bool(said)
    elif program.how != ATTACHED_FIRST:  # which nobody knows to be compiled
        assert "this torch does not tell when it compiles a backward" in said


# Where the plain loop is not to be had: an error, and never other weights in silence.


def test_a_second_backward_of_a_step_is_an_error() -> None:
    lane = lane_of(PROGRAMS["usual"], attach=True)
    assert lane.overlap is not None
    with lane.overlap:
        first, second = (lane.model(x_of(i)).square().mean() for i in range(2))
        first.backward()
        assert lane.taken == TAKEN
        with pytest.raises(AccumulationError, match="second backward"):
            second.backward()
        with pytest.raises(TornStepError):
            lane.optimizer.step()
        lane.overlap.accept_torn()


def test_a_second_backward_of_a_graph_is_an_error() -> None:
    """Compiled so that its graph may be kept: backward is only known not to keep what it has saved once it is run."""
    with torch._functorch.config.patch(donated_buffer=False):
        lane = lane_of(PROGRAMS["usual"], attach=True)
        assert lane.overlap is not None
        with lane.overlap:
            loss = lane.model(x_of(0)).square().mean()
            loss.backward(retain_graph=True)
            with pytest.raises(AccumulationError, match="second backward"):
                loss.backward()
            with pytest.raises(TornStepError):
                lane.optimizer.step()
            lane.overlap.accept_torn()


def test_a_gradient_that_comes_after_all_tears_the_step() -> None:
    """A function of the loop's own runs another backward, of which no graph tells."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
            ctx.layer = layer
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            with torch.enable_grad():
                ctx.layer(x_of(9)).square().mean().backward()
            return gradient, None

    lane = lane_of(PROGRAMS["usual"], attach=True)
    assert lane.overlap is not None
    with lane.overlap:
        x = Hidden.apply(x_of(0).requires_grad_(), lane.bare.layers[2])
        with pytest.raises(InstepError, match=r"layers\.2"):
            lane.model(x).square().mean().backward()
        assert lane.overlap.state == "torn"
        with pytest.raises(TornStepError, match="backward raised"):
            lane.optimizer.step()
        lane.overlap.accept_torn()


def test_an_update_that_fails_tears_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in ``.grad`` that the compiled code writes to."""
    lane = lane_of(PROGRAMS["usual"], attach=True)
    assert lane.overlap is not None
    with lane.overlap:
        for i in range(STEPS):
            usual(lane, i)
            lane.optimizer.step()
            lane.optimizer.zero_grad()
        calls, update = iter(range(100)), PreparedUpdate.run

        def fails(self: PreparedUpdate, gradients: Any) -> None:
            if next(calls) == 2:
                raise ValueError("no update")
            update(self, gradients)

        monkeypatch.setattr(PreparedUpdate, "run", fails)
        with pytest.raises(ValueError, match="no update"):
            usual(lane, STEPS)
        assert lane.overlap.state == "torn"
        left = [None if isinstance(p.grad, SpentGradient) else p.grad for p in lane.bare.parameters()]
        lane.overlap.accept_torn()
    plain = lane_of(PROGRAMS["usual"], attach=False)
    for i in range(STEPS):
        usual(plain, i)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    usual(plain, STEPS)
    found = [(a, p.grad) for a, p in zip(left, plain.bare.parameters(), strict=True) if a is not None]
    assert found
    assert all(torch.equal(a, b) for a, b in found if b is not None)


def test_what_a_backward_has_left_is_not_handed_over() -> None:
    """It raised before it came to the compiled code, of which another run wants the gradients."""
    found = []
    for attach in (False, True):
        lane = lane_of(PROGRAMS["usual"], attach=attach)

        def stop(_: object) -> None:
            raise ValueError("stop")

        y = lane.model(x_of(0))
        loss = y.square().mean()
        handle = loss.register_hook(stop)
        with pytest.raises(ValueError, match="stop") as caught:
            loss.backward(retain_graph=True)
        handle.remove()
        assert caught.value.__traceback__ is not None  # which has the frames of that run
        found.append(torch.autograd.grad(y.square().mean(), list(lane.bare.parameters())))
        if lane.overlap is not None:
            assert lane.taken == 0
            lane.overlap.detach()
    assert all(map(torch.equal, *found))


def test_gradients_of_gradients_are_an_error_as_ever() -> None:
    """torch has none of compiled code. What is put in the place of a stand-in hides that from nobody."""
    for attach in (False, True):
        with torch._functorch.config.patch(donated_buffer=False):
            lane = lane_of(PROGRAMS["usual"], attach=attach)
            loss = lane.model(x_of(0)).square().mean()
            weights = [layer.weight for layer in lane.bare.layers]
            gradients = torch.autograd.grad(loss, weights, create_graph=True)
            assert all(gradient.requires_grad for gradient in gradients)
            penalty = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
            with pytest.raises(RuntimeError, match="double backward"):
                penalty.backward()
            assert not any(g.requires_grad for g in torch.autograd.grad(lane.model(x_of(0)).sum(), weights))
            if lane.overlap is not None:
                lane.overlap.detach()


def test_two_attachments_in_one_graph() -> None:
    lanes = {attach: [lane_of(PROGRAMS["usual"], attach=attach) for _ in range(2)] for attach in (False, True)}
    for attach, (one, other) in lanes.items():
        torch._dynamo.reset()
        for i in range(STEPS):
            other.model(one.model(x_of(i))).square().mean().backward()
            for lane in (one, other):
                assert lane.overlap is None or lane.taken == TAKEN
                lane.optimizer.step()
                lane.optimizer.zero_grad()
        assert attach == (one.overlap is not None)
    for plain, attached in zip(*lanes.values(), strict=True):
        assert all(map(torch.equal, state_of(plain), state_of(attached)))
        assert attached.overlap is not None
        attached.overlap.detach()


def test_a_thread_of_another_model_disturbs_nothing() -> None:
    """It runs backward while this one's runs."""
    lane, expected = lane_of(PROGRAMS["usual"], attach=True), run(PROGRAMS["usual"], attach=False)[0]
    torch._dynamo.reset()
    assert lane.overlap is not None
    for i in range(STEPS):
        y = lane.model(x_of(i))
        y.register_hook(lambda _: aside(lambda: torch.ones(2, requires_grad=True).sum().backward()))
        lane.bare.layers[0].bias.register_post_accumulate_grad_hook(
            lambda _: aside(lambda: torch.ones(2, requires_grad=True).sum().backward())
        )
        y.square().mean().backward()
        assert lane.taken == TAKEN
        lane.optimizer.step()
        lane.optimizer.zero_grad()
        assert all(map(torch.equal, state_of(lane), expected[i]))
    lane.overlap.detach()


def aside(do: Callable[[], object]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


# One code for several loops.


def test_code_of_an_attached_model_is_right_without_an_attachment() -> None:
    """After ``detach()``, for another model of the same class, and for one that is attached later."""
    program = PROGRAMS["usual"]
    expected, *_ = run(program, attach=False)
    lane = lane_of(program, attach=True)
    other = lane_of(program, attach=False)
    other.bare.load_state_dict(lane.bare.state_dict())
    torch._dynamo.reset()
    assert lane.overlap is not None
    for i in range(STEPS):
        torch.manual_seed(1000 + i)
        if i == 2:
            lane.overlap.detach()
        if i == 3:
            lane.overlap = instep.attach(lane.model, lane.optimizer, schedule="backward", bucket_bytes=1)
        for each in (lane, other):
            usual(each, i)
            each.optimizer.step()
            each.optimizer.zero_grad()
            assert all(map(torch.equal, state_of(each), expected[i])), f"step {i}"
    usual(lane, 0)  # by now it is known that this code would hand over
    assert lane.taken == TAKEN
    lane.overlap.detach()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="from torch 2.10 on")
def test_code_that_hands_over_runs_for_a_model_of_wider_gradients() -> None:
    """The engine has cast the stand-ins by the time in which gradients take their places."""
    lane = lane_of(PROGRAMS["masters"], attach=True)
    assert lane.overlap is not None
    usual(lane, 0)
    assert lane.taken == TAKEN
    lane.optimizer.step()
    lane.optimizer.zero_grad()
    graphs = counters["stats"]["unique_graphs"]
    for where in (lane.overlap, nullcontext()):  # attached to the other one, and to none
        with where:
            torch.manual_seed(0)
            bare = Halved()
            optimizer: Any = with_masters(bare, gradients="float32")
            compiled: Any = torch.compile(bare)
            compiled(x_of(0)).square().mean().backward()
            assert {p.grad.dtype for p in bare.parameters() if p.grad is not None} == {torch.float32}
            optimizer.step()
            same = zip(bare.parameters(), lane.bare.parameters(), strict=True)  # of one backward the sums are the same
            assert all(torch.equal(p, q) for p, q in same)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("inner", ["whole", "eager"])
def test_a_compiled_function_that_calls_backward(inner: str) -> None:
    """torch compiles within it what runs in backward, and tells whoever asks."""
    lanes = [lane_of(PROGRAMS["usual"], attach=attach) for attach in (False, True)]
    for lane in lanes:
        torch._dynamo.reset()
        called = lane.model if inner == "whole" else lane.bare
        train = torch.compile(lambda x, called=called: called(x).square().mean().backward())
        for i in range(2):
            train(x_of(i))
            lane.optimizer.step()
            lane.optimizer.zero_grad()
        if lane.overlap is not None:
            lane.overlap.detach()
    assert all(map(torch.equal, *map(state_of, lanes)))


def test_a_model_that_was_compiled_before_says_so() -> None:
    lane = lane_of(PROGRAMS["usual"], attach=False)
    usual(lane, 0)
    lane.optimizer.step()
    lane.optimizer.zero_grad()
    with instep.attach(lane.model, lane.optimizer, schedule="backward", bucket_bytes=1) as overlap:
        lane.overlap = overlap
        for i in range(1, 3):
            usual(lane, i)
            lane.optimizer.step()
            lane.optimizer.zero_grad()
        assert lane.taken == 0
        for said in (overlap.advice, repr(overlap), str(overlap.plan)):
            assert "compiled before attach()" in said
            assert "torch.compiler.reset()" in said
        torch.compiler.reset()
        for i in range(1, 3):
            usual(lane, i)
            lane.optimizer.step()
            lane.optimizer.zero_grad()
        assert lane.taken == DEPTH
        assert "compiled" not in overlap.advice


def test_the_backward_of_a_forward_that_was_compiled_before_is_compiled_as_ever() -> None:
    """torch keeps both under one name, which is that of code that hands nothing over."""
    lane = lane_of(PROGRAMS["usual"], attach=False)
    loss = lane.model(x_of(0)).square().mean()
    with instep.attach(lane.model, lane.optimizer, schedule="backward", bucket_bytes=1) as lane.overlap:
        loss.backward()
        assert lane.taken == 0
        lane.optimizer.step()
        lane.optimizer.zero_grad()
        usual(lane, 1)
        assert lane.taken == 0  # nor would it in another backward
        lane.optimizer.step()
        assert ("was compiled before" if TELLS_OF_BACKWARD else "this torch does not") in said_by(lane.overlap)


def test_another_backend_says_so() -> None:
    torch.manual_seed(0)
    model = Net()
    compiled: Any = torch.compile(model, backend="aot_eager")
    optimizer = adamw(model)
    with instep.attach(compiled, optimizer, schedule="backward", bucket_bytes=1) as overlap:
        usual(lane := Lane(compiled, model, optimizer, overlap), 0)
        assert lane.taken == 0
        optimizer.step()
        optimizer.zero_grad()
        assert ("by another backend than inductor" if TELLS_OF_BACKWARD else "this torch") in said_by(overlap)


def test_compiled_autograd_is_an_error_as_ever() -> None:
    """torch compiles the backward once more, and reads weights late. What is not freed is not kept in silence."""
    lane = lane_of(PROGRAMS["usual"], attach=True)
    assert lane.overlap is not None
    with lane.overlap, torch._dynamo.config.patch(compiled_autograd=True):
        loss = lane.model(x_of(0)).square().mean()
        with pytest.raises(InstepError, match="Nothing was updated"):
            torch.compile(lambda: loss.backward(), backend="eager")()
        assert lane.taken == 0


def test_weights_of_which_views_are_saved_stay() -> None:
    """So torch is told, or an earlier one does unasked: which weight a view is of is in no key of torch's."""
    name = "treat_parameters_as_free_to_save"
    settings: Any = torch._functorch.config
    with settings.patch({name: False}) if hasattr(settings, name) else nullcontext():
        expected, *_ = run(PROGRAMS["usual"], attach=False)
        found, taken, said = run(PROGRAMS["usual"], attach=True)
    assert all(map(torch.equal, expected[-1], found[-1]))
    assert taken == NONE
    assert ("with settings that rule it out" if TELLS_OF_BACKWARD else "this torch does not tell") in said


def test_one_code_for_attachments_of_more_and_of_less() -> None:
    """What was compiled where a part of the weights is attached hands over as well where all are."""
    expected, *_ = run(PROGRAMS["usual"], attach=False)
    torch._dynamo.reset()
    for first in (True, False):
        torch.manual_seed(0)
        bare = Net()
        compiled: Any = torch.compile(bare)
        optimizer = adamw(bare.layers[2] if first else bare)
        with instep.attach(compiled, optimizer, schedule="backward", bucket_bytes=1) as overlap:
            lane = Lane(compiled, bare, optimizer, overlap)
            for i in range(STEPS):
                usual(lane, i)
                if i:  # by now it is known that this code would hand over
                    assert lane.taken == (min(1, TAKEN) if first else TAKEN)
                optimizer.step()
                bare.zero_grad()
    assert all(map(torch.equal, state_of(lane), expected[-1]))


def test_each_of_two_attachments_is_told_of_what_is_compiled() -> None:
    torch.manual_seed(0)
    models = [Net(), Twice()]
    compiled: list[Any] = [torch.compile(model) for model in models]
    optimizers = [adamw(model) for model in models]
    attach = partial(instep.attach, schedule="backward", bucket_bytes=1)
    for lane in reversed(list(map(Lane, compiled, models, optimizers, map(attach, compiled, optimizers)))):
        usual(lane, 0)
        assert lane.taken == TAKEN
        lane.optimizer.step()
        assert lane.overlap is not None
        lane.overlap.detach()


def test_options_that_keep_gradients_say_so() -> None:
    lane = lane_of(PROGRAMS["usual"], attach=False)
    clip = instep.ClipNorm(math.inf)
    with instep.attach(lane.model, lane.optimizer, schedule="backward", clip=clip, accumulation_steps=1) as overlap:
        usual(lane, 0)
        lane.optimizer.step()
        lane.optimizer.zero_grad()
        for said in (overlap.advice, repr(overlap), str(overlap.plan)):
            assert "with clip they may be needed for longer" in said


def test_groups_that_are_handed_over_are_buckets() -> None:
    """From the third step on one hook speaks for each bucket, as in any loop whose gradients come in order."""
    lane = lane_of(PROGRAMS["usual"], attach=True)
    assert lane.overlap is not None
    with lane.overlap as overlap:
        for i in range(STEPS):
            usual(lane, i)
            lane.optimizer.step()
            lane.optimizer.zero_grad()
        sources = [bucket.source for bucket in overlap.plan.buckets]
        assert sources == DEPTH * ["compiled"] + DEPTH * ["local"]
        (source,) = overlap._parts.sources
        assert len(source._hooks.parameters) == len(sources) == 2 * DEPTH  # type: ignore[attr-defined]
        assert source._one_per_bucket  # type: ignore[attr-defined]
        assert overlap.stats()["freed_bytes"] == STEPS * overlap.plan.nbytes


def test_gradients_are_freed_in_backward() -> None:
    """All gradients of the plain loop are alive at once, and two or three of ten of the attached one."""

    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4 * WIDTH, 4 * WIDTH, bias=False) for _ in range(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.repeat(1, 4))

    peaks = {}
    for attach in (False, True):
        lane = lane_of(Program(Deep, usual, ()), attach=attach)
        for i in range(3):
            usual(lane, i)
            lane.optimizer.step()
            lane.optimizer.zero_grad()
        peaks[attach] = peak_of(partial(usual, lane, 3))
        if lane.overlap is not None:
            lane.optimizer.step()
            lane.overlap.detach()
    size = 4 * (4 * WIDTH) ** 2
    assert peaks[False] > 10 * size
    assert peaks[True] < 4 * size


def peak_of(step: Callable[[], object]) -> int:
    """The most bytes that torch's allocator has had while ``step`` ran, above what it had before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


class Shows(nn.Module):
    """Returns what it has computed inside, too, or does not."""

    def __init__(self, shows: bool) -> None:
        super().__init__()
        self.shows = shows
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512)) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(512, 256) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        inside = []
        for layer, back in zip(self.layers, self.back, strict=True):
            h = layer(x)
            x = x + back(nn.functional.gelu(h))
            inside.append(h.detach())
        return x, inside if self.shows else []


@pytest.mark.skipif(not hasattr(inductor_utils, "fresh_cache"), reason="an earlier torch")
@pytest.mark.nightly  # it compiles four graphs, from nothing
def test_what_a_loop_keeps_is_not_overwritten_by_code_of_a_loop_that_keeps_nothing() -> None:
    """torch keeps compiled code on the disk, and not by what the code may overwrite."""
    with inductor_utils.fresh_cache():
        for shows in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = Shows(shows)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            compiled: Any = torch.compile(model)
            with instep.attach(compiled, optimizer, schedule="backward", bucket_bytes=WIDTH * WIDTH):
                for _ in range(2):
                    y, inside = compiled(torch.randn(16, 256))
                    before = [h.clone() for h in inside]
                    y.square().mean().backward()
                    assert all(map(torch.equal, inside, before))
                    optimizer.step()
                    optimizer.zero_grad()
    assert len(inside) == 2
