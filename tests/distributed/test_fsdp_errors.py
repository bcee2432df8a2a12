"""An error in a forward or backward of a sharded model that the loop catches: training goes on as if that iteration
had never been. The oracle is a plain loop that never ran it."""

import copy
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import instep
from instep.errors import InstepError, TornStepError
from instep.sources.fsdp.recovery import rebuild_fsdp2
from tests.cases import two_groups
from tests.devices import here, on_cpu_only
from tests.distributed.pool import RankPool
from tests.distributed.sharded import WAYS, Loop
from tests.distributed.sharded_failures import (
    FSDP1,
    FSDP2,
    ON_FOUR,
    PASSING,
    BoomError,
    build,
    failing,
    fsdp2_state,
    moved,
    require_equal,
    values,
)
from tests.late import late_updates
from tests.pace import Pace

warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


WHERE = ("forward", "backward", "gradient", "early")


def goes_on(name: str, where: str, way: str, steps: int = 4) -> None:
    plain, loop = build(name), build(name)
    held = [id(p) for p in loop.model.parameters()]
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way])
    with late_updates() if way == "late" else nullcontext():
        for i in range(steps):
            if i % 2 == 0:
                before = values(loop) if way != "late" else []
                with failing(loop.model, where), pytest.raises(BoomError):
                    loop.backward(100 + i)
                assert [id(p) for p in loop.model.parameters()] == held, "not the parameters that the optimizer holds"
                assert not before or all(map(torch.equal, before, values(loop))), "it was written"
                loop.optimizer.zero_grad()
            plain.learn(i)
            loop.learn(i)
            if way != "late" or i == steps - 1:
                require_equal(plain, loop, f"iteration {i}")
    assert loop.overlap.step_count == steps
    loop.overlap.detach()


def steps_before(name: str, where: str, way: str) -> bool:
    """Whether parameters are stepped before the error."""
    return way == "backward" and where in ("backward", "gradient") and name != "root only"


def cases(names: Mapping[str, Any], every: int) -> Iterator[Any]:
    """One in ``every`` by default, nightly all."""
    found = [
        (name, where, way) for name in names for where in WHERE for way in WAYS if not steps_before(name, where, way)
    ]
    for number, case in enumerate(found):
        yield pytest.param(*case, marks=[] if number % every == 0 else [pytest.mark.nightly])


@pytest.mark.parametrize(("name", "where", "way"), list(cases(FSDP2, 9)))
def test_training_goes_on(two_ranks: RankPool, name: str, where: str, way: str) -> None:
    two_ranks.run(goes_on, name, where, way)


@pytest.fixture(scope="module")
def four_ranks_for_once(four_ranks: RankPool) -> Iterator[RankPool]:
    """FSDP2 makes groups for each module that it reshards to some ranks. Their threads stay, and wake all the time."""
    yield four_ranks
    four_ranks.stop()


@pytest.mark.parametrize(("name", "where", "way"), list(cases(ON_FOUR, 15)))
def test_training_goes_on_over_four_ranks(four_ranks_for_once: RankPool, name: str, where: str, way: str) -> None:
    four_ranks_for_once.run(goes_on, name, where, way)


def side_by_side() -> tuple[list[bool], list[bool]]:
    plain, loop = build("nested"), build("nested")
    loop.overlap = instep.attach(loop.model, loop.optimizer, undo=True, schedule="backward")
    found = []
    for one in (plain, loop):
        one.learn(0)
        with failing(one.model, "backward"), pytest.raises(BoomError):
            one.backward(1)
        one.optimizer.zero_grad()
        one.learn(2)
        found.append(moved(one, 3))
    assert not all(isinstance(p, DTensor) for p in plain.model.parameters())
    loop.overlap.detach()
    return found[0], found[1]


@on_cpu_only  # on another device it uses memory that it has freed
def test_plain_fsdp2_stops_training_without_a_word(two_ranks: RankPool) -> None:
    """What this is for. Should it fail, torch has become better, and the docs are wrong."""
    for plain, attached in two_ranks.run(side_by_side):
        assert not any(plain)
        assert all(attached)


# A step that was written in part.


def torn(name: str, where: str) -> None:
    loop = build(name)
    held = [id(p) for p in loop.model.parameters()]
    loop.overlap = instep.attach(loop.model, loop.optimizer, schedule="backward")
    loop.learn(0)
    with failing(loop.model, where), pytest.raises(BoomError):
        loop.backward(1)
    if here().type == "cpu":
        assert [id(p) for p in loop.model.parameters()] == held
    after = values(loop)  # waits where the engine of an accelerator has not let go yet of the backward that raised
    assert [id(p) for p in loop.model.parameters()] == held
    for later in (lambda: loop.loss(2), loop.optimizer.step, lambda: loop.backward(3)):
        with pytest.raises(TornStepError):
            later()
        assert [id(p) for p in loop.model.parameters()] == held
    assert all(map(torch.equal, after, values(loop)))
    loop.overlap.accept_torn()
    assert all(moved(loop, 4))
    assert all(moved(loop, 5))
    # From here on, it is the plain loop's model.
    plain = build(name)
    with torch.no_grad():
        for p, q in zip(plain.model.parameters(), loop.model.parameters(), strict=True):
            p.copy_(q)
    plain.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    plain.learn(6)
    loop.learn(6)
    require_equal(plain, loop, "after the torn step was accepted")
    loop.overlap.detach()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("nested", "backward"),
        pytest.param("prefetched", "gradient", marks=pytest.mark.nightly),
        pytest.param("not resharded", "backward", marks=pytest.mark.nightly),
        pytest.param("mixed precision", "gradient", marks=pytest.mark.nightly),
    ],
)
def test_a_torn_step_says_so_and_can_be_accepted(two_ranks: RankPool, name: str, where: str) -> None:
    two_ranks.run(torn, name, where)


