"""Which ranks a step has, and how they decide on it together. Whatever one of them finds out about a step (NaN, a
failure, options that differ) goes through ``StepRanks``, so that all of them hear it.

A rank shares its step with whoever is in a process group with it, and with whoever these share theirs with. On a mesh
of two dimensions rank 3 is in no group with rank 0, and a NaN on rank 0 is its affair all the same.

The life of ``StepRanks``: in its first forward a rank tells the others what it trains (``tell``), and in its first
backward it has met them (``meet``). From then on it casts a vote on each step (``cast``). What must not be waited for
at all goes through the store over which process groups find their ranks (``say``, ``all_found``).
"""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from instep._ranks.comparison import Comparison, Heard, Words, digest_of
from instep._ranks.process_groups import store_of_world, timeout_of
from instep._ranks.vote import NOBODY, Vote, VoteGroup, vote_group
from instep._torch.engine import profiled
from instep.errors import StepMismatchError

_logger = logging.getLogger("instep")


class Neighbours(NamedTuple):
    """The ranks that are in a process group, or on a device mesh, with this one.

    Attributes:
        anchor: one of the groups, of more than one rank.
        sets: the ranks of each group and of each mesh, as the default group numbers them.
    """

    anchor: dist.ProcessGroup
    sets: tuple[frozenset[int], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(frozenset().union(*self.sets)))

    @property
    def are_all(self) -> bool:
        """Whether these are the ranks of the step: one group or mesh holds all the others, and each of its ranks finds
        the same. If not (one group for data and one for tensor parallelism), neighbours have neighbours of their own.
        """
        return frozenset(self.ranks) in self.sets


def neighbours_of(
    wrapped: Sequence[Any], parameters: Iterable[torch.Tensor], stages: dist.ProcessGroup | None = None
) -> Neighbours | None:
    """The ranks with whom this one takes its steps; ``None``: it takes them alone.

    Args:
        wrapped: objects with a ``process_group``: ``DistributedDataParallel``, ``FullyShardedDataParallel`` and so on.
        parameters: each ``DTensor`` among them has a device mesh.
        stages: the ranks of a pipeline.
    """
    groups: dict[dist.ProcessGroup, None] = dict.fromkeys(wrapper.process_group for wrapper in wrapped)
    if stages is not None:
        groups[stages] = None
    # FSDP1 keeps the other dimension of HYBRID_SHARD in a private attribute.
    groups.update(dict.fromkeys(group for wrapper in wrapped if (group := getattr(wrapper, "_inter_node_pg", None))))
    ranks_of = {group: ranks for group in groups if (ranks := _ranks_of(group)) is not None}
    groups, sets = dict.fromkeys(ranks_of), list(ranks_of.values())
    meshes = dict.fromkeys(mesh for p in parameters if (mesh := getattr(p, "device_mesh", None)) is not None)
    for mesh in meshes:
        groups.update(dict.fromkeys(mesh.get_all_groups()))
        sets.append(frozenset(mesh.mesh.flatten().tolist()))
    shared = [group for group in groups if dist.get_world_size(group) > 1]
    return Neighbours(shared[0], tuple(sets)) if shared else None


def _ranks_of(group: dist.ProcessGroup) -> frozenset[int] | None:
    """``None``: torch.distributed does not know the group, and nothing can be said over it but by its owner, who makes
    replicas of a step of his own, as torchft does."""
    try:
        return frozenset(dist.get_process_group_ranks(group))
    except KeyError:
        return None


_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
"""Seconds between two looks at what all ranks have said together, for a rank that waits: the pauses double."""
_FIRST_LOOK = 0.25
"""Seconds after which it looks at what each rank has said, too; then after twice as many, and so on."""
_SECONDS_UNCLEAR = 5.0
"""How long a rank waits that finds another's words to differ from its own, or nothing new: the other rank may have
attached something by itself before, and be on its way to what all attach."""
_SECONDS_UNTIL_SAID = 10.0
"""Seconds after which a rank that waits logs which ranks it waits for."""
_LOOKS = frozenset(1 << n for n in range(11))
"""The calls of ``step()`` at which a rank that waits for nobody looks for ranks that had not attached before."""


