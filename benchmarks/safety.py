"""What do the vote between ranks and ``nonfinite=`` cost?

    python benchmarks/safety.py                                                # one device
    torchrun --standalone --nproc-per-node 2 benchmarks/safety.py              # two ranks, loopback

Every variant trains the same model (about 11 M parameters) on the same batches, step by step in turn, with fused AdamW,
one thread per rank. All weights must be equal to the plain loop's, bit for bit, or nothing is printed. The table: the
time of an iteration, and its ratio to that of the same schedule without checks, below 1 where these cost time, with the
spread of the rounds. ``without votes`` takes the votes away from inside: no user can.
"""

import argparse
import os
import statistics
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from measure import batches, interleave, loss_of, ratio, require_equal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep._wiring import build as connect
from instep_tools.training import CONTEXT, ByteGPT, Shape

ROWS = 2
BACKWARD = {"schedule": "backward"}
FORWARD = {"schedule": "forward", "defer": True}
VARIANTS: dict[str, tuple[str, dict[str, Any] | None, bool]] = {
    # name: what it is compared with, the options of attach, whether ranks vote
    "plain": ("plain", None, True),
    "backward, without votes": ("backward, without votes", BACKWARD, False),
    "backward": ("backward, without votes", BACKWARD, True),
    "backward, raise": ("backward", {**BACKWARD, "nonfinite": "raise"}, True),
    "forward, without votes": ("forward, without votes", FORWARD, False),
    "forward": ("forward, without votes", FORWARD, True),
    "forward, skip": ("forward", {**FORWARD, "nonfinite": "skip"}, True),
    "forward, raise": ("forward", {**FORWARD, "nonfinite": "raise"}, True),
    "forward, clipped": ("forward, clipped", {**FORWARD, "clip": instep.ClipNorm(1e9)}, True),
    "forward, clipped, skip": (
        "forward, clipped",
        {**FORWARD, "clip": instep.ClipNorm(1e9), "nonfinite": "skip"},
        True,
    ),
}


class Loop:
    def __init__(self, shape: Shape, options: dict[str, Any] | None, votes: bool) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = ByteGPT(shape)
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        with nullcontext() if votes else patch.object(connect, "voting_of", lambda *_: None):
            self.overlap = None if options is None else instep.attach(self.model, self.optimizer, **options)

    def step(self, tokens: torch.Tensor) -> None:
        loss_of(self.model, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        if self.overlap is not None:
            self.overlap.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    distributed = dist.is_initialized()
    names = [n for n, (_, attach, votes) in VARIANTS.items() if distributed or votes or attach is None]
    shape = Shape(width=options.width, depth=options.depth, heads=6)
    loops: dict[str, Any] = {name: Loop(shape, VARIANTS[name][1], VARIANTS[name][2]) for name in names}
    rank = dist.get_rank() if distributed else 0
    times = interleave(loops, batches(ROWS, CONTEXT, rank), options.rounds)
    require_equal(loops, "plain")
    seconds = times.quiet()
    if not distributed or dist.get_rank() == 0:
        count = sum(p.numel() for p in loops["plain"].model.parameters())
        print(f"{count / 1e6:.1f} M parameters, {len(seconds['plain'])} rounds, all equal to the plain loop\n")
        for name in names:
            base = VARIANTS[name][0] if VARIANTS[name][0] in names else name.split(",")[0]
            time = 1e3 * statistics.median(seconds[name])
            print(f"  {name:26} {time:9.1f} ms   {ratio(seconds[base], seconds[name])} of {base}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
