"""Which tests kill which seeded defect, and which tests are therefore ``full``: ``python -m tests.mutation.matrix``.

    python -m tests.mutation.matrix NAME ...        # runs these defects
    python -m tests.mutation.matrix                 # runs those that have not been run; it can be stopped at any time

    INSTEP_TEST_TIMES=times pytest -n 1 -p tests.mutation.timing -m 'not nightly and not examples and not accelerator'
    python -m tests.mutation.matrix --times times   # the same in a better order, and writes full.txt anew at the end

A defect's tests are run up to the first that fails: those that are in a plain ``pytest`` in any case, then those that
kill another defect, then the quick ones before the slow ones. What has failed is in ``killers.json`` after each defect.

A defect that only the emulated accelerator shows is left out: ``pytest -m accelerator`` is a session of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests import net, selection
from tests.mutation import test_mutants, timing
from tests.mutation.seeding import ROOT, Mutant, put_in

CHEAP = 0.1
"""Seconds. A test that takes less always runs by default."""
AFFORDABLE = 0.4
"""Of each test function the cheapest case always runs by default, if it takes less."""
BY_DEFAULT = "not nightly and not examples and not accelerator"
DEFECTS = {mutant.name: mutant for mutant in test_mutants.MUTANTS if "accelerator" not in mutant.marks}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.matrix")
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects to run; by default those not run yet")
    parser.add_argument("--times", type=Path, help="what tests.mutation.timing wrote: full.txt is written anew")
    parser.add_argument("--choose", action="store_true", help="write full.txt alone, and run no defect")
    given = parser.parse_args()
    times = timing.read(given.times) if given.times else {}
    names = given.names or [name for name in DEFECTS if name not in selection.killers()]
    if not given.choose:
        run([DEFECTS[name] for name in names], times)
    if times:
        full = choose(times, selection.killers())
        selection.FULL.write_text("".join(f"{nodeid}\n" for nodeid in full), encoding="utf-8")
        left = sum(times.values()) - sum(times[nodeid] for nodeid in full)
        print(f"full: {len(full)} of {len(times)} tests. The others took {left:.0f} of {sum(times.values()):.0f} s")


def run(mutants: Iterable[Mutant], times: Mapping[str, float]) -> None:
    for mutant in mutants:
        began = time.monotonic()
        found = failing(mutant, ranks(times, selection.killers()))
        print(f"{time.monotonic() - began:6.1f} s  {mutant.name}: {', '.join(found) or 'NOT CAUGHT'}", flush=True)
        write(selection.killers() | {mutant.name: found})


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
    return found | {nodeid for nodeid in cheapest.values() if times[nodeid] < AFFORDABLE}


def choose(times: Mapping[str, float], killers: Mapping[str, list[str]]) -> list[str]:
    """The tests that are ``full``. Of a defect that has not been run all tests stay in the default set."""
    stay = always(times) | {nodeid for tests in killers.values() for nodeid in tests}
    not_run = tuple(mutant.tests for name, mutant in DEFECTS.items() if name not in killers)
    return sorted(nodeid for nodeid in times if nodeid not in stay and not nodeid.startswith(not_run))


if __name__ == "__main__":
    main()
