"""What does not go together: a table of pairs, of two options or of an option and a kind of model.

A ``Pair`` names its two ``Choice``s, says why they do not go together, and has the message of the error. It is called
as any other rule is. ``rules.py`` says in which order, so that a row may rely on those before it, and on
``options.py``: each value is one that its option takes. The documentation shows this table (``docs/features.md``), and
``python -m tests.pairs`` writes it there.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from instep._gradients.clipping import ClipNorm, Clipping, ClipValue
from instep._optim.kinds import is_elementwise
from instep._refusals.model import kind_of
from instep._refusals.optimizers import drawing_by_key
from instep._torch.versions import memory_of
from instep.errors import AttachError, class_name
from instep.options import BY_ENVIRONMENT, Communication, Options
from instep.sources.replicate.source import Replicated
from instep.target import Target


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the two in a pair: a value of an option, or a kind of model.

    Attributes:
        text: how the documentation names it.
        holds: whether the call of ``attach`` has chosen it.
    """

    text: str
    holds: Callable[[Target, Options], bool]


@dataclass(frozen=True, slots=True)
class Pair:
    """A row of the table: an option that does not go with another, or with a kind of model.

    Attributes:
        option: the option that is best left out. No default is one.
        other: what the option does not go with.
        reason: why, for the documentation. The message says it in more words.
        message: of the error. It names what was found, and says what to do.
    """

    option: Choice
    other: Choice
    reason: str
    message: str | Callable[[Target, Options], str]

    def __call__(self, target: Target, options: Options) -> None:
        # The option first: it is cheap to ask for, and what is asked of a model may rely on it.
        if self.option.holds(target, options) and self.other.holds(target, options):
            raise AttachError(self.message if isinstance(self.message, str) else self.message(target, options))


# Choices of several rows. Here and in the table, ``t`` is the ``Target`` and ``o`` the ``Options``.

_FORWARD = Choice('`schedule="forward"`', lambda t, o: o.schedule == "forward")
_BACKWARD_WITHOUT_UNDO = Choice(
    '`schedule="backward"` without `undo`', lambda t, o: o.schedule == "backward" and not o.undo
)
_BUCKET_BYTES = Choice("`bucket_bytes`", lambda t, o: o.bucket_bytes is not None)
_NOT_EXACT = Choice('`ClipNorm(mode=…)` other than `"exact"`', lambda t, o: _mode(o) not in (None, "exact"))
_TWO_PASS = Choice('`ClipNorm(mode="two_pass")`', lambda t, o: _mode(o) == "two_pass")
_PER_BUCKET = Choice('`ClipNorm(mode="per_bucket")`', lambda t, o: Clipping(o.clip).clips_buckets)
_UNDO = Choice("`undo`", lambda t, o: bool(o.undo))
_SKIP = Choice('`nonfinite="skip"`', lambda t, o: o.nonfinite == "skip")
_COMM_HOOK = Choice("`comm_hook`", lambda t, o: o.communication.comm_hook is not None)
_MIXED_PRECISION = Choice("`mixed_precision`", lambda t, o: o.communication.mixed_precision is not None)
_REDUCE_DTYPE = Choice("`mixed_precision` with `reduce_dtype`", lambda t, o: _dtype(o, "reduce_dtype") is not None)
_SHARD_STATE = Choice("`shard_state=True`", lambda t, o: o.communication.shard_state)
_OFFLOAD = Choice('`offload="host"`', lambda t, o: o.offload is not None)
_KEYED = Choice('`random="keyed"` and an optimizer that is not torch\'s own', lambda t, o: bool(drawing_by_key(t, o)))
_NOT_ONE_DDP = Choice("a model without exactly one `DistributedDataParallel`", lambda t, o: len(t.ddps) != 1)
_PIPELINE = Choice("`pipeline`", lambda t, o: o.communication.pipeline is not None)
_FSDP1 = Choice("`FullyShardedDataParallel`", lambda t, o: bool(t.fsdp1))
_FSDP = Choice("`fully_shard` or `FullyShardedDataParallel`", lambda t, o: bool(t.fsdp1 or t.fsdp2))
_DISABLED = Choice("`INSTEP_DISABLE=1`", lambda t, o: o.left_to_torch == BY_ENVIRONMENT)


