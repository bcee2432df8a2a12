"""Every rank of a step hears what any of them decides, and ranks that train in different ways say so before they do."""

import copyreg
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

import instep
from instep._ranks import comparison, step_ranks
from instep._ranks.comparison import Comparison
from instep._ranks.process_groups import store_of_world
from instep._ranks.step_ranks import StepRanks, neighbours_of
from instep.errors import InstepError, NonFiniteGradientError, StepMismatchError, TornStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.distributed.sharded import apart, hsdp, mesh, nested, three_d, two_d
from tests.parity.interrupts import once
from tests.parity.lockstep import WAYS

DEFAULT: dict[str, Any] = {}
MESHES: dict[str, Callable[[nn.Module], nn.Module]] = {"2d": two_d, "hsdp": hsdp, "apart": apart, "3d": three_d}


class Fails(torch.optim.AdamW):
    """Its update raises on some ranks."""

    failing: tuple[int, ...] = ()

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() in self.failing and any(p.grad is not None for g in self.param_groups for p in g["params"]):
            Fails.failing = ()
            raise MemoryError("the update")
        return super().step(closure)


def made(wrap: Callable[[nn.Module], nn.Module]) -> tuple[Any, Fails]:
    torch.manual_seed(0)
    model = wrap(Blocks())
    return model, Fails(model.parameters(), lr=1e-2)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.004, gradient_as_bucket_view=True)


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    """Of the same data on all ranks: tensor parallelism wants that."""
    x, y = batch(i)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def error_of(do: Callable[[], Any]) -> BaseException | None:
    try:
        do()
    except (InstepError, MemoryError) as error:
        return error
    return None


# Meshes of two and three dimensions.


def poison(optimizer: torch.optim.Optimizer) -> None:
    """A NaN in what this rank holds of one gradient."""
    gradient = next(p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None)
    getattr(gradient, "_local_tensor", gradient).view(-1)[:1].fill_(torch.nan)


def nonfinite_on_one_rank(shape: str, options: Mapping[str, Any], rank: int) -> tuple[str, int, int]:
    """What this rank does of a step in whose gradients one rank has a NaN, with the weights of the loop by hand."""
    loops = [made(MESHES[shape]) for _ in range(2)]
    raised = "nothing"
    with instep.attach(*loops[1], **options) as overlap:
        for i in range(3):
            for model, optimizer in loops:
                x, y = batch(i)
                nn.functional.cross_entropy(model(x), y).backward()
                if i == 1 and model is loops[0][0]:
                    optimizer.zero_grad()  # the loop by hand leaves this step out on all ranks
                    continue
                if i == 1 and dist.get_rank() == rank:
                    poison(optimizer)
                error = error_of(optimizer.step)
                raised = raised if error is None else type(error).__name__
                optimizer.zero_grad()
        overlap.synchronize()
        states = [training_state(model, optimizer) for model, optimizer in loops]
        assert first_difference(*states) is None, first_difference(*states)
        return raised, overlap.step_count, overlap.skip_count


NONFINITE_WAYS = {"default": DEFAULT, "forward": WAYS["forward"], "undo": WAYS["undo"]}


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("way", list(NONFINITE_WAYS))
@pytest.mark.parametrize("shape", ["2d", "hsdp", "apart"])
def test_a_nan_on_one_of_four_ranks(four_ranks: RankPool, shape: str, way: str, policy: str, rank: int) -> None:
    options = {**NONFINITE_WAYS[way], "nonfinite": policy}
    expected = ("nothing", 2, 1) if policy == "skip" else ("NonFiniteGradientError", 2, 0)
    assert four_ranks.run(nonfinite_on_one_rank, shape, options, rank) == [expected] * 4
    assert issubclass(NonFiniteGradientError, InstepError)


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("way", list(NONFINITE_WAYS))
def test_a_nan_on_one_of_eight_ranks(eight_ranks: RankPool, way: str, policy: str) -> None:
    options = {**NONFINITE_WAYS[way], "nonfinite": policy}
    expected = ("nothing", 2, 1) if policy == "skip" else ("NonFiniteGradientError", 2, 0)
    assert eight_ranks.run(nonfinite_on_one_rank, "3d", options, 7) == [expected] * 8


def failing_on_one_rank(shape: str, rank: int) -> list[str]:
    """The last error that this rank meets, after an update that has raised on one rank."""
    model, optimizer = made(MESHES[shape])
    overlap = instep.attach(model, optimizer, schedule="backward")
    for i in range(2):
        iterate(model, optimizer, i)
    overlap.synchronize()
    Fails.failing = (rank,)
    found = []
    for do in (functools.partial(iterate, model, optimizer, 2), overlap.synchronize):
        error = error_of(do)
        found += [] if error is None else [type(error).__name__]
    Fails.failing = ()
    found += [] if (error := error_of(overlap.require_committed)) is None else [type(error).__name__]
    overlap.detach()
    return found[-1:]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("shape", ["2d", "hsdp"])
