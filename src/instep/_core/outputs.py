"""Where backward starts: the autograd nodes of what a module returned."""

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass

import torch
from torch.autograd.graph import Node


def nodes_of(output: object) -> Iterator[Node]:
    """The autograd nodes of the tensors in a module's output: backward starts at them."""
    if isinstance(output, torch.Tensor):
        if output.grad_fn is not None:
            yield output.grad_fn
    elif isinstance(output, Mapping):
        yield from nodes_of(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from nodes_of(item)
    elif hasattr(output, "__dict__") and not isinstance(output, type):
        # A dataclass, or an object of the model's own.
        for item in list(vars(output).values()):
            if isinstance(item, (torch.Tensor, Mapping, list, tuple)) or is_dataclass(item):
                yield from nodes_of(item)