class StepRanks:
    """The ranks that take the steps of one attachment together, as one of them sees it.

    Args:
        mine: what must be the same on all of them: options, and parameters.
        model: a short name of the model, the same on all ranks that train it.
        waits: whether this rank waits for the others in its first backward: they will send what needs all of them. By
            default none does, so that none waits for a rank that never attaches, or that runs out of data.
        matters: whether a rank without an attachment would compute other numbers.

    Attributes:
        has_told: whether this rank has told the others what it trains.
        has_met: whether this rank has been in a backward with them.
        mismatch: what is not the same on all ranks; ``None``: nothing, as far as is known.
    """

    def __init__(self, neighbours: Neighbours, own: Sequence[Words], model: str, *, waits: bool, matters: bool) -> None:
        self.has_told = False
        self.has_met = False
        self.mismatch: str | None = None
        self._neighbours = neighbours
        self._own = own
        self._model = model
        self._number = crc32(repr(own).encode())  # of votes that are cast for two attachments none is taken for one
        self._waits = waits
        self._matters = matters
        self._ranks = neighbours.ranks if neighbours.are_all else None  # else it takes the others to know
        self._comparison: Comparison | None = None
        self._steps = 0
        self._all_heard = False
        self._has_waited = False

    # Before the first step: do all ranks train the same model in the same way?

    def tell(self) -> None:
        """The first forward begins: say what this rank trains, before anything waits for the others. Whoever waits for
        this rank may be needed in its forward, for DDP's buffers, and where its backward begins, by FSDP's own hooks.
        """
        place = f"steps/{digest_of(self._ranks or self._model)}"
        try:
            if self._comparison is None:
                if self._ranks is None:
                    self._neighbours_in_store().set(str(dist.get_rank()), json.dumps(self._neighbours.ranks))
                self._comparison = Comparison(place, self._own)
            self._comparison.say()
        except RuntimeError:  # the process that keeps the store has ended
            if self._waits:
                raise
        self.has_told = True  # not before: after Ctrl-C the next forward, or its backward, does it again

    def meet(self) -> None:
        """The first backward begins that reduces gradients over all ranks. If this rank waits, ``mismatch`` is known
        when this returns, before anything is sent that ranks that differ could not answer."""
        if not self.has_told:
            self.tell()
        self.has_met = True
        if self._waits and not self._is_known:
            self._take(self._hear_all(timeout_of(self._neighbours.anchor).total_seconds()))

    def hear_soon(self) -> None:
        """A forward begins whose backward may reduce gradients, or not, by an option of this rank. Wait a little for
        the others to say whether they have that option: as long as ranks that train alike are apart, and not for ever,
        since a forward may be of this rank alone. Whoever comes later is heard by the next call, for instance where
        FSDP's forward has gathered weights from it, and its backward begins."""
        if self._comparison is None or self._is_known:
            return
        waits, self._has_waited = not self._has_waited, True
        with suppress(RuntimeError):  # the process that keeps the store has ended
            heard = self._hear_all(_SECONDS_UNCLEAR) if waits else self._heard()
            if heard.difference is not None or not heard.missing:
                self._take(heard)

    @property
    def _is_known(self) -> bool:
        return self._all_heard or self.mismatch is not None

    def look(self) -> None:
        """``mismatch`` is what is known now: nobody is waited for. Whoever gave this rank its gradients has said before
        what it trains."""
        if not self._is_known and self._comparison is not None:
            try:
                self._take(self._heard())
            except RuntimeError:  # the process that keeps the store has ended: nobody hears anything any more
                self._all_heard = True

    def step_begins(self) -> None:
        """``optimizer.step()`` is called: ``look``, now and then."""
        if not self._is_known:
            self._steps += 1
            if self._steps in _LOOKS:
                self.look()

    def require_same(self) -> None:
        """Raise ``StepMismatchError`` if ranks train in different ways, as far as is known now."""
        if self.mismatch is not None:
            raise StepMismatchError(
                f"ranks have attached different models, or in different ways: {self.mismatch}. Nothing was updated. "
                "Every rank of a step must attach the same model with the same options, and with INSTEP_DISABLE on all "
                "ranks or on none"
            )

    def _hear_all(self, limit: float) -> Heard:
        """Wait until every rank has said what it trains, for ``limit`` seconds at most. Returns what is known then."""
        began, pause, look_at, is_said = time.monotonic(), _FIRST_PAUSE, _FIRST_LOOK, False
        heard = Heard(missing=self._neighbours.ranks)
        with profiled("compare options"):
            while not self._all_say_the_same():
                waited = time.monotonic() - began
                if waited >= look_at:
                    heard = self._heard()
                    unclear = heard.alone or heard.difference is not None
                    waits = (heard.missing and heard.difference is None) or (unclear and waited < _SECONDS_UNCLEAR)
                    if not waits or waited > limit:
                        return heard
                    look_at = 2 * waited if waited >= _SECONDS_UNCLEAR else min(2 * waited, _SECONDS_UNCLEAR)
                if heard.missing and waited > _SECONDS_UNTIL_SAID and not is_said:
                    is_said = True
                    ranks = _ranks_in_words(heard.missing)
                    _logger.warning(
                        "rank %d waits for %s to attach this model, and to run a forward of it", dist.get_rank(), ranks
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        return Heard()

    def _all_say_the_same(self) -> bool:
        assert self._comparison is not None
        if self._ranks is None and self._closed() is not None:
            return False
        assert self._ranks is not None
        return self._comparison.all_say_the_same(self._ranks)

    def _heard(self) -> Heard:
        assert self._comparison is not None
        if self._ranks is None and isinstance(heard := self._closed(), Heard):
            return heard
        assert self._ranks is not None
        return self._comparison.heard(self._ranks)

    def _closed(self) -> Heard | None:
        """Go from neighbour to neighbour until no rank is new, and note the ranks of the step. ``None``: all are known;
        else which rank has not said yet who its neighbours are."""
        store, ranks = self._neighbours_in_store(), set(self._neighbours.ranks)
        visited: set[int] = set()
        while rest := ranks - visited:
            for rank in sorted(rest):
                if not store.check([str(rank)]):
                    return Heard(missing=(rank,))
                ranks.update(json.loads(store.get(str(rank))))
                visited.add(rank)
        self._ranks = tuple(sorted(ranks))
        return None

    def _neighbours_in_store(self) -> Any:
        return store_of_world(f"neighbours/{self._model}")

    def _take(self, heard: Heard) -> None:
        self.mismatch = heard.difference
        self._all_heard = heard == Heard()
        if self.mismatch is None and heard.missing and (self._waits or self._matters):
            ranks = _ranks_in_words(heard.missing)
            self.mismatch = f"{ranks} did not attach this model, and rank {dist.get_rank()} did"

    # What the ranks decide together.

    def open(self) -> VoteGroup:
        """Make ready to vote. All ranks must call this, once for each backward; it costs nothing later."""
        assert self._ranks is not None, "only ranks that have met vote"
        return vote_group(self._neighbours.anchor, self._ranks)

    def cast(self, step: int, *, failed: bool = False, nonfinite: bool = False) -> Vote:
        """Say how ``step`` went here, without waiting."""
        rank, number = dist.get_rank(), self._number
        ballot = [rank if failed else NOBODY, rank if nonfinite else NOBODY, step, -step, number, -number]
        return Vote(self.open(), ballot)

    def abstain(self) -> Vote:
        """Take part in a vote of the others, on a step that this rank has no part in."""
        return Vote(self.open(), [NOBODY] * 6)

    # What each rank finds out by itself, and tells the others without waiting for them: they need not come to it at the
    # same point of their loops, nor at all.

    def say(self, gains: bool) -> None:
        """Tell the others yes or no. A rank that has said yes may say no later."""
        if self._comparison is not None:
            self._comparison.add("yes" if gains else "no", 1)

    def all_found(self) -> bool | None:
        """``False`` as soon as one rank has said no, ``True`` once all have said yes; ``None`` before.

        Raises what the store raises: the process that keeps it may have ended.
        """
        if self._comparison is None or self._ranks is None:
            return None
        if self._comparison.add("no", 0):
            return False
        return True if self._comparison.add("yes", 0) >= len(self._ranks) else None


def _ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