def _mode(options: Options) -> str | None:
    return options.clip.mode if isinstance(options.clip, ClipNorm) else None


def _dtype(options: Options, name: str) -> torch.dtype | None:
    """A dtype of the policy ``mixed_precision``, by name."""
    dtype: torch.dtype | None = getattr(options.communication.mixed_precision, name, None)
    return dtype


# Schedules: what is known when the first weight is written.

DEFER_IN_HOOKS = Pair(
    Choice('`defer=True` with `schedule="backward"`', lambda t, o: o.defer is True and o.schedule == "backward"),
    Choice(
        "`undo`, `clip`, `nonfinite`, `offload` or `random`",
        lambda t, o: not o.may_update_beside_backward and not o.disabled,
    ),
    "these have a part in each update, which runs in the hook therefore",
    lambda t, o: (
        "defer=True with schedule='backward' has a thread update buckets beside backward, and "
        f"{' and '.join(_in_updates(o))} would have a part in each update, which must run in the hook. Leave out "
        "defer=True"
    ),
)


def _in_updates(options: Options) -> list[str]:
    """The options given that have a part in each update in backward."""
    settings = {
        "undo": options.undo,
        "clip": options.clip,
        "scaler": options.scaler,
        "nonfinite": options.nonfinite != "allow",
        "offload": options.offload,
        "random": options.randomness.random,
    }
    return [name for name, given in settings.items() if given]


UNDO_WITH_FORWARD = Pair(
    _UNDO,
    _FORWARD,
    "nothing is written before `step()`",
    lambda t, o: (
        f"undo={o.undo!r} is for schedule='backward': with schedule='forward' nothing is written before "
        "optimizer.step(). Leave it out"
    ),
)
SCALER_WITH_BACKWARD = Pair(
    Choice("`scaler`", lambda t, o: o.scaler is not None),
    _BACKWARD_WITHOUT_UNDO,
    "weights are updated before the scaler has seen whether a gradient is infinite",
    lambda t, o: (
        "scaler: with schedule='backward' weights are updated before GradScaler has seen whether a gradient is "
        f"infinite. Use {'' if o.communication.shard_state else 'undo=True, with which such a step is put back, or '}"
        "schedule='forward', which needs no scaler argument"
    ),
)
SKIP_WITH_BACKWARD = Pair(
    _SKIP,
    _BACKWARD_WITHOUT_UNDO,
    "every gradient is needed before the first update",
    lambda t, o: (
        "nonfinite='skip' needs every gradient before the first update, and schedule='backward' updates during "
        "backward. Use schedule='forward'"
        f"{'' if o.communication.shard_state else ', or undo=True, with which such a step is put back'}; or "
        "nonfinite='raise'"
    ),
)
SKIP_WITH_CLIP_THAT_RAISES = Pair(
    _SKIP,
    Choice(
        "`ClipNorm(error_if_nonfinite=True)`", lambda t, o: isinstance(o.clip, ClipNorm) and o.clip.error_if_nonfinite
    ),
    "one leaves out the steps for which the other raises",
    "nonfinite='skip' leaves out the steps for which ClipNorm(error_if_nonfinite=True) raises. Leave one out",
)
MODE_WITH_FORWARD = Pair(
    _NOT_EXACT,
    _FORWARD,
    'the norm is known before anything is written, and `"exact"` costs nothing',
    lambda t, o: (
        f"ClipNorm(mode={_mode(o)!r}) is for schedule='backward': with schedule='forward' the norm is known before "
        "anything is written, and mode='exact' costs nothing. Leave it out"
    ),
)
MODE_WITH_UNDO = Pair(
    _NOT_EXACT,
    _UNDO,
    '`"exact"` goes with `undo`',
    lambda t, o: (
        f"ClipNorm(mode={_mode(o)!r}) does not go with undo={o.undo!r}, with which mode='exact' does. Use that, or "
        "leave out undo"
    ),
)


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
    if not scales:
        ways.append("or, as other algorithms, mode='per_bucket' or mode='previous_norm'")
    return (
        "ClipNorm(mode='exact') needs every gradient before the first update, and schedule='backward' updates "
        f"during backward. Choose {'; '.join(ways)}"
    )


