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
import sys
from time import perf_counter
from typing import Any

KEEP_MEMORY = {name: str(1 << 30) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")}
if any(name not in os.environ for name in KEEP_MEMORY):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import instep  # noqa: E402
from instep.demo.model import CONTEXT, ByteGPT, Shape  # noqa: E402

ROWS = 2
FORWARD = {"schedule": "forward"}
VARIANTS: dict[str, tuple[str, dict[str, Any] | None, bool]] = {
    # name: what it is compared with, the options of attach, whether ranks vote
    "plain": ("plain", None, True),
    "backward, without votes": ("backward, without votes", {}, False),
    "backward": ("backward, without votes", {}, True),
    "backward, raise": ("backward", {"nonfinite": "raise"}, True),
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
        if options is not None:
            overlap = instep.attach(self.model, self.optimizer, **options)
            if not votes:
                overlap._ranks.voting = None

    def step(self, tokens: torch.Tensor) -> None:
        logits = self.model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def spread(plain: list[float], seconds: list[float]) -> str:
    ratios = sorted(a / b for a, b in zip(plain, seconds, strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


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
    loops = {name: Loop(shape, VARIANTS[name][1], VARIANTS[name][2]) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    generator = torch.Generator().manual_seed(dist.get_rank() if distributed else 0)
    for number in range(options.rounds + 2):
        tokens = torch.randint(0, 256, (ROWS, CONTEXT + 1), generator=generator)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if distributed:
                dist.barrier()
            started = perf_counter()
            loops[name].step(tokens)
            if number >= 2:
                seconds[name].append(perf_counter() - started)
    weights = list(loops["plain"].model.parameters())
    for name, loop in loops.items():
        if not all(map(torch.equal, weights, loop.model.parameters())):
            raise SystemExit(f"{name} is not equal to the plain loop")
    if not distributed or dist.get_rank() == 0:
        print(f"{sum(p.numel() for p in weights) / 1e6:.1f} M parameters, all weights equal to the plain loop's\n")
        for name in names:
            base = VARIANTS[name][0] if VARIANTS[name][0] in names else name.split(",")[0]
            time = 1e3 * statistics.median(seconds[name])
            print(f"  {name:26} {time:9.1f} ms   {spread(seconds[base], seconds[name])} of {base}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