BAD: set[int] = set()


class Fails(torch.optim.SGD):
    """Cannot step some parameters, once."""

    def step(self, closure: Any = None) -> Any:
        if any(id(p) in BAD for group in self.param_groups for p in group["params"] if p.grad is not None):
            BAD.clear()
            raise BoomError
        return super().step(closure)


def update_fails(name: str) -> None:
    """On trial, in backward: that is put back, and ``step()`` takes the step as a whole."""
    plain, loop = build(name), build(name)
    for one in (plain, loop):
        one.optimizer = Fails(two_groups(one.model), lr=0.1, momentum=0.9)
    loop.overlap = instep.attach(loop.model, loop.optimizer, undo=True, schedule="backward")
    for i in range(3):
        plain.learn(i)
        BAD.update(id(p) for p in loop.model.get_submodule("blocks.1").parameters())
        loop.learn(i)
        assert not BAD, "no update was on trial"
        require_equal(plain, loop, f"iteration {i}")
    loop.overlap.detach()


@pytest.mark.parametrize("name", ["nested", pytest.param("fsdp1", marks=pytest.mark.nightly)])
def test_an_update_that_fails(two_ranks: RankPool, name: str) -> None:
    two_ranks.run(update_fails, name)


# Micro-batches.


@contextmanager
def without_sync(loop: Loop) -> Iterator[None]:
    loop.model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        loop.model.set_requires_gradient_sync(True)


def micro_batch(loop: Loop, i: int, last: bool, how: str) -> None:
    if last or (how == "accumulation_steps" and loop.overlap is not None):
        loop.backward(i)
        return
    with loop.overlap.accumulate() if how == "accumulate" and loop.overlap is not None else without_sync(loop):
        loop.backward(i)


def micro_batches(name: str, way: str, how: str) -> None:
    """After a failed backward the loop starts its micro-batches again; after a failed forward it goes on."""
    options: dict[str, Any] = {"accumulation_steps": 3} if how == "accumulation_steps" else {}
    plain, loop = build(name), build(name)
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way], **options)
    for i in range(4):
        for failed in (1, 2):
            for number in range(failed):
                micro_batch(loop, 1000 + number, False, how)
            with failing(loop.model, "early"), pytest.raises(BoomError):
                micro_batch(loop, 1000 + failed, failed == 2, how)
            loop.optimizer.zero_grad()
        for number in range(3):
            micro_batch(plain, 3 * i + number, number == 2, how)
            if number == i:
                with failing(loop.model, "forward"), pytest.raises(BoomError):
                    micro_batch(loop, 2000, number == 2, how)
            micro_batch(loop, 3 * i + number, number == 2, how)
        for one in (plain, loop):
            one.optimizer.step()
            one.optimizer.zero_grad()
        require_equal(plain, loop, f"iteration {i}")
    loop.overlap.detach()


HOW = ("sync", "accumulate", "accumulation_steps")


@pytest.mark.parametrize(
    ("name", "way", "how"),
    [
        pytest.param(name, way, how, marks=[] if default else [pytest.mark.nightly])
        for name in ("nested", "mixed precision", "not resharded")
        for way in ("backward", "forward", "undo")
        for how in HOW
        for default in [
            (name, way, how)
            in (
                ("nested", "backward", "accumulation_steps"),
                ("mixed precision", "forward", "accumulate"),
                ("nested", "undo", "sync"),
                ("nested", "backward", "sync"),
            )
        ]
    ],
)
def test_micro_batches(two_ranks: RankPool, name: str, way: str, how: str) -> None:
    two_ranks.run(micro_batches, name, way, how)


def second_forward_fails(name: str, way: str) -> None:
    """The graph of the one before is still good."""
    plain, loop = build(name), build(name)
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way])
    for i in range(3):
        for one in (plain, loop):
            loss = one.loss(i)
            if one is loop:
                with failing(one.model, "forward"), pytest.raises(BoomError):
                    one.loss(100 + i)
            loss.backward()
            one.optimizer.step()
            one.optimizer.zero_grad()
        require_equal(plain, loop, f"iteration {i}")
    loop.overlap.detach()


