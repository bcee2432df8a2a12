"""The states of a step: what may happen in each, and what may not."""

from itertools import product
from pathlib import Path

import pytest

from instep._step.state import TRANSITIONS, Event, IllegalEventError, State, state_after

PAIRS = list(product(State, Event))


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda value: value.name)
def test_every_pair(state: State, event: Event) -> None:
    following = TRANSITIONS[event].get(state)
    if following is None:
        with pytest.raises(IllegalEventError, match=f"{event.name} .* {state.value}$"):
            state_after(state, event)
    else:
        assert state_after(state, event) is following


def test_a_torn_step_takes_nothing_more() -> None:
    """Until it is accepted or given up."""
    for event in Event:
        following = TRANSITIONS[event].get(State.TORN)
        assert following in ((State.IDLE,) if event is Event.GIVEN_UP else (State.TORN, None)), event


def test_a_step_begins_outside_of_another_one() -> None:
    for state in (State.STEPPING, State.REDOING, State.TORN):
        with pytest.raises(IllegalEventError):
            state_after(state, Event.STEP_BEGINS)


def test_a_step_is_committed_only_by_the_call_that_ends_it() -> None:
    """From IDLE too: Ctrl-C may have come while it was."""
    for state in (State.OPEN, State.REDO):
        with pytest.raises(IllegalEventError):
            state_after(state, Event.COMMITTED)


def test_what_was_rolled_back_is_done_again_or_dropped() -> None:
    after = {event: following.get(State.REDO) for event, following in TRANSITIONS.items()}
    assert State.OPEN not in after.values(), "buckets of it would be written again in backward"


def test_every_state_is_reached_and_left() -> None:
    reached = {then for following in TRANSITIONS.values() for state, then in following.items() if then is not state}
    left = {state for following in TRANSITIONS.values() for state, then in following.items() if then is not state}
    assert reached == left == set(State)


def drawing() -> str:
    """The tables as a state diagram in Mermaid's language, without the events that change nothing."""
    changes: dict[tuple[State, State], list[str]] = {}
    for event, following in TRANSITIONS.items():
        for state, then in following.items():
            if state is not then:
                changes.setdefault((state, then), []).append(event.name)
    lines = ["stateDiagram-v2", f"    [*] --> {State.IDLE.name}"]
    lines += [f"    {one.name} --> {other.name}: {', '.join(names)}" for (one, other), names in changes.items()]
    return "\n".join(lines)


def test_the_drawing_shows_each_change_once() -> None:
    changes = {(s.name, t.name) for following in TRANSITIONS.values() for s, t in following.items() if s is not t}
    drawn = [line.strip().partition(":")[0] for line in drawing().splitlines()[2:]]
    assert sorted(drawn) == sorted(f"{one} --> {other}" for one, other in changes)


def test_the_page_shows_the_drawing() -> None:
    page = Path(__file__).parents[2] / "docs" / "architecture.md"
    assert f"```mermaid\n{drawing()}\n```" in page.read_text(encoding="utf-8"), "make the picture anew: drawing()"
