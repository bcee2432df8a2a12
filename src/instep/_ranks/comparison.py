"""What must be the same on all ranks of a step, compared before the first step that they take together.

No collective is sent: ranks that differ would send different ones. Each rank writes what it trains, and in which way,
into the store over which process groups find their ranks, where its first backward begins. A rank that has got reduced
gradients from another knows that the other one has been there: it need not wait to read what that has written.

Where all ranks say the same, a rank writes three entries and reads one, however many ranks there are. The words are
read only of ranks that differ.
"""

import json
import weakref
from collections import Counter, defaultdict
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


class _Earlier:
    """What was said at one place, attachment after attachment, in the words of ``digest_of``.

    Attributes:
        said: by this process.
        differed: by each other rank, beside that: it was told of already.
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        self.differed: defaultdict[int, Counter[str]] = defaultdict(Counter)


# By the world, for each place in its store.
_earlier: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Earlier]]" = weakref.WeakKeyDictionary()


class Heard(NamedTuple):
    """
    Attributes:
        difference: between this rank and another, in words; ``None``: none was found.
        missing: the ranks that have not said anything of this attachment.
        alone: whether this rank alone has attached the same once more: the others have said it before, and no more.
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
        self._rank = dist.get_rank()
        self._mine = mine
        text = json.dumps([list(words.items()) for words in mine])
        self._digest = digest_of(text)
        self._earlier = _earlier.setdefault(world(), {}).setdefault(place, _Earlier())
        self._earlier.said.append(self._digest)
        times = self._earlier.said.count(self._digest)
        self._times, self._counter = times, f"same/{self._digest}/{times}"
        # In this order: who finds the digest finds the words, and who has counted this rank finds the digest.
        self._store.set(f"words/{self._digest}", text)
        self._store.set(f"said/{self._rank}", json.dumps(self._earlier.said))
        self._store.add(self._counter, 1)

    def heard(self, ranks: Sequence[int]) -> Heard:
        """What ``ranks`` have said by now. Waits for nobody."""
        if self._store.add(self._counter, 0) >= len(ranks):
            return Heard()
        difference, missing, alone = None, [], False
        for rank in ranks:
            said = self._said_by(rank)
            if said.count(self._digest) >= self._times:
                continue
            others = Counter(said) - Counter(self._earlier.said) - self._earlier.differed[rank]
            if others:
                self._earlier.differed[rank] += others
                difference = difference or self._difference(rank, next(one for one in reversed(said) if one in others))
            # Nothing that this rank has not said itself: that one is not here yet, or has attached once only.
            elif said and said[-1] == self._digest:
                alone = True
            else:
                missing.append(rank)
        return Heard(difference, tuple(missing), alone)

    def add(self, name: str, amount: int) -> int:
        """Add to a number that all ranks of this attachment share; what it is then."""
        return int(self._store.add(f"{self._counter}/{name}", amount))

    def _said_by(self, rank: int) -> list[str]:
        key = f"said/{rank}"
        found: list[str] = json.loads(self._store.get(key)) if self._store.check([key]) else []
        return found

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
