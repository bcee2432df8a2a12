"""Three ranks under DistributedDataParallel: ``schedule="forward"``, ``undo`` and the policies, against plain DDP."""

import math
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import get_total_norm

import instep
import instep.options
from instep import ClipNorm, ClipValue
from instep.errors import AccumulationError, SpentGradientError
from instep.sources.ddp.buckets import Reduction
from instep_tools.harness import first_difference, training_state
from tests.cases import Sometimes
from tests.distributed.casting import send_as
from tests.distributed.comm_hooks import to_another_tensor
from tests.distributed.pool import RankPool
from tests.distributed.schedules import (
    Case,
    Loop,
    blocks_loss,
    cast_by_hand,
    compare,
    difference_of,
    expert_of_this_rank,
    first_of,
    renamed,
    sometimes_an_expert,
)

EXACT = ("forward", "undo", "two_pass")
WITH_GRADIENTS = ("forward", "undo")
in_both_views = pytest.mark.parametrize("view", [False, True], ids=["", "view"])
in_exact_ways = pytest.mark.parametrize("way", EXACT)
in_ways_with_gradients = pytest.mark.parametrize("way", WITH_GRADIENTS)


def assert_equal(pool: RankPool, case: Case, redone: int | None = None) -> None:
    for difference, steps, redo_count in pool.run(compare, case):
        assert difference is None
        assert steps == 4 or case.scaled
        assert redo_count == redone or redone is None


# Schedules.


@in_both_views
@pytest.mark.parametrize("optimizer", ["SGD-1-for-loop", "AdamW-0-fused"])
@pytest.mark.parametrize("way", ["forward", "undo", "undo on the host"])
def test_every_schedule_is_plain_ddp(three_ranks: RankPool, way: str, optimizer: str, view: bool) -> None:
    assert_equal(three_ranks, Case(way, view, optimizer=optimizer), redone=0)


@in_both_views
@in_exact_ways
def test_a_static_graph(three_ranks: RankPool, way: str, view: bool) -> None:
    clip = ClipNorm(4.0)
    assert_equal(three_ranks, Case(way, view, clip, ddp={"static_graph": True}))


def in_small_buckets(case: Case) -> tuple[str | None, int, int]:
    """Of instep's own, across DDP's: a large model's, behind the next forward."""
    with patch.object(instep.options, "DEFAULT_BUCKET_BYTES", 3_000):
        return compare(case)


# Clipping.


@in_both_views
@pytest.mark.parametrize("clip", [None, ClipNorm(0.1), ClipValue(0.01)], ids=str)
def test_buckets_that_lie_across_those_of_ddp(three_ranks: RankPool, clip: Any, view: bool) -> None:
    for difference, steps, _ in three_ranks.run(
        in_small_buckets, Case("forward", view, clip, optimizer="AdamW-0-fused")
    ):
        assert difference is None
        assert steps == 4


@in_both_views
@pytest.mark.parametrize("max_norm", [4.0, 1e6])
@in_exact_ways
def test_clip_norm_is_clip_grad_norm(three_ranks: RankPool, way: str, max_norm: float, view: bool) -> None:
    assert_equal(three_ranks, Case(way, view, ClipNorm(max_norm)))


@in_both_views
@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_clip_value_is_clip_grad_value(three_ranks: RankPool, way: str, view: bool) -> None:
    assert_equal(three_ranks, Case(way, view, ClipValue(0.01)), redone=0)


@pytest.mark.parametrize("clip", [ClipNorm(4.0), ClipValue(0.01)], ids=str)
@in_both_views
@in_ways_with_gradients
def test_a_loop_that_clips_by_itself(three_ranks: RankPool, way: str, view: bool, clip: Any) -> None:
    assert_equal(three_ranks, Case(way, view, by_hand=clip))


@pytest.mark.parametrize("way", ["undo"])
def test_undo_puts_back_the_first_of_steps_that_are_clipped(three_ranks: RankPool, way: str) -> None:
    assert_equal(three_ranks, Case(way, clip=ClipNorm(0.1)), redone=1)
    assert_equal(three_ranks, Case(way, clip=ClipNorm(1e6)), redone=0)


