"""What does not go together: a table of pairs, of two options or of an option and a kind of model.

A ``Pair`` names its two ``Choice``s, says why they do not go together, and what to do. It is called as any other rule
is. ``rules.py`` says in which order, so that a row may rely on those before it, and on ``options.py``: each value is
one that its option takes. The documentation shows this table (``docs/features.md``), and ``python -m tests.pairs``
writes it there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from instep._gradients.clipping import ClipNorm, ClipValue
from instep._optim.kinds import is_elementwise
from instep._refusals.model import kind_of
from instep._refusals.optimizers import drawing_by_key
from instep._torch.versions import memory_of
from instep.errors import AttachError, class_name
from instep.options import BY_ENVIRONMENT, Options
from instep.sources.replicate.source import Replicated
from instep.target import Target


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the two in a pair: a value of an option, or a kind of model.

    Attributes:
        text: how the documentation names it.
        holds: whether the call of ``attach`` has chosen it.
        found: how the message names what was chosen; ``None``: as the documentation does.
    """

    text: str
    holds: Callable[[Target, Options], bool]
    found: Callable[[Target, Options], str] | None = None

    def named(self, target: Target, options: Options) -> str:
        return _plain(self.text) if self.found is None else self.found(target, options)


@dataclass(frozen=True, slots=True)
class Pair:
    """A row of the table: an option that does not go with another, or with a kind of model.

    Attributes:
        option: the option that is best left out. No default is one.
        other: what the option does not go with.
        reason: why, for the message.
        remedy: what to do, for the message.
    """

    option: Choice
    other: Choice
    reason: str
    remedy: str | Callable[[Target, Options], str] = "Leave it out"

    def __call__(self, target: Target, options: Options) -> None:
        # The option first: it is cheap to ask for, and what is asked of a model may rely on it.
        if self.option.holds(target, options) and self.other.holds(target, options):
            option, other = (choice.named(target, options) for choice in (self.option, self.other))
            remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(target, options)
            raise AttachError(f"{option} does not go with {other}: {_plain(self.reason)}. {remedy}")


def _plain(text: str) -> str:
    """``text`` of the documentation, as messages write it."""
    return text.replace("`", "").replace('"', "'")


# Choices of several rows. Here and in the table, ``t`` is the ``Target`` and ``o`` the ``Options``.

_FORWARD = Choice('`schedule="forward"`', lambda t, o: o.schedule == "forward")
_BACKWARD_WITHOUT_UNDO = Choice(
    '`schedule="backward"` without `undo`',
    lambda t, o: o.schedule == "backward" and not o.undo,
    lambda t, o: "schedule='backward'",  # whose remedy says whether ``undo`` is one
)
_BUCKET_BYTES = Choice(
    "`bucket_bytes`", lambda t, o: o.bucket_bytes is not None, lambda t, o: f"bucket_bytes={o.bucket_bytes}"
)
_TWO_PASS = Choice('`ClipNorm(mode="two_pass")`', lambda t, o: _mode(o) == "two_pass")
_UNDO = Choice("`undo`", lambda t, o: bool(o.undo), lambda t, o: f"undo={o.undo!r}")
_SKIP = Choice('`nonfinite="skip"`', lambda t, o: o.nonfinite == "skip")
_COMM_HOOK = Choice("`comm_hook`", lambda t, o: o.communication.comm_hook is not None)
_MIXED_PRECISION = Choice("`mixed_precision`", lambda t, o: o.communication.mixed_precision is not None)
_REDUCE_DTYPE = Choice("`mixed_precision` with `reduce_dtype`", lambda t, o: _dtype(o, "reduce_dtype") is not None)
_SHARD_STATE = Choice("`shard_state=True`", lambda t, o: o.communication.shard_state)
_OFFLOAD = Choice('`offload="host"`', lambda t, o: o.offload is not None)
_KEYED = Choice(
    '`random="keyed"` and an optimizer that is not torch\'s own',
    lambda t, o: bool(drawing_by_key(t, o)),
    lambda t, o: f"random='keyed' for {class_name(drawing_by_key(t, o)[0])}",
)
_NOT_ONE_DDP = Choice(
    "a model without exactly one `DistributedDataParallel`",
    lambda t, o: len(t.ddps) != 1,
    lambda t, o: f"a model that has {len(t.ddps) or 'no'} DistributedDataParallel",
)
_PIPELINE = Choice("`pipeline`", lambda t, o: o.communication.pipeline is not None)
_FSDP1 = Choice("`FullyShardedDataParallel`", lambda t, o: bool(t.fsdp1))
_FSDP = Choice(
    "`fully_shard` or `FullyShardedDataParallel`",
    lambda t, o: bool(t.fsdp1 or t.fsdp2),
    # A model may have both: then it is FSDP1, which takes fewer options.
    lambda t, o: "FullyShardedDataParallel" if t.fsdp1 else "fully_shard",
)
_DISABLED = Choice("`INSTEP_DISABLE=1`", lambda t, o: o.left_to_torch == BY_ENVIRONMENT)


