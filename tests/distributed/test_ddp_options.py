"""Options that DDP has in some versions of torch only."""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AttachError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, two_groups
from tests.distributed import ddp_lockstep, zero
from tests.distributed.pool import RankPool

SMALL: dict[str, Any] = {"bucket_cap_mb": 0.004}


def has(option: str) -> bool:
    return option in inspect.signature(DistributedDataParallel).parameters


def needs(option: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has(option), reason=f"this torch's DistributedDataParallel has no {option}")


each_view = pytest.mark.parametrize("view", [False, True])
lazy = needs("lazy_bucket_allocation")
batched = needs("batched_grad_copy")
BOTH = [
    pytest.param({"lazy_bucket_allocation": True}, id="lazy", marks=lazy),
    pytest.param({"batched_grad_copy": True}, id="batched", marks=batched),
    pytest.param(
        {"lazy_bucket_allocation": True, "batched_grad_copy": True}, id="lazy and batched", marks=[lazy, batched]
    ),
]
each_option = pytest.mark.parametrize("option", BOTH)


@batched
@each_view
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_stepped_in_backward(three_ranks: RankPool, view: bool, micro_batches: int) -> None:
    options = {**SMALL, "batched_grad_copy": True, "gradient_as_bucket_view": view}
    ddp_lockstep.assert_equal_on_all(
        three_ranks, Blocks, ddp_lockstep.blocks_loss, "AdamW-0-foreach", options, micro_batches=micro_batches
    )


class Pair:
    """A plain loop and an attached one."""

    def __init__(self, wrapping: dict[str, Any], **options: Any) -> None:
        self.models, self.optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            self.models.append(DistributedDataParallel(Blocks(), **SMALL, **wrapping))
            self.optimizers.append(torch.optim.AdamW(two_groups(self.models[-1]), lr=1e-2, foreach=True))
        self.overlap = instep.attach(self.models[1], self.optimizers[1], **options)

    def require_equal(
        self, steps: int, after_backward: Callable[[Any], Any] = lambda model: None, **zeroing: Any
    ) -> None:
        for i in range(steps):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                ddp_lockstep.blocks_loss(model, 1000 * dist.get_rank() + i).backward()
                after_backward(model)
                optimizer.step()
                optimizer.zero_grad(**zeroing)
            self.overlap.synchronize()
            states = (training_state(m, o) for m, o in zip(self.models, self.optimizers, strict=True))
            difference = first_difference(*states)
            assert difference is None, f"iteration {i}: {difference}"
        assert self.overlap.step_count == steps
        self.overlap.detach()


def in_a_way(option: dict[str, Any], view: bool, way: dict[str, Any], zeros: bool) -> None:
    Pair({**option, "gradient_as_bucket_view": view}, **way).require_equal(4, set_to_none=not zeros)


@each_option
@each_view
@pytest.mark.parametrize(
    ("way", "zeros"),
    [
        ({"schedule": "backward"}, False),
        ({"schedule": "forward", "defer": True}, False),
        ({"schedule": "backward", "undo": True}, False),
        ({"schedule": "backward", "undo": "host"}, False),
        ({"schedule": "backward", "undo": True}, True),  # gradients that are kept in DDP's buckets
    ],
)
def test_each_way(three_ranks: RankPool, option: dict[str, Any], view: bool, way: dict[str, Any], zeros: bool) -> None:
    three_ranks.run(in_a_way, option, view, way, zeros)


def detached(option: dict[str, Any], view: bool) -> None:
    """The hook that stays computes the mean, and must do so as DDP does."""
    if view and option.get("lazy_bucket_allocation"):
        with pytest.raises(AttachError, match="lazy_bucket_allocation=True, gradient_as_bucket_view=True"):
            Pair({**option, "gradient_as_bucket_view": view}, schedule="backward", shard_state=True)
        return
    pair = Pair({**option, "gradient_as_bucket_view": view}, schedule="backward", shard_state=True)
    pair.overlap.detach()
    pair.overlap = instep.attach(pair.models[1], pair.optimizers[1], schedule="forward", defer=True)
    pair.require_equal(4)


@each_option
@each_view
def test_after_detach_the_mean_is_ddps(three_ranks: RankPool, option: dict[str, Any], view: bool) -> None:
    three_ranks.run(detached, option, view)


