"""``instep.replicate``, alone and attached, beside plain DDP in the same ranks, bit for bit.

On two ranks every sum commutes, so both are equal from the first step. On three the order in which a ring adds depends
on the buckets' layout: there both loops run one backward first, after which DDP, too, has laid out its buckets in the
order in which gradients arrived.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import instep
from instep import ClipNorm, ClipValue
from instep._optim.parameters import AttachedParameters
from instep._step.beside_backward import UpdatesBeside
from instep.errors import AccumulationError, SpentGradientError
from instep_tools.harness import first_difference, training_state
from tests.cases import (
    Blocks,
    Checkpointed,
    Reentrant,
    Rotations,
    Sometimes,
    SparseWords,
    Tied,
    Transposed,
    batch,
    channels_last,
    two_groups,
    weights,
)
from tests.devices import here, on_cpu_only, sparse_collectives
from tests.distributed.casting import send_as
from tests.distributed.pool import RankPool
from tests.distributed.schedules import (
    Case,
    Loop,
    blocks_loss,
    cast_by_hand,
    difference_of,
    expert_of_this_rank,
    first_of,
    renamed,
    sometimes_an_expert,
)
from tests.late import late_updates

CAP = 0.004  # MiB: several buckets even in small models
ATTACHED = ["backward", "forward", pytest.param("undo", marks=pytest.mark.nightly)]
in_every_way = pytest.mark.parametrize("way", ["alone", *ATTACHED])
in_every_attached_way = pytest.mark.parametrize("way", ATTACHED)


class Replica(Loop):
    """The same loop, replicated in place of DDP; with ``way="alone"``, not attached."""

    def __init__(self, case: Case, attach: bool) -> None:
        super().__init__(case, attach and case.way != "alone")

    def wrap(self, module: nn.Module) -> nn.Module:
        return instep.replicate(module, bucket_cap_mb=CAP)


def both(case: Case) -> tuple[Loop, Loop]:
    """Plain DDP and the replica, laid out alike on three ranks."""
    loops = Loop(case, False), Replica(case, False)
    for loop in loops if dist.get_world_size() > 2 else ():
        case.loss(loop.model, dist.get_rank()).backward()
        loop.optimizer.zero_grad()
    if case.way != "alone":
        loops[1].overlap = loops[1]._attach()
    return loops


def gradients(loop: Loop) -> list[tuple[str, bool]]:
    """Of which parameters there are gradients."""
    with torch._C.DisableTorchFunctionSubclass():
        return [(f"gradient of {name!r}", p.grad is not None) for name, p in loop.model.named_parameters()]


def weights_of(loop: Loop) -> list[torch.Tensor]:
    if loop.overlap is not None:
        loop.overlap.synchronize()
    return weights(loop.model)


def compare(case: Case, steps: int = 4) -> tuple[str | None, int]:
    """The first difference in words; and how many steps the attachment has counted."""
    plain, replica = both(case)
    found = []
    for i in range(steps):
        found.append(first_difference(plain.step(i), replica.step(i)))
    return first_of(found), steps if replica.overlap is None else replica.overlap.step_count


def assert_equal(pool: RankPool, case: Case) -> None:
    for difference, steps in pool.run(compare, case):
        assert difference is None
        assert steps == 4 or case.scaled


# Every step is DDP's.


@pytest.mark.parametrize(
    "optimizer", ["SGD-1-foreach", "AdamW-0-for-loop", "AdamW-0-foreach", "AdamW-0-fused", "Adafactor-0-for-loop"]
)
@in_every_way
def test_every_step_is_that_of_ddp(two_ranks: RankPool, way: str, optimizer: str) -> None:
    assert_equal(two_ranks, Case(way, optimizer=optimizer))


def count_handed_over(case: Case) -> tuple[str | None, int]:
    """The first difference; and how many buckets a worker has updated."""
    hand_over, count = UpdatesBeside.hand_over, 0

    def counted(beside: UpdatesBeside, bucket: AttachedParameters) -> None:
        nonlocal count
        count += 1
        hand_over(beside, bucket)

    with patch.object(UpdatesBeside, "hand_over", counted), late_updates() if case.micro > 1 else nullcontext():
        return compare(case)[0], count


@on_cpu_only
@pytest.mark.parametrize("micro", [1, 2])
def test_updates_beside_backward(two_ranks: RankPool, micro: int) -> None:
    """With ``defer=True``; also where each comes as late as it can."""
    case = Case("backward", micro=micro, hold="accumulate" if micro > 1 else None, attach={"defer": True})
    for difference, count in two_ranks.run(count_handed_over, case):
        assert difference is None
        assert count > 3


def image_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x.view(-1, 1, 4, 4)), y)


def token_loss(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator(here()).manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def bfloat16_blocks() -> nn.Module:
    return Blocks().to(torch.bfloat16)


def bfloat16_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x.to(torch.bfloat16)).float(), y)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 24), nn.Linear(24, 10)
        self.middle = nn.Linear(24, 24).to(torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.middle(self.inner(x).double()).float())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], torch.Tensor], str]] = {
    "blocks": (Blocks, blocks_loss, "AdamW-0-fused"),
    "tied": (Tied, token_loss, "AdamW-0-foreach"),
    "channels_last": (channels_last, image_loss, "AdamW-0-foreach"),
    "transposed": (Transposed, blocks_loss, "AdamW-0-fused"),
    "complex": (Rotations, blocks_loss, "AdamW-0-foreach"),
    "bfloat16": (bfloat16_blocks, bfloat16_loss, "AdamW-0-fused"),
    "two dtypes": (TwoDtypes, blocks_loss, "AdamW-0-foreach"),
}


@pytest.mark.parametrize("model", MODELS)
@in_every_way
def test_on_three_ranks_too_once_ddp_has_laid_out_its_buckets(three_ranks: RankPool, way: str, model: str) -> None:
    make, loss, optimizer = MODELS[model]
    assert_equal(three_ranks, Case(way, make=make, loss=loss, optimizer=optimizer))


def body_first_backward() -> str | None:
    """With ``find_unused_parameters`` DDP makes several buckets for its first backward already."""
    case = Case("backward", ddp={"find_unused_parameters": True})
    plain, replica = Loop(case, False), Replica(case, True)
    return first_difference(plain.step(0), replica.step(0))


def test_the_first_step_on_three_ranks_is_that_of_ddp_with_find_unused_parameters(three_ranks: RankPool) -> None:
    assert three_ranks.run(body_first_backward) == [None] * 3


@sparse_collectives
@pytest.mark.parametrize("way", ["alone", "backward"])
def test_sparse_gradients(two_ranks: RankPool, way: str) -> None:
    assert_equal(two_ranks, Case(way, make=one_group_of_words, loss=token_loss, optimizer="SGD-0-for-loop"))


def one_group_of_words() -> nn.Module:
    return SparseWords()


# Accumulation.


@pytest.mark.parametrize("hold", ["no_sync", "accumulate"])
@in_every_way
def test_no_sync_and_accumulate(three_ranks: RankPool, way: str, hold: str) -> None:
    if way == "alone":
        hold = "no_sync"
    assert_equal(three_ranks, Case(way, micro=3, hold=hold))


@in_every_attached_way
def test_accumulation_steps(two_ranks: RankPool, way: str) -> None:
    assert_equal(two_ranks, Case(way, micro=3, attach={"accumulation_steps": 3}))


@pytest.mark.parametrize("way", ["alone", "forward", "undo"])
def test_a_loop_that_averages_each_micro_batch(three_ranks: RankPool, way: str) -> None:
    """What was averaged is averaged again, with what was added."""
    assert_equal(three_ranks, Case(way, micro=3))


# Policies.


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("way", ["forward", "undo", "two_pass"])
def test_clip_norm_is_clip_grad_norm(three_ranks: RankPool, way: str, max_norm: float) -> None:
    assert_equal(three_ranks, Case(way, clip=ClipNorm(max_norm)))


@in_every_attached_way
def test_clip_value(two_ranks: RankPool, way: str) -> None:
    assert_equal(two_ranks, Case(way, clip=ClipValue(0.01)))


@pytest.mark.parametrize("way", ["forward", "undo", "two_pass"])
def test_what_has_been_added_up_is_clipped_once(two_ranks: RankPool, way: str) -> None:
    assert_equal(two_ranks, Case(way, clip=ClipNorm(0.1), micro=2, hold="accumulate"))


@pytest.mark.parametrize("way", ["alone", "forward", "undo"])
def test_a_loop_that_clips_by_itself(two_ranks: RankPool, way: str) -> None:
    assert_equal(two_ranks, Case(way, by_hand=ClipNorm(0.1)))


@pytest.mark.parametrize("way", ["alone", "forward", "undo"])
def test_an_overflow_on_one_rank_is_skipped_on_all(two_ranks: RankPool, way: str) -> None:
    assert_equal(two_ranks, Case(way, scaled="step", overflow=1))


def body_scaler_in_backward() -> None:
    loop = Replica(Case("backward", scaled="step"), True)
    loop.scaler.scale(blocks_loss(loop.model, 0)).backward()
    with pytest.raises(SpentGradientError, match="still scaled"):
        loop.scaler.step(loop.optimizer)


def test_backward_with_a_scaler_anyway_says_so(two_ranks: RankPool) -> None:
    two_ranks.run(body_scaler_in_backward)


def body_measures(make: Any, loss: Any, ddp: dict[str, Any]) -> str | None:
    plain, replica = both(Case("backward", clip=ClipNorm(math.inf), make=make, loss=loss, ddp=ddp))
    found = []
    for i in range(4):
        for loop in (replica, plain):
            loss(loop.model, 1000 * dist.get_rank() + i).backward()
        replica.optimizer.step()
        norm = nn.utils.get_total_norm([p.grad for p in plain.model.parameters() if p.grad is not None])
        plain.optimizer.step()
        for loop in (replica, plain):
            loop.optimizer.zero_grad()
        norms = None if torch.equal(replica.overlap.grad_norm, norm) else "the norm is another one"
        found.append(difference_of(plain, replica) or norms)
    return first_of(found)


def test_an_infinite_limit_takes_the_norm_alone(three_ranks: RankPool) -> None:
    assert three_ranks.run(body_measures, Blocks, blocks_loss, {}) == [None] * 3


@pytest.mark.parametrize("loss", [expert_of_this_rank, sometimes_an_expert])
def test_the_norm_where_ranks_use_other_parameters(two_ranks: RankPool, loss: Any) -> None:
    """All ranks take the norm of the same gradients: those that any of them has used."""
    assert two_ranks.run(body_measures, Sometimes, loss, {"find_unused_parameters": True}) == [None] * 2


def body_mixed_precision(way: str, clip: ClipNorm | None, micro: int) -> str | None:
    case = Case(way, clip=clip, micro=micro, hold="accumulate")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = Loop(replace(case, make=cast_by_hand), False)
    plain.model.register_comm_hook(torch.float32, send_as)
    replica = Replica(replace(case, attach={"mixed_precision": policy}), True)
    found = []
    for i in range(4):
        for loop in (plain, replica):
            for _ in loop.step(i):
                pass
        states = [training_state(loop.model.module, loop.optimizer) for loop in (plain, replica)]
        found.append(first_difference(renamed(states[0]), states[1]))
    return first_of(found)


@pytest.mark.parametrize(("clip", "micro"), [(None, 1), (ClipNorm(1e6), 2)], ids=str)
@in_every_attached_way
def test_mixed_precision(two_ranks: RankPool, way: str, clip: Any, micro: int) -> None:
    clip = None if way == "backward" else clip
    assert two_ranks.run(body_mixed_precision, way, clip, micro) == [None] * 2


def body_low_precision_on_the_wire(sent: torch.dtype) -> str | None:
    case = Case("backward")
    plain = Loop(case, False)
    plain.model.register_comm_hook(sent, send_as)
    replica = Replica(replace(case, attach={"mixed_precision": MixedPrecisionPolicy(reduce_dtype=sent)}), True)
    return first_of([first_difference(plain.step(i), replica.step(i)) for i in range(3)])


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float64], ids=str)
def test_the_mean_is_computed_and_sent_in_another_dtype(two_ranks: RankPool, sent: torch.dtype) -> None:
    assert two_ranks.run(body_low_precision_on_the_wire, sent) == [None] * 2


# Parameters that are not used, and frozen ones.


def no_expert(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x, None), y)


def one_after_the_other(model: nn.Module, seed: int) -> torch.Tensor:
    """Which expert is used is the same on all ranks, and another in each backward."""
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x, seed % 2), y)


def body_unused(case: Case, zero_grad: bool) -> str | None:
    plain, replica = both(case)
    found = []
    for i in range(5):
        for loop in (plain, replica):
            for micro in range(case.micro):
                with loop.holding(micro):
                    case.loss(loop.model, 1000 * dist.get_rank() + case.micro * i + micro).backward()
        if replica.overlap is None or case.way == "forward":
            found.append(first_difference(iter(gradients(plain)), iter(gradients(replica))))
        for loop in (plain, replica):
            loop.optimizer.step()
            if zero_grad:
                loop.optimizer.zero_grad()
        found.append(difference_of(plain, replica))
    return first_of(found)


@pytest.mark.parametrize("loss", [expert_of_this_rank, sometimes_an_expert, no_expert, one_after_the_other])
@in_every_way
def test_unused_parameters(two_ranks: RankPool, way: str, loss: Any) -> None:
    """Weight decay and momentum must leave alone what no rank has used, and move what any has."""
    case = Case(way, make=Sometimes, loss=loss, optimizer="SGD-1-for-loop", ddp={"find_unused_parameters": True})
    assert two_ranks.run(body_unused, case, True) == [None] * 2


@pytest.mark.parametrize("loss", [expert_of_this_rank, one_after_the_other])
def test_gradients_that_are_never_cleared(two_ranks: RankPool, loss: Any) -> None:
    case = Case("alone", make=Sometimes, loss=loss, ddp={"find_unused_parameters": True})
    assert two_ranks.run(body_unused, case, False) == [None] * 2


def body_left_alone() -> bool:
    replica = Replica(Case("alone", make=Sometimes), False)
    expert = replica.model.module.experts[0]
    x, y = batch(dist.get_rank())
    nn.functional.cross_entropy(replica.model(x, 0), y).backward()
    mean = expert.weight.grad
    nn.functional.cross_entropy(replica.model(x, None), y).backward()
    return expert.weight.grad is mean


def test_a_mean_that_nobody_has_added_to_is_left_alone(three_ranks: RankPool) -> None:
    assert three_ranks.run(body_left_alone) == [True] * 3


@in_every_way
def test_what_was_used_in_no_sync_alone_is_averaged(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(body_used_in_no_sync_alone, way) == [True] * 2


def copied(loop: Loop) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model as one device would train it; its optimizer keeps no state."""
    assert loop.case.optimizer == "SGD-0-for-loop"
    model = loop.case.make()
    model.load_state_dict(loop.model.module.state_dict())
    return model, torch.optim.SGD(two_groups(model), lr=0.05, foreach=False)


