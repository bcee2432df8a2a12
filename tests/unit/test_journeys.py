"""How far a bucket, an iteration and ``attach`` travel through instep: files and calls, in the regular case.

Every file on the way is one that a reader has to open. The bounds are what was counted last: they only ever go down.
"""

import pytest

from tests.journeys import WAYS, Loop, Road, of_a_bucket

BOUNDS = {
    # Files, calls.
    "bucket": (15, 129),
    "backward": (26, 420),
    "forward": (30, 775),
    "default": (18, 222),
    "undo": (31, 925),
}
ATTACH = {"backward": 39, "forward": 42, "default": 43, "undo": 40}


def require_within(road: Road, files: int, calls: int) -> None:
    assert len(road.files) <= files, road.files
    assert len(road.calls) <= calls
    assert len(road.files) > 10  # else the road was not seen at all
    assert len(road.calls) > 100


def test_a_bucket() -> None:
    require_within(of_a_bucket(), *BOUNDS["bucket"])


@pytest.mark.parametrize("way", list(WAYS))
def test_an_iteration(way: str) -> None:
    loop = Loop(way)
    with loop.overlap:
        require_within(loop.road(), *BOUNDS[way])


@pytest.mark.parametrize("way", list(WAYS))
def test_attach(way: str) -> None:
    Loop(way).overlap.detach()  # modules are imported once
    loop = Loop(way)
    loop.overlap.detach()
    assert 30 < len(loop.attaching.files) <= ATTACH[way], loop.attaching.files