def _mode(options: Options) -> str | None:
    return options.clip.mode if isinstance(options.clip, ClipNorm) else None


def _measures(options: Options) -> bool:
    """Whether ``ClipNorm`` takes the norm and scales nothing, so that it need not be known before the first update."""
    clip = options.clip
    return isinstance(clip, ClipNorm) and clip.max_norm == math.inf and not clip.error_if_nonfinite


def _dtype(options: Options, name: str) -> torch.dtype | None:
    """A dtype of the policy ``mixed_precision``, by name."""
    dtype: torch.dtype | None = getattr(options.communication.mixed_precision, name, None)
    return dtype


# What rows ask for.


def _in_updates(options: Options) -> list[str]:
    """The options given that have a part in each update in backward."""
    settings = {
        "undo": options.undo,
        "clip": options.clip,
        "scaler": options.scaler,
        "nonfinite": options.nonfinite != "allow",
        "offload": options.offload,
        "random": options.random,
    }
    return [name for name, given in settings.items() if given]


def _put_back(options: Options) -> str:
    """``undo`` as a remedy, where the other options take it."""
    return "" if options.communication.shard_state else ", or undo=True, with which such a step is put back"


def _ways_to_clip(target: Target, options: Options) -> str:
    """The modes and schedules that clip this model with the other options."""
    shards, scales = options.communication.shard_state, options.scaler is not None
    ways = ["schedule='forward' (exact)"]
    if not shards:
        ways.append("undo=True (exact: a step that turns out to need clipping is put back and done again)")
    if not (shards or target.fsdp2 or scales or options.communication.pipeline is not None):
        ways.append(
            "ClipNorm(mode='two_pass') (exact: two backwards, by overlap.backward(loss) or "
            "overlap.micro_batches(loss_of, batches))"
        )
    return f"Choose {'; '.join(ways)}"


def _not_elementwise(target: Target) -> list[str]:
    """The classes of the optimizers whose update is not known to be elementwise: ranks step whole parameters then."""
    return [class_name(optimizer) for optimizer in target.optimizers if not is_elementwise(optimizer)]


def _found_on_cpu(target: Target) -> str | None:
    """The first parameter that is not on an accelerator, and its device, in words."""
    for parameter in target.optimized:
        if (device := memory_of(parameter).device).type in ("cpu", "meta"):
            named = target.names.get(id(parameter))
            name = f"{named[1][0].name!r}" if named else f"of shape {tuple(parameter.shape)}"
            return f"{name} is on {device}"
    return None


def _outside_of_ddp(target: Target) -> str | None:
    """The first parameter that no DDP reduces, where DDP reduces others."""
    reduced = set[int]().union(*target.reduced.values())
    optimized = set(map(id, target.optimized))
    outside = [places[0].name for key, (_, places) in target.names.items() if key in optimized - reduced]
    return outside[0] if outside and optimized & reduced else None


def _of_communication(options: Options) -> list[str]:
    names = "comm_hook", "mixed_precision", "shard_state"
    return [name for name in names if getattr(options.communication, name)]