EXACT_WITH_BACKWARD = Pair(
    # FullyShardedDataParallel takes no mode of ClipNorm, and has a row of its own.
    Choice('`ClipNorm(mode="exact")`', lambda t, o: _mode(o) == "exact" and not t.fsdp1),
    _BACKWARD_WITHOUT_UNDO,
    "every gradient is needed before the first update",
    _ways_to_clip,
)

# Offloading, and random numbers.

OFFLOAD_WITH_SHARD_STATE = Pair(
    _OFFLOAD,
    _SHARD_STATE,
    "optimizer state is sent between the ranks' devices",
    lambda t, o: (
        f"offload={o.offload!r} does not go with shard_state=True, which sends optimizer state between the ranks' "
        "devices in state_dict() and detach(). Leave out one of the two"
    ),
)
OFFLOAD_ON_CPU = Pair(
    _OFFLOAD,
    Choice("parameters on a CPU", lambda t, o: _found_on_cpu(t) is not None),
    "optimizer state is in host memory as it is",
    lambda t, o: (
        f"offload={o.offload!r} keeps optimizer state in host memory, away from an accelerator, and the parameter "
        f"{_found_on_cpu(t)}: leave out offload"
    ),
)


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


# DistributedDataParallel and ``replicate``.

BUCKET_BYTES_WITH_DDP = Pair(
    _BUCKET_BYTES,
    Choice("`DistributedDataParallel` or `replicate`", lambda t, o: bool(t.wrapped)),
    "it makes buckets of its own",
    lambda t, o: (
        f"bucket_bytes={o.bucket_bytes} does not apply to {kind_of(t.wrapped[0])}, which makes its own buckets: leave "
        f"it out, and give {'replicate' if isinstance(t.wrapped[0], Replicated) else kind_of(t.wrapped[0])}"
        "(bucket_cap_mb=…) instead"
    ),
)
COMM_HOOK_WITH_REPLICATE = Pair(
    _COMM_HOOK,
    Choice("`replicate`", lambda t, o: any(isinstance(wrapper, Replicated) for wrapper in t.wrapped)),
    "a hook is called with DDP's buckets",
    "comm_hook is for DistributedDataParallel, whose buckets it is called with; this model is replicated. Leave it out "
    "(mixed_precision with reduce_dtype sends fewer bits), or use DistributedDataParallel",
)
COMM_HOOK_WITHOUT_DDP = Pair(
    _COMM_HOOK,
    _NOT_ONE_DDP,
    "a hook is called with DDP's buckets",
    lambda t, o: f"comm_hook is for a model with one DistributedDataParallel, and {_count_of_ddps(t)} in this model",
)
PER_BUCKET_WITH_UNUSED_PARAMETERS = Pair(
    _PER_BUCKET,
    Choice(
        "`find_unused_parameters=True`",
        lambda t, o: any(getattr(wrapper, "find_unused_parameters", False) for wrapper in t.wrapped),
    ),
    "ranks that use other parameters would clip by other norms",
    lambda t, o: (
        "clip=ClipNorm(mode='per_bucket') does not go with find_unused_parameters=True: ranks that use other "
        "parameters would clip by other norms, and part. Use "
        + (
            "mode='previous_norm'; or leave out mode, and use schedule='forward'"
            if o.communication.shard_state
            else "mode='previous_norm' or mode='two_pass'; or leave out mode, and use undo=True or schedule='forward'"
        )
    ),
)
TWO_PASS_WITH_PARAMETERS_OUTSIDE = Pair(
    _TWO_PASS,
    Choice("a `DistributedDataParallel` that has some of the parameters", lambda t, o: _outside_of_ddp(t) is not None),
    "DDP's norms are known after one backward, those of other parameters after two",
    lambda t, o: (
        "clip=ClipNorm(mode='two_pass') is for a model all of whose parameters are in one DistributedDataParallel, or "
        f"none; {_outside_of_ddp(t)!r} is outside of it. Leave out mode, and use schedule='forward'"
    ),
)


