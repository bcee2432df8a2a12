"""The step of one parameter, inside backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from instep._autograd.engine import graph_task
from instep._optim.calling import without_autocast
from instep.errors import AccumulationError

OPTIMIZERS = "_in_backward_optimizers"
"""The attribute of a parameter that torch's DDP and FSDP1 look for: a list of optimizers in order of registration."""


@contextmanager
def stepping(parameter: torch.Tensor) -> Iterator[None]:
    """Around a step in backward, which is to run as ``optimizer.step()`` does after backward: without autograd, and
    outside of an autocast block that is around ``backward()``."""
    with torch.no_grad(), without_autocast(parameter.device.type):
        yield
    # Fused kernels do not count their write: autograd would not notice that a weight has changed which a node that is
    # still to run has saved.
    torch.autograd.graph.increment_version((parameter,))


_last_backward: Any = WeakTensorKeyDictionary()
"""By parameter: the number of the backward that has stepped it last."""


def step_in_backward(parameter: torch.Tensor) -> None:
    """Run the parameter's own optimizers on its ``.grad``, in order.

    Raises ``AccumulationError`` when the same backward has stepped it already.
    """
    task = graph_task()
    if task is not None and _last_backward.get(parameter) == task:
        raise AccumulationError(
            f"a parameter of shape {tuple(parameter.shape)} got two gradients in one backward, and was stepped with "
            "the first: two DistributedDataParallel instances reduce it. Call backward() for each of them"
        )
    _last_backward[parameter] = task
    with stepping(parameter):
        for optimizer in tuple(getattr(parameter, OPTIMIZERS, ())):
            optimizer.step()
