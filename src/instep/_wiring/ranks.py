"""How the ranks that step together vote."""

import weakref

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from instep._autograd.engine import runs
from instep._ranks.group_votes import GroupVotes, groups_of, in_join
from instep._step.schedule import Schedule
from instep._wiring.held import living_parameters
from instep.options import Options
from instep.target import Target


def rank() -> int:
    """Of this process."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def voting_of(target: Target, options: Options, schedule: Schedule) -> GroupVotes | None:
    """The votes of the ranks that share the model; ``None``: there is one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    wrapped = [*target.wrapped, *target.fsdp1]
    groups = groups_of(wrapped, living_parameters(schedule))
    if not groups:
        return None
    ddps = [weakref.ref(one) for one in wrapped if isinstance(one, DistributedDataParallel)]
    settings = [options.schedule, options.clip, options.accumulation_steps, options.undo, options.nonfinite]
    settings += [options.communication.cross_iteration, options.check_steps]
    # FSDP1's parameters are what a rank has of them.
    shapes = [() if target.fsdp1 else tuple(a.spec.shape) for a in schedule.parameters]
    specs = [(a.spec.name, shape, a.spec.dtype) for a, shape in zip(schedule.parameters, shapes, strict=True)]
    return GroupVotes(groups, (settings, specs), lambda: in_join(ref() for ref in ddps))


def communicates(schedule: "weakref.ref[Schedule]") -> bool:
    """Whether the running backward gives an attached parameter its gradient: ``autograd.grad`` gives none."""
    found = schedule()
    with torch._C.DisableTorchFunctionSubclass():  # no value is used, and nobody who watches need be told
        return found is not None and any(
            runs(get_gradient_edge(p).node) for p in living_parameters(found) if p.requires_grad
        )
