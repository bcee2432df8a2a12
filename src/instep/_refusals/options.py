"""Each option of ``attach`` by itself: a function for each refuses a value that the option does not take.

What an option does not go with is in the table of ``pairs.py``.
"""

import inspect
import sys
from typing import get_args

from torch.amp import GradScaler

from instep._arguments import require_flag
from instep._gradients.clipping import ClipNorm, ClipValue
from instep._gradients.scaling import Policy
from instep.errors import AttachError, class_name
from instep.options import Options
from instep.target import Target


def invalid_schedule(target: Target, options: Options) -> None:
    if options.schedule not in ("backward", "forward"):
        raise AttachError(f"schedule={options.schedule!r} is not known: it is 'backward' or 'forward'")


def invalid_defer(target: Target, options: Options) -> None:
    if options.defer != "auto" and not isinstance(options.defer, bool):
        raise AttachError(f"defer must be 'auto', True or False, not {options.defer!r}")


def invalid_bucket_bytes(target: Target, options: Options) -> None:
    given = options.bucket_bytes
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise AttachError(f"bucket_bytes must be a positive number of bytes or None, not {given!r}")


def invalid_clip(target: Target, options: Options) -> None:
    clip = options.clip
    if clip is not None and not isinstance(clip, (ClipNorm, ClipValue)):
        raise AttachError(f"clip must be an instep.ClipNorm, an instep.ClipValue or None, not {clip!r}")


def invalid_accumulation_steps(target: Target, options: Options) -> None:
    steps = options.accumulation_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise AttachError(f"accumulation_steps must be a number of backwards, at least 1, not {steps!r}")


def invalid_scaler(target: Target, options: Options) -> None:
    scaler = options.scaler
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise AttachError(f"scaler must be a torch.amp.GradScaler or None, not {class_name(scaler, in_full=True)}")


def invalid_undo(target: Target, options: Options) -> None:
    undo = options.undo
    # By identity: 1 == True, and is no answer to the question where copies are kept.
    if undo is not True and undo is not False and undo != "host":
        raise AttachError(f"undo must be True, False or 'host', not {undo!r}")


def invalid_nonfinite(target: Target, options: Options) -> None:
    if options.nonfinite not in get_args(Policy):
        raise AttachError(f"nonfinite must be one of {', '.join(get_args(Policy))}, not {options.nonfinite!r}")


def invalid_comm_hook(target: Target, options: Options) -> None:
    given = options.communication.comm_hook
    if given is not None and not (isinstance(given, tuple) and len(given) == 2 and callable(given[1])):
        raise AttachError(
            "comm_hook must be a pair (state, hook), as the arguments of register_comm_hook, where hook(state, bucket) "
            f"returns the future of a tensor; it is {given!r}"
        )


def comm_hook_that_cannot_be_called(target: Target, options: Options) -> None:
    if options.communication.comm_hook is None:
        return
    _, hook = options.communication.comm_hook
    try:
        inspect.signature(hook).bind(None, None)
    except TypeError as error:
        name = getattr(hook, "__qualname__", hook)
        raise AttachError(f"comm_hook: {name!r} cannot be called with (state, bucket): {error}") from error
    except ValueError:
        return  # a builtin without a signature


def invalid_mixed_precision(target: Target, options: Options) -> None:
    policy = options.communication.mixed_precision
    # Whoever has made a policy has imported torch's FSDP, which takes its time: it is not imported to ask.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if policy is not None and (fsdp is None or not isinstance(policy, fsdp.MixedPrecisionPolicy)):
        raise AttachError(
            f"mixed_precision must be a torch.distributed.fsdp.MixedPrecisionPolicy or None, not {policy!r}"
        )


def mixed_precision_without_floats(target: Target, options: Options) -> None:
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(options.communication.mixed_precision, name, None)
        if dtype is not None and not dtype.is_floating_point:
            raise AttachError(f"mixed_precision: {name}={dtype} is not a floating-point dtype")


def invalid_shard_state(target: Target, options: Options) -> None:
    require_flag("shard_state", options.communication.shard_state, AttachError)


def invalid_offload(target: Target, options: Options) -> None:
    if options.offload is not None and options.offload != "host":
        raise AttachError(f"offload must be None or 'host', not {options.offload!r}")


def invalid_random(target: Target, options: Options) -> None:
    if options.randomness.random not in (None, "keyed"):
        raise AttachError(f"random must be None or 'keyed', not {options.randomness.random!r}")


def random_or_seed_alone(target: Target, options: Options) -> None:
    """A call that gives one of the two has forgotten the other."""
    random, seed = options.randomness.random, options.randomness.seed
    if random is None and seed is not None:
        raise AttachError(f"seed={seed!r} is for random='keyed': give both, or neither")
    if random is not None and seed is None:
        raise AttachError("random='keyed' needs a seed: attach(…, random='keyed', seed=1234), the same on all ranks")


def invalid_seed(target: Target, options: Options) -> None:
    seed = options.randomness.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise AttachError(f"seed must be a whole number from 0 to 2**63 - 1, not {seed!r}")
