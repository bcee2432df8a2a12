"""What would instep hide on other machines? The model in ``instep.planning.simulate``, against times, and at scale.

    python benchmarks/simulate.py --measured two_ranks.json          # from: two_ranks.py --json two_ranks.json
    python benchmarks/simulate.py --picture simulate.svg             # 8 to 4096 GPUs, 1 to 400 Gbit/s, 0.1 to 70 B
    python benchmarks/simulate.py --ranks 64 --gbits 100 --tokens 512

Against times: the model is told how long forward, backward, step, the CPU work of gloo and the link take by themselves,
and says how long each variant takes together. The error is its time to the measured one.

At scale: data-parallel training in bf16, every GPU with all parameters and a link of its own, equal layers, one bucket
each, and the quicker of ring and tree. Forward and backward compute at a given rate, the step moves 28 bytes for each
parameter (AdamW), communication takes nothing from the GPU. The table: plain DDP's iteration, the share of it that is
the step, and the ratio of its time to the variant's, above 1 where that is faster; with the limit, in which the link
or the GPU never waits. What gains least comes first.
"""

import argparse
import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from measure import Spread, picture, picture_path

from instep.planning.simulate import SCHEDULES, Host, Link, ScheduleName, Work, bound, iteration_seconds

NAMES: dict[ScheduleName, str] = {schedule: schedule for schedule in SCHEDULES} | {"plain": "plain DDP"}
"""What ``two_ranks.py`` calls them."""

STEP_BYTES = 28
"""That AdamW reads and writes for each parameter: weight, two moments, gradient, in fp32."""


def compare(measured: dict[str, list[dict[str, Any]]], latency: float) -> None:
    """Print the model's times beside those of two ranks with one core each."""
    errors: dict[str, float] = {}
    for gbits, runs in measured.items():
        for number, run in enumerate(runs, 1):
            where = f"{float(gbits):g} Gbit/s, run {number}"
            if "parts" not in run:
                raise SystemExit(f"{where}: no parts, without which there is nothing to go by")
            work, host = parts(run["parts"])
            link = Link(1 / run["parts"]["link_per_byte"], latency, ranks=2)
            limit = 1e3 * bound(work, link, host)
            print(f"\n{where}: the limit is {limit:.1f} ms\n{'':19}simulated   measured   error")
            for schedule, name in NAMES.items():
                if name in run["seconds"]:
                    seconds = iteration_seconds(schedule, work, link, host)
                    real = run["seconds"][name]["median"]
                    error = 100 * (seconds / real - 1)
                    errors[f"{name}, {where}"] = error
                    print(f"  {name:16} {1e3 * seconds:7.1f} ms {1e3 * real:7.1f} ms {error:+6.1f}%")
    worst = max(errors, key=lambda where: abs(errors[where]))
    print(f"\nLargest error: {errors[worst]:+.1f}% ({worst})")


def parts(found: dict[str, Any]) -> tuple[Work, Host]:
    """Buckets have the share of each time that they have of the bytes."""
    sizes = found["bucket_bytes"]
    forward, backward, step = (
        [found[name] * size / sum(sizes) for size in sizes] for name in ("forward", "backward", "step")
    )
    return Work(sizes, forward, backward, step), Host(cores=1, communication_cpu=found["communication_cpu_per_byte"])


@dataclass(frozen=True)
class Case:
    """One iteration at scale.

    Attributes:
        billions: of parameters.
        seconds: by schedule.
        limit: seconds of the bound.
        step: seconds of the step.
    """

    ranks: int
    gbits: float
    billions: float
    seconds: dict[ScheduleName, float]
    limit: float
    step: float

    def ratio(self, schedule: ScheduleName) -> float:
        return self.seconds["plain"] / self.seconds[schedule]

    def __str__(self) -> str:
        plain = self.seconds["plain"]
        ratios = "  ".join(f"{self.ratio(schedule):{len(schedule)}.3f}" for schedule in SCHEDULES[1:])
        return (
            f"{self.ranks:5} {self.gbits:7g} {self.billions:7g} {1e3 * plain:11.1f} {100 * self.step / plain:6.1f}%  "
            f"{ratios}  {plain / self.limit:5.3f}"
        )


def simulated(ranks: int, gbits: float, billions: float, options: argparse.Namespace) -> Case:
    parameters, count = billions * 1e9, options.buckets
    forward = 2 * parameters * options.tokens / (options.tflops * 1e12)
    step = STEP_BYTES * parameters / (options.terabytes * 1e12)
    size = 2 * parameters / count
    work = Work([size] * count, [forward / count] * count, [2 * forward / count] * count, [step / count] * count)
    links = [Link(gbits * 1e9 / 8, options.latency_us * 1e-6, ranks, algorithm) for algorithm in ("ring", "tree")]
    link = min(links, key=lambda link: link.allreduce(size))
    host = Host()
    seconds = {schedule: iteration_seconds(schedule, work, link, host) for schedule in SCHEDULES}
    return Case(ranks, gbits, billions, seconds, bound(work, link, host), step)


def at_scale(options: argparse.Namespace) -> None:
    cases = [simulated(*where, options) for where in product(options.ranks, options.gbits, options.parameters)]
    cases.sort(key=lambda case: (round(case.ratio("cross_iteration"), 3), round(case.ratio("backward"), 3)))
    print(
        f"{options.tokens} tokens, {options.tflops:g} TFLOP/s, {options.terabytes:g} TB/s, {options.buckets} buckets\n"
    )
    print(f"ranks  Gbit/s       B    plain, ms    step  {'  '.join(SCHEDULES[1:])}  limit", *cases, sep="\n")
    for schedule in SCHEDULES[1:-1]:
        ratios = [case.ratio(schedule) for case in cases]
        little = sum(ratio < 1.01 for ratio in ratios)
        print(f"{schedule}: {min(ratios):.3f} to {max(ratios):.3f}; in {little} of {len(cases)} below 1.01")
    if options.picture:
        ranks = options.ranks[0]
        lines = {
            f"{schedule}, {billions:g} B": {
                case.gbits: Spread(*[case.ratio(schedule)] * 3)
                for case in cases
                if (case.ranks, case.billions) == (ranks, billions)
            }
            for schedule in ("backward", "cross_iteration")
            for billions in options.parameters
        }
        title = f"Simulated: {ranks} GPUs, {options.tokens} tokens each"
        picture(options.picture, title, lines, "Gbit/s", "plain DDP / variant")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--measured", type=Path, help="compare with these times, as two_ranks.py --json writes them")
    what.add_argument("--picture", type=picture_path, help="draw the ratios there, as SVG, for the first of --ranks")
    parser.add_argument("--latency-us", type=float, default=20.0, help="from one rank to another")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--gbits", type=float, nargs="+", default=[1.0, 10.0, 25.0, 100.0, 400.0], help="of each GPU")
    parser.add_argument("--parameters", type=float, nargs="+", default=[0.1, 1.0, 8.0, 70.0], help="billions")
    parser.add_argument("--tokens", type=int, default=2048, help="of each GPU in an iteration")
    parser.add_argument("--tflops", type=float, default=400.0, help="reached by a GPU")
    parser.add_argument("--terabytes", type=float, default=4.1, help="a second, of a GPU's memory")
    parser.add_argument("--buckets", type=int, default=24)
    options = parser.parse_args()
    if options.measured:
        compare(json.loads(options.measured.read_text()), options.latency_us * 1e-6)
    else:
        at_scale(options)


if __name__ == "__main__":
    main()