def _sparse_modules(target: Target) -> list[str]:
    """The names of the modules that ask autograd for sparse gradients, as ``nn.Embedding(sparse=True)`` does."""
    return [name for name, module in target.model.named_modules() if getattr(module, "sparse", False)]


# The table, row by row, in the order in which they are asked.

OF_OPTIONS: Mapping[str, Pair] = {
    "DEFER_IN_HOOKS": Pair(
        Choice('`defer=True` with `schedule="backward"`', lambda t, o: o.defer is True and o.schedule == "backward"),
        Choice(
            "`undo`, `clip`, `nonfinite`, `offload` or `random`",
            lambda t, o: not o.may_update_beside_backward and not o.disabled,
            lambda t, o: " and ".join(_in_updates(o)),
        ),
        "these have a part in each update, which runs in the hook therefore",
        "Leave out defer=True, with which a thread updates buckets beside backward",
    ),
    "SKIP_WITH_BACKWARD": Pair(
        _SKIP,
        _BACKWARD_WITHOUT_UNDO,
        "every gradient is needed before the first update",
        lambda t, o: f"Use schedule='forward'{_put_back(o)}; or nonfinite='raise'",
    ),
    "SKIP_WITH_CLIP_THAT_RAISES": Pair(
        _SKIP,
        Choice(
            "`ClipNorm(error_if_nonfinite=True)`",
            lambda t, o: isinstance(o.clip, ClipNorm) and o.clip.error_if_nonfinite,
        ),
        "one leaves out the steps for which the other raises",
        "Leave one out",
    ),
    "UNDO_WITH_FORWARD": Pair(_UNDO, _FORWARD, "nothing is written before `step()`"),
    "MODE_WITH_FORWARD": Pair(
        _TWO_PASS, _FORWARD, 'the norm is known before anything is written, and `mode="exact"` costs nothing'
    ),
    "EXACT_WITH_BACKWARD": Pair(
        # FullyShardedDataParallel takes no mode of ClipNorm, and has a row of its own.
        Choice('`ClipNorm(mode="exact")`', lambda t, o: _mode(o) == "exact" and not _measures(o) and not t.fsdp1),
        _BACKWARD_WITHOUT_UNDO,
        "every gradient is needed before the first update",
        _ways_to_clip,
    ),
    "MODE_WITH_UNDO": Pair(_TWO_PASS, _UNDO, '`mode="exact"` goes with `undo`', "Use mode='exact', or leave out undo"),
    "SCALER_WITH_BACKWARD": Pair(
        Choice("`scaler`", lambda t, o: o.scaler is not None),
        _BACKWARD_WITHOUT_UNDO,
        "weights are updated before the scaler has seen whether a gradient is infinite",
        lambda t, o: f"Use schedule='forward', which needs no scaler argument{_put_back(o)}",
    ),
    "OFFLOAD_WITH_SHARD_STATE": Pair(
        _OFFLOAD, _SHARD_STATE, "optimizer state is sent between the ranks' devices", "Leave out one of the two"
    ),
}
"""Two options, by name: what is known when the first weight is written, and how to have all that was asked for."""