def _count_of_ddps(target: Target) -> str:
    """How many there are, as both messages that ask for one say it."""
    return f"there are {len(target.ddps)}" if target.ddps else "there is none"


def _outside_of_ddp(target: Target) -> str | None:
    """The first parameter that no DDP reduces, where DDP reduces others."""
    reduced = set[int]().union(*target.reduced.values())
    optimized = set(map(id, target.optimized))
    outside = [places[0].name for key, (_, places) in target.names.items() if key in optimized - reduced]
    return outside[0] if outside and optimized & reduced else None


# Pipelines, whose micro-batches and communication are the schedule's.

PIPELINE_WITH_ACCUMULATION_STEPS = Pair(
    Choice("`accumulation_steps`", lambda t, o: o.accumulation_steps > 1),
    _PIPELINE,
    "the schedule has micro-batches of its own",
    lambda t, o: (
        f"accumulation_steps={o.accumulation_steps} does not go with pipeline=, which has {_micro_batches(o)} in each "
        "schedule.step(…). Leave it out; to add up several of these calls, put `with overlap.accumulate():` around all "
        "but the last"
    ),
)
PIPELINE_WITH_TWO_PASS = Pair(
    _TWO_PASS,
    _PIPELINE,
    "the schedule runs backward once",
    "clip=ClipNorm(mode='two_pass') does not go with pipeline=, whose schedule runs each backward once. Leave out "
    "mode, and use undo=True or schedule='forward'",
)
PIPELINE_WITH_COMMUNICATION = Pair(
    Choice(
        "`comm_hook`, `mixed_precision` or `shard_state`",
        lambda t, o: bool(_of_communication(o)),
    ),
    _PIPELINE,
    "the schedule says when gradients are sent",
    lambda t, o: (
        f"{' and '.join(_of_communication(o))} does not go with pipeline=, whose schedule says when a stage computes, "
        "and when it sends. Leave it out"
    ),
)
PIPELINE_WITH_FSDP1 = Pair(
    _PIPELINE,
    Choice("`FullyShardedDataParallel` or `replicate`", lambda t, o: bool(t.fsdp1) or len(t.ddps) < len(t.wrapped)),
    "torch's stages know of DDP and `fully_shard`",
    lambda t, o: (
        f"pipeline= does not go with {'FullyShardedDataParallel' if t.fsdp1 else 'instep.replicate'}, of which torch's "
        "stages know nothing: each of their backwards would reduce gradients. Use DistributedDataParallel, or "
        "fully_shard"
    ),
)


def _micro_batches(options: Options) -> str:
    assert options.communication.pipeline is not None
    count = options.communication.pipeline.micro_batches
    return f"{count} micro-{'batch' if count == 1 else 'batches'}"


def _of_communication(options: Options) -> list[str]:
    """Those beside ``pipeline`` that were given."""
    usual = Communication()
    names = (field.name for field in fields(usual) if field.name != "pipeline")
    return [name for name in names if getattr(options.communication, name) != getattr(usual, name)]


# FSDP.