def test_an_update_that_raises_on_one_of_four_ranks(four_ranks: RankPool, shape: str, rank: int) -> None:
    try:
        assert four_ranks.run(failing_on_one_rank, shape, rank) == [["TornStepError"]] * 4
    finally:
        four_ranks.stop()  # the failing rank has voted less often than the others


def hybrid(model: nn.Module) -> nn.Module:
    """FSDP1 keeps one of its two process groups where nobody is told of it."""
    strategy = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(
        model, device_mesh=mesh(2, 2), sharding_strategy=strategy, device_id=here(), use_orig_params=True
    )


def test_neighbours(four_ranks: RankPool) -> None:
    for shape, known in {"2d": True, "hsdp": True, "apart": False, "hybrid": False}.items():
        assert four_ranks.run(knows_all, shape) == [(known, [0, 1, 2, 3])] * 4


def knows_all(shape: str) -> tuple[bool, list[int]]:
    """Whether one mesh has all ranks, and which ranks those are that this one has asked in the end."""
    model, _ = made({**MESHES, "hybrid": hybrid}[shape])
    neighbours = neighbours_of(FullyShardedDataParallel.fsdp_modules(model), model.parameters())
    assert neighbours is not None
    ranks = StepRanks(neighbours, [{}, {}], shape, waits=True, matters=True)
    ranks.meet()
    assert ranks.mismatch is None
    return neighbours.are_all, list(ranks._ranks or ())


# DDP's join().


def after_join(options: Mapping[str, Any], fault: str | None) -> tuple[int, list[str], int]:
    """Steps up to the end of ``join()``, errors of the iterations after it, and steps in the end.

    Args:
        fault: of rank 0, after ``join()``: its update raises, or it leaves a step out.
    """
    model, optimizer = made(ddp)
    with instep.attach(model, optimizer, **options) as overlap:
        with model.join():
            for i in range(2 + 2 * dist.get_rank()):
                iterate(model, optimizer, i)
        overlap.synchronize()
        joined, errors = overlap.step_count, []
        Fails.failing = (0,) if fault == "update" else ()
        for i in range(3):
            if i == 0 and fault == "left out" and dist.get_rank() == 0:
                x, y = batch(i)
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.zero_grad()
                continue
            error = error_of(functools.partial(iterate, model, optimizer, i))
            if error is not None:
                errors.append(type(error).__name__)
                break
        error = error_of(overlap.synchronize)
        errors += [] if error is None or errors else [type(error).__name__]
        Fails.failing = ()
        return joined, errors, overlap.step_count


JOIN_WAYS: dict[str, Mapping[str, Any]] = {
    **{way: WAYS[way] for way in ("backward", "forward", "undo")},
    "default": DEFAULT,
    "skip": {"nonfinite": "skip"},
    "forward, skip": {**WAYS["forward"], "nonfinite": "skip"},
    "undo, skip": {**WAYS["undo"], "nonfinite": "skip"},
    "undo, raise": {**WAYS["undo"], "nonfinite": "raise"},
}


@pytest.mark.parametrize("way", list(JOIN_WAYS))
def test_ranks_go_on_after_join(three_ranks: RankPool, way: str) -> None:
    """They have taken unequally many steps in it, and agree on each one that follows."""
    expected: list[Any] = [(2 + 2 * rank, [], 5 + 2 * rank) for rank in range(3)]
    assert three_ranks.run(after_join, JOIN_WAYS[way], None) == expected


def test_an_update_that_raises_after_join(two_ranks: RankPool) -> None:
    try:
        (_, own, _), (_, heard, _) = two_ranks.run(after_join, JOIN_WAYS["backward"], "update")
    finally:
        two_ranks.stop()  # the failing rank has voted less often than the other
    assert own == ["MemoryError"]
    assert heard == ["TornStepError"]


@pytest.mark.parametrize("way", ["forward", "undo", "skip"])
def test_a_step_that_is_left_out_after_join(two_ranks: RankPool, way: str) -> None:
    try:
        answers = two_ranks.run(after_join, JOIN_WAYS[way], "left out")
    finally:
        two_ranks.stop()
    assert [errors for _, errors, _ in answers] == [["StepMismatchError"]] * 2


