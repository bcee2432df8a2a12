"""How the sweep over published optimizers judges, what it writes, and what it has written."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.sweep.cases import CASES
from tests.sweep.judging import EQUAL, NOT_JUDGED, OTHER, PLAINLY, RAISES, REFUSED, judge
from tests.sweep.one import WAYS, Run
from tests.sweep.table import BEGIN, DOCS, END, PROVED, proved, table

NUMBERS = [{"weight a": str(i)} for i in range(11)]
PROCESS = [{"torch's generator": str(i)} for i in range(11)]


def ran(**changed: Any) -> Run:
    return Run(**{"steps": NUMBERS, "processes": PROCESS, "stepped": [[2, 2]], "optimizer": "lion.Lion", **changed})


def of(seen: Run | None, way: str = "backward", plain: Run | None = None) -> tuple[str, str]:
    result = judge(way, [plain or ran()], [ran()], [seen])
    return result.verdict, result.why


AFTER_THREE = {"steps": NUMBERS[:4], "processes": PROCESS[:4]}
WRONG = [*NUMBERS[:3], {"weight a": "wrong"}, *NUMBERS[4:]]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, EQUAL),
        ({"stepped": [[0, 2]]}, PLAINLY),
        ({"steps": WRONG}, OTHER),
        ({"processes": [*PROCESS[:10], {"torch's generator": "wrong"}]}, OTHER),
        ({"refused": "AttachError: no"}, REFUSED),
        ({"refused": "AttachError: no", "steps": WRONG}, OTHER),
        ({"raised": "TornStepError: …", "ours": True, "torn": NUMBERS[3], **AFTER_THREE}, REFUSED),
        ({"raised": "TornStepError: …", "ours": True, "torn": NUMBERS[4], **AFTER_THREE}, REFUSED),
        ({"raised": "TornStepError: …", "ours": True, "torn": {"weight a": "half"}, **AFTER_THREE}, RAISES),
        ({"raised": "KeyError: 3", "torn": NUMBERS[3], **AFTER_THREE}, RAISES),
        ({"raised": "KeyError: 3", "torn": NUMBERS[3], "steps": WRONG[:4], "processes": PROCESS[:4]}, OTHER),
        ({"raised": "KeyError: 3", "steps": [], "processes": []}, RAISES),
    ],
)
def test_what_a_run_shows(changed: Mapping[str, Any], expected: str) -> None:
    assert of(ran(**changed))[0] == expected


def test_a_process_that_died() -> None:
    assert of(None)[0] == RAISES


def test_plain_is_judged_first() -> None:
    assert of(ran(), plain=ran(steps=WRONG)) == (NOT_JUDGED, "plain differs from itself")
    assert of(ran(), plain=ran(raised="KeyError: 3"))[0] == NOT_JUDGED


def test_a_step_taken_plainly_says_why() -> None:
    assert of(ran(stepped=[[0, 2]], log=["it couples: plain steps from now on"]))[1].startswith("it couples")
    assert of(ran(stepped=[[0, 2]]))[1] == "nothing is said"
    assert of(ran(said="<… steps taken at once (…)>"), "defer")[0] == PLAINLY


def test_ranks_are_one() -> None:
    both = [ran(), ran()]
    assert judge("undo", both, both, both).verdict == EQUAL
    assert judge("undo", both, both, [ran(), ran(steps=WRONG)]).verdict == OTHER
    parted = judge("undo", both, both, [ran(), ran(refused="AttachError: no")])
    assert parted.verdict == RAISES
    assert parted.why.startswith("ranks differ")


def rows(name: str, optimizer: str, **verdicts: str) -> list[dict[str, Any]]:
    found = [(shape, way) for shape in ("one", "ddp", "fsdp") for way in WAYS]
    return [
        {"case": name, "shape": shape, "way": way, "verdict": verdicts.get(f"{shape}_{way}", EQUAL)}
        | {"why": "", "optimizer": optimizer, "settings": ["eps=1e-08", f"shape={shape}"], "log": []}
        for shape, way in found
    ]


LION = "lion_pytorch.Lion"


def test_what_is_proved() -> None:
    found = proved(rows(LION, "lion_pytorch.lion_pytorch.Lion"))
    settings = [["eps=1e-08", f"shape={shape}"] for shape in ("ddp", "fsdp", "one")]
    assert found == {
        "lion_pytorch.lion_pytorch.Lion": {"distribution": "lion-pytorch", "version": "0.2.5", "settings": settings}
    }
    assert proved(rows(LION, "x.Lion", one_undo=REFUSED)), "that is another way"
    assert proved(rows(LION, "x.Lion", fsdp_small=NOT_JUDGED)), "the plain loop does not run there"
    for verdict in (PLAINLY, OTHER, RAISES, REFUSED):
        assert not proved(rows(LION, "x.Lion", ddp_small=verdict))
    assert not proved(rows(LION, "x.Lion", one_small=NOT_JUDGED))
    assert not proved(rows(LION, "x.Lion") + rows("lion_pytorch.Lion", "x.Lion", one_small=OTHER))
    assert not proved(rows("made: compiled for each shape", "tests.sweep.made.Compiled")), "published classes alone"
    assert not proved(rows(LION, "peft.made.<locals>.Lion")), "made anew with each call"


def line_of(**verdicts: str) -> str:
    return table(rows(LION, "x.Lion", **verdicts)).splitlines()[2]


def in_backward(shape: str, verdict: str) -> dict[str, str]:
    return {f"{shape}_{way}": verdict for way in ("small", "backward", "undo")}


def test_the_table() -> None:
    assert line_of() == "| lion-pytorch 0.2.5 | `Lion` | |"
    assert (
        line_of(fsdp_undo=REFUSED)
        == "| lion-pytorch 0.2.5 | `Lion` (one device, DDP) | refused, nothing is said: `Lion` (FSDP2) |"
    )
    assert "**other**" in line_of(one_small=OTHER)
    assert line_of(**in_backward("fsdp", NOT_JUDGED)) == r"| lion-pytorch 0.2.5 | `Lion`\* | |"
    assert line_of(**in_backward("ddp", NOT_JUDGED)) == "| lion-pytorch 0.2.5 | `Lion` (one device, FSDP2) | |"
    of_all = {**in_backward("one", NOT_JUDGED), **in_backward("ddp", NOT_JUDGED), **in_backward("fsdp", NOT_JUDGED)}
    assert line_of(**of_all) == "| lion-pytorch 0.2.5 | | plain does not run: `Lion` |"


def test_where_the_table_goes() -> None:
    text = DOCS.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index(BEGIN) < text.index(END)


def test_what_has_been_proved() -> None:
    """``{"module.Class": {"distribution": …, "version": …, "settings": [[…], …]}}``, in the order of names."""
    found = json.loads(PROVED.read_text())
    assert list(found) == sorted(found)
    for name, entry in found.items():
        assert re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name), name
        assert f"{entry['distribution']}=={entry['version']}" in {pin for case in CASES for pin in case.pins}
        assert entry["settings"], name
        assert all(settings == sorted(set(settings)) for settings in entry["settings"])
        assert not name.startswith(("torch.optim.", "tests."))


def test_cases_are_pinned_and_named_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(re.fullmatch(r"[A-Za-z0-9][\w.-]*==\d[\w.+]*", pin) for case in CASES for pin in case.pins)
