"""Each option of ``attach`` by itself: the values that it takes, and a function for what a value alone does not tell.

What an option does not go with is in the table of ``pairs.py``.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_args

from torch.amp import GradScaler

from instep._gradients.clipping import ClipNorm, ClipValue
from instep._gradients.scaling import Policy
from instep.errors import AttachError
from instep.options import Options, each_option
from instep.target import Target


def _is_whole(value: object, least: int, bound: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < bound


def _is_pair_with_hook(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and callable(value[1])


def _is_policy(value: object) -> bool:
    # Whoever has made a policy has imported torch's FSDP, which takes its time: it is not imported to ask.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(value, fsdp.MixedPrecisionPolicy)


_TAKES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "schedule": (lambda value: value in ("backward", "forward"), "'backward' or 'forward'"),
    "defer": (lambda value: value == "auto" or isinstance(value, bool), "'auto', True or False"),
    "bucket_bytes": (lambda value: value is None or _is_whole(value, 1), "a positive number of bytes or None"),
    "clip": (
        lambda value: value is None or isinstance(value, (ClipNorm, ClipValue)),
        "a number, an instep.ClipNorm, an instep.ClipValue or None",
    ),
    "accumulation_steps": (lambda value: _is_whole(value, 1), "a number of backwards, at least 1"),
    "scaler": (lambda value: value is None or isinstance(value, GradScaler), "a torch.amp.GradScaler or None"),
    # By identity: 1 == True, and is no answer to the question where copies are kept.
    "undo": (lambda value: value is True or value is False or value == "host", "True, False or 'host'"),
    "nonfinite": (lambda value: value in get_args(Policy), f"one of {', '.join(get_args(Policy))}"),
    "comm_hook": (
        lambda value: value is None or _is_pair_with_hook(value),
        "a pair (state, hook) or None, as the arguments of register_comm_hook, where hook(state, bucket) returns the "
        "future of a tensor",
    ),
    "mixed_precision": (
        lambda value: value is None or _is_policy(value),
        "a torch.distributed.fsdp.MixedPrecisionPolicy or None",
    ),
    "shard_state": (lambda value: isinstance(value, bool), "True or False"),
    "offload": (lambda value: value is None or value == "host", "None or 'host'"),
    "random": (lambda value: value in (None, "keyed"), "None or 'keyed'"),
    "seed": (lambda value: value is None or _is_whole(value, 0, 2**63), "a whole number from 0 to 2**63 - 1"),
}
"""By option: whether it takes a value, and what it takes, in words."""


def invalid_value(target: Target, options: Options) -> None:
    given = dict(each_option(options))
    for name, (takes, what) in _TAKES.items():
        if not takes(given[name]):
            raise AttachError(f"{name} must be {what}, not {given[name]!r}")


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


def mixed_precision_without_floats(target: Target, options: Options) -> None:
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(options.communication.mixed_precision, name, None)
        if dtype is not None and not dtype.is_floating_point:
            raise AttachError(f"mixed_precision: {name}={dtype} is not a floating-point dtype")


def random_or_seed_alone(target: Target, options: Options) -> None:
    """A call that gives one of the two has forgotten the other."""
    random, seed = options.random, options.seed
    if random is None and seed is not None:
        raise AttachError(f"seed={seed!r} is for random='keyed': give both, or neither")
    if random is not None and seed is None:
        raise AttachError("random='keyed' needs a seed: attach(…, random='keyed', seed=1234), the same on all ranks")