def body_passes(view: bool) -> list[int]:
    """How often each of three steps runs backward."""
    loop = Loop(Case("two_pass", view, ClipNorm(0.1)), True)
    counts: list[int] = []
    with loop.overlap:
        for i in range(3):
            loss = blocks_loss(loop.model, 1000 * dist.get_rank() + i)
            counts.append(0)

            def count(_: torch.Tensor) -> None:
                counts[-1] += 1

            loss.register_hook(count)
            loop.overlap.backward(loss)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return counts


@in_both_views
def test_two_pass_runs_backward_once(three_ranks: RankPool, view: bool) -> None:
    assert three_ranks.run(body_passes, view) == [[1, 1, 1]] * 3


def body_measures(case: Case) -> str | None:
    """Some ranks step several buckets at once, where those have arrived."""
    with patch.object(Reduction, "arrived", property(lambda _: dist.get_rank() == 1)):
        plain, attached = Loop(replace(case, clip=None), False), Loop(case, True)
        found: list[str | None] = []
        with attached.overlap as overlap:
            for i in range(5):
                for loop in (attached, plain):
                    case.loss(loop.model, 1000 * dist.get_rank() + i).backward()
                attached.optimizer.step()
                norm = get_total_norm([p.grad for p in plain.model.parameters() if p.grad is not None])
                plain.optimizer.step()
                for loop in (attached, plain):
                    loop.optimizer.zero_grad()
                norms = None if torch.equal(overlap.grad_norm, norm) else f"the norm is {norm}, not {overlap.grad_norm}"
                found.append(difference_of(plain, attached) or norms)
        return first_of(found)


@in_both_views
def test_an_infinite_limit_takes_the_norm_alone(three_ranks: RankPool, view: bool) -> None:
    assert three_ranks.run(body_measures, Case("backward", view, ClipNorm(math.inf))) == [None] * 3


@pytest.mark.parametrize("loss", [expert_of_this_rank, sometimes_an_expert])
def test_the_norm_alone_where_one_rank_uses_a_parameter(three_ranks: RankPool, loss: Any) -> None:
    ddp = {"find_unused_parameters": True}
    case = Case("backward", clip=ClipNorm(math.inf), make=Sometimes, loss=loss, ddp=ddp)
    assert three_ranks.run(body_measures, case) == [None] * 3


@pytest.mark.parametrize("loss", [expert_of_this_rank, sometimes_an_expert])
@pytest.mark.parametrize(("max_norm", "view"), [(0.1, False), (1e6, True)])
@in_exact_ways
def test_clip_norm_with_parameters_that_one_rank_alone_uses(
    three_ranks: RankPool, way: str, max_norm: float, loss: Any, view: bool
) -> None:
    case = Case(way, view, ClipNorm(max_norm), make=Sometimes, loss=loss, ddp={"find_unused_parameters": True})
    assert_equal(three_ranks, case)


# Loss scale.


@pytest.mark.parametrize("scaled", ["step", "unscale_"])
@pytest.mark.parametrize(("optimizer", "view"), [("AdamW-0-foreach", False), ("AdamW-0-fused", True)])
@pytest.mark.parametrize(("way", "give"), [("forward", False), ("undo", True), ("undo", False)])
def test_an_overflow_on_one_rank_alone_is_skipped_on_all(
    three_ranks: RankPool, way: str, give: bool, optimizer: str, scaled: str, view: bool
) -> None:
    assert_equal(three_ranks, Case(way, view, scaled=scaled, give=give, overflow=1, optimizer=optimizer))


def body_scaler_in_backward(optimizer: str) -> bool:
    loop = Loop(Case("backward", scaled="step", optimizer=optimizer), True)
    with loop.overlap:
        loop.scaler.scale(blocks_loss(loop.model, dist.get_rank())).backward()
        with pytest.raises(SpentGradientError, match="still scaled"):
            loop.scaler.step(loop.optimizer)
    return True


@pytest.mark.parametrize("optimizer", ["AdamW-0-foreach", "AdamW-0-fused"])
def test_backward_with_a_scaler_anyway_says_so(three_ranks: RankPool, optimizer: str) -> None:
    assert three_ranks.run(body_scaler_in_backward, optimizer) == [True] * 3


# Accumulation.


@pytest.mark.parametrize(("hold", "view"), [("no_sync", False), ("accumulate", True)])
@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_no_sync_and_accumulate(three_ranks: RankPool, way: str, hold: str, view: bool) -> None:
    assert_equal(three_ranks, Case(way, view, micro=3, hold=hold), redone=0)


