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
HEAD = f"""## Published optimizers

`python -m tests.sweep` trains a small model with each of these for eight steps, on one device, on two ranks of DDP and
on two of FSDP2, beside a process without instep (torch {torch.__version__.split("+")[0]}, CPU). *equal*: the same bits
of weights and state after each step. *plainly*: `optimizer.step()` takes every step, and no gradient is freed, with
`schedule="backward"` because parts of an update came out otherwise than the whole. *refused*: nothing was written, and
the loop goes on."""
WORST = (OTHER, RAISES, REFUSED, PLAINLY, NOT_JUDGED, EQUAL)
SHAPES = {"one": "one device", "ddp": "DDP", "fsdp": "FSDP2"}
BACKWARD = ("small", "backward")
COLUMNS = {"`backward`": BACKWARD, "`undo=True`": ("undo",), "`forward`": ("defer",)}

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
    cells: dict[str, dict[tuple[str, str], Row]] = defaultdict(dict)
    for row in rows:
        cells[row["case"]][row["shape"], row["way"]] = row
    lines = [
        f"| optimizer | package | {' | '.join(COLUMNS)} | what a loop would not expect |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for case in CASES:
        if case.pins and case.name in cells:
            of = cells[case.name]
            columns = [_cell(of, ways) for ways in COLUMNS.values()]
            package = case.pins[0].replace("==", " ")
            lines.append(f"| `{case.name}` | {package} | {' | '.join(columns)} | {case.odd or _why(of)} |")
    return "\n".join(lines)


def _why(of: dict[tuple[str, str], Row]) -> str:
    """What instep said of it, where it did not step it in backward."""
    said = [row["why"] for row in of.values() if row["way"] in BACKWARD and row["verdict"] in (OTHER, REFUSED, PLAINLY)]
    return _short(said[0], 120).replace("|", "/").replace("[", r"\[") if said else ""  # no links


def _cell(of: dict[tuple[str, str], Row], ways: tuple[str, ...]) -> str:
    """The worst of these ways; of each shape by itself where shapes differ."""
    by_shape = {}
    for shape, title in SHAPES.items():
        found = [of[shape, way] for way in ways if (shape, way) in of]
        if found:
            worst = min(found, key=lambda row: WORST.index(row["verdict"]))
            by_shape[title] = _word(worst)
    if len(set(by_shape.values())) == 1:
        return next(iter(by_shape.values()))
    of_words: dict[str, list[str]] = defaultdict(list)
    for title, word in by_shape.items():
        of_words[word].append(title)
    return "; ".join(f"{word} ({', '.join(titles)})" for word, titles in of_words.items())


def _word(row: Row) -> str:
    if row["verdict"] == NOT_JUDGED:
        return "plain is not repeatable" if row["why"].endswith("itself") else "plain does not run"
    return str(row["verdict"]).replace(PLAINLY, "equal, plainly").replace(OTHER, "**other**")


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
