"""Which tests are run: all of them, but for those that are left out here.

A plain ``pytest``:

- A test that kills a seeded defect, as ``tests/mutation/killers.json`` has them, always runs. So do rules about the
  code itself.
- Of a test with many cases a few run, chosen by their names. The others are ``nightly``.
- Of what is left, ``tests/full.txt`` lists the tests that are slow and kill no defect that a quicker one doesn't kill.
  They are ``full``.

The session on the emulated accelerator has the same cases, with those of ``full.txt``. ``.ci/run`` leaves out what
is ``nightly`` there, more of them:

- A test that kills a defect of ``tests/mutation/stream_killers.json`` always runs.
- So does one case of each function: that of ``tests/accelerator/cases.txt``, or else one chosen by its name. Functions
  of which even the quickest case is slow are in ``tests/accelerator/slow.txt``, and left out.

``python -m tests.mutation.matrix`` makes these files. So a new test runs by default, on the accelerator with one case.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal
from zlib import crc32

import pytest

Session = Literal["cpu", "accelerator"]

TESTS = Path(__file__).parent
FULL = TESTS / "full.txt"
ON_ACCELERATOR = TESTS / "accelerator" / "cases.txt"
SLOW_ON_ACCELERATOR = TESTS / "accelerator" / "slow.txt"
KILLERS: dict[Session, Path] = {
    "cpu": TESTS / "mutation" / "killers.json",
    "accelerator": TESTS / "mutation" / "stream_killers.json",
}

COLLECTED = pytest.StashKey[frozenset[str]]()
"""The tests that were collected, also those that are not run."""
IN_CI = pytest.StashKey[frozenset[str]]()
"""In a session on the accelerator: the tests that ``.ci/run`` runs there."""

OF_THE_CODE = ("tests/unit/test_sizes.py", "tests/unit/test_imports.py")
"""Rules about the code itself, which no seeded defect breaks: all of them run."""

# Of a test with more cases than this, about as many run by default.
CASES = 2
MORE_CASES = {
    "tests/unit/test_life.py": 20,
    "tests/parity/test_interrupted_step.py": 15,
    "tests/accelerator/test_one_device.py": 50,
    "tests/accelerator/test_sources.py": 50,
    "tests/accelerator/test_offload.py": 40,
}
LIGHT = (
    "tests/unit/",
    "tests/report/",
    "tests/mutation/",
    "tests/checkpoint/",
    "tests/faults/",
    "tests/accelerator/",
    "tests/loops/",
    "tests/test_",
)


def function_of(nodeid: str) -> str:
    """The node id of a test without its case."""
    return nodeid.partition("[")[0]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def listed(file: Path) -> frozenset[str]:
    """The tests that ``FULL`` or ``ON_ACCELERATOR`` names, or the functions that ``SLOW_ON_ACCELERATOR`` does."""
    return frozenset(file.read_text(encoding="utf-8").splitlines())


def killers(session: Session) -> dict[str, list[str]]:
    """By the name of a seeded defect that has been run, tests that fail with the defect: none, if it was not caught."""
    found: dict[str, list[str]] = json.loads(KILLERS[session].read_text(encoding="utf-8"))
    return found


def killing(session: Session) -> frozenset[str]:
    return frozenset(nodeid for tests in killers(session).values() for nodeid in tests)


def mark(config: pytest.Config, items: Sequence[pytest.Item], session: Session) -> None:
    """Mark what is left out. ``INSTEP_TEST_ALL_CASES=1`` leaves out nothing but the long sweeps."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    if _all_cases():
        return
    by_hand = [item.nodeid for item in items if item.get_closest_marker("nightly") is None]
    always = killing("cpu") if session == "cpu" else chosen_on_accelerator(by_hand)
    full = listed(FULL)
    of_one_test = Counter(function_of(item.nodeid) for item in items)
    for item in items:
        if item.nodeid in always or item.nodeid.startswith(OF_THE_CODE):
            continue
        if session == "cpu" and item.get_closest_marker("accelerator") is not None:
            continue  # of the other session: ``-m nightly`` alone has no such device
        if item.nodeid in full:
            item.add_marker(pytest.mark.full)
        elif _beyond(item.nodeid, of_one_test[function_of(item.nodeid)]):
            item.add_marker(pytest.mark.nightly)


def mark_on_accelerator(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Of what runs on the accelerator, mark as ``nightly`` what ``.ci/run`` leaves out."""
    there = [item for item in items if item.get_closest_marker("accelerator") is not None]
    there = [item for item in there if item.get_closest_marker("nightly") is None]
    every = frozenset(item.nodeid for item in there)
    chosen = every if _all_cases() else every & chosen_on_accelerator(every)
    for item in there:
        if item.nodeid not in chosen:
            item.add_marker(pytest.mark.nightly)
    config.stash[IN_CI] = chosen


def chosen_on_accelerator(nodeids: Iterable[str]) -> set[str]:
    """What kills a defect, what is listed, and one case of each other function that is not slow: by the checksum of its
    name, so that it is the same one everywhere."""
    always = killing("accelerator") | listed(ON_ACCELERATOR)
    found: set[str] = set()
    functions = set(listed(SLOW_ON_ACCELERATOR))
    for nodeid in sorted(nodeids, key=lambda nodeid: (nodeid not in always, crc32(nodeid.encode()))):
        if nodeid in always or function_of(nodeid) not in functions:
            found.add(nodeid)
            functions.add(function_of(nodeid))
    return found


def _all_cases() -> bool:
    return bool(os.environ.get("INSTEP_TEST_ALL_CASES"))


def _beyond(nodeid: str, count: int) -> bool:
    """Whether this case is beyond the few of its test. By the name, so that the same ones run everywhere, and none of
    the parameters is left out as a whole."""
    cases = MORE_CASES.get(file_of(nodeid))
    if cases is None and nodeid.startswith(LIGHT):
        return False
    return crc32(nodeid.encode()) % count >= (cases or CASES)