OF_MODEL: Mapping[str, Pair] = {
    # Pipelines, whose micro-batches and communication are the schedule's.
    "PIPELINE_WITH_ACCUMULATION_STEPS": Pair(
        Choice(
            "`accumulation_steps`",
            lambda t, o: o.accumulation_steps > 1,
            lambda t, o: f"accumulation_steps={o.accumulation_steps}",
        ),
        _PIPELINE,
        "the schedule has micro-batches of its own",
        "Leave it out; to add up several calls of schedule.step(…), put `with overlap.accumulate():` around all but "
        "the last",
    ),
    "PIPELINE_WITH_TWO_PASS": Pair(
        _TWO_PASS,
        _PIPELINE,
        "the schedule runs each backward once",
        "Leave out mode, and use undo=True or schedule='forward'",
    ),
    "PIPELINE_WITH_COMMUNICATION": Pair(
        Choice(
            "`comm_hook`, `mixed_precision` or `shard_state`",
            lambda t, o: bool(_of_communication(o)),
            lambda t, o: " and ".join(_of_communication(o)),
        ),
        _PIPELINE,
        "the schedule says when gradients are sent",
    ),
    "PIPELINE_WITH_FSDP1": Pair(
        _PIPELINE,
        Choice(
            "`FullyShardedDataParallel` or `replicate`",
            lambda t, o: bool(t.fsdp1) or len(t.ddps) < len(t.wrapped),
            lambda t, o: "FullyShardedDataParallel" if t.fsdp1 else "instep.replicate",
        ),
        "torch's stages know of DDP and `fully_shard` alone, and each backward would reduce gradients",
        "Use DistributedDataParallel, or fully_shard",
    ),
    # Mixed precision.
    "MIXED_PRECISION_WITH_SEVERAL_MODELS": Pair(
        _MIXED_PRECISION,
        Choice("a list of modules", lambda t, o: len(t.called) > 1),
        "casts are made inside the forward of one model",
        "Attach each module with an optimizer of its own, or the module that holds them all",
    ),
    # FSDP.
    "RANDOM_WITH_FSDP1": Pair(
        _KEYED,
        _FSDP1,
        # The pieces change with the number of ranks, and have no index that is the same on all of them.
        "its parameters are pieces without a place in the model",
        "Use fully_shard",
    ),
    "BUCKET_BYTES_WITH_FSDP": Pair(
        _BUCKET_BYTES,
        _FSDP,
        "its groups are stepped as they are reduced",
        "Leave it out, and shard other modules",
    ),
    "MIXED_PRECISION_WITH_FSDP": Pair(
        _MIXED_PRECISION,
        _FSDP,
        "FSDP has mixed precision of its own",
        "Use fully_shard(…, mp_policy=…), FullyShardedDataParallel(…, mixed_precision=…)",
    ),
    "CLIP_NORM_WITH_FSDP1": Pair(
        Choice("`clip=ClipNorm(…)`", lambda t, o: isinstance(o.clip, ClipNorm)),
        _FSDP1,
        "its shards have a norm of their own",
        "Call model.clip_grad_norm_(…) between backward() and optimizer.step(), with schedule='forward' or undo=True; "
        "or use fully_shard",
    ),
    "TWO_PASS_WITH_FULLY_SHARD": Pair(
        _TWO_PASS,
        Choice("`fully_shard`", lambda t, o: bool(t.fsdp2)),
        "the first pass would reduce the gradients, too",
        "Use schedule='forward' or undo=True, with which mode='exact' does",
    ),
    # DistributedDataParallel and ``replicate``.
    "BUCKET_BYTES_WITH_DDP": Pair(
        _BUCKET_BYTES,
        Choice(
            "`DistributedDataParallel` or `replicate`",
            lambda t, o: bool(t.wrapped),
            lambda t, o: kind_of(t.wrapped[0]),
        ),
        "it makes buckets of its own",
        "Leave it out, and give bucket_cap_mb=… to DistributedDataParallel or replicate",
    ),
    "COMM_HOOK_WITH_REPLICATE": Pair(
        _COMM_HOOK,
        Choice("`replicate`", lambda t, o: any(isinstance(wrapper, Replicated) for wrapper in t.wrapped)),
        "a hook is called with DDP's buckets",
        "Leave it out (mixed_precision with reduce_dtype sends fewer bits), or use DistributedDataParallel",
    ),
    "COMM_HOOK_WITHOUT_DDP": Pair(_COMM_HOOK, _NOT_ONE_DDP, "a hook is called with DDP's buckets"),
    # Mixed precision.
    "PARAM_DTYPE_WITH_SPARSE_GRADIENTS": Pair(
        Choice("`mixed_precision` with `param_dtype`", lambda t, o: _dtype(o, "param_dtype") is not None),
        Choice(
            "a module with `sparse=True`",
            lambda t, o: bool(_sparse_modules(t)),
            lambda t, o: f"sparse=True of the module {_sparse_modules(t)[0]!r}",
        ),
        "sparse gradients do not come back through a cast",
        "Build it with sparse=False, or leave out param_dtype",
    ),
    "REDUCE_DTYPE_ON_ONE_DEVICE": Pair(
        _REDUCE_DTYPE, Choice("a model on one device", lambda t, o: not t.wrapped), "nothing is reduced"
    ),
    "REDUCE_DTYPE_WITH_COMM_HOOK": Pair(
        _REDUCE_DTYPE, _COMM_HOOK, "the hook decides how gradients are sent", "Leave one of them out"
    ),
    # Optimizer state that is divided among the ranks.
    "SHARD_STATE_WITHOUT_DDP": Pair(
        _SHARD_STATE,
        _NOT_ONE_DDP,
        "state is divided by DDP's buckets",
        lambda t, o: (
            f"Leave it out{': FSDP shards it by itself' if t.fsdp1 or t.fsdp2 else ', or wrap the model in one'}"
        ),
    ),
    "CLIP_VALUE_WITH_SHARDS_OF_WHOLE_PARAMETERS": Pair(
        Choice("`clip=ClipValue(…)`", lambda t, o: isinstance(o.clip, ClipValue)),
        Choice(
            '`shard_state=True`, `schedule="backward"` and an optimizer that is not known to be elementwise',
            lambda t, o: o.communication.shard_state and o.schedule == "backward" and bool(_not_elementwise(t)),
            lambda t, o: (
                f"shard_state=True, schedule='backward' and {_not_elementwise(t)[0]}, not known to be elementwise"
            ),
        ),
        "the gradient of a whole parameter is on another rank",
        "Use schedule='forward'",
    ),
    "UNDO_WITH_SHARD_STATE": Pair(
        _UNDO,
        _SHARD_STATE,
        "a step is not known to stand on all ranks before the rows have been gathered",
        "Leave out one of the two",
    ),
    "TWO_PASS_WITH_SHARD_STATE": Pair(
        _TWO_PASS,
        _SHARD_STATE,
        "each rank has its own rows of the reduced gradients alone",
        "Leave out mode, and use schedule='forward'",
    ),
    "COMM_HOOK_WITH_SHARD_STATE": Pair(
        _COMM_HOOK, _SHARD_STATE, "gradients are sent in another way", "Leave out one of the two"
    ),
}
"""Options and kinds of model."""

