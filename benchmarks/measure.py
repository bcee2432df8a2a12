"""What the benchmarks share: variants of one training run, interleaved step by step, and what is said of their times.

Importing it starts the process again with allocator settings that keep memory. Under glibc's defaults the
plain loop pays page faults for gradients that it frees and gets back each step, and others do not: that is real for
users, but it is no overlap.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol

KEEP_MEMORY = {name: str(1 << 30) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")}
if any(name not in os.environ for name in KEEP_MEMORY) and "INSTEP_BENCHMARK_MALLOC" not in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from instep_tools.harness import first_difference, training_state  # noqa: E402

SETTLED = 45
"""Steps after which a loop has decided what a worker does: whether it is put off, or beside backward."""
OTHERS = 0.15
"""A round in which other processes took more than this share of a core is left out."""


class Loop(Protocol):
    """One variant of the training run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, tokens: torch.Tensor) -> None: ...

    def drain(self) -> None:
        """Return when all that the last step has begun is done."""


@dataclass
class Times:
    """Seconds of an iteration, by variant and round, and by how much the machine was busy with something else.

    Attributes:
        others: by round, the share of a core that other processes took, the highest of all ranks and variants.
    """

    seconds: dict[str, list[float]]
    others: list[float] = field(default_factory=list)

    def quiet(self, most: float = OTHERS) -> dict[str, list[float]]:
        """Of the rounds in which the machine was ours; of all of them, if it hardly ever was."""
        kept = [number for number, share in enumerate(self.others) if share < most]
        if len(kept) < 5:
            return self.seconds
        return {name: [times[number] for number in kept] for name, times in self.seconds.items()}


def interleave(
    loops: Mapping[str, Loop], batches: Iterator[torch.Tensor], rounds: int, *, steps: int = 1, warmup: int = 2
) -> Times:
    """Train all of them, ``steps`` steps at a time, in turn; the first ``warmup`` rounds are not counted. Under
    ``torch.distributed`` all ranks begin together, and the slowest one's time counts."""
    times = Times({name: [] for name in loops})
    names = list(loops)
    for number in range(rounds + warmup):
        tokens = [next(batches) for _ in range(steps)]
        first = number % len(names)
        found: dict[str, float] = {}
        others = 0.0
        for name in names[first:] + names[:first]:
            if dist.is_initialized():
                dist.barrier()
            busy, mine, started = _busy(), process_time(), perf_counter()
            for one in tokens:
                loops[name].step(one)
            loops[name].drain()
            seconds = perf_counter() - started
            others = max(others, (_busy() - busy - (process_time() - mine)) / seconds)
            found[name] = seconds / steps
        if number >= warmup:
            *slowest, most = highest([*found.values(), others])
            for name, seconds in zip(found, slowest, strict=True):
                times.seconds[name].append(seconds)
            times.others.append(most)
    return times


def processor_times(loops: Mapping[str, Loop], batches: Iterator[torch.Tensor], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of a step, by loop and round: what other processes do meanwhile does not count."""
    found: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for number in range(rounds):
        batch = next(batches)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = process_time()
            loops[name].step(batch)
            found[name].append(process_time() - started)
            loops[name].drain()  # an accelerator: the host goes on
    return found


def highest(values: Sequence[float]) -> list[float]:
    """Each of them, of the rank where it is highest."""
    found = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    highest: list[float] = found.tolist()
    return highest


def _busy() -> float:
    """Seconds for which this process's cores have run anybody's programs, or were kept from doing so by the machine's
    other guests. What the kernel does for the network is not counted: it is ours."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in cores:
            user, nice, system, _, _, _, _, steal = map(int, ticks[:8])
            total += user + nice + system + steal
    return total / os.sysconf("SC_CLK_TCK")


def require_equal(loops: Mapping[str, Loop], oracle: str, but: Sequence[str] = ()) -> None:
    """Exit unless weights and optimizer state of all loops are those of ``oracle``, bit for bit, on every rank.

    Args:
        but: those that cannot be: without an optimizer, say.
    """
    expected = list(training_state(loops[oracle].model, loops[oracle].optimizer))
    differences = []
    for name, loop in loops.items():
        if name != oracle and name not in but:
            difference = first_difference(iter(expected), training_state(loop.model, loop.optimizer))
            if difference is not None:
                differences.append(f"{name} is not equal to {oracle}: {difference}")
    if dist.is_initialized():
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, differences)
        differences = [f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines]
    if differences:
        raise SystemExit("\n".join(differences))


@dataclass(frozen=True)
class Spread:
    """A median with the tenth and ninetieth percentile of the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    return Spread(statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10])


def ratio(base: Sequence[float], seconds: Sequence[float]) -> Spread:
    """``base``'s time to the other's, round by round: above 1 where the other is faster."""
    return spread([a / b for a, b in zip(base, seconds, strict=True)])


def batches(rows: int, length: int, rank: int = 0) -> Iterator[torch.Tensor]:
    """``(rows, length + 1)`` random bytes, other ones for each rank."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(0, 256, (rows, length + 1), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of the demo's model, or one like it."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def picture_path(value: str) -> Path:
    """Of an option: refused before anything has run where the picture could not be drawn."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("pictures need matplotlib: pip install 'instep[benchmarks]'")
    return Path(value)


def busy_seconds(core: int) -> float:
    """How long ``core`` has been at work since the machine started: for processes, and for the kernel, whose work on
    what arrives from a network is no process's. Time that another guest of the machine took is not."""
    line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} "))
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, line.split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def picture(path: Path, title: str, lines: Mapping[str, Mapping[float, Spread]], across: str, up: str) -> None:
    """Draw curves with their spread. Needs matplotlib (``pip install 'instep[benchmarks]'``)."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, points in lines.items():
        x = sorted(points)
        low = [points[at].median - points[at].low for at in x]
        high = [points[at].high - points[at].median for at in x]
        axes.errorbar(x, [points[at].median for at in x], [low, high], label=name, marker="o", capsize=3)
    axes.axhline(1.0, color="0.6", linewidth=1)
    axes.set(title=title, xlabel=across, ylabel=up, xscale="log")
    ticks = sorted({at for points in lines.values() for at in points})
    axes.set_xticks(ticks, [f"{at:g}" for at in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    _follow_the_screen(path)


_ON_DARK = """<style>
@media (prefers-color-scheme: dark) {
[style*="fill: #ffffff"] { fill: #0d1117 !important }
[style*="stroke: #000000"] { stroke: #e6edf3 !important }
text, [style*="fill: #000000"] { fill: #e6edf3 !important }
}
</style>"""
"""matplotlib writes colours into each element: those of paper and ink are the other way round on a dark screen."""


def _follow_the_screen(path: Path) -> None:
    svg = path.read_text(encoding="utf-8")
    path.write_text(svg.replace("<defs>", f"{_ON_DARK}\n <defs>", 1), encoding="utf-8")
