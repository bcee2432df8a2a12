"""``DistributedDataParallel`` and ``replicate``: how they were built, and where they are."""

from torch.nn.parallel import DistributedDataParallel

from instep.errors import AttachError
from instep.options import Options
from instep.sources.fsdp.modules import instances_of
from instep.sources.replicate.source import Replicated, living
from instep.target import Target, Wrapped


def buckets_of_its_own(target: Target, options: Options) -> None:
    if target.wrapped and options.bucket_bytes is not None:
        kind, call = _kind_and_call(target.wrapped[0])
        raise AttachError(
            f"bucket_bytes={options.bucket_bytes} does not apply to {kind}, which makes its own buckets: "
            f"leave it out, and give {call}(bucket_cap_mb=…) instead"
        )


def precision_of_its_own(target: Target, options: Options) -> None:
    if any(getattr(wrapper, "mixed_precision", None) is not None for wrapper in target.wrapped):
        raise AttachError(
            "DistributedDataParallel(mixed_precision=…) changes the parameters' dtype within a step and has a "
            "communication hook of its own. Build it without, and give the policy to attach(…, mixed_precision=…)"
        )


def delayed(target: Target, options: Options) -> None:
    if any(ddp._delay_all_reduce_params for ddp in target.ddps):
        raise AttachError(
            "DistributedDataParallel(delay_all_reduce_named_params=…) reduces those parameters after their "
            "gradient hooks have run. Build it without, and attach again"
        )


def around_the_model(target: Target, options: Options) -> None:
    inside = set(target.model.modules())
    everywhere: list[Wrapped] = [*instances_of(DistributedDataParallel), *living()]
    for wrapper in everywhere:
        if wrapper in inside or not any(id(p) in target.names for p in wrapper.parameters()):
            continue
        kind, _ = _kind_and_call(wrapper)
        if target.wrapped:
            raise AttachError(
                f"{type(target.called[0]).__name__} shares parameters with another {kind}, which is not attached. "
                "Where the loop calls both, attach both: attach([first, second], optimizer). Where one is from before, "
                "drop it: nothing may refer to it"
            )
        raise AttachError(
            f"{type(target.model).__name__} is wrapped in a {kind}: its own gradients are those of this rank "
            f"alone. Attach the {kind} instead"
        )


def _kind_and_call(wrapper: Wrapped) -> tuple[str, str]:
    return ("Replicated", "replicate") if isinstance(wrapper, Replicated) else ("DistributedDataParallel",) * 2
