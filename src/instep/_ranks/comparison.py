"""Whether all ranks of a step train the same model in the same way: each tells the others through a store.

No collective is sent: ranks that differ would send different ones. Each rank writes what it trains, and in which way,
into the store over which process groups find their ranks, where its first forward begins. A rank that has got reduced
gradients from another knows that the other one has been there: it need not wait to read what the other has written.

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

from instep._ranks.process_groups import store_of_world, world

Words = Mapping[str, str]
"""The names of options or parameters, and what each is on a rank."""


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


_NAMED_DIFFERENCES = 3
"""How many differences between two ranks a message names."""


class Comparison:
    """What one attachment says to the other ranks, and what they are known to say.

    Args:
        place: in the store; the same on all ranks of the step.
        mine: what this rank says: its options, then its parameters. Where options differ, parameters are not named.
    """

    def __init__(self, place: str, own: Sequence[Words]) -> None:
        self._store = store_of_world(place)
        self._place = _places.setdefault(world(), {}).setdefault(place, _StorePlace())
        self._rank = dist.get_rank()
        self._own = own
        self._same: set[int] = {self._rank}  # the ranks that are known to say the same
        for other in self._place.others.values():  # this rank attaches again
            if other.passed > other.read:
                other.read, other.last = other.passed, None
        self._text = json.dumps([list(words.items()) for words in own])
        self._digest = digest_of(self._text)
        self._number = len(self._place.digests)
        self._counter = f"same/{self._number}/{self._digest}"
        self._is_counted = False

    def say(self) -> None:
        """Tell the other ranks. Who is interrupted here does it again."""
        if len(self._place.digests) == self._number:
            self._place.digests.append(self._digest)
        # In this order: who finds the digest finds the words, and who has counted this rank finds the digest.
        self._store.set(f"words/{self._digest}", self._text)
        self._store.set(f"said/{self._rank}", json.dumps(self._place.digests))
        if not self._is_counted:
            self._is_counted = True  # before: a rank that is not counted is asked for its words, and none counts twice
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
        others = [self._read(rank) for rank in ranks if rank not in self._same]
        return Heard(
            next((other.difference for other in others if other.difference is not None), None),
            tuple(rank for other in others for rank in other.missing),
            any(other.alone for other in others),
        )

    def _read(self, rank: int) -> Heard:
        key, other = f"said/{rank}", self._place.others[rank]
        digests: list[str] = json.loads(self._store.get(key)) if self._store.check([key]) else []
        for digest in other.met:
            other.read = digests.index(digest, other.read) + 1
            other.last = digest
        other.met.clear()
        unread = digests[other.read :]
        if self._digest in unread:
            other.read = len(digests) - unread[::-1].index(self._digest)
            other.last = self._digest
            self._same.add(rank)
            return Heard()
        if unread:  # but nothing that this rank says
            other.passed = len(digests)
            return Heard(self._difference(rank, unread[-1]))
        alone = other.last == self._digest
        return Heard(missing=() if alone else (rank,), alone=alone)

    def add(self, name: str, amount: int) -> int:
        """Add to a number that all ranks of this attachment share, and return the sum."""
        return int(self._store.add(f"{self._counter}/{name}", amount))

    def _difference(self, rank: int, digest: str) -> str:
        theirs = map(dict, json.loads(self._store.get(f"words/{digest}")))
        found: list[str] = []
        for here, there in zip(self._own, theirs, strict=True):
            first, second = (self._rank, here), (rank, there)
            found = found or list(differences(*sorted([first, second], key=itemgetter(0))))
        return "; ".join(found[:_NAMED_DIFFERENCES])


class _StorePlace:
    """One place in the store, as this process has used it.

    Attributes:
        said: the digests that this rank has said there.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.others: defaultdict[int, _OtherRank] = defaultdict(_OtherRank)


# By the world, and by the name of the place: attachments of one model follow one another at one place.
_places: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _StorePlace]]" = weakref.WeakKeyDictionary()


class _OtherRank:
    """What this rank has read of another one at one place. The other rank's digests there are a list, attachment after
    attachment, like this rank's own. But a rank may attach again alone, and then its list is the longer one.

    Attributes:
        read: how many of the digests were read: up to the last one that this rank has said, too.
        passed: how many digests were found not to be what this rank says now; for its next attachment they are read.
        last: the digest that both ranks said last; ``None``: they differed.
        met: digests that all ranks were found to say, and that were not looked for in the other rank's list yet.
    """

    def __init__(self) -> None:
        self.read = self.passed = 0
        self.last: str | None = None
        self.met: list[str] = []


def differences(lower: tuple[int, Words], higher: tuple[int, Words]) -> Iterator[str]:
    """Between what two ranks say, in words."""
    (first, words), (second, other) = lower, higher
    for name in {**words, **other}:
        here, there = words.get(name, "missing"), other.get(name, "missing")
        if here != there:
            yield f"{name} is {here} on rank {first} and {there} on rank {second}"
    for here, there in zip(words, other, strict=False):
        if here != there:
            yield f"rank {first} has {here} where rank {second} has {there}, in another order"


def digest_of(value: object) -> str:
    """A short name for ``value``, the same in all processes."""
    return blake2b(repr(value).encode(), digest_size=8).hexdigest()
