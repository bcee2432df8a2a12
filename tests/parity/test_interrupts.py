"""Ctrl-C at a random point of a random program: the step stands as a whole, or not at all, or is called torn."""

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from tests.parity.interrupts import WayOut, run_interrupted
from tests.parity.programs import RIGHT, Program
from tests.parity.wild import EVERYTHING, plain_steps

NUMBER = st.integers(0, 2)
SHARE = st.floats(0, 1, exclude_max=True)
# Another program has other points: to shrink it is to search anew.
AS_FOUND = settings(EVERYTHING, phases=[Phase.explicit, Phase.generate])
WAY_OUT = st.sampled_from(["accept_torn", "load"])


def programs_in(way: str) -> st.SearchStrategy[Program]:
    return plain_steps(ways=(way,))


@pytest.mark.parametrize("way", RIGHT)
@given(data=st.data(), number=NUMBER, share=SHARE, way_out=WAY_OUT)
@settings(AS_FOUND, max_examples=5, derandomize=True)
def test_interrupted(way: str, data: st.DataObject, number: int, share: float, way_out: WayOut) -> None:
    event(run_interrupted(data.draw(programs_in(way)), number, share, way_out))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", RIGHT)
@given(data=st.data(), number=NUMBER, share=SHARE, way_out=WAY_OUT)
@settings(AS_FOUND, max_examples=200)
def test_often_interrupted(way: str, data: st.DataObject, number: int, share: float, way_out: WayOut) -> None:
    event(run_interrupted(data.draw(programs_in(way)), number, share, way_out))
