"""How much memory do gradients take, with DDP and with replicate?

    python benchmarks/gradient_memory.py                     # two ranks on loopback, 20 M parameters
    python benchmarks/gradient_memory.py --bucket-mib 1

Every variant trains the same model on the same batches. First all of them run beside plain DDP: weights and optimizer
state must be equal, bit for bit, on every rank and after every step, or nothing is printed (``shard_state``: weights
within rounding). Then each is built and trained once more, and every tensor is counted as it is made and freed. The
table is of the first rank: the most bytes there were in a step, less weights and optimizer state. Buckets count, and so
do activations, which are small (one row): the last line has nothing else.
"""

import argparse
import inspect
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep_tools.demo.job import Shape
from instep_tools.demo.loops import ByteGPT
from instep_tools.harness import LiveBytes, first_difference, training_state

MIB = 1 << 20
RANKS = 2
SHAPE = Shape(width=512, depth=6, heads=8)
TOKENS = 16
STEPS = 3


class Loop:
    """One variant.

    Args:
        wrap: makes of the model what is trained.
        options: of ``instep.attach``; ``None``: the optimizer steps on its own.
    """

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], options: dict[str, Any] | None = None) -> None:
        torch.manual_seed(0)
        self.model = wrap(ByteGPT(SHAPE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.options = options
        self.overlap: instep.Attachment | None = None

    def attach(self) -> None:
        if self.options is not None:
            self.overlap = instep.attach(self.model, self.optimizer, **self.options)

    def loss(self, i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(RANKS * i + dist.get_rank())
        tokens = torch.randint(0, 256, (1, TOKENS + 1), generator=generator)
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def step(self, i: int) -> None:
        self.loss(i).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def own_bytes(self) -> int:
        """Of weights and optimizer state, of this rank."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        state = [value.to_local() if isinstance(value, DTensor) else value for value in state]
        return sum(t.numel() * t.element_size() for t in [*self.model.parameters(), *self.model.buffers(), *state])


def variants(bucket_mib: float) -> dict[str, Callable[[], Loop]]:
    def ddp(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=bucket_mib)

    def ddp_with_views(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)

    def ddp_that_frees(model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"lazy_bucket_allocation": True}
        return DistributedDataParallel(model, bucket_cap_mb=bucket_mib, **options)

    def replicated(model: nn.Module) -> nn.Module:
        return instep.replicate(model, bucket_cap_mb=bucket_mib)

    # Of torch 2.15.
    frees = "lazy_bucket_allocation" in inspect.signature(DistributedDataParallel).parameters
    lazy = {"`DistributedDataParallel(model, lazy_bucket_allocation=True)`": lambda: Loop(ddp_that_frees)}
    return {
        "`DistributedDataParallel(model)`": lambda: Loop(ddp),
        **(lazy if frees else {}),
        "`DistributedDataParallel(model, gradient_as_bucket_view=True)`": lambda: Loop(ddp_with_views),
        'that one with `attach(…, schedule="backward")`': lambda: Loop(ddp_with_views, {"schedule": "backward"}),
        "that one with `attach(…, shard_state=True)`": lambda: Loop(
            ddp_with_views, {"shard_state": True, "schedule": "backward"}
        ),
        '… and `schedule="forward"`': lambda: Loop(
            ddp_with_views, {"shard_state": True, "schedule": "forward", "defer": True}
        ),
        "`replicate(model)`": lambda: Loop(replicated),
        '`replicate(model)` with `attach(…, schedule="forward")`': lambda: Loop(
            replicated, {"schedule": "forward", "defer": True}
        ),
        '`replicate(model)` with `attach(…, schedule="backward")`': lambda: Loop(replicated, {"schedule": "backward"}),
    }


def compare(build: Callable[[], Loop], plain: Callable[[], Loop]) -> None:
    loops = plain(), build()
    loops[1].attach()
    for i in range(STEPS):
        for loop in loops:
            loop.step(i)
        if loops[1].overlap is not None:
            loops[1].overlap.synchronize()
        if "shard_state" in (loops[1].options or {}):
            # Over the rows of a rank fused kernels round in another way: tests/distributed/test_zero.py.
            weights = zip(loops[0].model.parameters(), loops[1].model.parameters(), strict=True)
            difference = None if all(torch.allclose(a, b, atol=1e-6) for a, b in weights) else "weights"
        else:
            difference = first_difference(*(training_state(loop.model, loop.optimizer) for loop in loops))
        if difference is not None:
            sys.exit(f"rank {dist.get_rank()}, step {i + 1}: {difference}")


def peak(build: Callable[[], Loop], step: Callable[[Loop, int], object] = Loop.step) -> int:
    """The most bytes there were in a step, less weights and optimizer state."""
    with LiveBytes() as live:
        loop = build()
        loop.step(0)  # makes the optimizer's state; after it, DDP lays out its buckets anew
        loop.attach()
        loop.step(1)
        live.reset()
        for i in range(2, 2 + STEPS):
            step(loop, i)
        if loop.overlap is not None:
            loop.overlap.synchronize()
        bytes_at_peak: int = live.peak
        return bytes_at_peak - loop.own_bytes()


def rank_main(rank: int, rendezvous: str, bucket_mib: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    loops = variants(bucket_mib)
    plain = loops["`DistributedDataParallel(model)`"]
    for build in loops.values():
        compare(build, plain)
    lines = {name: peak(build) for name, build in loops.items()}
    lines["forward alone"] = peak(loops["`replicate(model)`"], Loop.loss)
    if rank == 0:
        size = sum(p.numel() * p.element_size() for p in ByteGPT(SHAPE).parameters())
        print(f"{size / 4 / 1e6:.1f} M parameters, {size / MIB:.1f} MiB of gradients, buckets of {bucket_mib} MiB")
        print(f"after each of {STEPS} steps all variants are equal to plain DDP, bit for bit, on {RANKS} ranks")
        print("(with shard_state within rounding, which takes its own part of the state alone)\n")
        print("| | MiB, beside weights and state |\n|---|---|")
        for name, found in lines.items():
            print(f"| {name} | {found / MIB:.1f} |")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket-mib", type=float, default=4.0)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="instep-memory-") as directory:
        rendezvous = str(Path(directory) / "store")
        ranks = [context.Process(target=rank_main, args=(r, rendezvous, arguments.bucket_mib)) for r in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
