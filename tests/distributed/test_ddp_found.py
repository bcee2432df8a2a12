"""Programs on two ranks that were found to differ in silence."""

from typing import Any

from tests.distributed.pool import BodyFailedError, RankPool
from tests.parity.oracle import run_or_refuse_on_this_rank
from tests.parity.programs import Program, Step

BOTH = (True, True)
TAKEN = Step((BOTH,))


def broken(ranks: RankPool, **changed: Any) -> str | None:
    """What the program does against the contract."""
    program = Program(**{"optimizer": "AdamW-0-fused", "width": 8, "depth": 2, "bucket_bytes": 64, **changed})
    try:
        outcomes = ranks.run(run_or_refuse_on_this_rank, program, True)
    except BodyFailedError as error:
        return f"{changed}: {str(error).strip().splitlines()[-1]}"
    return None if len(set(outcomes)) == 1 else f"{changed}: {outcomes}"


def test_shard_state_after_backwards_without_communication(two_ranks: RankPool) -> None:
    found = [
        broken(two_ranks, way=way, steps=(TAKEN,) * 4, no_sync=True)
        for way in ("shard_state", "backward", "forward", "undo")
    ]
    assert not any(found), "\n".join(filter(None, found))