BUCKET_BYTES_WITH_FSDP = Pair(
    _BUCKET_BYTES,
    _FSDP,
    "FSDP's groups are stepped as they are reduced",
    lambda t, o: (
        f"bucket_bytes={o.bucket_bytes} does not apply to a model that {_kind_of_fsdp(t)} has divided into groups, "
        "which are stepped as they are reduced: leave it out, and shard other modules"
    ),
)
MIXED_PRECISION_WITH_FSDP = Pair(
    _MIXED_PRECISION,
    _FSDP,
    "FSDP has mixed precision of its own",
    lambda t, o: (
        f"mixed_precision is for one device and DistributedDataParallel. {_kind_of_fsdp(t)} has mixed precision of its "
        "own: fully_shard(…, mp_policy=…), FullyShardedDataParallel(…, mixed_precision=…)"
    ),
)
CLIP_NORM_WITH_FSDP1 = Pair(
    Choice("`clip=ClipNorm(…)`", lambda t, o: isinstance(o.clip, ClipNorm)),
    _FSDP1,
    "its shards have a norm of their own: call `model.clip_grad_norm_(…)`",
    "clip=ClipNorm(…) does not go with FullyShardedDataParallel, whose shards have a norm of their own: call "
    "model.clip_grad_norm_(…) between backward() and optimizer.step(), with schedule='forward' or undo=True; or use "
    "fully_shard",
)
TWO_PASS_WITH_FULLY_SHARD = Pair(
    _TWO_PASS,
    Choice("`fully_shard`", lambda t, o: bool(t.fsdp2)),
    "the first pass would reduce the gradients, too",
    "clip=ClipNorm(mode='two_pass') does not go with fully_shard, whose first pass would reduce the gradients too. Use "
    "schedule='forward' or undo=True, with which mode='exact' does",
)
RANDOM_WITH_FSDP1 = Pair(
    _KEYED,
    _FSDP1,
    # The pieces change with the number of ranks, and have no index that is the same on all of them.
    "its parameters are pieces without a place in the model",
    "random='keyed' does not go with FullyShardedDataParallel, whose parameters are pieces without a place of their "
    "own in the model. Use fully_shard",
)


def _kind_of_fsdp(target: Target) -> str:
    """The wrapper that messages name. A model may have both: then it is FSDP1, which takes fewer options."""
    return "FullyShardedDataParallel" if target.fsdp1 else "fully_shard"


# Mixed precision.

MIXED_PRECISION_WITH_SEVERAL_MODELS = Pair(
    _MIXED_PRECISION,
    Choice("a list of modules", lambda t, o: len(t.called) > 1),
    "casts are made inside the forward of one model",
    "mixed_precision casts inside the forward of one model, and model is a list. Attach each module with an optimizer "
    "of its own, or the module that holds them all",
)
PARAM_DTYPE_WITH_SPARSE_GRADIENTS = Pair(
    Choice("`mixed_precision` with `param_dtype`", lambda t, o: _dtype(o, "param_dtype") is not None),
    Choice("a module with `sparse=True`", lambda t, o: bool(_sparse_modules(t))),
    "sparse gradients do not come back through a cast",
    lambda t, o: (
        f"mixed_precision: {_sparse_modules(t)[0]!r} has sparse gradients, which do not come back through a cast. "
        "Build it with sparse=False, or leave out param_dtype"
    ),
)
REDUCE_DTYPE_ON_ONE_DEVICE = Pair(
    _REDUCE_DTYPE,
    Choice("a model on one device", lambda t, o: not t.wrapped),
    "nothing is reduced",
    lambda t, o: (
        f"mixed_precision: reduce_dtype={_dtype(o, 'reduce_dtype')} is for DistributedDataParallel and replicate; "
        "nothing is reduced on one device. Leave it out"
    ),
)
REDUCE_DTYPE_WITH_COMM_HOOK = Pair(
    _REDUCE_DTYPE,
    _COMM_HOOK,
    "the hook decides how gradients are sent",
    lambda t, o: (
        f"mixed_precision: reduce_dtype={_dtype(o, 'reduce_dtype')} has no effect with comm_hook, which decides how "
        "gradients are sent. Leave one of them out"
    ),
)