def nonfinite_in_join(options: Mapping[str, Any]) -> tuple[int, int]:
    """Rank 0 has joined while rank 2 finds a NaN: 1 and 2 leave the step out."""
    model, optimizer = made(ddp)
    with instep.attach(model, optimizer, **options) as overlap:
        with model.join():
            for i in range(1 + 2 * dist.get_rank()):
                x, y = batch(i)
                nn.functional.cross_entropy(model(x), y).backward()
                if i == 2 and dist.get_rank() == 2:
                    poison(optimizer)
                optimizer.step()
                optimizer.zero_grad()
        return overlap.step_count, overlap.skip_count


@pytest.mark.parametrize("way", ["skip", "forward, skip", "undo, skip"])
def test_ranks_that_have_data_agree_in_join(three_ranks: RankPool, way: str) -> None:
    assert three_ranks.run(nonfinite_in_join, JOIN_WAYS[way]) == [(1, 0), (2, 1), (4, 1)]


def joined_between_micro_batches(options: Mapping[str, Any]) -> list[int]:
    """Steps taken in each loop, one by hand; rank 0 has no data at all."""
    loops = [made(with_a_buffer) for _ in range(2)]
    overlap = instep.attach(*loops[1], accumulation_steps=2, **options)
    steps = [0, 0]
    for number, (model, optimizer) in enumerate(loops):
        with model.join():
            for i in range(4 * dist.get_rank()):
                x, y = batch(i)
                with model.no_sync() if i % 2 == 0 and number == 0 else nullcontext():
                    nn.functional.cross_entropy(model(x), y).backward()
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    steps[number] += 1
    overlap.synchronize()
    states = [training_state(model, optimizer) for model, optimizer in loops]
    assert dist.get_rank() == 0 or first_difference(*states) is None
    overlap.detach()
    return steps


@pytest.mark.parametrize("way", ["default", "forward", "undo"])
def test_a_rank_without_data_counts_no_micro_batches(two_ranks: RankPool, way: str) -> None:
    """The others wait for it where their first forward begins: it says what it trains where ``join()`` begins."""
    assert two_ranks.run(joined_between_micro_batches, JOIN_WAYS[way]) == [[0, 0], [2, 2]]


def with_a_buffer(model: nn.Module) -> nn.Module:
    model.register_buffer("seen", torch.zeros(1))
    return ddp(model)


def joined_without_data(options: Mapping[str, Any]) -> int:
    """Rank 0 has no data at all: the others meet it in its ``join()``, in their second backward, which reduces. In each
    forward they send it their buffers."""
    model, optimizer = made(with_a_buffer)
    with instep.attach(model, optimizer, **options) as overlap:
        with model.join():
            for i in range(4 * dist.get_rank()):
                x, y = batch(i)
                if i % 2 == 0:
                    with model.no_sync():
                        nn.functional.cross_entropy(model(x), y).backward()
                else:
                    iterate(model, optimizer, i)
        iterate(model, optimizer, 9)
        overlap.synchronize()
        return overlap.step_count