@pytest.mark.parametrize("way", ["backward", pytest.param("forward", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "prefetched" else [pytest.mark.nightly]) for name in FSDP2],
)
def test_a_second_forward_that_fails(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(second_forward_fails, name, way)


# Errors after which torch calls no hook, or none of the model's.


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


def interrupted(name: str, way: str) -> None:
    plain, loop = build(name), build(name)
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way])
    for i in range(4):
        with failing(loop.model, "forward", interrupt), pytest.raises(KeyboardInterrupt):
            loop.backward(100 + i)
        with torch.no_grad():
            for one in (plain, loop):
                for group in one.optimizer.param_groups:
                    for p in group["params"]:
                        p.mul_(0.9)  # with the gathered weights of before the next forward would be wrong
        plain.learn(i)
        loop.learn(i)
        require_equal(plain, loop, f"iteration {i}")
    loop.overlap.detach()


@pytest.mark.parametrize("way", ["backward", pytest.param("forward", marks=pytest.mark.nightly)])
def test_an_interrupted_forward(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(interrupted, "nested", way)


def part_by_itself(where: str, way: str) -> None:
    plain, loop = build("nested"), build("nested")
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way])
    for i in range(4):
        plain.learn(i)
        loop.learn(i)
        require_equal(plain, loop, f"iteration {i}")
        with failing(loop.model, where), pytest.raises(BoomError):
            loop.model.blocks[1](torch.ones(2, 24)).sum().backward()
        loop.optimizer.zero_grad()
    loop.overlap.detach()


@pytest.mark.parametrize("way", ["backward", pytest.param("forward", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_part_called_by_itself(two_ranks: RankPool, where: str, way: str) -> None:
    two_ranks.run(part_by_itself, where, way)


# What is private to torch.


def nothing_left(name: str, where: str, gradients: bool) -> list[str]:
    """What differs from the state between two iterations, of all that FSDP has."""
    loop = build(name)
    for i in range(2):
        loop.learn(i)
    expected = fsdp2_state(loop.model)
    with failing(loop.model, where), pytest.raises(BoomError):
        loop.backward(2)
    loop.optimizer.zero_grad()
    assert fsdp2_state(loop.model) != expected, "there was nothing to do"
    assert rebuild_fsdp2(loop.model, gradients=gradients)
    found = fsdp2_state(loop.model)
    return [
        f"{key}: {expected.get(key)} was, {found.get(key)} is"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key) and not key.endswith(PASSING)
    ]


@pytest.mark.parametrize("where", ["forward", "backward", pytest.param("early", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["nested", "prefetched", pytest.param("mixed precision", marks=pytest.mark.nightly)])
def test_all_of_torchs_state_is_as_between_two_iterations(two_ranks: RankPool, name: str, where: str) -> None:
    """Should it fail with a new torch: ``instep.sources.fsdp.recovery`` does not know of what is named here."""
    for left in two_ranks.run(nothing_left, name, where, where != "forward"):
        assert not left


# What cannot go on, and says so.


def breaks(name: str, where: str, way: str) -> None:
    loop = build(name)
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way])
    loop.learn(0)
    with failing(loop.model, where), pytest.raises(BoomError):
        loop.backward(1)
    loop.optimizer.zero_grad()
    for _ in range(2):
        with pytest.raises(InstepError, match="build and attach the model anew"):
            loop.loss(2)
    loop.overlap.detach()


@pytest.mark.parametrize("where", ["forward", "early"])
@pytest.mark.parametrize("name", [*FSDP1])
def test_fsdp1_must_be_built_anew(two_ranks: RankPool, name: str, where: str) -> None:
    two_ranks.run(breaks, name, where, "undo")


def older_torch(where: str) -> None:
    with patch.object(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state
        breaks("nested", where, "undo")


@pytest.mark.parametrize("where", ["forward", "early"])
def test_fsdp2_of_an_older_torch_must_be_built_anew(two_ranks: RankPool, where: str) -> None:
    two_ranks.run(older_torch, where)


# On one rank only.

PATIENCE = 20  # seconds of a collective


def one_rank_fails() -> tuple[str | None, float, bool, bool]:
    loop = build("nested")
    held = [id(p) for p in loop.model.parameters()]
    loop.overlap = instep.attach(loop.model, loop.optimizer, undo=True, schedule="backward")
    loop.learn(0)
    before = values(loop)
    started = time.monotonic()
    with Pace() as pace:
        try:
            with failing(loop.model, "backward") if dist.get_rank() == 1 else nullcontext():
                loop.backward(1)
            raised = None
        except Exception as error:
            raised = type(error).__name__
    in_place = [id(p) for p in loop.model.parameters()] == held
    kept = all(map(torch.equal, before, values(loop)))
    return raised, pace.since(started), in_place, kept


@pytest.mark.nightly
def test_an_error_on_one_rank_only() -> None:
    """The other one raises when its collective runs out of time, and both have their parameters as before the step."""
    pool = RankPool(2, group_seconds=PATIENCE)
    (other, waited, *well), (own, _, *well_there) = pool.run(one_rank_fails)
    pool.stop()
    assert own == "BoomError"
    assert other is not None, "nothing was said on the other rank"
    assert waited < PATIENCE + 5
    assert all(well)
    assert all(well_there)
