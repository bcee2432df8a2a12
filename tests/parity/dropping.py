"""A loop that is dropped at some moment of a step: what it held dies as soon as the plain loop's does."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import torch

from instep.errors import InstepError
from tests.parity.programs import Loop, Program

KEPT = ("optimizer", "overlap", "scheduler")
PATIENCE = 1.0
"""Seconds for updates under way on a thread of instep's."""


class _StopError(Exception):
    """The loop is left here."""


def run_dropped(program: Program, moment: str, kept: frozenset[str]) -> None:
    """Leave the last step at ``moment``, drop everything but ``kept``, and compare what is alive."""
    before = gc.isenabled()
    gc.disable()
    try:
        plain = _alive_after(program, False, moment, kept)
        attached = _alive_after(program, True, moment, kept, may_live=plain[0])
    finally:
        if before:
            gc.enable()
    for when, (expected, found) in zip(
        ("at once", "after a collection"), zip(plain, attached, strict=True), strict=True
    ):
        left = found - expected
        assert not left, f"dropped at {moment!r}, {when} still alive: {sorted(left)[:6]}"


def _alive_after(
    program: Program, attach: bool, moment: str, kept: frozenset[str], may_live: frozenset[str] = frozenset()
) -> tuple[frozenset[str], frozenset[str]]:
    loop = Loop(program, attach)
    _leave(loop, moment)
    named = dict(_held(loop))
    keeping = [getattr(loop, name) for name in sorted(kept)]
    loop.at = str
    del loop
    patience = monotonic() + PATIENCE
    while (at_once := _alive(named)) - may_live and attach and monotonic() < patience:
        sleep(0.01)
    gc.collect()
    at_last = _alive(named)
    if keeping and keeping[0] is not None and hasattr(keeping[0], "detach"):
        keeping[0].detach()
    return at_once, at_last


def _leave(loop: Loop, moment: str) -> None:
    def leave_here(now: str) -> None:
        if now == moment:
            raise _StopError

    with suppress(_StopError, InstepError):
        for number in range(len(loop.program.steps)):
            if number == len(loop.program.steps) - 1:
                loop.at = leave_here
            loop.step(number)


def _held(loop: Loop) -> Iterator[tuple[str, "weakref.ref[Any]"]]:
    yield "the model", weakref.ref(loop.model)
    yield "the optimizer", weakref.ref(loop.optimizer)
    for name, parameter in loop.model.named_parameters():
        yield f"parameter {name}", weakref.ref(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            for key, value in loop.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"state of {name}: {key}", weakref.ref(value)


def _alive(named: dict[str, "weakref.ref[Any]"]) -> frozenset[str]:
    return frozenset(name for name, ref in named.items() if ref() is not None)
