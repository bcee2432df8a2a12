"""``check_steps``."""

from collections.abc import Hashable

import torch
from torch.optim import Optimizer

from instep._optim.dtensor import mesh_of, shard_of
from instep._optim.kinds import is_elementwise
from instep.errors import AttachError
from instep.options import Options
from instep.sources.ddp.instance import bucket_parameters
from instep.target import Target


def no_number(target: Target, options: Options) -> None:
    steps = options.check_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise AttachError(f"check_steps must be a number of steps, 0 or more, not {steps!r}")


def with_shards(target: Target, options: Options) -> None:
    whole = [type(optimizer).__name__ for optimizer in target.optimizers if not is_elementwise(optimizer)]
    if options.check_steps and options.communication.shard_state and whole:
        raise AttachError(
            f"check_steps={options.check_steps} does not go with shard_state=True and {whole[0]}: each rank steps some "
            "of its parameters, and would compare these among themselves. Check without shard_state, and then leave "
            "out check_steps"
        )


def unlike_parameters(target: Target, options: Options) -> None:
    """``check_steps`` steps copies in one call, which must take all of them."""
    if not options.check_steps:
        return
    shards = options.communication.shard_state
    in_rows = {key for ddp in target.ddps for key in bucket_parameters(ddp)} if shards else set()
    for optimizer in target.optimizers:
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        if len({None if id(p) in in_rows else _spread(p, optimizer) for p in mine}) > 1:
            raise AttachError(
                f"check_steps does not go with {type(optimizer).__name__} here: it holds parameters that are spread "
                "over ranks in different ways, which its plain step() may not take in one call. Leave out check_steps"
            )


def _spread(parameter: torch.Tensor, optimizer: Optimizer) -> Hashable:
    """The ranks over which it is stepped as one tensor; ``None``: each steps its part, or all of it."""
    return None if shard_of(parameter, optimizer) is not None else mesh_of(parameter)