@pytest.mark.parametrize("way", ["forward", "undo", "skip", "undo, skip"])
def test_a_rank_without_data(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(joined_without_data, JOIN_WAYS[way]) == [1, 3]


def copied_in_join() -> tuple[bool, bool]:
    """What DDP is asked for in ``join()`` belongs to this instance: copies do without, and so does it once detached."""
    model, optimizer = made(ddp)
    overlap = instep.attach(model, optimizer, schedule="backward")
    pickled: Any = copyreg.dispatch_table[type(model)](model)
    state, here = pickled[2], "join_hook" in vars(model)
    overlap.detach()
    return here and "join_hook" not in state, "join_hook" not in vars(model)


def test_copies_have_a_plain_join(two_ranks: RankPool) -> None:
    assert two_ranks.run(copied_in_join) == [(True, True)] * 2


# Options and parameters that differ.


def never(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError("ranks that differ reduce as torch does")


BACKWARD: dict[str, Any] = {"schedule": "backward"}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
# What rank 0 is given, what the others are, and the option that differs.
DIFFERING: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "clip": ({"clip": instep.ClipNorm(1.0)}, {}, "clip is ClipNorm(max_norm=1.0"),
    "value": ({}, {"clip": instep.ClipValue(0.1)}, "clip is None on rank 0 and ClipValue(clip_value=0.1) on rank 1"),
    "seed": ({"random": "keyed", "seed": 1}, {"random": "keyed", "seed": 2}, "seed is 1 on rank 0 and 2 on rank 1"),
    "seed in backward": (
        {"random": "keyed", "seed": 1, **BACKWARD},
        {"random": "keyed", "seed": 2, **BACKWARD},
        "seed is 1 on rank 0 and 2 on rank 1",
    ),
    "schedule": (BACKWARD, {}, "schedule is 'backward' on rank 0 and 'forward' on rank 1"),
    "defer": ({"defer": True}, BACKWARD, "defer is True on rank 0 and 'auto' on rank 1"),
    "undo": ({"undo": True, **BACKWARD}, BACKWARD, "undo is True on rank 0 and False on rank 1"),
    "nonfinite": ({}, {"nonfinite": "skip"}, "nonfinite is 'allow' on rank 0 and 'skip' on rank 1"),
    "micro-batches": ({"accumulation_steps": 2}, {}, "accumulation_steps is 2 on rank 0 and 1 on rank 1"),
    "precision": ({"mixed_precision": BF16}, {}, "mixed_precision is MixedPrecisionPolicy("),
    "precision in backward": ({"mixed_precision": BF16, **BACKWARD}, BACKWARD, "mixed_precision is Mixed"),
    "hook": ({"comm_hook": (None, never)}, {}, "comm_hook is (NoneType, tests.distributed.test_step_ranks.never)"),
    "hook in backward": ({"comm_hook": (None, never), **BACKWARD}, BACKWARD, "comm_hook is (NoneType, tests."),
    "shards": ({"shard_state": True}, {}, "shard_state is True on rank 0 and False on rank 1"),
    "shards in backward": ({"shard_state": True, **BACKWARD}, BACKWARD, "shard_state is True on rank 0"),
    "disabled": ({}, {"disabled": True}, "INSTEP_DISABLE is not set on rank 0 and set on rank 1"),
    "disabled beside backward": (BACKWARD, {"disabled": True}, "INSTEP_DISABLE is not set on rank 0 and set"),
}
SHARDED = ("schedule", "undo", "nonfinite", "seed in backward", "clip", "disabled beside backward")


def attached_here(model: nn.Module, optimizer: Any, options: Mapping[str, Any]) -> instep.Attachment:
    options = dict(options)
    with patch.dict("os.environ", {"INSTEP_DISABLE": "1"} if options.pop("disabled", False) else {}):
        return instep.attach(model, optimizer, **options)


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()


SECONDS = 0.5


@contextmanager
def waiting_for(seconds: float = SECONDS) -> Iterator[None]:
    """A rank that finds something else than it says itself waits for so long, once all have come here: on a busy
    machine one may have attached long before another."""
    dist.barrier()
    with patch.object(step_ranks, "_SECONDS_UNCLEAR", seconds):
        yield


def differing(options: Sequence[Mapping[str, Any]], wrap: str) -> tuple[str, bool, bool]:
    """The error of the first step, whether another call says the same, and whether nothing was written."""
    model, optimizer = wrapped(wrap)
    before = [p.detach().clone() for p in model.parameters()]
    mine = options[min(dist.get_rank(), 1)]
    patience = patch.object(step_ranks, "timeout_of", lambda group: timedelta(seconds=20))  # a mesh has half an hour
    with attached_here(model, optimizer, mine), waiting_for(), patience:
        for i in range(mine.get("accumulation_steps", 1)):
            x, y = batch(i)
            # The second of its micro-batches would be one that the other rank does not have.
            if (error := error_of(functools.partial(backward, model, x, y))) is not None:
                assert i == 1, error
                break
        errors = [str(error_of(optimizer.step)) for _ in range(2)]
        errors += [] if error is None else [str(error)]
    untouched = all(torch.equal(local(a), local(b)) for a, b in zip(before, model.parameters(), strict=True))
    return errors[0], set(errors) == {errors[0]}, untouched


def counting_apart(
    steps: Sequence[int], options: Mapping[str, Any], wrap: str, waits: float = SECONDS, late: float = 0.0
) -> list[str]:
    """The errors of a loop that calls ``step()`` after each backward, whatever it has asked for. The last rank comes
    ``late`` seconds late to what the others wait ``waits`` seconds for."""
    model, optimizer = wrapped(wrap)
    before = [p.detach().clone() for p in model.parameters()]
    rank = dist.get_rank()
    options = {**options, "accumulation_steps": steps[rank]}
    with instep.attach(model, optimizer, **options), waiting_for(waits):
        if rank == 1:
            time.sleep(late)
        errors = [error_of(functools.partial(iterate, model, optimizer, i)) for i in range(3)]
    assert all(torch.equal(local(a), local(b)) for a, b in zip(before, model.parameters(), strict=True))
    return [f"{type(error).__name__}: {error}" for error in errors]


def wrapped(wrap: str) -> tuple[Any, Fails]:
    kinds = {"ddp": ddp, "replicate": replicated, "fsdp2": nested, "hybrid": hybrid, **MESHES}
    return made(kinds[wrap])


def accumulating_apart(options: Sequence[Mapping[str, Any]], wrap: str) -> list[str]:
    """A loop of two micro-batches in each step, on ranks of which only some were told of it. The error of each
    iteration; nothing was written."""
    model, optimizer = wrapped(wrap)
    before = [local(p).detach().clone() for p in model.parameters()]

    def one(i: int) -> None:
        for part in range(2):
            x, y = batch(2 * i + part)
            backward(model, x, y)
        optimizer.step()

    mine = options[min(dist.get_rank(), 1)]
    with attached_here(model, optimizer, mine), waiting_for():
        errors = [error_of(functools.partial(one, i)) for i in range(3)]
    assert all(torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True))
    return [f"{type(error).__name__}: {error}" for error in errors]


