"""``attach(…, pipeline=)``: the weights, state, losses and norms of the schedule followed by ``optimizer.step()``."""

from functools import partial
from typing import Any

import pytest

from tests.distributed.pipelines import (
    MULTI,
    SINGLE,
    V_SHAPED,
    WAYS,
    Kind,
    both,
    by_momentum,
    clipped,
    one_of_each,
)
from tests.distributed.pool import RankPool

KINDS = [Kind(name) for name in SINGLE] + [Kind(name, per_rank=2) for name in MULTI]
by_schedule = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.schedule)
in_every_way = pytest.mark.parametrize("way", WAYS)


@in_every_way
@by_schedule
def test_every_schedule(two_ranks: RankPool, kind: Kind, way: str) -> None:
    two_ranks.run(both, kind, way)