def _sparse_modules(target: Target) -> list[str]:
    """The names of the modules that ask autograd for sparse gradients, as ``nn.Embedding(sparse=True)`` does."""
    return [name for name, module in target.model.named_modules() if getattr(module, "sparse", False)]


# Optimizer state that is divided among the ranks.

SHARD_STATE_WITHOUT_DDP = Pair(
    _SHARD_STATE,
    _NOT_ONE_DDP,
    "state is divided by DDP's buckets",
    lambda t, o: (
        f"shard_state=True is for a model with one DistributedDataParallel, and {_count_of_ddps(t)} in this model. "
        f"Leave it out{': FSDP shards the state by itself' if t.fsdp1 or t.fsdp2 else ', or wrap the model in one'}"
    ),
)
CLIP_VALUE_WITH_SHARDS_OF_WHOLE_PARAMETERS = Pair(
    Choice("`clip=ClipValue(…)`", lambda t, o: isinstance(o.clip, ClipValue)),
    Choice(
        '`shard_state=True`, `schedule="backward"` and an optimizer that is not known to be elementwise',
        lambda t, o: o.communication.shard_state and o.schedule == "backward" and bool(_not_elementwise(t)),
    ),
    "the gradient of a whole parameter is on another rank",
    lambda t, o: (
        f"clip=ClipValue does not go with shard_state=True and {_not_elementwise(t)[0]}, whose update is not known to "
        "be elementwise, while backward runs: use schedule='forward'"
    ),
)
UNDO_WITH_SHARD_STATE = Pair(
    _UNDO,
    _SHARD_STATE,
    "a step is not known to stand on all ranks before the rows have been gathered",
    lambda t, o: (
        f"undo={o.undo!r} does not go with shard_state=True: a step is not known to stand on all ranks before the rows "
        "have been gathered. Leave out one of the two"
    ),
)
TWO_PASS_WITH_SHARD_STATE = Pair(
    _TWO_PASS,
    _SHARD_STATE,
    "each rank has its own rows of the reduced gradients alone",
    "clip=ClipNorm(mode='two_pass') does not go with shard_state=True: leave out mode, and use schedule='forward'",
)
COMM_HOOK_WITH_SHARD_STATE = Pair(
    _COMM_HOOK,
    _SHARD_STATE,
    "gradients are sent in another way",
    "comm_hook does not go with shard_state=True, which sends the gradients in a way of its own. Leave one out",
)

# ``INSTEP_DISABLE=1``: what changes the numbers of the plain loop, and needs an attachment, cannot be left out.

PER_BUCKET_WITH_DISABLE = Pair(
    _PER_BUCKET,
    _DISABLED,
    "the plain loop has no buckets",
    "INSTEP_DISABLE is set, and clip=ClipNorm(mode='per_bucket') clips bucket by bucket: the plain loop has no "
    "buckets. Use another mode, or unset INSTEP_DISABLE",
)


def _has_other_numbers(name: str) -> str:
    return (
        f"INSTEP_DISABLE is set, and {name} changes the numbers of the plain loop, which cannot have it from instep. "
        "Leave it out (register_comm_hook and torch.autocast are torch's own), or unset INSTEP_DISABLE"
    )


COMM_HOOK_WITH_DISABLE = Pair(
    _COMM_HOOK, _DISABLED, "the plain loop has other numbers", _has_other_numbers("comm_hook")
)
MIXED_PRECISION_WITH_DISABLE = Pair(
    _MIXED_PRECISION, _DISABLED, "the plain loop has other numbers", _has_other_numbers("mixed_precision")
)
RANDOM_WITH_DISABLE = Pair(
    _KEYED,
    _DISABLED,
    "the plain loop draws other numbers",
    lambda t, o: (
        f"INSTEP_DISABLE is set, and random='keyed' changes what {class_name(drawing_by_key(t, o)[0])} draws: the "
        "plain loop cannot have these numbers. Leave out random and seed, or unset INSTEP_DISABLE"
    ),
)
