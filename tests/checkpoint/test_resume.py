"""Elastic restarts, with torchrun itself: whatever is killed, the weights are those of a run that was not."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import net

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume.py"


def trained(path: Path, *arguments: str, restarts: int = 0) -> str:
    """The checksum that the example prints, after as many restarts as there were kills.

    torch 2.13 gives workers that are started again the store of those before them, with the addresses of these, which
    gloo may then try to connect to (pytorch issue 135712). The variable gives each start a store of its own.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [*command, "--max-restarts", str(restarts), str(EXAMPLE), "--path", str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=net.SECONDS * (1 + restarts),
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kills itself in step") == restarts
    (checksum,) = re.findall(r"weights after step \d+: (\w+)", done.stdout)
    return str(checksum)


@pytest.mark.nightly
@pytest.mark.timeout(5 * net.SECONDS)
def test_killed_ranks_start_again_and_end_the_same(tmp_path: Path) -> None:
    expected = trained(tmp_path / "whole", "--steps", "12")
    kills = ["--kill-at", "5", "11"]
    assert trained(tmp_path / "killed", "--steps", "12", *kills, restarts=2) == expected


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_sixty_kills(tmp_path: Path, schedule: str) -> None:
    options = ["--steps", "40", "--schedule", schedule]
    expected = trained(tmp_path / "whole", *options)
    rng = random.Random(schedule)
    for number in range(5):
        kills = sorted(rng.sample(range(1, 41), 6))
        found = trained(
            tmp_path / str(number), *options, "--save-every", "1", "--kill-at", *map(str, kills), restarts=len(kills)
        )
        assert found == expected, f"killed in steps {kills}"
