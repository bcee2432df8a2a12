"""Models and loops with something odd about them, plain and attached in every way, bit for bit."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from instep import ClipNorm, attach
from instep._step.deferral import LAST
from instep.errors import (
    AccumulationError,
    AttachError,
    InstepError,
    SpentGradientError,
    StaleAttachmentError,
    TornStepError,
    UncommittedStepError,
)
from tests.cases import Blocks, Reentrant, Tied, assign, batch, grad_of
from tests.devices import default_device, on_cpu_only
from tests.parity.lockstep import (
    EXACT,
    Contender,
    Refused,
    Step,
    in_every_way,
    in_exact_ways,
    learn,
    lockstep,
    loss_of,
    ways,
)

TORN = Refused(AccumulationError, "torn")
TWICE = Refused(InstepError, "untouched", match="overlap.backward(loss)")
REENTRANT = Refused(RuntimeError, "untouched", match="use_reentrant=False")
UNCOMMITTED = Refused(UncommittedStepError, "open")
READ = dict.fromkeys(["backward", "two_pass"], Refused(UncommittedStepError, "torn"))
STALE = Refused(StaleAttachmentError, "untouched")
MODIFIED = Refused(RuntimeError, "open", match="modified by an inplace operation")


ALIAS = "an alias that was made before the weight was updated on trial shows the new values"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def built(make: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Any] = adamw) -> Callable[[], Any]:
    def build() -> Any:
        model = make()
        return model, optimizer(model)

    return build


blocks = built(partial(Blocks, depth=2))


def tokens(i: int, shape: tuple[int, ...] = (4, 9)) -> torch.Tensor:
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(i), device="cpu").to(default_device())


# Parameters that are shared, used often, or not at all.


def next_token(lane: Contender, i: int) -> torch.Tensor:
    data = tokens(i)
    return lane.learn(loss_of(lane.model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()))


@in_every_way
def test_tied_weights(way: str) -> None:
    lockstep(way, built(Tied), next_token)


class Early(nn.Module):
    """Reads its embedding outside of the embedding's module, before that runs, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.middle = nn.Linear(16, 16)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        first = linear(torch.ones(4, 8, 16), self.embedding.weight)
        x = torch.tanh(self.middle(self.embedding(data)))
        return first + x @ self.embedding.weight.t()


@in_every_way
def test_a_tied_weight_read_outside_of_its_module(way: str) -> None:
    lockstep(way, built(Early), next_token)


class Often(nn.Module):
    """One parameter used many times, and a module called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.layer = nn.Linear(16, 16)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.layer(x * self.scale).tanh() * self.scale[:1]
        return self.out(x @ self.scale.diag())


@in_every_way
def test_a_parameter_and_a_module_used_many_times(way: str) -> None:
    lockstep(way, built(Often))


@in_every_way
def test_frozen_and_thawed(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        lane.model.inner.requires_grad_(i >= 2)
        lane.model.outer.requires_grad_(i % 3 != 1)
        return learn(lane, i)

    lockstep(way, blocks, step, steps=6)


class LoRA(nn.Module):
    """Low-rank adapters on a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down = nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, 16, bias=False)
        self.head = nn.Linear(16, 10).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.base(x) + self.up(self.down(x))))

    @torch.no_grad()
    def merge(self) -> None:
        self.base.weight += self.up.weight @ self.down.weight
        self.up.weight.zero_()


