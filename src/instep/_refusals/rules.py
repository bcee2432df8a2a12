"""The order in which ``attach`` asks for refusals: the first that fits is the one that is raised.

A rule raises ``AttachError`` where it refuses, and changes nothing. It is a function of ``options.py``, ``model.py`` or
``optimizers.py``, or a row of the table in ``pairs.py``, in capitals. ``attach`` goes through ``OPTIONS`` first. Where
nothing but the default was asked for, ``left_to_torch`` says whether torch has to take each step; then only
``LEFT_TO_TORCH`` is asked. With ``INSTEP_DISABLE=1`` it is ``DISABLED``, and else ``MODEL`` and ``PARAMETERS``.
"""

from collections.abc import Callable, Sequence

from instep._refusals import model, optimizers, options, pairs
from instep.errors import AttachError
from instep.options import Options
from instep.target import Target

Rule = Callable[[Target, Options], None]
"""Raises ``AttachError`` where it refuses."""

OPTIONS: Sequence[Rule] = (
    optimizers.given_twice,
    # The values that the rows below compare.
    options.invalid_schedule,
    options.invalid_defer,
    pairs.DEFER_IN_HOOKS,
    options.invalid_bucket_bytes,
    options.invalid_shard_state,
    options.invalid_clip,
    options.invalid_accumulation_steps,
    options.invalid_scaler,
    options.invalid_undo,
    options.invalid_nonfinite,
    # What is known when the first weight is written: these messages name a way to have all of what was asked for.
    pairs.SKIP_WITH_BACKWARD,
    pairs.SKIP_WITH_CLIP_THAT_RAISES,
    pairs.UNDO_WITH_FORWARD,
    pairs.MODE_WITH_FORWARD,
    pairs.EXACT_WITH_BACKWARD,
    pairs.MODE_WITH_UNDO,
    pairs.SCALER_WITH_BACKWARD,
    # The options that came later, each with those before it.
    options.invalid_offload,
    pairs.OFFLOAD_WITH_SHARD_STATE,
    options.invalid_random,
    options.random_or_seed_alone,
    options.invalid_seed,
)
"""Each option by itself, and with the others: a row that compares values comes after those that look at each."""
MODEL: Sequence[Rule] = (
    # No other model or wrapper would help an optimizer that cannot be split.
    optimizers.unsupported,
    optimizers.without_calls_around_the_step,
    optimizers.keyed_without_hooks,
    model.other_than_the_stages,
    pairs.PIPELINE_WITH_ACCUMULATION_STEPS,
    pairs.PIPELINE_WITH_TWO_PASS,
    pairs.PIPELINE_WITH_COMMUNICATION,
    pairs.PIPELINE_WITH_FSDP1,
    model.sharded_among_several,
    pairs.MIXED_PRECISION_WITH_SEVERAL_MODELS,
    model.fsdp1_with_flat_parameters,
    pairs.RANDOM_WITH_FSDP1,
    pairs.BUCKET_BYTES_WITH_FSDP,
    pairs.MIXED_PRECISION_WITH_FSDP,
    pairs.CLIP_NORM_WITH_FSDP1,
    pairs.TWO_PASS_WITH_FULLY_SHARD,
    # DDP and replicate. A hook is looked at by itself where there is a model to call it.
    pairs.BUCKET_BYTES_WITH_DDP,
    model.ddp_with_mixed_precision,
    pairs.COMM_HOOK_WITH_REPLICATE,
    options.invalid_comm_hook,
    pairs.COMM_HOOK_WITHOUT_DDP,
    options.comm_hook_that_cannot_be_called,
    options.invalid_mixed_precision,
    options.mixed_precision_without_floats,
    pairs.PARAM_DTYPE_WITH_SPARSE_GRADIENTS,
    pairs.REDUCE_DTYPE_ON_ONE_DEVICE,
    pairs.REDUCE_DTYPE_WITH_COMM_HOOK,
    model.scripted,
    # What stands on DDP's buckets.
    pairs.SHARD_STATE_WITHOUT_DDP,
    pairs.CLIP_VALUE_WITH_SHARDS_OF_WHOLE_PARAMETERS,
    pairs.UNDO_WITH_SHARD_STATE,
    pairs.TWO_PASS_WITH_SHARD_STATE,
    pairs.COMM_HOOK_WITH_SHARD_STATE,
    model.parameters_without_shards,
)
"""The model and its wrappers, with these options."""
_WRONG: Sequence[Rule] = (model.no_parameters, model.not_a_leaf, model.attached_already)
"""Wrong in itself, whatever is asked for."""
_TORCH_ALONE: Sequence[Rule] = (
    model.unknown_to_the_model,
    model.in_two_groups,
    model.without_a_shape,
    model.stepped_in_backward,
)
"""What torch's own ``step()`` steps, or leaves alone, as any loop has it."""
PARAMETERS: Sequence[Rule] = (
    *_WRONG,
    *_TORCH_ALONE,
    model.on_meta,
    model.gradients_of_another_dtype,
    model.all_frozen,
    # From here on every parameter is known by its name, and can be stepped.
    pairs.OFFLOAD_ON_CPU,
    model.ddp_with_delayed_reductions,
    model.ddp_around_the_model,
    model.shared_memory,
    pairs.PER_BUCKET_WITH_UNUSED_PARAMETERS,
    pairs.TWO_PASS_WITH_PARAMETERS_OUTSIDE,
)
"""The parameters, which have their names once the shards of ``fully_shard`` are in their places."""
TORCHS: Sequence[Rule] = (
    optimizers.unlike_torchs,
    model.scripted,
    model.sharded_among_several,
    model.fsdp1_with_flat_parameters,
    model.ddp_with_mixed_precision,
    model.ddp_with_delayed_reductions,
    model.ddp_around_the_model,
    *_TORCH_ALONE,
    model.on_meta,
    model.gradients_of_another_dtype,
    model.shared_memory,
)
"""What is left to torch, whole, where nothing but the default was asked for."""
LEFT_TO_TORCH: Sequence[Rule] = _WRONG
"""Of such a model, in place of ``MODEL`` and ``PARAMETERS``."""
DISABLED: Sequence[Rule] = (
    optimizers.unsupported,
    model.other_than_the_stages,
    model.sharded_among_several,
    pairs.PER_BUCKET_WITH_DISABLE,
    pairs.COMM_HOOK_WITH_DISABLE,
    pairs.MIXED_PRECISION_WITH_DISABLE,
    pairs.RANDOM_WITH_DISABLE,
    *_WRONG,
    *_TORCH_ALONE,
    model.all_frozen,
)
"""With ``INSTEP_DISABLE=1``, in place of ``MODEL`` and ``PARAMETERS``."""


def left_to_torch(target: Target, options: Options) -> str | None:
    """Why nobody but torch can step this model; ``None``: somebody can, or more than the default was asked for."""
    if options.takes_any_loop:
        try:
            refuse(TORCHS, target, options)
        except AttachError as error:
            return str(error)
    return None


def refuse(rules: Sequence[Rule], target: Target, options: Options) -> None:
    """Raise what the first rule that refuses says."""
    for rule in rules:
        rule(target, options)
