"""How many bytes of gradients are alive at once while a loop is recorded, whoever frees them."""

import threading
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel


class LiveGradients:
    """A look at gradients, until ``stop``: at those that come to a parameter, that are handed over to another thread,
    and, at each ``look``, that the parameters have.

    Attributes:
        most: the most bytes that were alive at once. Memory that gradients share counts once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        ddps = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        # DDP's buckets are there for good, and hold the gradients themselves, or hold them too.
        self._always = sum(p.nbytes for ddp in ddps for p in ddp.module.parameters() if p.requires_grad)
        self._are_in_buckets = any(ddp.gradient_as_bucket_view for ddp in ddps)
        self._now = self.most = self._always
        # A weak reference keeps no memory, and tells a gradient from what lies at its address after it.
        self._alive: dict[StorageWeakRef, int] = {}
        self._lock = threading.Lock()
        self._handles, self._nodes = [], []
        for parameter in self._parameters:
            # FSDP sets the gradients of its shards itself, and no such hook is called.
            if parameter.requires_grad and parameter.is_leaf and not hasattr(parameter, "to_local"):
                # Of the node and not of the parameter, whose hooks are the user's: some uses of a model are refused
                # where it has any. A parameter holds its node weakly.
                with torch._C.DisableTorchFunctionSubclass():
                    node = get_gradient_edge(parameter).node
                self._nodes.append(node)
                self._handles.append(node.register_prehook(partial(_note_in, weakref.ref(self))))
        self.look()

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._parameters.clear()
        self._nodes.clear()
        self._alive.clear()

    def look(self) -> None:
        """Note the gradients that the parameters have: accumulated ones, copies, and those that FSDP has set."""
        with torch._C.DisableTorchFunctionSubclass():  # nobody need wait for an update
            self.handed_over([parameter.grad for parameter in self._parameters])

    def handed_over(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note gradients of parameters: another thread may let go of them."""
        if not self._are_in_buckets:
            self.note(gradients)

    def note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note gradients that are there now."""
        with self._lock:
            for gradient in gradients:
                # instep's placeholders are of another class, and have no memory.
                if gradient is not None and (type(gradient) is torch.Tensor or hasattr(gradient, "to_local")):
                    self._count(gradient)
            if self._now > self.most:  # else what has been freed meanwhile makes no difference
                self._alive = {ref: nbytes for ref, nbytes in self._alive.items() if not ref.expired()}
                self._now = self._always + sum(self._alive.values())
                self.most = max(self.most, self._now)

    def _count(self, gradient: torch.Tensor) -> None:
        if (storage := storage_of(gradient)) is not None and (ref := StorageWeakRef(storage)) not in self._alive:
            self._alive[ref] = storage.nbytes()
            self._now += storage.nbytes()


def _note_in(notes: "weakref.ref[LiveGradients]", gradients: Sequence[torch.Tensor | None]) -> None:
    # A graph keeps its hooks where the garbage collector does not look.
    if (there := notes()) is not None:
        there.note(gradients)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's memory, if it has any on this rank."""
    with torch._C.DisableTorchFunctionSubclass():  # no value is read: nobody need wait for an update of them
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor
        if isinstance(local, torch.Tensor) and local.layout is torch.strided and not local.is_meta:
            storage = local.untyped_storage()
            return storage if storage.nbytes() else None
    return None
