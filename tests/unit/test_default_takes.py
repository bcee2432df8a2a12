"""What the default line may refuse: a call that is wrong in itself, and no loop that plain torch trains."""

from instep._refusals import rules

ASKED_FOR = {
    "optimizers.unsupported": "what splits a step",
    "optimizers.asked_for_more": "clip, nonfinite or check_steps",
    "randomness.untold": "random",
    "randomness.flat_shards": "random",
    "model.cast_among_several": "mixed_precision",
    "fsdp.groups_of_its_own": "bucket_bytes",
    "fsdp.precision_of_its_own": "mixed_precision",
    "fsdp.norms": "clip",
    "ddp.buckets_of_its_own": "bucket_bytes",
    "comm_hook.replicated": "comm_hook",
    "comm_hook.no_pair": "comm_hook",
    "comm_hook.not_one_ddp": "comm_hook",
    "comm_hook.cannot_be_called": "comm_hook",
    "mixed_precision.no_policy": "mixed_precision",
    "mixed_precision.no_floats": "mixed_precision",
    "mixed_precision.sparse_gradients": "mixed_precision",
    "mixed_precision.nothing_to_reduce": "mixed_precision",
    "crossing.nothing_crosses": "cross_iteration",
    "crossing.buckets_do_not_last": "cross_iteration",
    "crossing.needs_all_gradients": "cross_iteration",
    "crossing.sent_in_another_way": "cross_iteration",
    "shard_state.not_one_ddp": "shard_state",
    "shard_state.clips_what_is_elsewhere": "shard_state",
    "shard_state.other_options": "shard_state",
    "shard_state.other_parameters": "shard_state",
    "parameters.all_frozen": "anything",
    "offload.on_the_cpu": "offload",
    "checking.unlike_parameters": "check_steps",
    "clipping.unlike_norms_of_buckets": "clip",
    "clipping.two_pass_in_part": "clip",
}
"""By rule: the option without which it has nothing to refuse."""


def test_what_the_default_refuses_is_wrong_in_itself() -> None:
    """A new rule about models or parameters is one of three: plain torch trains such a loop, and it is left to torch;
    it concerns an option that was asked for; or the call is wrong whatever is asked for."""
    left_to_torch, wrong = set(rules.TORCHS), set(rules.LEFT_TO_TORCH)
    others = [rule for rule in (*rules.MODEL, *rules.PARAMETERS) if rule not in left_to_torch | wrong]
    names = {f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}" for rule in others}
    assert names == set(ASKED_FOR)
