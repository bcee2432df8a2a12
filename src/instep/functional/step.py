"""The step of one parameter, inside backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from instep._core.stepper import without_autocast

OPTIMIZERS = "_in_backward_optimizers"
"""The attribute of a parameter that torch's DDP and FSDP1 look for: a list of optimizers in order of registration."""


@contextmanager
def stepping(parameter: torch.Tensor) -> Iterator[None]:
    """As ``optimizer.step()`` runs after backward: without autograd, outside of an autocast block around backward."""
    with torch.no_grad(), without_autocast(parameter.device.type):
        yield
    # Fused kernels do not: autograd would not notice a weight that was saved for a later node.
    torch.autograd.graph.increment_version((parameter,))


def step_in_backward(parameter: torch.Tensor) -> None:
    """Run the parameter's own optimizers on its ``.grad``, in order."""
    with stepping(parameter):
        for optimizer in tuple(getattr(parameter, OPTIMIZERS, ())):
            optimizer.step()
