"""The arithmetic on spans, by cases and against counting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep_tools.report.spans import busy, exposed, outside, title, union, within


@pytest.mark.parametrize(
    ("given_parts", "merged"),
    [
        pytest.param([], [], id="none"),
        pytest.param([(1, 1)], [], id="empty"),
        pytest.param([(2, 1)], [], id="backwards"),
        pytest.param([(0, 1), (2, 3)], [(0, 1), (2, 3)], id="apart"),
        pytest.param([(2, 3), (0, 1)], [(0, 1), (2, 3)], id="out of order"),
        pytest.param([(0, 1), (1, 2)], [(0, 2)], id="touching"),
        pytest.param([(0, 2), (1, 3)], [(0, 3)], id="overlapping"),
        pytest.param([(0, 9), (1, 2), (3, 4)], [(0, 9)], id="nested"),
        pytest.param([(0, 1), (0, 1)], [(0, 1)], id="twice"),
        pytest.param([(0, 1), (1, 1), (5, 5)], [(0, 1)], id="with empty ones"),
    ],
)
def test_union(given_parts: list[tuple[float, float]], merged: list[tuple[float, float]]) -> None:
    assert union(given_parts) == merged


@pytest.mark.parametrize(
    ("steps", "cover", "left"),
    [
        pytest.param([], [], 0, id="nothing"),
        pytest.param([], [(0, 9)], 0, id="no steps"),
        pytest.param([(0, 3)], [], 3, id="no cover"),
        pytest.param([(0, 3)], [(3, 9)], 3, id="cover touches the end"),
        pytest.param([(3, 5)], [(0, 3)], 2, id="cover touches the start"),
        pytest.param([(1, 2)], [(0, 9)], 0, id="hidden"),
        pytest.param([(1, 2)], [(1, 2)], 0, id="just hidden"),
        pytest.param([(0, 9)], [(2, 3), (5, 7)], 6, id="cover inside"),
        pytest.param([(0, 4), (6, 9)], [(3, 7)], 5, id="cover across a gap"),
        pytest.param([(0, 4)], [(1, 3), (2, 3), (1, 2)], 2, id="nested cover counts once"),
        pytest.param([(0, 4), (1, 2)], [], 4, id="nested steps count once"),
        pytest.param([(0, 4)], [(2, 2)], 4, id="empty cover"),
        pytest.param([(2, 2)], [], 0, id="empty step"),
    ],
)
def test_exposed(steps: list[tuple[float, float]], cover: list[tuple[float, float]], left: float) -> None:
    assert exposed(steps, cover) == left


def test_a_fully_covered_step_leaves_exactly_nothing() -> None:
    """Subtracting sums of floats would leave a rounding error of either sign."""
    thirds = [(i * 0.1, (i + 1) * 0.1) for i in range(10)]
    assert exposed([(0.0, 1.0)], [*thirds, (0.9, 1.1)]) == 0.0


_INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6)


@given(_INTERVALS, _INTERVALS)
def test_equals_counting_unit_cells(steps: list[tuple[int, int]], cover: list[tuple[int, int]]) -> None:
    stepping = {cell for start, end in steps for cell in range(start, end)}
    covered = {cell for start, end in cover for cell in range(start, end)}
    assert busy(steps) == len(stepping)
    assert exposed(steps, cover) == len(stepping - covered)


def test_what_is_left_lies_where_it_was() -> None:
    assert outside([(0, 4), (6, 9)], [(3, 7)]) == [(0, 3), (7, 9)]
    assert within([(0, 4), (6, 9), (9, 10)], (3, 9)) == [(3, 4), (6, 9)]


def test_a_bucket_is_called_by_its_first_and_last() -> None:
    assert title(["w"]) == "w"
    assert title(["w", "b"]) == "w, b"
    assert title(["w", "x", "b"]) == "w … b (3 parameters)"
