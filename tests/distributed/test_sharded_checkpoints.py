"""Checkpoints of sharded models, through torch's own functions: bit for bit those of the plain loop."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import instep
from instep_tools.harness import first_difference
from tests.cases import Blocks, batch
from tests.devices import on_cpu_only
from tests.distributed.pool import RankPool
from tests.distributed.sharded import WAYS, Loop, fsdp1, hsdp, loss_of, mesh, nested, parameters_of, tp_alone
from tests.late import late_updates

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
# "late" is "forward" with no luck: every update is still due when a checkpoint is taken.
in_each_kind = pytest.mark.parametrize("kind", ["fsdp2", pytest.param("tp", marks=pytest.mark.nightly), "fsdp1"])
in_each_way = pytest.mark.parametrize("way", ["backward", "late", pytest.param("undo", marks=pytest.mark.nightly)])


def fsdp1_with_mesh(model: nn.Module) -> nn.Module:
    """With a mesh its sharded checkpoints are of DTensors."""
    return fsdp1(model, device_mesh=mesh(dist.get_world_size()))


SHARDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": nested,
    "hsdp": hsdp,
    "tp": tp_alone,
    "fsdp1": fsdp1_with_mesh,
}
OPTIONS = {
    "sharded": StateDictOptions(),
    "sharded, on cpu": StateDictOptions(cpu_offload=True),
    "full": StateDictOptions(full_state_dict=True),
    "full, on cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


def adamw(model: nn.Module, *, foreach: bool = True) -> torch.optim.Optimizer:
    """Weights and biases, by their names: under FSDP1 they have no other shape than one dimension."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True, foreach=foreach)


def made(kind: str, seed: int = 0) -> Loop:
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    model = SHARDS[kind](Blocks())
    # For loops: torch's foreach takes no plain parameters beside sharded ones, which tensor parallelism leaves.
    return Loop(model, adamw(model, foreach=kind != "tp"))


def learn(loop: Loop, i: int, kind: str) -> None:
    if kind != "tp":
        return loop.learn(i)
    x, y = batch(i)  # its ranks see the same data
    loss_of(loop.model(x), y).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return None


def leaves(name: str, value: Any, *, ordered: bool = True) -> Iterator[tuple[str, Any]]:
    """A state dict's values by their path. Of DTensors what this rank holds, and how they are laid out."""
    if isinstance(value, dict):
        yield f"keys of {name}", list(value) if ordered else set(value)
        for key, item in value.items():
            yield from leaves(f"{name}[{key!r}]", item, ordered=ordered)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from leaves(f"{name}[{number}]", item, ordered=ordered)
    elif isinstance(value, DTensor):
        yield name, value.to_local()
        yield f"layout of {name}", (value.placements, value.shape, value.stride(), value.device_mesh)
    else:
        yield f"type of {name}", type(value)
        yield name, value


def require_equal(plain: Any, attached: Any, when: str, *, ordered: bool = True) -> None:
    difference = first_difference(leaves("state", plain, ordered=ordered), leaves("state", attached, ordered=ordered))
    assert difference is None, f"{when}: {difference}"


def require_same_training(plain: Loop, loop: Loop, when: str) -> None:
    if loop.overlap is not None:
        loop.overlap.synchronize()
    difference = first_difference(
        parameters_of(plain.model, plain.optimizer), parameters_of(loop.model, loop.optimizer)
    )
    assert difference is None, f"rank {dist.get_rank()}, {when}: {difference}"


def updates(way: str) -> Any:
    """In the way "late" an update is still due whenever nobody has waited for it."""
    return late_updates() if way == "late" else nullcontext()


# What is taken.


def optimizer_state(at: Loop, options: StateDictOptions) -> Any:
    return get_optimizer_state_dict(at.model, at.optimizer, options=options)


def model_state(at: Loop, options: StateDictOptions) -> Any:
    return get_model_state_dict(at.model, options=options)


def both_states(at: Loop, options: StateDictOptions) -> Any:
    return get_state_dict(at.model, at.optimizer, options=options)


