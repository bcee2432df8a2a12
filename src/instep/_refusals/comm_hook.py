"""``comm_hook``."""

import inspect

from instep.errors import AttachError
from instep.options import Options
from instep.sources.replicate.source import Replicated
from instep.target import Target


def replicated(target: Target, options: Options) -> None:
    if options.communication.comm_hook is not None and any(isinstance(one, Replicated) for one in target.wrapped):
        raise AttachError(
            "comm_hook is for DistributedDataParallel, whose buckets it is called with; this model is replicated. "
            "Leave it out (mixed_precision with reduce_dtype sends fewer bits), or use DistributedDataParallel"
        )


def no_pair(target: Target, options: Options) -> None:
    given = options.communication.comm_hook
    if given is not None and not (isinstance(given, tuple) and len(given) == 2 and callable(given[1])):
        raise AttachError(
            "comm_hook must be a pair (state, hook), as the arguments of register_comm_hook, where hook(state, bucket) "
            f"returns the future of a tensor; it is {given!r}"
        )


def not_one_ddp(target: Target, options: Options) -> None:
    if options.communication.comm_hook is not None and len(target.wrapped) != 1:
        found = "there is none" if not target.wrapped else f"there are {len(target.wrapped)}"
        raise AttachError(f"comm_hook is for a model with one DistributedDataParallel, and {found} in this model")


def cannot_be_called(target: Target, options: Options) -> None:
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
