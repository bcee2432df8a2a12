"""What the results become: a summary, the table of docs/optimizers.md, and the list of classes that are proved."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.sweep.cases import CASES, Case
from tests.sweep.environments import ROOT
from tests.sweep.judging import EQUAL, NOT_JUDGED, OTHER, PLAINLY, RAISES, REFUSED

DOCS = ROOT / "docs" / "optimizers.md"
PROVED = ROOT / "src" / "instep" / "_optim" / "proved.json"
BEGIN, END = "<!-- the sweep: begin -->", "<!-- the sweep: end -->"
HEAD = f"""`python -m tests.sweep` trains a small model for eight steps on one device, on two ranks of DDP and on two
of FSDP2 (torch {torch.__version__.split("+")[0]}, CPU). Weights and state are those of the plain loop after each step,
with `undo=True`, too. *Couples*: what it updates depends on which parameters step together. *Refused*: raises, and
writes nothing of the step. \\*: the plain loop does not run under FSDP2. A shape in brackets: in that one alone."""
WORST = (OTHER, RAISES, REFUSED, PLAINLY, NOT_JUDGED, EQUAL)
SHAPES = {"one": "one device", "ddp": "DDP", "fsdp": "FSDP2"}
BACKWARD = ("small", "backward")
IN_BACKWARD = (*BACKWARD, "undo")
COLUMNS = ("package", "stepped in backward", "not stepped in backward, and why")
ROADS = {
    "draws random numbers": "draws random numbers",
    "`step()` raises without gradients": r"step\(\) raises when no parameter",
    "changes parameters without gradients": "changes parameters that have no gradient",
    "keeps a generator": "a generator, which has a finalizer",
    "wraps another": "holds another optimizer|which has an optimizer",
    "keeps what cannot be put back": "when the same step is taken again",
    "couples": "which parameters step together|without the others|that it was not given",
}
"""Why an optimizer is not stepped in backward, in short, and what instep says then."""

Row = dict[str, Any]
"""A line of the results: case, shape, way, verdict, why, optimizer, settings, log."""


def read(file: Path) -> list[Row]:
    """The last line of each case, shape and way counts."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return list({(row["case"], row["shape"], row["way"]): row for row in rows}.values())


def summary(rows: Iterable[Row]) -> str:
    by_verdict: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_verdict[row["verdict"]].append(row)
    lines = []
    for verdict in WORST:
        of = by_verdict[verdict]
        lines.append(f"{verdict}: {len(of)}")
        if verdict != EQUAL:
            same: dict[tuple[str, str], list[str]] = defaultdict(list)
            for row in of:
                same[row["case"], _short(row["why"], 160)].append(f"{row['shape']}/{row['way']}")
            lines += [f"    {case} ({', '.join(where)}): {why}" for (case, why), where in same.items()]
    return "\n".join(lines)


def write(rows: list[Row]) -> None:
    text = DOCS.read_text()
    if BEGIN not in text:
        raise SystemExit(f"{DOCS} has no line {BEGIN}, where the table is to stand")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    DOCS.write_text(f"{before}{BEGIN}\n\n{HEAD}\n\n{table(rows)}\n\n{END}{after}")
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in proved(rows).items())
    PROVED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table(rows: Iterable[Row]) -> str:
    """A line for each package."""
    cells: dict[str, dict[tuple[str, str], Row]] = defaultdict(dict)
    for row in rows:
        cells[row["case"]][row["shape"], row["way"]] = row
    packages: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for case in CASES:
        if case.pins and case.name in cells:
            of = packages[case.pins[0].replace("==", " ")]
            for found, shapes in _verdicts(cells[case.name]).items():
                of[found].append(_title(case.name) + shapes)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for package, of in packages.items():
        equal = ", ".join(of.pop("", ()))
        others = "; ".join(f"{why}: {', '.join(names)}" for why, names in of.items())
        lines.append(f"| {package} | {equal} | {others} |")
    return "\n".join(line.replace("|  |", "| |") for line in lines)


def _verdicts(of: dict[tuple[str, str], Row]) -> dict[str, str]:
    """Why it is not stepped in backward (empty: it is), and in which shapes, as they stand behind its name."""
    by_verdict: dict[str, list[str]] = defaultdict(list)
    why: dict[str, str] = {}
    for shape in SHAPES:
        rows = [of[shape, way] for way in IN_BACKWARD if (shape, way) in of]
        if rows:
            worst = min(rows, key=lambda row: WORST.index(row["verdict"]))
            by_verdict[worst["verdict"]].append(shape)
            why.setdefault(worst["verdict"], _word(worst))
    unable = by_verdict.pop(NOT_JUDGED, []) if len(by_verdict) > 1 else []
    found = {}
    for verdict, shapes in by_verdict.items():
        titles = ", ".join(SHAPES[shape] for shape in shapes)
        some = (
            r"\*"
            if unable == ["fsdp"] and len(by_verdict) == 1
            else f" ({titles})"
            if len(shapes) < len(SHAPES)
            else ""
        )
        found[why[verdict]] = some
    return found


def _title(name: str) -> str:
    """``package.module.Class, label`` without package and module."""
    if ": " in name:
        return name.partition(": ")[2]
    name, _, label = name.partition(", ")
    name, space, beside = name.partition(" ")
    return f"`{name.rpartition('.')[2]}`{space}{beside}" + (f" ({label})" if label else "")


def _word(row: Row) -> str:
    if row["verdict"] == EQUAL:
        return ""
    if row["verdict"] == NOT_JUDGED:
        return "plain is not repeatable" if row["why"].endswith("itself") else "plain does not run"
    road = next(
        (road for road, text in ROADS.items() if re.search(text, row["why"])),
        _short(row["why"], 120) or "nothing is said",
    )
    road = road.replace("|", "/").replace("[", r"\[")  # no links
    return {PLAINLY: "", REFUSED: "refused, "}.get(row["verdict"], "**other**, ") + road


def proved(rows: list[Row]) -> dict[str, Any]:
    """By class: the distribution whose class it is, its version, and the settings of its cases, where all cases of it
    were stepped in backward, and equal.

    A shape in which the plain loop does not run says nothing; one device has to be there.
    """
    cases = {case.name: case for case in CASES}
    backward = [row for row in rows if row["way"] in BACKWARD]
    found: dict[str, Any] = {}
    failed = {row["optimizer"] for row in backward if not _proves(row)}
    for row in backward:
        case = cases.get(row["case"])
        if case is not None and row["optimizer"] not in failed and _is_published(case, row["optimizer"]):
            distribution, version = case.pins[0].split("==")
            entry = {"distribution": distribution, "version": version, "settings": []}
            settings = found.setdefault(row["optimizer"], entry)["settings"]
            if row["settings"] and row["settings"] not in settings:
                settings.append(row["settings"])
    return {name: {**entry, "settings": sorted(entry["settings"])} for name, entry in sorted(found.items())}


def _proves(row: Row) -> bool:
    unable = row["verdict"] == NOT_JUDGED and row["shape"] != "one" and not row["why"].endswith("itself")
    return bool(unable or (row["verdict"] == EQUAL and not row["why"]))


def _is_published(case: Case, name: str) -> bool:
    """A class made in a function is another one with each call."""
    return bool(case.pins) and not name.startswith("torch.optim.") and "<locals>" not in name


def _short(text: str, length: int) -> str:
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= length else text[: length - 1] + "…"
