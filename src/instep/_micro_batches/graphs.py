"""The graphs of micro-batches between their forwards and one backward of all: what may not be in them, and the sums.

``Graphs`` walks the graph of each loss, and refuses graphs whose one backward would not compute what a backward for
each computes. ``walk_in_segments`` has backward come to all graphs part by part, and ``add_in_order`` puts a hook on
each node that leads to a leaf (a parameter): there the contributions of all micro-batches to the leaf meet, and an
``_LeafSum`` adds them in the order of the plain loop.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from operator import itemgetter, methodcaller
from typing import Any, cast

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from instep.errors import AccumulationError
from instep.sources.fsdp.micro_batches import WideGradient

Names = Callable[[torch.Tensor], str]
"""Returns the name of a leaf for messages."""
PartOf = Callable[[Node, Sequence[torch.Tensor]], object]
"""Returns the part of the model that a node belongs to, by the leaves that it leads to; ``None``: it may be any."""


# Names of nodes: the one that writes a leaf's .grad, and the one of reentrant checkpointing.
_LEAF = "torch::autograd::AccumulateGrad"
_NESTING = "CheckpointFunctionBackward"

_PLACE = itemgetter(0, 1, 2)
_NUMBER = methodcaller("_sequence_nr")
"""The number of a node: in the count of the thread that has made it."""


class Graphs:
    """The graphs of several losses, for one backward of all of them.

    Args:
        losses: the losses of the micro-batches, in order: two or more.

    Attributes:
        contributions: for each leaf, how many edges of each micro-batch's graph lead to it.

    Raises:
        AccumulationError: one backward of all graphs would not compute what a backward for each of them does.
    """

    def __init__(self, losses: Sequence[torch.Tensor], name_of: Names) -> None:
        self.contributions: dict[torch.Tensor, list[int]] = {}
        self._name_of = name_of
        self._count = len(losses)
        self._sparse: Counter[torch.Tensor] = Counter()
        self._number_of: dict[Node, int] = {}
        # For each node that leads to leaves: the places of these among its outputs, and the leaves.
        self._edges: dict[Node, list[tuple[int, torch.Tensor]]] = {}
        for number, loss in enumerate(losses):
            self._walk(number, loss)
        for leaf, each in self.contributions.items():
            self._require_alike(leaf, each)

    def nodes(self) -> Iterator[tuple[int, Node]]:
        """All nodes, each with the number of its micro-batch."""
        return ((number, node) for node, number in self._number_of.items())

    def edges(self) -> Iterator[tuple[int, Node, torch.Tensor]]:
        """The edges that lead to leaves: the number of the micro-batch, the node, the leaf."""
        for node, edges in self._edges.items():
            for _, leaf in edges:
                yield self._number_of[node], node, leaf

    def walk_in_segments(self, part_of: PartOf, *, joins: bool) -> None:
        """Have backward come to a segment of all graphs before it comes to the next: to that of the first micro-batch
        first. So the contributions to a parameter arrive together, in the plain loop's order, and what backward needs
        between two parameters (the gradients of logits, activations that a checkpoint computes again) is there for one
        micro-batch at a time.

        A segment is a run of nodes that lead to the same part, with those that backward comes to before them.

        Autograd numbers nodes as they are made, and backward takes, of the nodes that are ready, that with the highest
        number. As they came, it would end the last forward's graph before it began the one before: all gradients would
        be alive together. Within a graph the order stays what it was, and with it every sum that autograd makes there.

        There is no public way to set a node's number; ``tests/parity/test_micro_batches.py`` fails clearly when torch
        changes the private one, or the order.

        Args:
            joins: whether segments become one where that takes less memory, as ``_Order`` has it.
        """
        graphs: list[list[Node]] = [[] for _ in range(self._count)]
        for node, number in self._number_of.items():
            graphs[number].append(node)
        order = _Order(self._count)
        for number, nodes in enumerate(graphs):
            nodes.sort(key=_NUMBER)
            for node in nodes:  # as forward made them: backward comes to the last one first
                leaves = [leaf for _, leaf in self._edges.get(node, ())]
                order.add(number, node, part_of(node, leaves), leaves)
        for place, node in enumerate(order.nodes(joins=joins)):
            cast(Any, node)._set_sequence_nr(place)

    def add_in_order(
        self, keeper_of: Callable[[torch.Tensor, Sequence[int]], WideGradient | None]
    ) -> list[RemovableHandle]:
        """Have backward add the contributions to each leaf as the plain loop adds them. Returns the handles of the
        hooks that do it: a node may be a part of a later graph, too.

        Args:
            keeper_of: takes a leaf, and the contributions to it of each micro-batch. Returns who takes the sum where it
                has another dtype than the leaf; ``None``: the leaf's node does.
        """
        sums = {leaf: _LeafSum(leaf, each, keeper_of(leaf, each)) for leaf, each in self.contributions.items()}
        handles: list[RemovableHandle] = []
        for node, edges in self._edges.items():
            places = {place: sums[leaf] for place, leaf in edges}
            # Not on the leaf's own node, which gets several contributions of one graph as one sum.
            handles.append(node.register_hook(partial(_contribute, self._number_of[node], places)))
        return handles

    def _walk(self, number: int, loss: torch.Tensor) -> None:
        assert loss.grad_fn is not None
        numbers: set[int] = set()
        todo: list[Node] = []
        self._come_to(number, loss.grad_fn, todo)
        while todo:
            node = todo.pop()
            self._require_in_order(node, numbers)
            for place, (following, _) in enumerate(node.next_functions):
                if following is None:
                    continue
                if following.name() == _LEAF:
                    leaf: torch.Tensor = cast(Any, following).variable
                    self._edges.setdefault(node, []).append((place, leaf))
                    self.contributions.setdefault(leaf, [0] * self._count)[number] += 1
                    if getattr(node, "_saved_sparse", False) or getattr(node, "_saved_sparse_grad", False):
                        self._sparse[leaf] += 1
                else:
                    self._come_to(number, following, todo)

    def _come_to(self, number: int, node: Node, todo: list[Node]) -> None:
        if node not in self._number_of:
            self._number_of[node] = number
            todo.append(node)
        elif (other := self._number_of[node]) != number:
            raise AccumulationError(
                f"micro-batches {other + 1} and {number + 1} share a part of their graphs ({node.name()}): its "
                "gradient would be computed once for both, and the plain loop computes it for each. Compute in "
                "loss_of(batch) all that depends on parameters"
            )

    def _require_in_order(self, node: Node, numbers: set[int]) -> None:
        """Raise unless it is known when the plain loop's backward would come to ``node``, whose number is added to
        ``numbers``, those of the nodes that were visited in the same graph."""
        if node.name() == _NESTING:
            raise AccumulationError(
                "micro_batches() cannot look into torch.utils.checkpoint with use_reentrant=True, which runs a "
                "backward of its own for each segment: give it use_reentrant=False"
            )
        number = _NUMBER(node)
        if number in numbers:  # each thread counts by itself
            raise AccumulationError(
                f"two threads have made a micro-batch's graph, and have given a node each the same number "
                f"({node.name()}): which of them backward comes to first is not known. Compute the loss on one thread; "
                "for a gradient penalty (create_graph=True) on an accelerator use overlap.accumulate()"
            )
        numbers.add(number)

    def _require_alike(self, leaf: torch.Tensor, each: Sequence[int]) -> None:
        """Raise where the gradient of ``leaf`` would not be the plain loop's, by what the leaf is."""
        if leaf._backward_hooks:
            raise AccumulationError(
                f"{self._name_of(leaf)} has a hook (register_hook): the plain loop calls it with the gradient of each "
                "micro-batch, and here it would be called once with the sum. Remove it, or use overlap.accumulate()"
            )
        if leaf in self._sparse and (max(each) > 1 or self._sparse[leaf] < sum(each)):
            raise AccumulationError(
                f"{self._name_of(leaf)} is used several times in a micro-batch, with sparse gradients, or has dense "
                "ones as well: autograd adds these in an order of its own. Use sparse=False, or overlap.accumulate()"
            )
        if not leaf.requires_grad:
            raise AccumulationError(
                f"{self._name_of(leaf)} was frozen after a micro-batch had used it: the plain loop keeps the gradient "
                "that it has got by then. Freeze parameters before the first micro-batch, or use overlap.accumulate()"
            )