@in_both_views
@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_accumulation_steps_are_no_sync_around_all_but_the_last(three_ranks: RankPool, way: str, view: bool) -> None:
    assert_equal(three_ranks, Case(way, view, micro=3, attach={"accumulation_steps": 3}), redone=0)


@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_accumulation_steps_are_not_a_reduction_in_each_micro_batch(three_ranks: RankPool, way: str) -> None:
    """Over a loop that has no ``no_sync()``: the bits are those of the loop that has it, which that loop's are not."""
    assert three_ranks.run(_of_two_loops, way) == [(True, False, True)] * 3


def _of_two_loops(way: str) -> tuple[bool, bool, bool]:
    """Whether weights and state are those of the loop with ``no_sync()``; of the loop that reduces in every
    micro-batch; and near to these."""
    counted = Loop(Case(way, micro=3, attach={"accumulation_steps": 3}), True)
    holding, reducing = Loop(Case(way, micro=3, hold="no_sync"), False), Loop(Case(way, micro=3), False)
    with counted.overlap:
        for i in range(4):
            for loop in (counted, holding, reducing):
                deque(loop.step(i), maxlen=0)
        near = all(
            torch.allclose(one, other, atol=1e-4)
            for one, other in zip(counted.model.parameters(), reducing.model.parameters(), strict=True)
        )
        return difference_of(counted, holding) is None, difference_of(counted, reducing) is None, near


@pytest.mark.parametrize("hold", ["no_sync", "accumulate"])
@pytest.mark.parametrize("way", ["backward", "forward", "undo"])
def test_accumulation_steps_in_a_loop_that_holds_by_itself(three_ranks: RankPool, way: str, hold: str) -> None:
    assert_equal(three_ranks, Case(way, True, micro=3, hold=hold, attach={"accumulation_steps": 3}))


@pytest.mark.parametrize("hold", ["no_sync", "accumulate", "count"])
@pytest.mark.parametrize(("max_norm", "view"), [(0.1, False), (1e6, True)])
@in_exact_ways
def test_what_has_been_added_up_is_clipped_once(
    three_ranks: RankPool, way: str, max_norm: float, hold: str, view: bool
) -> None:
    case = Case(way, view, ClipNorm(max_norm), micro=3, hold=hold)
    if hold == "count":
        case = replace(case, hold=None, attach={"accumulation_steps": 3})
    assert_equal(three_ranks, case)


@in_both_views
@in_ways_with_gradients
def test_a_loop_that_accumulates_and_reduces_each_time(three_ranks: RankPool, way: str, view: bool) -> None:
    """Without ``no_sync``: what was reduced is reduced again, with what was added."""
    assert_equal(three_ranks, Case(way, view, micro=3))


def body_early_step(way: str, view: bool) -> str | None:
    """``step()`` after two of three backwards: refused, and nothing written; the third makes it right."""
    clip = ClipNorm(0.1) if way == "two_pass" else None
    case = Case(way, view, clip, attach={"accumulation_steps": 3})
    plain, attached = Loop(case, False), Loop(case, True)
    found: list[str | None] = []
    with attached.overlap:
        for i in range(2):
            for loop in (plain, attached):
                for micro in range(3):
                    with plain.model.no_sync() if loop is plain and micro < 2 else nullcontext():
                        loop.backward(blocks_loss(loop.model, 1000 * dist.get_rank() + 3 * i + micro))
                    if loop is attached and micro == 1:
                        before = [p.detach().clone() for p in loop.model.parameters()]
                        with pytest.raises(AccumulationError, match="2 of accumulation_steps=3"):
                            loop.optimizer.step()
                        assert all(map(torch.equal, before, loop.model.parameters()))
                if loop is plain:
                    loop.clip(clip)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            attached.overlap.synchronize()
            found.append(difference_of(plain, attached))
    return first_of(found)


@in_both_views
@pytest.mark.parametrize("way", ["backward", "forward", "undo", "two_pass"])
def test_a_step_that_comes_too_early_is_refused_before_any_write(three_ranks: RankPool, way: str, view: bool) -> None:
    assert three_ranks.run(body_early_step, way, view) == [None] * 3


# rollback()


