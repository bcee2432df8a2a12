"""Which tests kill which seeded defect, and which tests are therefore ``full``: ``python -m tests.mutation.matrix``.

    python -m tests.mutation.matrix NAME ... --in tests/parity   # runs these defects, with the tests of this folder
    python -m tests.mutation.matrix --in tests   # runs those that have not been run; it can be stopped at any time

    INSTEP_TEST_TIMES=times pytest -n 1 -p tests.mutation.timing -m 'not nightly and not examples and not accelerator'
    python -m tests.mutation.matrix --times times   # the same in a better order, and writes full.txt anew at the end

    INSTEP_TEST_TIMES=times pytest -n 1 -p tests.mutation.timing -m accelerator
    python -m tests.mutation.matrix --session accelerator --times times   # writes accelerator/{cases,slow}.txt instead

Without ``--in`` the files of the known killers are run, up to the first test that fails: those that are in a plain
``pytest`` in any case, then those that kill another defect, then the quick ones before the slow ones. What has failed
is in ``killers.json`` after each defect.

Defects that only the emulated accelerator shows are of another session, ``pytest -m accelerator``. They have a file of
their own, ``stream_killers.json``: what kills them there need not run on the CPU, nor the other way round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from tests import net, selection
from tests.mutation import test_mutants, test_stream_mutants, timing
from tests.mutation.seeding import ROOT, Mutant, put_in
from tests.selection import Session

CHEAP = 0.03
"""Seconds. A test that takes less always runs by default."""
AFFORDABLE = 0.15
"""Of each test function the cheapest case always runs by default, if it takes less."""
AFFORDABLE_ON_ACCELERATOR = 0.3
"""The same in the session on the accelerator, where a test takes several times as long."""
BY_DEFAULT = "not nightly and not examples and not accelerator"
DEFECTS = {mutant.name: mutant for mutant in (*test_mutants.MUTANTS, *test_stream_mutants.MUTANTS)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.matrix")
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects to run; by default those not run yet")
    parser.add_argument("--in", dest="files", nargs="+", default=[], help="the files or folders whose tests are run")
    parser.add_argument("--picks", default="", help="which of their tests, as for pytest's -k")
    parser.add_argument("--times", type=Path, help="what tests.mutation.timing wrote: the session's list is made anew")
    parser.add_argument("--choose", action="store_true", help="write the list alone, and run no defect")
    parser.add_argument("--session", choices=get_args(Session), default="cpu", help="the session of times and defects")
    given = parser.parse_args()
    session: Session = given.session
    times = timing.read(given.times) if given.times else {}
    if not given.choose:
        run([DEFECTS[name] for name in given.names] or not_run(session), times, given.files, given.picks)
    if times and session == "cpu":
        full = choose(times)
        write(selection.FULL, full)
        rest = [seconds for nodeid, seconds in times.items() if nodeid not in full]
        print(f"full: {len(full)} tests. {len(rest)} others took {sum(rest):.0f} of {sum(times.values()):.0f} s")
    elif times:
        write(selection.ON_ACCELERATOR, choose_on_accelerator(times))
        write(selection.SLOW_ON_ACCELERATOR, slow_on_accelerator(times))
        chosen = selection.chosen_on_accelerator(times)
        left = sum(times[nodeid] for nodeid in chosen)
        print(f"CI: {len(chosen)} of {len(times)} tests. They took {left:.0f} of {sum(times.values()):.0f} s")


def not_run(session: Session) -> list[Mutant]:
    known = selection.killers(session)
    return [mutant for mutant in DEFECTS.values() if mutant.session == session and mutant.name not in known]


def run(mutants: Iterable[Mutant], times: Mapping[str, float], files: Sequence[str] = (), picks: str = "") -> None:
    for mutant in mutants:
        began = time.monotonic()
        known = selection.killers(mutant.session).get(mutant.name, ())
        where = files or sorted(set(map(selection.file_of, known)))
        if not where:
            raise SystemExit(f"{mutant.name}: no test is known to catch it; say --in which file or folder to look")
        found = failing(mutant, ranks(times, mutant.session), where, picks)
        print(f"{time.monotonic() - began:6.1f} s  {mutant.name}: {', '.join(found) or 'NOT CAUGHT'}", flush=True)
        write_killers(mutant.session, selection.killers(mutant.session) | {mutant.name: found})


def write_killers(session: Session, killers: Mapping[str, list[str]]) -> None:
    """In the order of the defects, without those that are no more."""
    names = [mutant.name for mutant in DEFECTS.values() if mutant.session == session]
    there = {name: killers[name] for name in names if name in killers}
    text = json.dumps(there, indent=1, ensure_ascii=False) + "\n"
    selection.KILLERS[session].write_text(text, encoding="utf-8")


def write(file: Path, nodeids: Iterable[str]) -> None:
    file.write_text("".join(f"{nodeid}\n" for nodeid in nodeids), encoding="utf-8")


def failing(mutant: Mutant, order: Mapping[str, float], files: Sequence[str], picks: str) -> list[str]:
    """The first test that fails with the defect: of those that run by default or are ``full``, or else of all cases."""
    for cases in ({}, {"INSTEP_TEST_ALL_CASES": "1"}):
        with tempfile.TemporaryDirectory(prefix="instep-defect-") as folder:
            put_in(mutant, Path(folder))
            failed, orders = Path(folder, "failed"), Path(folder, "orders")
            failed.touch()
            orders.write_text(json.dumps({"ranks": order, "failed": str(failed)}), encoding="utf-8")
            command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *files]
            command += ["-p", "tests.mutation.ordering", "-m", mutant.marks or BY_DEFAULT]
            command += ["-k", picks] if picks else []
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


def ranks(times: Mapping[str, float], session: Session) -> dict[str, float]:
    """The order in which to try tests: what runs in any case, what kills another defect, the rest."""
    free = always(times) if session == "cpu" else set(cheapest_cases(times))
    chosen = selection.killing(session)
    slowest = max(times.values(), default=0.0) + 1
    return {
        nodeid: seconds + slowest * (0 if nodeid in free else 1 if nodeid in chosen else 2)
        for nodeid, seconds in times.items()
    }


def always(times: Mapping[str, float]) -> set[str]:
    """What runs by default, whatever it kills: cheap tests, and the cheapest case of each function."""
    found = {nodeid for nodeid, seconds in times.items() if seconds < CHEAP}
    return found | {nodeid for nodeid in cheapest_cases(times) if times[nodeid] < AFFORDABLE}


def cheapest_cases(times: Mapping[str, float]) -> list[str]:
    """One of each function."""
    found: dict[str, str] = {}
    for nodeid in sorted(times, key=lambda nodeid: times[nodeid]):
        found.setdefault(selection.function_of(nodeid), nodeid)
    return list(found.values())


def choose(times: Mapping[str, float]) -> list[str]:
    """The tests that are ``full``; those that were not measured are if they were."""
    assert not not_run("cpu"), not_run("cpu")
    stay = always(times) | selection.killing("cpu")
    known = times.keys() | selection.listed(selection.FULL)
    return sorted(nodeid for nodeid in known if nodeid not in stay and not nodeid.startswith(selection.OF_THE_CODE))


def choose_on_accelerator(times: Mapping[str, float]) -> list[str]:
    """The case of each function that CI runs on the accelerator, where the function has several, is not slow and kills
    no defect with any of them."""
    assert not not_run("accelerator"), not_run("accelerator")
    functions = Counter(map(selection.function_of, times))
    killing = set(map(selection.function_of, selection.killing("accelerator")))
    several = {function for function, count in functions.items() if count > 1} - killing - {*slow_on_accelerator(times)}
    return sorted(nodeid for nodeid in cheapest_cases(times) if selection.function_of(nodeid) in several)


def slow_on_accelerator(times: Mapping[str, float]) -> list[str]:
    """The functions of which every case is slow."""
    cheapest = cheapest_cases(times)
    return sorted(selection.function_of(nodeid) for nodeid in cheapest if times[nodeid] > AFFORDABLE_ON_ACCELERATOR)


if __name__ == "__main__":
    main()
