"""Defects put in by hand: text replaced in a copy of the source, with which tests must fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import instep
from tests import net

ROOT = Path(__file__).parents[2]
SOURCE = Path(instep.__file__).parent
SOME_TESTS_FAILED = 1


class Mutant(NamedTuple):
    """One defect.

    Attributes:
        tests: the file or folder whose tests catch it.
        picks: which of them, as for ``-k``; "": all.
        marks: as for ``-m``; "": the usual ones.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    picks: str = ""
    marks: str = ""


def require_there(mutant: Mutant) -> None:
    assert (SOURCE / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, "write this defect anew"
    assert (ROOT / mutant.tests).exists()


def require_caught(mutant: Mutant, folder: Path) -> None:
    """In a copy of the source, made in ``folder``."""
    file = copied(folder) / mutant.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, "the code has changed: write this defect anew"
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    require_failing(folder, mutant.tests, mutant.picks, mutant.marks)


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(SOURCE, folder / "instep", ignore=shutil.ignore_patterns("__pycache__")))


def require_failing(folder: Path, tests: str, picks: str = "", marks: str = "") -> None:
    """Some test fails with the source in ``folder``."""
    chosen = [*(("-k", picks) if picks else ()), *(("-m", marks) if marks else ())]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", tests, *chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), "INSTEP_TEST_ALL_CASES": "1"},
        capture_output=True,
        text=True,
        timeout=3 * net.SECONDS,
        check=False,
    )
    assert done.returncode == SOME_TESTS_FAILED, done.stdout[-3000:]
