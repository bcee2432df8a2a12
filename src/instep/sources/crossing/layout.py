"""Which parameters share a bucket of DDP's: in the running backward, and in the one before it."""

from collections.abc import Sequence

import torch


class Layout:
    """An order of buckets is worth something only while backward after backward makes the same ones.

    Attributes:
        last: of each bucket of the last complete backward the parameters, by ``id``.
        repeats: whether the buckets of the running backward are, so far, those of the last one.
        repetitions: how many backwards in a row had the same buckets as the one before.
        is_complete: whether the running backward has made all of its buckets.
    """

    def __init__(self) -> None:
        self.last: list[list[int]] = []
        self.repeats = False
        self.repetitions = 0
        self.is_complete = False
        self._found: list[list[int]] = []

    def begin(self) -> None:
        """A backward is about to make its first bucket."""
        self.repeats = len(self.last) > 0
        self.is_complete = False
        self._found = []

    def differs(self, index: int, members: Sequence[torch.Tensor]) -> bool:
        """Note a bucket of the running backward. Whether it is the first one that is not as in the last backward."""
        found = [id(parameter) for parameter in members]
        self._found.append(found)
        differs = self.repeats and (index >= len(self.last) or self.last[index] != found)
        self.repeats = self.repeats and not differs
        return differs

    def end(self) -> None:
        """The running backward has made its last bucket."""
        self.is_complete = True
        self.repeats = self.repeats and len(self._found) == len(self.last)
        self.repetitions = self.repetitions + 1 if self.repeats else 0
        self.last = self._found
