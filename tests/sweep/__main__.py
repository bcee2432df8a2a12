"""``python -m tests.sweep``: all cases, in environments of their own; at the end the table."""

import argparse
import json
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.sweep import environments, table
from tests.sweep.cases import CASES, LEFT_OUT, Case
from tests.sweep.judging import EQUAL, NOT_JUDGED, Result

SHAPES = tuple(table.SHAPES)
LONGEST = 3600
"""Seconds of one case, of all its runs."""
_writing = threading.Lock()


def run(case: Case, folder: Path, shapes: str, results: Path) -> None:
    """A case, in its environment; a case that does not even begin is a line of its own."""
    name = "".join(letter if letter.isalnum() else "-" for letter in case.name)
    command = [str(environments.python_of(folder, case.environment)), "-m", "tests.sweep.one"]
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    command += [case.name, str(runs / name), shapes]
    cache = [("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))]
    began = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        cwd=runs,  # Python looks for modules where it starts: not where a folder is called triton
        env=environments.variables(cache),
    )
    lines = [line for line in began.stdout.splitlines() if line.startswith('{"case"')]
    if not lines:
        said = (began.stderr.strip().splitlines() or ["nothing is said"])[-1]
        result = Result(NOT_JUDGED, f"does not begin: {said}")
        lines = [json.dumps({"case": case.name, "shape": "one", "way": "backward", **asdict(result)})]
    with _writing:
        with results.open("a") as file:
            file.write("\n".join(lines) + "\n")
        worse = [json.loads(line)["verdict"] for line in lines]
        print(f"{case.name}: {', '.join(dict.fromkeys(worse)) or EQUAL}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--environment", type=Path, help="a folder for the environments and runs, which is kept")
    parser.add_argument("--cases", nargs="*", help="only cases whose name has one of these texts; writes no table")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of one, ddp, fsdp; all, or no table is written")
    parser.add_argument("--results", type=Path, help="JSON lines; by default results.jsonl in the folder")
    parser.add_argument("--read", action="store_true", help="run nothing: the table from the results that are there")
    parser.add_argument("--resume", action="store_true", help="leave out cases whose results are there already")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="name the cases, and what was left out")
    options = parser.parse_args()
    if options.list:
        print("\n".join(case.name for case in CASES))
        print("\n".join(f"left out: {name}: {why}" for name, why in LEFT_OUT.items()))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.environment or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results = (options.results or folder / "results.jsonl").resolve()
        if not options.read:
            _run_all(options, folder, results)
        rows = table.read(results)
    print(table.summary(rows))
    if not options.cases and options.shapes == ",".join(SHAPES):
        table.write(rows)


def _run_all(options: argparse.Namespace, folder: Path, results: Path) -> None:
    environments.make(folder)
    chosen = [case for case in CASES if not options.cases or any(text in case.name for text in options.cases)]
    if options.resume and results.exists():
        there = {(row["case"], row["shape"]) for row in table.read(results)}
        chosen = [
            case for case in chosen if any((case.name, shape) not in there for shape in options.shapes.split(","))
        ]
    elif not options.cases:
        results.unlink(missing_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for _ in pool.map(lambda case: run(case, folder, options.shapes, results), chosen):
            pass


if __name__ == "__main__":
    main()
