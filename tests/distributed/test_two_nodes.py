"""``examples/fsdp2.py`` as a user runs it: plain and attached, on one node, and on two that a network joins."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import net

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Network namespaces joined by a veth pair, with the addresses 10.79.0.1 and 10.79.0.2."""
    names = [f"instep{os.getpid()}{side}" for side in "ab"]
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", "node0", "netns", names[0], "type", "veth", "peer", "name", "node1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.79.0.{number + 1}/24", "dev", f"node{number}")
            ip("-n", name, "link", "set", f"node{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def weights_in(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("weights "))


def one_node(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=net.SECONDS, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return weights_in(done.stdout)


pytestmark = [pytest.mark.nightly, pytest.mark.timeout(4 * net.SECONDS)]


@pytest.fixture(scope="module")
def plain() -> str:
    return one_node("--plain")


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_one_line_changes_no_weight(plain: str, schedule: str, tmp_path: Path) -> None:
    assert one_node("--schedule", schedule, "--checkpoint", str(tmp_path)) == plain


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_two_nodes(plain: str, schedule: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            names = stack.enter_context(two_namespaces())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', error)}")
        nodes = []
        for number, name in enumerate(names):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--nproc-per-node", "1", "--node-rank", str(number), "--master-addr", "10.79.0.1"]
            command += ["--master-port", "29479", str(EXAMPLE), "--schedule", schedule, "--checkpoint", str(tmp_path)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"node{number}"}
            node = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
            stack.callback(node.kill)
            nodes.append(node)
        said = [node.communicate(timeout=net.SECONDS) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], said
    assert weights_in(said[0][0]) == plain