APART: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "default": ({}, {"accumulation_steps": 2}, "accumulation_steps is 1 on rank 0 and 2 on rank 1"),
    "backward": (BACKWARD, {**BACKWARD, "accumulation_steps": 2}, "accumulation_steps is 1 on rank 0 and 2 on rank 1"),
    "undo": (
        {**BACKWARD, "undo": True, "accumulation_steps": 2},
        {**BACKWARD, "undo": True},
        "accumulation_steps is 2 on rank 0 and 1 on rank 1",
    ),
    "skip": (
        {"nonfinite": "skip"},
        {"nonfinite": "skip", "accumulation_steps": 2},
        "accumulation_steps is 1 on rank 0 and 2 on rank 1",
    ),
    "disabled": (
        {"accumulation_steps": 2, "disabled": True},
        {"accumulation_steps": 2},
        "INSTEP_DISABLE is set on rank 0 and not set on rank 1",
    ),
    "disabled beside backward": (
        {"disabled": True},
        {**BACKWARD, "accumulation_steps": 2},
        "INSTEP_DISABLE is set on rank 0 and not set on rank 1",
    ),
}


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "replicate"])
@pytest.mark.parametrize("way", list(APART))
def test_micro_batches_that_one_rank_was_not_told_of(two_ranks: RankPool, way: str, wrap: str) -> None:
    """After the first backward all raise: in ``step()``, or in the forward of the second micro-batch."""
    one, other, said = APART[way]
    for errors in two_ranks.run(accumulating_apart, [one, other], wrap):
        assert all(error.startswith("StepMismatchError") for error in errors), errors
        assert all(said in error or "disabled" in way for error in errors), errors


def forward_of_one_rank(options: Mapping[str, Any]) -> list[Any]:
    """Rank 0 alone runs a forward first. What the loops, one by hand, end with."""
    loops = [made(ddp) for _ in range(2)]
    with instep.attach(*loops[1], accumulation_steps=2, **options) as overlap:
        with patch.object(step_ranks, "_SECONDS_UNCLEAR", 0.5):
            if dist.get_rank() == 0:
                with loops[0][0].no_sync():  # else DDP expects a backward that reduces
                    loops[0][0](batch(0)[0])
                loops[1][0](batch(0)[0])
            dist.barrier()
            for i in range(4):
                for model, optimizer in loops:
                    x, y = batch(i)
                    with model.no_sync() if i % 2 == 0 and model is loops[0][0] else nullcontext():
                        backward(model, x, y)
                    if i % 2:
                        optimizer.step()
                        optimizer.zero_grad()
        overlap.synchronize()
        return [first_difference(*(training_state(*loop) for loop in loops)), overlap.step_count]


