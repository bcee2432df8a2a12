"""What does shard_state=True save and cost, beside plain DDP and torch's ZeroRedundancyOptimizer?

    torchrun --standalone --nproc-per-node 2 benchmarks/zero.py

Every variant trains the same model (about 11 M parameters) on the same batches, step by step in turn, AdamW without
fused kernels, one thread per rank. All weights must be equal to plain DDP's, bit for bit, or nothing is printed. The
table: bytes of optimizer state on each rank; the time of an iteration; and its ratio to plain DDP's, above 1 where a
variant is faster, with the spread of the rounds. Then the time of the collectives alone for as many bytes: gloo has no
reduce-scatter of its own, and what instep sends in its place is measured beside the one that torch emulates.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

KEEP_MEMORY = {name: str(1 << 30) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")}
if any(name not in os.environ for name in KEEP_MEMORY):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import instep  # noqa: E402
from instep.demo.model import CONTEXT, ByteGPT, Shape  # noqa: E402

MIB = 1 << 20
ROWS = 2
OPTIONS = {"lr": 1e-4, "foreach": True}


class Loop:
    def __init__(self, shape: Shape, make_optimizer: Callable[[Any], Any], **attach: Any) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(ByteGPT(shape), gradient_as_bucket_view=True, bucket_cap_mb=4)
        self.optimizer = make_optimizer(self.model.parameters())
        if attach:
            instep.attach(self.model, self.optimizer, **attach)

    def step(self, tokens: torch.Tensor) -> None:
        logits = self.model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_bytes(self) -> int:
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        found = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
        return sum(getattr(value, "_local_tensor", value).nbytes for value in found)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **OPTIONS)


def redundancy(parameters: Any) -> Any:
    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **OPTIONS)


def batches(rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(0, 256, (ROWS, CONTEXT + 1), generator=generator)


def spread(plain: list[float], seconds: list[float]) -> str:
    ratios = sorted(a / b for a, b in zip(plain, seconds, strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def collectives(numel: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round: for the gradients (and weights) of a bucket of ``numel`` floats."""
    world_size = dist.get_world_size()
    whole, received = torch.randn(numel), torch.empty(numel)
    part = torch.empty(numel // world_size)
    parts = list(received.view(world_size, -1))
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def by_hand() -> None:
        dist.all_to_all_single(received, whole)
        torch.sum(received.view(world_size, -1), 0, out=part)

    runs: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "reduce-scatter of torch": lambda: reduce_scatter(part, whole),
        "all-to-all and sum": by_hand,
        "all-gather": lambda: dist.all_gather(parts, part),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            dist.barrier()
            started = perf_counter()
            run()
            seconds[name].append(perf_counter() - started)
    return {name: times[1:] for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = Shape(width=options.width, depth=options.depth, heads=6)
    loops = {
        "plain DDP": Loop(shape, plain),
        "shard_state, backward": Loop(shape, plain, shard_state=True),
        "shard_state, forward": Loop(shape, plain, shard_state=True, schedule="forward"),
        "ZeroRedundancyOptimizer": Loop(shape, redundancy),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number, tokens in zip(range(options.rounds + 2), batches(dist.get_rank()), strict=False):
        names = list(loops)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            started = perf_counter()
            loops[name].step(tokens)
            if number >= 2:
                seconds[name].append(perf_counter() - started)
    weights = list(loops["plain DDP"].model.parameters())
    for name, loop in loops.items():
        if not all(map(torch.equal, weights, loop.model.parameters())):
            raise SystemExit(f"{name} is not equal to plain DDP")
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, {name: loop.state_bytes() for name, loop in loops.items()})
    alone = collectives(MIB, options.rounds)
    if dist.get_rank() == 0:
        count = sum(p.numel() for p in weights)
        print(f"{count / 1e6:.1f} M parameters, {dist.get_world_size()} ranks, all weights equal to plain DDP's\n")
        print(f"  {'':24} {'state of each rank':>22}    {'iteration':>9}   ratio")
        for name, times in seconds.items():
            state = " + ".join(f"{share[name] / MIB:.1f}" for share in shares)
            print(
                f"  {name:24} {state + ' MiB':>22} {1e3 * statistics.median(times):9.1f} ms   "
                f"{spread(seconds['plain DDP'], times)}"
            )
        print("\n  4 MiB alone                 time      ratio to an all-reduce")
        for name, times in alone.items():
            print(f"  {name:24} {1e3 * statistics.median(times):7.2f} ms   {spread(alone['all-reduce'], times)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
