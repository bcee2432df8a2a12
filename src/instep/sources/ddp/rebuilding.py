"""What lies in ``.grad`` while DDP lays out its buckets anew, in its second forward.

With ``gradient_as_bucket_view`` DDP copies every ``.grad`` into the new buckets. Where a loop clears gradients only
after the forward, these are the gradients of the step before. Attached, they may be spent, or a rank's rows of a
gradient, which fit into no bucket.
"""

import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from instep._autograd.hooks import BoundHook
from instep._autograd.placeholders import SpentGradient


class GradientsAside:
    """Takes gradients off that fit into no bucket while a forward of ``ddp`` may lay out its buckets."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._off: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self._handles = [
            ddp.register_forward_pre_hook(BoundHook(self._take_off)),
            ddp.register_forward_hook(BoundHook(self._restore), always_call=True),
        ]

    def stop(self) -> None:
        """Take the hooks off ``ddp``."""
        for handle in self._handles:
            handle.remove()

    def _take_off(self, ddp: DistributedDataParallel, args: object) -> None:
        if ddp.gradient_as_bucket_view and not ddp._has_rebuilt_buckets:
            for parameter in ddp._module_parameters:
                gradient = parameter.grad
                # A placeholder that holds a gradient stays: its gradient is to be copied, as in the plain loop.
                if isinstance(gradient, SpentGradient) or hasattr(type(gradient), "to_local"):
                    self._off.append((weakref.ref(parameter), gradient))
                    parameter.grad = None

    def _restore(self, ddp: DistributedDataParallel, args: object, output: object) -> None:
        off, self._off = self._off, []
        for ref, gradient in off:
            if (parameter := ref()) is not None:
                parameter.grad = gradient
