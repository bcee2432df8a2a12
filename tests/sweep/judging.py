"""What a run shows beside the plain one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sweep.digests import Digests
    from tests.sweep.one import Run

EQUAL, PLAINLY, REFUSED, OTHER, RAISES, NOT_JUDGED = (
    "equal",
    "equal, stepped plainly",
    "refused",
    "OTHER",
    "raises",
    "not judged",
)
PLAIN_WORDS = re.compile(r"\bplain(ly)?\b|at once|left to (torch|optimizer.step)", re.IGNORECASE)


@dataclass(frozen=True)
class Result:
    """One word of the above, and why."""

    verdict: str
    why: str = ""
    optimizer: str = ""
    """The class, with its module."""
    settings: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


def judge(way: str, plain: Sequence[Run | None], again: Sequence[Run | None], seen: Sequence[Run | None]) -> Result:
    """All ranks as one: the worst that a rank shows, and that they differ, if they do."""
    first = plain[0]
    name = first.optimizer if first else ""
    unable = _unable(plain, again)
    if unable:
        return Result(NOT_JUDGED, unable, name)
    results = [_judge(p, s, way) for p, s in zip(plain, seen, strict=True)]
    of_all: dict[str, Any] = {
        "optimizer": name,
        "settings": next((run.settings for run in seen if run), []),
        "log": [line for run in seen if run for line in run.log],
    }
    verdicts = {verdict for verdict, _ in results}
    if len(verdicts) == 1:
        return Result(*results[0], **of_all)
    if OTHER in verdicts:
        return Result(OTHER, next(why for verdict, why in results if verdict == OTHER), **of_all)
    return Result(RAISES, "ranks differ: " + "; ".join(f"{verdict}: {why}" for verdict, why in results), **of_all)


def _unable(plain: Sequence[Run | None], again: Sequence[Run | None]) -> str:
    for run, second in zip(plain, again, strict=True):
        if run is None or second is None:
            return "the plain loop dies, or does not end"
        if run.raised:
            return f"the plain loop raises {run.raised}"
        if difference(run.steps, second.steps) or difference(run.processes, second.processes):
            return "plain differs from itself"
    return ""


def _judge(plain: Run | None, seen: Run | None, way: str) -> tuple[str, str]:
    assert plain is not None
    if seen is None:
        return RAISES, "the process dies, or does not end"
    differs = difference(plain.steps, seen.steps) or difference(plain.processes, seen.processes)
    if differs:
        return OTHER, ("after attach refused, " if seen.refused else "") + differs
    if seen.refused and not seen.raised:
        return REFUSED, seen.refused
    if seen.raised:
        whole = plain.steps[len(seen.steps) - 1 : len(seen.steps) + 1] if seen.steps else plain.steps[:1]
        at = f"in step {len(seen.steps) - 1}" if seen.steps else "before the first step"
        if seen.torn not in whole:
            return RAISES, f"{at}, half written: {seen.raised}"
        return (REFUSED if seen.ours else RAISES), f"{at}: {seen.raised}"
    return _equal(seen, way)


def _equal(seen: Run, way: str) -> tuple[str, str]:
    lines = [*seen.log, *map(str.strip, seen.said.splitlines())]  # repr, and the plan
    said = [line for line in lines if PLAIN_WORDS.search(line.replace("tried as plain ones", ""))]
    nothing_in_backward = any(seen.stepped) and not any(stepped for stepped, _ in seen.stepped)
    if way in ("small", "backward"):
        if nothing_in_backward:
            return PLAINLY, said[0] if said else "nothing is said"
        partly = [(stepped, of) for stepped, of in seen.stepped if stepped < of]
        return EQUAL, f"{partly[0][0]} of {partly[0][1]} weights in backward" if partly else ""
    return (PLAINLY, said[0]) if said else (EQUAL, "")


def difference(plain: Sequence[Digests], seen: Sequence[Digests]) -> str:
    """The first, in words; of the steps that both have."""
    for number, (one, other) in enumerate(zip(plain, seen, strict=False)):
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if names:
            where = "before step 0" if number == 0 else f"in step {number - 1}"
            return f"{where}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    return ""