def taken(kind: str, way: str) -> None:
    plain, loop = made(kind), made(kind)
    with instep.attach(loop.model, loop.optimizer, **WAYS[way]), updates(way):
        i = 0
        for name, options in OPTIONS.items():
            calls: dict[str, Callable[[Loop], Any]] = {"optimizer": partial(optimizer_state, options=options)}
            # torch 2.13 crashes in that of an FSDP1 model on CPU, plain or not.
            if (kind, name) != ("fsdp1", "full, on cpu") or torch.cuda.is_available():
                calls["model"] = partial(model_state, options=options)
            if name == "sharded":
                calls["both"] = partial(both_states, options=options)
                calls["the model's own"] = lambda at: at.model.state_dict()
                if kind != "fsdp1":  # which has only its own, above
                    calls["the optimizer's own"] = lambda at: at.optimizer.state_dict()
            for what, call in calls.items():
                learn(plain, i, kind)
                learn(loop, i, kind)
                require_equal(call(plain), call(loop), f"{what}, {name}, after step {i}")
                i += 1
        require_same_training(plain, loop, "at the end")


@in_each_way
@in_each_kind
def test_what_is_taken_after_a_step(two_ranks: RankPool, kind: str, way: str) -> None:
    two_ranks.run(taken, kind, way)


@pytest.mark.parametrize("way", ["late", pytest.param("undo", marks=pytest.mark.nightly)])
def test_what_is_taken_of_hsdp(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(taken, "hsdp", way)


# Taken and loaded again.


def resumed(kind: str, way: str) -> None:
    """Two steps, a checkpoint, and three more by another model and optimizer that load it: attached before, after, and
    on both sides of it; with sharded and with full state dicts."""
    plain = made(kind)
    for i in range(5):
        learn(plain, i, kind)
    for number, (saves, loads) in enumerate([(True, True), (True, False), (False, True)]):
        options = StateDictOptions(full_state_dict=number == 0)
        with updates(way):
            first, then = made(kind), made(kind, seed=1)
            if saves:
                first.overlap = instep.attach(first.model, first.optimizer, **WAYS[way])
            for i in range(2):
                learn(first, i, kind)
            of_model, of_optimizer = copy.deepcopy(get_state_dict(first.model, first.optimizer, options=options))
            learn(first, 100, kind)  # what was taken is not touched
            if loads:
                then.overlap = instep.attach(then.model, then.optimizer, **WAYS[way])
            set_state_dict(
                then.model, then.optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options
            )
            for i in range(2, 5):
                learn(then, i, kind)
            require_same_training(plain, then, f"saved {saves}, loaded {loads}")
            for loop in (first, then):
                if loop.overlap is not None:
                    assert loop.overlap.step_count == 3, "three batches were learned, and loading is no step"
                    loop.overlap.detach()


@in_each_way
@in_each_kind
def test_resumed_training(two_ranks: RankPool, kind: str, way: str) -> None:
    two_ranks.run(resumed, kind, way)


@pytest.mark.parametrize("way", ["late", pytest.param("backward", marks=pytest.mark.nightly)])
def test_resumed_training_of_hsdp(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(resumed, "hsdp", way)


def gone_back(kind: str, way: str) -> None:
    """The same model and optimizer load what was taken of them, right after a step."""
    plain, loop = made(kind), made(kind)
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way])
    with updates(way):
        for one in (plain, loop):
            learn(one, 0, kind)
            kept = copy.deepcopy(get_state_dict(one.model, one.optimizer))
            learn(one, 1, kind)
            set_model_state_dict(one.model, kept[0])
            learn(one, 2, kind)
            set_optimizer_state_dict(one.model, one.optimizer, kept[1])
            learn(one, 3, kind)
        require_same_training(plain, loop, "at the end")
    assert loop.overlap.step_count == 4
    loop.overlap.detach()


@in_each_way
@in_each_kind
def test_going_back_to_an_earlier_state(two_ranks: RankPool, kind: str, way: str) -> None:
    two_ranks.run(gone_back, kind, way)


# An optimizer that has never stepped: torch steps it itself, with gradients of zeros and lr=0.


