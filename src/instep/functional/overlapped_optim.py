"""An optimizer that registers itself with a distributed wrapper: no ``step()``, no ``zero_grad()`` in the loop.

``as_overlapped_optim`` makes the ``OverlappedOptimizer`` of a class of optimizers. Which one that is, a registry says:
``OverlappedStandardOptimizer`` for every ``torch.optim.Optimizer``, unless ``register_overlapped`` has another for the
class or a class nearer to it. The standard one is an attachment whose step is called where backward ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep._optim.dtensor import is_sharded
from instep.attaching import attach_stepping_itself
from instep.errors import AttachError, class_name
from instep.sources.fsdp.modules import fsdp1_in


class OverlappedOptimizer(ABC):
    """An optimizer whose step runs within the backward of a distributed wrapper.

    Subclass it, and decorate the subclass with ``register_overlapped``, to decide for an optimizer of your own
    (``examples/overlapped_optimizer.py``). The method is that of
    ``torch/distributed/algorithms/_optimizer_overlap/optimizer_overlap.py``.

    Since 0.1.0.

    Example:
        ```python
        class OverlappedSGD(instep.OverlappedOptimizer):
            def __init__(self, params):
                super().__init__(torch.optim.SGD)
                self.params = list(params)

            def register_ddp(self, ddp):
                instep.apply_optimizer_in_backward(self.optim_cls, self.params, {"lr": 0.1})

            register_fsdp = register_ddp

        OverlappedSGD(ddp.parameters()).register_ddp(ddp)
        ddp(batch).backward()  # reduces, and steps
        ```
    """

    def __init__(self, optim_cls: type) -> None:
        self.optim_cls = optim_cls

    @abstractmethod
    def register_ddp(self, ddp: DistributedDataParallel) -> None:
        """From now on, the backward of ``ddp`` steps."""
        raise NotImplementedError(f"{type(self).__name__} does not support overlapped DDP.")

    @abstractmethod
    def register_fsdp(self, fsdp: nn.Module) -> None:
        """From now on, the backward of ``fsdp`` steps."""
        raise NotImplementedError(f"{type(self).__name__} does not support overlapped FSDP.")


T = TypeVar("T", bound="type[OverlappedOptimizer]")

_registered: "dict[type, type[OverlappedOptimizer]]" = {}
"""By class of optimizers, the class that ``as_overlapped_optim`` makes for it and its subclasses."""


def register_overlapped(optim_cls: type) -> Callable[[T], T]:
    """A class decorator: ``as_overlapped_optim`` makes the decorated class for ``optim_cls`` and its subclasses.

    It is called with ``(optim_cls, params, *args, **kwargs)``, where ``optim_cls`` is the class that was asked for.

    Raises:
        ValueError: ``optim_cls`` is registered already, named with both classes; or it is no class.

    Since 0.1.0.

    Example:
        ```python
        class MySGD(torch.optim.SGD): ...

        @instep.register_overlapped(MySGD)
        class OverlappedMySGD(instep.OverlappedOptimizer):
            def __init__(self, optim_cls, params, **kwargs):
                super().__init__(optim_cls)
                instep.apply_optimizer_in_backward(optim_cls, params, kwargs)

            def register_ddp(self, ddp): ...  # nothing is left to do
            def register_fsdp(self, fsdp): ...

        instep.as_overlapped_optim(MySGD, ddp.parameters(), lr=0.1).register_ddp(ddp)
        ddp(batch).backward()  # reduces, and steps
        ```
    """

    if not isinstance(optim_cls, type):
        raise AttachError(f"optim_cls must be a class of optimizers, not {optim_cls!r}")

    def register(overlapped_cls: T) -> T:
        if optim_cls in _registered:
            raise ValueError(
                f"{optim_cls.__qualname__} is already registered with {_registered[optim_cls].__qualname__}, so it "
                f"cannot be registered with {overlapped_cls.__qualname__}. Subclass the optimizer, and register that"
            )
        _registered[optim_cls] = overlapped_cls
        return overlapped_cls

    return register


def as_overlapped_optim(
    optim_cls: type, params: Iterable[Any] | None, *args: Any, **kwargs: Any
) -> OverlappedOptimizer:
    """The overlapped form of ``optim_cls(params, *args, **kwargs)``. Of the classes in its MRO the first one that is
    registered decides.

    Raises:
        ValueError: no class in the MRO is registered, so ``optim_cls`` is no ``torch.optim.Optimizer``.

    Since 0.1.0.

    Example:
        ```python
        overlapped = instep.as_overlapped_optim(torch.optim.AdamW, ddp.parameters(), lr=1e-3)
        overlapped.register_ddp(ddp)
        for batch in loader:
            ddp(batch).backward()  # reduces, and steps: the gradients are None afterwards
        ```
    """
    # The nearest class first: an optimizer of the user's may be registered, and is one of torch's as well.
    for cls in optim_cls.__mro__ if isinstance(optim_cls, type) else ():
        if cls in _registered:
            make: Any = _registered[cls]
            overlapped: OverlappedOptimizer = make(optim_cls, params, *args, **kwargs)
            return overlapped
    name = optim_cls.__qualname__ if isinstance(optim_cls, type) else repr(optim_cls)
    raise AttachError(
        f"{name} is no torch.optim.Optimizer class, and neither it nor a class it inherits from is registered with "
        "register_overlapped"
    )


@register_overlapped(Optimizer)
class OverlappedStandardOptimizer(OverlappedOptimizer):
    """Any ``torch.optim.Optimizer`` whose update is per parameter, torch's own or another's.

    Each backward of the module it is registered with is a step of the plain loop: parameters are updated while
    later gradients are still on their way, ``optimizer.step()`` is called where backward ends (so step hooks run and
    schedulers count), and the gradients are ``None`` afterwards. Inside ``no_sync`` gradients add up.

    Args:
        params: as for the optimizer: parameters or groups; ``None``: all of the module it is registered with.
        args, kwargs: of ``optim_cls``.
    """

    def __init__(self, optim_cls: type[Optimizer], params: Iterable[Any] | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(optim_cls)
        self._arguments = args, kwargs
        self._optimizer: Optimizer | None = None
        # Without parameters yet, the arguments are tried on one that is thrown away: an error in them is raised here,
        # and not where the module is registered.
        made = self._make([nn.Parameter(torch.zeros(1, 1))] if params is None else params)
        if params is not None:
            self._optimizer = made

    @property
    def optimizer(self) -> Optimizer:
        """The plain optimizer: for LR schedulers, hooks and checkpoints. Its ``step`` is called by backward."""
        if self._optimizer is None:
            raise AttachError(
                f"this {self.optim_cls.__name__} was made with params=None, all parameters of the module it is "
                "registered with: call register_ddp or register_fsdp first"
            )
        return self._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer itself: a change in them counts for the next step."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own."""
        self.optimizer.load_state_dict(state_dict)

    def register_ddp(self, ddp: DistributedDataParallel) -> None:
        """Step the parameters of ``ddp`` as its buckets arrive.

        Raises:
            AttachError: ``ddp`` is no ``DistributedDataParallel``, has a communication hook, or is registered already.
        """
        if not isinstance(ddp, DistributedDataParallel):
            raise AttachError(f"register_ddp takes a DistributedDataParallel, not {class_name(ddp, in_full=True)}")
        self._register(ddp)

    def register_fsdp(self, fsdp: nn.Module) -> None:
        """Step the shards of ``fsdp`` as they are reduced.

        Args:
            fsdp: a ``FullyShardedDataParallel(use_orig_params=True)`` before its first forward, or a module that
                ``fully_shard`` has been applied to. Make the optimizer after sharding, or with ``params=None``.

        Raises:
            AttachError: ``fsdp`` is neither, or is registered already.
        """
        if not fsdp1_in(fsdp) and not any(map(is_sharded, fsdp.parameters())):
            raise AttachError(
                "register_fsdp takes a FullyShardedDataParallel, or a module that fully_shard was applied to, and this "
                f"{type(fsdp).__name__} is not sharded"
            )
        optimized = (
            {id(p) for group in self._optimizer.param_groups for p in group["params"]} if self._optimizer else None
        )
        for name, parameter in [] if fsdp1_in(fsdp) else fsdp.named_parameters():
            if not is_sharded(parameter) and (optimized is None or id(parameter) in optimized):
                raise AttachError(
                    f"parameter {name!r} is not sharded, and others of the model are: FSDP neither reduces nor "
                    "accumulates it. Give it to an optimizer of its own"
                )
        self._register(fsdp)

    def _register(self, module: nn.Module) -> None:
        optimizer = self._optimizer or self._make(module.parameters())
        attach_stepping_itself(module, optimizer)  # may refuse: then this is as it was, and may be registered again
        self._optimizer = optimizer

    def _make(self, params: Iterable[Any]) -> Optimizer:
        args, kwargs = self._arguments
        made: Optimizer = self.optim_cls(params, *args, **kwargs)
        return made
