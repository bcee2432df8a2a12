"""The states of a step. Everything that may follow upon what stands in these tables; nothing else changes a state.

The picture in ``docs/architecture.md`` is drawn from them (``drawing``).
"""

from collections.abc import Mapping
from enum import Enum


class State(Enum):
    """Of the step that is running, in one attachment."""

    IDLE = "idle"
    """No gradient of the next step has been offered."""
    OPEN = "open"
    """Gradients have been offered. With ``schedule="backward"`` buckets may have been written."""
    REDO = "redo"
    """``undo`` has rolled the step back. Its gradients stay, and ``optimizer.step()`` is to do all of it."""
    STEPPING = "stepping"
    """An optimizer's ``step()`` runs, and finds what has been left to it."""
    REDOING = "redoing"
    """An optimizer's ``step()`` runs, and does all of the step, as in the plain loop."""
    TORN = "torn"
    """The step stands on some parameters, or on some ranks, only. Nothing is written until that is accepted."""


class Event(Enum):
    """What happens to a step."""

    OFFERED = "the first final gradient is offered"
    DROPPED = "nothing was written, and the gradients are not those of a step any more"
    ROLLED_BACK = "parameters and state are as they were before the step"
    STEP_BEGINS = "an optimizer's step() is about to update"
    STEP_REFUSED = "instep has raised in it, before anything was written"
    STEP_STOPPED = "it raised or was interrupted, and what it had written is rolled back"
    STEP_RETURNS = "it returns, and other optimizers owe theirs"
    STEP_IN_VAIN = "it returns, and there was nothing to step"
    COMMITTED = "it returns, and was the last: the step is taken, or left out"
    TORE = "it stands in part"
    GIVEN_UP = "the loop gives it up, or accepts it as it is"


_I, _O, _R, _S, _RS, _T = State.IDLE, State.OPEN, State.REDO, State.STEPPING, State.REDOING, State.TORN

# Ctrl-C may come between any two statements of a change, which is then made once more: an event that ends in the state
# that it finds is legal for that reason.
TRANSITIONS: Mapping[Event, Mapping[State, State]] = {
    # A closure may run backward inside of step(), after a first evaluation.
    Event.OFFERED: {_I: _O, _O: _O, _R: _R, _S: _S, _RS: _RS},
    Event.DROPPED: {_I: _I, _O: _I, _R: _I, _S: _I},
    Event.ROLLED_BACK: {_I: _R, _O: _R, _R: _R, _S: _RS, _RS: _RS, _T: _T},
    Event.STEP_BEGINS: {_I: _S, _O: _S, _R: _RS},
    Event.STEP_REFUSED: {_I: _I, _O: _O, _R: _R, _S: _O, _RS: _R, _T: _T},
    Event.STEP_STOPPED: {_I: _R, _O: _R, _R: _R, _S: _R, _RS: _R},
    # The user's step() may have caught the error that told of a torn step.
    Event.STEP_RETURNS: {_O: _O, _R: _R, _S: _O, _RS: _R, _T: _T},
    Event.STEP_IN_VAIN: {_I: _I, _R: _R, _S: _I, _RS: _R, _T: _T},
    Event.COMMITTED: {_I: _I, _S: _I, _RS: _I, _T: _T},
    Event.TORE: dict.fromkeys(State, _T),
    Event.GIVEN_UP: dict.fromkeys(State, _I),
}


class IllegalEventError(AssertionError):
    """An event that cannot happen in this state: a defect of instep's."""


class Machine:
    """The state of one attachment's steps.

    Attributes:
        state: changed by ``happened`` alone.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.IDLE

    def happened(self, event: Event) -> None:
        """Go to the state that follows upon ``event``.

        Raises:
            IllegalEventError: none does, from this state. The state stays.
        """
        following = TRANSITIONS[event].get(self.state)
        if following is None:
            raise IllegalEventError(f"{event.name} ({event.value}) cannot happen to a step that is {self.state.value}")
        self.state = following


def drawing() -> str:
    """The tables as a state diagram in Mermaid's language, without the events that change nothing."""
    lines = ["stateDiagram-v2", f"    [*] --> {_I.name}"]
    changes: dict[tuple[State, State], list[str]] = {}
    for event, following in TRANSITIONS.items():
        for state, then in following.items():
            if state is not then:
                changes.setdefault((state, then), []).append(event.name)
    lines += [f"    {one.name} --> {other.name}: {', '.join(names)}" for (one, other), names in changes.items()]
    return "\n".join(lines)
