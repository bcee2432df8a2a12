"""How much memory do gradients take, with DDP, replicate, shard_state, and fully_shard in their places?

    python benchmarks/gradient_memory.py                     # two ranks on loopback, 20 M parameters
    python benchmarks/gradient_memory.py --bucket-mib 1
    python benchmarks/gradient_memory.py --ranks 3

Every variant trains the same model on the same batches. First all of them run beside plain DDP: weights and optimizer
state must be equal, bit for bit, on every rank and after every step, or nothing is printed. Within rounding are
``shard_state``, and with three ranks or more whatever sums in another order than DDP's buckets. Then each is built and
trained once more, and every tensor is counted as it is made, resized and freed. The table is of the first rank: the
most bytes there were in a step, less weights and optimizer state, and with them. Buckets count, and so do activations,
which are small (one row): the last line has nothing else. Last all of them train in turns: plain DDP's time by
theirs, above 1 where they are faster.
"""

import argparse
import inspect
import multiprocessing
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import ratio
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep_tools.harness import LiveBytes, first_difference, training_state
from instep_tools.training import ByteGPT, Shape

MIB = 1 << 20
SHAPE = Shape(width=512, depth=6, heads=8)
TOKENS = 16
STEPS = 3


class ResizedBytes(LiveBytes):
    """Counts storages at the size that they have now: FSDP2 gives the memory of gathered weights back by a resize."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset(self) -> None:
        self.peak = 0
        self._look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._storages.setdefault(storage._cdata, weakref.ref(storage))
        self._look()

    def _look(self) -> None:
        there = {key: found for key, ref in self._storages.items() if (found := ref()) is not None}
        self._storages = {key: self._storages[key] for key in there}
        self.now = sum(storage.nbytes() for storage in there.values())
        self.peak = max(self.peak, self.now)


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
        generator = torch.Generator().manual_seed(dist.get_world_size() * i + dist.get_rank())
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
        found = [*self.model.parameters(), *self.model.buffers(), *state]
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in found)

    def whole(self) -> list[torch.Tensor]:
        """All weights, as DDP has them."""
        found = (p.detach() for p in self.model.parameters())
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in found]


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

    def in_groups(mesh: DeviceMesh, gathered: bool, model: Any) -> nn.Module:
        """Groups of about ``bucket_mib``: a block has three of 4 MiB."""
        for block in model.blocks:
            for part in (block.self_attn, block.linear1, block.linear2, block):
                fully_shard(part, mesh=mesh, reshard_after_forward=not gathered)
        whole: nn.Module = fully_shard(model, mesh=mesh, reshard_after_forward=not gathered)
        return whole

    ranks = dist.get_world_size()
    replicas = partial(in_groups, init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard")), False)
    shards = partial(in_groups, init_device_mesh("cpu", (ranks,)), True)
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
        "`fully_shard` over (n, 1)": lambda: Loop(replicas),
        'that one with `attach(…, schedule="backward")`, in place of `replicate`': lambda: Loop(
            replicas, {"schedule": "backward"}
        ),
        "`fully_shard(reshard_after_forward=False)`": lambda: Loop(shards),
        'that one with `attach(…, schedule="backward")`, in place of `shard_state`': lambda: Loop(
            shards, {"schedule": "backward"}
        ),
    }


def compare(build: Callable[[], Loop], plain: Callable[[], Loop]) -> None:
    loops = plain(), build()
    loops[1].attach()
    for i in range(STEPS):
        for loop in loops:
            loop.step(i)
        if loops[1].overlap is not None:
            loops[1].overlap.synchronize()
        is_sharded = isinstance(next(iter(loops[1].model.parameters())), DTensor)
        sums_otherwise = dist.get_world_size() > 2 and not isinstance(loops[1].model, DistributedDataParallel)
        if is_sharded or sums_otherwise or "shard_state" in (loops[1].options or {}):
            # Over the rows of a rank fused kernels round in another way: tests/distributed/test_zero.py. Three numbers
            # have several sums.
            weights = zip(loops[0].whole(), loops[1].whole(), strict=True)
            difference = None if all(torch.allclose(a, b, atol=1e-5) for a, b in weights) else "weights"
        else:
            difference = first_difference(*(training_state(loop.model, loop.optimizer) for loop in loops))
        if difference is not None:
            sys.exit(f"rank {dist.get_rank()}, step {i + 1}: {difference}")


class Peak(NamedTuple):
    """In bytes: all there was in a step, and the weights and optimizer state of this rank."""

    all: int
    own: int


def peak(build: Callable[[], Loop], step: Callable[[Loop, int], object] = Loop.step) -> Peak:
    """The most bytes there were in a step."""
    with ResizedBytes() as live:
        loop = build()
        loop.step(0)  # makes the optimizer's state; after it, DDP lays out its buckets anew
        loop.attach()
        loop.step(1)
        live.reset()
        for i in range(2, 2 + STEPS):
            step(loop, i)
        if loop.overlap is not None:
            loop.overlap.synchronize()
        return Peak(live.peak, loop.own_bytes())


def in_turns(builds: dict[str, Callable[[], Loop]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, the first two left out."""
    loops = {name: build() for name, build in builds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for i in range(rounds + 2):
        for name, loop in loops.items():
            if i == 1:
                loop.attach()
            dist.barrier()
            began = perf_counter()
            loop.step(i)
            seconds[name].append(perf_counter() - began)
    return {name: found[2:] for name, found in seconds.items()}


def rank_main(rank: int, ranks: int, rendezvous: str, bucket_mib: float, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    loops = variants(bucket_mib)
    plain = loops["`DistributedDataParallel(model)`"]
    for build in loops.values():
        compare(build, plain)
    lines = {name: peak(build) for name, build in loops.items()}
    lines["forward alone"] = peak(loops["`replicate(model)`"], Loop.loss)
    seconds = in_turns(loops | {"`DistributedDataParallel(model)`, again": plain}, rounds)
    if rank == 0:
        size = sum(p.numel() * p.element_size() for p in ByteGPT(SHAPE).parameters())
        print(f"{size / 4 / 1e6:.1f} M parameters, {size / MIB:.1f} MiB of gradients, buckets of {bucket_mib} MiB")
        print(
            f"after each of {STEPS} steps all variants are equal to plain DDP on {ranks} ranks: bit for bit, and within"
        )
        print("rounding where a rank steps rows alone, or three ranks sum in another order\n")
        print("| | MiB, beside weights and state | with them | plain DDP's time / time |\n|---|---|---|---|")
        first = seconds["`DistributedDataParallel(model)`"]
        times = {name: ratio(first, of_this) for name, of_this in seconds.items()}
        for name in {**lines, **times}:
            found = lines.get(name)
            memory = " | " if found is None else f"{(found.all - found.own) / MIB:.1f} | {found.all / MIB:.1f}"
            print(f"| {name} | {memory} | {times.get(name, '')} |")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket-mib", type=float, default=4.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="instep-memory-") as directory:
        rendezvous = str(Path(directory) / "store")
        given = arguments.ranks, rendezvous, arguments.bucket_mib, arguments.rounds
        ranks = [context.Process(target=rank_main, args=(rank, *given)) for rank in range(arguments.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
