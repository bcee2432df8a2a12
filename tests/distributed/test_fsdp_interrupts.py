"""Ctrl-C at any point of FSDP2's forward, and a peer that is lost in it: in the ``except`` clause all parameters are
the optimizer's, with their values, and FSDP2's state is that between two iterations."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import instep
from instep.sources.fsdp import recovery as after_errors
from tests.distributed.pool import RankPool
from tests.distributed.sharded import Loop
from tests.distributed.sharded_failures import (
    PASSING,
    BoomError,
    build,
    failing,
    fsdp2_state,
    require_equal,
    values,
)
from tests.parity.interrupts import Interrupter

warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "defer": {"defer": True},
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
}
SHORT, LONG = 61, 3
"""One in so many points, by default and nightly."""


PLACES = tuple(str(Path(str(module.__file__)).parent) + os.sep for module in (instep, torch.distributed.fsdp))


class InFSDP(Interrupter):
    """At points of instep and of torch's FSDP alone: what is interrupted below them ends there, too."""

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if frame.f_code.co_filename.startswith(PLACES):
            super().__call__(frame, event, arg)


def attached(name: str, way: str) -> Loop:
    loop = build(name)
    loop.overlap = instep.attach(loop.model, loop.optimizer, **WAYS[way])
    return loop


def state_of(loop: Loop) -> dict[str, Any]:
    return {key: value for key, value in fsdp2_state(loop.model).items() if not key.endswith(PASSING)}


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    keys = sorted(one.keys() | other.keys())
    return [f"{key}: {one.get(key)} was, {other.get(key)} is" for key in keys if one.get(key) != other.get(key)]


def interrupted_forward(loop: Loop, i: int, where: int) -> tuple[Any, list[str]]:
    """Interrupt a forward at point ``where``. Returns where that is, and what is wrong in the ``except`` clause."""
    held = [id(p) for group in loop.optimizer.param_groups for p in group["params"]]
    interrupter = InFSDP(where)
    try:
        with interrupter.watching():
            loss = loop.loss(i)
    except KeyboardInterrupt:
        found = {name: id(p) for name, p in loop.model.named_parameters()}
        return interrupter.place, [
            f"{name} is not the optimizer's" for name, number in found.items() if number not in held
        ]
    loss.backward()  # an interrupt was lost, where an object was freed
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return None, []


def points_of(name: str, way: str) -> int:
    loop = attached(name, way)
    for i in range(2):
        loop.learn(i)
    interrupter = InFSDP()
    with interrupter.watching():
        loop.loss(2)
    loop.overlap.detach()
    points = torch.tensor(interrupter.points)
    dist.all_reduce(points, dist.ReduceOp.MIN)
    return int(points)


