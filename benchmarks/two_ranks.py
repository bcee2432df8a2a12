"""What does instep hide behind a network, and is it ever slower than plain DDP?

    python benchmarks/two_ranks.py                                   # 1, 2, 3, 5 and 10 Gbit/s
    python benchmarks/two_ranks.py --gbits 2 --runs 3 --picture two_ranks.svg

Two ranks, one core each, in two network namespaces joined by a virtual link of that rate (root, iproute2; they are made
and removed here). All variants train the same GPT on the same batches with fused AdamW, a few steps at a time
in turn. Weights and optimizer state of all of them must be equal to plain DDP's, bit for bit, on both ranks, or nothing
is printed. The table: the time of an iteration; the ratio of plain DDP's time to it, above 1 where a variant is faster,
as median [p10, p90] of the rounds; and the *exposed* time of the optimizer as a share of plain DDP's: what of it is
left when the time of the same loop without any optimizer is taken off. Below it, what no overlap of any kind can beat:
the time of the collectives by themselves, and that of all work that has to share the core. Rounds in which other
processes took 15% of a core or more are left out.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import bars
import torch
import torch.distributed as dist
from link import two_namespaces
from measure import (
    Spread,
    batches,
    busy_seconds,
    highest,
    interleave,
    loss_of,
    ratio,
    require_equal,
    spread,
)
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.buckets import MIB
from instep_tools.training import ByteGPT, Shape

OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
PLAIN, BOUND = "plain DDP", "no optimizer"


class Plain:
    """Plain DDP.

    Args:
        attach: what instep is attached with; ``None``: it is not.
    """

    def __init__(self, shape: Shape, bucket_mib: float, attach: dict[str, Any] | None = None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = DistributedDataParallel(
            ByteGPT(shape), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIONS)
        self.overlap = None if attach is None else instep.attach(self.model, self.optimizer, **attach)

    def step(self, tokens: torch.Tensor) -> None:
        loss_of(self.model, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        if self.overlap is not None:
            self.overlap.synchronize()


class NoOptimizer(Plain):
    """The bound: an optimizer that costs nothing."""

    def step(self, tokens: torch.Tensor) -> None:
        loss_of(self.model, tokens).backward()
        self.optimizer.zero_grad()


class Registered(Plain):
    """torch's own overlap, with fused kernels."""

    def __init__(self, shape: Shape, bucket_mib: float) -> None:
        super().__init__(shape, bucket_mib)
        assert isinstance(self.model, DistributedDataParallel)
        self.model._register_fused_optim(torch.optim.AdamW, **OPTIONS)

    def step(self, tokens: torch.Tensor) -> None:
        loss_of(self.model, tokens).backward()
        self.model.zero_grad()


class Redundancy(Plain):
    """torch's ZeroRedundancyOptimizer."""

    def __init__(self, shape: Shape, bucket_mib: float) -> None:
        super().__init__(shape, bucket_mib)
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=torch.optim.AdamW, **OPTIONS)


def attached(**options: Any) -> Callable[[Shape, float], Plain]:
    return lambda shape, bucket_mib: Plain(shape, bucket_mib, options)


VARIANTS: dict[str, Callable[[Shape, float], Plain]] = {
    PLAIN: Plain,
    "plain, again": Plain,
    "backward": attached(schedule="backward"),
    "default": attached(),
    "forward": attached(schedule="forward", defer=True),
    "torch _register_fused_optim": Registered,
    "torch ZeroRedundancyOptimizer": Redundancy,
    BOUND: NoOptimizer,
}
UNEQUAL = [BOUND, "torch _register_fused_optim", "torch ZeroRedundancyOptimizer"]
"""Those whose optimizer state lies elsewhere, or that have none."""


