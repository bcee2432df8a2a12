"""How a model is attached: what ``attach`` was given, once for all who ask."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.amp import GradScaler

from instep._gradients.clipping import ClipNorm, ClipValue
from instep._gradients.scaling import Policy
from instep._optim.kinds import ONLY_DEFER
from instep._optim.parameters import MIB
from instep.sources.ddp.reducer import CommHook

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

Schedules = Literal["backward", "forward"]
Defer = Literal["auto"] | bool
Offload = Literal["host"]
DEFAULT_BUCKET_BYTES = 16 * MIB
"""Of gradients: what ``attach`` puts into one bucket of its own unless told."""
BY_ENVIRONMENT = "INSTEP_DISABLE is set"


def bucket_that_frees(total: int) -> int:
    """What to give as ``bucket_bytes`` where gradients of ``total`` bytes are to be freed in backward: the default, if
    the model has four of those; else an eighth of it, in whole MiB."""
    return DEFAULT_BUCKET_BYTES if total >= 4 * DEFAULT_BUCKET_BYTES else MIB * max(1, total // MIB // 8)


@dataclass(frozen=True, slots=True)
class Communication:
    """How gradients travel, and what of the optimizer's state stays on a rank."""

    comm_hook: CommHook | None = None
    mixed_precision: "MixedPrecisionPolicy | None" = None
    cross_iteration: bool = False
    shard_state: bool = False

    @property
    def puts_off(self) -> bool:
        """Whether it has every step of ``schedule="forward"`` put off."""
        return self.cross_iteration or self.shard_state

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """What gradients are reduced in; ``None``: as they are."""
        policy = self.mixed_precision
        return None if policy is None else policy.reduce_dtype or policy.param_dtype


@dataclass(frozen=True, slots=True)
class Randomness:
    """What updates draw their random numbers from."""

    random: Literal["keyed"] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one attachment.

    Attributes:
        steps_itself: nobody calls ``optimizer.step()``: the end of each backward does.
        left_to_torch: why torch takes every step: ``BY_ENVIRONMENT``, or nobody else can; ``None``: it does not.
    """

    schedule: Schedules = "forward"
    defer: Defer = "auto"
    bucket_bytes: int | None = None
    clip: ClipNorm | ClipValue | None = None
    accumulation_steps: int = 1
    scaler: GradScaler | None = None
    undo: bool | Literal["host"] = False
    nonfinite: Policy = "allow"
    communication: Communication = field(default_factory=Communication)
    offload: Offload | None = None
    check_steps: int = 0
    randomness: Randomness = field(default_factory=Randomness)
    steps_itself: bool = False
    left_to_torch: str | None = None

    @property
    def disabled(self) -> bool:
        return self.left_to_torch is not None

    @property
    def puts_off_unasked(self) -> bool:
        """Whether it is not ``defer`` that decides if a step is put off: shards of a step are sent, gradients still
        arrive, or state is copied, when ``step()`` returns."""
        return self.communication.puts_off or self.offload is not None

    @property
    def always_puts_off(self) -> bool:
        """Whether no trial decides if a step is put off."""
        return self.schedule == "forward" and (self.defer is True or self.puts_off_unasked)

    @property
    def splits_steps(self) -> bool:
        """Whether parts of a step may run apart from ``step()``, so that it matters which updates can be split."""
        return self.schedule == "backward" or self.always_puts_off or self.randomness.random is not None

    @property
    def votes(self) -> bool:
        """Whether the ranks of a step vote on it."""
        splits = self.schedule == "backward" or self.always_puts_off
        return self.nonfinite != "allow" or (splits and not self.disabled)

    def taken_whole(self, *without: str) -> str:
        """Which options take an optimizer whose update cannot be split, in words.

        Args:
            without: options that do not go with it either.
        """
        splitting = [name for name in ("cross_iteration", "shard_state") if getattr(self.communication, name)]
        splitting += ["random"] if self.randomness.random is not None else []
        splitting += ["offload"] if self.offload is not None else []
        others = [*splitting, *without]
        if self.schedule == "forward" and self.defer is True and not others:
            return f"{ONLY_DEFER}, and calls step() as it is"
        also = "" if not others else " and without " + ", ".join(others[:-1]) + " and " * (len(others) > 1) + others[-1]
        return f"Use schedule='forward' with defer='auto'{also}, which calls step() as it is"

    @property
    def takes_any_loop(self) -> bool:
        """Whether a step may be taken at once where it cannot be put off."""
        return self.asks_for_nothing and self.defer is not True

    @property
    def asks_for_nothing(self) -> bool:
        """Whether steps may be put off, and nothing else is done to gradients, parameters or their communication."""
        usual = Options(defer=self.defer, bucket_bytes=self.bucket_bytes, scaler=self.scaler)
        return replace(self, left_to_torch=None) == usual

    @property
    def bytes_of_a_bucket(self) -> int:
        return self.bucket_bytes or DEFAULT_BUCKET_BYTES

    def said(self) -> dict[str, str]:
        """The schedule and every option that is not the default, as ``attach`` names them."""
        return {"schedule": repr(self.schedule), **_unlike(self, Options())}

    def in_words(self) -> dict[str, str]:
        """Every option with its value, in words that are the same in all processes: ranks compare them."""
        words = dict(_in_words(self))
        words["INSTEP_DISABLE"] = "set" if words.pop("left_to_torch") == repr(BY_ENVIRONMENT) else "not set"
        return words


def _in_words(options: Any) -> Iterator[tuple[str, str]]:
    for name in (option.name for option in fields(options)):
        value = getattr(options, name)
        if isinstance(value, (Communication, Randomness)):
            yield from _in_words(value)
        elif isinstance(value, GradScaler):
            yield name, type(value).__name__
        elif name == "comm_hook" and value is not None:
            state, hook = value
            kind = hook if hasattr(hook, "__qualname__") else type(hook)
            yield name, f"({type(state).__name__}, {kind.__module__}.{kind.__qualname__})"
        else:
            yield name, repr(value)


def _unlike(options: Any, default: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in (option.name for option in fields(options)):
        value, usual = getattr(options, name), getattr(default, name)
        if isinstance(value, (Communication, Randomness)):
            found |= _unlike(value, usual)
        elif value != usual:
            found[name] = repr(value)
    return found
