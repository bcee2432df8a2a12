"""``micro_batches()`` and ``backward(more=True)``: the plain accumulation loop, whatever the graphs look like."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import instep
from instep import ClipValue
from instep._micro_batches.graphs import Graphs
from instep.errors import AccumulationError, InstepError, SpentGradientError, TornStepError
from instep_tools.harness import LiveBytes
from tests.cases import Blocks, Rotations, Sometimes, SparseWords, Tied, batch, channels_last, two_groups
from tests.devices import here
from tests.parity.lockstep import SMALL, Contender, Loss, accumulated, in_every_way, in_micro_batches, lockstep, loss_of


def usual(lane: Contender, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return loss_of(lane.model(x), y)


def adamw(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(two_groups(model), lr=1e-2)


def sgd(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def tokens(seed: int, length: int = 7) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, 32, (3, length), generator=generator, device="cpu").to(here())


# The plain loop, bit for bit.


@in_every_way
def test_every_way(way: str) -> None:
    lockstep(way, lambda: adamw(Blocks()), in_micro_batches(usual, 4))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
def test_any_number(count: int) -> None:
    lane = lockstep("backward", lambda: adamw(Blocks()), in_micro_batches(usual, count), steps=3)
    assert lane.overlap.step_count == 3


def test_sizes_that_change_from_step_to_step() -> None:
    counts = [3, 1, 5, 0, 2]

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        losses = accumulated(lane, partial(usual, lane), range(10 * i, 10 * i + counts[i]))
        lane.finish()
        return losses

    assert lockstep("backward", lambda: adamw(Blocks()), step).overlap.micro_batches(partial(usual), []) == []


@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_weight_that_is_used_twice(count: int) -> None:
    def loss(lane: Contender, seed: int) -> torch.Tensor:
        words = tokens(seed)
        return loss_of(lane.model(words).flatten(0, 1), words.flatten())

    lockstep("backward", lambda: adamw(Tied()), in_micro_batches(loss, count))


class Recurrent(nn.Module):
    """Its weights are used once for each step in time; a submodule's weight is read by the model itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.cell = nn.GRUCell(8, 8)
        self.out = nn.Linear(8, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        hidden = x[:, 0]
        for at in range(words.shape[1]):
            hidden = self.cell(x[:, at], hidden) @ self.cell.weight_hh[:8]
        return self.out(hidden)


def test_taken_for_a_context_manager() -> None:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer) as overlap:
        for arguments, missing in (((), "loss_of"), ((partial(usual),), "batches")):
            with pytest.raises(InstepError, match=rf"given no {missing}: .* no context manager\. Call losses = "):
                overlap.micro_batches(*arguments)


def test_graphs_that_differ_between_micro_batches() -> None:
    def loss(lane: Contender, seed: int) -> torch.Tensor:
        words = tokens(seed, length=2 + 5 * (seed % 3))
        return loss_of(lane.model(words), words[:, 0])

    lockstep("backward", lambda: adamw(Recurrent()), in_micro_batches(loss, 5))


def test_parameters_that_only_some_micro_batches_use() -> None:
    def loss(lane: Contender, seed: int) -> torch.Tensor:
        x, y = batch(seed)
        return loss_of(lane.model(x, (None, 0, 1)[seed % 3] if seed < 8 else None), y)

    lockstep("backward", lambda: adamw(Sometimes()), in_micro_batches(loss, 4))


class Dropping(nn.Module):
    """Dropout, in segments that may be computed once more."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.3), nn.GELU(), nn.Linear(24, 24)) for _ in range(3)
        )
        self.outer = nn.Linear(24, 10)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.outer(x)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_draws_in_the_order_of_the_loop(checkpointed: bool) -> None:
    lockstep("backward", lambda: adamw(Dropping(checkpointed)), in_micro_batches(usual, 4))


def test_batch_normalization_sees_the_micro_batches_in_order() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        return sgd(nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10)))

    def with_buffers(lane: Contender, i: int) -> list[torch.Tensor]:
        return [*in_micro_batches(usual, 4)(lane, i), *(b.clone() for b in lane.model.buffers())]

    lockstep("backward", build, with_buffers)


@pytest.mark.parametrize("inside", [True, False], ids=["in the loss", "around all"])
def test_autocast(inside: bool) -> None:
    def loss(lane: Contender, seed: int) -> torch.Tensor:
        with torch.autocast(here().type, torch.bfloat16, enabled=inside or torch.is_autocast_enabled(here().type)):
            return usual(lane, seed)

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        with torch.autocast(here().type, torch.bfloat16, enabled=not inside):
            losses = accumulated(lane, partial(loss, lane), range(3 * i, 3 * i + 3))
        lane.finish()
        return losses

    lockstep("backward", lambda: adamw(Blocks()), step)


def test_complex_parameters() -> None:
    lockstep("backward", lambda: sgd(Rotations()), in_micro_batches(usual, 3))


def test_layouts_of_convolutions() -> None:
    def loss(lane: Contender, seed: int) -> torch.Tensor:
        x, y = batch(seed)
        return loss_of(lane.model(x.view(8, 1, 4, 4)), y)

    lockstep("backward", lambda: adamw(channels_last()), in_micro_batches(loss, 3))


def test_sparse_gradients() -> None:
    def loss(lane: Contender, seed: int) -> torch.Tensor:
        words = tokens(seed)
        return loss_of(lane.model(words).flatten(0, 1), words.flatten())

    lockstep(
        "backward", lambda: (m := SparseWords(), torch.optim.SGD(m.parameters(), lr=0.1)), in_micro_batches(loss, 3)
    )


class Positions(nn.Module):
    """Autograd hands one tensor to both terms of a sum: the gradient of the table is that of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 12)
        self.table = nn.Parameter(torch.randn(8, 12))
        self.outer = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)) + self.table)


