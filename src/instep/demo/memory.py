"""How much memory a loop has held at most: counted by tensors, by gradients, and by the operating system."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from instep.planning.live_bytes import LiveBytes


class Peak:
    """The most bytes of tensors that were alive at once.

    Attributes:
        nbytes: once it was measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device

    @contextmanager
    def measured(self) -> Iterator[None]:
        """By the allocator of an accelerator; on a CPU every operation is looked at, which takes time."""
        if self._device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self.nbytes = torch.cuda.max_memory_allocated(self._device)
            return
        with LiveBytes() as live:
            yield
        self.nbytes = live.peak


def resident_bytes() -> int | None:
    """The most memory that this process had, by the operating system; ``None`` where that is not told."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


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
