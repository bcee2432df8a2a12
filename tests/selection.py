"""Which tests a plain ``pytest`` runs: all of them, but for those that are left out here.

- A test that kills a seeded defect, as ``tests/mutation/killers.json`` has them, always runs on a CPU.
- Of a test with many cases a few run, chosen by their names. The others are ``nightly``.
- Of what is left, ``tests/full.txt`` lists the tests that are slow and kill no defect that a quicker one doesn't kill.
  They are ``full``. ``python -m tests.mutation.matrix`` makes both files.

So a new test runs by default.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import pytest

TESTS = Path(__file__).parent
FULL = TESTS / "full.txt"
KILLERS = TESTS / "mutation" / "killers.json"

COLLECTED = pytest.StashKey[frozenset[str]]()
"""The test functions that were collected, also those that are not run."""

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


def listed() -> frozenset[str]:
    """The tests that are ``full``."""
    return frozenset(FULL.read_text(encoding="utf-8").splitlines())


def killers() -> dict[str, list[str]]:
    """By the name of a seeded defect that has been run, tests that fail with the defect: none, if it was not caught."""
    found: dict[str, list[str]] = json.loads(KILLERS.read_text(encoding="utf-8"))
    return found


def mark(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark what is left out. ``INSTEP_TEST_ALL_CASES=1`` leaves out nothing but the long sweeps."""
    config.stash[COLLECTED] = frozenset(function_of(item.nodeid) for item in items)
    if os.environ.get("INSTEP_TEST_ALL_CASES"):
        return
    on_cpu = "accelerator" not in config.option.markexpr.replace("not accelerator", "")  # where defects are put in
    always = {nodeid for tests in killers().values() for nodeid in tests if on_cpu}
    full = listed()
    of_one_test = Counter(function_of(item.nodeid) for item in items)
    for item in items:
        if item.nodeid in always:
            continue
        if item.nodeid in full:
            item.add_marker(pytest.mark.full)
        elif _beyond(item.nodeid, of_one_test[function_of(item.nodeid)]):
            item.add_marker(pytest.mark.nightly)


def _beyond(nodeid: str, count: int) -> bool:
    """Whether this case is beyond the few of its test. By the name, so that the same ones run everywhere, and none of
    the parameters is left out as a whole."""
    cases = MORE_CASES.get(file_of(nodeid))
    if cases is None and nodeid.startswith(LIGHT):
        return False
    return crc32(nodeid.encode()) % count >= (cases or CASES)
