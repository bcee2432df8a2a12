"""The graphs of micro-batches between their forwards and one backward of all: what may not be in them, and its order.

``Graphs`` walks the graph of each loss, and refuses graphs whose one backward would not compute what a backward for
each computes. ``walk_in_segments`` has backward come to all graphs part by part, and ``add_in_order`` puts a hook on
each node that leads to a leaf (a parameter): there the contributions of all micro-batches to the leaf meet, and a
``LeafSum`` adds them in the order of the plain loop.
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

from instep._micro_batches.sums import LeafSum, contribute
from instep._torch.versions import memory_of
from instep.errors import AccumulationError
from instep.sources.fsdp.micro_batches import WideGradient

Names = Callable[[torch.Tensor], str]
"""Returns the name of a leaf for messages."""
PartOf = Callable[[Node, Sequence[torch.Tensor]], object]
"""Returns the part of the model that a node belongs to, by the leaves that it leads to; ``None``: it may be any."""


# Names of nodes: the one that writes a leaf's .grad, and the one of reentrant checkpointing.
_LEAF = "torch::autograd::AccumulateGrad"
_NESTING = "CheckpointFunctionBackward"
_LOOKUP = "EmbeddingBackward0"
"""Of ``F.embedding``: but for the rows that were looked up its gradient is zeros."""

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
        # The nodes that look up rows of a leaf; and the rows, where their gradients are added apart.
        self._lookups: dict[torch.Tensor, list[Node]] = {}
        self._number_of: dict[Node, int] = {}
        # For each node that leads to leaves: the places of these among its outputs, and the leaves.
        self._edges: dict[Node, list[tuple[int, torch.Tensor]]] = {}
        for number, loss in enumerate(losses):
            self._walk(number, loss)
        for leaf, each in self.contributions.items():
            self._require_alike(leaf, each)
        found = ((leaf, self._looked_up(leaf, nodes)) for leaf, nodes in self._lookups.items())
        self._rows = {leaf: rows for leaf, rows in found if rows is not None}

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
        waiting = {leaf: len(rows) * leaf.nbytes // leaf.shape[0] for leaf, rows in self._rows.items()}
        order = _Order(self._count, waiting)
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
        sums: dict[torch.Tensor, LeafSum] = {}
        for leaf, each in self.contributions.items():
            rows, lookups = self._rows.get(leaf), Counter[int]()
            if rows is not None:
                lookups.update(self._number_of[node] for node in self._lookups[leaf])
            sums[leaf] = LeafSum(leaf, each, keeper_of(leaf, each), rows, lookups)
        handles: list[RemovableHandle] = []
        for node, edges in self._edges.items():
            places = {place: sums[leaf] for place, leaf in edges}
            looks_up = node.name() == _LOOKUP
            # Not on the leaf's own node, which gets several contributions of one graph as one sum.
            handles.append(node.register_hook(partial(contribute, self._number_of[node], places, looks_up)))
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
                    if node.name() == _LOOKUP:
                        self._lookups.setdefault(leaf, []).append(node)
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

    def _looked_up(self, leaf: torch.Tensor, nodes: Sequence[Node]) -> torch.Tensor | None:
        """The rows of ``leaf`` that all micro-batches look up, where it is used otherwise, too (a head that is the
        embedding). In all other rows a lookup contributes zeros, and other contributions need not wait for it.
        ``None``: there are none, or too many of them, or nobody knows which."""
        if len(nodes) == sum(self.contributions[leaf]) or memory_of(leaf) is not leaf:
            return None
        # Of packed indices nobody asks: a checkpoint would compute its segment again. torch before 2.13 does not tell.
        if not all(getattr(cast(Any, node)._raw_saved_indices, "unpack_hook", node) is None for node in nodes):
            return None
        indices = [cast(Any, node)._saved_indices for node in nodes]
        if _CLEARLY * sum(each.numel() for each in indices) > leaf.shape[0]:
            return None
        return torch.cat([each.reshape(-1).long() for each in indices])  # each as often as it was looked up

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
        waiting: how many bytes of a leaf's gradient wait for its next use, where that is not all.
    """

    def __init__(self, count: int, waiting: Mapping[torch.Tensor, int]) -> None:
        self._waiting = waiting
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
                waiting[used[0], used[-1]] += self._waiting.get(leaf, leaf.nbytes)
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
