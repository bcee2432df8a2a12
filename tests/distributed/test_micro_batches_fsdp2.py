"""``micro_batches()`` of models that ``fully_shard`` was applied to: one reduction of each group a step, and the
numbers of the loop that leaves the gradients of all micro-batches but the last unreduced."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils.checkpoint import checkpoint

import instep
from instep.errors import AccumulationError, InstepError
from instep.sources.fsdp.micro_batches import END
from instep.sources.fsdp.modules import fsdp2_groups, fsdp2_in
from instep_tools.harness import first_difference
from tests.cases import Blocks, Checkpointed, Sometimes, Tied, batch
from tests.devices import here
from tests.distributed.pool import RankPool
from tests.distributed.sharded import WAYS, Loop, both, fsdp1, hsdp, nested, parameters_of

STEPS = 3
COUNTS = (3, 1, 2, 5)
"""Of micro-batches, step by step."""
GATHERED, REDUCED = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
ALL_REDUCED = "c10d::allreduce_"
Losses = Callable[[nn.Module, int, int], torch.Tensor]


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(1000 * dist.get_rank() + seed)


def loss_of_blocks(model: nn.Module, seed: int, micro: int) -> torch.Tensor:
    x, y = inputs(seed)
    return nn.functional.cross_entropy(model(x).float(), y) / 3


def tied_loss(model: nn.Module, seed: int, micro: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * dist.get_rank() + seed)
    words = torch.randint(0, 32, (3, 7), generator=generator, device="cpu").to(here())
    return nn.functional.cross_entropy(model(words).float().flatten(0, 1), words.flatten()) / 3


def many_words() -> nn.Module:
    """Of most words no micro-batch has any."""
    return Tied(words=512)


def one_expert(chosen: Sequence[int | None], model: nn.Module, seed: int, micro: int) -> torch.Tensor:
    x, y = inputs(seed)
    return nn.functional.cross_entropy(model(x, chosen[micro % len(chosen)]), y) / 3


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def accumulate(model: Any, micro: int, count: int) -> None:
    model.set_requires_gradient_sync(micro == count - 1)


def step(loss: Losses, counts: Sequence[int], loop: Loop, i: int) -> torch.Tensor:
    """By the verb, or as the plain loop."""
    count = counts[i % len(counts)]
    seeds = [(10 * i + micro, micro) for micro in range(count)]
    if loop.overlap is not None:
        losses = loop.overlap.micro_batches(lambda given: loss(loop.model, *given), seeds)
    else:
        losses = []
        for seed, micro in seeds:
            accumulate(loop.model, micro, count)
            losses.append(loss(loop.model, seed, micro))
            losses[-1].backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert all(_is_sharded(group) for group in groups_in(loop.model)), "gathered weights are left"
    return torch.stack([one.detach() for one in losses])


def step_that_waits(loss: Losses, counts: Sequence[int], loop: Loop, i: int) -> torch.Tensor:
    """The plain loop, but for its call of backward."""
    count = counts[i % len(counts)]
    losses = []
    for micro in range(count):
        accumulate(loop.model, micro, count)
        losses.append(loss(loop.model, 10 * i + micro, micro))
        if loop.overlap is not None:
            loop.overlap.backward(losses[-1], more=micro < count - 1)
        else:
            losses[-1].backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return torch.stack([one.detach() for one in losses])


def groups_in(model: nn.Module) -> Iterator[Any]:
    for module in fsdp2_in(model):
        yield from fsdp2_groups(module._get_fsdp_state())  # type: ignore[operator]


def _is_sharded(group: Any) -> bool:
    return all(
        tensor.untyped_storage().size() == 0
        for parameter in group.fsdp_params
        for tensor in parameter.all_gather_outputs
    )


def train(
    shard: Callable[[nn.Module], nn.Module],
    build: Callable[[], nn.Module] = Blocks,
    loss: Losses = loss_of_blocks,
    way: str = "backward",
    counts: Sequence[int] = COUNTS,
    iteration: Callable[[Losses, Sequence[int], Loop, int], torch.Tensor] = step,
    **options: Any,
) -> None:
    both(way, shard, adamw, partial(iteration, loss, counts), build, steps=len(counts), **options)


@pytest.mark.parametrize("way", WAYS)
def test_every_way(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(train, nested, way=way)


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_that_waits(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(train, nested, way=way, iteration=step_that_waits)


class Inside(nn.Module):
    """A block that checkpoints what it does."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
        return found


