"""``clip``."""

from instep._gradients.clipping import ClipNorm, Clipping, ClipValue
from instep.errors import AttachError
from instep.options import Options
from instep.target import Target, reduced_by


def no_policy(target: Target, options: Options) -> None:
    clip = options.clip
    if clip is not None and not isinstance(clip, (ClipNorm, ClipValue)):
        raise AttachError(f"clip must be an instep.ClipNorm, an instep.ClipValue or None, not {clip!r}")


def mode_without_schedule(target: Target, options: Options) -> None:
    """With ``schedule="forward"`` there is one mode."""
    mode = _mode(options)
    if options.schedule == "forward" and mode not in (None, "exact"):
        raise AttachError(
            f"ClipNorm(mode={mode!r}) is for schedule='backward': with schedule='forward' the norm is known before "
            "anything is written, and mode='exact' costs nothing. Leave it out"
        )


def exact_while_writing(target: Target, options: Options) -> None:
    if options.schedule == "backward" and _mode(options) == "exact" and not options.undo and not target.fsdp1:
        ways = ["schedule='forward' (exact)"]
        if not options.communication.shard_state:
            ways.append("undo=True (exact: a step that turns out to need clipping is put back and done again)")
        if not (options.communication.shard_state or target.fsdp2 or options.scaler is not None):
            ways.append(
                "ClipNorm(mode='two_pass') (exact: two backwards, by overlap.backward(loss) or "
                "overlap.micro_batches(loss_of, batches))"
            )
        if options.scaler is None:
            ways.append("or, as other algorithms, mode='per_bucket' or mode='previous_norm'")
        raise AttachError(
            "ClipNorm(mode='exact') needs every gradient before the first update, and schedule='backward' updates "
            f"during backward. Choose {'; '.join(ways)}"
        )


def mode_with_undo(target: Target, options: Options) -> None:
    mode = _mode(options)
    if options.schedule == "backward" and mode not in (None, "exact") and options.undo:
        raise AttachError(
            f"ClipNorm(mode={mode!r}) does not go with undo={options.undo!r}, with which mode='exact' does. Use that, "
            "or leave out undo"
        )


def unlike_norms_of_buckets(target: Target, options: Options) -> None:
    unused = any(getattr(wrapper, "find_unused_parameters", False) for wrapper in target.wrapped)
    if unused and Clipping(options.clip).clips_buckets:
        shards = options.communication.shard_state
        modes = "mode='previous_norm'" if shards else "mode='previous_norm' or mode='two_pass'"
        exact = "schedule='forward'" if shards else "undo=True or schedule='forward'"
        raise AttachError(
            "clip=ClipNorm(mode='per_bucket') does not go with find_unused_parameters=True: ranks that use "
            f"other parameters would clip by other norms, and part. Use {modes}; or leave out mode, and use {exact}"
        )


def two_pass_in_part(target: Target, options: Options) -> None:
    """One backward takes DDP's norms, two those of other parameters: not both at once."""
    if _mode(options) != "two_pass":
        return
    reduced = {key for wrapper in target.wrapped for key in reduced_by(wrapper)}
    optimized = {id(p) for p in target.optimized()}
    elsewhere = optimized - reduced
    outside = [places[0].name for key, (_, places) in target.names.items() if key in elsewhere]
    if outside and optimized & reduced:
        raise AttachError(
            f"clip=ClipNorm(mode='two_pass') is for a model all of whose parameters are in one "
            f"DistributedDataParallel, or none; {outside[0]!r} is outside of it. Leave "
            "out mode, and use schedule='forward'"
        )


def _mode(options: Options) -> str | None:
    return options.clip.mode if isinstance(options.clip, ClipNorm) else None
