"""The options of an attachment: all that ``attach`` was given beside the model and the optimizers.

``attach`` makes one ``Options`` of its arguments, has it looked at (``_refusals``), and hands it down to all who ask.
What several of them ask (whether steps are split, put off, or voted on) is a property, so that all get one answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.amp import GradScaler

from instep._gradients.clipping import ClipNorm, ClipValue
from instep._gradients.scaling import Policy
from instep._optim.kinds import ONLY_DEFER
from instep._torch.pipelining import Pipeline, is_schedule
from instep.buckets import MIB
from instep.errors import AttachError, class_name
from instep.sources.ddp.reducer import CommHook

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

Schedules = Literal["backward", "forward"]
Defer = Literal["auto"] | bool
Offload = Literal["host"]
DEFAULT_BUCKET_BYTES = 16 * MIB
"""The most bytes of gradients in one bucket, if ``attach`` is not given ``bucket_bytes``: see ``bucket_bytes_for``."""
BY_ENVIRONMENT = "INSTEP_DISABLE is set"
"""``left_to_torch`` of an attachment that was made with ``INSTEP_DISABLE=1``."""


@dataclass(frozen=True, slots=True)
class Communication:
    """The options that concern ranks: how gradients travel, and which part of the optimizer's state a rank keeps."""

    comm_hook: CommHook | None = None
    mixed_precision: "MixedPrecisionPolicy | None" = None
    shard_state: bool = False
    pipeline: Pipeline | None = None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced; ``None``: their own."""
        policy = self.mixed_precision
        return None if policy is None else policy.reduce_dtype or policy.param_dtype


# Frozen, both: ranks compare their options once, and every part of the attachment has been chosen by them.
@dataclass(frozen=True, slots=True)
class Options:
    """All options of one attachment. Those that ``attach`` has are described there.

    Attributes:
        steps_itself: nobody calls ``optimizer.step()``: the end of each backward does.
        left_to_torch: why torch takes every step: ``BY_ENVIRONMENT``, or why nobody else can; ``None``: it does not.
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
    random: Literal["keyed"] | None = None
    seed: int | None = None
    steps_itself: bool = False
    left_to_torch: str | None = None

    @property
    def disabled(self) -> bool:
        return self.left_to_torch is not None

    @property
    def puts_off_unasked(self) -> bool:
        """Whether steps are put off whatever ``defer`` says: when ``step()`` returns, shards of the step are still
        sent, or state is still copied."""
        return self.communication.shard_state or self.offload is not None

    @property
    def always_puts_off(self) -> bool:
        """Whether no trial decides if a step is put off."""
        return self.schedule == "forward" and (self.defer is True or self.puts_off_unasked)

    @property
    def splits_steps(self) -> bool:
        """Whether parts of a step may run apart from ``step()``, so that it matters which updates can be split."""
        return self.schedule == "backward" or self.always_puts_off or self.random is not None

    @property
    def may_update_beside_backward(self) -> bool:
        """Whether no option has a part in each update of ``schedule="backward"``, for which it must run in the hook."""
        usual = Options(
            schedule="backward",
            defer=self.defer,
            bucket_bytes=self.bucket_bytes,
            accumulation_steps=self.accumulation_steps,
            communication=self.communication,
            steps_itself=self.steps_itself,
        )
        return self == usual and self.communication.pipeline is None

    @property
    def keeping(self) -> list[str]:
        """The options that may want a gradient for longer than its update, so that compiled code hands none over."""
        usual, looks = dict(each_option(Options("backward"))), {"defer", "bucket_bytes", "nonfinite"}
        if not isinstance(self.clip, ClipNorm) or self.clip.mode == "two_pass":
            looks.add("clip")  # each gradient is clipped by itself, or by a norm that is known
        return [name for name, value in each_option(self) if value != usual[name] and name not in looks]

    @property
    def votes(self) -> bool:
        """Whether the ranks of a step vote on it."""
        splits = self.schedule == "backward" or self.always_puts_off
        return self.nonfinite != "allow" or (splits and not self.disabled)

    def way_to_step_whole(self, *without: str) -> str:
        """The advice for an optimizer whose update cannot be split: the options that call its ``step()`` as it is.

        Args:
            without: more options to leave out.
        """
        splitting = ["shard_state"] if self.communication.shard_state else []
        splitting += ["random"] if self.random is not None else []
        splitting += ["offload"] if self.offload is not None else []
        others = [*splitting, *without]
        # ``defer=True`` alone keeps such an optimizer out. Errors of a step that is put off say it in the same words.
        if self.schedule == "forward" and self.defer is True and not others:
            return f"{ONLY_DEFER}, and calls step() as it is"
        also = "" if not others else " and without " + ", ".join(others[:-1]) + " and " * (len(others) > 1) + others[-1]
        return f"Use schedule='forward' with defer='auto'{also}, which calls step() as it is"

    @property
    def takes_any_loop(self) -> bool:
        """Whether any loop that plain torch trains is to be taken. ``defer=True`` asks for an error where a step cannot
        be put off."""
        return self.asks_for_nothing and self.defer is not True

    @property
    def asks_for_nothing(self) -> bool:
        """Whether steps may be put off, and nothing else is done to gradients, parameters or their communication."""
        # With ``schedule="forward"``, ``scaler`` has no effect, and ``bucket_bytes`` changes no number.
        usual = Options(defer=self.defer, bucket_bytes=self.bucket_bytes, scaler=self.scaler)
        return replace(self, left_to_torch=None) == usual

    @property
    def most_put_off_together(self) -> int:
        """Bytes of gradients in one bucket whose update is put off, where ``bucket_bytes`` was not given."""
        return DEFAULT_BUCKET_BYTES

    def given(self) -> dict[str, str]:
        """The schedule and every option that is not the default, as ``attach`` names them."""
        usual = dict(each_option(Options()))
        return {
            "schedule": repr(self.schedule),
            **{name: repr(value) for name, value in each_option(self) if value != usual[name]},
        }

    def in_words(self) -> dict[str, str]:
        """Every option with its value, in words that are the same in all processes: ranks compare them."""
        words = {name: _in_words(name, value) for name, value in each_option(self)}
        words["INSTEP_DISABLE"] = "set" if words.pop("left_to_torch") == repr(BY_ENVIRONMENT) else "not set"
        return words


def pipeline_of(schedule: object) -> Pipeline | None:
    """The pipeline of what ``attach`` was given as ``pipeline``."""
    if schedule is None or is_schedule(schedule):
        return None if schedule is None else Pipeline(schedule)
    raise AttachError(
        "pipeline must be a schedule of torch.distributed.pipelining, such as Schedule1F1B(stage, …), not "
        f"{class_name(schedule, in_full=True)}"
    )


def each_option(options: Any) -> Iterator[tuple[str, Any]]:
    """Every option by its name in ``attach``: those of ``communication`` among the others."""
    for name in (option.name for option in fields(options)):
        value = getattr(options, name)
        if isinstance(value, Communication):
            yield from each_option(value)
        else:
            yield name, value


def _in_words(name: str, value: Any) -> str:
    # The repr of these two has an address, which is another one in each process.
    if isinstance(value, GradScaler):
        return type(value).__name__
    if name == "comm_hook" and value is not None:
        state, hook = value
        kind = hook if hasattr(hook, "__qualname__") else type(hook)
        return f"({type(state).__name__}, {kind.__module__}.{kind.__qualname__})"
    return repr(value)
