"""The plain loop beside the attached one, which may refuse, but not differ in silence.

After every step parameters, state, groups, gradients and random generators are equal; or an ``InstepError`` has been
raised while nothing differed from the plain loop; or the error has come with the first write that differs, and every
later use says so. Nothing else may be raised that the plain loop does not raise.
"""

import copy
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import instep
from instep._torch.versions import memory_of
from instep.errors import InstepError, UnsupportedOptimizerError
from instep_tools.harness import first_difference
from tests.judged import own_steps_are_judged
from tests.late import late_updates
from tests.parity.outputs import FOUND_BY_DDP
from tests.parity.programs import SPENDING, Loop, Program, on_this_rank, sharded, unwrapped

State = dict[str, Any]


def run_or_refuse(program: Program, wrap: Any = unwrapped, rank: int = 0) -> str:
    """Fail unless the attached loop is the plain one, or says that it cannot be. What has become of the program."""
    with warnings.catch_warnings(), own_steps_are_judged():
        # What other people's optimizers warn of.
        warnings.simplefilter("ignore")
        try:
            plain = Loop(program, False, wrap, rank)
        except Exception:
            return "cannot be made"
        try:
            attached = Loop(program, True, wrap, rank)
        except InstepError:
            return "refused at attach"
        assert attached.overlap is not None
        try:
            with updates(program):
                outcome = _side_by_side(program, plain, attached)
                # Whoever is waited for late is waited for at the latest here.
                return _finished(attached) if outcome == "plain raised" else outcome
        finally:
            attached.overlap.detach()


def run_or_refuse_on_this_rank(program: Program, view: bool) -> str:
    """The same under DistributedDataParallel, which looks for unused parameters only in outputs that it knows."""
    program, wrap = on_this_rank(program, view, find_unused=program.output in FOUND_BY_DDP)
    return run_or_refuse(program, wrap, torch.distributed.get_rank())


def run_or_refuse_on_this_rank_of_fsdp2(program: Program, nested: bool) -> str:
    """The same with FSDP2, which takes no tied weights from one of its groups to another."""
    program = replace(program, tied=()) if nested else program
    return run_or_refuse(program, partial(sharded, nested=nested), torch.distributed.get_rank())


def updates(program: Program) -> AbstractContextManager[Any]:
    return late_updates() if program.way in ("late", "late beside") else nullcontext()


def _side_by_side(program: Program, plain: Loop, attached: Loop) -> str:
    for number in range(len(program.steps)):
        trail = Trail(plain)
        try:
            plain.step(number)
        except Exception:
            return "plain raised"
        trail.add()
        try:
            attached.step(number)
            if program.every or number == len(program.steps) - 1:
                difference = first_difference(plain.state(), attached.state())
            else:
                continue
        except Exception as error:
            ours = isinstance(error, InstepError)
            if not (ours or _is_autograds_own(program, error) or _is_of_a_skipped_step(program, number, error)):
                raise
            trail.assert_told(attached, error)
            return "refused"
        if difference is not None and is_late(program):
            return "late"
        assert difference is None, f"after step {number + 1}: {difference}"
    return "equal"


def _is_autograds_own(program: Program, error: Exception) -> bool:
    """A graph that is used after a weight that it has saved was updated: nobody else sees that in time."""
    return program.way in SPENDING and "modified by an inplace operation" in str(error)


def _is_of_a_skipped_step(program: Program, number: int, error: Exception) -> bool:
    """Of an optimizer that cannot step at all: with ``nonfinite="skip"`` the attached loop calls ``step()`` where the
    plain one does not."""
    skipped = program.nonfinite == "skip" and program.steps[number].overflow
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return skipped and not raised_in.is_relative_to(Path(instep.__file__).parent)


def _finished(attached: Loop) -> str:
    try:
        attached.overlap.synchronize()  # type: ignore[union-attr]
    except InstepError:
        return "refused"
    return "plain raised"


def is_late(program: Program) -> bool:
    """Whether this optimizer begins to couple, or to draw, after the updates that are compared (docs/limits.md)."""
    return program.recipe is not None and program.recipe.is_late


class Trail:
    """What the plain loop's training was at each moment of a step."""

    def __init__(self, plain: Loop) -> None:
        self._plain = plain
        self._states: list[State] = []
        self.add()
        plain.at = self.add

    def add(self, moment: str = "") -> None:
        self._states.append(snapshot(self._plain))

    def assert_told(self, attached: Loop, error: Exception) -> None:
        """It is as the plain loop was at some moment, or every later use raises."""
        assert attached.overlap is not None
        if isinstance(error, UnsupportedOptimizerError):
            return  # at the first step that shows it, and at every later one
        try:
            attached.overlap.synchronize()
            if self._has(attached):
                return
            attached.model(*attached.example())  # with undo, a step that is not committed is put back
            if self._has(attached):
                return
        except InstepError:
            return
        raise AssertionError(f"neither as the plain loop was, nor torn, after {error!r}")

    def _has(self, attached: Loop) -> bool:
        found = snapshot(attached)
        return all(
            any(first_difference(iter(part(state)), iter(part(found))) is None for state in self._states)
            for part in (_settings, _trained)
        )


def _settings(state: State) -> list[tuple[str, Any]]:
    """An error may come after the scheduler's step: of groups it is another moment's than of weights and state."""
    return [(name, value) for name, value in state.items() if ".param_groups[" in name]


def _trained(state: State) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in state.items() if ".param_groups[" not in name]


def snapshot(loop: Loop) -> State:
    """Copies of what training changes, as it is in memory."""
    return dict(_copies(loop))


def _copies(loop: Loop) -> Iterator[tuple[str, Any]]:
    with torch._C.DisableTorchFunctionSubclass():
        for name, value in loop.trained():
            if name == "scale":
                continue  # the loop's own: an error may come after GradScaler.update()
            if isinstance(value, torch.Tensor):
                yield name, memory_of(value).detach().clone()
            else:
                yield name, copy.deepcopy(value)  # an edit may change the object itself
