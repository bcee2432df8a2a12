"""What keeps the code readable: sizes of files, of classes, of what a class keeps, and words. Ruff looks at functions
(C901)."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import instep

ROOT = Path(instep.__file__).parent
FOLDERS = sorted({path.parent for path in ROOT.rglob("*.py")})
LINES_OF_A_FILE, LINES_OF_A_CLASS, FIELDS = 1000, 400, 14
COMMENTS = 4  # lines, for each 100 of code


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


def _too_large(path: Path) -> Iterator[str]:
    """What is, in words."""
    text = path.read_text(encoding="utf-8")
    if (lines := text.count("\n")) > LINES_OF_A_FILE:
        yield f"{path}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            if (lines := (node.end_lineno or 0) - node.lineno + 1 - _lines_of_examples(node)) > LINES_OF_A_CLASS:
                yield f"{path}: {node.name}: {lines} lines"
            if len(fields := fields_of(node)) > FIELDS:
                yield f"{path}: {node.name}: {len(fields)} fields, {sorted(fields)}"


def _lines_of_examples(cls: ast.ClassDef) -> int:
    """The lines that docstrings have from ``Example:`` on: a reader of the code passes them over."""
    documented = (node for node in ast.walk(cls) if isinstance(node, ast.ClassDef | ast.FunctionDef))
    examples = ((ast.get_docstring(node) or "").partition("\nExample:\n")[2] for node in documented)
    return sum(2 + example.count("\n") for example in examples if example)


in_each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))


@in_each_folder
def test_sizes(folder: Path) -> None:
    assert not [found for path in sorted(folder.glob("*.py")) for found in _too_large(path)]


def _functions_in(node: ast.AST) -> Iterator[ast.FunctionDef]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef) and inner is not node)


def _that_call_themselves(path: Path) -> Iterator[str]:
    for outer in _functions_in(ast.parse(path.read_text(encoding="utf-8"))):
        for inner in _functions_in(outer):
            if inner.name in {node.id for node in ast.walk(inner) if isinstance(node, ast.Name)}:
                yield f"{path}: {outer.name}.{inner.name}"


@in_each_folder
def test_no_function_in_a_function_calls_itself(folder: Path) -> None:
    """It would be in a cycle with all that it refers to, gradients among them, until Python's collector comes."""
    assert not [found for path in sorted(folder.glob("*.py")) for found in _that_call_themselves(path)]


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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_class_begins_with_a_sentence(folder: Path) -> None:
    """It says what the class is, before its arguments."""
    classes = [
        (path, cls)
        for path in folder.glob("*.py")
        for cls in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(cls, ast.ClassDef)
    ]
    bare = [f"{path}: {cls.name}" for path, cls in classes if not _has_sentence(cls)]
    assert not bare


def _has_sentence(cls: ast.ClassDef) -> bool:
    text = ast.get_docstring(cls)
    return text is not None and not text.startswith(("Args:", "Attributes:"))


def test_reasons_stand_beside_the_code() -> None:
    comments = code = 0
    for path in ROOT.rglob("*.py"):
        tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline))
        comments += len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})
        code += len({token.start[0] for token in tokens if token.type in (tokenize.NAME, tokenize.OP)})
    assert 100 * comments / code >= COMMENTS
