"""One parameter's gradient, added up over micro-batches in the order of the plain loop."""

from collections.abc import Sequence

import torch


class _Sum:
    """Of tensors that stay as they are: a gradient may be in use elsewhere in backward, and whoever has computed it may
    use its memory again. So the first one is copied."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        if self.value is None:
            self.value = gradient.clone()
        else:
            self.value.add_(gradient)


class OrderedSum:
    """The sum that M plain backwards leave in ``.grad``: of each micro-batch its contributions in the order in which
    its own graph makes them, then the micro-batches, first to last.

    Contributions of different micro-batches may arrive in any order. One that comes early is kept until those before
    it are there. Floating-point sums depend on their order; so each addition here is one that the plain loop makes.

    Args:
        contributions: of each micro-batch, how many edges of its graph lead to the parameter.
        dtype: in which micro-batches are added to each other; ``None``: in that of the contributions.
    """

    __slots__ = ("_contributions", "_dtype", "_left", "_next", "_sums", "_total")

    def __init__(self, contributions: Sequence[int], dtype: torch.dtype | None = None) -> None:
        self._contributions = tuple(contributions)
        self._dtype = dtype
        self._begin()

    def _begin(self) -> None:
        self._left = list(self._contributions)
        self._sums = [_Sum() for _ in self._left]
        self._next = 0
        self._total = _Sum()

    def add(self, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A contribution of micro-batch ``number``, ``None`` if there turned out to be none. Returns the sum of all
        with the last contribution, and ``None`` before. The next backward of the same graphs begins again."""
        if gradient is not None:
            self._sums[number].add(gradient)
        self._left[number] -= 1
        while self._next < len(self._left) and self._left[self._next] == 0:
            done, self._sums[self._next] = self._sums[self._next], _Sum()
            if self._total.value is None:
                self._total = self._in_dtype(done)
            elif done.value is not None:
                self._total.add(done.value)
            self._next += 1
        if self._next < len(self._left):
            return None
        total = self._total.value
        self._begin()
        return total

    def _in_dtype(self, first: _Sum) -> _Sum:
        if first.value is not None and self._dtype is not None:
            first.value = first.value.to(self._dtype)
        return first
