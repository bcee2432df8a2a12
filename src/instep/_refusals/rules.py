"""All refusals, in the order in which they are asked: the first that fits is the one that is raised."""

from collections.abc import Callable, Sequence

from instep._refusals import (
    accumulation,
    checking,
    clipping,
    comm_hook,
    crossing,
    ddp,
    disabled,
    fsdp,
    mixed_precision,
    model,
    nonfinite,
    offload,
    optimizers,
    parameters,
    randomness,
    schedule,
    shard_state,
    undo,
)
from instep.errors import AttachError
from instep.options import Options
from instep.target import Target

Rule = Callable[[Target, Options], None]
"""Raises ``AttachError`` where it refuses."""

# Each option by itself, and with the others: of these, those that ask what the options are come first.
OPTIONS: Sequence[Rule] = (
    optimizers.given_twice,
    schedule.unknown,
    schedule.defer,
    schedule.bucket_bytes,
    crossing.no_flag,
    shard_state.no_flag,
    clipping.no_policy,
    accumulation.no_number,
    undo.no_scaler,
    undo.unknown,
    nonfinite.unknown,
    nonfinite.skip_while_writing,
    nonfinite.skip_what_raises,
    undo.nothing_to_undo,
    clipping.mode_without_schedule,
    clipping.exact_while_writing,
    clipping.mode_with_undo,
    undo.scaled_gradients,
    offload.unknown,
    checking.no_number,
    checking.with_shards,
    offload.checked,
    offload.divided,
    randomness.unknown,
    randomness.no_pair,
    randomness.no_seed,
    randomness.checked,
)
# The model and its wrappers, with these options.
MODEL: Sequence[Rule] = (
    optimizers.unsupported,
    optimizers.asked_for_more,
    randomness.untold,
    model.sharded_among_several,
    model.cast_among_several,
    fsdp.flat_parameters,
    randomness.flat_shards,
    fsdp.groups_of_its_own,
    fsdp.precision_of_its_own,
    fsdp.norms,
    ddp.buckets_of_its_own,
    ddp.precision_of_its_own,
    comm_hook.replicated,
    comm_hook.no_pair,
    comm_hook.not_one_ddp,
    comm_hook.cannot_be_called,
    mixed_precision.no_policy,
    mixed_precision.no_floats,
    mixed_precision.sparse_gradients,
    mixed_precision.nothing_to_reduce,
    model.scripted,
    crossing.nothing_crosses,
    crossing.buckets_do_not_last,
    crossing.needs_all_gradients,
    crossing.sent_in_another_way,
    shard_state.not_one_ddp,
    shard_state.clips_what_is_elsewhere,
    shard_state.other_options,
    shard_state.other_parameters,
)
# Wrong in itself, whatever is asked for.
_WRONG: Sequence[Rule] = (parameters.none_at_all, parameters.derived, parameters.taken)
# What torch's own step() steps, or leaves alone, as any loop has it.
_TORCH_ALONE: Sequence[Rule] = (
    parameters.strangers,
    parameters.in_two_places,
    parameters.unmade,
    parameters.stepped_in_backward,
)
# The parameters, which have their names once the shards of fully_shard are in their places.
PARAMETERS: Sequence[Rule] = (
    *_WRONG,
    *_TORCH_ALONE,
    parameters.on_meta,
    parameters.gradients_of_another_dtype,
    parameters.all_frozen,
    offload.on_the_cpu,
    ddp.delayed,
    ddp.around_the_model,
    parameters.shared_memory,
    checking.unlike_parameters,
    clipping.unlike_norms_of_buckets,
    clipping.two_pass_in_part,
)
# What is left to torch, whole, where nothing but the default was asked for.
TORCHS: Sequence[Rule] = (
    optimizers.unlike_torchs,
    model.scripted,
    model.sharded_among_several,
    fsdp.flat_parameters,
    ddp.precision_of_its_own,
    ddp.delayed,
    ddp.around_the_model,
    *_TORCH_ALONE,
    parameters.on_meta,
    parameters.gradients_of_another_dtype,
    parameters.shared_memory,
)
# Of such a model, in place of the last two.
LEFT_TO_TORCH: Sequence[Rule] = _WRONG
# With INSTEP_DISABLE=1, in place of the last two.
DISABLED: Sequence[Rule] = (
    optimizers.unsupported,
    model.sharded_among_several,
    disabled.clipped_buckets,
    disabled.other_numbers,
    randomness.disabled,
    *_WRONG,
    *_TORCH_ALONE,
    parameters.all_frozen,
)


def left_to_torch(target: Target, options: Options) -> str | None:
    """Why nobody but torch can step this model, if any loop is to be taken."""
    if options.takes_any_loop:
        try:
            refuse(TORCHS, target, options)
        except AttachError as error:
            return str(error)
    return None


def refuse(rules: Sequence[Rule], target: Target, options: Options) -> None:
    for rule in rules:
        rule(target, options)
