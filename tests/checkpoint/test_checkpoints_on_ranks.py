"""Checkpoints of several ranks: saved by some number of them, loaded by another, wrapped and sharded in another way."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import StepMismatchError, TornStepError, UncommittedStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, two_groups
from tests.checkpoint import saved
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, hsdp, loss_of, nested, parameters_of, tp_alone

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
Way = Mapping[str, Any] | None
BACKWARD = {"schedule": "backward"}
FORWARD = {"schedule": "forward", "defer": True}
UNDO = {**BACKWARD, "undo": True}


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model.to(here()), bucket_cap_mb=0.004)


WRAPPED: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "ddp": ddp,
    "replicate": lambda model: instep.replicate(model.to(here())),
    "fsdp2": nested,
    "hsdp": hsdp,
    "tp": tp_alone,
}


def build(kind: str, options: Way = None, seed: int = 0) -> Loop:
    torch.manual_seed(seed)
    model = WRAPPED[kind](Blocks())
    # For loops under tensor parallelism: torch's foreach takes no plain parameters beside sharded ones.
    loop = Loop(model, torch.optim.AdamW(two_groups(model), lr=1e-2, amsgrad=True, foreach=kind != "tp"))
    if options is not None:
        loop.overlap = instep.attach(loop.model, loop.optimizer, **options)
    return loop


def learn(loop: Loop, steps: range, kind: str) -> None:
    for i in steps:
        if kind not in ("tp", "bare"):
            loop.learn(i)
            continue
        x, y = batch(i)  # all ranks see the same data
        loss_of(loop.model(x.to(here())), y.to(here())).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def save(path: Path | str, loop: Loop) -> None:
    saved.save(path, loop.model, loop.optimizer, loop.overlap)


def load(path: Path | str, loop: Loop) -> None:
    saved.load(path, loop.model, loop.optimizer, loop.overlap)


def require_same(first: Loop, then: Loop, when: str) -> None:
    for loop in (first, then):
        if loop.overlap is not None:
            loop.overlap.synchronize()
    difference = first_difference(
        parameters_of(first.model, first.optimizer), parameters_of(then.model, then.optimizer)
    )
    assert difference is None, f"rank {dist.get_rank()}, {when}: {difference}"


def close(*loops: Loop) -> None:
    for loop in loops:
        if loop.overlap is not None:
            loop.overlap.detach()


# The same ranks, interrupted and not.


def resumed(kind: str, options: Way, directory: str) -> None:
    first, then = build(kind, options), build(kind, options, seed=1)
    learn(first, range(2), kind)
    save(directory, first)
    learn(first, range(2, 4), kind)
    if kind == "ddp":  # lays out its buckets anew after its first backward
        learn(then, range(9, 10), kind)
    load(directory, then)
    assert then.overlap is None or then.overlap.step_count == 2
    learn(then, range(2, 4), kind)
    require_same(first, then, "after four steps")
    assert then.overlap is None or then.overlap.step_count == 4
    close(first, then)


RESUMED: list[tuple[str, Way]] = [
    ("ddp", {}),
    ("ddp", BACKWARD),
    ("ddp", FORWARD),
    ("ddp", UNDO),
    ("ddp", {**BACKWARD, "shard_state": True}),
    ("replicate", BACKWARD),
    ("fsdp2", {}),
    ("fsdp2", BACKWARD),
    ("fsdp2", FORWARD),
    ("fsdp2", UNDO),
    ("tp", BACKWARD),
]


@pytest.mark.parametrize(("kind", "options"), RESUMED, ids=str)
def test_a_run_that_goes_on(two_ranks: RankPool, tmp_path: Path, kind: str, options: Way) -> None:
    two_ranks.run(resumed, kind, options, str(tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, BACKWARD], ids=str)
def test_a_run_that_goes_on_on_a_mesh_of_two_dimensions(four_ranks: RankPool, tmp_path: Path, options: Way) -> None:
    four_ranks.run(resumed, "hsdp", options, str(tmp_path))


# Other numbers of ranks, and other ways to spread.


def full(loop: Loop) -> dict[str, Any]:
    """All of parameters and state, on every rank, and the number of steps."""
    found: dict[str, Any] = {"steps": loop.overlap.step_count}
    for name, value in training_state(loop.model, loop.optimizer):
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if isinstance(value, DTensor) else value
            value = value.clone().cpu()
        found[name.replace("'module.", "'")] = value
    return found


def passed_on(kind: str, steps: range, options: Way, before: str | None, directory: str) -> dict[str, Any]:
    """Go on from the checkpoint ``before``, and save."""
    loop = build(kind, options, seed=len(steps))
    if before is not None:
        load(before, loop)
    loaded = full(loop)
    learn(loop, steps, kind)
    save(directory, loop)
    close(loop)
    return {"loaded": loaded, "saved": full(loop)}


def test_shards_of_two_ranks_three_and_one(two_ranks: RankPool, three_ranks: RankPool, tmp_path: Path) -> None:
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    by_two = two_ranks.run(passed_on, "fsdp2", range(2), BACKWARD, None, two)
    by_three = three_ranks.run(passed_on, "fsdp2", range(2, 4), BACKWARD, two, three)
    alone = passed_on("bare", range(4, 6), BACKWARD, three, one)
    again = two_ranks.run(passed_on, "ddp", range(6, 8), FORWARD, one, str(tmp_path / "again"))
    for before, after in [(by_two[0], by_three), (by_three[0], [alone]), (alone, again)]:
        for rank in after:
            assert first_difference(iter(before["saved"].items()), iter(rank["loaded"].items())) is None
    assert again[0]["saved"]["steps"] == 8


# Ranks that stand at different points of a step.


def step_on_one(loop: Loop) -> list[str]:
    """What ``step()`` raises where it waits for the other rank."""
    loop.backward(1)
    if dist.get_rank() != 1:
        return []
    try:
        loop.optimizer.step()
    except StepMismatchError as error:
        return [type(error).__name__]
    finally:
        loop.optimizer.zero_grad()
    return []


def by_dcp(path: str) -> tuple[Callable[[Loop], object], Callable[[Loop], object]]:
    return partial(save, path), partial(load, path)


def by_torch(path: str) -> tuple[Callable[[Loop], object], Callable[[Loop], object]]:
    """Each rank has a file, and no step is given up before it is read."""
    file = f"{path}/{dist.get_rank()}"

    def to_file(loop: Loop) -> None:
        torch.save([one.state_dict() for one in (loop.model, loop.optimizer, loop.overlap)], file)

    def from_file(loop: Loop) -> None:
        for one, state in zip((loop.overlap, loop.model, loop.optimizer), _last_first(torch.load(file)), strict=True):
            one.load_state_dict(state)

    return to_file, from_file


def _last_first(states: list[Any]) -> list[Any]:
    return [states[-1], *states[:-1]]


def left_out(options: Mapping[str, Any], by: Callable[[str], Any], directory: str) -> list[str]:
    """Rank 0 has not called ``optimizer.step()``, and wants to save; and loads, which is the way back."""
    first, loop = build("ddp", options), build("ddp", options)
    to_file, from_file = by(directory)
    for one in (first, loop):
        learn(one, range(1), "ddp")
    loop.overlap.require_committed()
    to_file(loop)
    told = step_on_one(loop)
    try:
        loop.overlap.require_committed()
    except (StepMismatchError, TornStepError, UncommittedStepError) as error:
        told.append(type(error).__name__)
    from_file(loop)
    for one in (first, loop):
        learn(one, range(1, 3), "ddp")
    require_same(first, loop, "after the checkpoint")
    assert loop.overlap.step_count == 3
    close(first, loop)
    return told


@pytest.mark.parametrize("by", [by_dcp, by_torch], ids=lambda by: by.__name__)
@pytest.mark.parametrize("options", [BACKWARD, UNDO, FORWARD, {}], ids=str)
def test_a_step_that_one_rank_has_left_out(tmp_path: Path, options: Mapping[str, Any], by: Any) -> None:
    pool = RankPool(2, group_seconds=10)
    try:
        for told in pool.run(left_out, options, by, str(tmp_path)):
            # The default asks no other rank, as the plain loop.
            assert bool(told) == bool(options)
    finally:
        pool.stop()


def loaded_at_once(options: Mapping[str, Any], by: Callable[[str], Any], directory: str) -> int:
    """The same, and nothing but the load after it: the step of rank 0 was never asked for."""
    loop = build("ddp", options)
    to_file, from_file = by(directory)
    learn(loop, range(1), "ddp")
    to_file(loop)
    step_on_one(loop)
    from_file(loop)
    learn(loop, range(1, 3), "ddp")
    loop.overlap.require_committed()
    found = int(loop.overlap.step_count)
    close(loop)
    return found


@pytest.mark.parametrize("by", [by_dcp, by_torch], ids=lambda by: by.__name__)
@pytest.mark.parametrize("options", [BACKWARD, UNDO, FORWARD, {}], ids=str)
def test_a_load_at_once_after_a_step_that_one_rank_has_left_out(
    tmp_path: Path, options: Mapping[str, Any], by: Any
) -> None:
    pool = RankPool(2, group_seconds=10)
    try:
        assert pool.run(loaded_at_once, options, by, str(tmp_path)) == [3, 3]
    finally:
        pool.stop()


def accepted_without_the_count(options: Mapping[str, Any]) -> list[int]:
    """Rank 1 has taken a step that rank 0 has not; both load the model and the optimizer alone."""
    first, loop = build("ddp", options), build("ddp", options)
    for one in (first, loop):
        learn(one, range(1), "ddp")
    loop.overlap.require_committed()
    states = copy.deepcopy([loop.model.state_dict(), loop.optimizer.state_dict()])
    step_on_one(loop)
    loop.overlap.accept_torn()
    loop.model.load_state_dict(states[0])
    loop.optimizer.load_state_dict(states[1])
    for one in (first, loop):
        learn(one, range(1, 3), "ddp")
    loop.overlap.require_committed()
    require_same(first, loop, "after what was loaded")
    count = loop.overlap.step_count
    close(first, loop)
    return [count]


@pytest.mark.parametrize("options", [BACKWARD, UNDO, FORWARD], ids=str)
def test_ranks_that_accept_unequally_many_steps_go_on_from_one_count(options: Mapping[str, Any]) -> None:
    pool = RankPool(2, group_seconds=10)
    try:
        one, other = pool.run(accepted_without_the_count, options)
        assert one == other
    finally:
        pool.stop()


# A save beside training.


def beside(options: Way, directory: str) -> None:
    """Waited for before the next backward: that steps."""
    first, then = build("fsdp2", options), build("fsdp2", options, seed=1)
    learn(first, range(2), "fsdp2")
    first.overlap.require_committed()
    group: Any = dist.new_group(backend="gloo")
    done: Any = dcp.async_save(
        saved.parts(first.model, first.optimizer, first.overlap), checkpoint_id=directory, process_group=group
    )
    loss = first.loss(2)
    done.result()
    loss.backward()
    first.optimizer.step()
    first.optimizer.zero_grad()
    load(directory, then)
    learn(then, range(2, 3), "fsdp2")
    require_same(first, then, "after the step beside")
    close(first, then)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("options", [BACKWARD, {}], ids=str)
def test_a_save_beside_training_of_shards(two_ranks: RankPool, tmp_path: Path, options: Way) -> None:
    two_ranks.run(beside, options, str(tmp_path))
