"""``random`` and ``seed``."""

from torch.optim import Optimizer

from instep._optim.kinds import is_torchs_own, takes_hooks
from instep.errors import AttachError, UnsupportedOptimizerError
from instep.options import Options
from instep.target import Target


def unknown(target: Target, options: Options) -> None:
    if options.randomness.random not in (None, "keyed"):
        raise AttachError(f"random must be None or 'keyed', not {options.randomness.random!r}")


def no_pair(target: Target, options: Options) -> None:
    """Whoever gives one of the two has forgotten the other."""
    random, seed = options.randomness.random, options.randomness.seed
    if random is None and seed is not None:
        raise AttachError(f"seed={seed!r} is for random='keyed': give both, or neither")
    if random is not None and seed is None:
        raise AttachError("random='keyed' needs a seed: attach(…, random='keyed', seed=1234), the same on all ranks")


def no_seed(target: Target, options: Options) -> None:
    seed = options.randomness.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise AttachError(f"seed must be a whole number from 0 to 2**63 - 1, not {seed!r}")


def checked(target: Target, options: Options) -> None:
    if options.check_steps and _drawing(target, options):
        raise AttachError(
            f"check_steps={options.check_steps} does not go with random='keyed': the plain step() that it compares "
            "with draws other numbers. Leave out check_steps"
        )


def flat_shards(target: Target, options: Options) -> None:
    """Their pieces change with the number of ranks, and have no index that anybody knows."""
    if target.fsdp1 and _drawing(target, options):
        raise AttachError(
            "random='keyed' does not go with FullyShardedDataParallel, whose parameters are pieces without a place of "
            "their own in the model. Use fully_shard"
        )


def disabled(target: Target, options: Options) -> None:
    if found := _drawing(target, options):
        raise AttachError(
            f"INSTEP_DISABLE is set, and random='keyed' changes what {type(found[0]).__name__} draws: the plain loop "
            "cannot have these numbers. Leave out random and seed, or unset INSTEP_DISABLE"
        )


def untold(target: Target, options: Options) -> None:
    for optimizer in _drawing(target, options):
        if not takes_hooks(optimizer):
            kind = type(optimizer).__name__
            raise UnsupportedOptimizerError(
                f"{kind} was made without torch.optim.Optimizer.__init__: torch calls no hook before its step(), where "
                "random='keyed' takes its place. Leave out random and seed"
            )


def _drawing(target: Target, options: Options) -> list[Optimizer]:
    """The optimizers that may draw by key. torch's own draw nothing."""
    if options.randomness.random is None:
        return []
    return [optimizer for optimizer in target.optimizers if not is_torchs_own(optimizer)]
