"""What a release would hold: ``pytest -m examples``."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import net

pytestmark = [pytest.mark.examples, pytest.mark.timeout(2 * net.SECONDS)]

ROOT = Path(__file__).parents[1]
PAGE = "instep_tools/report/templates/page"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=net.SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the sdist of what is committed, tagged v9.8.7."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git's")
    checkout = tmp_path_factory.mktemp("release") / "instep"
    run("git", "clone", "--quiet", ROOT, checkout, cwd=ROOT)
    user = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    run("git", *user, "tag", "--annotate", "--message", "instep 9.8.7", "v9.8.7", cwd=checkout)
    run(sys.executable, "-m", "build", cwd=checkout)
    return checkout / "dist"


def test_the_tag_is_the_version(release: Path) -> None:
    assert {path.name for path in release.iterdir()} == {"instep-9.8.7-py3-none-any.whl", "instep-9.8.7.tar.gz"}


def test_an_installed_wheel_is_whole(release: Path, tmp_path: Path) -> None:
    """Beside the installed dependencies, without the checkout."""
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        tmp_path / "site",
        *release.glob("*.whl"),
        cwd=tmp_path,
    )
    path = {"PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "120"}
    assert run(sys.executable, "-m", "instep", "env", cwd=tmp_path, **path).split()[:2] == ["instep:", "9.8.7"]
    said = run(sys.executable, "-c", "from instep_tools.report import page; print(page.__file__)", cwd=tmp_path, **path)
    assert Path(said.strip()).is_relative_to(tmp_path)


def test_what_belongs_to_a_release_is_in_the_archives(release: Path) -> None:
    with zipfile.ZipFile(next(release.glob("*.whl"))) as wheel:
        found = wheel.namelist()
    assert {"instep/py.typed", "instep_tools/py.typed", f"{PAGE}.html", f"{PAGE}.css"} <= set(found)
    assert any(name.endswith("licenses/LICENSE") for name in found)
    assert not [name for name in found if name.startswith(("tests", "benchmarks"))]
    with tarfile.open(next(release.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "docs/index.md", "tests/README.md", "src/instep/py.typed"} <= names
    assert not [name for name in names if name.startswith("findings")]