def interrupted(name: str, way: str, every: int) -> list[str]:
    """Both ranks are interrupted at the same point, of the same collectives."""
    points = points_of(name, way)
    assert points > 100
    plain, loop = build(name), attached(name, way)
    for one in (plain, loop):
        for i in range(2):
            one.learn(i)
    between = state_of(loop)
    wrong: list[str] = []
    for number, where in enumerate(range(every // 2, points, every)):
        place, here = interrupted_forward(loop, 100 + number, where)
        if place is None:
            plain.learn(100 + number)
            continue
        if number % 4 == 0:  # a step that was put off is still due in the others
            here += difference(between, state_of(loop))
        if not all(map(torch.equal, values(plain), values(loop))):
            here.append("a parameter has another value")
        wrong += [f"at {where} of {points}, in {place}: {text}" for text in here]
        if number % 8 == 0:
            for one in (plain, loop):
                one.learn(number)
            require_equal(plain, loop, f"after the interrupt at point {where}")
    for i in range(2):
        for one in (plain, loop):
            one.learn(i)
        require_equal(plain, loop, "at the end")
    loop.overlap.detach()
    return wrong[:8]


def first_forward_interrupted(name: str, way: str, every: int) -> list[str]:
    """FSDP2 makes much in its first forward, and takes it for made once it has begun."""
    loop, interrupter = attached(name, way), InFSDP()
    with interrupter.watching():
        loop.loss(0)
    loop.overlap.detach()
    plain = build(name)
    for i in range(2):
        plain.learn(i)
    points = interrupter.points
    wrong: list[str] = []
    for where in range(every // 2, points, every):
        loop = attached(name, way)
        before = values(loop)
        place, here = interrupted_forward(loop, 0, where)
        if place is not None:
            if not all(map(torch.equal, before, values(loop))):
                here.append("a parameter has another value")
            for i in range(2):
                loop.learn(i)
            require_equal(plain, loop, f"after the interrupt at point {where}")
        wrong += [f"at {where} of {points}, in {place}: {text}" for text in here]
        loop.overlap.detach()
    return wrong[:8]


def run(body: Any, *args: Any) -> None:
    """Ranks of their own, in which nobody waits long for another that was not interrupted."""
    pool = RankPool(2, group_seconds=30)
    try:
        for wrong in pool.run(body, *args):
            assert not wrong, "\n".join(wrong)
    finally:
        pool.stop()


@pytest.mark.parametrize("way", WAYS)
def test_some_points_of_a_forward(way: str) -> None:
    run(interrupted, "nested", way, SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["nested", "mixed precision", "grouped", "not resharded", "root only", "several roots"]
)
def test_many_points_of_a_forward(name: str, way: str) -> None:
    run(interrupted, name, way, LONG)


def test_some_points_of_the_first_forward() -> None:
    run(first_forward_interrupted, "nested", "backward", 2 * SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["nested", "grouped"])
def test_many_points_of_the_first_forward(name: str, way: str) -> None:
    run(first_forward_interrupted, name, way, 3 * LONG)


def rebuilding_raises() -> None:
    """Where FSDP's state is rebuilt: that is done before the next forward, then."""
    plain, loop = build("nested"), attached("nested", "backward")
    real, left = after_errors.rebuild_fsdp2, [ZeroDivisionError]

    def rebuild(*args: Any, **kwargs: Any) -> bool:
        if left:
            raise left.pop()
        return real(*args, **kwargs)

    for i in range(3):
        plain.learn(i)
        loop.learn(i)
        require_equal(plain, loop, f"iteration {i}")
        patched = patch.object(after_errors, "rebuild_fsdp2", rebuild)
        with patched, failing(loop.model, "forward"), pytest.raises(BoomError):
            loop.loss(100 + i)
        with torch.no_grad():
            for one in (plain, loop):
                for group in one.optimizer.param_groups:
                    for p in group["params"]:
                        p.mul_(0.9)  # with the gathered weights of before the next forward would be wrong
    assert not left
    loop.overlap.detach()


def test_rebuilding_raises(two_ranks: RankPool) -> None:
    two_ranks.run(rebuilding_raises)


# A peer that is lost.


def peer_is_lost(name: str, way: str, block: int, first: bool) -> tuple[str, list[str], bool]:
    """Rank 1 ends in the forward of a block, or (``first``) before it gathers the weights for that. What the other one
    finds in its ``except`` clause."""
    loop = attached(name, way)
    held = [id(p) for p in loop.model.parameters()]
    loop.learn(0)
    before = values(loop)
    if dist.get_rank() == 1:
        module = loop.model.get_submodule(f"blocks.{block}")
        module.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL), prepend=first)
    try:
        loop.learn(1)
    except Exception as error:
        others = [name for name, p in loop.model.named_parameters() if id(p) not in held]
        kept = all(map(torch.equal, before, values(loop)))
        return type(error).__name__, others, kept
    return "", [], False


@pytest.mark.parametrize(
    ("name", "way", "block", "first"),
    [
        pytest.param(name, way, block, first, marks=[] if default else [pytest.mark.nightly])
        for name in ("nested", "prefetched")
        for way in WAYS
        for block in (0, 1, 2)
        for first in (True, False)
        for default in [(name, block, first) in (("nested", 2, False), ("nested", 1, True)) and way != "undo"]
    ],
)
def test_a_peer_is_lost_in_a_forward(name: str, way: str, block: int, first: bool) -> None:
    """The last block's weights have come, and the other rank's backward ends in the first hook of it: nobody has told
    instep of that backward then."""
    error, others, kept = RankPool(2, group_seconds=30).run_until_a_rank_dies(0, peer_is_lost, name, way, block, first)
    assert error, "nothing was said"
    assert not others
    assert kept
