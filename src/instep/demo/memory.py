"""How many bytes of gradients are alive at once."""

from collections.abc import Iterable

import torch
from torch import nn


class GradientProbe:
    """Looks at all ``.grad`` whenever autograd has accumulated one, until ``remove``.

    Hooks run in the order of registration: made before ``attach``, it sees a bucket's last gradient before the
    bucket is stepped and freed.

    Attributes:
        peak_bytes: the most storage that was alive, shared storage counted once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.peak_bytes = 0
        self._parameters = list(parameters)
        self._handles = [p.register_post_accumulate_grad_hook(self._look) for p in self._parameters]

    def remove(self) -> None:
        """Stop looking."""
        for handle in self._handles:
            handle.remove()

    def _look(self, accumulated: torch.Tensor) -> None:
        self.peak_bytes = max(self.peak_bytes, _alive_bytes(self._parameters))


def _alive_bytes(parameters: Iterable[nn.Parameter]) -> int:
    # A spent gradient, instep's subclass without storage, is not alive; views of one DDP bucket share theirs.
    storages = (p.grad.untyped_storage() for p in parameters if type(p.grad) is torch.Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
