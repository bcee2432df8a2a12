"""What is about to be attached: a model with its wrappers and parameters, and the optimizers."""

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep._optim.parameters import Attribute
from instep.sources.ddp.instance import bucket_parameters, managed_by
from instep.sources.fsdp.modules import ShardedGroup, fsdp1_in, fsdp2_in, put_shards_in_place, sharded_groups
from instep.sources.replicate.source import Replicated

Wrapped = DistributedDataParallel | Replicated
Names = Mapping[int, tuple[torch.Tensor, tuple[Attribute, ...]]]
"""By ``id``: each parameter of a model, in order, with every place that holds it."""


class Models(nn.ModuleDict):
    """Several models that are attached together, each of which the loop calls by itself. Nobody keeps this one: it is
    made of the models whenever it is asked for."""


def as_one(models: Sequence[nn.Module]) -> nn.Module:
    """The model; of several, one with the parameters of all."""
    return models[0] if len(models) == 1 else Models({str(number): model for number, model in enumerate(models)})


def called_in(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that the loop calls: ``model`` itself, or each of several."""
    return list(model.children()) if isinstance(model, Models) else [model]


class Target:
    """The model that is attached, with its wrappers and named parameters, and the optimizers.

    Attributes:
        called: the modules that the loop calls: the model, or each of several.
        wrapped: the instances of ``DistributedDataParallel`` and ``Replicated`` in the model.
        reduced: of each of these, by ``id``: the parameters whose gradients it may reduce.
        fsdp1: its instances of ``FullyShardedDataParallel``.
        fsdp2: its modules that ``fully_shard`` was applied to.
        optimized: the parameters of the optimizers, in their order.
        taken: by ``id``: the parameters, of any model, that are attached already, with their attachments.
        unlike: the class of an optimizer beside these that is no ``torch.optim.Optimizer``; ``None``: there is none.

    Args:
        as_it_is: whether nothing is done to the model. Else the shards of ``fully_shard`` are put in their places.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        taken: Mapping[int, object],
        unlike: str | None = None,
        *,
        as_it_is: bool = False,
    ) -> None:
        self.called = models
        self.model = model = as_one(models)
        if not as_it_is:
            put_shards_in_place(model)
        self.optimizers = optimizers
        self.optimized: list[torch.Tensor] = [
            parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
        ]
        self.wrapped: list[Wrapped] = [
            module for module in model.modules() if isinstance(module, (DistributedDataParallel, Replicated))
        ]
        self.reduced = {
            module: {id(p) for p in module.parameters()} if isinstance(module, Replicated) else managed_by(module)
            for module in self.wrapped
        }
        self.fsdp1 = fsdp1_in(model)
        self.fsdp2 = fsdp2_in(model)
        self.taken = taken
        self.unlike = unlike

    @property
    def ddps(self) -> list[DistributedDataParallel]:
        return [module for module in self.wrapped if isinstance(module, DistributedDataParallel)]

    @cached_property
    def in_buckets(self) -> set[int]:
        """By ``id``: the parameters in the buckets of the ``DistributedDataParallel`` instances."""
        return set().union(*map(bucket_parameters, self.ddps))

    @cached_property
    def names(self) -> Names:
        """The parameters of the model."""
        return name_parameters(self.model)

    @cached_property
    def groups(self) -> list[ShardedGroup]:
        """What FSDP gathers and reduces together."""
        return sharded_groups(self.model)


def name_parameters(model: nn.Module) -> Names:
    """Name the parameters of ``model``; those inside a wrapper get the name the wrapped module knows them by."""
    names: dict[int, tuple[torch.Tensor, tuple[Attribute, ...]]] = {}
    is_wrapped = isinstance(model, (DistributedDataParallel, Replicated))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = (f"{prefix}.{attribute}" if prefix else attribute).replace("_fsdp_wrapped_module.", "")
                name = name.removeprefix("module.") if is_wrapped else name
                _, places = names.get(id(parameter), (parameter, ()))
                names[id(parameter)] = (parameter, (*places, Attribute(weakref.ref(module), attribute, name)))
    return names
