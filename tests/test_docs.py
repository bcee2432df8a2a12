"""What the documentation says of the repository is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TESTS = list((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize(("page", "at_least"), [("features.md", 50), ("checkpoints.md", 20), ("reliability.md", 7)])
def test_every_test_in_the_tables_exists(page: str, at_least: int) -> None:
    files: dict[str, list[Path]] = {}
    for path in TESTS:
        files.setdefault(path.stem.removeprefix("test_"), []).append(path)
    cited = re.findall(r"`(\w+)::(test_\w+)`", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(cited) > at_least
    for name, test in cited:
        text = "".join(path.read_text(encoding="utf-8") for path in files[name])
        assert re.findall(r"^def (test_\w+)", text, re.MULTILINE).count(test) == 1, test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (page.parent / link).exists(), link
    for path in re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
