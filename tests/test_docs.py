"""What the documentation says of the repository is there, and its code runs."""

import importlib.util
import inspect
import logging
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
import yaml

from instep import errors
from tests import documentation
from tests.distributed.pool import RankPool
from tests.documentation import PAGES, ROOT, Block, CommandError, blocks_of, check_command, commands_of

# Importing torch.distributed.optim compiles torch's functional optimizers; torch.compile looks at every `.grad`.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),
    # Of transformers, where there is no GPU; and of Lightning, about a class of torch's.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

TESTS = list((ROOT / "tests").rglob("test_*.py"))
LANGUAGES = {"python", "diff", "sh", "text", "mermaid", "yaml"}
# Blocks that are titled "not run: …", on all pages together.
MAY_BE_LEFT_OUT = 2
CODE = [block for page in PAGES for block in blocks_of(page) if block.language in ("python", "diff")]
PUBLIC = documentation.public_names()
MEMBERS = {key: one for name, public in PUBLIC.items() for key, one in documentation.members_of(name, public).items()}
EXAMPLES = [block for name, public in MEMBERS.items() for block in documentation.examples_of(name, public)]
SINCE = "Since 0.1.0."
MOST_LINES = 10  # of an example, without empty ones


@pytest.mark.parametrize(("page", "at_least"), [("features.md", 90)])
def test_every_test_in_the_tables_exists(page: str, at_least: int) -> None:
    assert len(cited_tests(ROOT / "docs" / page)) > at_least


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_paths_and_tests_lead_somewhere(page: Path) -> None:
    text = documentation.text_of(page)
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (page.parent / link).exists(), link
    assert not missing_paths(text)
    files: dict[str, list[Path]] = {}
    for path in TESTS:
        files.setdefault(path.stem.removeprefix("test_"), []).append(path)
    for name, test in cited_tests(page):
        source = "".join(path.read_text(encoding="utf-8") for path in files[name])
        assert re.findall(r"^def (test_\w+)", source, re.MULTILINE).count(test) == 1, test


