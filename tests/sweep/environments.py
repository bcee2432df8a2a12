"""Virtual environments with the pinned packages of the cases."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.sweep.cases import CASES

ROOT = Path(__file__).parents[2]


def python_of(folder: Path, name: str) -> Path:
    return folder / name / "bin" / "python"


def make(folder: Path) -> None:
    """Each environment that a case names; one that has its pins already stays as it is."""
    for name in dict.fromkeys(case.environment for case in CASES):
        pins = sorted({pin for case in CASES if case.environment == name for pin in case.pins})
        wanted = "\n".join([*_needs(), *pins])
        marker = folder / name / "installed.txt"
        if marker.exists() and marker.read_text() == wanted:
            continue
        print(f"environment {name}: {len(pins)} packages", flush=True)
        if not python_of(folder, name).exists():
            _run(sys.executable, "-m", "venv", str(folder / name))
        _install(python_of(folder, name), [*_needs(), *pins])
        marker.write_text(wanted)


def _needs() -> list[str]:
    """What instep itself needs: it is imported from the checkout."""
    line = re.search(r"^dependencies = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert line is not None
    return list(json.loads(line[1]))


def _install(python: Path, names: list[str]) -> None:
    """All at once; if that does not go, one by one: a case whose package is missing says so."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--prefer-binary", "-c", str(ROOT / "constraints.txt")]
    if _run(*pip, *names, check=False):
        for name in names:
            if _run(*pip, name, check=False):
                print(f"{name} was not installed", flush=True)


def _run(*command: str, check: bool = True) -> int:
    return subprocess.run(command, check=check, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}).returncode


def variables(extra: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """Of the processes that run cases: one thread, the same hashes, nothing but this machine."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no workers, which would outlive the process that a run is
        **dict(extra),
    }
