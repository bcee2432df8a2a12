"""``mixed_precision``."""

import sys

from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


def no_policy(target: Target, options: Options) -> None:
    policy = options.communication.mixed_precision
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if policy is not None and (fsdp is None or not isinstance(policy, fsdp.MixedPrecisionPolicy)):
        raise AttachError(
            f"mixed_precision must be a torch.distributed.fsdp.MixedPrecisionPolicy or None, not {policy!r}"
        )


def no_floats(target: Target, options: Options) -> None:
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(options.communication.mixed_precision, name, None)
        if dtype is not None and not dtype.is_floating_point:
            raise AttachError(f"mixed_precision: {name}={dtype} is not a floating-point dtype")


def sparse_gradients(target: Target, options: Options) -> None:
    policy = options.communication.mixed_precision
    if policy is None or policy.param_dtype is None:
        return
    sparse = [name for name, module in target.model.named_modules() if getattr(module, "sparse", False)]
    if sparse:
        raise AttachError(
            f"mixed_precision: {sparse[0]!r} has sparse gradients, which do not come back through a cast. Build it "
            "with sparse=False, or leave out param_dtype"
        )


def nothing_to_reduce(target: Target, options: Options) -> None:
    policy = options.communication.mixed_precision
    if policy is None or policy.reduce_dtype is None:
        return
    if not target.wrapped:
        raise AttachError(
            f"mixed_precision: reduce_dtype={policy.reduce_dtype} is for DistributedDataParallel and replicate; "
            "nothing is reduced on one device. Leave it out"
        )
    if options.communication.comm_hook is not None:
        raise AttachError(
            f"mixed_precision: reduce_dtype={policy.reduce_dtype} has no effect with comm_hook, which decides how "
            "gradients are sent. Leave one of them out"
        )