Run = tuple[object, int]
"""Nodes of a graph that lead to one part, one after the other: the part, and how often the graph came to it before."""


_CLEARLY = 2
"""How many times more memory must be saved than gradients take: beside them are the activations of the micro-batches
that have not gone through the segment. (A Llama of 1 B with its head in the embedding, 8 micro-batches of 512 tokens:
12.05 GiB as one segment, 11.75 as several.)"""


class _Order:
    """The segments of all graphs, in one order.

    Of the same part each graph has the same segment, whatever other parts a graph leaves out. Between two uses of a
    weight the gradients of the first wait for those of the second, of every micro-batch, as the plain loop adds a
    micro-batch's own first. Where they are twice as much as all gradients of the parts between, these are one segment:
    a micro-batch goes through all of it, as in the plain loop.

    Args:
        count: of graphs.
    """

    def __init__(self, count: int) -> None:
        self._nodes: list[list[tuple[Run | None, Node]]] = [[] for _ in range(count)]
        self._runs: list[list[Run]] = [[] for _ in range(count)]
        self._came: list[Counter[object]] = [Counter() for _ in range(count)]
        self._leaves: dict[Run, set[torch.Tensor]] = {}

    def add(self, number: int, node: Node, part: object, leaves: Sequence[torch.Tensor]) -> None:
        """The next node of a graph, in the order of forward; ``part``: ``None`` if it may be in any."""
        runs = self._runs[number]
        if part is not None and not (runs and runs[-1][0] == part):
            runs.append((part, self._came[number][part]))
            self._came[number][part] += 1
        if leaves:
            self._leaves.setdefault(runs[-1], set()).update(leaves)
        self._nodes[number].append((runs[-1] if runs else None, node))

    def nodes(self, *, joins: bool) -> Iterator[Node]:
        """Of all graphs. Backward is to come to the last one first."""
        segments = self._segments(joins)
        ordered = [
            (segments[number].get(run, 0), -number, place, node)
            for number, nodes in enumerate(self._nodes)
            for place, (run, node) in enumerate(nodes)
        ]
        ordered.sort(key=_PLACE)
        return (node for *_, node in ordered)

    def _segments(self, joins: bool) -> list[dict[Run | None, int]]:
        """Of each graph the number of a run's segment."""
        after: dict[Run, dict[Run, None]] = {}  # no sets: the order must be the same on every rank
        for runs in self._runs:
            after.update((run, {}) for run in runs if run not in after)
            for earlier, later in pairwise(runs):
                after[later][earlier] = None
        try:
            order = list(TopologicalSorter(after).static_order())
        except CycleError:  # graphs that use parts in different orders: by the numbers of their runs, as they are
            return [{run: place for place, run in enumerate(runs)} for runs in self._runs]
        until = self._joined(order) if joins else {}
        segments: dict[Run | None, int] = {}
        segment, reach = -1, -1
        for place, run in enumerate(order):
            segment += place > reach
            reach = max(reach, until.get(place, place))
            segments[run] = segment
        return [segments] * len(self._runs)

    def _joined(self, order: Sequence[Run]) -> dict[int, int]:
        """The first and the last place of what is to be one segment."""
        places: dict[torch.Tensor, list[int]] = {}
        for place, run in enumerate(order):
            for leaf in self._leaves.get(run, ()):
                places.setdefault(leaf, []).append(place)
        waiting: Counter[tuple[int, int]] = Counter()
        for leaf, used in places.items():
            if len(used) > 1:
                waiting[used[0], used[-1]] += leaf.nbytes
        until: dict[int, int] = {}
        for (first, last), nbytes in waiting.items():
            between = set[torch.Tensor]().union(*(self._leaves.get(run, ()) for run in order[first : last + 1]))
            if _CLEARLY * sum(leaf.nbytes for leaf in between) < len(self._runs) * nbytes:
                until[first] = max(last, until.get(first, last))
        return until


