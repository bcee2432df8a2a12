"""A loop dropped at a random moment of a random program leaves nothing behind."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity.dropping import KEPT, run_dropped
from tests.parity.edits import MOMENTS
from tests.parity.programs import Program
from tests.parity.wild import EVERYTHING, SOME, plain_steps

PROGRAMS = plain_steps()
MOMENT = st.sampled_from(MOMENTS)
KEEPS = st.frozensets(st.sampled_from(KEPT), max_size=2)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """What torch has loaded is there for good, and is not looked through again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@given(PROGRAMS, MOMENT, KEEPS)
@SOME
def test_dropped(program: Program, moment: str, kept: frozenset[str]) -> None:
    run_dropped(program, moment, kept)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@given(PROGRAMS, MOMENT, KEEPS)
@settings(EVERYTHING, max_examples=2_000)
def test_often_dropped(program: Program, moment: str, kept: frozenset[str]) -> None:
    run_dropped(program, moment, kept)
