"""The gradient of a leaf over several micro-batches, added as the plain loop adds it.

``contribute`` is the hook of a node that leads to leaves: what it has computed for a leaf goes to the ``LeafSum``,
which lets the sum go on when the last contribution is there. Floating-point sums depend on their order; so each
addition here is one that the plain loop makes, and one of zeros may be left out.
"""

from collections.abc import Mapping, Sequence

import torch

from instep.sources.fsdp.micro_batches import WideGradient


class _InOrder:
    """The sum of what M plain backwards contribute: of each micro-batch its contributions in the order in which its own
    graph makes them, then the micro-batches, first to last.

    Contributions of different micro-batches may arrive in any order. One that comes early is kept until those before
    it are there.

    Args:
        contributions: how many each micro-batch has.
        dtype: that in which micro-batches are added to each other; ``None``: that of the contributions.
    """

    __slots__ = ("_contributions", "_dtype", "_left", "_next", "_sums", "_total")

    def __init__(self, contributions: Sequence[int], dtype: torch.dtype | None) -> None:
        self._contributions = tuple(contributions)
        self._dtype = dtype
        self._begin()

    def _begin(self) -> None:
        self._left = list(self._contributions)
        self._sums: list[torch.Tensor | None] = [None] * len(self._left)
        self._next = 0
        self._total: torch.Tensor | None = None

    def add(self, number: int, gradient: torch.Tensor | None) -> bool:
        """Add a contribution of micro-batch ``number``; ``None`` if there turned out to be none. Returns whether it was
        the last."""
        if gradient is not None:
            earlier = self._sums[number]
            if earlier is None and self._total is not None and number == self._next and self._left[number] == 1:
                self._total.add_(gradient)  # all that this micro-batch has: no memory for a sum of its own
            else:
                # It stays as it is, so the first one is copied: a gradient may be in use elsewhere in backward, and the
                # node that computed it may use its memory again.
                self._sums[number] = gradient.clone() if earlier is None else earlier.add_(gradient)
        self._left[number] -= 1
        # Micro-batches that are complete, and whose predecessors are.
        while self._next < len(self._left) and self._left[self._next] == 0:
            done, self._sums[self._next] = self._sums[self._next], None
            if self._total is not None and done is not None:
                self._total.add_(done)
            elif done is not None:
                self._total = done if self._dtype is None else done.to(self._dtype)
            self._next += 1
        return self._next == len(self._left)

    def take(self) -> torch.Tensor | None:
        """The sum; ``None``: there turned out to be no contribution. The next backward begins again."""
        total = self._total
        self._begin()
        return total


class LeafSum:
    """The sum that M plain backwards leave in ``.grad`` of a leaf. It goes on to the leaf's node or to a keeper.

    Args:
        contributions: for each micro-batch, how many edges of its graph lead to the leaf.
        keeper: has the dtype in which micro-batches are added to each other; ``None``: that of the contributions.
        rows: those that lookups contribute to, added apart; of all others a lookup's contribution is zeros, and is left
            out. ``None``: all contributions are added whole.
        lookups: of micro-batches, how many of their contributions are those of lookups, with ``rows``.
    """

    __slots__ = ("_keeper", "_leaf", "_of_rows", "_rows", "_whole")

    def __init__(
        self,
        leaf: torch.Tensor,
        contributions: Sequence[int],
        keeper: WideGradient | None,
        rows: torch.Tensor | None,
        lookups: Mapping[int, int],
    ) -> None:
        self._leaf = leaf
        self._keeper = keeper
        self._rows = rows
        dtype = None if keeper is None else keeper.dtype
        whole = [count - lookups.get(number, 0) for number, count in enumerate(contributions)]
        self._whole = _InOrder(whole, dtype)
        self._of_rows = None if rows is None else _InOrder(contributions, dtype)

    def add(self, number: int, gradient: torch.Tensor | None, *, looks_up: bool) -> torch.Tensor | None:
        """Add a contribution of micro-batch ``number``; ``None`` if there turned out to be none. Returns the gradient
        that goes on to the leaf's node: the sum, with the last one. The next backward of the same graphs begins
        again."""
        if self._of_rows is None or self._rows is None:
            ends = self._whole.add(number, gradient)
        else:
            ends = self._of_rows.add(number, None if gradient is None else gradient[self._rows])
            if not looks_up:
                self._whole.add(number, gradient)
        if not ends:
            return None
        total = self._taken()
        if total is None:
            return None
        if self._keeper is not None:
            self._keeper.keep(total)
            return None
        if gradient is None:
            # The last contribution is none, and a hook must not put a gradient in its place. So this does what the
            # leaf's node would do.
            leaf = self._leaf
            leaf.grad = total if leaf.grad is None else leaf.grad.add_(total)
            return None
        return total

    def _taken(self) -> torch.Tensor | None:
        total = self._whole.take()
        part = None if self._of_rows is None else self._of_rows.take()
        if part is None or self._rows is None:
            return total
        if total is None:
            total = part.new_zeros(self._leaf.shape)
        total.add_(0.0)  # as lookups would: it makes 0.0 of -0.0
        return total.index_copy_(0, self._rows, part)


def contribute(
    number: int,
    places: Mapping[int, LeafSum],
    looks_up: bool,
    gradients: Sequence[torch.Tensor | None],
    _: object,
) -> tuple[torch.Tensor | None, ...]:
    """The hook: a node of micro-batch ``number`` has computed ``gradients``, of the shapes and dtypes of its inputs by
    now. In the places of leaves their sums go on."""
    sums = list(gradients)
    for place, contributions in places.items():
        sums[place] = contributions.add(number, sums[place], looks_up=looks_up)
    return tuple(sums)