def hooked() -> None:
    """As torch 2.15 makes it with ``lazy_bucket_allocation=True``: of older ones the attribute alone is there."""
    options: dict[str, Any] = {"lazy_bucket_allocation": True} if has("lazy_bucket_allocation") else {}
    models = [DistributedDataParallel(Blocks(), gradient_as_bucket_view=True, **options) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model.lazy_bucket_allocation = True  # type: ignore[assignment]
        if model is models[0]:
            model.register_comm_hook(None, allreduce_hook)
            with pytest.raises(AttachError, match=r"has a communication hook.* attach\(…, comm_hook=\(state, hook\)\)"):
                instep.attach(model, optimizer, schedule="backward")
        else:
            with pytest.raises(AttachError, match=r"computes the mean.* attach\(…, comm_hook=\(state, hook\)\)"):
                instep.attach(model, optimizer, schedule="backward", shard_state=True)
            # What was named for the first.
            instep.attach(model, optimizer, schedule="backward", comm_hook=(None, allreduce_hook)).detach()


def test_a_hook_that_the_loop_has_registered_is_the_reason(two_ranks: RankPool) -> None:
    two_ranks.run(hooked)


def sharded(way: str, option: dict[str, Any], view: bool) -> None:
    zero.both(way, wrap=partial(zero.ddp, gradient_as_bucket_view=view, **option))


@pytest.mark.parametrize("way", ["backward", "forward"])
@pytest.mark.parametrize(
    ("option", "view"),
    [
        pytest.param({"lazy_bucket_allocation": True}, False, id="lazy", marks=lazy),
        pytest.param({"batched_grad_copy": True}, True, id="batched", marks=batched),
    ],
)
def test_sharded_state(two_ranks: RankPool, way: str, option: dict[str, Any], view: bool) -> None:
    two_ranks.run(sharded, way, option, view)


manual = pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "require_manual_backward_finalization"),
    reason="this torch's DistributedDataParallel has no require_manual_backward_finalization",
)


def finalize(model: Any) -> None:
    model.finalize_backward()


def set_manual(model: Any) -> None:
    model.require_manual_backward_finalization = True


def zero_one_by_one(model: Any, first: Any, second: Any) -> None:
    for optimizer in (first, second):
        optimizer.step()
    for p in model.parameters():
        p.grad.zero_()


def clip_between(model: Any, first: Any, second: Any) -> None:
    first.step()
    torch.nn.utils.clip_grad_norm_([p for group in second.param_groups for p in group["params"]], 0.1)
    second.step()
    for optimizer in (first, second):
        optimizer.zero_grad(set_to_none=False)


def written_beside_what_is_due(loop: Callable[[Any, Any, Any], None]) -> str | None:
    """Gradients that are views of one bucket count their writes together."""
    states = []
    for attaches in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Blocks(), gradient_as_bucket_view=True)
        optimizers = [
            torch.optim.SGD(group["params"], lr=0.1, momentum=0.9, foreach=False) for group in two_groups(model)
        ]
        overlap = instep.attach(model, optimizers, schedule="forward", defer=True) if attaches else None
        for i in range(5):
            ddp_lockstep.blocks_loss(model, 1000 * dist.get_rank() + i).backward()
            loop(model, *optimizers)
        states.append([training_state(model, optimizer) for optimizer in optimizers])
        if overlap is not None:
            overlap.detach()
    return next(filter(None, starmap(first_difference, zip(*states, strict=True))), None)


@pytest.mark.parametrize("loop", [zero_one_by_one, clip_between])
def test_a_bucket_is_written_beside_what_is_due(two_ranks: RankPool, loop: Callable[[Any, Any, Any], None]) -> None:
    assert two_ranks.run(written_beside_what_is_due, loop) == [None] * 2


def finalized_by_hand(view: bool) -> None:
    pair = Pair({"gradient_as_bucket_view": view}, schedule="forward", defer=True)
    for model in pair.models:
        set_manual(model)
    pair.require_equal(4, finalize)


@manual
@each_view
def test_finalized_by_hand(two_ranks: RankPool, view: bool) -> None:
    two_ranks.run(finalized_by_hand, view)


REFUSED: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "shard_state": {"schedule": "backward", "shard_state": True},
    "shard_state, forward": {"shard_state": True, "schedule": "forward", "defer": True},
    "comm_hook, forward": {"comm_hook": (None, allreduce_hook), "schedule": "forward", "defer": True},
    "clip, forward": {"clip": instep.ClipNorm(1.0), "schedule": "forward", "defer": True},
}


def refused(way: dict[str, Any]) -> None:
    model: Any = DistributedDataParallel(Blocks(), **SMALL, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    set_manual(model)
    with pytest.raises(AttachError, match="require_manual_backward_finalization is set"):
        instep.attach(model, optimizer, **way)
    model.require_manual_backward_finalization = False
    with instep.attach(model, optimizer, **way):
        set_manual(model)  # after attach
        before = [p.detach().clone() for p in model.parameters()]
        loss = ddp_lockstep.blocks_loss(model, 0)
        with pytest.raises(AttachError, match="require_manual_backward_finalization is set"):
            loss.backward()
    assert all(map(torch.equal, before, model.parameters()))


@manual
@pytest.mark.parametrize("way", REFUSED)
def test_manual_finalization_is_refused(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(refused, REFUSED[way])


def refused_in_backward() -> None:
    """Of the functional API."""
    module = Blocks()
    instep.apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module, **SMALL)
    set_manual(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(AttachError, match="require_manual_backward_finalization is set"):
        ddp_lockstep.blocks_loss(model, 0).backward()
    assert all(map(torch.equal, before, model.parameters()))


@manual
def test_in_backward_optimizers_refuse_manual_finalization(two_ranks: RankPool) -> None:
    two_ranks.run(refused_in_backward)