def never_stepped(kind: str, way: str, looked: bool) -> None:
    plain, loop = made(kind), made(kind)
    classes = [type(p) for p in loop.model.parameters()]
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way])
    with updates(way):
        if looked:  # as a loop does to see that the model runs; the loss is thrown away
            for one in (plain, loop):
                loss_of(one.model(batch(0)[0]), batch(0)[1])
                if kind in ("fsdp2", "hsdp"):
                    one.model.reset_iter_state()
        expected = get_optimizer_state_dict(plain.model, plain.optimizer)
        found = get_optimizer_state_dict(loop.model, loop.optimizer)
        require_equal(expected, found, "unstepped")
        assert loop.overlap.step_count == 0
        assert loop.overlap.redo_count == 0
        assert all(p.grad is None for p in loop.model.parameters())
        assert [type(p) for p in loop.model.parameters()] == classes, "somebody still watches the parameters"
        assert [g["lr"] for g in loop.optimizer.param_groups] == [1e-2, 3e-3]
        for i in range(3):
            learn(plain, i, kind)
            learn(loop, i, kind)
        require_same_training(plain, loop, "at the end")
    assert loop.overlap.step_count == 3
    loop.overlap.detach()


@in_each_way
@in_each_kind
def test_the_step_that_makes_state_is_none(two_ranks: RankPool, kind: str, way: str) -> None:
    two_ranks.run(never_stepped, kind, way, False)


# On disk, and loaded by other numbers of ranks.


def written(way: str, directory: str, expected: str) -> None:
    """Saved with the update of the second step still due; all of it, from the plain loop, goes to ``expected``."""
    plain, loop = made("fsdp2"), made("fsdp2")
    with instep.attach(loop.model, loop.optimizer, **WAYS[way]), updates(way):
        for i in range(2):
            loop.learn(i)
            plain.learn(i)
        model, optimizer = get_state_dict(loop.model, loop.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(plain.model, plain.optimizer, options=whole)
    if dist.get_rank() == 0:
        torch.save({"model": model, "optimizer": optimizer}, expected)


def loaded(loop: Loop, directory: str) -> None:
    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(loop.model, loop.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def read_again(kind: str, way: str, directory: str, expected: str) -> None:
    plain, loop = made(kind, seed=1), made(kind, seed=1)
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way])
    with updates(way):
        for one in (plain, loop):
            loaded(one, directory)
        assert loop.overlap.step_count == 0
        whole = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(loop.model, loop.optimizer, options=whole)
        # Each kind of model has its own order.
        found = {"model": model, "optimizer": optimizer}
        require_equal(torch.load(expected), found, f"loaded by {kind}", ordered=False)
        for i in range(2, 5):
            plain.learn(i)
            loop.learn(i)
        require_same_training(plain, loop, "trained on")
    assert loop.overlap.step_count == 3
    loop.overlap.detach()


def read_by_one(way: str, directory: str, expected: str) -> None:
    """On one device, with no process group."""
    loops = []
    for number in range(2):
        torch.manual_seed(1)
        model = Blocks()
        loop = Loop(model, adamw(model))
        loops.append(loop)
        if number:
            loop.overlap = instep.attach(model, loop.optimizer, **WAYS[way])
        loaded(loop, directory)
        found = dict(zip(("model", "optimizer"), get_state_dict(model, loop.optimizer), strict=True))
        require_equal(torch.load(expected), found, "loaded by one process", ordered=False)
        for i in range(3):
            x, y = batch(i)
            loss_of(model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    plain, loop = loops
    assert loop.overlap.step_count == 3
    loop.overlap.detach()
    difference = first_difference(
        parameters_of(plain.model, plain.optimizer), parameters_of(loop.model, loop.optimizer)
    )
    assert difference is None, difference


@on_cpu_only  # torch itself loads counters of steps to another device than it saves them from
@pytest.mark.parametrize("way", ["late", pytest.param("backward", marks=pytest.mark.nightly)])
def test_on_disk_for_other_numbers_of_ranks(
    two_ranks: RankPool, three_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, way: str
) -> None:
    directory, expected = str(tmp_path / "checkpoint"), str(tmp_path / "expected.pt")
    two_ranks.run(written, way, directory, expected)
    two_ranks.run(read_again, "fsdp1", way, directory, expected)
    three_ranks.run(read_again, "fsdp2", way, directory, expected)
    four_ranks.run(read_again, "hsdp", way, directory, expected)
    read_by_one(way, directory, expected)