@pytest.mark.parametrize("way", ["default", "forward", "undo"])
def test_a_forward_of_one_rank_alone_waits_for_nobody_for_long(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(forward_of_one_rank, JOIN_WAYS[way]) == [[None, 2]] * 2


COUNTING: dict[str, dict[str, Any]] = {"default": DEFAULT, "backward": BACKWARD, "defer": {"defer": True}}


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "replicate"])
@pytest.mark.parametrize("steps", [(1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("way", list(COUNTING))
def test_micro_batches_counted_apart(two_ranks: RankPool, way: str, steps: tuple[int, int], wrap: str) -> None:
    """A rank that only adds up sends nothing: the other one would wait for it in its backward."""
    said = f"accumulation_steps is {steps[0]} on rank 0 and {steps[1]} on rank 1"
    for errors in two_ranks.run(counting_apart, steps, COUNTING[way], wrap):
        assert all(error.startswith("StepMismatchError") and said in error for error in errors), errors


@pytest.mark.parametrize("way", list(COUNTING))
def test_micro_batches_counted_apart_of_a_rank_of_fsdp2_that_is_late(two_ranks: RankPool, way: str) -> None:
    """FSDP's forward has gathered weights from it: it has said by then what it trains."""
    said = "accumulation_steps is 2 on rank 0 and 1 on rank 1"
    for errors in two_ranks.run(counting_apart, (2, 1), COUNTING[way], "fsdp2", 0.1, 1.0):
        assert all(error.startswith("StepMismatchError") and said in error for error in errors), errors


def local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def replicated(model: nn.Module) -> nn.Module:
    return instep.replicate(model, bucket_cap_mb=0.004)


@pytest.mark.parametrize("name", list(DIFFERING))
def test_options_that_differ(two_ranks: RankPool, name: str) -> None:
    one, other, said = DIFFERING[name]
    for error, again, untouched in two_ranks.run(differing, [one, other], "ddp"):
        assert error.startswith("ranks have attached different models, or in different ways: "), error
        assert said in error
        assert again
        assert untouched


@pytest.mark.parametrize("wrap", ["fsdp2", "replicate"])
@pytest.mark.parametrize("name", SHARDED)
def test_options_that_differ_between_shards(two_ranks: RankPool, name: str, wrap: str) -> None:
    one, other, said = DIFFERING[name]
    for error, again, untouched in two_ranks.run(differing, [one, other], wrap):
        assert said in error
        assert again
        assert untouched


# Of which one alone votes, or has each optimizer's parameters compared.
VOTING_ALONE = ("schedule", "nonfinite", "defer", "disabled beside backward")


@pytest.mark.parametrize("wrap", ["apart", "hybrid", "2d"])
@pytest.mark.parametrize("name", VOTING_ALONE)
def test_options_that_differ_on_a_mesh(four_ranks: RankPool, name: str, wrap: str) -> None:
    """No group or mesh holds all ranks, of the first two: they find each other by the model."""
    one, other, said = DIFFERING[name]
    for error, again, untouched in four_ranks.run(differing, [one, other], wrap):
        assert said.rpartition(" on rank")[0] in error, error
        assert again
        assert untouched


@pytest.mark.parametrize("name", ["clip", "schedule", "precision"])
def test_one_of_three_ranks_differs(three_ranks: RankPool, name: str) -> None:
    """Two of them agree, and have found that out before anything is sent."""
    one, other, said = DIFFERING[name]
    for error, again, untouched in three_ranks.run(differing, [one, other], "ddp"):
        assert said.removesuffix(" 1") in error
        assert again
        assert untouched


def divided_before() -> list[str]:
    """What becomes of state that was there before ranks attached in different ways."""
    model, optimizer = made(ddp)
    iterate(model, optimizer, 0)
    overlap = instep.attach(model, optimizer, shard_state=dist.get_rank() == 0, **BACKWARD)
    with waiting_for():
        error = error_of(functools.partial(iterate, model, optimizer, 1))
    saved = error_of(optimizer.state_dict)
    overlap.detach()
    return [type(one).__name__ for one in (error, saved)]


def test_state_that_was_divided_before_ranks_differed(two_ranks: RankPool) -> None:
    """It cannot be gathered: the other rank has not divided its own, and would not answer."""
    one, other = two_ranks.run(divided_before)
    assert one == ["StepMismatchError", "StepMismatchError"]
    assert other == ["StepMismatchError", "NoneType"]


def interrupted_while_telling(name: str, way: str) -> list[float]:
    """Ctrl-C on all ranks in the first forward, where they say what they train, and the loop goes on."""
    model, optimizer = made(ddp)
    with instep.attach(model, optimizer, **TELLING[way]) as overlap:
        with patch.object(Comparison, name, once(getattr(Comparison, name))), pytest.raises(KeyboardInterrupt):
            model(batch(0)[0])
        for i in range(3):
            iterate(model, optimizer, i)
        overlap.synchronize()
        ranks = overlap._parts.votes.ranks
        assert isinstance(ranks, StepRanks)
        assert ranks.mismatch is None
        ranks.look()
        assert ranks._all_heard
    return [float(p.detach().double().sum()) for p in model.parameters()]


def alone_and_plainly() -> list[float]:
    model, optimizer = made(ddp)
    for i in range(3):
        iterate(model, optimizer, i)
    return [float(p.detach().double().sum()) for p in model.parameters()]


TELLING: Mapping[str, Mapping[str, Any]] = {"default": {}, "backward": {"schedule": "backward"}}


@pytest.mark.parametrize("way", list(TELLING))
@pytest.mark.parametrize("name", ["__init__", "say"])
def test_ranks_that_were_interrupted_say_it_again(two_ranks: RankPool, name: str, way: str) -> None:
    assert two_ranks.run(interrupted_while_telling, name, way) == two_ranks.run(alone_and_plainly)


class Renamed(Blocks):
    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank() == 1:
            self.last = self.outer
            del self.outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) if dist.get_rank() == 1 else self.outer(x)


class Reordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("one", "other")[:: 1 if dist.get_rank() == 0 else -1]:
            self.add_module(name, nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x) for part in self.children())


def different_models(kind: str) -> str:
    """Parts that are wrapped each by itself: DDP looks at the shapes of each, and at nothing else."""
    torch.manual_seed(0)
    model: Any = Renamed() if kind == "names" else Reordered()
    for name, part in list(model.named_children()):
        setattr(model, name, nn.ModuleList(map(ddp, part)) if name == "blocks" else ddp(part))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with instep.attach(model, optimizer):
        return str(error_of(functools.partial(iterate, model, optimizer, 0)))


def test_names_that_differ(two_ranks: RankPool) -> None:
    for error in two_ranks.run(different_models, "names"):
        assert "parameter 'outer.module.weight' is (10, 24) float32 on rank 0 and missing on rank 1" in error


def test_another_order(two_ranks: RankPool) -> None:
    for error in two_ranks.run(different_models, "order"):
        assert "rank 0 has parameter 'one.module.weight' where rank 1 has parameter 'other.module.weight'" in error


# Who waits, and what it costs.


def attached_on_rank_0(options: Mapping[str, Any]) -> tuple[str, bool]:
    """Beside a rank that trains the plain loop."""
    loops = [made(ddp) for _ in range(2)]
    overlap = instep.attach(*loops[1], **options) if dist.get_rank() == 0 else None
    errors = []
    for i in range(3):
        for loop in loops:
            if (error := error_of(functools.partial(iterate, *loop, i))) is not None:
                errors.append(str(error))
                assert overlap is not None
                overlap.detach()
                loops[1][1].step()  # as the other rank does
                loops[1][1].zero_grad()
    return str(errors), first_difference(*(training_state(*loop) for loop in loops)) is None


def test_by_default_a_rank_does_not_wait_for_one_that_never_attached(two_ranks: RankPool) -> None:
    assert two_ranks.run(attached_on_rank_0, {}) == [("[]", True)] * 2


def clips_alone() -> str:
    model, optimizer = made(ddp)
    if dist.get_rank() == 0:
        instep.attach(model, optimizer, clip=instep.ClipNorm(0.125))
    said = str(error_of(functools.partial(iterate, model, optimizer, 0)))
    if (overlap := instep.attached(model)) is not None:
        overlap.detach()
    return said


def test_a_rank_that_would_clip_alone_says_so(two_ranks: RankPool) -> None:
    attached, plain = two_ranks.run(clips_alone)
    assert "rank 1 did not attach this model, and rank 0 did" in attached
    assert plain == "None"


def attached_again_on_rank_0(options: Mapping[str, Any]) -> str | None:
    """One rank detaches after two steps, and attaches again as before. The first error, or difference."""
    loops = [made(ddp) for _ in range(2)]
    overlap = instep.attach(*loops[1], **options)
    for i in range(5):
        for loop in loops:
            with patch.object(step_ranks, "_SECONDS_UNCLEAR", 0.5):
                error = error_of(functools.partial(iterate, *loop, i))
            if error is not None:
                overlap.accept_torn()
                overlap.detach()
                return f"{type(error).__name__}: {error}"
        if i == 1 and dist.get_rank() == 0:
            overlap.detach()
            overlap = instep.attach(*loops[1], **options)
    overlap.synchronize()
    overlap.detach()
    return first_difference(*(training_state(*loop) for loop in loops))


def test_one_rank_attaches_again(two_ranks: RankPool) -> None:
    """The others do not meet it any more, and train on."""
    assert two_ranks.run(attached_again_on_rank_0, DEFAULT) == [None] * 2


@pytest.mark.parametrize("way", ["backward", "forward", "undo", "skip"])
def test_one_rank_that_votes_attaches_again(two_ranks: RankPool, way: str) -> None:
    """It counts its steps anew, and all ranks hear that."""
    for error in two_ranks.run(attached_again_on_rank_0, JOIN_WAYS[way]):
        assert str(error).startswith("StepMismatchError: ranks are at different steps, from 1 to 3"), error


def attached_anew_by_all() -> list[str]:
    """One rank has attached again alone. Then all attach in another way, and that rank comes to it last."""
    model, optimizer = made(ddp)
    first = instep.attach(model, optimizer)
    iterate(model, optimizer, 0)
    if dist.get_rank() == 0:
        first.detach()
        first = instep.attach(model, optimizer)
    iterate(model, optimizer, 1)
    first.detach()
    # What the other rank says next must not be there while this one, which is not known to say the same, still steps.
    dist.barrier()
    store, heard = store_of_world("tests"), comparison.Comparison.heard

    def tells(self: comparison.Comparison, ranks: Sequence[int]) -> comparison.Heard:
        answer = heard(self, ranks)
        store.set("has heard", "1")
        return answer

    with patch.object(comparison.Comparison, "heard", tells), instep.attach(model, optimizer, **BACKWARD):
        if dist.get_rank() == 0:
            store.get("has heard")  # waits until the other rank has looked for this one, and not found it
        errors = [str(error_of(functools.partial(iterate, model, optimizer, i))) for i in range(2)]
    if dist.get_rank() == 0:
        store.delete_key("has heard")
    return errors


def test_all_ranks_attach_after_one_has_alone() -> None:
    pool = RankPool(2)  # of its own: what ranks have said in tests before, unequally often, is in the store
    try:
        assert pool.run(attached_anew_by_all) == [["None", "None"]] * 2
    finally:
        pool.stop()


def attached_later_on_rank_1() -> list[bool]:
    """In which of the iterations this rank says that rank 1, which attaches before the third, clips."""
    model, optimizer = made(ddp)
    overlap = instep.attach(model, optimizer) if dist.get_rank() == 0 else None
    found = []
    for i in range(4):
        if i == 2 and overlap is None:
            overlap = instep.attach(model, optimizer, clip=instep.ClipNorm(0.25))
        found.append(
            "clip is None on rank 0 and Clip" in str(error_of(functools.partial(iterate, model, optimizer, i)))
        )
    assert overlap is not None
    overlap.detach()
    return found


def test_a_rank_that_attaches_later_is_found() -> None:
    """By the others where they look again, before their fourth step."""
    pool = RankPool(2)  # of which none has attached alone before
    try:
        assert pool.run(attached_later_on_rank_1) == [[False, False, False, True], [False, False, True, True]]
    finally:
        pool.stop()


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any, calls: list[str]) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def called(*args: Any) -> Any:
            self._calls.append(name)
            return real(*args)

        return called


