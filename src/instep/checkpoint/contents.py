"""What of a model and its optimizers goes into a checkpoint, as this rank has it."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep._arguments import optimizers_of, require_model
from instep._optim.dtensor import is_sharded
from instep.attachment import Attachment, attached_parameters
from instep.checkpoint.files import DTYPES
from instep.checkpoint.names import refuse_modules
from instep.checkpoint.spread import box_of, local_of, without_sums
from instep.checkpoint.tiles import Box
from instep.checkpoint.values import Json, encode
from instep.errors import CheckpointError
from instep.naming import Named, buffers_of, parameters_of
from instep.sources.fsdp.wrappers import fsdp1_in, put_shards_in_place

NOT_IN_GROUP = ("params", "param_names")


class TrainingState:
    """A model with its optimizers: what is saved, and what is loaded into.

    Attributes:
        attachments: of any of its parameters, in the order of these.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        require_model(model, CheckpointError)
        self.optimizers = optimizers_of(optimizer, CheckpointError)
        _refuse_optimizers(self.optimizers)
        if fsdp1_in(model):
            raise CheckpointError(
                "instep.save and instep.load do not take FullyShardedDataParallel, whose parameters are pieces without "
                "a shape. Use fully_shard (FSDP2), or torch.distributed.checkpoint with get_state_dict and "
                "set_state_dict"
            )
        refuse_modules(model)
        put_shards_in_place(model)
        self.parameters = parameters_of(model)
        self.buffers = buffers_of(model)
        self.name_of = {id(named.tensor): named.name for named in self.parameters}
        for which, optimizer in self.labelled():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in self.name_of:
                        raise CheckpointError(
                            f"{which} has a parameter of shape {tuple(parameter.shape)} that is not in the model, and "
                            "so has no name: give the model that holds all of the optimizer's parameters"
                        )
        by_id = attached_parameters()
        found = [by_id[id(named.tensor)] for named in self.parameters if id(named.tensor) in by_id]
        self.attachments: list[Attachment] = list(dict.fromkeys(found))
        attached = [a for one in self.attachments for a in one.parameters]
        self._offloaded = {id(a.get()) for a in attached if a.stepper.home is not None}

    def is_offloaded(self, parameter: torch.Tensor, shape: Sequence[int]) -> bool:
        """Whether state of this shape lives in host memory, and would be beside ``parameter`` without ``offload``."""
        return id(parameter) in self._offloaded and math.prod(shape) > 1

    def labelled(self) -> Iterator[tuple[str, Optimizer]]:
        """The optimizers, as messages name them."""
        for number, optimizer in enumerate(self.optimizers):
            several = len(self.optimizers) > 1
            yield f"optimizer {number} ({type(optimizer).__name__})" if several else type(optimizer).__name__, optimizer


