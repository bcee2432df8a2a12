"""Ctrl-C at a line of instep's on all ranks, anywhere in an iteration. Then the loops clear their gradients and go on,
as if the step had been taken on all ranks or left out on all; or an error says that it is torn, or where torch's own
wrapper cannot go on. Nothing waits for ever."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import instep
from instep.errors import StepMismatchError, TornStepError, UncommittedStepError
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks
from tests.distributed.pool import BodyFailedError, RankPool
from tests.distributed.reduced import SOURCES
from tests.distributed.sharded import Loop
from tests.parity.interrupts import LineInterrupter

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "forward": {"defer": True},
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "skip": {"nonfinite": "skip"},
}
PAIRS = [(source, way) for source in ("ddp", "replicate", "fsdp2") for way in WAYS]
BEFORE, AFTER = 2, 2  # iterations
SOME, EVERY = 12, 5
"""So many lines by default; one in so many nightly."""
SECONDS = 10
"""Of a collective that another rank does not send. An interrupt ends the iteration of all ranks at once."""
OF_TORCH = ("Expected to have finished reduction in the prior iteration", "!unmarked_param_indices.empty()")
"""What DDP raises in the forward behind a backward that has not come to its end, as it does in the plain loop where
there is a hook of Python's in it."""
TOLD = (TornStepError, UncommittedStepError, StepMismatchError)
"""The last, where ranks were interrupted at different places: some have taken the step."""
PARTED = "Timed out waiting|Connection closed by peer|Application timeout|died with exit code -6"


def made(source: str) -> Loop:
    torch.manual_seed(0)
    model: Any = SOURCES[source](Blocks())
    return Loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def state_of(loop: Loop) -> list[tuple[str, Any]]:
    state = training_state(loop.model, loop.optimizer)
    return [(name, value.clone() if isinstance(value, torch.Tensor) else value) for name, value in state]


def ends_of(source: str) -> tuple[list[Any], list[Any]]:
    """What the plain loop has in the end, and behind the iteration that is interrupted: without that, and with it."""
    ends, behind = [], []
    for skips in (True, False):
        plain = made(source)
        for i in range(BEFORE + 1 + AFTER):
            if not (skips and i == BEFORE):
                plain.learn(i)
            if i == BEFORE:
                behind.append(state_of(plain))
        ends.append(state_of(plain))
    return ends, behind


def lines_of(source: str, way: str) -> int:
    loop = made(source)
    with instep.attach(loop.model, loop.optimizer, **WAYS[way]):
        for i in range(BEFORE):
            loop.learn(i)
        interrupter = LineInterrupter()
        with interrupter.watching():
            loop.learn(BEFORE)
    lines = torch.tensor(interrupter.lines)
    dist.all_reduce(lines, dist.ReduceOp.MIN)
    return int(lines)


def interrupted(source: str, way: str, where: int, ends: list[Any], behind: list[Any]) -> str | None:
    """What is wrong."""
    loop, interrupter = made(source), LineInterrupter(where)
    with instep.attach(loop.model, loop.optimizer, **WAYS[way]) as overlap:
        for i in range(BEFORE):
            loop.learn(i)
        told: Exception | None = interrupter.interrupt(lambda: loop.learn(BEFORE))
        wanted = ends
        try:
            loop.optimizer.zero_grad()
            for i in range(BEFORE + 1, BEFORE + 1 + AFTER):
                loop.learn(i)
            overlap.synchronize()
        except TOLD as error:
            told = error
        except RuntimeError as error:
            if re.search(PARTED, str(error)):
                raise
            if not any(said in str(error) for said in OF_TORCH):
                return f"at {where}, {interrupter.place}: {error!r}"
            wanted = behind
        if told is not None:
            overlap.accept_torn()
            fits = isinstance(told, TOLD)
            return None if fits else f"at {where}, {interrupter.place}: {told!r}"
        if overlap.state in ("open", "torn"):
            overlap.accept_torn()
            return None  # the next use of the model would say so
        overlap.synchronize()
        found = state_of(loop)
        taken = [first_difference(iter(one), iter(found)) is None for one in wanted]
    return None if any(taken) else f"at {where}, {interrupter.place}: neither taken nor left out"


def lines(source: str, way: str, first: int, every: int, reached: str) -> list[str]:
    """What is wrong, where every so many lines are interrupted. Where that is, is noted in the file ``reached``."""
    ends, behind = ends_of(source)
    wrong: list[str] = []
    for where in range(first, lines_of(source, way), every):
        Path(reached).write_text(str(where))
        here = interrupted(source, way, where, ends, behind)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, here)
        wrong += [f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
        if len(wrong) > 5:
            break
    return wrong


def run(source: str, way: str, every: int | None, reached: Path) -> None:
    """Ranks do not wait for one another at the same lines. Where one was interrupted before it has sent what the other
    waits for, that has waited for as long as the group does, and the group is of no more use."""
    pool = RankPool(2, group_seconds=SECONDS, body_seconds=3600)
    try:
        step = pool.run(lines_of, source, way)[0] // SOME if every is None else every
        first, wrong = step // 2, []
        while True:
            try:
                wrong += pool.run(lines, source, way, first, step, str(reached))[0]
                break
            except BodyFailedError as error:
                if not re.search(PARTED, str(error)):
                    raise
                first = int(reached.read_text()) + step
        assert not wrong, "\n".join(wrong)
    finally:
        pool.stop()


@pytest.mark.parametrize(("source", "way"), PAIRS)
def test_some_lines(source: str, way: str, tmp_path: Path) -> None:
    run(source, way, None, tmp_path / "reached")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("source", "way"), PAIRS)
def test_one_line_in_a_few(source: str, way: str, tmp_path: Path) -> None:
    run(source, way, EVERY, tmp_path / "reached")
