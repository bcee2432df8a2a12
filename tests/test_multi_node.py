"""``examples/multi_node.md``: torchrun's two commands, in two namespaces whose only way to each other is a network."""

import os
import shutil
from pathlib import Path

import pytest
from link import two_namespaces

from tests import net

EXAMPLE = Path(__file__).parents[1] / "examples" / "ddp.py"
TORCHRUN = f"""
import os, runpy, sys
sys.argv = ["torchrun", "--nnodes", "2", "--node-rank", os.environ["RANK"], "--nproc-per-node", "1"]
sys.argv += ["--master-addr", "10.78.0.1", "--master-port", "29500"]
sys.argv += ["--local-addr", f"10.78.0.{{int(os.environ['RANK']) + 1}}", {str(EXAMPLE)!r}]  # nobody there has a name
runpy.run_module("torch.distributed.run", run_name="__main__")
"""


@pytest.mark.nightly  # lookups of names wait for minutes there
@pytest.mark.timeout(5 * net.SECONDS)
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root, and iproute2"
)
def test_on_two_machines() -> None:
    with two_namespaces() as link:
        assert "step 50" in link.run(["-c", TORCHRUN], seconds=4 * net.SECONDS)