def body_used_in_no_sync_alone(way: str) -> bool:
    """DDP leaves such a gradient as it is on each rank, and the ranks part."""
    replica = Replica(Case(way, make=Sometimes, optimizer="SGD-0-for-loop"), True)
    alone, optimizer = copied(replica)
    for rank in range(2):
        for expert in (0, 1):
            x, y = batch(10 * rank + expert)
            nn.functional.cross_entropy(alone(x, expert), y).div(2).backward()
    optimizer.step()
    for expert in (0, 1):
        with replica.model.no_sync() if expert == 0 else nullcontext():
            x, y = batch(10 * dist.get_rank() + expert)
            nn.functional.cross_entropy(replica.model(x, expert), y).backward()
    replica.optimizer.step()
    # Four gradients are added in another order.
    return all(map(torch.allclose, alone.parameters(), weights_of(replica)))


class PassesBy(nn.Module):
    """With ``used=False`` its output depends on no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        return self.outer(self.inner(x)) if used else x[:, :10] * 2


def body_no_gradient_at_all(way: str, ranks: list[int]) -> bool:
    replica = Replica(Case(way, make=PassesBy, optimizer="SGD-0-for-loop"), True)
    for i in range(2):
        alone, optimizer = copied(replica)
        x, y = batch(i)
        nn.functional.cross_entropy(alone(x, True), y).mul(len(ranks) / 2).backward()
        optimizer.step()
        nn.functional.cross_entropy(replica.model(x.requires_grad_(), dist.get_rank() in ranks), y).backward()
        replica.optimizer.step()
        replica.optimizer.zero_grad()
        if not all(map(torch.equal, alone.parameters(), weights_of(replica))):
            return False
    return True


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@in_every_way
def test_a_rank_without_any_gradient(two_ranks: RankPool, way: str, ranks: list[int]) -> None:
    """DDP would wait for it."""
    assert two_ranks.run(body_no_gradient_at_all, way, ranks) == [True] * 2


def freeze_in_turn(model: Any, i: int) -> None:
    model.outer.requires_grad_(i != 1)
    model.blocks[0].requires_grad_(i in (1, 3))


def body_frozen_and_thawed(way: str, micro: int) -> str | None:
    case = Case(way, ddp={"find_unused_parameters": True})
    plain, replica = Loop(case, False), Replica(case, True)
    found = []
    for i in range(5):
        for loop in (plain, replica):
            freeze_in_turn(loop.model.module, i)
        found.append(first_difference(plain.step(i), replica.step(i)))
    return first_of(found)


@in_every_way
def test_parameters_that_are_frozen_and_thawed(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(body_frozen_and_thawed, way, 1) == [None] * 2


def body_frozen_after_the_forward(way: str) -> str | None:
    case = Case(way, ddp={"find_unused_parameters": True})
    plain, replica = Loop(case, False), Replica(case, True)
    found = []
    for i in range(3):
        for loop in (plain, replica):
            loss = blocks_loss(loop.model, 10 * i + dist.get_rank())
            loop.model.module.blocks[1].requires_grad_(False)
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.model.module.blocks[1].requires_grad_(True)
        found.append(difference_of(plain, replica))
    return first_of(found)


@in_every_way
def test_parameters_that_are_frozen_after_the_forward(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(body_frozen_after_the_forward, way) == [None] * 2


def half_frozen() -> nn.Module:
    model = Blocks()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


@in_every_way
def test_frozen_parameters(three_ranks: RankPool, way: str) -> None:
    assert_equal(three_ranks, Case(way, make=half_frozen))


# What backward runs through.


@pytest.mark.parametrize("make", [Checkpointed, Reentrant])
@in_every_way
def test_checkpointed_segments(two_ranks: RankPool, way: str, make: Any) -> None:
    # Plain DDP takes reentrant segments without find_unused_parameters.
    assert_equal(two_ranks, Case(way, make=make))


def checkpointed_whole(reentrant: bool) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        x, y = batch(seed)
        return nn.functional.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=reentrant), y)

    return loss


def body_checkpointed_whole(way: str, reentrant: bool) -> tuple[str | None, int]:
    return compare(Case(way, loss=checkpointed_whole(reentrant)))


@pytest.mark.parametrize("reentrant", [False, True])
@in_every_way
def test_the_model_itself_is_checkpointed(two_ranks: RankPool, way: str, reentrant: bool) -> None:
    assert [difference for difference, _ in two_ranks.run(body_checkpointed_whole, way, reentrant)] == [None] * 2


class VisitedTwice(nn.Module):
    """One layer in two reentrant segments, far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.between = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        self.outer = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(checkpoint(self.shared, x.requires_grad_(), use_reentrant=True))
        return self.outer(checkpoint(self.shared, x, use_reentrant=True))


