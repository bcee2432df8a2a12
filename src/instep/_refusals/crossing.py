"""``cross_iteration``: what gradients that are still on their way after backward rule out."""

from instep._arguments import require_flag
from instep._gradients.clipping import ClipNorm
from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


def no_flag(target: Target, options: Options) -> None:
    require_flag("cross_iteration", options.communication.cross_iteration, AttachError)


def nothing_crosses(target: Target, options: Options) -> None:
    if not options.communication.cross_iteration:
        return
    if options.schedule != "forward":
        raise AttachError(
            f"cross_iteration=True does not go with schedule={options.schedule!r}, which steps what has arrived in "
            "backward. Use schedule='forward'"
        )
    if not target.ddps:
        raise AttachError(
            "cross_iteration=True hides the communication of DistributedDataParallel, of which there is none in model. "
            "Leave it out, or wrap the model"
        )


def buckets_do_not_last(target: Target, options: Options) -> None:
    if not options.communication.cross_iteration:
        return
    if not all(ddp.gradient_as_bucket_view for ddp in target.ddps):
        raise AttachError(
            "cross_iteration=True needs DistributedDataParallel(gradient_as_bucket_view=True): else DDP copies the "
            "gradients at the end of backward, before they are reduced"
        )
    if any(getattr(ddp, "lazy_bucket_allocation", False) for ddp in target.ddps):  # of torch 2.15
        raise AttachError(
            "cross_iteration=True needs DDP's buckets after backward, and "
            "DistributedDataParallel(lazy_bucket_allocation=True) frees them. Leave out one of the two"
        )


def needs_all_gradients(target: Target, options: Options) -> None:
    if not options.communication.cross_iteration:
        return
    needs_all = {
        "clip": isinstance(options.clip, ClipNorm),
        "scaler": options.scaler is not None,
        "nonfinite": options.nonfinite != "allow",
    }
    for name, needs in needs_all.items():
        if needs:
            raise AttachError(
                f"{name}={getattr(options, name)!r} needs all gradients before the first update, and "
                "cross_iteration=True updates each bucket when it has arrived. Leave out one of the two"
            )


def sent_in_another_way(target: Target, options: Options) -> None:
    for name in ("comm_hook", "shard_state"):
        if options.communication.cross_iteration and getattr(options.communication, name):
            raise AttachError(
                f"{name} does not go with cross_iteration=True, which sends DDP's buckets in its own way. Leave out "
                "one of the two"
            )
