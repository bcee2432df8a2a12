"""A network between two ranks on one machine: two network namespaces, joined by a shaped virtual link. Needs root."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager


class Link:
    """Two namespaces, in which the ranks are 10.78.0.1 and 10.78.0.2."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def shape(self, gbits: float, delay_ms: float = 0.0) -> None:
        """Let so many Gbit/s pass in each direction; ``0``: as many as the machine can."""
        for number, name in enumerate(self._names):
            device = f"rank{number}"
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
            if gbits:
                bucket = f"rate {gbits * 1000:.0f}mbit burst {max(256, int(gbits * 128))}kb latency 50ms"
                _run(*f"tc -n {name} qdisc add dev {device} root handle 1: tbf {bucket}".split())
            if gbits and delay_ms:
                late = f"netem delay {delay_ms}ms limit 100000"
                _run(*f"tc -n {name} qdisc add dev {device} parent 1:1 {late}".split())

    def run(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, seconds: float = 1800) -> str:
        """Run this Python with ``arguments`` as both ranks, one core each. Returns what rank 0 printed.

        Raises:
            RuntimeError: a rank failed; with what it said.
        """
        with ExitStack() as stack:
            ranks = []
            for number, name in enumerate(self._names):
                core = sorted(os.sched_getaffinity(0))[number]
                command = ["ip", "netns", "exec", name, "taskset", "-c", str(core), sys.executable, "-W", "ignore"]
                settings = {
                    **os.environ,
                    **(environment or {}),
                    "MASTER_ADDR": "10.78.0.1",
                    "MASTER_PORT": "29480",
                    "WORLD_SIZE": "2",
                    "RANK": str(number),
                    "GLOO_SOCKET_IFNAME": f"rank{number}",
                    "OMP_NUM_THREADS": "1",
                }
                rank = subprocess.Popen(
                    [*command, *arguments],
                    stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=settings,
                )
                stack.callback(rank.kill)
                ranks.append(rank)
            said = [rank.communicate(timeout=seconds) for rank in ranks]
            if any(rank.returncode for rank in ranks):
                raise RuntimeError("\n".join(str(error)[-3000:] for _, error in said))
            return said[0][0]


@contextmanager
def two_namespaces() -> Iterator[Link]:
    """Make them, and remove them again whatever happens."""
    names = [f"instep{os.getpid()}{side}" for side in "ab"]
    with ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        _run(
            "ip", "link", "add", "rank0", "netns", names[0], "type", "veth", "peer", "name", "rank1", "netns", names[1]
        )
        for number, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", f"rank{number}")
            _run("ip", "-n", name, "link", "set", f"rank{number}", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield Link(names)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(
            f"{' '.join(command)}: {getattr(error, 'stderr', error)}\nThis needs root, and Debian's iproute2"
        ) from error
