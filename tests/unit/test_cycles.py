"""No error that instep raises refers to itself: else all that the loop holds stays until Python's collector comes."""

import ast
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import instep
from instep._step.update import Update

SOURCE = Path(instep.__file__).parent


def raised_and_kept(node: ast.AST, cleared: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Where a local variable is raised that is there when the frame is left: the error has a traceback, that has the
    frame, and that has the error."""
    if isinstance(node, ast.Try):
        deleted = [target for one in node.finalbody if isinstance(one, ast.Delete) for target in one.targets]
        inside = cleared.union(target.id for target in deleted if isinstance(target, ast.Name))
        for child in ast.iter_child_nodes(node):
            yield from raised_and_kept(child, cleared if child in node.finalbody else inside)
        return
    if isinstance(node, ast.ExceptHandler) and node.name is not None:
        cleared = cleared | {node.name}  # Python does
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id not in cleared:
        yield node.lineno, node.exc.id
    for child in ast.iter_child_nodes(node):
        yield from raised_and_kept(child, cleared)


def test_no_frame_keeps_the_error_that_it_raises() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, name in raised_and_kept(ast.parse(path.read_text(encoding="utf-8")))
        if name.islower()
    ]
    assert not found


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> list["weakref.ref[Any]"]:
    """All that are handed over, and their gradients."""
    made: list[weakref.ref[Any]] = []
    init = Update.__init__

    def noted(self: Update, *args: Any) -> None:
        init(self, *args)
        made.extend([weakref.ref(self), weakref.ref(self.step), *map(weakref.ref, self.gradients)])

    monkeypatch.setattr(Update, "__init__", noted)
    return made
