"""Faults at named points. A short set here; ``pytest -m nightly tests/faults`` runs all, and so does
``python -m tests.faults.sweep``."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import net
from tests.accelerator.building import why_not
from tests.faults import sweep
from tests.faults.cases import ALL, KINDS, LIMIT, POINTS, STAGED_SGD, STEPS, Case
from tests.faults.harness import (
    BY_SEVERITY,
    HANG,
    LATE_WRITE,
    NOT_BUILT,
    NOT_REACHED,
    NOT_REFUSED,
    OK,
    SILENT,
    STUCK,
    WRONG_ERROR,
    Report,
    Summary,
    Verdict,
    judge,
    run_cases,
)
from tests.faults.inject import COLLECTIVES, SEAMS
from tests.pace import TICK

SHORT = [
    Case(point="in the update", kind="raise", where=0),
    Case(way="undo", point="in the update", kind="raise", where=7, optimizer="AdamW foreach"),
    Case(way="forward", point="between state and parameter", kind="raise", where=5, optimizer=STAGED_SGD),
    Case(point="model", kind="interrupt", where=14),
    Case(point="model", kind="save", where=14),
    Case("ddp", point="in flight", kind="kill", where=1, rank=1, then="leave", world=2),
    Case("ddp", "forward", "gradient", "nan", 11, 1, nonfinite="skip", world=2),
    Case("fsdp2", "backward", "gradient", "nan", 0, 1, nonfinite="raise", then="leave", world=2),
    Case("ddp", point="vote", kind="kill", rank=1, then="leave", world=2),
    Case("zero", "forward", "rows in flight", "kill", 0, 1, then="leave", optimizer="AdamW foreach", world=2),
    Case("zero", "forward", "in the update", "raise", 0, 1, then="leave", world=2, optimizer="AdamW foreach"),
    Case("zero", "backward", "in the update", "raise", 1, 1, then="leave", world=2, optimizer="AdamW foreach"),
    Case("fsdp2", point="after write", kind="kill", where=1, then="leave", world=2),
    Case("fsdp2", "undo", "model", "raise", 14, ALL, world=2),
    Case("joined", "backward", "in the update", "raise", 1, 1, then="leave", world=2),
    Case("ddp", "default", "attach", "differs", 0, 1, step=0, then="leave", world=2),
    Case("fsdp2", "backward", "in FSDP's forward", "interrupt", 60, ALL, world=2),
    Case("fsdp2", "forward", "in FSDP's forward", "kill", 90, 1, then="leave", world=2),
]
LONGER = [
    Case("ddp", point="in the update", kind="raise", where=1, rank=1, world=2),
    Case("ddp", point="in flight", kind="error", where=1, rank=1, world=2),
    Case("ddp", "undo", "before launch", "hang", 1, 0, then="leave", world=2),
    Case("ddp", "forward", "before step", "stop", 0, 1, then="leave", world=2),
    Case("ddp", point="in flight", kind="partition", where=1, rank=1, then="leave", world=2),
    Case("fsdp2", "forward", "in flight", "hang", 1, 1, then="leave", world=2),
    Case("2d", "default", "gradient", "nan", 0, 0, nonfinite="skip", world=4),
    Case("2d", "backward", "after write", "raise", 1, 0, then="leave", world=4),
]
"""Ranks wait here until a time is over, or are four: ``full``."""


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Mapping[Case, Verdict]:
    """Of the cases that this session has chosen."""
    chosen = {item.name for item in request.session.items}
    cases = [case for case in (*SHORT, *LONGER) if f"test_a_fault[{case}]" in chosen]
    return {verdict.case: verdict for verdict in run_cases(sweep.permitted(cases), jobs=6)}


@pytest.mark.timeout(4 * net.SECONDS)  # the first of them runs all
@pytest.mark.parametrize("case", [*SHORT, *(pytest.param(case, marks=pytest.mark.full) for case in LONGER)], ids=str)
def test_a_fault(verdicts: Mapping[Case, Verdict], case: Case) -> None:
    if case not in verdicts and case.kind == "partition":
        pytest.skip("network namespaces are not permitted here")
    assert verdicts[case].outcome == OK, str(verdicts[case])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_fault(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    cases = sweep.permitted(sweep.everything())
    with capsys.disabled():
        summary = sweep.run(cases, 8, sweep.Show(len(cases)))
        told = f"{summary.table()}\n{summary.line()}"
        print(told)
    (request.config.cache.mkdir("faults") / "summary.txt").write_text(told, encoding="utf-8")
    assert not any(summary.count(outcome) for outcome in (*BY_SEVERITY, NOT_BUILT)), told


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_fault_on_an_accelerator() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    broken = [verdict for verdict in run_cases(sweep.on_accelerator(), jobs=4) if verdict.found]
    assert not broken, "\n".join(map(str, broken))


CONTROL = [
    Case("local", "torch", "model", "raise", 14, optimizer="plain SGD"),
    Case("ddp", "torch", "in flight", "kill", 1, 1, optimizer="plain SGD", world=2),
    Case("fsdp2", "plain", "model", "raise", 14, ALL, world=2),
]


def test_what_torch_does_is_found() -> None:
    """The harness would notice: torch's own overlap, and plain FSDP2, are run by it in the same way."""
    control = sweep.permitted(CONTROL)
    assert {v.case: v.outcome for v in run_cases(control)} == dict.fromkeys(control, SILENT)