def checkpointed_inside() -> nn.Module:
    model = Blocks()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Inside(block)
    return model


def blocks_alone(model: Any) -> nn.Module:
    """The root has no parameters of its own."""
    fully_shard(model.inner)
    fully_shard(model.outer)
    return nested(model)


def whole(model: Any, **options: Any) -> Any:
    return fully_shard(model, **options)


def deeper(model: Any) -> nn.Module:
    """Groups in groups."""
    for block in model.blocks:
        fully_shard(block[1])
    return nested(model)


def together(model: Any) -> nn.Module:
    """Two modules in one group."""
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard(model.blocks[2])
    return fully_shard(model)


def prefetched(model: Any) -> nn.Module:
    nested(model)
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    return model


SHARDED: Mapping[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], Losses]] = {
    "one group": (Blocks, whole, loss_of_blocks),
    "groups in groups": (Blocks, deeper, loss_of_blocks),
    "a root without parameters": (Blocks, blocks_alone, loss_of_blocks),
    "two modules in a group": (Blocks, together, loss_of_blocks),
    "gathered ahead as the loop says": (Blocks, prefetched, loss_of_blocks),
    "not resharded after forward": (Blocks, partial(nested, reshard_after_forward=False), loss_of_blocks),
    "resharded after forward": (Blocks, partial(nested, reshard_after_forward=True), loss_of_blocks),
    "checkpointed groups": (Checkpointed, nested, loss_of_blocks),
    "checkpointed inside of groups": (checkpointed_inside, nested, loss_of_blocks),
    "tied weights": (Tied, whole, tied_loss),
    "tied weights, few of whose rows are looked up": (many_words, whole, tied_loss),
    "on the host": (Blocks, partial(nested, offload_policy=CPUOffloadPolicy(pin_memory=False)), loss_of_blocks),
}


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_in_every_way(two_ranks: RankPool, name: str) -> None:
    build, shard, loss = SHARDED[name]
    two_ranks.run(train, shard, build, loss)


def experts(model: Any) -> nn.Module:
    for expert in model.experts:
        fully_shard(expert)
    return fully_shard(model)


@pytest.mark.parametrize("chosen", [(None, 1, 1), (0, 0, None, 0), (None, 1), (None, None)], ids=str)
def test_groups_that_some_micro_batches_do_not_use(two_ranks: RankPool, chosen: Any) -> None:
    two_ranks.run(train, experts, Sometimes, partial(one_expert, chosen), counts=(len(chosen),) * STEPS)


@pytest.mark.parametrize("chosen", [(0, 1, None), (0, 1, 1)], ids=str)
def test_groups_that_the_last_micro_batch_does_not_use(two_ranks: RankPool, chosen: Any) -> None:
    """FSDP2 reduces them where backward ends; before torch 2.8 or so it does not."""
    said = two_ranks.run(_or_refused, experts, Sometimes, partial(one_expert, chosen), counts=(len(chosen),) * STEPS)
    if torch.__version__.startswith(("2.6", "2.7")):
        assert all(one is not None and "is not used in the last micro-batch" in one for one in said)
    else:
        assert said == [None] * 2


def _or_refused(*args: Any, **options: Any) -> str | None:
    try:
        train(*args, **options)
    except AccumulationError as error:
        return str(error)
    return None


