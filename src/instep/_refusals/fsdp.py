"""``fully_shard`` and ``FullyShardedDataParallel``."""

from instep._gradients.clipping import ClipNorm
from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


def flat_parameters(target: Target, options: Options) -> None:
    if not all(one._use_orig_params for one in target.fsdp1):
        raise AttachError(
            "FullyShardedDataParallel(use_orig_params=True) is needed: without, its parameters are flat ones that "
            "no optimizer of the model's own parameters can step"
        )


def groups_of_its_own(target: Target, options: Options) -> None:
    wrapper = _wrapper(target)
    if wrapper is not None and options.bucket_bytes is not None:
        raise AttachError(
            f"bucket_bytes={options.bucket_bytes} does not apply to a model that {wrapper} has divided into groups, "
            "which are stepped as they are reduced: leave it out, and shard other modules"
        )


def precision_of_its_own(target: Target, options: Options) -> None:
    wrapper = _wrapper(target)
    if wrapper is not None and options.communication.mixed_precision is not None:
        raise AttachError(
            f"mixed_precision is for one device and DistributedDataParallel. {wrapper} has mixed precision of its own: "
            "fully_shard(…, mp_policy=…), FullyShardedDataParallel(…, mixed_precision=…)"
        )


def norms(target: Target, options: Options) -> None:
    wrapper = _wrapper(target)
    if wrapper is None or not isinstance(options.clip, ClipNorm):
        return
    if target.fsdp1:
        raise AttachError(
            "clip=ClipNorm(…) does not go with FullyShardedDataParallel, whose shards have a norm of their own: call "
            "model.clip_grad_norm_(…) between backward() and optimizer.step(), with schedule='forward' or undo=True; "
            "or use fully_shard"
        )
    if options.clip.mode == "two_pass":
        raise AttachError(
            f"clip=ClipNorm(mode='two_pass') does not go with {wrapper}, whose first pass would reduce the gradients "
            "too. Use schedule='forward' or undo=True, with which mode='exact' does"
        )


def _wrapper(target: Target) -> str | None:
    if target.fsdp1:
        return "FullyShardedDataParallel"
    return "fully_shard" if target.fsdp2 else None
