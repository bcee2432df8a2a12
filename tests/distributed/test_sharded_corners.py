"""Sharded models in the corners: what a loop, or torch, may do to them beside training, on two ranks."""

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.attachment import attachments
from instep.errors import AccumulationError, HyperparameterChangedError, UncommittedStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, Reentrant, batch, two_groups
from tests.devices import here, on_cpu_only
from tests.distributed.pool import RankPool
from tests.distributed.sharded import WAYS, Loop, both, in_every_way, loss_of, mesh, nested
from tests.late import late_updates

warnings.filterwarnings("ignore", message=".*returned a view tensor.*")


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, **{"foreach": True, **options})


# Models and how they are called.


class OtherMethods(nn.Module):
    """A block that is called through two of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class CalledTwoWays(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OtherMethods() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        block: Any
        for block in self.blocks:
            x = x + block(x)
            x = x + block.other(x)
        return self.outer(x)


def with_methods(model: Any) -> nn.Module:
    nested(model)
    for block in model.blocks:
        register_fsdp_forward_method(block, "other")
    return model


class InChunks(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return torch.cat([self.outer(part) for part in x.chunk(4)])


def with_last_two_as_one(model: Any) -> nn.Module:
    fully_shard(model.blocks[0])
    fully_shard(model.blocks[1])
    fully_shard([model.blocks[2], model.outer])
    return fully_shard(model)


class OneRow(nn.Module):
    """Some ranks hold nothing of these parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.out = nn.Linear(16, 1), nn.Linear(1, 3), nn.Linear(3, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.wide(self.narrow(x))))


def made_on_meta(model: nn.Module) -> nn.Module:
    with torch.device("meta"):
        model = Blocks()
    nested(model)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "called through other methods": (CalledTwoWays, with_methods),
    "reentrant checkpoints": (Reentrant, nested),
    "called in chunks": (InChunks, with_last_two_as_one),
    "one row": (OneRow, fully_shard),  # type: ignore[dict-item]  # a module, too
    "made on meta": (Blocks, made_on_meta),
}


def one_model(name: str, way: str) -> None:
    build, shard = MODELS[name]
    both(way, shard, adamw, build=build)