@in_every_way
def test_adapters_that_are_merged_now_and_then(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        loss = learn(lane, i)
        if i % 2:
            lane.model.merge()
        return loss

    lockstep(way, built(LoRA, sgd), step)


class Experts(nn.Module):
    """Each row goes to the expert that the gate picks for it: others get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (rows := chosen == number).any():
                y = y.index_add(0, rows.nonzero()[:, 0], expert(x[rows]) * weight[rows, None])
        return self.out(x + y)


@in_every_way
def test_experts_that_are_not_used_in_every_step(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i, rows=2)
        return lane.learn(loss_of(lane.model(x), y))

    lockstep(way, built(Experts, sgd), step, steps=8)


@torch.library.custom_op("instep_tests::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1], grad.t() @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("whole", [True, False])
def test_a_scripted_module_is_refused(whole: bool) -> None:
    part = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    model = part if whole else nn.Sequential(part, nn.Linear(16, 10))
    with pytest.raises(AttachError, match=r"[Ss]cript"):
        attach(model, sgd(model), schedule="backward")


# Checkpointing.


def segments(lane: Contender, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    x = lane.model.inner(x)
    for block in lane.model.blocks:
        x = x + checkpoint(block, x, use_reentrant=reentrant)
    return lane.model.outer(x)


@pytest.mark.parametrize("reentrant", [False, True])
@in_every_way
def test_checkpointing(way: str, reentrant: bool) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        return lane.learn(loss_of(segments(lane, x, reentrant), y))

    lockstep(way, blocks, step, refused={"two_pass": REENTRANT} if reentrant else None)


@in_every_way
def test_checkpointed_segments_that_share_weights(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        x = lane.model.inner(x)
        for block in (*lane.model.blocks, *lane.model.blocks):
            x = x + checkpoint(block, x, use_reentrant=False)
        return lane.learn(loss_of(lane.model.outer(x), y))

    lockstep(way, blocks, step)


@in_every_way
def test_nested_checkpointing(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)

        def part(x: torch.Tensor) -> torch.Tensor:
            for block in lane.model.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return lane.model.outer(x)

        return lane.learn(loss_of(checkpoint(part, lane.model.inner(x), use_reentrant=False), y))

    lockstep(way, blocks, step)


@in_every_way
def test_reentrant_segments_that_share_weights(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        x = lane.model.inner(x)
        for _ in range(2):
            x = x + checkpoint(lane.model.blocks[0], x, use_reentrant=True)
        return lane.learn(loss_of(lane.model.outer(x), y))

    lockstep(way, blocks, step, refused={"backward": TORN, "two_pass": REENTRANT})


@in_every_way
def test_a_checkpointed_segment_that_reads_a_later_weight_without_its_gradient(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        model = lane.model

        def part(x: torch.Tensor) -> torch.Tensor:
            return model.inner(x) * model.outer.weight.detach().mean(0)

        return lane.learn(loss_of(model.outer(checkpoint(part, x, use_reentrant=False)), y))

    lockstep(way, blocks, step, bucket_bytes=1, refused=READ)


# Backward in all its forms.


@in_every_way
def test_a_gradient_penalty(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x.requires_grad_()), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return lane.learn(loss + slope.square().sum())

    lockstep(way, blocks, step)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.heads = nn.ModuleList(nn.Linear(16, 10) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.trunk(x)
        return [head(x) for head in self.heads]


@in_every_way
def test_two_losses_on_one_trunk(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        first, second = (loss_of(out, y) for out in lane.model(x))
        first.backward(retain_graph=True)
        second.backward()
        lane.step()
        lane.zero_grad()
        return first.detach()

    lockstep(way, built(TwoHeads), step, refused={"backward": TORN, "two_pass": TWICE})


@in_every_way
def test_two_losses_on_one_trunk_that_is_cut_off(way: str) -> None:
    """As with multi-task losses that are balanced at the trunk's output."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        trunk = lane.model.trunk(x)
        cut = trunk.detach().requires_grad_()
        for head in lane.model.heads:
            loss_of(head(cut), y).backward()
        trunk.backward(cut.grad)
        lane.step()
        lane.zero_grad()
        return trunk.detach()

    lockstep(way, built(TwoHeads), step, refused={"two_pass": TWICE})


@in_every_way
def test_a_retained_graph_used_again_after_the_step(way: str) -> None:
    """The plain loop raises: the weights that the graph saved were modified."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        loss.backward(retain_graph=True)
        lane.step()
        lane.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        lane.zero_grad()

    lockstep(way, blocks, step, steps=1, refused={"two_pass": TWICE})


@in_every_way
def test_backward_for_some_inputs(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        loss.backward(inputs=list((lane.model.blocks, lane.model.outer)[i % 2].parameters()))
        lane.step()
        lane.zero_grad()
        return loss.detach()

    lockstep(way, blocks, step, refused={"two_pass": TWICE})


@in_every_way
def test_autograd_grad_alone(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        parameters = list(lane.model.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        lane.step()
        lane.zero_grad()
        return loss.detach()

    lockstep(way, blocks, step)


@in_every_way
def test_autograd_grad_between_backward_and_step(way: str) -> None:
    """A probe of the gradient at the old weights: its forward must see them."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        lane.backward(loss_of(lane.model(x), y))
        (slope,) = torch.autograd.grad(loss_of(lane.model(x), y), [lane.model.inner.weight])
        lane.step()
        lane.zero_grad()
        return slope

    lockstep(way, blocks, step, refused={"backward": UNCOMMITTED, "two_pass": UNCOMMITTED})


@pytest.mark.parametrize("kind", ["plain", "penalty", "reentrant"])
@ways("backward", *EXACT)
def test_accumulation_steps(way: str, kind: str) -> None:
    """However many runs of the engine there are in one ``backward()``, it is one."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x.requires_grad_()), y)
        if kind == "penalty":
            loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        loss.backward()
        if i % 2:
            lane.step()
            lane.zero_grad()

    build = built(Reentrant) if kind == "reentrant" else blocks
    lockstep(way, build, step, steps=8, bucket_bytes=1, accumulation_steps=2)


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Keeps(Saves):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.weight, grad.t() @ ctx.x


@pytest.mark.parametrize("function", [Saves, Keeps])
@in_every_way
def test_a_custom_function(way: str, function: Any) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        x = function.apply(lane.model.inner(x), lane.model.blocks[0][1].weight)
        x = function.apply(x, lane.model.blocks[0][1].weight)
        return lane.learn(loss_of(lane.model.outer(x), y))

    lockstep(way, blocks, step)


class KeepsAnother(torch.autograd.Function):
    """Its backward reads, without saving it, a weight whose gradient is final by then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.read = read
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.read().mean(), None


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p,
        lambda p: p.data,
        lambda p: p.detach(),
        pytest.param(lambda p: p.data.numpy() is None or p, marks=on_cpu_only),
    ],
    ids=["weight", "data", "detach", "numpy"],
)
@in_every_way
def test_a_custom_function_that_reads_a_later_weight(way: str, read: Callable[[Any], Any]) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        x = KeepsAnother.apply(lane.model.inner(x), lambda: read(lane.model.outer.weight))
        return lane.learn(loss_of(lane.model.outer(x), y))

    lockstep(way, blocks, step, bucket_bytes=1, refused=READ)