def test_a_gradient_that_is_in_use_elsewhere_is_left_alone() -> None:
    lockstep("backward", lambda: adamw(Positions()), in_micro_batches(usual, 4))


class Gate(torch.autograd.Function):
    """Lets a gradient through, or gives none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_open: bool) -> torch.Tensor:
        ctx.is_open = is_open
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return gradient if ctx.is_open else None, None


@pytest.mark.parametrize("used", ["once", "twice"])
@pytest.mark.parametrize("way", ["backward", "undo"])
def test_contributions_that_turn_out_to_be_none(way: str, used: str) -> None:
    """The last of all, too: what came before is the gradient."""

    def loss(lane: Contender, seed: int) -> torch.Tensor:
        x, y = batch(seed)
        gated = Gate.apply(lane.model.inner(x), used == "once" and seed % 3 != 2)
        hidden = lane.model.blocks[0](gated)
        return loss_of(lane.model.outer(hidden + (lane.model.inner(x) if used == "twice" else 0)), y)

    lockstep(way, lambda: adamw(Blocks(depth=1)), in_micro_batches(loss, 3))


class Workspace(torch.autograd.Function):
    """Its backward computes into memory that it uses again."""

    memory = torch.empty(12, 16)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        Workspace.memory = Workspace.memory.to(x.device)
        return gradient @ weight, torch.mm(gradient.t(), x, out=Workspace.memory)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 12, bias=False), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.outer(torch.tanh(Workspace.apply(x, self.inner.weight)))
        return found


def test_gradients_in_memory_that_is_used_again() -> None:
    lockstep("backward", lambda: adamw(Reused()), in_micro_batches(usual, 4))


def test_a_gradient_penalty() -> None:
    """On an accelerator another thread makes a part of the graph: the order is then known, or the step is refused."""

    def loss(lane: Contender, seed: int) -> torch.Tensor:
        x, y = batch(seed)
        x.requires_grad_()
        found = loss_of(lane.model(x), y)
        (slope,) = torch.autograd.grad(found, x, create_graph=True)
        return found + slope.square().sum()

    with nullcontext() if here().type == "cpu" else suppress(AccumulationError):
        lockstep("backward", lambda: adamw(Blocks(depth=1)), in_micro_batches(loss, 4))


def test_clipping() -> None:
    class Clipped(Contender):
        def clip(self) -> None:
            if self.overlap is None:
                nn.utils.clip_grad_value_(self.model.parameters(), 0.01)

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        lane.__class__ = Clipped
        return in_micro_batches(usual, 3)(lane, i)

    lockstep("backward", lambda: adamw(Blocks()), step, clip=ClipValue(0.01), bucket_bytes=1)


def test_a_loss_scale() -> None:
    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        lane.extra = lane.extra or torch.amp.GradScaler(here().type, init_scale=2.0**14)
        losses = accumulated(lane, lambda seed: lane.extra.scale(usual(lane, seed) / 3), range(3 * i, 3 * i + 3))
        lane.extra.step(lane.optimizer)
        lane.extra.update()
        lane.zero_grad()
        return losses

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    lockstep("undo", build, step)


def test_gradients_that_are_kept() -> None:
    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        if lane.overlap is None:
            losses = accumulated(lane, partial(usual, lane), range(3 * i, 3 * i + 3))
        else:
            with lane.overlap.keep_gradients():
                losses = accumulated(lane, partial(usual, lane), range(3 * i, 3 * i + 3))
        norm = nn.utils.clip_grad_norm_(lane.model.parameters(), 0.1)
        lane.finish()
        return [*losses, norm]

    lockstep("backward", lambda: adamw(Blocks()), step)


@pytest.mark.parametrize("way", ["undo", "forward"])
def test_zeroed_gradients(way: str) -> None:
    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        losses = accumulated(lane, partial(usual, lane), range(3 * i, 3 * i + 3))
        lane.step()
        lane.optimizer.zero_grad(set_to_none=False)
        return losses

    lockstep(way, lambda: adamw(Blocks()), step)


def test_batches_are_made_as_they_are_used() -> None:
    """Making one draws, as a loader that augments does."""

    def drawn() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(3):
            yield torch.randn(8, 16, device=here()), torch.randint(0, 10, (8,), device=here())

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        losses = accumulated(lane, lambda xy: loss_of(lane.model(xy[0]), xy[1]), drawn())
        lane.finish()
        return losses

    lockstep("backward", lambda: adamw(Dropping(checkpointed=False)), step)


# What it is for.


def _built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    return adamw(Blocks(depth=6).to(here()))


def most_gradients(run: Callable[[nn.Module, torch.optim.Optimizer], None]) -> int:
    """The most bytes of gradients that are there when a gradient is final."""
    model, optimizer = _built()
    most = 0

    def seen(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in model.parameters() if type(p.grad) is torch.Tensor))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(seen)
    run(model, optimizer)
    return most


@pytest.mark.parametrize("count", [2, 4, 300])
def test_gradients_are_freed_while_backward_runs(count: int) -> None:
    def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(2):
            x, y = batch(seed)
            loss_of(model(x), y).backward()

    def attached(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL) as overlap:
            for _ in range(2):
                overlap.micro_batches(partial(usual, Contender(model, optimizer, {})), range(count))
                optimizer.step()
                optimizer.zero_grad()
            assert overlap.stats()["freed_bytes"] > 0

    assert most_gradients(attached) < 0.3 * most_gradients(plain)


def test_backward_walks_the_graphs_part_by_part() -> None:
    """What torch does not document: of the nodes that are ready, that with the highest number comes first, and the
    number can be set. Where that is no longer so, sums are right, and no memory is saved."""
    order: list[tuple[int, int, str]] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *place: Any) -> torch.Tensor:
            ctx.place = place
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            order.append(ctx.place)
            return gradient, None, None, None

    layers = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(8))

    def loss(number: int) -> torch.Tensor:
        x = torch.ones(2)
        for layer, weight in enumerate(layers):
            x = Seen.apply(Seen.apply(x * weight, layer, number, "first"), layer, number, "second")
        return x.sum()

    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with instep.attach(layers, optimizer, schedule="backward", bucket_bytes=1) as overlap:
        overlap.micro_batches(loss, range(7))
    back = reversed(range(8))
    assert order == [(layer, number, of) for layer in back for number in range(7) for of in ("second", "first")]


def test_within_a_graph_the_order_stays_what_it_was() -> None:
    """With it each sum that autograd makes there: whatever parts the other graphs have."""
    layers = [nn.Parameter(torch.ones(2)) for _ in range(6)]

    def loss(first: int) -> torch.Tensor:
        x = torch.ones(2)
        for weight in layers[first:]:
            x = x * weight
        return x.sum()

    graphs = Graphs([loss(2), loss(0), loss(4)], str)

    def in_order() -> list[Node]:
        return sorted((node for _, node in graphs.nodes()), key=lambda node: (number_of[node], node._sequence_nr()))

    number_of = {node: number for number, node in graphs.nodes()}
    before = in_order()
    graphs.walk_in_segments(lambda _, leaves: id(leaves[0]) if leaves else None, joins=True)
    assert in_order() == before


class Wide(nn.Module):
    """A block that computes much between two small layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow, self.back = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("wide", torch.ones(16, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back((self.narrow(x) @ self.wide).exp().sin() @ self.wide.T)


class Checkpointed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def peak(model: nn.Module, loss: Callable[[int], torch.Tensor], count: int, *, plain: bool = False) -> int:
    """The most bytes that two steps make beside weights. Buckets are of a twentieth of the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = sum(p.nbytes for p in model.parameters()) // 20
    attached = nullcontext() if plain else instep.attach(model, optimizer, schedule="backward", bucket_bytes=size)
    with attached as overlap, LiveBytes(model.parameters()) as live:
        for _ in range(2):
            live.reset()
            if overlap is None:
                for seed in range(count):
                    loss(seed).backward()
            else:
                overlap.micro_batches(loss, range(count))
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


def test_what_a_checkpoint_computes_again_is_there_for_one_micro_batch_at_a_time() -> None:
    """Blocks of a tenth of the model, as those of a transformer, and nothing else."""
    model = Checkpointed(*(Wide(4096) for _ in range(10))).to(here())

    def loss(seed: int) -> torch.Tensor:
        return model(batch(seed)[0]).square().mean()

    of_one_block = 3 * batch(0)[0].shape[0] * 4096 * 4
    assert peak(model, loss, 8) - peak(model, loss, 2) < of_one_block


def test_micro_batches_that_leave_out_early_blocks_go_through_the_later_ones_together() -> None:
    model = Checkpointed(*(nn.Linear(256, 256) for _ in range(12))).to(here())

    def loss(seed: int) -> torch.Tensor:
        return model[2 * (seed % 4) :](torch.ones(2, 256, device=here())).square().mean()

    assert peak(model, loss, 8) < 0.5 * peak(model, loss, 8, plain=True)


def test_blocks_that_are_used_again_and_again_take_no_more_than_in_the_plain_loop() -> None:
    """A micro-batch's own gradients of a block are added first: they would wait for each other, of every one."""
    model = Checkpointed(*(nn.Linear(256, 256) for _ in range(3))).to(here())

    def loss(seed: int) -> torch.Tensor:
        x = torch.ones(2, 256, device=here())
        for _ in range(4):
            x = model(x)
        return x.square().mean()

    assert peak(model, loss, 8) <= peak(model, loss, 8, plain=True)


def test_a_small_layer_that_is_used_twice_does_not_keep_the_gradients_between() -> None:
    model = Checkpointed(*(nn.Linear(256, 256) for _ in range(12))).to(here())

    def loss(seed: int) -> torch.Tensor:
        return model[:1](model(torch.ones(2, 256, device=here()))).square().mean()

    assert peak(model, loss, 2) < 0.6 * peak(model, loss, 2, plain=True)


class TiedLargely(nn.Module):
    """A fifth of its weights is the embedding, which is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 2048), nn.Linear(2048, 16)) for _ in range(4)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.blocks(self.words(words)), self.words.weight)


TELLS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


@pytest.mark.skipif(not TELLS, reason="torch before 2.13 does not tell whether what is saved is packed")
def test_gradients_of_a_head_that_is_the_embedding_do_not_wait_for_what_is_looked_up() -> None:
    """Nor are the blocks between the two one segment with them, whose gradients would all be there together."""
    model = TiedLargely().to(here())

    def loss(seed: int) -> torch.Tensor:
        return model(tokens(seed)[:1, :2]).square().mean()

    assert peak(model, loss, 16) <= peak(model, loss, 16, plain=True)


def test_another_model_in_the_loss() -> None:
    """Of which instep knows no part."""
    other = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(here())

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        def loss(seed: int) -> torch.Tensor:
            x, y = batch(seed)
            return loss_of(lane.model(other(x)), y)

        losses = accumulated(lane, loss, range(3 * i, 3 * i + 3))
        lane.finish()
        gradients = [cast(torch.Tensor, p.grad) for p in other.parameters()]
        other.zero_grad()
        return [*losses, *gradients]

    lockstep("backward", lambda: adamw(Blocks()), step)


def test_a_sum_over_micro_batches_has_no_copy_of_each_gradient() -> None:
    model = nn.Linear(16, 4096, bias=False, device=here())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule="backward") as overlap, LiveBytes(model.parameters()) as live:
        overlap.micro_batches(lambda seed: model(batch(seed)[0][:1]).sum(), range(4))
        optimizer.step()
    assert live.peak < 2.5 * model.weight.nbytes  # the sum, and what has come


# The forwards.


def test_forwards_run_on_the_loops_thread() -> None:
    """Whatever belongs to it is there: locks that are held, context variables, modes, what a profiler sees."""
    model, optimizer = _built()
    lane, lock, seen = Contender(model, optimizer, {}), threading.RLock(), []

    def loss(seed: int) -> torch.Tensor:
        with lock:
            seen.append(threading.get_ident())
            return usual(lane, seed)

    with instep.attach(model, optimizer, schedule="backward") as overlap, lock:
        overlap.micro_batches(loss, range(3))
        optimizer.step()
    assert seen == [threading.get_ident()] * 3


def test_the_models_own_error_is_raised() -> None:
    model, optimizer = _built()
    old = [p.detach().clone() for p in model.parameters()]

    def loss(seed: int) -> torch.Tensor:
        if seed == 2:
            raise ZeroDivisionError("of the model")
        return usual(Contender(model, optimizer, {}), seed)

    with instep.attach(model, optimizer, schedule="backward") as overlap:
        with pytest.raises(ZeroDivisionError, match="of the model"):
            overlap.micro_batches(loss, range(4))
        assert overlap.state == "idle"
        assert all(map(torch.equal, old, model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        overlap.micro_batches(loss, range(2))
        optimizer.step()
        assert overlap.step_count == 1


def test_another_threads_step_is_still_refused() -> None:
    model, optimizer = _built()
    errors: list[BaseException] = []

    def train() -> None:
        try:
            usual(Contender(model, optimizer, {}), 5)
        except BaseException as error:
            errors.append(error)

    with instep.attach(model, optimizer, schedule="backward") as overlap:
        overlap.micro_batches(partial(usual, Contender(model, optimizer, {})), range(2))
        other = threading.Thread(target=train)
        other.start()
        other.join()
        assert [type(error).__name__ for error in errors] == ["ConcurrentBackwardError"]
        optimizer.step()


def test_nothing_keeps_the_graphs() -> None:
    model, optimizer = _built()
    kept: list[Any] = []

    def loss(seed: int) -> torch.Tensor:
        found = usual(Contender(model, optimizer, {}), seed)
        kept.append(weakref.ref(found))
        return found

    with instep.attach(model, optimizer, schedule="backward") as overlap:
        gc.disable()
        try:
            overlap.micro_batches(loss, range(3))
            optimizer.step()
            assert [ref() for ref in kept] == [None] * 3
        finally:
            gc.enable()


# What is refused, and what is a mistake.


def refused(
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    loss: Callable[[nn.Module, int], torch.Tensor],
    match: str,
    error: type[Exception] = AccumulationError,
    **options: Any,
) -> None:
    """Nothing was written, and the loop goes on without the verb."""
    model, optimizer = build()
    model.to(here())
    old = [p.detach().clone() for p in model.parameters()]
    with instep.attach(model, optimizer, **{"schedule": "backward", **options}) as overlap:
        with pytest.raises(error, match=match):
            overlap.micro_batches(partial(loss, model), range(2))
        assert overlap.state == "idle"
        assert all(map(torch.equal, old, model.parameters()))
        assert all(p.grad is None for p in model.parameters())


def plain_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return loss_of(model(x), y)


def test_a_hook_on_a_parameter_is_refused() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks()
        model.inner.weight.register_hook(lambda g: g * 2)
        return adamw(model)

    refused(build, plain_loss, r"'inner\.weight' has a hook")


def test_reentrant_checkpointing_is_refused() -> None:
    def loss(model: Any, seed: int) -> torch.Tensor:
        x, y = batch(seed)
        inner = model.inner(x)
        return loss_of(model.outer(checkpoint(model.blocks[0], inner, use_reentrant=True)), y)

    refused(lambda: adamw(Blocks()), loss, "use_reentrant=False")


def test_a_graph_that_is_shared_is_refused() -> None:
    shared: list[torch.Tensor] = []

    def loss(model: Any, seed: int) -> torch.Tensor:
        if not shared:
            shared.append(model.inner.weight.sum() * 2)
        return plain_loss(model, seed) + shared[0]

    refused(lambda: adamw(Blocks()), loss, "micro-batches 1 and 2 share")


def test_a_loss_that_comes_twice_is_refused() -> None:
    made: list[torch.Tensor] = []

    def loss(model: Any, seed: int) -> torch.Tensor:
        made.append(plain_loss(model, seed))
        return made[0]

    refused(lambda: adamw(Blocks()), loss, "micro-batches 1 and 2 share")


def test_one_micro_batch_is_an_ordinary_backward() -> None:
    """Whatever its graph is like: a hook on a parameter, and reentrant checkpointing."""

    def loss(lane: Contender, seed: int) -> torch.Tensor:
        x, y = batch(seed)
        inner = lane.model.inner(x)
        return loss_of(lane.model.outer(checkpoint(lane.model.blocks[0], inner, use_reentrant=True)), y)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks(depth=1)
        model.inner.weight.register_hook(lambda g: g * 2)
        return adamw(model)

    lockstep("backward", build, in_micro_batches(loss, 1))


def test_sparse_gradients_of_several_uses_are_refused() -> None:
    def loss(model: Any, seed: int) -> torch.Tensor:
        words = tokens(seed)
        return model.out(model.words(words) + model.words(words.flip(0))).square().mean()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = SparseWords()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    refused(build, loss, "sparse gradients")


def test_sparse_and_dense_gradients_are_refused() -> None:
    def loss(model: Any, seed: int) -> torch.Tensor:
        words = tokens(seed)
        found: torch.Tensor = model.words(words) if seed else model.words.weight[words]
        return model.out(found).square().mean()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = SparseWords()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    refused(build, loss, "has dense ones")


def test_a_parameter_that_is_frozen_in_the_middle_is_refused() -> None:
    def loss(model: Any, seed: int) -> torch.Tensor:
        model.inner.weight.requires_grad_(seed == 0)
        return plain_loss(model, seed)

    refused(lambda: adamw(Blocks()), loss, r"'inner\.weight' was frozen")


def _set_number(node: Node, number: int) -> None:
    """As a thread that has made so many nodes would have numbered it."""
    cast(Any, node)._set_sequence_nr(number)


def on_a_thread(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(make()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("made", ["before", "by another thread", "by another thread, with higher numbers"])
def test_a_part_of_the_graph_from_elsewhere(made: str) -> None:
    """It keeps its place in the order of its own graph: the weight that it uses is used in the model, too."""

    def penalty(lane: Contender) -> torch.Tensor:
        found: torch.Tensor = lane.model.inner.weight.square().sum()
        return found

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        before = {seed: penalty(lane) for seed in range(3 * i, 3 * i + 3)}

        def loss(seed: int) -> torch.Tensor:
            if made == "before":
                return usual(lane, seed) + before[seed]
            found = on_a_thread(partial(penalty, lane))
            if "higher" in made:
                assert found.grad_fn is not None
                for node in (found.grad_fn, cast(Node, found.grad_fn.next_functions[0][0])):
                    _set_number(node, 10**12 + node._sequence_nr())
            return usual(lane, seed) + found

        losses = accumulated(lane, loss, range(3 * i, 3 * i + 3))
        lane.finish()
        return losses

    lockstep("backward", lambda: adamw(Blocks(depth=1)), step, steps=3)


def test_nodes_of_two_threads_with_one_number_are_refused() -> None:
    def loss(model: Any, seed: int) -> torch.Tensor:
        found = plain_loss(model, seed)
        assert found.grad_fn is not None
        other = on_a_thread(model.inner.weight.sum)
        assert other.grad_fn is not None
        _set_number(other.grad_fn, found.grad_fn._sequence_nr())
        return found + other

    refused(lambda: adamw(Blocks()), loss, "two threads have made a micro-batch's graph")


def test_a_gradient_from_before_is_refused() -> None:
    model, optimizer = _built()
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        with overlap.accumulate():
            plain_loss(model, 0).backward()
        with pytest.raises(AccumulationError, match="has a gradient from an earlier backward"):
            overlap.micro_batches(partial(plain_loss, model), range(2))
        assert overlap.state == "idle"


def test_a_second_call_before_step_is_refused() -> None:
    model, optimizer = _built()
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        overlap.micro_batches(partial(plain_loss, model), range(2))
        with pytest.raises(AccumulationError, match=r"step\(\) has not been called since"):
            overlap.micro_batches(partial(plain_loss, model), range(2))


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_within_accumulate(schedule: Any) -> None:
    model, optimizer = _built()
    with (
        instep.attach(model, optimizer, schedule=schedule) as overlap,
        overlap.accumulate(),
        pytest.raises(AccumulationError, match=r"within overlap\.accumulate\(\)"),
    ):
        overlap.micro_batches(partial(plain_loss, model), range(2))


def test_with_accumulation_steps() -> None:
    refused(lambda: adamw(Blocks()), plain_loss, "leave out accumulation_steps", accumulation_steps=2)


def test_a_loss_that_is_none() -> None:
    refused(lambda: adamw(Blocks()), lambda *_: None, "micro-batch 1 gave NoneType", InstepError)  # type: ignore[arg-type]
    refused(lambda: adamw(Blocks()), lambda model, _: model(batch(0)[0]), r"of shape \(8, 10\)", InstepError)
    with torch.no_grad():
        refused(lambda: adamw(Blocks()), plain_loss, r"within torch\.no_grad\(\)", InstepError)


class Watching(torch.overrides.TorchFunctionMode):
    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(1)
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(1)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Watching, Counting])
def test_modes_see_the_forwards(mode: Any) -> None:
    seen: list[int] = []

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        with mode(seen) if lane.overlap is not None else nullcontext():
            losses = accumulated(lane, partial(usual, lane), range(3 * i, 3 * i + 3))
        lane.finish()
        return losses

    lockstep("backward", lambda: adamw(Blocks()), step, steps=2)
    assert len(seen) > 2 * 3 * len(list(Blocks().parameters()))


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.outer = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))


class Seen(nn.Linear):
    """Its buffer is another tensor after each forward."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + x.detach().mean()
        return super().forward(x)


class Rebinding(Normalized):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Seen()


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("what", ["drawn random numbers", "written the buffer", "written the buffer 'inner.seen'"])
def test_a_backward_that_does_more_is_told(what: str, undo: bool) -> None:
    torch.manual_seed(0)
    made = Blocks() if "drawn" in what else Rebinding() if "seen" in what else Normalized()
    model, optimizer = adamw(made.to(here()))
    old = [p.detach().clone() for p in model.parameters()]

    def loss(seed: int) -> torch.Tensor:
        x, y = batch(seed)
        return loss_of(Noisy.apply(model(x)) if "drawn" in what else model(x), y)

    with instep.attach(model, optimizer, schedule="backward", undo=undo) as overlap:
        overlap.micro_batches(loss, range(1))  # is the plain loop
        if undo:
            overlap.rollback()
        else:
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(AccumulationError, match=what):
            overlap.micro_batches(loss, range(2))
        if undo:
            overlap.synchronize()
            assert all(map(torch.equal, old, model.parameters()))
        else:
            with pytest.raises(TornStepError):
                optimizer.step()
            overlap.accept_torn()


# ``overlap.backward(loss, more=True)``: a loop that calls backward for each micro-batch. First the cases above.


def by_backward(lane: Contender, loss: Loss, batches: Any) -> list[torch.Tensor]:
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
    monkeypatch.setattr(sys.modules[__name__], "accumulated", by_backward)


CASES: dict[str, tuple[Any, ...]] = {
    "test_sizes_that_change_from_step_to_step": (),
    "test_a_weight_that_is_used_twice": (3,),
    "test_graphs_that_differ_between_micro_batches": (),
    "test_parameters_that_only_some_micro_batches_use": (),
    "test_dropout_draws_in_the_order_of_the_loop": (True,),
    "test_batch_normalization_sees_the_micro_batches_in_order": (),
    "test_autocast": (False,),
    "test_complex_parameters": (),
    "test_layouts_of_convolutions": (),
    "test_sparse_gradients": (),
    "test_contributions_that_turn_out_to_be_none": ("backward", "twice"),
    "test_a_gradient_penalty": (),
    "test_a_loss_scale": (),
    "test_gradients_that_are_kept": (),
    "test_one_micro_batch_is_an_ordinary_backward": (),
    "test_modes_see_the_forwards": (Counting,),
}


@pytest.mark.usefixtures("_by_backward")
@pytest.mark.parametrize("case", CASES)
def test_as_by_the_verb(case: str) -> None:
    getattr(sys.modules[__name__], case)(*CASES[case])


@pytest.mark.usefixtures("_by_backward")
@in_every_way
def test_every_way_by_backward(way: str) -> None:
    lockstep(way, lambda: adamw(Blocks()), in_micro_batches(usual, 4))


def test_gradients_of_micro_batches_that_wait_are_freed() -> None:
    def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(2):
            plain_loss(model, seed).backward()

    def attached(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL) as overlap:
            lane = Contender(model, optimizer, {})
            lane.overlap = overlap
            by_backward(lane, partial(plain_loss, model), range(4))
            lane.finish()
            assert overlap.stats()["freed_bytes"] > 0

    assert most_gradients(attached) < 0.3 * most_gradients(plain)


def test_disabled_by_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_DISABLE", "1")
    monkeypatch.setattr(sys.modules[__name__], "accumulated", by_backward)
    lockstep("backward", lambda: adamw(Blocks()), in_micro_batches(usual, 3))


# What a loop may do between the micro-batches of a step.


def attached_model(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, instep.Attachment]:
    torch.manual_seed(0)
    model, optimizer = adamw(Blocks().to(here()))
    return model, optimizer, instep.attach(model, optimizer, schedule="backward", bucket_bytes=SMALL, **options)


def _zeros_by_hand(lane: Contender) -> None:
    for p in lane.model.parameters():
        p.grad = torch.zeros_like(p)


CLEARED: dict[str, Callable[[Contender], object]] = {
    "of the optimizer": lambda lane: lane.optimizer.zero_grad(),
    "of the model": lambda lane: lane.model.zero_grad(),
    "to zeros": lambda lane: lane.optimizer.zero_grad(set_to_none=False),
    "of the model to zeros": lambda lane: lane.model.zero_grad(set_to_none=False),
    "zeros by hand": _zeros_by_hand,
}


@pytest.mark.parametrize("way", ["backward", "undo"])
@pytest.mark.parametrize("after", ["None", "zeros"])
@pytest.mark.parametrize("clear", CLEARED)
def test_what_waits_is_thrown_away_by_zero_grad(clear: str, after: str, way: str) -> None:
    """As a loop does that leaves a batch out, after an error, or because its loss is not finite. A parameter that no
    micro-batch has used gets no gradient of zeros, which would have AdamW decay it.

    Args:
        after: what the loop leaves in ``.grad`` after each step.
    """

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        def loss(seed: int) -> torch.Tensor:
            x, y = batch(seed)
            return loss_of(lane.model(x, 0), y)

        for seed in range(2):
            found = loss(100 + seed)
            found.backward() if lane.overlap is None else lane.overlap.backward(found, more=True)
        CLEARED[clear](lane)
        losses = by_backward(lane, loss, range(3 * i, 3 * i + 3))
        lane.step()
        lane.optimizer.zero_grad(set_to_none=after == "None")
        return losses

    lockstep(way, lambda: adamw(Sometimes()), step)


def test_a_forward_without_gradients_and_one_that_raises() -> None:
    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        def loss(seed: int) -> torch.Tensor:
            with torch.no_grad():
                usual(lane, seed + 7)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                lane.model(torch.zeros(3, 5, device=here()))
            return usual(lane, seed)

        losses = by_backward(lane, loss, range(3 * i, 3 * i + 3))
        lane.finish()
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
@pytest.mark.parametrize("undo", [False, True])
def test_who_uses_gradients_that_wait_is_told(use: Callable[[Any], object], undo: bool) -> None:
    model, optimizer, overlap = attached_model(undo=undo)
    old = [p.detach().clone() for p in model.parameters()]
    with overlap:
        overlap.backward(plain_loss(model, 0), more=True)
        with pytest.raises(AccumulationError, match=r"not there yet: .* leave out overlap\.backward\(more=True\)"):
            use(model)
        assert all(map(torch.equal, old, model.parameters()))
        optimizer.zero_grad()
        accumulated(_lane(model, optimizer, overlap), partial(plain_loss, model), range(2))
        optimizer.step()
        assert overlap.step_count == 1


def _lane(model: nn.Module, optimizer: torch.optim.Optimizer, overlap: Any) -> Contender:
    lane = Contender(model, optimizer, {})
    lane.overlap = overlap
    return lane


@pytest.mark.parametrize("way", ["backward", "undo", "two_pass"])
def test_a_step_whose_last_micro_batch_never_came(way: str) -> None:
    """It failed, or the loop has left it out: the plain loop steps with the others."""

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        losses = [usual(lane, 3 * i + number) / 3 for number in range(3 - i % 2)]
        for number, loss in enumerate(losses):
            if lane.overlap is None:
                loss.backward()
            else:
                lane.overlap.backward(loss, more=number < 2)
        lane.finish()
        return [loss.detach() for loss in losses]

    lockstep(way, lambda: adamw(Blocks()), step)


def test_some_gradients_are_cleared_and_others_not() -> None:
    model, _, overlap = attached_model()
    with overlap:
        overlap.backward(plain_loss(model, 0), more=True)
        model.get_submodule("inner").zero_grad()
        with pytest.raises(AccumulationError, match=r"'inner\.weight' was cleared, and others were not"):
            overlap.backward(plain_loss(model, 1))
        assert all(p.grad is None for p in model.parameters())


def test_a_gradient_from_before_those_that_wait() -> None:
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


@pytest.mark.parametrize("way", ["backward", "undo"])
@pytest.mark.parametrize("after", ["a step", "a refusal"])
def test_a_node_that_is_a_part_of_several_steps(after: str, way: str) -> None:
    """It has saved nothing, so backward may come to it again: nothing of one step's sums is left on it."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Blocks(depth=1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        if lane.extra is None:
            lane.extra = lane.model.inner.weight.sum()
        if after == "a refusal" and lane.overlap is not None:
            lane.model.inner.bias.grad = torch.ones_like(lane.model.inner.bias)
            first, second = (usual(lane, seed) + (lane.extra if seed else 0) for seed in range(2))
            with pytest.raises(AccumulationError, match="from an earlier backward"):
                by_backward(lane, lambda loss: loss, [first, second])
            lane.zero_grad()

        def loss(seed: int) -> torch.Tensor:
            return usual(lane, seed) + (lane.extra if seed % 3 == 0 else 0)

        losses = by_backward(lane, loss, range(3 * i, 3 * i + 3))
        lane.finish()
        return losses

    lockstep(way, build, step, steps=3)


class Nested(torch.autograd.Function):
    """Reentrant checkpointing as frameworks write their own: backward runs a backward."""

    @staticmethod
    def forward(ctx: Any, part: Any, x: torch.Tensor) -> Any:
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            found = ctx.part(x)
        torch.autograd.backward(found, gradient)
        return None, x.grad


WITHIN = {
    "backward": "a second gradient",
    "undo": "several times in one backward|modified by an inplace operation",  # torch's own: of weights in between
    "kept": "several times in one backward",
}


@pytest.mark.parametrize("way", WITHIN)
def test_a_backward_within_the_backward_is_told(way: str) -> None:
    """Autograd adds its gradients in an order of its own."""
    torch.manual_seed(0)
    model, optimizer = adamw(Blocks(depth=1).to(here()))
    parts: Any = model

    def loss(seed: int) -> torch.Tensor:
        x, y = batch(seed)
        hidden = parts.inner(x)
        for _ in range(2):
            hidden = Nested.apply(parts.blocks[0], hidden)
        return loss_of(parts.outer(hidden), y)

    with instep.attach(model, optimizer, schedule="backward", undo=way == "undo", bucket_bytes=1 << 20) as overlap:
        old = [p.detach().clone() for p in model.parameters()]
        keeping = overlap.keep_gradients() if way == "kept" else nullcontext()
        with pytest.raises((AccumulationError, RuntimeError), match=WITHIN[way]), keeping:
            overlap.micro_batches(loss, range(3))
        overlap.synchronize()
        if way != "backward":
            assert all(map(torch.equal, old, model.parameters()))
        elif overlap.state == "torn":
            overlap.accept_torn()
        optimizer.zero_grad()


def test_a_last_loss_that_is_none_loses_nothing() -> None:
    def step(lane: Contender, i: int) -> list[torch.Tensor]:
        losses = [usual(lane, 3 * i + number) for number in range(3)]
        for number, loss in enumerate(losses):
            if lane.overlap is None:
                loss.backward()
                continue
            with pytest.raises(InstepError, match="must be a tensor of one number"):
                lane.overlap.backward(lane.model(batch(0)[0]), more=number < 2)
            with pytest.raises(InstepError, match=r"within torch\.no_grad\(\), or detached"):
                lane.overlap.backward(loss.detach(), more=number < 2)
            lane.overlap.backward(loss, more=number < 2)
        lane.finish()
        return [loss.detach() for loss in losses]

    lockstep("backward", lambda: adamw(Blocks()), step, steps=2)


def test_gathered_rows_and_dense_gradients_are_refused() -> None:
    def loss(model: Any, seed: int) -> torch.Tensor:
        rows = torch.zeros(1, 16, dtype=torch.int64, device=here())
        weight = model.inner.weight
        found: torch.Tensor = torch.gather(weight, 0, rows, sparse_grad=True) if seed else weight
        return found.square().sum()

    refused(lambda: adamw(Blocks()), loss, "has dense ones")


def test_what_waits_is_freed_once_it_is_thrown_away() -> None:
    model, optimizer, overlap = attached_model()
    with overlap:
        loss = plain_loss(model, 0)
        kept = weakref.ref(loss)
        overlap.backward(loss, more=True)
        del loss
        optimizer.zero_grad()
        model(batch(1)[0])
        gc.collect()
        assert kept() is None


def test_after_detach_it_is_a_plain_backward() -> None:
    model, _, overlap = attached_model()
    overlap.detach()
    overlap.backward(plain_loss(model, 0), more=True)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("end", ["detach", "rollback"])
def test_what_waits_at_the_end_is_thrown_away(end: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, overlap = attached_model(undo=end == "rollback")
    with overlap:
        loss = plain_loss(model, 0)
        kept = weakref.ref(loss)
        overlap.backward(loss, more=True)
        del loss
        getattr(overlap, end)()
        assert kept() is None
        assert all(p.grad is None for p in model.parameters())
        plain_loss(model, 1).backward()
        optimizer.step()
    assert ("detach() has thrown away 1 micro-batches," in caplog.text) == (end == "detach")


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

        losses = by_backward(lane, loss, range(3 * i, 3 * i + 3))
        lane.finish()
        return losses

    lockstep("backward", build, step, parts=lambda lane: [(lane.model, lane.optimizers)])


class ReadsBuffers(torch.autograd.Function):
    """Asks for the buffers of its inputs' gradients, which torch has since 2.15: before, raises what torch does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not hasattr(torch.autograd.function.FunctionCtx, "input_grad_buffers"):
            raise RuntimeError("input_grad_buffers: there are post-hooks on the producing autograd node")
        x, weight = ctx.saved_tensors
        _ = ctx.input_grad_buffers
        return gradient * weight, (gradient * x).sum(0)


@pytest.mark.parametrize("sum_of_all", [False, True])
def test_a_function_that_reads_the_buffers_of_its_gradients(sum_of_all: bool) -> None:
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="backward", bucket_bytes=1)

    def loss_of_one(x: torch.Tensor) -> torch.Tensor:
        hidden = model(x)
        found: torch.Tensor = ReadsBuffers.apply(hidden, model.scale)
        return (found + hidden if sum_of_all else found).square().sum()

    with pytest.raises(AccumulationError, match=r"ctx\.input_grad_buffers.*overlap\.accumulate\(\)"):
        overlap.micro_batches(loss_of_one, [torch.ones(2, 4), torch.ones(2, 4)])
    overlap.detach()