def body_visited_twice(way: str) -> None:
    replica = Replica(Case(way, make=VisitedTwice), True)
    loss = blocks_loss(replica.model, 0)
    with pytest.raises(AccumulationError, match="use_reentrant=False"):
        loss.backward()


@pytest.mark.parametrize("way", ["alone", "backward"])
def test_a_parameter_visited_twice_is_refused(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(body_visited_twice, way)


def penalised(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    logits = model(x.requires_grad_())
    loss = nn.functional.cross_entropy(logits, y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


@in_every_way
def test_a_gradient_penalty(two_ranks: RankPool, way: str) -> None:
    assert_equal(two_ranks, Case(way, loss=penalised))


def body_autograd_grad_on_one_rank(way: str) -> str | None:
    plain, replica = both(Case(way))
    found = []
    for i in range(2):
        if dist.get_rank() == 1:
            loss = blocks_loss(replica.model, 70 + i)
            torch.autograd.grad(loss, list(replica.model.parameters())[:3])
        found.append(first_difference(plain.step(i), replica.step(i)))
    return first_of(found)


@pytest.mark.parametrize("way", ["alone", "backward"])
def test_autograd_grad_on_one_rank_alone_waits_for_nobody(two_ranks: RankPool, way: str) -> None:
    assert two_ranks.run(body_autograd_grad_on_one_rank, way) == [None] * 2


def two_forwards(model: nn.Module, seed: int) -> torch.Tensor:
    return blocks_loss(model, seed) + blocks_loss(model, seed + 500)


@in_every_way
def test_two_forwards_and_one_backward(two_ranks: RankPool, way: str) -> None:
    assert_equal(two_ranks, Case(way, loss=two_forwards))


class Branches(nn.Module):
    """Branches that share one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 10)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 10)) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.shared(x) + self.branches[which](x)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = instep.replicate(Branches(), bucket_cap_mb=1e-5)  # a bucket for each parameter


def body_backward_from_the_inside() -> bool:
    """A second backward in a step, which instep meets only when it comes to a parameter that the first has stepped."""
    model = Holds()
    x, y = batch(dist.get_rank())
    model.core(x, 1).sum().backward()  # from now on its branch comes first, then what is shared
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="backward")
    losses = [nn.functional.cross_entropy(model.core(x, which), y) for which in range(2)]
    losses[0].backward()
    before = weights(model)
    with pytest.raises(AccumulationError, match="arrived again"):
        losses[1].backward()
    overlap.detach()
    return all(map(torch.equal, before, weights(model)))


def test_a_second_backward_from_the_inside_writes_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(body_backward_from_the_inside) == [True] * 2


class ReplicaOfCompiled(Replica):
    def wrap(self, module: nn.Module) -> nn.Module:
        compiled: Any = torch.compile(module, backend="aot_eager")
        return super().wrap(compiled)


class CompiledReplica(Replica):
    def wrap(self, module: nn.Module) -> nn.Module:
        compiled: Any = torch.compile(super().wrap(module), backend="aot_eager")
        return compiled


def body_compiled(kind: type[Replica]) -> bool:
    case = Case("backward")
    plain, replica = Loop(case, False), kind(case, True)
    for i in range(3):
        for loop in (plain, replica):
            for _ in loop.step(i):
                pass
        if not all(map(torch.equal, weights(plain.model), weights(replica.model))):
            return False
    return True


@pytest.mark.parametrize("kind", [ReplicaOfCompiled, CompiledReplica])
def test_compiled(two_ranks: RankPool, kind: type[Replica]) -> None:
    assert two_ranks.run(body_compiled, kind) == [True] * 2


# Buffers and first weights.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)))


def body_buffers(way: str, broadcast_buffers: bool) -> str | None:
    """After every forward and evaluation, on every rank."""
    case = Case(way, make=Normed)

    def make(replicated: bool) -> Loop:
        loop = Replica(case, False) if replicated else Loop(case, False)
        if not broadcast_buffers:
            torch.manual_seed(0)
            module = Normed()
            loop.model = (
                instep.replicate(module, bucket_cap_mb=CAP, broadcast_buffers=False)
                if replicated
                else nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)
            )
            loop.optimizer = torch.optim.AdamW(loop.model.parameters(), fused=True)
        if replicated and way != "alone":
            loop.overlap = loop._attach()
        return loop

    plain, replica = make(False), make(True)
    found = []
    for i in range(3):
        for loop in (plain, replica):
            if i == 1:
                loop.model.module.seen.fill_(dist.get_rank() == 0)
        found.append(first_difference(plain.step(i), replica.step(i)))
        for _ in range(2):
            for loop in (plain, replica):
                with torch.no_grad():
                    loop.model(batch(100 * dist.get_rank() + i)[0])  # in training mode: running statistics part
            found.append(difference_of(plain, replica))
    return first_of(found)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize("way", ["alone", "backward", "forward"])
def test_buffers(two_ranks: RankPool, way: str, broadcast_buffers: bool) -> None:
    assert two_ranks.run(body_buffers, way, broadcast_buffers) == [None] * 2


def body_first_weights() -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    model = Normed()
    with torch.no_grad():
        model.get_buffer("norm.running_mean").add_(dist.get_rank())
    replica = instep.replicate(model)
    assert list(replica.state_dict()) == [f"module.{name}" for name in model.state_dict()]
    return [tensor.cpu().clone() for tensor in replica.state_dict().values()]


def test_first_weights_and_buffers_are_those_of_the_first_rank(three_ranks: RankPool) -> None:
    first, *others = three_ranks.run(body_first_weights)
    assert first[2].count_nonzero() > 0
    for other in others:
        assert all(map(torch.equal, first, other))