@ways(*EXACT, undo=ALIAS)
def test_a_custom_function_that_keeps_an_alias_of_a_later_weight(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        alias = lane.model.outer.weight.detach()
        x = KeepsAnother.apply(lane.model.inner(x), lambda: alias)
        return lane.learn(loss_of(lane.model.outer(x), y))

    lockstep(way, blocks, step, bucket_bytes=1)


@in_every_way
def test_a_gradient_hook_that_reads_another_weight(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        hidden = lane.model.inner(x)
        hidden.register_hook(lambda grad: grad * lane.model.outer.weight.detach().abs().mean())
        return lane.learn(loss_of(lane.model.outer(hidden), y))

    lockstep(way, blocks, step, bucket_bytes=1, refused=READ)


@pytest.mark.parametrize("kind", ["hook", "post"])
@in_exact_ways
def test_a_parameter_hook_that_changes_the_gradient_with_its_weight(way: str, kind: str) -> None:
    """L2 in a hook; in a post-accumulate hook that was there before ``attach``, and one that reads other parameters."""

    def build() -> Any:
        model, optimizer = blocks()
        for p in model.parameters():
            if kind == "hook":
                p.register_hook(lambda grad, p=p: grad + 0.1 * p.detach() + model.outer.weight.detach().mean())
            else:
                p.register_post_accumulate_grad_hook(add_weights)
        return model, optimizer

    def add_weights(p: torch.Tensor) -> None:
        p.grad = grad_of(p) + p.detach()

    lockstep(way, build, bucket_bytes=1)


def read_early(lane: Contender, i: int, read: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The product saves a later weight without its gradient."""
    x, y = batch(i)
    x = lane.model.inner(x) @ read(lane.model.blocks[0][1].weight)
    return lane.learn(loss_of(lane.model.outer(x + lane.model.blocks[0](x)), y))


@in_every_way
def test_a_later_weight_read_early_without_its_gradient(way: str) -> None:
    """Where it is updated before that node has run, autograd must notice."""
    modified = Refused(RuntimeError, "torn", match="modified by an inplace operation")

    def step(lane: Contender, i: int) -> Any:
        return read_early(lane, i, torch.Tensor.detach)

    refused = {"backward": modified, "two_pass": modified, "undo": MODIFIED}
    lockstep(way, blocks, step, bucket_bytes=1, refused=refused)


@ways(*EXACT, undo="saved_tensors_hooks do without autograd's own check of versions")
def test_a_later_weight_read_early_under_saved_tensors_hooks(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return read_early(lane, i, torch.Tensor.detach)

    lockstep(way, blocks, step, bucket_bytes=1)


@in_every_way
def test_what_is_saved_is_kept_elsewhere(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        with torch.autograd.graph.save_on_cpu():
            x, y = batch(i)
            loss = loss_of(lane.model(x), y)
        return lane.learn(loss)

    lockstep(way, blocks, step)


# torch.compile.


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small() -> Any:
    return built(lambda: nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 10))), sgd)()


IN_PLACE = ("in place before", "in place after", "block after", "in place later", "block later")
DONATED = Refused(RuntimeError, "untouched", match="donated buffers")


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own reading
@pytest.mark.parametrize("how", ["before", "after", "later", "block", *IN_PLACE])
@pytest.mark.parametrize("way", ["backward", "late", "undo", "two_pass"])
def test_compiled(way: str, how: str) -> None:
    """As a whole, by wrapper and in place, and in part; before ``attach``, after it, and in the middle of training."""

    def build() -> Any:
        model, optimizer = small()
        if how == "before":
            return torch.compile(model, backend="aot_eager"), optimizer
        if how == "in place before":
            model.compile(backend="aot_eager")
        if how == "block":
            model[1] = torch.compile(model[1], backend="aot_eager")
        return model, optimizer

    def compile_now(lane: Contender) -> None:
        if how in ("after", "later"):
            lane.extra = torch.compile(lane.model, backend="aot_eager")
        if how in ("in place after", "in place later"):
            lane.model.compile(backend="aot_eager")
        if how in ("block after", "block later"):
            lane.model[1].compile(backend="aot_eager")

    def step(lane: Contender, i: int) -> Any:
        if i == (3 if "later" in how else 0):
            compile_now(lane)
        x, y = batch(i)
        return lane.learn(loss_of((lane.extra or lane.model)(x), y))

    lockstep(way, build, step, steps=6, bucket_bytes=1, refused=None if how in IN_PLACE else {"two_pass": DONATED})


# The model's parameters in other hands.


@in_every_way
def test_functional_calls_between_steps(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        model = lane.model

        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return loss_of(torch.func.functional_call(model, parameters, (x,)), y)

        result = learn(lane, i)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        slopes = torch.func.grad(loss)(parameters)
        moved = {name: p - 0.1 * slopes[name] for name, p in model.named_parameters()}
        return result, slopes["inner.weight"], loss(moved).detach()

    lockstep(way, blocks, step)


@in_every_way
def test_training_through_a_functional_call(way: str) -> None:
    """An inner step of meta-learning: the loss at weights that were moved along their gradient."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        parameters = dict(lane.model.named_parameters())
        loss = loss_of(torch.func.functional_call(lane.model, parameters, (x,)), y)
        slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        moved = {name: p - 0.1 * s for (name, p), s in zip(parameters.items(), slopes, strict=True)}
        return lane.learn(loss_of(torch.func.functional_call(lane.model, moved, (x,)), y))

    lockstep(way, blocks, step)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x.view(2, 4, 16))
        return self.out(self.attention(x, x, x, need_weights=False)[0]).flatten(0, 1)


@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.layer, lambda m: m.layer.self_attn.out_proj])
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@ways("backward", "late", "undo")
def test_attention_evaluated_between_steps(way: str, part: Callable[[Any], Any], off: Callable[[], Any]) -> None:
    """Without gradients it reads its weights from C++, by another way than in training."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        lane.model.train()
        loss = lane.learn(loss_of(lane.model(x), y))
        lane.model.eval()
        with off():
            return loss, part(lane.model)(x if part(lane.model) is not lane.model.layer else x.view(2, 4, 16)).clone()

    lockstep(way, built(Attention), step)


PARTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "the model": lambda m, x: m(x),
    "a layer": lambda m, x: m.layer(x.view(2, 4, 16)),
    "attention": lambda m, x: m.attention(*3 * [x.view(2, 4, 16)], need_weights=False)[0],
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("way", "defer"), [("forward", "auto"), ("forward", False), ("late", True), ("undo", "auto")])
def test_attention_evaluated_between_backward_and_step(way: str, defer: Any, part: str) -> None:
    """As a teacher. The default looks at what the loop does there in a few of these steps."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        loss.backward()
        lane.model.eval()
        with torch.no_grad():
            seen = PARTS[part](lane.model, x).clone()
        lane.model.train()
        lane.optimizer.step()
        lane.optimizer.zero_grad()
        return loss.detach(), seen

    lockstep(way, built(Attention), step, steps=LAST + 2, defer=defer)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x.view(2, 4, 16))[0]).flatten(0, 1)