def cited_tests(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"`(\w+)::(test_\w+)`", page.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's checkpoints say so of one process
@pytest.mark.parametrize("block", [block for block in [*CODE, *EXAMPLES] if not block.not_run], ids=str)
def test_a_block_runs(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if block.language == "python":
        for variant in documentation.variants(block.code):
            run(variant, block, tmp_path, request)
        return
    before, after = documentation.sides(block.code)
    weights = run(after, block, tmp_path, request)
    if all(map(importlib.util.find_spec, documentation.modules_of(before))):
        plain = run(before, block, tmp_path, request)
        assert (weights is None) == (plain is None)
        assert weights is None or all(map(torch.equal, weights, plain or ()))


def run(code: str, block: Block, directory: Path, request: pytest.FixtureRequest) -> list[torch.Tensor] | None:
    if not documentation.needs_ranks(code):
        return documentation.run(code, str(block), str(directory))
    ranks: RankPool = request.getfixturevalue("two_ranks")
    found: list[torch.Tensor] | None = ranks.run(documentation.run, code, str(block), str(directory))[0]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist_and_take_their_options(page: Path, pytestconfig: pytest.Config) -> None:
    for command in commands_of(page):
        check_command(command, "\n".join(pytestconfig.getini("markers")))


def test_blocks_say_what_they_are_and_few_are_left_out() -> None:
    found = [block for page in PAGES for block in blocks_of(page)]
    assert {block.language for block in found} <= LANGUAGES
    left_out = [block for block in found if block.not_run]
    assert len(left_out) <= MAY_BE_LEFT_OUT, [f"{block}: {block.title}" for block in left_out]
    assert len(CODE) > 35


ATTACHED = 'overlap = instep.attach(model, optimizer, schedule="backward")\n'


@pytest.mark.parametrize(
    "code",
    [
        "overlap = instep.attach(model, optimiser)",
        "overlap = instep.attach(model, optimizer, schedule='sideways')",
        ATTACHED + "for batch in loader:\n    model(batch).backward()",
        "overlap = instep.attach(model, optimizer)\n# or: overlap = instep.attach(model, optimizer, clip='1.0')",
        "overlap = instep.attach(model, optimizer)\noverlap = instep.attach(model, optimizer, undo='disk')",
        "def loop():\n    return weight\nloop()",
    ],
    ids=[
        "a typo",
        "an option's value",
        "a loop without step()",
        "an alternative",
        "one of two",
        "a name in a function",
    ],
)
def test_a_broken_block_is_found(code: str, tmp_path: Path) -> None:
    def run_all() -> None:
        for variant in documentation.variants(code):
            documentation.run(variant, "a broken block", str(tmp_path))

    with pytest.raises((NameError, ValueError, errors.InstepError)):
        run_all()


@pytest.mark.parametrize(
    "command",
    [
        "instep dmeo",
        "instep demo --stepz 3",
        "instep demo --steps three",
        "pytest tests/unit/test_nothing.py",
        "pytest -m monthly",
        "python benchmarks/zero.py --rounds three",
        "python benchmarks/simulate.py --rank 64 --gigabits 1",
        "python examples/one_device.py --steps 3",
        "torchrun --standalone --nproc-per-nod 2 examples/ddp.py --x",
        "pip install -c constraint.txt .",
        "pip install 'instep[gpu]'",
        "mkdocs bild",
        "bash benchmarks/nothing.sh",
        "rm -r run",
    ],
)
def test_a_broken_command_is_found(command: str) -> None:
    with pytest.raises(CommandError):
        check_command(command, "nightly: long sweeps")


@pytest.mark.parametrize("text", ["```\nx\n```\n", "  ```python\n  x\n  ```\n", "```python\nx\n"])
def test_a_fence_that_nobody_would_run_is_found(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md:1"):
        blocks_of(page)


def test_the_reference_has_every_public_name() -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    listed = re.findall(r"^::: ([\w.]+)", "\n".join(pages), re.MULTILINE)
    assert sorted(listed) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_docstring_says_since_when_and_ends_in_an_example(name: str) -> None:
    text, _, example = (inspect.getdoc(PUBLIC[name]) or "").partition("\n\nExample:\n")
    assert text.endswith(f"\n\n{SINCE}")
    assert example or name.startswith("instep.errors.")


@pytest.mark.parametrize("name", MEMBERS)
def test_an_example_is_one_short_block_of_python(name: str) -> None:
    """What editors and the site show as code: indented below ``Example:``, and nothing after it."""
    doc, blocks = inspect.getdoc(MEMBERS[name]) or "", documentation.examples_of(name, MEMBERS[name])
    assert len(blocks) == len(re.findall(r"^\s*Examples?:", doc, re.MULTILINE)) == doc.count("```") / 2 <= 1
    for block in blocks:
        fenced = textwrap.indent(f"```python\n{block.code}\n```", "    ")
        assert doc.endswith(f"\n\nExample:\n{fenced}")
        assert len([line for line in block.code.splitlines() if line]) <= MOST_LINES


def missing_paths(text: str) -> list[str]:
    """The paths of the repository that ``text`` names, and that are not there."""
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./]+)", text)
    return [path for path in named if not (ROOT / path).exists()]


def test_paths_in_the_sources_lead_somewhere() -> None:
    missing = {str(p): found for p in (ROOT / "src").rglob("*.py") if (found := missing_paths(p.read_text("utf-8")))}
    assert not missing


def test_a_path_that_leads_nowhere_is_found() -> None:
    assert missing_paths("``tests/test_docs.py`` and `docs/index.md`, ``tests/unit/test_nothing.py`` fails") == [
        "tests/unit/test_nothing.py"
    ]


def test_hooks_before_a_commit_download_nothing() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [one["repo"] for one in repositories] == ["local"]
    hooks = {hook["entry"].split()[0]: hook["language"] for hook in repositories[0]["hooks"]}
    assert hooks == {"ruff": "system", "mypy": "system"}


@pytest.mark.parametrize("finding", sorted((ROOT / "findings").glob("*")), ids=lambda path: path.stem)
def test_a_finding_has_its_form(finding: Path) -> None:
    """That of CONTRIBUTING.md. It is not run: it installs packages."""
    text = finding.read_text(encoding="utf-8")
    top, _, rest = text.partition("set -euo pipefail\n")
    assert finding.suffix == ".sh"
    said = re.findall(r"^# (Question|A good guess|What happens|Version|Source|Who meets it): \S", top, re.MULTILINE)
    assert said == ["Question", "A good guess", "What happens", "Version", "Source", "Who meets it"]
    assert "instep" not in text
    assert "$(mktemp -d)" in rest
    assert "torch==" in rest.partition("program")[0]
    assert max(map(len, top.splitlines())) <= 120
    subprocess.run(["bash", "-n", str(finding)], check=True)


def test_a_report_of_a_bug_asks_for_the_environment() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8"))
    required = [one["attributes"]["label"] for one in form["body"] if one.get("validations", {}).get("required")]
    assert "The output of `instep env`" in required


def test_docstrings_name_things_as_code() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        found = re.findall(r":\w+:`", path.read_text(encoding="utf-8"))
        assert not found, f"{path}: the site shows Sphinx's roles as they are written; write ``name``"


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")  # the theme's advertisement
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    built = list(tmp_path.rglob("*.html"))
    assert len(built) > 25
    for page in built:
        text = page.read_text(encoding="utf-8")
        loads = r"<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)"
        assert not re.findall(loads, text), page
    for sheet in tmp_path.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_the_citation_is_of_the_version_that_comes() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert citation["version"] == newest[1]
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
