"""An attachment in numbers, for a log, and as a table, for a notebook."""

from collections.abc import Iterable, Mapping
from html import escape

from instep._ranks.votes import StepVotes
from instep._step.schedule import Schedule
from instep._wiring.held import living_parameters

Stats = dict[str, int | float]


def stats_of(schedule: Schedule, votes: StepVotes) -> Stats:
    """Times are left out before the first step, and on accelerators, whose work the host's clock does not show."""
    found: Stats = {
        "steps": schedule.step_count,
        "redos": schedule.redo_count,
        "skips": schedule.skip_count,
        "votes": votes.count,
        "freed_bytes": schedule.freed_bytes,
    }
    times = schedule.times
    if times.exposed is not None and all(p.device.type == "cpu" for p in living_parameters(schedule)):
        found["exposed_ms"] = 1000 * times.exposed
        found["outside_ms"] = 1000 * times.outside
    return found


def table_of(title: str, rows: Mapping[str, object] | Iterable[tuple[str, object]]) -> str:
    """HTML that needs nothing else."""
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    lines = "".join(
        f'<tr><th style="text-align:left">{escape(str(name))}</th>'
        f'<td style="text-align:left">{escape(_shown(value))}</td></tr>'
        for name, value in pairs
    )
    return f'<table><caption style="text-align:left">{escape(title)}</caption><tbody>{lines}</tbody></table>'


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
