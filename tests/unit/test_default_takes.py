"""What the default line may refuse: a call that is wrong in itself, and no loop that plain torch trains."""

from instep._refusals import rules
from instep._refusals.pairs import Pair

ASKED_FOR = {
    "optimizers.unsupported": "what splits a step",
    "optimizers.without_calls_around_the_step": "clip or nonfinite",
    "optimizers.keyed_without_hooks": "random",
    "options.comm_hook_that_cannot_be_called": "comm_hook",
    "options.mixed_precision_without_floats": "mixed_precision",
    "model.parameters_without_shards": "shard_state",
    "model.other_than_the_stages": "pipeline",
    "model.all_frozen": "anything",
}
"""By rule: the option without which it has nothing to refuse."""


def test_what_the_default_refuses_is_wrong_in_itself() -> None:
    """A new rule about models or parameters is one of three: plain torch trains such a loop, and it is left to torch;
    it concerns an option that was asked for; or the call is wrong whatever is asked for.

    A ``Pair`` concerns its option: ``test_pairs.py`` shows that no row refuses the default."""
    left_to_torch, wrong = set(rules.TORCHS), set(rules.LEFT_TO_TORCH)
    others = [rule for rule in (*rules.MODEL, *rules.PARAMETERS) if rule not in left_to_torch | wrong]
    functions = [rule for rule in others if not isinstance(rule, Pair)]
    names = {f"{rule.__module__.rpartition('.')[2]}.{getattr(rule, '__name__', rule)}" for rule in functions}
    assert names == set(ASKED_FOR)
