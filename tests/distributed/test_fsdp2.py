import pytest, torch
from functools import partial
from tests.cases import optimizer_cases, two_groups
from tests.distributed.sharded import both, nested, WAYS
from tests.distributed.pool import RankPool

def _body(way, cls, kwargs):
    both(way, nested, lambda model: cls(two_groups(model), **kwargs))

@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("case", [c for c in optimizer_cases()], ids=lambda c: c[0])
def test_opt(two_ranks, way, case):
    two_ranks.run(_body, way, case[1], case[2])