POLICIES = {
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "reduced in bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "all in bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shard", [nested, whole])
def test_mixed_precision(two_ranks: RankPool, policy: str, shard: Any) -> None:
    two_ranks.run(train, partial(shard, mp_policy=POLICIES[policy]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("build", [Tied, many_words])
def test_tied_weights_in_mixed_precision(two_ranks: RankPool, build: Any, policy: str) -> None:
    found = two_ranks.run(_or_refused, partial(whole, mp_policy=POLICIES[policy]), build, tied_loss)
    if found != [None] * 2:
        assert hasattr(torch.Tensor, "_has_grad_dtype_override"), "FSDP2 has autograd cast gradients"
        assert all("is used several times in a micro-batch, with mixed precision" in str(one) for one in found)


def _attached(shard: Callable[[nn.Module], nn.Module] = nested, build: Any = Blocks, **options: Any) -> Loop:
    torch.manual_seed(0)
    model = shard(build())
    loop = Loop(model, adamw(model))
    loop.overlap = instep.attach(loop.model, loop.optimizer, **{"schedule": "backward", **options})
    return loop


FOUR: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "hsdp": hsdp,
    "resharded to two of four": partial(nested, reshard_after_forward=2),
}


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(four_ranks: RankPool, name: str) -> None:
    four_ranks.run(train, FOUR[name])


# HSDP's deferred all-reduce: each micro-batch is reduced over the shards, and over the replicas with the last.


def in_the_loop(loss: Losses, counts: Sequence[int], loop: Loop, i: int) -> torch.Tensor:
    """The plain loop, but for its call of backward."""
    count = counts[i % len(counts)]
    losses = []
    for micro in range(count):
        loop.model.set_requires_all_reduce(micro == count - 1)
        losses.append(loss(loop.model, 10 * i + micro, micro))
        if loop.overlap is None:
            losses[-1].backward()
        else:
            loop.overlap.backward(losses[-1], more=micro < count - 1)
    return _stepped_once(loop, losses)


def set_before(loss: Losses, counts: Sequence[int], loop: Loop, i: int) -> torch.Tensor:
    """The switch stands before the verb, which knows the last."""
    if loop.overlap is None:
        return in_the_loop(loss, counts, loop, i)
    loop.model.set_requires_all_reduce(False)
    seeds = [(10 * i + micro, micro) for micro in range(counts[i % len(counts)])]
    losses = loop.overlap.micro_batches(lambda given: loss(loop.model, *given), seeds)
    assert not any(group.all_reduce_grads for group in groups_in(loop.model)), "the loop's switches stay"
    return _stepped_once(loop, losses)


def set_in_the_loss(loss: Losses, counts: Sequence[int], loop: Loop, i: int) -> torch.Tensor:
    """The body of the plain loop, given to the verb."""
    if loop.overlap is None:
        return in_the_loop(loss, counts, loop, i)
    count = counts[i % len(counts)]

    def loss_of(micro: int) -> torch.Tensor:
        loop.model.set_requires_all_reduce(micro == count - 1)
        return loss(loop.model, 10 * i + micro, micro)

    return _stepped_once(loop, loop.overlap.micro_batches(loss_of, range(count)))


def _stepped_once(loop: Loop, losses: Sequence[torch.Tensor]) -> torch.Tensor:
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert all(_is_sharded(group) for group in groups_in(loop.model)), "gathered weights are left"
    assert all(group._partial_reduce_output is None for group in groups_in(loop.model)), "half a reduction is left"
    return torch.stack([one.detach() for one in losses])


DEFERRED = {"in the loop": in_the_loop, "before the verb": set_before, "in the loss": set_in_the_loss}


@pytest.mark.parametrize("way", ["forward", "late"])
@pytest.mark.parametrize("form", DEFERRED)
def test_the_all_reduce_waits_for_the_last(four_ranks: RankPool, form: str, way: str) -> None:
    four_ranks.run(train, hsdp, way=way, iteration=DEFERRED[form])


@pytest.mark.parametrize("form", DEFERRED)
def test_one_backward_reduces_over_the_replicas_too(four_ranks: RankPool, form: str) -> None:
    for said in four_ranks.run(_refused_deferral, DEFERRED[form]):
        assert "set_requires_gradient_sync(False)" in said


def _refused_deferral(iteration: Any) -> str:
    loop = _attached(hsdp)
    with pytest.raises(AccumulationError) as raised:
        iteration(loss_of_blocks, (2,), loop, 0)
    assert loop.overlap.state == "idle"
    return str(raised.value)


def test_micro_batches_that_are_held_leave_the_switch(four_ranks: RankPool) -> None:
    assert four_ranks.run(_held) == [True] * 4


def _held() -> bool:
    """``accumulate()`` holds back all reductions, and what the loop has said of each group's stays."""
    loop = _attached(hsdp)
    loop.model.set_requires_all_reduce(False)
    loop.model.blocks[1].set_requires_gradient_sync(False)
    found = [(group.reduce_grads, group.all_reduce_grads) for group in groups_in(loop.model)]
    assert len(set(found)) == 2
    with loop.overlap.accumulate():
        loss_of_blocks(loop.model, 0, 0).backward()
    return found == [(group.reduce_grads, group.all_reduce_grads) for group in groups_in(loop.model)]


# What FSDP2 communicates, and what it is left as.


@pytest.mark.parametrize("micro", [2, 5])
def test_one_reduction_of_each_group(two_ranks: RankPool, micro: int) -> None:
    for plain, gathered, reduced in two_ranks.run(_communicated, micro):
        assert reduced == plain == 4, "one for each group"
        # The root stays gathered after the first forward.
        assert gathered == 4 + 3 * (micro - 1) + 3, "each forward gathers the others, and one backward does"


def _communicated(micro: int) -> tuple[int, int, int]:
    """In the last backward of a plain step, reductions; in the one backward, gathers and reductions. The profiler sees
    nothing of the threads of the forwards."""
    loop = _attached()
    step(loss_of_blocks, (3,), loop, 0)
    with torch.profiler.profile() as profile:
        loop.overlap.micro_batches(lambda seed: loss_of_blocks(loop.model, seed, 0), range(micro))
    names = Counter(event.name for event in profile.events())
    loop.optimizer.step()
    loop.overlap.detach()
    with torch.profiler.profile() as profile:
        loss_of_blocks(loop.model, 1, 0).backward()
    plain = Counter(event.name for event in profile.events())
    return plain[REDUCED], names[GATHERED], names[REDUCED]


def test_a_group_is_stepped_once_it_is_reduced(two_ranks: RankPool) -> None:
    assert two_ranks.run(_stepped) == [[0, 1, 2, 3]] * 2


def _stepped() -> list[int]:
    """Before each reduction, how many groups the optimizer has stepped in this step."""
    loop = _attached()
    step(loss_of_blocks, (3,), loop, 0)
    firsts = [group.fsdp_params[0].sharded_param for group in groups_in(loop.model)]
    steps: list[int] = []
    with BeforeReducing(lambda: steps.append(sum(int(loop.optimizer.state[p]["step"]) == 2 for p in firsts))):
        step(loss_of_blocks, (3,), loop, 1)
    return steps


def test_a_forward_before_without_a_backward(two_ranks: RankPool) -> None:
    assert two_ranks.run(_forward_before) == [4 * 5, 4 * 5]


def _forward_before() -> int:
    """The groups that are gathered in three forwards and one backward. FSDP2 has noted the forward before, and would
    gather ahead of it."""
    loop = _attached(blocks_alone)
    step(loss_of_blocks, (3,), loop, 0)
    loss_of_blocks(loop.model, 0, 0)
    with torch.profiler.profile() as profile:
        loop.overlap.micro_batches(lambda seed: loss_of_blocks(loop.model, seed, 0), range(3))
    loop.optimizer.step()
    return sum(event.name == GATHERED for event in profile.events())


def _with_gradients(model: nn.Module) -> int:
    """The groups that have a gradient which is not reduced. Of the one that is being reduced FSDP2 has taken it."""
    return 1 + sum(
        any(p._unsharded_param.grad is not None for p in group.fsdp_params if hasattr(p, "_unsharded_param"))
        for group in groups_in(model)
    )


class BeforeReducing:
    """Calls ``call`` before FSDP2 reduces a group's gradients."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._found = found = _fsdp_param_group.foreach_reduce

        def calling(*args: Any, **kwargs: Any) -> Any:
            self._call()
            return found(*args, **kwargs)

        _fsdp_param_group.foreach_reduce = calling

    def __exit__(self, *_: object) -> None:
        _fsdp_param_group.foreach_reduce = self._found


class BrokenError(Exception):
    pass


def _raise() -> None:
    raise BrokenError


@pytest.mark.parametrize("where", ["in the first reduction", "in the last reduction", "in a forward", "in a backward"])
def test_a_step_after_an_error(two_ranks: RankPool, where: str) -> None:
    assert two_ranks.run(_after_an_error, where) == [None] * 2


def _after_an_error(where: str) -> str | None:
    """With ``undo``, which puts back what the step has written: as if the step had not been."""
    loops = [_attached(undo=True) for _ in range(2)]
    for loop in loops:
        step(loss_of_blocks, (3,), loop, 0)
    broken = loops[1]
    found = _switches(broken.model)
    with pytest.raises(BrokenError):
        _break(broken, where)
    assert _switches(broken.model) == found
    broken.overlap.rollback()
    broken.optimizer.zero_grad()
    for loop in loops:
        step(loss_of_blocks, (3,), loop, 1)
        step(loss_of_blocks, (2,), loop, 2)
    return first_difference(*(parameters_of(loop.model, loop.optimizer) for loop in loops))


def _break(loop: Loop, where: str) -> None:
    number = {"in the first reduction": 1, "in the last reduction": 4}.get(where)
    reductions = itertools.count(1)

    def loss_of(seed: int) -> torch.Tensor:
        if where == "in a forward" and seed == 2:
            _raise()
        loss = loss_of_blocks(loop.model, 100 + seed, seed)
        if where == "in a backward" and seed == 1:
            next(node for node in _graph(loss) if node.name() == END).register_prehook(lambda gradients: _raise())
        return loss

    with BeforeReducing(lambda: _raise() if next(reductions) == number else None):
        loop.overlap.micro_batches(loss_of, range(3))


def _graph(loss: torch.Tensor) -> Iterator[Any]:
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def _switches(model: nn.Module) -> list[tuple[bool, bool]]:
    return [(group.reduce_grads, group.reshard_after_backward) for group in groups_in(model)]


def test_an_error_while_the_switches_are_set(two_ranks: RankPool) -> None:
    assert two_ranks.run(_between_hooks) == [True] * 2


def _between_hooks() -> bool:
    """In FSDP2's own end of a group's backward that is not the last."""
    loop = _attached(undo=True)
    step(loss_of_blocks, (3,), loop, 0)
    found = _switches(loop.model)
    group: Any = next(one for one in groups_in(loop.model) if "2" in one._module_fqn)
    seen: list[tuple[bool, bool]] = []

    def broken(*_: object) -> None:
        seen.append((group.reduce_grads, group.reshard_after_backward))
        raise BrokenError

    group.post_backward = broken
    with pytest.raises(BrokenError):
        loop.overlap.micro_batches(lambda seed: loss_of_blocks(loop.model, seed, 0), range(3))
    del group.post_backward
    assert seen == [(False, False)]
    return _switches(loop.model) == found


def test_the_names_that_are_used(two_ranks: RankPool) -> None:
    assert two_ranks.run(_names) == [True] * 2


def _names() -> bool:
    """FSDP2's node in the graph, by its name, refers to the group."""
    model: Any = nested(Blocks())
    found = [node.param_group for node in _graph(loss_of_blocks(model, 0, 0)) if node.name() == END]
    groups = list(groups_in(model.blocks))
    assert len(groups) == 3
    assert all(any(group is one for one in found) for group in groups)
    return all(hasattr(p, "unsharded_accumulated_grad") for group in groups for p in group.fsdp_params)


# What is refused.


class Twice(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.outer(self.blocks[1](self.inner(x)))


class Outside(Blocks):
    """Uses a weight of the second block in the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        self.blocks[1].unshard()  # type: ignore[operator]
        x = x * self.blocks[1][0].weight  # type: ignore[index]
        for block in self.blocks:
            x = x + block(x)
        return self.outer(x)


class WithATeacher(Blocks):
    """Another sharded model takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher: list[Any] = [fully_shard(Blocks(out=16))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + super().forward(self.teacher[0](x + super().forward(x).sum()))


REFUSED: Mapping[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], str]] = {
    "a group that runs twice": (Twice, nested, "group 'blocks.1' runs 2 times in the last micro-batch"),
    "a weight from outside": (Outside, nested, "'blocks.1' are computed in micro-batch 1 after FSDP2 has reduced them"),
    "another model": (WithATeacher, nested, "a model that fully_shard was applied to, and that is not attached"),
    "fsdp1": (Blocks, fsdp1, "does not run with FSDP1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(two_ranks: RankPool, name: str) -> None:
    build, shard, match = REFUSED[name]
    for said in two_ranks.run(_refused, build, shard):
        assert said.startswith(f"{AccumulationError.__name__}: ")
        assert match in said


def _refused(build: Callable[[], nn.Module], shard: Callable[[nn.Module], nn.Module]) -> str:
    loop = _attached(shard, build)
    try:
        loop.overlap.micro_batches(lambda seed: loss_of_blocks(loop.model, seed, 0), range(3))
    except InstepError as error:
        assert loop.overlap.state == "idle"
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("policy", ["bf16, reduced in fp32", "all in bf16"])
def test_gradients_from_before(two_ranks: RankPool, policy: str) -> None:
    for said in two_ranks.run(_from_before, POLICIES[policy]):
        assert "from an earlier backward" in said


def _from_before(policy: MixedPrecisionPolicy) -> str:
    loop = _attached(partial(nested, mp_policy=policy))
    with loop.overlap.accumulate():
        loss_of_blocks(loop.model, 0, 0).backward()
    with pytest.raises(AccumulationError) as raised:
        loop.overlap.micro_batches(lambda seed: loss_of_blocks(loop.model, seed, 0), range(3))
    return str(raised.value)