def asked_of_the_store(options: Mapping[str, Any]) -> list[str]:
    """In three iterations."""
    model, optimizer = made(ddp)
    calls: list[str] = []
    with (
        patch.object(comparison, "store_of_world", lambda place: Counting(store_of_world(place), calls)),
        instep.attach(model, optimizer, **options) as overlap,
    ):
        for i in range(3):
            iterate(model, optimizer, i)
        overlap.synchronize()
    return calls


@pytest.mark.parametrize("way", ["default", "backward"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_it_costs(ranks: int, way: str) -> None:
    """A few entries and one look, however many ranks there are; a rank that waits looks again and again. Of ranks that
    are new: what one alone has attached before has the others look more closely."""
    pool = RankPool(ranks)
    try:
        answers = pool.run(asked_of_the_store, DEFAULT if way == "default" else BACKWARD)
    finally:
        pool.stop()
    for calls in answers:
        assert calls[:3] == ["set", "set", "add"]
        # By default also whether this rank would gain from putting steps off, and one look in the first step.
        assert way == "backward" or calls[3:] == ["add", "add"]


# Two models on one process group.


def two_models(way: str, fails: bool) -> list[list[str]]:
    """Two attachments whose steps alternate; the second one's update raises on rank 1."""
    loops = [made(ddp) for _ in range(2)]
    overlaps = [instep.attach(*loop, **WAYS[way]) for loop in loops]
    found: list[list[str]] = [[], []]
    for i in range(4):
        for number, loop in enumerate(loops):
            Fails.failing = (1,) if fails and i == 1 and number == 1 else ()
            for do in (functools.partial(iterate, *loop, i), overlaps[number].require_committed):
                if not found[number] and (error := error_of(do)) is not None:
                    found[number].append(type(error).__name__)
            Fails.failing = ()
    for overlap in overlaps:
        overlap.detach()
    return found


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_two_models_agree(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(two_models, way, False) == [[[], []]] * 2


def test_a_fault_of_one_of_two_models_is_heard(two_ranks: RankPool) -> None:
    try:
        answers = two_ranks.run(two_models, "backward", True)
    finally:
        two_ranks.stop()
    (first, heard), (second, own) = answers
    assert first == second == []
    assert heard == ["TornStepError"]
    assert own[0] in ("MemoryError", "TornStepError")
    assert issubclass(TornStepError, InstepError)
    assert issubclass(StepMismatchError, InstepError)
