"""One replica group of torchft, of one rank: ``python -m tests.frameworks.torchft_replica NUMBER WAY LIGHTHOUSE``.

It prints what becomes of training: which steps it has taken, and its weights and state, as JSON. The first replica
loses a collective once: it leaves out that step, and then gets the other's weights and state, as one that comes later.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import instep
from instep.errors import AttachError

STEPS, LOST = 8, 3
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "default": {},
    "forward": {"schedule": "forward", "defer": True},
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "shard_state": {"schedule": "forward", "shard_state": True},
}
PATIENCE = timedelta(seconds=60)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def train(number: int, way: str, lighthouse: str) -> dict[str, Any]:
    from torchft.ddp import DistributedDataParallel
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica {number}",
        hostname="127.0.0.1",
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
    )
    ddp, steps = DistributedDataParallel(manager, model), OptimizerWrapper(manager, optimizer)
    options, overlap = WAYS[way], None
    votes: list[bool] = []
    if options is not None:
        try:
            overlap = instep.attach(ddp, optimizer, **options)
        except AttachError as error:
            return {"refused": str(error)}
    should_commit = manager.should_commit

    def vote() -> bool:
        if number == 0 and len(votes) == LOST:
            manager.report_error(RuntimeError("a collective was lost"))
        votes.append(should_commit())
        return votes[-1]

    manager.should_commit = vote
    for i in range(STEPS):
        torch.manual_seed(100 * number + i)
        steps.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        steps.step()
    if overlap is not None:
        overlap.synchronize()
    return {
        "votes": votes,
        "weights": digest(model.parameters()),
        "state": digest(value for entry in optimizer.state.values() for value in entry.values()),
        "steps": None if overlap is None else overlap.step_count,
    }


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    print(json.dumps(train(int(sys.argv[1]), sys.argv[2], sys.argv[3])), flush=True)
    os._exit(0)  # torchft's threads wait for others
