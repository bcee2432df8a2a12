"""What only an attachment knows of a run that goes on from a checkpoint.

The keys are the same always, before the first step too, and each has a value of one type: torch's distributed
checkpoints (DCP) ask ``state_dict()`` first, for what they are to read. It may not raise then, whatever has happened:
the checkpoint may be what mends it. All ranks have the same values: DCP takes entries of one name for copies.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from instep._wiring.build import Parts
from instep.errors import CheckpointError

STEPS, SEED, DRAWS = "step_count", "seed", "draws"
STAGES, WHOLE = "stages", "whole"
_KEYS = (STEPS, SEED, DRAWS, STAGES, WHOLE)
_NO_SEED = -1


def saved_state(parts: Parts, stages: int) -> dict[str, Any]:
    """See ``Attachment.state_dict``.

    Args:
        stages: how many the pipeline has, on all ranks; 0: there is none.
    """
    with suppress(Exception):  # what it says is in the state of the schedule, too
        parts.schedule.synchronize()
    draws = parts.draws
    return {
        STEPS: parts.schedule.step_count,
        SEED: _NO_SEED if draws is None else draws.seed,
        DRAWS: 0 if draws is None else draws.number,
        STAGES: stages,
        WHOLE: parts.schedule.state not in ("torn", "open"),
    }


def load_state(parts: Parts, state: Mapping[str, Any], stages: int) -> None:
    """See ``Attachment.load_state_dict``; ``stages`` as in ``saved_state``."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"state_dict must be what overlap.state_dict() has returned, not {state!r}")
    for key in _KEYS:
        if key not in state:
            raise CheckpointError(f"state_dict has no {key!r}: give what overlap.state_dict() has returned")
    if type(state[STEPS]) is not int or state[STEPS] < 0:
        raise CheckpointError(f"state_dict has {STEPS!r}: {state[STEPS]!r}, which is no number of steps")
    schedule, draws = parts.schedule, parts.draws
    if not state[WHOLE]:
        raise CheckpointError(
            f"the checkpoint was saved in the middle of step {state[STEPS] + 1}, or after a part of it: load an "
            "earlier one. overlap.require_committed() before a save says so in time"
        )
    seed = _NO_SEED if draws is None else draws.seed
    if state[SEED] != seed:
        raise CheckpointError(
            f"the checkpoint was saved with {_in_words(state[SEED])}, and this model is attached with "
            f"{_in_words(seed)}: it would draw otherwise. Attach as the run that saved was"
        )
    if state[STAGES] != stages and state[STAGES] and stages:
        # torch reads what has a name in the template: of a longer pipeline the rest would be left out.
        raise CheckpointError(
            f"the checkpoint is of a pipeline of {state[STAGES]} stages, and this one has {stages}: they hold other "
            "parts of the model. Load the model without instep and divide it anew"
        )
    schedule.cast_owed()  # others may wait for what this rank says of a step that it has left out
    schedule.give_up(gradients=True)
    parts.votes.start_anew()  # all ranks begin again at the same step, whatever they have said of the last one
    if draws is not None:
        draws.earlier = state[DRAWS] - state[STEPS]
    schedule.step_count = state[STEPS]


def _in_words(seed: int) -> str:
    return "no random='keyed'" if seed == _NO_SEED else f"random='keyed', seed={seed}"