def test_a_run_without_a_fault_is_no_case() -> None:
    (verdict,) = run_cases([Case(point="model", kind="raise", where=999)])
    assert verdict.outcome == NOT_REACHED
    assert "faults injected 0," in Summary([verdict]).line()


def test_the_tables_agree() -> None:
    assert SEAMS.keys() == POINTS.keys()
    cases = sweep.everything()
    assert {case.point for case in cases} == POINTS.keys()
    assert {case.source for case in cases} - {"local"} == COLLECTIVES.keys()
    assert {case.kind for case in cases} == set(KINDS)
    assert {case.row for case in cases} == {1, 2, 3, 4, 5, 14, 15}
    assert len(set(cases)) == len(cases) > 1000
    assert len(sweep.spread(cases, 7)) == 7


def test_the_documentation_counts_the_cases() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    told = {int(row): int(number) for row, number in re.findall(r"^\| (\d+) \|.*\| (\d+) \|$", page, re.MULTILINE)}
    assert told == Counter(case.row for case in sweep.everything())


PLAIN = [[(f"parameters {step}", f"state {step}") for step in range(STEPS + 1)]] * 2
MIXED = ("neither", "nor")
DDP = Case("ddp", "backward", "in the update", "raise", 0, 1, step=2, then="leave", world=2)
KILL = Case("ddp", "backward", "in flight", "kill", 0, 1, step=2, then="leave", world=2)


def whole(*steps: int) -> Report:
    return [{"what": "whole", "time": 0.0, "step": step, "hash": PLAIN[0][step], "torn": False} for step in steps]


def error(
    at: float = 1.0,
    kind: str = "InjectedError",
    found: Any = MIXED,
    later: Any = None,
    torn: bool = True,
    slower: int = 1,
) -> Report:
    """What a rank tells of an error in its third step. On a busy machine it is so many times ``slower``."""
    refused = "TornStepError" if torn else None
    names = ("model.state_dict", "optimizer.state_dict", "forward")
    raised = {"what": "raised", "time": at, "raised": at, "step": 2, "phase": "backward", "type": kind, "text": ""}
    raised["ticks"] = [TICK * n for n in range(0, round(at / TICK), slower)]
    return [
        {**raised, "chain": [kind], "trace": "", "hash": found, "state": "open", "torn": False, "left": 0},
        {"what": "quiet", "time": at + 1, "same": later is None, "hash": later or found, "before": found, "step": 2},
        *({"what": "probe", "time": at + 1, "name": name, "error": refused} for name in names),
        {"what": "settled", "time": at + 1, "state": "", "whole": later or found, "torn": torn, "step": 2},
    ]


FAULT: Report = [{"what": "fault", "time": 1.0}]
END: Report = [{"what": "end", "time": 2.0}]
BEFORE = whole(0, 1, 2)


def unrefused() -> Report:
    return [{**one, "error": None} if one.get("name") == "model.state_dict" else one for one in error()]


@pytest.mark.parametrize(
    ("expected", "case", "survivor", "faulty"),
    [
        (OK, DDP, BEFORE + error(kind="RuntimeError") + END, BEFORE + FAULT + error() + END),
        (OK, KILL, BEFORE + error(kind="RuntimeError", found=PLAIN[0][2], torn=False) + END, BEFORE + FAULT),
        (OK, DDP, whole(*range(STEPS + 1)) + END, BEFORE + FAULT + whole(3, 4, 5) + END),
        (SILENT, DDP, BEFORE + error(torn=False) + END, BEFORE + FAULT + error() + END),
        (SILENT, DDP, whole(*range(STEPS + 1)) + END, BEFORE + FAULT + error() + END),
        (SILENT, KILL, [*BEFORE, {**whole(3)[0], "hash": MIXED}, *END], BEFORE + FAULT),
        (SILENT, KILL, whole(*range(STEPS + 1)) + END, BEFORE + FAULT),
        (LATE_WRITE, KILL, BEFORE + error(kind="RuntimeError", later=("other", "bits")) + END, BEFORE + FAULT),
        (HANG, KILL, BEFORE + error(at=1.2 + LIMIT) + END, BEFORE + FAULT),
        (HANG, KILL, BEFORE + error(at=1.2 + 2 * LIMIT, slower=2) + END, BEFORE + FAULT),
        (OK, KILL, BEFORE + error(at=2 * LIMIT, slower=2) + END, BEFORE + FAULT),
        (HANG, KILL, BEFORE, BEFORE + FAULT),
        (NOT_REFUSED, DDP, BEFORE + error() + END, BEFORE + FAULT + unrefused() + END),
        (WRONG_ERROR, DDP, BEFORE + error() + END, BEFORE + FAULT + error(kind="RuntimeError") + END),
        (
            STUCK,
            Case(point="model", kind="raise"),
            None,
            BEFORE + FAULT + 2 * error(found=PLAIN[0][2], torn=False) + END,
        ),
        (NOT_REACHED, DDP, BEFORE + END, BEFORE + END),
    ],
)
def test_the_judge(expected: str, case: Case, survivor: Report | None, faulty: Report) -> None:
    reports = [faulty] if survivor is None else [survivor, faulty]
    lost = {rank for rank, report in enumerate(reports) if report[-1]["what"] == "whole"}
    silence: Callable[[int], str] = lambda rank: ""  # noqa: E731
    verdict = judge(case, reports, PLAIN, lost, silence)
    assert verdict.outcome == expected, str(verdict)
    assert Summary([verdict]).count(expected) == 1
