"""A small vote on a step: one all-reduce of a few integers, of which all ranks hear the same outcome.

It has a process group of its own: a rank whose backward failed has sent fewer collectives than the others, and a vote
must never meet one of theirs. The group is gloo's, in host memory, so that no accelerator is waited for.
"""

import atexit
import ctypes
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from instep._ranks.comparison import digest_of
from instep._ranks.process_groups import is_lost, store_of_world, timeout_of, world
from instep._torch.engine import profiled, unseen_by_profiler
from instep.errors import InstepError, StepMismatchError


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a vote: what all ranks said together.

    Attributes:
        failed_on: the first rank on which the step failed, ``None`` if it did on none.
        nonfinite_on: the first rank with a gradient that is not finite, ``None`` if all are. Of the vote on a commit:
            the first rank that has found the step to be one that must be taken whole.
        first: the lowest number of the step that a rank named.
        last: the highest.
        same: whether all ranks said it of the same attachment.
    """

    failed_on: int | None
    nonfinite_on: int | None
    first: int
    last: int
    same: bool

    def error(self) -> InstepError | None:
        """What is wrong with the step; ``None``: nothing. A gradient that is not finite is no error here."""
        if self.failed_on is not None:
            return InstepError(f"rank {self.failed_on} said that this step failed there: its own error says why")
        if self.first != self.last:
            return StepMismatchError(
                f"ranks are at different steps, from {self.first} to {self.last}: some of them have left a step out, "
                "or taken one more. Every rank must call optimizer.step() equally often. Load a checkpoint on all "
                "ranks, or call overlap.resync_from(rank) on all"
            )
        if not self.same:
            return StepMismatchError(
                "ranks are at steps of different attachments: some of them have left out a backward of one model, or "
                "run one more. Load a checkpoint on all ranks, and attach again on all of them"
            )
        return None


NOBODY = 2**62
"""No rank, and no step: in a minimum everything else comes before it."""


class Vote:
    """One that was cast, and may be under way: the minimum of what all ranks said. All threads that wait for it hear
    the same verdict."""

    def __init__(self, group: "VoteGroup", ballot: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self._verdict: Verdict | None = None
        self._lost: str | None = None  # what the communication raised
        self._box = torch.tensor(ballot, dtype=torch.int64, device="cpu")
        self._group = group
        self._work: Any = group.minimum(self._box)

    def done(self) -> bool:
        """Whether ``verdict`` would not wait."""
        return self._work is None or bool(self._work.is_completed())

    def verdict(self) -> Verdict:
        """Wait for all ranks. Safe to call twice, and from several threads.

        Raises what the communication raised.
        """
        with self._lock:
            if self._lost is not None:
                raise RuntimeError(self._lost)
            if self._verdict is None:
                try:
                    with profiled("wait for votes"):
                        self._work.wait()
                except Exception as error:
                    self._lost, self._work = str(error), None
                    self._group.close()
                    raise
                failed, nonfinite, first, last, number, other = self._box.tolist()
                self._verdict = Verdict(
                    failed_on=None if failed == NOBODY else failed,
                    nonfinite_on=None if nonfinite == NOBODY else nonfinite,
                    first=first,
                    last=-last,
                    same=number == -other,
                )
                self._work = None
            return self._verdict


# By a process group of the model's, as long as that is kept; then by the ranks of the step.
_vote_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], VoteGroup]]" = (
    weakref.WeakKeyDictionary()
)
# By the world: how many groups these ranks have voted in. Each finds its ranks under a name of its own.
_groups_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]]" = weakref.WeakKeyDictionary()

_SECONDS_AT_EXIT = 5.0
"""A process that ends takes what it was about to send with it, and the others would take that for a failure. So it
waits for its last vote, but no longer than this."""


class VoteGroup:
    """gloo's process group between the ranks of a step, in which they vote."""

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        c10d: Any = dist.distributed_c10d
        generations = _groups_made.setdefault(world(), Counter())
        ranks = tuple(ranks)
        generations[ranks] += 1
        store = store_of_world(f"votes/{digest_of(ranks)}/{generations[ranks]}")
        self._gloo: Any = c10d.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), timeout)
        self._minimum: Any = c10d.AllreduceOptions()
        self._minimum.reduceOp = dist.ReduceOp.MIN
        self._last: Any = None

    def minimum(self, box: torch.Tensor) -> Any:
        """Start an all-reduce of ``box``, in place; ``InstepError``, if an earlier one was lost."""
        if self._gloo is None:
            raise InstepError("an earlier vote of these ranks was lost: attach again on all ranks, in new processes")
        with unseen_by_profiler():  # nobody waits for it before the next step
            self._last = self._gloo.allreduce([box], self._minimum)
        return self._last

    def close(self) -> None:
        """A vote was lost: drop all of gloo's objects, which closes its connections. Ranks that wait for this one hear
        it now. Those that are not neighbours of the rank that is gone would wait until their time is over."""
        self._gloo = self._last = None

    def finish_sending(self, *, waits: bool) -> None:
        """The process ends: have this rank's last vote reach the others, if that takes a few seconds at most."""
        if self._last is None or self._last.is_completed():
            return
        if waits:
            with suppress(Exception):
                self._last.wait(timedelta(seconds=_SECONDS_AT_EXIT))
        if not self._last.is_completed():
            # Some rank does not answer. The end of gloo's group would wait for it as long as for any communication: so
            # it is kept for as long as the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))


def vote_group(anchor: dist.ProcessGroup, ranks: tuple[int, ...]) -> VoteGroup:
    """The one in which these ``ranks`` vote, made once. All of them must call this.

    Args:
        anchor: a process group of the model's. As long as that is kept, so is this one.
    """
    beside = _vote_groups.setdefault(anchor, {})
    if (group := beside.get(ranks)) is None:
        group = beside[ranks] = VoteGroup(ranks, timeout_of(anchor))
    return group


@atexit.register
def _finish_sending() -> None:
    for anchor, groups in list(_vote_groups.items()):
        for group in groups.values():
            group.finish_sending(waits=not is_lost(anchor))


def error_of(vote: Vote) -> Exception | None:
    """What the ranks found wrong, or what kept this one from hearing it. Waits for all ranks."""
    try:
        return vote.verdict().error()
    except Exception as lost:
        return lost
