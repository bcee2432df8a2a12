"""What does shard_state=True save and cost, beside plain DDP and torch's ZeroRedundancyOptimizer?

    torchrun --standalone --nproc-per-node 2 benchmarks/zero.py
    torchrun --standalone --nproc-per-node 2 benchmarks/zero.py --muon

Every variant trains the same model (about 11 M parameters) on the same batches, step by step in turn, AdamW without
fused kernels, one thread per rank. All weights must be equal to plain DDP's, bit for bit, or nothing is printed. The
table: bytes of optimizer state on each rank; the time of an iteration; and its ratio to plain DDP's, above 1 where a
variant is faster, with the spread of the rounds. Then the time of the collectives alone for as many bytes: gloo has no
reduce-scatter of its own, and what instep sends in its place is measured beside the one that torch emulates.

With ``--muon`` torch's Muon steps the matrices of the blocks, and AdamW the rest. A matrix belongs to one rank, which
computes its update for all. Matrices are multiplied in float32, as in ``heavy_steps.py``.
"""

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from heavy_steps import in_float32
from measure import batches, interleave, loss_of, ratio
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import _muon

import instep
from instep_tools.training import CONTEXT, ByteGPT, Shape

MIB = 1 << 20
ROWS = 2
OPTIONS: dict[str, Any] = {"lr": 1e-4, "foreach": True}


class Loop:
    def __init__(self, shape: Shape, make_optimizer: Callable[[Any], Any], **attach: Any) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(ByteGPT(shape), gradient_as_bucket_view=True, bucket_cap_mb=4)
        self.optimizers: list[Any] = make_optimizer(self.model.module)
        self.overlap = instep.attach(self.model, self.optimizers, **attach) if attach else None

    def step(self, tokens: torch.Tensor) -> None:
        loss_of(self.model, tokens).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def drain(self) -> None:
        if self.overlap is not None:
            self.overlap.synchronize()

    def state_bytes(self) -> int:
        states = [getattr(optimizer, "optim", optimizer).state for optimizer in self.optimizers]
        entries = [entry for state in states for entry in state.values()]
        found = [value for entry in entries for value in entry.values() if torch.is_tensor(value)]
        return sum(getattr(value, "_local_tensor", value).nbytes for value in found)


def plain(model: Any) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), **OPTIONS)]


def redundancy(model: Any) -> list[Any]:
    return [ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **OPTIONS)]


def muon(model: Any) -> list[Any]:
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, **OPTIONS)]


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
    parser.add_argument("--rows", type=int, default=ROWS, help="of 64 tokens, in a step")
    parser.add_argument("--muon", action="store_true", help="Muon for the matrices")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = Shape(width=options.width, depth=options.depth, heads=6)
    make = muon if options.muon else plain
    if options.muon:
        _muon._zeropower_via_newtonschulz = in_float32
    loops: dict[str, Any] = {
        "plain DDP": Loop(shape, make),
        "shard_state, backward": Loop(shape, make, shard_state=True, schedule="backward"),
        "shard_state, forward": Loop(shape, make, shard_state=True, schedule="forward", defer=True),
    }
    if not options.muon:  # which takes optimizers of one class
        loops["ZeroRedundancyOptimizer"] = Loop(shape, redundancy)
    loops["plain DDP, again"] = Loop(shape, make)
    seconds = interleave(loops, batches(options.rows, CONTEXT, dist.get_rank()), options.rounds).quiet()
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
                f"{ratio(seconds['plain DDP'], times)}"
            )
        print("\n  4 MiB alone                 time      ratio to an all-reduce")
        for name, times in alone.items():
            print(f"  {name:24} {1e3 * statistics.median(times):7.2f} ms   {ratio(alone['all-reduce'], times)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