OF_PARAMETERS: Mapping[str, Pair] = {
    "OFFLOAD_ON_CPU": Pair(
        _OFFLOAD,
        Choice(
            "parameters on a CPU",
            lambda t, o: _found_on_cpu(t) is not None,
            lambda t, o: f"a model in host memory (the parameter {_found_on_cpu(t)})",
        ),
        "optimizer state is in host memory as it is",
        "Leave out offload, which keeps it away from an accelerator",
    ),
    "TWO_PASS_WITH_PARAMETERS_OUTSIDE": Pair(
        _TWO_PASS,
        Choice(
            "a `DistributedDataParallel` that has some of the parameters",
            lambda t, o: _outside_of_ddp(t) is not None,
            lambda t, o: f"a DistributedDataParallel that has some of the parameters, and not {_outside_of_ddp(t)!r}",
        ),
        "DDP's norms are known after one backward, those of other parameters after two",
        "Leave out mode, and use schedule='forward'",
    ),
}
"""What asks for each parameter by its name."""

_OTHER_NUMBERS = "the plain loop has other numbers"
_TORCHS_OWN = "Leave it out (register_comm_hook and torch.autocast are torch's own), or unset INSTEP_DISABLE"

OF_DISABLED: Mapping[str, Pair] = {
    "COMM_HOOK_WITH_DISABLE": Pair(_COMM_HOOK, _DISABLED, _OTHER_NUMBERS, _TORCHS_OWN),
    "MIXED_PRECISION_WITH_DISABLE": Pair(_MIXED_PRECISION, _DISABLED, _OTHER_NUMBERS, _TORCHS_OWN),
    "RANDOM_WITH_DISABLE": Pair(
        _KEYED, _DISABLED, "the plain loop draws other numbers", "Leave out random and seed, or unset INSTEP_DISABLE"
    ),
}
"""``INSTEP_DISABLE=1``: what changes the numbers of the plain loop, and needs an attachment, cannot be left out."""