class Second(nn.Module):
    """A model of its own that shares the weights of another."""

    def __init__(self, first: Recurrent) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 8, num_layers=2, batch_first=True, bidirectional=True)
        for name, p in first.lstm.named_parameters():
            setattr(self.lstm, name, p)
        self.out = nn.Linear(16, 10)
        self.out.weight = first.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x.view(2, 4, 16))[0]).flatten(0, 1)


@pytest.mark.parametrize("trained", [False, True])
@in_every_way
def test_another_model_with_the_same_weights(way: str, trained: bool) -> None:
    def build() -> Any:
        model, optimizer = built(Recurrent)()
        model.register_module("unused", None)
        optimizer.second = [Second(model)]  # not part of the attached model
        return model, optimizer

    def step(lane: Contender, i: int) -> Any:
        loss = learn(lane, i)
        second = lane.optimizer.second[0]
        x, y = batch(i + 100)
        if not trained:
            with torch.no_grad():
                return loss, second(x)
        lane.backward(loss_of(second(x), y))
        lane.step()
        lane.zero_grad()
        second.zero_grad()
        return loss

    lockstep(way, build, step)


@pytest.mark.parametrize("grad", [False, True])
@in_every_way
def test_a_part_of_the_model_called_between_steps(way: str, grad: bool) -> None:
    def step(lane: Contender, i: int) -> Any:
        loss = learn(lane, i)
        with torch.set_grad_enabled(grad):
            hidden = torch.ones(2, 24)
            return loss, lane.model.blocks[1](hidden).detach(), linear(hidden, lane.model.outer.weight).detach()

    lockstep(way, blocks, step)


