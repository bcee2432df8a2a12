"""torchft's ``Manager`` around ``DistributedDataParallel``: two replica groups, which vote on each step."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import net
from tests.frameworks.comparing import optional
from tests.frameworks.torchft_replica import LOST, STEPS

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[str]:
    """The address of the server by which replicas find one another, in this process."""
    server = optional("torchft.coordination").LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    yield re.sub(r"//[^/]*:", "//127.0.0.1:", server.address())
    server.shutdown()


def train(way: str, lighthouse: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.frameworks.torchft_replica"]
    replicas = [
        subprocess.Popen([*command, str(number), way, lighthouse], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    try:
        return [json.loads(replica.communicate(timeout=net.SECONDS / 4)[0].splitlines()[-1]) for replica in replicas]
    finally:
        for replica in replicas:
            with replica:  # its pipe
                replica.kill()


def test_training(lighthouse: str) -> None:
    """The default line and ``"forward"`` are the plain loop, also where a replica leaves out a step and is healed."""
    plain = train("plain", lighthouse)
    assert plain[0]["votes"] == [number != LOST for number in range(STEPS)]
    assert plain[0]["weights"] == plain[1]["weights"]
    for way in ("default", "forward"):
        found = train(way, lighthouse)
        assert [replica["steps"] for replica in found] == [STEPS - 1, STEPS]
        assert [{**replica, "steps": None} for replica in found] == plain


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("backward", r"torchft.*schedule='forward'"),
        ("undo", r"torchft.*schedule='forward'"),
        ("shard_state", r"shard_state=True.*ProcessGroupDummy"),
    ],
)
def test_what_is_refused(lighthouse: str, way: str, said: str) -> None:
    for replica in train(way, lighthouse):
        assert re.search(said, replica["refused"], re.DOTALL)
