"""``micro_batches()`` on ranks: one reduction a step, and the numbers of ``no_sync()`` around all micro-batches but the
last."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import instep
from instep import ClipNorm
from instep.errors import AccumulationError, InstepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, Sometimes, batch, two_groups
from tests.distributed.comm_hooks import HOOKS
from tests.distributed.pool import RankPool
from tests.distributed.reduced import ddp

COUNT = 3
STEPS = 3
Losses = Callable[[nn.Module, int], torch.Tensor]


SOURCES: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp,
    "ddp, views": partial(ddp, gradient_as_bucket_view=True),
    "ddp, unused": partial(ddp, find_unused_parameters=True),
    "replicate": partial(instep.replicate, bucket_cap_mb=0.004),
}


def blocks_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x), y) / COUNT


def experts_now_and_then(model: nn.Module, seed: int) -> torch.Tensor:
    """One expert in the first micro-batch of each step, the other in the second on one rank; in the last none."""
    x, y = batch(seed)
    expert = {0: 0, 1: 1 if dist.get_rank() == 1 else None}.get(seed % COUNT)
    return nn.functional.cross_entropy(model(x, expert), y) / COUNT


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, foreach=True)


def compare(
    make: Callable[[], nn.Module], loss: Losses, plain_source: str, source: str, waits: bool = False, **options: Any
) -> str | None:
    """The first difference, in words; by the verb, or ``waits``: by ``backward(more=True)``."""
    models, optimizers = [], []
    for name in (plain_source, source):
        torch.manual_seed(0)
        models.append(SOURCES[name](make()))
        optimizers.append(optimizer_of(models[-1]))
    found = []
    with instep.attach(models[1], optimizers[1], **{"schedule": "backward", **options}) as overlap:
        for i in range(STEPS):
            seeds = [1000 * dist.get_rank() + COUNT * i + micro for micro in range(COUNT)]
            plain_losses = _plain(models[0], loss, seeds, options)
            optimizers[0].step()
            optimizers[0].zero_grad()
            if waits:
                losses = _waiting(overlap, models[1], loss, seeds)
            else:
                losses = overlap.micro_batches(partial(loss, models[1]), seeds)
            optimizers[1].step()
            optimizers[1].zero_grad()
            overlap.synchronize()
            found.append(first_difference(_named(plain_losses), _named(losses)))
            found.append(first_difference(*map(_state, models, optimizers)))
    return next((one for one in found if one is not None), None)


def _plain(model: Any, loss: Losses, seeds: list[int], options: Mapping[str, Any]) -> list[torch.Tensor]:
    losses = []
    for micro, seed in enumerate(seeds):
        with nullcontext() if micro == COUNT - 1 else model.no_sync():
            losses.append(loss(model, seed))
            losses[-1].backward()
    if "clip" in options:
        nn.utils.clip_grad_norm_(model.parameters(), options["clip"].max_norm)
    return [one.detach() for one in losses]


def _waiting(overlap: instep.Attachment, model: Any, loss: Losses, seeds: list[int]) -> list[torch.Tensor]:
    losses = []
    for micro, seed in enumerate(seeds):
        more = micro < COUNT - 1
        with model.no_sync() if more else nullcontext():
            losses.append(loss(model, seed))
            overlap.backward(losses[-1], more=more)
    return [one.detach() for one in losses]


def _named(losses: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"loss {number}", one) for number, one in enumerate(losses))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    return ((name.replace("'inner.", "'", 1), value) for name, value in training_state(model, optimizer))


@pytest.mark.parametrize("options", [{}, {"undo": True}, {"schedule": "forward", "defer": True}], ids=str)
@pytest.mark.parametrize("source", ["ddp", "ddp, views"])
def test_ddp(three_ranks: RankPool, source: str, options: dict[str, Any]) -> None:
    assert three_ranks.run(compare, Blocks, blocks_loss, source, source, **options) == [None] * 3


@pytest.mark.parametrize("options", [{}, {"undo": True}, {"clip": ClipNorm(0.1, mode="two_pass")}], ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_a_backward_that_waits(two_ranks: RankPool, source: str, options: dict[str, Any]) -> None:
    plain = "ddp" if source == "replicate" else source
    build, loss = (Sometimes, experts_now_and_then) if source == "ddp, unused" else (Blocks, blocks_loss)
    assert two_ranks.run(compare, build, loss, plain, source, True, **options) == [None] * 2


def _outside_of_no_sync() -> None:
    torch.manual_seed(0)
    model = ddp(Blocks())
    optimizer = optimizer_of(model)
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        with pytest.raises(AccumulationError, match=r"came outside of no_sync\(\)"):
            overlap.backward(blocks_loss(model, 0), more=True)
        assert all(p.grad is None for p in model.parameters())
        with overlap.accumulate():
            overlap.backward(blocks_loss(model, 1), more=True)
        overlap.backward(blocks_loss(model, 2))
        optimizer.step()


def test_a_backward_that_waits_outside_of_no_sync(two_ranks: RankPool) -> None:
    two_ranks.run(_outside_of_no_sync)


def test_replicate(two_ranks: RankPool) -> None:
    assert two_ranks.run(compare, Blocks, blocks_loss, "ddp", "replicate") == [None] * 2


def _train(models: list[Any], optimizers: list[torch.optim.Optimizer], overlap: instep.Attachment) -> None:
    """Both, the second by the verb."""
    for i in range(STEPS):
        seeds = [1000 * dist.get_rank() + COUNT * i + micro for micro in range(COUNT)]
        _plain(models[0], blocks_loss, seeds, {})
        overlap.micro_batches(partial(blocks_loss, models[1]), seeds)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_sharded_state(two_ranks: RankPool) -> None:
    assert two_ranks.run(_sharded_state) == [None] * 2


def _sharded_state() -> str | None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(ddp(Blocks()))
    optimizers = list(map(optimizer_of, models))
    with instep.attach(models[1], optimizers[1], schedule="backward", shard_state=True) as overlap:
        _train(models, optimizers, overlap)
    return first_difference(models[0].named_parameters(), models[1].named_parameters())


def test_a_communication_hook(two_ranks: RankPool) -> None:
    assert two_ranks.run(_hooked) == [None] * 2


def _hooked() -> str | None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(ddp(Blocks()))
    state, hook = HOOKS["fp16"]
    models[0].register_comm_hook(state(), hook)
    optimizers = list(map(optimizer_of, models))
    with instep.attach(models[1], optimizers[1], schedule="backward", comm_hook=(state(), hook)) as overlap:
        _train(models, optimizers, overlap)
    return first_difference(*map(_state, models, optimizers))


@pytest.mark.parametrize("options", [{}, {"undo": True}], ids=str)
def test_parameters_that_are_unused_in_the_last_micro_batch(two_ranks: RankPool, options: dict[str, Any]) -> None:
    found = two_ranks.run(compare, Sometimes, experts_now_and_then, "ddp, unused", "ddp, unused", **options)
    assert found == [None] * 2


def test_one_reduction_a_step(two_ranks: RankPool) -> None:
    plain, attached = two_ranks.run(_reductions)[0]
    assert plain == attached > 1


def _reductions() -> tuple[int, int]:
    """Collectives of a step with ``no_sync()``, and with the verb."""
    counts = []
    for attach in (False, True):
        model = ddp(Blocks())
        optimizer = optimizer_of(model)
        with instep.attach(model, optimizer, schedule="backward") if attach else nullcontext() as overlap:
            for i in range(2):
                with torch.profiler.profile() as profile:
                    if overlap is None:
                        _plain(model, blocks_loss, list(range(COUNT)), {})
                    else:
                        overlap.micro_batches(partial(blocks_loss, model), range(COUNT))
                if i == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            counts.append(sum(event.name == "c10d::allreduce_" for event in profile.events()))
            optimizer.step()
    return counts[0], counts[1]


# What is refused.


def _refused(wrap: Callable[[nn.Module], nn.Module], batches: Any, make: Any = Blocks, loss: Any = blocks_loss) -> str:
    torch.manual_seed(0)
    model = wrap(make())
    optimizer = optimizer_of(model)
    with instep.attach(model, optimizer, schedule="backward") as overlap:
        try:
            overlap.micro_batches(partial(loss, model), batches)
        except InstepError as error:
            assert overlap.state == "idle"
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("wrap", "make", "loss", "match"),
    [(partial(ddp, static_graph=True), Blocks, blocks_loss, "static_graph")],
    ids=["static graph"],
)
def test_refused_by_name(two_ranks: RankPool, wrap: Any, make: Any, loss: Any, match: str) -> None:
    found = two_ranks.run(_refused, wrap, [0, 1, 2], make, loss)
    assert all(one.startswith(f"{AccumulationError.__name__}: ") and match in one for one in found), found


def test_which_one_is_the_last_must_be_known(two_ranks: RankPool) -> None:
    found = two_ranks.run(_unsized)
    assert all("give a list, not generator" in one for one in found), found


class Short(list[int]):
    """Says that it has more than it gives."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


def test_batches_that_run_out_early(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_short):
        assert "was given 3 batches by len(), and 2 came" in said


def _short() -> str:
    return _refused(ddp, Short(range(3)))


def _unsized() -> str:
    return _refused(ddp, (i for i in range(3)))
