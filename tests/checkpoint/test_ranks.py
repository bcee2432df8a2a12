"""Checkpoints of several ranks: saved by some number of them, loaded by another, wrapped and sharded in another way."""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import CheckpointError, DamagedCheckpointError, InstepError, StepMismatchError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, two_groups
from tests.checkpoint.loops import adamw, everything, load_from, require_same
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop, hsdp, loss_of, nested, parameters_of, tp_alone

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model.to(here()), bucket_cap_mb=0.004)


def bare(model: nn.Module) -> nn.Module:
    return model


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(two_groups(model), lr=1e-2, foreach=False)


class RowScaled(torch.optim.Optimizer):
    """State of another shape than the parameters', whole on each rank: a DTensor where they are DTensors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    now = p.grad.square().mean(-1, keepdim=True)
                    if isinstance(now, DTensor):
                        now = now.redistribute(placements=[Replicate()] * now.device_mesh.ndim)
                    rows = self.state[p].setdefault("rows", torch.zeros_like(now))
                    rows.mul_(0.9).add_(now, alpha=0.1)
                    p.addcdiv_(p.grad, rows.sqrt().add_(1e-3), value=-group["lr"])


def row_scaled(model: nn.Module) -> torch.optim.Optimizer:
    return RowScaled(two_groups(model), lr=1e-2)


def for_loop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, foreach=False)


WRAPPED: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "bare": bare,
    "ddp": ddp,
    "replicate": lambda model: instep.replicate(model.to(here())),
    "fsdp2": nested,
    "hsdp": hsdp,
    "tp": tp_alone,
}
OPTIMIZERS = {"adamw": adamw, "adafactor": adafactor, "for-loop": for_loop, "row-scaled": row_scaled}
Way = Mapping[str, Any] | None


def build(kind: str, optimizer: str = "adamw", seed: int = 0, options: Way = None) -> Loop:
    torch.manual_seed(seed)
    model = WRAPPED[kind](Blocks())
    loop = Loop(model, OPTIMIZERS[optimizer](model))
    if options is not None:
        loop.overlap = instep.attach(loop.model, loop.optimizer, **options)
    return loop


def learn(loop: Loop, steps: range, kind: str = "") -> None:
    for i in steps:
        if kind in ("tp", "bare"):  # all ranks see the same data
            x, y = batch(i)
            loss_of(loop.model(x.to(here())), y.to(here())).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        else:
            loop.learn(i)


def full(loop: Loop) -> dict[str, Any]:
    """All of parameters and state, on every rank."""
    found = {}
    for name, value in training_state(loop.model, loop.optimizer):
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if isinstance(value, DTensor) else value
            value = value.clone().cpu()
        found[name.replace("'module.", "'").replace("_orig_mod.", "")] = value
    return found


def close(*loops: Loop) -> None:
    for loop in loops:
        if loop.overlap is not None:
            loop.overlap.detach()


# The same ranks, interrupted and not.


def resumed(kind: str, optimizer: str, options: Way, directory: str) -> None:
    step: dict[str, Any] = {"step": 2} if options is None else {}
    first = build(kind, optimizer, 0, options)
    learn(first, range(2), kind)
    extra: dict[str, Any] = {"rank": dist.get_rank(), "rng": torch.get_rng_state()}
    path = instep.save(directory, first.model, first.optimizer, extra=extra, **step)
    learn(first, range(2, 4), kind)
    then = build(kind, optimizer, 1, options)
    found = load_from(directory, then.model, then.optimizer)
    assert (found.step, found.world_size, found.path) == (2, dist.get_world_size(), path)
    assert found.extra["rank"] == dist.get_rank()
    assert torch.equal(found.extra["rng"], extra["rng"])
    learn(then, range(2, 4), kind)
    for loop in (first, then):
        if loop.overlap is not None:
            loop.overlap.synchronize()
            assert loop.overlap.step_count == 4
    difference = first_difference(
        parameters_of(first.model, first.optimizer), parameters_of(then.model, then.optimizer)
    )
    assert difference is None, f"rank {dist.get_rank()}: {difference}"
    close(first, then)


BACKWARD = {"schedule": "backward"}
ZERO = {**BACKWARD, "shard_state": True}
RESUMED: list[tuple[str, str, Way]] = [
    ("ddp", "adamw", None),
    ("ddp", "adamw", BACKWARD),
    ("ddp", "adafactor", {"schedule": "forward", "defer": True}),
    ("ddp", "adamw", {"schedule": "backward", "undo": True}),
    ("replicate", "adamw", BACKWARD),
    ("fsdp2", "adamw", None),
    ("fsdp2", "adamw", BACKWARD),
    ("fsdp2", "row-scaled", {"schedule": "forward", "defer": True}),
    ("fsdp2", "row-scaled", None),
    ("fsdp2", "adamw", {"schedule": "backward", "undo": True}),
    ("ddp", "for-loop", ZERO),
    ("ddp", "adafactor", ZERO),
    ("ddp", "for-loop", {**ZERO, "schedule": "forward", "defer": True}),
    ("tp", "for-loop", None),
    ("tp", "for-loop", BACKWARD),
]


@pytest.mark.parametrize(("kind", "optimizer", "options"), RESUMED, ids=str)
def test_resumed_training(two_ranks: RankPool, tmp_path: Path, kind: str, optimizer: str, options: Way) -> None:
    two_ranks.run(resumed, kind, optimizer, options, str(tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("options", [None, BACKWARD], ids=str)
def test_resumed_training_on_a_mesh_of_two_dimensions(four_ranks: RankPool, tmp_path: Path, options: Way) -> None:
    four_ranks.run(resumed, "hsdp", "adamw", options, str(tmp_path))
    assert sorted(p.name for p in next(tmp_path.iterdir()).iterdir()) == [
        "manifest.json",
        "manifest.json.sha256",
        *(f"rank-{rank:05d}.safetensors" for rank in range(4)),  # two of them have extra alone
    ]


# Other numbers of ranks, and other ways to spread.


def saved(kind: str, optimizer: str, options: Way, directory: str, expected: str) -> None:
    """All that is saved goes to the file ``expected``, too, by torch itself."""
    loop = build(kind, optimizer, 0, options)
    learn(loop, range(2), kind)
    instep.save(directory, loop.model, loop.optimizer, step=2, extra=dist.get_rank())
    if options and options.get("shard_state"):
        loop.overlap.detach()
    found = full(loop)
    if dist.get_rank() == 0:
        torch.save(found, expected)
    close(loop)


def loaded(kind: str, optimizer: str, options: Way, directory: str, expected: str, world_size: int) -> None:
    loop = build(kind, optimizer, 1, options)
    found = load_from(directory, loop.model, loop.optimizer)
    assert found.world_size == world_size
    assert found.extra == (dist.get_rank() if dist.get_rank() < world_size else 0)
    if options and options.get("shard_state"):
        loop.overlap.detach()
        loop.overlap = None
    difference = first_difference(iter(torch.load(expected).items()), iter(full(loop).items()))
    assert difference is None, f"rank {dist.get_rank()}: {difference}"
    learn(loop, range(2, 4), kind)  # what was loaded can be trained
    close(loop)


def alone(optimizer: str, directory: str, expected: str, world_size: int) -> None:
    """In one process, without a process group."""
    loop = build("bare", optimizer, 1)
    assert load_from(directory, loop.model, loop.optimizer).world_size == world_size
    difference = first_difference(iter(torch.load(expected).items()), iter(full(loop).items()))
    assert difference is None, difference
    learn(loop, range(2, 4), "bare")


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("row-scaled", marks=pytest.mark.nightly)])
def test_saved_by_two_and_loaded_by_other_numbers(
    two_ranks: RankPool, three_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, optimizer: str
) -> None:
    expected = str(tmp_path / "expected")
    two_ranks.run(saved, "fsdp2", optimizer, BACKWARD, str(tmp_path), expected)
    alone(optimizer, str(tmp_path), expected, 2)
    three_ranks.run(loaded, "fsdp2", optimizer, BACKWARD, str(tmp_path), expected, 2)
    three_ranks.run(loaded, "ddp", optimizer, None, str(tmp_path), expected, 2)
    four_ranks.run(loaded, "fsdp2", optimizer, None, str(tmp_path), expected, 2)
    four_ranks.run(loaded, "hsdp", optimizer, BACKWARD, str(tmp_path), expected, 2)
    two_ranks.run(loaded, "ddp", optimizer, ZERO, str(tmp_path), expected, 2)


@pytest.mark.parametrize("optimizer", ["for-loop", "adafactor"])
def test_shard_state_to_other_numbers(
    two_ranks: RankPool, three_ranks: RankPool, tmp_path: Path, optimizer: str
) -> None:
    expected = str(tmp_path / "expected")
    three_ranks.run(saved, "ddp", optimizer, ZERO, str(tmp_path), expected)
    alone(optimizer, str(tmp_path), expected, 3)
    two_ranks.run(loaded, "ddp", optimizer, ZERO, str(tmp_path), expected, 3)
    if optimizer != "adafactor":  # torch's does not run on DTensors
        three_ranks.run(loaded, "fsdp2", optimizer, BACKWARD, str(tmp_path), expected, 3)


def test_two_dimensions_to_one_and_back(two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path) -> None:
    expected = str(tmp_path / "expected")
    four_ranks.run(saved, "hsdp", "for-loop", None, str(tmp_path), expected)
    alone("for-loop", str(tmp_path), expected, 4)
    two_ranks.run(loaded, "tp", "for-loop", None, str(tmp_path), expected, 4)
    two_ranks.run(saved, "tp", "for-loop", BACKWARD, str(tmp_path / "tp"), expected)
    four_ranks.run(loaded, "hsdp", "for-loop", None, str(tmp_path / "tp"), expected, 2)


def test_from_one_process_to_shards(three_ranks: RankPool, tmp_path: Path) -> None:
    for optimizer in ("adamw", "row-scaled"):
        loop = build("bare", optimizer)
        learn(loop, range(2), "bare")
        instep.save(tmp_path / optimizer, loop.model, loop.optimizer, step=2, extra=0)
        torch.save(full(loop), tmp_path / "expected")
        three_ranks.run(loaded, "fsdp2", optimizer, BACKWARD, str(tmp_path / optimizer), str(tmp_path / "expected"), 1)


# What goes wrong on one rank.


def fails_on_one(directory: str, what: str) -> None:
    rank = dist.get_rank()
    loop = build("fsdp2", options=BACKWARD)
    learn(loop, range(2))
    instep.save(directory, loop.model, loop.optimizer)
    learn(loop, range(2, 3))
    calls = {"write": "os.write", "flush": "os.fsync", "rename": "os.rename"}
    failing: Any = OSError(28, "No space left on device")
    where = 0 if what == "rename" else 1
    with (
        patch(calls[what], side_effect=failing) if rank == where else nullcontext(),
        pytest.raises(CheckpointError, match=f"rank {where}: .*No space left on device"),
    ):
        instep.save(directory, loop.model, loop.optimizer)
    dist.barrier()
    assert [p.name for p in Path(directory).iterdir()] == ["step-000000000002"]
    learn(loop, range(3, 4))
    instep.save(directory, loop.model, loop.optimizer)
    assert load_from(directory, loop.model, loop.optimizer).step == 4
    close(loop)


@pytest.mark.parametrize("what", ["write", "flush", "rename"])
def test_a_full_disk_of_one_rank(two_ranks: RankPool, tmp_path: Path, what: str) -> None:
    two_ranks.run(fails_on_one, str(tmp_path), what)


def refused_together(directory: str) -> None:
    """Each on all ranks, and without waiting for anybody."""
    rank = dist.get_rank()
    loop = build("ddp", options=BACKWARD)
    model, optimizer = loop.model, loop.optimizer
    with pytest.raises(CheckpointError, match="'step' is 0 on the one and 1 on the other"):
        instep.save(directory, model, optimizer, step=rank)
    optimizer.param_groups[0]["lr"] += rank
    with pytest.raises(CheckpointError, match="ranks 0 and 1 do not save the same"):
        instep.save(directory, model, optimizer, step=1)
    optimizer.param_groups[0]["lr"] = 1e-2
    with pytest.raises(CheckpointError, match=r"extra\['x'\] is a builtins\.object"):
        instep.save(directory, model, optimizer, step=1, extra={"x": object()} if rank == 1 else None)
    spread = next(build("fsdp2").model.parameters())
    with pytest.raises(CheckpointError, match="extra is a DTensor"):
        instep.save(directory, model, optimizer, step=1, extra=spread)
    assert not Path(directory).exists() or os.listdir(directory) == []
    dist.barrier()
    instep.save(directory, model, optimizer, step=1)
    before = list(everything(model.module, optimizer))
    other = nn.Linear(2, 2)
    one = (other, torch.optim.SGD(other.parameters(), lr=0.1)) if rank == 1 else (model, optimizer)
    with pytest.raises(CheckpointError, match="is of another model"):
        instep.load(directory, *one)
    require_same(before, (model.module, optimizer), "a load that failed on another rank")
    dist.barrier()
    if rank == 0:
        file = next(Path(directory).iterdir()) / "rank-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises(DamagedCheckpointError, match="is not what was saved"):
        instep.load(directory, model, optimizer)
    require_same(before, (model.module, optimizer), "a load that one rank found damaged")
    close(loop)


def test_what_one_rank_refuses_all_refuse(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(refused_together, str(tmp_path / "checkpoints"))


def not_shared(directory: str) -> None:
    loop = build("fsdp2")
    with pytest.raises(CheckpointError, match="must be on a file system that all ranks share"):
        instep.save(Path(directory) / str(dist.get_rank()), loop.model, loop.optimizer, step=1)


def test_a_directory_of_each_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(not_shared, str(tmp_path))


def fsdp1_refused(directory: str) -> None:
    model = FullyShardedDataParallel(Blocks(), use_orig_params=True, device_id=here())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (partial(instep.save, step=1), instep.load):
        with pytest.raises(CheckpointError, match="Use fully_shard"):
            call(directory, model, optimizer)


def test_fsdp1_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(fsdp1_refused, str(tmp_path))


# Ranks that stand at different points of a step, which wait for one another's votes on it.


def step_on_one(loop: Loop) -> None:
    loop.backward(1)
    if dist.get_rank() == 1:
        with suppress(StepMismatchError):  # where the step waits for the other rank
            loop.optimizer.step()
        loop.optimizer.zero_grad()


def left_out(options: Mapping[str, Any], directory: str) -> list[str]:
    """Rank 0 has not called ``optimizer.step()``, and saves; and loads, which is the way back."""
    loop = build("ddp", options=options)
    learn(loop, range(1))
    instep.save(directory, loop.model, loop.optimizer)
    expected = list(everything(loop.model, loop.optimizer))
    step_on_one(loop)
    told = []
    try:
        instep.save(directory, loop.model, loop.optimizer)
    except InstepError as error:
        told.append(type(error).__name__)
    load_from(directory, loop.model, loop.optimizer)
    require_same(expected, (loop.model, loop.optimizer), "loaded")
    learn(loop, range(1, 3))
    loop.overlap.synchronize()
    told.append(f"{loop.overlap.step_count} steps")
    close(loop)
    return told


def loaded_only(options: Mapping[str, Any], directory: str) -> int:
    """The same, and nothing but ``load`` after it."""
    loop = build("ddp", options=options)
    learn(loop, range(1))
    instep.save(directory, loop.model, loop.optimizer)
    step_on_one(loop)
    load_from(directory, loop.model, loop.optimizer)
    learn(loop, range(1, 3))
    loop.overlap.synchronize()
    found = int(loop.overlap.step_count)
    close(loop)
    return found


WAITING = [BACKWARD, {**BACKWARD, "undo": True}, {"schedule": "forward", "defer": True}, {}]


@pytest.mark.parametrize("options", WAITING, ids=str)
def test_a_step_that_one_rank_has_left_out(tmp_path: Path, options: Mapping[str, Any]) -> None:
    pool = RankPool(2, group_seconds=10)
    try:
        assert pool.run(loaded_only, options, str(tmp_path / "loaded")) == [3, 3]
        for *told, steps in pool.run(left_out, options, str(tmp_path / "saved")):
            assert steps == "3 steps"
            # Where optimizer.step() raises before it writes, both ranks are at the same step, which may be saved.
            assert len(told) == ("defer" not in options)
    finally:
        pool.stop()
