"""Which tests kill which seeded defect, and which tests are therefore ``full``: ``python -m tests.mutation.matrix``.

    pytest -n 1 -m 'not nightly and not examples and not accelerator' -o junit_family=xunit1 --junitxml=times.xml
    python -m tests.mutation.matrix times.xml              # runs the defects that have not been run, which takes hours
    python -m tests.mutation.matrix times.xml NAME ...     # runs these again
    python -m tests.mutation.matrix times.xml --choose     # runs none

The first command measures what each test takes. A defect's tests are run in an order, up to the first that fails:
those that run by default in any case, then those that kill another defect, then the quick ones before the slow ones.
What has failed is written to ``killers.json`` after every defect, so that the command can be stopped at any time, and
goes on where it stopped. At the end it writes ``tests/full.txt`` anew.

Defects that only the emulated accelerator shows have a session of their own, ``pytest -m accelerator``, and are left
out here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests import net, selection
from tests.mutation import test_mutants
from tests.mutation.seeding import ROOT, Mutant, put_in

CHEAP = 0.03
"""Seconds. A test that takes less always runs by default."""
BY_DEFAULT = "not nightly and not examples and not accelerator"
DEFECTS = {mutant.name: mutant for mutant in test_mutants.MUTANTS if "accelerator" not in mutant.marks}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.matrix")
    parser.add_argument("times", type=Path, help="what --junitxml wrote")
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects to run again; by default those not run yet")
    parser.add_argument("--choose", action="store_true", help="run no defects")
    given = parser.parse_args()
    times = times_in(given.times)
    if not given.choose:
        run([DEFECTS[name] for name in given.names or DEFECTS if given.names or name not in selection.killers()], times)
    full = choose(times, selection.killers())
    selection.FULL.write_text("".join(f"{nodeid}\n" for nodeid in full), encoding="utf-8")
    left = sum(times.values()) - sum(times[nodeid] for nodeid in full)
    print(f"full: {len(full)} of {len(times)} tests. The others took {left:.0f} of {sum(times.values()):.0f} s")


def times_in(report: Path) -> dict[str, float]:
    """Seconds by node id, of a report with ``junit_family=xunit1``."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("file", "")
        inside = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
        nodeid = "::".join(part for part in (file, *inside.split("."), case.get("name", "")) if part)
        found[nodeid] = found.get(nodeid, 0.0) + float(case.get("time", 0))
    return found


def run(mutants: Iterable[Mutant], times: Mapping[str, float]) -> None:
    for mutant in mutants:
        began = time.monotonic()
        found = failing(mutant, ranks(times, selection.killers()))
        print(f"{time.monotonic() - began:6.1f} s  {mutant.name}: {', '.join(found) or 'NOT CAUGHT'}", flush=True)
        if found:
            write(selection.killers() | {mutant.name: sorted(found)})


def write(killers: Mapping[str, list[str]]) -> None:
    """In the order of the defects, without those that are no more."""
    there = {name: killers[name] for name in DEFECTS if name in killers}
    text = json.dumps(there, indent=1, ensure_ascii=False) + "\n"
    selection.KILLERS.write_text(text, encoding="utf-8")


def failing(mutant: Mutant, order: Mapping[str, float]) -> list[str]:
    """The first test that fails with the defect: of those that run by default or are ``full``, or else of all cases."""
    for cases in ({}, {"INSTEP_TEST_ALL_CASES": "1"}):
        with tempfile.TemporaryDirectory(prefix="instep-defect-") as folder:
            put_in(mutant, Path(folder))
            failed, orders = Path(folder, "failed"), Path(folder, "orders")
            failed.touch()
            orders.write_text(json.dumps({"ranks": order, "failed": str(failed)}), encoding="utf-8")
            command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", mutant.tests]
            command += ["-p", "tests.mutation.ordering", "-m", mutant.marks or BY_DEFAULT]
            command += ["-k", mutant.picks] if mutant.picks else []
            environment = {**os.environ, "PYTHONPATH": folder, "INSTEP_TEST_ORDER": str(orders), **cases}
            try:
                subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, timeout=3 * net.SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                print(f"        {mutant.name}: does not come to an end", flush=True)
            found = sorted(set(failed.read_text(encoding="utf-8").splitlines()))
        if found:
            return found
    return []


def ranks(times: Mapping[str, float], killers: Mapping[str, list[str]]) -> dict[str, float]:
    """The order in which to try tests: what runs in any case, what kills another defect, the rest."""
    free = always(times)
    chosen = {nodeid for tests in killers.values() for nodeid in tests}
    slowest = max(times.values(), default=0.0) + 1
    return {
        nodeid: seconds + slowest * (0 if nodeid in free else 1 if nodeid in chosen else 2)
        for nodeid, seconds in times.items()
    }


def always(times: Mapping[str, float]) -> set[str]:
    """What runs by default, whatever it kills: cheap tests, and the cheapest case of each function."""
    found = {nodeid for nodeid, seconds in times.items() if seconds < CHEAP}
    cheapest: dict[str, str] = {}
    for nodeid in sorted(times, key=lambda nodeid: times[nodeid]):
        cheapest.setdefault(selection.function_of(nodeid), nodeid)
    return found | set(cheapest.values())


def choose(times: Mapping[str, float], killers: Mapping[str, list[str]]) -> list[str]:
    """The tests that are ``full``. Of a defect that has not been run all tests stay in the default set."""
    stay = always(times) | {nodeid for tests in killers.values() for nodeid in tests}
    not_run = tuple(mutant.tests for name, mutant in DEFECTS.items() if name not in killers)
    return sorted(nodeid for nodeid in times if nodeid not in stay and not nodeid.startswith(not_run))


if __name__ == "__main__":
    main()
