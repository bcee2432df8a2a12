"""Defects put in by hand: text replaced in a copy of the source, with which tests must fail."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import instep
from tests import net, selection
from tests.selection import Session

ROOT = Path(__file__).parents[2]
SOURCE = Path(instep.__file__).parents[1]
PACKAGES = ("instep", "instep_tools")
SOME_TESTS_FAILED = 1


class Mutant(NamedTuple):
    """One defect.

    Attributes:
        where: the qualified name of the class, method or function that ``old`` is in, whatever its file; of a statement
            of a module, the name that it assigns or calls.
        old: stands there once.
        new: is put in its place; where it is left out, ``pass``.
        session: which session of the tests catches it.
    """

    name: str
    where: str
    old: str
    new: str | None = None
    session: Session = "cpu"

    @property
    def marks(self) -> str:
        """As for ``-m``; "": the usual ones."""
        return "accelerator" if self.session == "accelerator" else ""


class _Place(NamedTuple):
    """A part of a source file, with the offsets of its text."""

    file: Path
    start: int
    end: int


def place_of(mutant: Mutant) -> _Place:
    """Where ``old`` stands. Several rooms may have a function of one name: ``old`` is in one of them alone."""
    found = [
        (part, text.count(mutant.old, part.start, part.end))
        for part in _places().get(mutant.where, ())
        if mutant.old in (text := _text_of(part.file))
    ]
    there = [(part, count) for part, count in found if count]
    assert len(there) == 1, f"write this defect anew: its text is in {len(there)} places called {mutant.where}"
    part, count = there[0]
    assert count == 1, f"write this defect anew: its text is {count} times in {mutant.where}"
    at = _text_of(part.file).index(mutant.old, part.start)
    return _Place(part.file, at, at + len(mutant.old))


@cache
def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def _places() -> dict[str, list[_Place]]:
    found: dict[str, list[_Place]] = {}
    for file in sorted(path for package in PACKAGES for path in (SOURCE / package).rglob("*.py")):
        text = _text_of(file)
        offsets = [0]
        for line in text.splitlines(keepends=True):
            offsets.append(offsets[-1] + len(line))
        for name, first, last in _named_in(ast.parse(text), ""):
            found.setdefault(name, []).append(_Place(file, offsets[first - 1], offsets[last]))
    return found


def _named_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """The qualified names of what is defined in ``node``, with their first and last lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield prefix + child.name, first, child.end_lineno or first
            yield from _named_in(child, f"{prefix}{child.name}.")
        elif not isinstance(node, ast.Module):
            yield from _named_in(child, prefix)
        elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
            yield child.targets[0].id, child.lineno, child.end_lineno or child.lineno
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            yield ast.unparse(child.value.func), child.lineno, child.end_lineno or child.lineno


def require_there(mutant: Mutant) -> None:
    """The text stands where the defect says, and the source with the defect is Python: a module that cannot be imported
    would let no test begin."""
    ast.parse(_with(mutant))


def require_caught(mutant: Mutant, folder: Path) -> None:
    """By the test that ``tests.mutation.matrix`` has found."""
    put_in(mutant, folder)
    known = selection.killers(mutant.session).get(mutant.name)
    assert known, "nothing is known to catch it: python -m tests.mutation.matrix"
    require_failing(folder, known, marks=mutant.marks)


def put_in(mutant: Mutant, folder: Path) -> None:
    """Into a copy of the source, made in ``folder``."""
    file = copied(folder) / place_of(mutant).file.relative_to(SOURCE)
    file.write_text(_with(mutant), encoding="utf-8")


def _with(mutant: Mutant) -> str:
    place = place_of(mutant)
    text = _text_of(place.file)
    new = "pass" if mutant.new is None else mutant.new
    return text[: place.start] + new + text[place.end :]


def copied(folder: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(SOURCE / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def require_failing(folder: Path, tests: Sequence[str], picks: str = "", marks: str = "") -> None:
    """Some test fails with the source in ``folder``."""
    chosen = [*(("-k", picks) if picks else ()), *(("-m", marks) if marks else ())]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *tests, *chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), "INSTEP_TEST_ALL_CASES": "1"},
        capture_output=True,
        text=True,
        timeout=3 * net.SECONDS,
        check=False,
    )
    assert done.returncode == SOME_TESTS_FAILED, done.stdout[-3000:]
