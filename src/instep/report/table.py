"""The figures of some recordings beside each other, for a page and a terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from instep.report.figures import Figures
from instep.report.run import Run

MIB = 2**20


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.1f} MiB"


@dataclass(frozen=True)
class Row:
    """Attributes:
    values: one of each recording.
    meaning: a sentence.
    """

    name: str
    values: Sequence[str]
    meaning: str


def rows(runs: Sequence[Run], found: Sequence[Figures]) -> list[Row]:
    def row(name: str, value: Callable[[Run, Figures], str], meaning: str) -> Row:
        return Row(name, [value(run, one) for run, one in zip(runs, found, strict=True)], meaning)

    def time(name: str, seconds: Callable[[Figures], float], meaning: str) -> Row:
        return row(name, lambda run, one: ms(seconds(one)), meaning)

    made = [
        time("iteration", lambda one: one.iteration, "From forward to forward, with the profiler's own time in it."),
        time("forward", lambda one: one.forward, "Without what was waited for, or stepped, inside."),
        time("backward", lambda one: one.backward, "The same, until its last operation."),
        time("step", lambda one: one.step.total, "In which any thread updated parameters."),
        time(
            "step, hidden",
            lambda one: one.step.hidden,
            "Gradients were under way, or another thread computed.",
        ),
        time("step, exposed", lambda one: one.step.exposed, "The rest: iterations are longer by it."),
    ]
    if any(one.communication.total for one in found):
        made += [
            time("communication", lambda one: one.communication.total, "Gradients or parameters were under way."),
            time("communication, hidden", lambda one: one.communication.hidden, "Meanwhile something was computed."),
            time("communication, exposed", lambda one: one.communication.exposed, "The rest."),
        ]
    made += [
        time("waiting", lambda one: one.waiting, "Of the loop: for communication or for another thread's step."),
        time("other", lambda one: one.other, "Of the loop: data, the scheduler, everything else."),
        row(
            "peak memory",
            lambda run, one: mib(run.ranks[0].memory.peak),
            "Of tensors: parameters, state, gradients, and what was allocated while it was recorded.",
        ),
    ]
    return made