@ways("backward", "forward", "undo", "two_pass")
def test_a_module_that_is_replaced(way: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        loss = learn(lane, i)
        if i == 1:
            lane.model.outer = nn.Linear(24, 10)
        return loss

    lockstep(way, blocks, step, refused=dict.fromkeys(["backward", "forward", "undo", "two_pass"], STALE))


# Weights and gradients that the loop itself writes and reads.


def clamp(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.05, 0.05)


def clamp_data(model: Any) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)


def max_norm(model: Any) -> None:
    for p in model.parameters():
        p.data = torch.renorm(p.data.flatten(1), 2, 0, 0.5).view_as(p) if p.dim() > 1 else p.data


def copy_in(model: Any) -> None:
    with torch.no_grad():
        model.inner.weight.copy_(model.inner.weight * 0.5)
        model.outer.bias[2:4] = 0.25
        torch.nn.init.orthogonal_(model.blocks[0][1].weight)
        torch._foreach_mul_(list(model.blocks[1].parameters()), 0.9)
        torch.add(model.inner.bias, 1.0, out=model.inner.bias)
        nn.utils.vector_to_parameters(
            0.9 * nn.utils.parameters_to_vector(model.blocks[0].parameters()), model.blocks[0].parameters()
        )


WRITES = pytest.mark.parametrize("write", [clamp, clamp_data, max_norm, copy_in])