def leaves_of(losses: Sequence[torch.Tensor]) -> set[torch.Tensor]:
    todo = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen, leaves = set(todo), set[torch.Tensor]()
    while todo:
        for following, _ in todo.pop().next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            if following.name() == _LEAF:
                leaves.add(cast(Any, following).variable)
            else:
                todo.append(following)
    return leaves


class _LeafSum:
    """The sum that M plain backwards leave in ``.grad`` of a leaf: of each micro-batch its contributions in the order
    in which its own graph makes them, then the micro-batches, first to last. It goes on to the leaf's node or to a
    keeper.

    Contributions of different micro-batches may arrive in any order. One that comes early is kept until those before
    it are there. Floating-point sums depend on their order; so each addition here is one that the plain loop makes.

    Args:
        contributions: for each micro-batch, how many edges of its graph lead to the leaf.
        keeper: has the dtype in which micro-batches are added to each other; ``None``: that of the contributions.
    """

    __slots__ = ("_contributions", "_keeper", "_leaf", "_left", "_next", "_sums", "_total")

    def __init__(self, leaf: torch.Tensor, contributions: Sequence[int], keeper: WideGradient | None) -> None:
        self._leaf = leaf
        self._keeper = keeper
        self._contributions = tuple(contributions)
        self._begin()

    def _begin(self) -> None:
        self._left = list(self._contributions)
        self._sums: list[torch.Tensor | None] = [None] * len(self._left)
        self._next = 0
        self._total: torch.Tensor | None = None

    def add(self, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Add a contribution of micro-batch ``number``; ``None`` if there turned out to be none. Returns the gradient
        that goes on to the leaf's node: the sum, with the last one. The next backward of the same graphs begins
        again."""
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
                self._total = done if self._keeper is None else done.to(self._keeper.dtype)
            self._next += 1
        if self._next < len(self._left):
            return None
        total = self._total
        self._begin()
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


def _contribute(
    number: int, places: Mapping[int, _LeafSum], gradients: Sequence[torch.Tensor | None], _: object
) -> tuple[torch.Tensor | None, ...]:
    """The hook: a node of micro-batch ``number`` has computed ``gradients``, of the shapes and dtypes of its inputs by
    now. In the places of leaves their sums go on."""
    sums = list(gradients)
    for place, contributions in places.items():
        sums[place] = contributions.add(number, sums[place])
    return tuple(sums)
