"""What ``attach`` says to its options in this set-up.

``ask_attach`` does not know the rules: it calls ``attach`` itself, on a small model of the same kind, with one option
after another, and collects what is refused, with the reasons, and what is accepted.
"""

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from instep import ClipNorm, ClipValue, attach
from instep.errors import AttachError
from instep_tools.output import CannotRunError
from instep_tools.planning.job import EVERYTHING, Job, Refusal
from instep_tools.planning.model import MakeOptimizer, PlannedModel

SCHEDULES: Mapping[str, dict[str, Any]] = {
    "schedule='backward'": {"schedule": "backward"},
    "schedule='forward'": {"schedule": "forward"},
    "undo=True": {"schedule": "backward", "undo": True},
}
OPTIONS: Mapping[str, dict[str, Any]] = {
    "clip=ClipNorm(1.0)": {"clip": ClipNorm(1.0)},
    "clip=ClipNorm(1.0, mode='two_pass')": {"clip": ClipNorm(1.0, mode="two_pass")},
    "clip=ClipValue(1.0)": {"clip": ClipValue(1.0)},
    "accumulation_steps=2": {"accumulation_steps": 2},
    "scaler=GradScaler()": {"scaler": GradScaler("cpu")},
    "nonfinite='skip'": {"nonfinite": "skip"},
    "nonfinite='raise'": {"nonfinite": "raise"},
    "mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)": {
        "mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    },
    "bucket_bytes=1048576": {"bucket_bytes": 1048576},
    "comm_hook=(None, hook)": {"comm_hook": (None, allreduce_hook)},
    "shard_state=True": {"shard_state": True},
}


def ask_attach(
    planned: PlannedModel, make: MakeOptimizer, job: Job, *, every_option: bool
) -> tuple[tuple[Refusal, ...], tuple[str, ...]]:
    """Return the refusals, with their reasons, and the options that are accepted. The model has not run yet.

    Every schedule is tried without any option. With ``every_option`` each option is tried by itself, with each schedule
    that was accepted.
    """
    # By option and reason: what is refused with every schedule for one reason is one line.
    refused: dict[tuple[str, str], list[str]] = {}
    accepted = []
    with _as_trained(job) as wrap:
        for schedule, arguments in SCHEDULES.items():
            reason = _refusal(planned, make, wrap, arguments)
            if reason is None:
                accepted.append(schedule)
            else:
                refused.setdefault((EVERYTHING, reason), []).append(schedule)
        possible = list(accepted)
        for option, argument in OPTIONS.items() if every_option else ():
            for schedule in possible:
                reason = _refusal(planned, make, wrap, {**SCHEDULES[schedule], **argument})
                if reason is None:
                    accepted.append(f"{option}, {schedule}")
                else:
                    refused.setdefault((option, reason), []).append(schedule)
    return tuple(
        Refusal(option if len(where) == len(SCHEDULES) else f"{option} with {', '.join(where)}", reason)
        for (option, reason), where in refused.items()
    ), tuple(accepted)


@contextmanager
def _as_trained(job: Job) -> Iterator[Any]:
    """Yield a function that wraps the model as it would be trained."""
    if job.world_size == 1:
        yield lambda model: model
        return
    if dist.is_initialized():
        raise CannotRunError("a process group is there already: plan for several ranks in a process of its own")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    # One rank stands for all: ``attach`` asks for the wrapper, and not for the world size.
    stores: Any = dist  # its type does not tell of HashStore, a store without a network
    dist.init_process_group("gloo", rank=0, world_size=1, store=stores.HashStore())
    try:
        yield lambda model: DistributedDataParallel(model, gradient_as_bucket_view=job.bucket_view)
    finally:
        dist.destroy_process_group()


def _refusal(planned: PlannedModel, make: MakeOptimizer, wrap: Any, arguments: dict[str, Any]) -> str | None:
    """Return why ``attach`` refuses these arguments; ``None``: it takes them."""
    model = _small(planned)
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    try:
        attach(wrap(model), optimizer, **arguments).detach()  # what it refuses, it refuses before it changes anything
    except AttachError as error:
        return str(error)
    return None


def is_judged(planned: PlannedModel, make: MakeOptimizer) -> bool:
    """Return whether ``attach`` compares the first updates of this optimizer with their parts."""
    model = _small(planned)
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    with attach(model, optimizer, schedule="backward") as overlap:
        return bool(overlap.plan.judged)


def _small(planned: PlannedModel) -> nn.Module:
    """Return a model of the same modules and names, with parameters of the same kinds that hold a few numbers each."""
    # A deep copy takes what is in ``memo`` for copied: the small tensors come in without any large one being made.
    memo: dict[int, Any] = {id(planned): planned}
    for parameter in planned.model.parameters():
        small = torch.zeros((2,) * parameter.dim(), dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(small, requires_grad=parameter.requires_grad)
    for buffer in planned.model.buffers():
        memo[id(buffer)] = torch.zeros((), dtype=buffer.dtype)
    return copy.deepcopy(planned.model, memo)