@WRITES
@in_exact_ways
def test_weights_written_between_backward_and_step(way: str, write: Callable[[Any], None]) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        lane.backward(loss)
        write(lane.model)
        lane.step()
        lane.zero_grad()
        return loss.detach()

    lockstep(way, blocks, step)


def clip_norm(model: Any) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_loop(model: Any) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)


def by_hand(model: Any) -> Any:
    total = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad / (total + 1.0)
    return total


def noise(model: Any) -> Any:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.add_(torch.randn_like(p.grad), alpha=0.01)


def centralize(model: Any) -> Any:
    for p in model.parameters():
        if p.grad is not None and p.dim() > 1:
            p.grad -= p.grad.mean(1, keepdim=True)


GRADIENTS = pytest.mark.parametrize("touch", [clip_norm, clip_loop, by_hand, noise, centralize])


@GRADIENTS
@in_exact_ways
def test_gradients_used_after_the_step(way: str, touch: Callable[[Any], Any]) -> None:
    """They are still there, as in the plain loop, and what is done to them then does not change the weights."""

    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        lane.backward(loss_of(lane.model(x), y))
        lane.step()
        result = touch(lane.model)
        lane.zero_grad()
        return result

    lockstep(way, blocks, step)


@in_every_way
def test_a_forward_that_outlives_the_step_before_it(way: str) -> None:
    """The next batch's forward runs before this step's update: the graph is older than the weights. Plain raises."""

    def step(lane: Contender, i: int) -> Any:
        ahead = loss_of(lane.model(batch(i + 1)[0]), batch(i + 1)[1])
        learn(lane, i)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            lane.backward(ahead)
        lane.zero_grad()

    lockstep(way, blocks, step, steps=1)


# Errors on the way.


