"""What is recorded, in words and bytes."""

import hashlib
import platform
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep._version import __version__
from instep.naming import modules_of, parameters_of
from instep.recording.holdings import PARAMETERS, STATE, storages, tensors_in_state
from instep.report.memory import GRADIENTS
from instep.report.run import Job, Setup
from instep.sources.fsdp.wrappers import fsdp1_in


def describe(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batch: Sequence[str],
    label: str,
    options: Mapping[str, str],
    buckets: Sequence[Sequence[str]],
    gradients: Mapping[str, int] | None = None,
) -> Setup:
    """A description of what is recorded.

    Args:
        batch: what forwards were given.
        gradients: bytes, of the names in ``buckets``; unless given, of the model's own names.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    ddps = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    state = {address: n for o in optimizers for tensor in tensors_in_state(o) for address, n in storages(tensor)}
    return Setup(
        job=_job(model, trained, batch),
        label=label,
        options=options,
        optimizer=", ".join(_name(optimizer) for optimizer in optimizers),
        fused=all(bool(optimizer.defaults.get("fused")) for optimizer in optimizers),
        wrapper="DistributedDataParallel" if ddps else _sharding(model),
        bucket_view=all(ddp.gradient_as_bucket_view for ddp in ddps),
        buckets=buckets,
        gradients={name: sum(n for _, n in storages(p)) for name, p in model.named_parameters() if p.requires_grad}
        if gradients is None
        else gradients,
        nbytes={
            PARAMETERS: sum(n for p in model.parameters() for _, n in storages(p)),
            GRADIENTS: sum(n for p in trained for _, n in storages(p)),
            STATE: sum(state.values()),
        },
        versions={"instep": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )


def _job(model: nn.Module, trained: Sequence[nn.Parameter], batch: Sequence[str]) -> Job:
    described = [f"{one.name} {tuple(one.tensor.shape)} {one.tensor.dtype}" for one in parameters_of(model)]
    *_, inner = (module for prefix, module in modules_of(model) if not prefix)
    device = trained[0].device if trained else torch.device("cpu")
    return Job(
        # FSDP2 gives a module a class of its own.
        model=next(c.__name__ for c in type(inner).__mro__ if not c.__module__.startswith("torch.distributed.")),
        parameters=hashlib.sha256("\n".join(described).encode()).hexdigest()[:16],
        count=sum(p.numel() for p in trained),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
        batch=tuple(batch),
        ranks=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )


def _name(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    for implementation in ("fused", "foreach"):
        if optimizer.defaults.get(implementation):
            return f"{name}({implementation}=True)"
    return name


def _sharding(model: nn.Module) -> str:
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return "DTensor"
    return "FullyShardedDataParallel" if fsdp1_in(model) else ""
