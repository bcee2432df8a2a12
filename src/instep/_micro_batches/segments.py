"""Where one micro-batch's backward makes room for the next one's: between two parts of the model.

A part is FSDP2's group, or the outermost module whose gradients are two buckets at most (or that which has the
parameter): as much as an accelerator holds anyway, of which one bucket is stepped while the next one fills. A
checkpointed block is one, as a rule. If backward left it in the middle, what the block has computed again would wait
for the other micro-batches, of each one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.autograd.graph import Node

from instep._optim.parameters import AttachedParameter
from instep.sources.fsdp.micro_batches import OneBackward

_BUCKETS = 2


class Segments:
    """Says of a node which part of the model it belongs to, for ``Graphs.walk_in_segments``.

    Args:
        bucket_bytes: the size of a bucket.
        fsdp2: knows FSDP2's groups.
    """

    def __init__(self, parameters: Sequence[AttachedParameter], bucket_bytes: int, fsdp2: OneBackward) -> None:
        self._fsdp2 = fsdp2
        sizes: Counter[str] = Counter()
        for attached in parameters:
            for module in _modules(attached.spec.name):
                sizes[module] += attached.spec.nbytes
        self._parts: dict[torch.Tensor, str] = {}
        for attached in parameters:
            # At least the module itself: a node that leads to a bias computes the gradient of the weight, too.
            *modules, own = _modules(attached.spec.name)
            fits = (module for module in modules if sizes[module] <= _BUCKETS * bucket_bytes)
            self._parts[attached.get()] = next(fits, own)

    def __call__(self, node: Node, leaves: Sequence[torch.Tensor]) -> object:
        if not leaves:
            return self._fsdp2.ended_by(node)
        leaf = leaves[0]
        return self._fsdp2.group_of(leaf) or self._parts.get(leaf, id(leaf))  # the last: of a model not attached


def _modules(name: str) -> Iterator[str]:
    """The modules that a parameter of this name is in, the outermost first; of the model itself its own name."""
    *path, last = name.split(".")
    if not path:
        yield last
    for depth in range(len(path)):
        yield ".".join(path[: depth + 1])
