"""A part of the tests on the emulated accelerator, in a session of its own: the device must be there from the start."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.building import compiler, why_not

ROOT = Path(__file__).parents[1]
PART = ["one_device.py", "emulation.py", "limits.py"]
SOME = "test_emulation or test_limits or test_clips or test_a_scaler or (backward and another and False)"


def test_a_part() -> None:
    reason = why_not()
    if reason is not None and compiler() is None:
        pytest.skip(reason)
    assert reason is None
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "accelerator", "-k", SOME]
    command += [str(ROOT / "tests" / "accelerator" / f"test_{name}") for name in PART]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-2_000:]
    print(ended.stdout.splitlines()[-1])
