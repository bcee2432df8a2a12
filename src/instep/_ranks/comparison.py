"""What must be the same on all ranks of a step, compared before the first step that they take together.

No collective is sent: ranks that differ would send different ones. Each rank writes what it trains, and in which way,
into the store over which process groups find their ranks, where its first backward begins. A rank that has got reduced
gradients from another knows that the other one has been there: it need not wait to read what that has written.

Where all ranks say the same, a rank writes three entries and reads one, however many ranks there are. The words are
read only of ranks that differ.
"""

import json
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import NamedTuple

import torch.distributed as dist

from instep._ranks.groups import store_of_world, world

_NAMED = 3
"""Of the differences between two ranks, so many are named."""

Words = Mapping[str, str]
"""The names of options or parameters, and what each is on a rank."""


class _Other:
    """What was read of another rank at one place. The digests that it has said there are a list, attachment after
    attachment, like this rank's own; but a rank may attach again alone, and then its list is the longer one.

    Attributes:
        read: how many of them were read: up to the last that this rank said, too.
        passed: up to where none of them is what this rank says; for its next attachment they are read.
        last: what both ranks said last; ``None``: they differed.
        met: what this rank has found to be said by all, and has not read.
    """

    def __init__(self) -> None:
        self.read = self.passed = 0
        self.last: str | None = None
        self.met: list[str] = []

    def begins_anew(self) -> None:
        """This rank attaches again."""
        if self.passed > self.read:
            self.read, self.last = self.passed, None


class _Place:
    """One place in the store, in this process.

    Attributes:
        said: the digests that this rank has said there.
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        self.others: defaultdict[int, _Other] = defaultdict(_Other)


# By the world, and by name.
_places: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Place]]" = weakref.WeakKeyDictionary()


class Heard(NamedTuple):
    """What is known of the other ranks.

    Attributes:
        difference: between this rank and another, in words; ``None``: none was found. While ranks are on their way to
            their first step together, that may be of something which the other one has attached by itself.
        missing: the ranks that have not said anything of this attachment.
        alone: whether others have said nothing new, and what they said last is what this rank says. They may be on
            their way, or this rank alone has attached again.
    """

    difference: str | None = None
    missing: tuple[int, ...] = ()
    alone: bool = False


class Comparison:
    """Of one attachment.

    Args:
        place: in the store; the same on all ranks of the step.
        mine: what this rank says: its options, then its parameters. Where options differ, parameters are not named.
    """

    def __init__(self, place: str, mine: Sequence[Words]) -> None:
        self._store = store_of_world(place)
        self._place = _places.setdefault(world(), {}).setdefault(place, _Place())
        self._rank = dist.get_rank()
        self._mine = mine
        self._same: set[int] = {self._rank}  # the ranks that are known to say the same
        for other in self._place.others.values():
            other.begins_anew()
        text = json.dumps([list(words.items()) for words in mine])
        self._digest = digest_of(text)
        self._counter = f"same/{len(self._place.said)}/{self._digest}"
        self._place.said.append(self._digest)
        # In this order: who finds the digest finds the words, and who has counted this rank finds the digest.
        self._store.set(f"words/{self._digest}", text)
        self._store.set(f"said/{self._rank}", json.dumps(self._place.said))
        self._store.add(self._counter, 1)

    def all_say_the_same(self, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` have said by now what this one says: one question, however many there are."""
        if self._store.add(self._counter, 0) >= len(ranks):
            for rank in self._same.symmetric_difference(ranks):
                self._place.others[rank].met.append(self._digest)
            self._same.update(ranks)
        return len(self._same) == len(ranks)

    def heard(self, ranks: Sequence[int]) -> Heard:
        """What ``ranks`` have said by now. Waits for nobody."""
        if self.all_say_the_same(ranks):
            return Heard()
        found = [self._read(rank) for rank in ranks if rank not in self._same]
        return Heard(
            next((one.difference for one in found if one.difference is not None), None),
            tuple(rank for one in found for rank in one.missing),
            any(one.alone for one in found),
        )

    def _read(self, rank: int) -> Heard:
        key, other = f"said/{rank}", self._place.others[rank]
        said: list[str] = json.loads(self._store.get(key)) if self._store.check([key]) else []
        for digest in other.met:
            other.read = said.index(digest, other.read) + 1
            other.last = digest
        other.met.clear()
        unread = said[other.read :]
        if self._digest in unread:
            other.read = len(said) - unread[::-1].index(self._digest)
            other.last = self._digest
            self._same.add(rank)
            return Heard()
        if unread:
            other.passed = len(said)
            return Heard(self._difference(rank, unread[-1]))
        alone = other.last == self._digest
        return Heard(missing=() if alone else (rank,), alone=alone)

    def add(self, name: str, amount: int) -> int:
        """Add to a number that all ranks of this attachment share; what it is then."""
        return int(self._store.add(f"{self._counter}/{name}", amount))

    def _difference(self, rank: int, digest: str) -> str:
        theirs = map(dict, json.loads(self._store.get(f"words/{digest}")))
        found: list[str] = []
        for here, there in zip(self._mine, theirs, strict=True):
            first, second = (self._rank, here), (rank, there)
            found = found or list(_differences(*sorted([first, second], key=itemgetter(0))))
        return "; ".join(found[:_NAMED])


def _differences(lower: tuple[int, Words], higher: tuple[int, Words]) -> Iterator[str]:
    (first, one), (second, other) = lower, higher
    for name in {**one, **other}:
        here, there = one.get(name, "missing"), other.get(name, "missing")
        if here != there:
            yield f"{name} is {here} on rank {first} and {there} on rank {second}"
    for here, there in zip(one, other, strict=False):
        if here != there:
            yield f"rank {first} has {here} where rank {second} has {there}, in another order"


def digest_of(said: object) -> str:
    """A short name for ``said``, the same in all processes."""
    return blake2b(repr(said).encode(), digest_size=8).hexdigest()