def rank(options: argparse.Namespace) -> None:
    """One of the two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = Shape(width=options.width, depth=options.depth, heads=8)
    chosen = {name: make for name, make in VARIANTS.items() if not options.variants or name in options.variants}
    loops = {name: make(shape, options.bucket_mib) for name, make in {PLAIN: Plain, **chosen}.items()}
    tokens = batches(options.rows, options.tokens, dist.get_rank())
    times = interleave(loops, tokens, options.rounds, steps=options.steps, warmup=-(-72 // options.steps))
    require_equal(loops, PLAIN, [name for name in UNEQUAL if name in loops])
    quiet = times.quiet()
    found: dict[str, Any] = {
        "rounds": len(quiet[PLAIN]),
        "parameters": sum(p.numel() for p in loops[PLAIN].model.parameters()),
        "others": sorted(times.others)[len(times.others) // 2],
        "seconds": {name: asdict(spread(times)) for name, times in quiet.items()},
        "ratio": {name: asdict(ratio(quiet[PLAIN], times)) for name, times in quiet.items()},
    }
    if options.record:
        record({name: loop for name, loop in loops.items() if name not in UNEQUAL}, tokens, options.record)
    overlap = loops["backward"].overlap if "backward" in loops else None
    if overlap is not None:
        sizes = [sum(spec.nbytes for spec in bucket.parameters) for bucket in overlap.plan.buckets]
        found["parts"] = {**parts(loops[PLAIN], tokens, options.bucket_mib), "bucket_bytes": sizes}
    if BOUND in quiet:
        rounds = list(zip(quiet[PLAIN], quiet[BOUND], strict=True))
        step = spread([plain - bound for plain, bound in rounds]).median
        found["step"] = step
        found["exposed"] = {
            name: asdict(spread([(mine - bound) / step for mine, bound in zip(times, quiet[BOUND], strict=True)]))
            for name, times in quiet.items()
        }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def record(loops: dict[str, Plain], tokens: Iterator[torch.Tensor], directory: Path) -> None:
    batches = [next(tokens) for _ in range(5)]  # the same for all: a report compares the weights
    for name, loop in loops.items():
        with instep.record(loop.model, loop.optimizer, steps=4) as recording:
            for batch in batches:
                loop.step(batch)
        recording.save(directory / f"{name.replace(' ', '_')}.json.gz")


def parts(loop: Plain, tokens: Iterator[torch.Tensor], bucket_mib: float) -> dict[str, float]:
    """Seconds of processor time that forward, backward and step take by themselves, and gloo and the kernel for each
    byte, of the rank where each takes longest; and seconds for each byte of the link, when nothing else is done. For
    ``simulate.py``."""
    assert isinstance(loop.model, DistributedDataParallel)
    times: dict[str, list[float]] = {"forward": [], "backward": [], "step": [], "communication_cpu_per_byte": []}
    times["link_per_byte"] = []
    (core,) = os.sched_getaffinity(0)
    buckets = [torch.zeros(int(bucket_mib * MIB / 4)) for _ in range(24)]
    nbytes = sum(bucket.nbytes for bucket in buckets)
    for _ in range(8):
        with loop.model.no_sync():
            marks = [process_time()]
            loss = loss_of(loop.model, next(tokens))
            marks.append(process_time())
            loss.backward()
            marks.append(process_time())
        loop.optimizer.step()
        marks.append(process_time())
        for name, start, end in zip(times, marks[:-1], marks[1:], strict=False):
            times[name].append(end - start)
        loop.optimizer.zero_grad()
        dist.barrier()
        started = process_time(), busy_seconds(core), perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        busy = max(process_time() - started[0], busy_seconds(core) - started[1])  # the kernel counts in hundredths
        times["communication_cpu_per_byte"].append(busy / nbytes)
        times["link_per_byte"].append((perf_counter() - started[2]) / nbytes)
    slowest = highest([spread(seconds).median for seconds in times.values()])
    return dict(zip(times, slowest, strict=True))


def say(gbits: float, found: dict[str, Any]) -> None:
    step = f", the step takes {1e3 * found['step']:.0f} ms" if "step" in found else ""
    print(f"\n{gbits:g} Gbit/s, {found['rounds']} rounds{step} (others took {100 * found['others']:.0f}% of a core)")
    for name, seconds in found["seconds"].items():
        exposed = f"{100 * found['exposed'][name]['median']:6.0f}%" if "exposed" in found else ""
        print(
            f"  {name:30} {1e3 * seconds['median']:8.1f} ms   {Spread(**found['ratio'][name])}  {exposed}", flush=True
        )
    if "parts" in found:
        say_bound(found)


def alone(found: dict[str, Any]) -> tuple[float, float]:
    """Seconds of an iteration's collectives by themselves, and of all work that shares the core."""
    parts, nbytes = found["parts"], sum(found["parts"]["bucket_bytes"])
    gloo = nbytes * parts["communication_cpu_per_byte"]
    return nbytes * parts["link_per_byte"], parts["forward"] + parts["backward"] + parts["step"] + gloo


def say_bound(found: dict[str, Any]) -> None:
    link, core = alone(found)
    bound = max(link, core)
    print(
        f"  bound of any overlap: {1e3 * bound:.1f} ms (collectives alone {1e3 * link:.1f}, the core's work "
        f"{1e3 * core:.1f}), plain / bound {found['seconds'][PLAIN]['median'] / bound:.3f}; bound / measured:",
        ", ".join(f"{name} {bound / seconds['median']:.2f}" for name, seconds in found["seconds"].items()),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbits", type=float, nargs="+", default=[1.0, 2.0, 3.0, 5.0, 10.0])
    parser.add_argument("--runs", type=int, default=1, help="of each rate, each with new processes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=6, help="of each variant in a round")
    parser.add_argument("--bucket-mib", type=float, default=4.0)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[], help="all, unless told")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--record", type=Path, help="write recordings for `instep report` to this directory")
    parser.add_argument("--picture", type=Path, help="draw the ratios there, as SVG")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
    results: dict[float, list[dict[str, Any]]] = {}
    with two_namespaces() as link:
        for gbits in options.gbits:
            link.shape(gbits)
            for _ in range(options.runs):
                found = json.loads(link.run([__file__, "--rank", *sys.argv[1:]]))
                say(gbits, found)
                results.setdefault(gbits, []).append(found)
    some = results[options.gbits[0]][0]
    print(f"\n{some['parameters'] / 1e6:.1f} M parameters; weights and state of all equal to plain DDP's, bit for bit")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.picture:
        bars.draw(options.picture, gained(results))


def gained(results: dict[float, list[dict[str, Any]]]) -> bars.Panel:
    """How much faster than plain DDP ``schedule="backward"`` is, by link, and how much faster any overlap could be."""
    groups = {}
    for gbits in sorted(results):
        found = results[gbits][0]
        drawn = []
        if "backward" in found["ratio"]:
            median, low, high = (100 * (found["ratio"]["backward"][of] - 1) for of in ("median", "low", "high"))
            drawn.append(bars.Bar('schedule="backward"', median, bars.OURS, (low, high)))
        if "parts" in found:
            most = found["seconds"][PLAIN]["median"] / max(alone(found))
            drawn.append(bars.Bar("the most that could be", 100 * (most - 1), bars.LIMIT))
        groups[f"{gbits:g} Gbit/s"] = drawn
    return bars.Panel("Speed over plain DDP, per cent, two ranks", groups, "+.0f")


if __name__ == "__main__":
    main()
