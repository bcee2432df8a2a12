"""Sizes that keep the code readable: of files, of classes, of what a class keeps. Ruff looks at functions (C901)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import instep

ROOT = Path(instep.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LINES_OF_A_FILE, LINES_OF_A_CLASS, FIELDS = 450, 330, 14


def fields_of(cls: ast.ClassDef) -> set[str]:
    """Names that its methods assign to on ``self``, in a tuple too, and those that a dataclass declares."""
    found = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(cls):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
    return found


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from ast.walk(target)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield node.target


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= LINES_OF_A_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= LINES_OF_A_CLASS, node.name
            assert len(fields_of(node)) <= FIELDS, (node.name, sorted(fields_of(node)))


def _functions_in(node: ast.AST) -> Iterator[ast.FunctionDef]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef) and inner is not node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_in_a_function_calls_itself(path: Path) -> None:
    """It would be in a cycle with all that it refers to, gradients among them, until Python's collector comes."""
    for outer in _functions_in(ast.parse(path.read_text(encoding="utf-8"))):
        for inner in _functions_in(outer):
            names = {node.id for node in ast.walk(inner) if isinstance(node, ast.Name)}
            assert inner.name not in names, f"{outer.name}.{inner.name}"


def test_fields_are_counted() -> None:
    source = """
class A:
    x: int
    def f(self):
        self.y = 1
        self.z, other.w = 1, 2
        self.y += 1
"""
    (cls,) = ast.parse(source).body
    assert isinstance(cls, ast.ClassDef)
    assert fields_of(cls) == {"x", "y", "z"}