def class_of(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _refuse_optimizers(optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise CheckpointError(
                f"optimizer must be a torch.optim.Optimizer or a list of them, not {type(optimizer).__name__}"
            )
        if type(optimizer).state_dict is not Optimizer.state_dict:
            raise CheckpointError(
                f"{type(optimizer).__name__} has a state_dict() of its own, which may hold more than its state and "
                "param_groups. Save the optimizer that it wraps, or its state_dict() with extra="
            )
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise CheckpointError(f"the same {type(optimizers[0]).__name__} is given twice in optimizer")


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of a checkpoint, and the part of it that this rank has.

    Attributes:
        finite: whether it must be.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    finite: bool


class LocalState:
    """What this rank has of a checkpoint.

    Attributes:
        common: what all ranks must have alike, for the manifest.
        state: encoded, of each optimizer: by name, this rank's entries.
        extra: encoded.
        tensors: by key.
    """

    def __init__(self, training: TrainingState, step: int, rank: int, extra: Any) -> None:
        self.tensors: dict[str, LocalTensor] = {}
        self._rank = rank
        self.common: dict[str, Json] = {
            "step": step,
            "parameters": self._put_named("parameter", training.parameters, finite=True),
            "buffers": self._put_named("buffer", training.buffers, finite=False),
            "optimizers": [self._common(n, *one, training) for n, one in enumerate(training.labelled())],
            "previous_norms": [self._norm(n, one) for n, one in enumerate(training.attachments)],
            "draws": [one.draws for one in training.attachments],
        }
        self.state = [self._state(n, *one, training) for n, one in enumerate(training.labelled())]

        def put_extra(path: str, tensor: torch.Tensor) -> Mapping[str, Json]:
            if is_sharded(tensor):
                raise CheckpointError(f"extra{path} is a DTensor: give its full_tensor(), or its to_local()")
            return {"tensor": self._put(f"extra/{rank}{path}", f"extra{path}", tensor, finite=False)}

        self.extra = encode(extra, "extra", put_extra)

    def to_bytes(self) -> bytes:
        """What the other ranks must know of it."""
        tensors = {
            key: [str(held.local.dtype).removeprefix("torch."), held.shape, held.box.offset, held.box.shape]
            for key, held in self.tensors.items()
        }
        told = {"common": self.common, "state": self.state, "extra": self.extra, "tensors": tensors}
        return json.dumps(told, allow_nan=False).encode("ascii")

    def _put(self, key: str, where: str, tensor: torch.Tensor, *, finite: bool) -> str:
        tensor = without_sums(tensor)
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise CheckpointError(f"{where} is a {tensor.layout} tensor of {tensor.dtype}, which cannot be saved")
        local = local_of(tensor)
        if local.is_meta or type(local) not in (torch.Tensor, nn.Parameter):
            raise CheckpointError(
                f"{where} is a {'meta tensor' if local.is_meta else type(local).__name__}, which cannot be saved: only "
                "plain tensors and DTensors"
            )
        self.tensors[key] = LocalTensor(local, tuple(tensor.shape), box_of(tensor), finite)
        return key

    def _put_named(self, kind: str, named: Sequence[Named], *, finite: bool) -> dict[str, tuple[str, ...]]:
        for one in named:
            self._put(f"model/{one.name}", f"{kind} {one.name!r}", one.tensor, finite=finite)
        return {one.name: one.names for one in named}

    def _common(self, number: int, which: str, optimizer: Optimizer, training: TrainingState) -> Json:
        groups = []
        for g, group in enumerate(optimizer.param_groups):
            where = f"{which}.param_groups[{g}]"

            def put(path: str, tensor: torch.Tensor, g: int = g, where: str = where) -> Mapping[str, Json]:
                return {"tensor": self._put(f"optimizer/{number}/groups/{g}{path}", where + path, tensor, finite=False)}

            values = {k: encode(v, where, put, f"[{k!r}]") for k, v in group.items() if k not in NOT_IN_GROUP}
            groups.append({"parameters": [training.name_of[id(p)] for p in group["params"]], "values": values})
        shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}

        def put_shared(path: str, tensor: torch.Tensor) -> Mapping[str, Json]:
            where = f"{which}.state{path}"
            return {"tensor": self._put(f"optimizer/{number}/shared{path}", where, tensor, finite=True)}

        encoded = encode(shared, f"{which}.state", put_shared)
        return {"class": class_of(optimizer), "groups": groups, "shared": encoded}

    def _state(self, number: int, which: str, optimizer: Optimizer, training: TrainingState) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = training.name_of[id(parameter)]
                where = f"{which}.state of {name!r}: "

                def put(path: str, tensor: Any, p: Any = parameter, name: str = name, where: str = where) -> Json:
                    key = self._put(f"optimizer/{number}/state/{name}{path}", where + path, tensor, finite=True)
                    leaf: dict[str, Json] = {"tensor": key}
                    if tensor.device.type != p.device.type and not training.is_offloaded(p, tensor.shape):
                        leaf["elsewhere"] = True
                    if is_sharded(p) and not is_sharded(tensor):
                        leaf["plain"] = True
                    return leaf

                entry = optimizer.state.get(parameter, {})
                for key in entry:
                    if not isinstance(key, str):
                        raise CheckpointError(f"{where}the key {key!r} is no string, and cannot be saved")
                if entry:
                    found[name] = {key: encode(value, where, put, f"[{key!r}]") for key, value in entry.items()}
        return found

    def _norm(self, number: int, attachment: Attachment) -> Json:
        def put(path: str, tensor: torch.Tensor) -> Mapping[str, Json]:
            return {"tensor": self._put(f"previous_norms/{number}", "the previous norm", tensor, finite=False)}

        return encode(attachment.previous_norm, "the previous norm", put)
