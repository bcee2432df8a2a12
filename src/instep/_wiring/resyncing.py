"""One rank's model, optimizers and number of steps on all ranks of an attachment."""

import torch.distributed as dist

from instep._ranks.messages import broadcast_json
from instep._ranks.resync import resync
from instep._wiring.build import Parts
from instep.errors import InstepError


def resync_from(parts: Parts, rank: int) -> None:
    """Take everything from ``rank``, and give up the step that is open or torn here. All ranks must call this."""
    model, wrapped = parts.held.model(), parts.held.living_wrappers()
    if model is None or not wrapped or parts.sharding is not None or parts.zero is not None:
        raise InstepError(
            "resync_from() needs a whole copy of model and optimizer on every rank: DistributedDataParallel or "
            "replicate, without shard_state. Load a checkpoint instead"
        )
    group: dist.ProcessGroup = wrapped[0].process_group
    ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise InstepError(f"resync_from({rank!r}): the ranks that share this model are {ranks}")
    draws = parts.schedule.draws
    told = [parts.schedule.last_complete_step(), None if draws is None else draws.earlier]
    step, earlier = broadcast_json(told, group, ranks.index(rank))
    if step is None:
        raise InstepError(
            f"resync_from({rank}): the last step was applied only in part on that rank. Name one where it was "
            "applied as a whole, or load a checkpoint"
        )
    parts.schedule.forget(gradients=True)
    parts.votes.forget()
    resync(model, parts.held.optimizers(), group, ranks.index(rank))
    for stepper in parts.held.steppers:
        if stepper.home is not None:
            stepper.home.pin()
    parts.schedule.step_count = step
    if draws is not None and earlier is not None:
        draws.earlier = earlier