@in_every_way
@pytest.mark.parametrize("name", list(MODELS))
def test_models(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(one_model, name, way)


def by_parts(way: str) -> None:
    """No forward of the whole model ever runs."""

    def shard(model: Any) -> nn.Module:
        for part in (model.inner, *model.blocks, model.outer):
            fully_shard(part)
        return model

    def step(loop: Loop, i: int) -> torch.Tensor:
        x, y = batch(2 * i + dist.get_rank())
        x = loop.model.inner(x)
        for block in loop.model.blocks:
            x = x + block(x)
        loss = loss_of(loop.model.outer(x), y)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss.detach()

    both(way, shard, adamw, step)


@in_every_way
def test_parts_called_by_themselves(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(by_parts, way)


def sequence_parallel(way: str) -> None:
    """The gradients of its norms are sums that ranks still owe: their step communicates."""

    def shard(model: Any) -> nn.Module:
        for block in model.blocks:
            plan = {
                "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
                "0": SequenceParallel(sequence_dim=0),
                "1": ColwiseParallel(input_layouts=Shard(0)),
                "3": RowwiseParallel(),
            }
            parallelize_module(block, mesh(2), plan)
        return model

    def step(loop: Loop, i: int) -> None:
        x, y = batch(i)
        loss_of(loop.model(x), y).backward()
        if way != "backward":
            assert loop.model.blocks[0][0].weight.grad.placements != loop.model.blocks[0][0].weight.placements
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    both(way, shard, partial(adamw, foreach=False), step)


@in_every_way
def test_sequence_parallel_norms(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(sequence_parallel, way)


# Loops.


def two_then_two(loop: Loop, i: int) -> None:
    """Two forwards, then two backwards, of which the second reduces."""
    losses = [loop.loss(2 * i), loop.loss(2 * i + 1)]
    for last, loss in enumerate(losses):
        if loop.overlap is None:
            loop.model.set_requires_gradient_sync(bool(last))
        loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def two_forwards_then_two_backwards(way: str) -> None:
    both(way, nested, adamw, two_then_two, accumulation_steps=2)


@in_every_way
def test_accumulation_steps_with_two_forwards_then_two_backwards(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(two_forwards_then_two_backwards, way)


def with_input_gradients(loop: Loop, i: int) -> torch.Tensor:
    for last in (False, True):
        x, y = batch(4 * i + 2 * last + dist.get_rank())
        x.requires_grad_()
        if loop.overlap is None:
            loop.model.set_requires_gradient_sync(last)
        loss = loss_of(loop.model(x), y)
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return found


def input_gradients(way: str) -> None:
    with pytest.raises((AccumulationError, UncommittedStepError)):
        both(way, nested, adamw, with_input_gradients, accumulation_steps=2)
    for overlap in attachments():
        overlap.detach()


@pytest.mark.parametrize("way", ["backward"])
def test_autograd_grad_counts_as_a_backward_and_is_refused(two_ranks: RankPool, way: str) -> None:
    """FSDP2 reduces in it too. docs/sharded.md says what to use."""
    two_ranks.run(input_gradients, way)


def thawed_after_evaluation(way: str) -> None:
    """``fully_shard`` leaves gathered parameters in the root module's places after a forward without a backward."""

    def some(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*model.inner.parameters(), *model.outer.parameters()], lr=1e-2)

    def step(loop: Loop, i: int) -> None:
        loop.learn(i)
        if 1 <= i < 3:
            with torch.no_grad():
                loop.loss(100)
            loop.optimizer.add_param_group({"params": list(loop.model.blocks[i].parameters()), "lr": 3e-3})

    both(way, nested, some, step)


@in_every_way
def test_parameters_added_after_an_evaluation(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(thawed_after_evaluation, way)


def attached_after_evaluation(way: str) -> None:
    def evaluated(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        with torch.no_grad():
            model(batch(0)[0])
        return optimizer

    both(way, nested, evaluated)


@in_every_way
def test_attached_after_an_evaluation(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(attached_after_evaluation, way)


def moved(way: str) -> None:
    def step(loop: Loop, i: int) -> None:
        loop.learn(i)
        loop.model.to("cpu")  # as a loop does before it saves or evaluates; it is there already

    both(way, nested, adamw, step)


@on_cpu_only
@pytest.mark.parametrize("way", ["backward", "forward"])
def test_model_to_between_steps_works_as_in_the_plain_loop(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(moved, way)


def spread_in_another_way(way: str) -> None:
    def step(loop: Loop, i: int) -> None:
        loop.learn(i)
        if loop.overlap is not None:
            loop.overlap.synchronize()
        if i == 1:
            for state in loop.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].redistribute(placements=[Replicate()])

    both(way, nested, partial(adamw, foreach=False), step)


@in_every_way
def test_state_that_is_not_spread_as_its_parameter(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(spread_in_another_way, way)


def raised_in_forward(way: str) -> None:
    class BoomError(Exception):
        pass

    def boom(*_: object) -> None:
        raise BoomError

    def step(loop: Loop, i: int) -> None:
        handle = loop.model.blocks[1].register_forward_pre_hook(boom)
        with pytest.raises(BoomError):
            loop.loss(i)
        handle.remove()
        loop.model.reset_iter_state()
        loop.learn(i)

    both(way, nested, adamw, step)


@in_every_way
def test_training_on_after_a_forward_raised(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(raised_in_forward, way)


def infinite_on_one_rank(way: str) -> None:
    """One row of one gradient: the other rank has no part of it, and must skip the step too."""
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = nested(Blocks())
        loop: Any = Loop(model, adamw(model))
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        loop.calls = 0
        loops.append(loop)

        def spoil(parameter: Any, loop: Any = loop) -> None:
            loop.calls += 1
            if loop.calls == 3 and dist.get_rank() == 1:
                parameter.grad.to_local()[0] = torch.inf

        model.blocks[1][1].weight.register_post_accumulate_grad_hook(spoil)
    plain, loop = loops
    scaler = {"scaler": loop.scaler} if way == "undo" else {}
    with instep.attach(loop.model, loop.optimizer, **WAYS[way], **scaler) as overlap:
        for i in range(5):
            for one in loops:
                one.scaler.scale(one.loss(i)).backward()
                one.scaler.unscale_(one.optimizer)
                one.scaler.step(one.optimizer)
                one.scaler.update()
                one.optimizer.zero_grad()
            overlap.synchronize()
            assert plain.scaler.get_scale() == loop.scaler.get_scale()
            for p, q in zip(plain.model.parameters(), loop.model.parameters(), strict=True):
                assert torch.equal(p.to_local(), q.to_local()), f"step {i}"


@pytest.mark.parametrize("way", ["forward", "undo"])
def test_a_gradient_that_is_infinite_on_one_rank(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(infinite_on_one_rank, way)


# Writes through another tensor of the same memory that was taken earlier, of which nobody is told: seen before anything
# is applied. A DTensor counts those through itself, or an alias of it, and its local tensor the others.


def whole(model: nn.Module) -> nn.Module:
    device = here()
    return DistributedDataParallel(model.to(device))


SPREAD: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]] = {
    "FSDP2": (nested, {}),
    "shard_state": (whole, {"shard_state": True}),
}
OTHERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "its local tensor": lambda tensor: tensor.to_local().detach(),
    "an alias": lambda tensor: tensor.detach(),
}


def taken(loop: Loop, what: str) -> list[Any]:
    if what == "gradient":
        return [p.grad for p in loop.model.parameters()]
    if what == "weight":
        return list(loop.model.parameters())
    return [entry["exp_avg"] for entry in loop.optimizer.state.values()]


def written_through_another(source: str, way: str, what: str, other: str) -> str:
    shard, options = SPREAD[source]
    torch.manual_seed(0)
    model = shard(Blocks())
    loop = Loop(model, adamw(model))
    with instep.attach(model, loop.optimizer, **WAYS[way], **options) as overlap, late_updates():
        loop.learn(0)
        overlap.synchronize()
        early = [OTHERS[other](tensor) for tensor in taken(loop, what)] if what != "gradient" else []
        loop.backward(1)
        early = early or [OTHERS[other](tensor) for tensor in taken(loop, what)]
        for tensor in early:
            tensor.mul_(0.5)
        with pytest.raises((UncommittedStepError, HyperparameterChangedError)) as caught:
            loop.optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("other", list(OTHERS))
@pytest.mark.parametrize(
    ("source", "way", "what"),
    [
        *(("FSDP2", way, what) for way in ("backward", "undo") for what in ("weight", "state")),
        ("shard_state", "backward", "state"),
    ],
)
def test_writes_through_another_tensor(two_ranks: RankPool, source: str, way: str, what: str, other: str) -> None:
    for message in two_ranks.run(written_through_another, source, way, what, other):
        assert "was written" in message


def written_after_the_step(what: str, other: str) -> str | None:
    """With ``schedule="forward"`` such a parameter is stepped at once: the write comes after, as in the plain loop."""
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nested(Blocks())
        loops.append(Loop(model, adamw(model)))
    plain, attached = loops
    with instep.attach(attached.model, attached.optimizer, **WAYS["forward"]) as overlap, late_updates():
        for loop in (plain, attached):
            loop.learn(0)
            overlap.synchronize()
            loop.backward(1)
            early = [OTHERS[other](tensor) for tensor in taken(loop, what)]
            loop.optimizer.step()
            for tensor in early:
                tensor.mul_(0.5)
            early.clear()
        overlap.synchronize()
        return first_difference(*(training_state(one.model, one.optimizer) for one in loops))


@pytest.mark.parametrize("other", list(OTHERS))
@pytest.mark.parametrize("what", ["weight", "state", "gradient"])
def test_writes_through_another_tensor_after_the_step(two_ranks: RankPool, what: str, other: str) -> None:
    assert two_ranks.run(written_after_the_step, what, other) == [None] * 2


# Gradients that no backward has made, of which one rank holds nothing but zeros.


def gradients_of_one_rank(way: str) -> None:
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nested(Blocks())
        loops.append(Loop(model, adamw(model)))
    plain, loop = loops
    with instep.attach(loop.model, loop.optimizer, clip=instep.ClipNorm(0.1), **WAYS[way]) as overlap:
        for one in loops:
            for parameter in one.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
                if dist.get_rank() == 0:
                    parameter.grad.to_local().fill_(0.5)
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)
        for one in loops:
            one.optimizer.step()
            one.optimizer.zero_grad()
        overlap.synchronize()
        for p, q in zip(plain.model.parameters(), loop.model.parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local())
        assert overlap.step_count == 1
        loop.learn(1)


@pytest.mark.parametrize("way", ["undo", "forward"])
def test_gradients_of_which_one_rank_holds_zeros(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(gradients_of_one_rank, way)


# State that only a step makes.


def asked_for_state_after_the_first_step() -> None:
    """Here on one device: DCP asks whether there is any, and takes a step of its own if not."""
    torch.manual_seed(0)
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Blocks()
        loops.append(Loop(model, adamw(model)))
    plain, loop = loops
    with instep.attach(loop.model, loop.optimizer, schedule="forward", defer=True), late_updates():
        for one in loops:
            loss_of(one.model(batch(0)[0]), batch(0)[1]).backward()
            one.optimizer.step()
            one.optimizer.zero_grad()
        expected: Any = get_optimizer_state_dict(plain.model, plain.optimizer)["state"]
        found: Any = get_optimizer_state_dict(loop.model, loop.optimizer)["state"]
        for name, state in expected.items():
            for key, value in state.items():
                assert torch.equal(value, found[name][key]), (name, key)


def test_state_after_the_first_step() -> None:
    asked_for_state_after_the_first_step()


# What is left behind.


def nothing_is_left(way: str) -> None:
    model = nested(Blocks())
    optimizer = adamw(model)
    loop = Loop(model, optimizer)

    def hooks() -> int:
        tables: list[Any] = []
        for module in model.modules():
            tables += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
        for parameter in model.parameters():
            tables += [parameter._post_accumulate_grad_hooks or {}, parameter._backward_hooks or {}]
        tables += [value for name, value in vars(optimizer).items() if name.endswith("_hooks")]
        return sum(map(len, tables))

    before = hooks()
    for i in range(2):
        overlap = instep.attach(model, optimizer, **WAYS[way])
        loop.learn(i)
        loop.backward(10 + i)
        optimizer.step()
        overlap.detach()
        optimizer.zero_grad()
    assert hooks() == before
    loop.learn(5)


@in_every_way
def test_detach_leaves_no_hooks(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(nothing_is_left, way)


def memory(way: str | None) -> int:
    """Bytes that tensors hold between two steps, in a loop that has cleared its gradients."""
    torch.manual_seed(0)
    model = nested(Blocks(width=64))
    loop = Loop(model, adamw(model))
    overlap = None if way is None else instep.attach(model, loop.optimizer, **WAYS[way])
    gc.collect()
    known = {t.data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and not t.is_meta}
    for i in range(3):
        loop.learn(i)
    if overlap is not None:
        overlap.synchronize()
    gc.collect()
    found: dict[int, int] = {}
    for held in gc.get_objects():
        if type(held) is torch.Tensor and held.data_ptr() not in known:
            found[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
    if overlap is not None:
        overlap.detach()
    return sum(found.values())


def held_memory(way: str) -> tuple[int, int]:
    memory(None)  # what torch makes once
    return memory(None), memory(way)


@in_every_way
def test_no_memory_is_held_between_steps(two_ranks: RankPool, way: str) -> None:
    for plain, attached in two_ranks.run(held_memory, way):
        assert attached <= plain + 1024, f"{attached - plain} bytes more than the plain loop's {plain}"


# instep.verify.


def verified(way: str) -> None:
    def build(different: bool, evaluates: bool) -> Any:
        nonlocal made  # type: ignore[misc]  # bound below, of which mypy knows nothing
        made += 1
        model: Any = nested(Blocks())
        if different and made == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                model.blocks[1][1].weight.to_local().mul_(2)
        loop = Loop(model, adamw(model))

        def step(i: int) -> None:
            loop.learn(i)
            if evaluates:
                with torch.no_grad():
                    loop.loss(100)

        return model, loop.optimizer, step

    for different, evaluates in ((False, False), (False, True), (True, False)):
        made = 0
        result = instep.verify(partial(build, different, evaluates), **WAYS[way])
        assert result.equal is not different, result.difference
        if evaluates:
            assert result.tensors > 80, "the state of every parameter, under its name"


@pytest.mark.parametrize("way", ["backward", "forward"])
def test_verify(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(verified, way)