def body_rollback(way: str, view: bool) -> str | None:
    case = Case(way, view)
    plain, attached = Loop(case, False), Loop(case, True)
    with attached.overlap:
        for i in range(4):
            for loop in (plain, attached):
                # The plain loop has to see the batch too: DDP lays out its buckets anew after the first backward.
                blocks_loss(loop.model, 1000 * dist.get_rank() + 50 + i).backward()
                if loop is attached:
                    loop.overlap.rollback()
                else:
                    loop.optimizer.zero_grad()
                blocks_loss(loop.model, 1000 * dist.get_rank() + i).backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        attached.overlap.synchronize()
        return difference_of(plain, attached)


@in_both_views
@in_ways_with_gradients
def test_rollback_is_zero_grad_in_a_loop_that_gives_the_batch_up(three_ranks: RankPool, way: str, view: bool) -> None:
    assert three_ranks.run(body_rollback, way, view) == [None] * 3


# Communication hooks and mixed precision.


def body_comm_hook(way: str, view: bool, hook: Any, clip: ClipNorm | None, micro: int) -> str | None:
    case = Case(way, view, clip, micro=micro, hold="accumulate")
    plain = Loop(case, False)
    plain.model.register_comm_hook(None, hook)
    attached = Loop(replace(case, attach={"comm_hook": (None, hook)}), True)
    with attached.overlap:
        return first_of([first_difference(plain.step(i), attached.step(i)) for i in range(4)])


@pytest.mark.parametrize("hook", [allreduce_hook, to_another_tensor])
@pytest.mark.parametrize(
    ("clip", "micro", "view"), [(None, 1, False), (ClipNorm(0.1), 1, True), (ClipNorm(1e6), 3, True)], ids=str
)
@in_ways_with_gradients
def test_a_communication_hook(three_ranks: RankPool, way: str, clip: Any, micro: int, hook: Any, view: bool) -> None:
    assert three_ranks.run(body_comm_hook, way, view, hook, clip, micro) == [None] * 3


def body_mixed_precision(way: str, view: bool, clip: ClipNorm | None, micro: int, hooked: bool) -> str | None:
    case = Case(way, view, clip, micro=micro, hold="accumulate")
    plain = Loop(replace(case, make=cast_by_hand), False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mixed_precision": policy}
    if hooked:
        options = {"mixed_precision": replace(policy, reduce_dtype=None), "comm_hook": (torch.float32, send_as)}
    plain.model.register_comm_hook(torch.float32, send_as)
    attached = Loop(replace(case, attach=options), True)
    found: list[str | None] = []
    with attached.overlap:
        for i in range(4):
            for loop in (plain, attached):
                for _ in loop.step(i):
                    pass
            states = [training_state(loop.model.module, loop.optimizer) for loop in (plain, attached)]
            found.append(first_difference(renamed(states[0]), states[1]))
    return first_of(found)


@pytest.mark.parametrize(
    ("clip", "micro", "view"), [(None, 1, False), (ClipNorm(0.1), 1, True), (ClipNorm(1e6), 3, True)], ids=str
)
@in_ways_with_gradients
def test_mixed_precision(three_ranks: RankPool, way: str, clip: Any, micro: int, view: bool) -> None:
    assert three_ranks.run(body_mixed_precision, way, view, clip, micro, False) == [None] * 3


# Uneven inputs.


def body_join(way: str, clip: ClipNorm | None, divide_by_initial_world_size: bool) -> str | None:
    case = Case(way, clip=clip)

    def run(attach: bool) -> Loop:
        loop = Loop(case, attach)
        with loop.model.join(divide_by_initial_world_size=divide_by_initial_world_size):
            for i in range(3 + 2 * dist.get_rank()):
                loop.backward(blocks_loss(loop.model, 1000 * dist.get_rank() + i))
                if not attach:
                    loop.clip(clip)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return loop

    plain, attached = run(False), run(True)
    attached.overlap.synchronize()
    assert attached.overlap.step_count == 3 + 2 * dist.get_rank()
    attached.overlap.detach()
    return difference_of(plain, attached)


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
@pytest.mark.parametrize("clip", [None, ClipNorm(0.1)], ids=str)
@in_ways_with_gradients
def test_join_with_uneven_inputs(
    three_ranks: RankPool, way: str, clip: ClipNorm | None, divide_by_initial_world_size: bool
) -> None:
    assert three_ranks.run(body_join, way, clip, divide_by_initial_world_size) == [None] * 3


# What is read in between.
