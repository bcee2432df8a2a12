"""A plugin of pytest's that measures the tests for ``tests.mutation.matrix``: ``pytest -p tests.mutation.timing``.

It counts processor seconds of the test and of all processes under it, ranks among them, so that it matters little what
else the machine does. They are appended to the file that ``INSTEP_TEST_TIMES`` names. It needs Linux's ``/proc``.
What is skipped is left out: it would be the cheapest case of its function.
"""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
SKIPPED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = seconds_of(os.getpid())
    result = yield
    after = seconds_of(os.getpid())
    if SKIPPED in item.stash:
        return result
    with open(os.environ["INSTEP_TEST_TIMES"], "a", encoding="utf-8") as file:
        file.write(f"{max(0.0, after - before):.2f} {item.nodeid}\n")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        item.stash[SKIPPED] = True
    return report


def seconds_of(root: int) -> float:
    """Of a process, those under it, and those that have ended."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended, and is counted with its parent's
        ticks[int(process.name)] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(int(process.name))
    found, found_ticks = [root], 0
    for pid in found:
        found_ticks += ticks.get(pid, 0)
        found += children.get(pid, ())
    return found_ticks / TICKS


def read(file: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        seconds, _, nodeid = line.partition(" ")
        found[nodeid] = found.get(nodeid, 0.0) + float(seconds)
    return found