class Trip(torch.autograd.Function):
    """Raises in backward once it is armed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException | None) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.error is not None:
            raise ctx.error
        return grad, None


class Stumbles(Blocks):
    error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.inner(x))
        x = Trip.apply(x, self.error)
        return self.outer(self.blocks[1](x))


def stumbling(clear: bool, error: BaseException) -> Step:
    def step(lane: Contender, i: int) -> Any:
        if i == 2:
            lane.model.error = error
            x, y = batch(i)
            with pytest.raises(type(error), match="boom"):
                lane.backward(loss_of(lane.model(x), y))
            lane.model.error = None
            if clear:
                lane.zero_grad()
        return learn(lane, i)

    return step


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt("boom")], ids=["error", "interrupt"])
@in_every_way
def test_backward_raises_and_the_iteration_is_done_again(way: str, error: BaseException, clear: bool) -> None:
    if not clear and way == "two_pass":
        pytest.skip("the pass that measures frees what it has measured")
    build = built(partial(Stumbles, depth=2))
    lockstep(way, build, stumbling(clear, error), refused={"backward": Refused(TornStepError, "torn")})


@pytest.mark.parametrize("clear", [True, False])
@in_every_way
def test_a_backward_that_raised_is_given_up(way: str, clear: bool) -> None:
    """The loop steps with what gradients there are, or with none, and goes on."""

    def step(lane: Contender, i: int) -> Any:
        lane.model.error = ValueError("boom") if i == 2 else None
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        try:
            lane.backward(loss)
        except ValueError:
            if clear:
                lane.zero_grad()
        lane.step()
        lane.zero_grad()
        return loss.detach()

    build = built(partial(Stumbles, depth=2))
    if not clear and way == "two_pass":
        pytest.skip("the pass that measures frees what it has measured")
    lockstep(way, build, step, refused={"backward": Refused(TornStepError, "torn")})


# Loops that step and clear when it suits them.


@in_every_way
def test_steps_that_are_left_out(way: str) -> None:
    """The guard against NaN, as it is usually written: gradients are cleared, or not, and the step is left out."""

    def step(lane: Contender, i: int) -> Any:
        lane.zero_grad()
        x, y = batch(i)
        loss = loss_of(lane.model(x), y)
        lane.backward(loss)
        if i % 3 != 1:
            lane.step()
        return loss.detach()

    lockstep(way, blocks, step, steps=6, refused={"backward": UNCOMMITTED, "two_pass": UNCOMMITTED})


CLEARS: dict[str, Callable[[Contender], object]] = {
    "optimizer": lambda lane: lane.optimizer.zero_grad(),
    "model": lambda lane: lane.model.zero_grad(),
    "to zero": lambda lane: lane.optimizer.zero_grad(set_to_none=False),
    "model to zero": lambda lane: lane.model.zero_grad(set_to_none=False),
    "by hand": lambda lane: [assign(p, "grad", None) for p in lane.model.parameters()] and None,
    "by hand to zero": lambda lane: [p.grad.zero_() for p in lane.model.parameters() if p.grad is not None] and None,
    "by hand in data": lambda lane: (
        [p.grad.data.zero_() for p in lane.model.parameters() if p.grad is not None] and None
    ),
    "new zeros": lambda lane: [assign(p, "grad", torch.zeros_like(p)) for p in lane.model.parameters()] and None,
    "never": lambda lane: None,
}


@pytest.mark.parametrize("where", ["first", "before backward", "last"])
@pytest.mark.parametrize("clear", list(CLEARS))
@ways("backward", "late", "undo")
def test_gradients_cleared_anywhere_and_anyhow(way: str, clear: str, where: str) -> None:
    def step(lane: Contender, i: int) -> Any:
        x, y = batch(i)
        if where == "first":
            CLEARS[clear](lane)
        loss = loss_of(lane.model(x), y)
        if where == "before backward":
            CLEARS[clear](lane)
        lane.backward(loss)
        lane.step()
        if where == "last":
            CLEARS[clear](lane)
        return loss.detach()

    refused = Refused(SpentGradientError, "untouched", "Call zero_grad()")
    lockstep(way, blocks, step, steps=4, refused={"backward": refused} if clear == "never" else None)


# Copies.


class Beside(nn.Module):
    """The loss multiplies by a parameter that is in no module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks()
        vars(self)["scale"] = nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * vars(self)["scale"]


def beside() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Beside()
    return model, torch.optim.AdamW([*model.parameters(), vars(model)["scale"]], lr=1e-2, fused=True)


@pytest.mark.parametrize("way", ["forward", "late"])
def test_a_parameter_that_no_module_owns(way: str) -> None:
    lockstep(way, beside)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "backward"},
        {"schedule": "backward", "undo": True},
        {"schedule": "forward", "clip": ClipNorm(1.0)},
        {"schedule": "forward", "nonfinite": "skip"},
    ],
    ids=str,
)
def test_one_is_refused_where_instep_does_more_than_wait(options: dict[str, Any]) -> None:
    with pytest.raises(AttachError, match=r"params'\]\[22\].*is not a parameter of the model.*schedule='forward'"):
        attach(*beside(), **options)


@pytest.mark.parametrize("options", [{"schedule": "backward"}, {"defer": True}, {"nonfinite": "skip"}], ids=str)
def test_an_optimizer_with_none_of_the_model_s_parameters_is_refused(options: Any) -> None:
    """The default leaves it to torch: ``test_left_to_torch.py``."""
    loose = nn.Parameter(torch.zeros(3))
    with pytest.raises(AttachError, match=r"is not a parameter of the model.*leaves all to torch"):
        attach(Blocks(), torch.optim.SGD([loose], lr=0.1), **options)
