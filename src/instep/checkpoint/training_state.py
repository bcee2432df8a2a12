"""What ``save`` and ``load`` are given: a model, its optimizers, and the names under which a checkpoint has them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep._arguments import models_of, optimizers_of
from instep._torch.pipelining import Pipeline
from instep.attachment import Attachment, attached_parameters
from instep.errors import CheckpointError, class_name
from instep.naming import buffers_of, modules_of, parameters_of
from instep.sources.fsdp.modules import fsdp1_in, put_shards_in_place
from instep.target import Models, as_one

NOT_IN_GROUP = ("params", "param_names")
"""The keys of ``param_groups`` that are not values of a group: a checkpoint names the parameters by itself."""


class TrainingState:
    """A model with its optimizers: ``save`` reads this, and ``load`` writes into it.

    Attributes:
        stages: the places of its stages, if it is a part of a pipeline, and ``stage_count`` how many that has; none
            of a whole model.
        name_of: by the ``id`` of each parameter, its name in the bare model. Of several models, or of several stages
            of a pipeline, that begins with its number in the list, or in the pipeline.
        attachments: the attachments of any of the parameters, in the order of the parameters.

    Raises:
        CheckpointError: the model or an optimizer has state that a checkpoint cannot hold, or does not fit the other.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer]) -> None:
        models = models_of(model, CheckpointError)
        by_id = attached_parameters()
        pipelines = [by_id[id(p)].pipeline for one in models for p in one.parameters() if id(p) in by_id]
        pipeline = next((one for one in pipelines if one is not None), None)
        self.stages = () if pipeline is None else pipeline.places
        self.stage_count = 0 if pipeline is None else pipeline.count
        model = as_one(models) if pipeline is None else _stages_of(pipeline, models)
        self.optimizers = optimizers_of(optimizer, CheckpointError)
        _refuse_optimizers(self.optimizers)
        if fsdp1_in(model):
            raise CheckpointError(
                "instep.save and instep.load do not take FullyShardedDataParallel, whose parameters are pieces without "
                "a shape. Use fully_shard (FSDP2), or torch.distributed.checkpoint with get_state_dict and "
                "set_state_dict"
            )
        _refuse_modules(model)
        put_shards_in_place(model)  # or gathered parameters, which have no state, would be taken for the model's
        self.parameters = parameters_of(model)
        self.buffers = buffers_of(model)
        self.name_of = {id(named.tensor): named.name for named in self.parameters}
        # Everything of an optimizer is saved by the names of its parameters.
        for which, optimizer in self.labelled():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in self.name_of:
                        raise CheckpointError(
                            f"{which} has a parameter of shape {tuple(parameter.shape)} that is not in the model, and "
                            "so has no name: give the model that holds all of the optimizer's parameters"
                        )
        # In the model's order, since a checkpoint has what belongs to an attachment by its number.
        found = [by_id[id(named.tensor)] for named in self.parameters if id(named.tensor) in by_id]
        self.attachments: list[Attachment] = list(dict.fromkeys(found))
        attached = [a for one in self.attachments for a in one.parameters]
        self._offloaded = {id(a.get()) for a in attached if a.stepper.offloaded is not None}

    def is_offloaded(self, parameter: torch.Tensor, shape: Sequence[int]) -> bool:
        """Whether state of this shape lives in host memory, and would be beside ``parameter`` without ``offload``."""
        return id(parameter) in self._offloaded and math.prod(shape) > 1

    def labelled(self) -> Iterator[tuple[str, Optimizer]]:
        """The optimizers, as messages name them."""
        for number, optimizer in enumerate(self.optimizers):
            several = len(self.optimizers) > 1
            yield f"optimizer {number} ({type(optimizer).__name__})" if several else type(optimizer).__name__, optimizer


def _stages_of(pipeline: Pipeline, models: Sequence[nn.Module]) -> nn.Module:
    """This rank's stages as one model, in which several have their places in the pipeline as names."""
    stages = pipeline.stages
    if not stages:
        raise CheckpointError(f"the schedule of {pipeline!r} is gone, which has the stages: keep it while it is saved")
    if {id(one) for one in models} != {id(one) for one in stages.values()}:
        raise CheckpointError(
            f"model is not what this rank has of {pipeline!r}: give what attach was given, the "
            f"{'module of its stage' if len(pipeline.places) == 1 else 'modules of its stages'} "
            f"{listed_places(pipeline.places)}"
        )
    return as_one(models) if len(models) == 1 else Models({str(place): one for place, one in stages.items()})


def listed_places(places: Sequence[int]) -> str:
    """The stages, as a message names them."""
    return ", ".join(map(str, places))


def _refuse_optimizers(optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise CheckpointError(
                "optimizer must be a torch.optim.Optimizer or a list of them, not "
                f"{class_name(optimizer, in_full=True)}"
            )
        if type(optimizer).state_dict is not Optimizer.state_dict:
            raise CheckpointError(
                f"{class_name(optimizer)} has a state_dict() of its own, which may hold more than its state and "
                "param_groups. Save the optimizer that it wraps, or its state_dict() with extra="
            )
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise CheckpointError(f"the same {class_name(optimizers[0])} is given twice in optimizer")


def _refuse_modules(model: nn.Module) -> None:
    for prefix, module in modules_of(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"module {prefix.rstrip('.')!r} ({type(module).__name__}) keeps extra state of its own "
                "(get_extra_state), which may be anything. Save it with extra=, and give it back with "
                "set_extra_state() after load"
            )


def class_of(optimizer: Optimizer) -> str:
    """The name of the optimizer's class, as a checkpoint has it: to be compared, never imported."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
