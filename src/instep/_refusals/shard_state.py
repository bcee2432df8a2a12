"""``shard_state``."""

from instep._arguments import require_flag
from instep._gradients.clipping import ClipNorm, ClipValue
from instep._optim.kinds import is_elementwise
from instep.errors import AttachError
from instep.options import Options
from instep.sources.ddp.instance import bucket_parameters
from instep.target import Target


def no_flag(target: Target, options: Options) -> None:
    require_flag("shard_state", options.communication.shard_state, AttachError)


def not_one_ddp(target: Target, options: Options) -> None:
    ddps = target.ddps
    if options.communication.shard_state and len(ddps) != 1:
        found = "there is none" if not ddps else f"there are {len(ddps)}"
        sharded = target.fsdp1 or target.fsdp2
        advice = (
            "Leave it out: FSDP shards the state by itself" if sharded else "Leave it out, or wrap the model in one"
        )
        raise AttachError(
            f"shard_state=True is for a model with one DistributedDataParallel, and {found} in this model. {advice}"
        )


def clips_what_is_elsewhere(target: Target, options: Options) -> None:
    if not (options.communication.shard_state and options.schedule == "backward"):
        return
    for optimizer in target.optimizers:
        if isinstance(options.clip, ClipValue) and not is_elementwise(optimizer):
            raise AttachError(
                f"clip=ClipValue does not go with shard_state=True and {type(optimizer).__name__}, whose update is not "
                "known to be elementwise, while backward runs: use schedule='forward'"
            )


def other_options(target: Target, options: Options) -> None:
    if not options.communication.shard_state:
        return
    if options.undo:
        raise AttachError(
            f"undo={options.undo!r} does not go with shard_state=True: a step is not known to stand on all ranks "
            "before the rows have been gathered. Leave out one of the two"
        )
    if isinstance(options.clip, ClipNorm) and options.clip.mode == "two_pass":
        raise AttachError(
            "clip=ClipNorm(mode='two_pass') does not go with shard_state=True: leave out mode, and use "
            "schedule='forward'"
        )
    if options.communication.comm_hook is not None:
        raise AttachError(
            "comm_hook does not go with shard_state=True, which sends the gradients in a way of its own. Leave one out"
        )


def other_parameters(target: Target, options: Options) -> None:
    if not options.communication.shard_state:
        return
    (ddp,) = target.ddps
    reduced, given = bucket_parameters(ddp), {id(p) for p in target.optimized()}
    for name, parameter in ddp.module.named_parameters():
        if parameter.is_complex():
            raise AttachError(f"shard_state=True does not take complex parameters, and {name!r} is one")
        if id(parameter) in reduced and id(parameter) not in given:
            raise AttachError(
                f"shard_state=True takes parameters that an attached optimizer updates, and {name!r}, whose gradient "
                "DistributedDataParallel reduces, is in none. Freeze it (requires_grad_(False)) before "
                "DistributedDataParallel is made, give it to an optimizer, or attach without shard_state"
            )
