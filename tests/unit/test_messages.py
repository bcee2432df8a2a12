"""Errors are short: what was found, the line to write, and a page for the rest."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import instep

MOST = 60
"""Words of a message, counted with the longest text of what is put into it."""
PACKAGE, ROOT = Path(instep.__file__).parent, Path(__file__).parents[2]


def constants(trees: list[ast.Module]) -> dict[str, str]:
    """The longest text of each name that a module has: of constants, and of functions that return text."""
    known: dict[str, str] = {}
    for _ in range(3):  # texts are made of texts
        for node in (node for tree in trees for node in tree.body):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names, values = [node.targets[0].id], [node.value]
            elif isinstance(node, ast.FunctionDef):
                values = [r.value for r in ast.walk(node) if isinstance(r, ast.Return) and r.value is not None]
                names = [node.name]
            else:
                continue
            text = max((text_of(value, known) for value in values), key=len, default="")
            known.update((name, text) for name in names if len(text.split()) > 2)
    return known


def text_of(node: ast.expr | ast.FormattedValue, known: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, known) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left, known) + text_of(node.right, known)
    if isinstance(node, ast.IfExp):
        return max(text_of(node.body, known), text_of(node.orelse, known), key=len)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, known) or "x"
    if isinstance(node, ast.Call):
        node = node.func
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""


def messages() -> Iterator[tuple[str, str]]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    known = constants([*trees.values()])
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error"):
                for argument in node.args:
                    if text := text_of(argument, known):
                        yield f"{path.relative_to(PACKAGE)}:{node.lineno}", text


def test_messages_are_short() -> None:
    found = list(messages())
    assert len(found) > 200
    assert sum(len(text.split()) > MOST // 2 for _, text in found) > 50
    long = {where: text for where, text in found if len(text.split()) > MOST}
    assert not long


def test_pages_that_messages_name() -> None:
    """Each is there, with its heading."""
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"docs/[\w/-]+\.md(?:#[\w-]+)?", sources))
    assert {"docs/errors.md", "docs/loops.md#actors-and-critics"} < named
    for name in named:
        page, _, anchor = name.partition("#")
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        headings = {line.lstrip("# ").lower().replace(" ", "-").replace("`", "") for line in lines if line[:1] == "#"}
        assert not anchor or anchor in headings, name
