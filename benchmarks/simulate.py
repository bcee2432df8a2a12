"""What would instep hide on other machines? ``iteration_model.py`` against times, and at scale.

    python benchmarks/simulate.py --measured two_ranks.json          # from: two_ranks.py --json two_ranks.json
    python benchmarks/simulate.py --picture simulate.svg             # 8 to 4096 GPUs, 1 to 400 Gbit/s, 0.1 to 70 B
    python benchmarks/simulate.py --ranks 64 --gbits 100 --tokens 512
    python benchmarks/simulate.py --pipelines                        # the model in ``pipeline_model.py``

Against times: the model is told how long forward, backward, step, the CPU work of gloo and the link take by themselves,
and says how long each variant takes together. The error is its time to the measured one.

At scale: data-parallel training in bf16, every GPU with all parameters and a link of its own, equal layers, one bucket
each, and the quicker of ring and tree. Forward and backward compute at a given rate, the step moves 28 bytes for each
parameter (AdamW), communication takes nothing from the GPU. The table: plain DDP's iteration, the share of it that is
the step, and the ratio of its time to the variant's, above 1 where that is faster; with the limit, in which the link
or the GPU never waits. What gains least comes first.

Pipelines: torch's schedules, in the order that torch computes. The parameters are divided evenly among the stages, each
micro-batch has ``--tokens`` tokens, and a backward takes a forward's time for the gradients of inputs, and the same for
those of weights. The table: plain's iteration, and the ratio of its time to each way's, above 1 where that is faster;
the ratio of "plain, clipped" to "undo, clipped", which do the same; and the exposed share of the step: of all seconds
of all stages' steps, those in which the rank had something else to do. What loses most comes first.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import bars
from iteration_model import SCHEDULES, Host, Link, ScheduleName, Work, bound, iteration_seconds
from pipeline_model import WAYS, Action, Kind, Pipeline, Stage, Steady, WayName, steady

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

    def gains(self) -> list[bars.Bar]:
        """How much faster than plain ``backward`` is, per cent, and how much faster any schedule could be."""
        most = self.seconds["plain"] / self.limit
        return [
            bars.Bar('schedule="backward"', 100 * (self.ratio("backward") - 1), bars.OURS),
            bars.Bar("the most that could be", 100 * (most - 1), bars.LIMIT),
        ]

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
    all_ranks = options.ranks or [8, 64, 512, 4096]
    cases = [simulated(*where, options) for where in product(all_ranks, options.gbits, options.parameters)]
    cases.sort(key=lambda case: round(case.ratio("backward"), 3))
    print(
        f"{options.tokens} tokens, {options.tflops:g} TFLOP/s, {options.terabytes:g} TB/s, {options.buckets} buckets\n"
    )
    print(f"ranks  Gbit/s       B    plain, ms    step  {'  '.join(SCHEDULES[1:])}  limit", *cases, sep="\n")
    for schedule in SCHEDULES[1:-1]:
        ratios = [case.ratio(schedule) for case in cases]
        little = sum(ratio < 1.01 for ratio in ratios)
        print(f"{schedule}: {min(ratios):.3f} to {max(ratios):.3f}; in {little} of {len(cases)} below 1.01")
    if options.picture:
        ranks, billions = all_ranks[0], options.parameters[-1]
        title = f"Simulated speed over plain DDP, per cent: {ranks} GPUs, {billions:g} B, {options.tokens} tokens each"
        drawn = [case for case in cases if (case.ranks, case.billions) == (ranks, billions)]
        groups = {f"{case.gbits:g} Gbit/s": case.gains() for case in drawn}
        bars.draw(options.picture, bars.Panel(title, groups, "+.1f"))


PIPELINES: dict[str, int] = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
"""torch's schedules, with the stages of a rank."""


def order_of(name: str, ranks: int, micro_batches: int) -> dict[int, list[Action]]:
    """What each rank does in an iteration, as torch has it: without messages, and without the idle places."""
    if name == "Schedule1F1B":
        return {rank: list(_one_forward_one_backward(rank, ranks, micro_batches)) for rank in range(ranks)}
    from torch.distributed.pipelining import schedules  # seconds, for pipelines alone

    per_rank = PIPELINES[name]
    stages = [
        SimpleNamespace(num_stages=ranks * per_rank, group_size=ranks, group_rank=0, stage_index=number, submod=None)
        for number in range(per_rank)
    ]
    made: Any = getattr(schedules, name)(stages if per_rank > 1 else stages[0], micro_batches)
    return {rank: list(_actions(actions)) for rank, actions in made.pipeline_order.items()}


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """What ``Schedule1F1B`` runs. Its ``pipeline_order`` is something else: in torch 2.13 the last rank's forwards are
    those of micro-batches 1 to ``micro_batches`` there."""
    ahead = min(micro_batches, ranks - rank)
    yield from (Action(rank, "F", number) for number in range(ahead))
    for number in range(micro_batches):
        yield Action(rank, "B", number)
        if number + ahead < micro_batches:
            yield Action(rank, "F", number + ahead)


def _actions(found: Iterable[Any]) -> Iterator[Action]:
    for action in found:
        if action is not None and action.sub_actions:  # a forward and a backward that may overlap
            yield from _actions(action.sub_actions)
        elif action is not None and action.computation_type.value in get_args(Kind):
            yield Action(action.stage_index, action.computation_type.value, action.microbatch_index)


@dataclass(frozen=True)
class PipelineCase:
    """One pipeline in every way.

    Attributes:
        step: seconds of the steps of a rank.
    """

    name: str
    ranks: int
    micro_batches: int
    step: float
    found: dict[WayName, Steady]

    def ratio(self, way: WayName, base: WayName = "plain") -> float:
        return self.found[base].seconds / self.found[way].seconds

    @property
    def undone(self) -> float:
        return self.ratio("undo, clipped", "plain, clipped")

    def exposed(self, way: WayName) -> float:
        """Of all seconds of all steps, the share."""
        return sum(self.found[way].exposed.values()) / (self.step * self.ranks)

    def __str__(self) -> str:
        ratios = "  ".join(f"{self.ratio(way):{len(way)}.3f}" for way in WAYS[1:])
        exposed = "  ".join(f"{100 * self.exposed(way):{max(4, len(way) - 1)}.0f}%" for way in WAYS[:-1])
        return (
            f"{self.name.removeprefix('Schedule'):22} {self.ranks:5} {self.micro_batches:7} "
            f"{1e3 * self.found['plain'].seconds:10.1f}  {ratios}  {self.undone:7.3f}  {exposed}"
        )


def piped(name: str, ranks: int, micro_batches: int, options: argparse.Namespace) -> PipelineCase:
    count = ranks * PIPELINES[name]
    parameters = options.pipeline_parameters * 1e9 / count
    forward = 2 * parameters * options.tokens / (options.tflops * 1e12)
    step = STEP_BYTES * parameters / (options.terabytes * 1e12)
    norm = Link(1.0, options.latency_us * 1e-6, ranks, "tree").allreduce(0.0)
    stages = [Stage(forward, forward, forward, step)] * count
    pipeline = Pipeline(order_of(name, ranks, micro_batches), stages, options.message_us * 1e-6, norm)
    found = {way: steady(way, pipeline) for way in WAYS}
    return PipelineCase(name, ranks, micro_batches, step * PIPELINES[name], found)


def of_pipelines(options: argparse.Namespace) -> None:
    cases, refused = [], []
    for where in product(PIPELINES, options.ranks or [4, 8], options.micro_batches):
        try:
            cases.append(piped(*where, options))
        except ValueError as error:  # a schedule that cannot be for so many micro-batches
            refused.append(f"not there: {where}: {error}")
    cases.sort(key=lambda case: (round(case.ratio("backward"), 3), round(case.undone, 3)))
    step = cases[0].step * cases[0].ranks
    print(
        f"{options.pipeline_parameters:g} B parameters, {options.tokens} tokens a micro-batch, {options.tflops:g} "
        f"TFLOP/s, {options.terabytes:g} TB/s, {options.message_us:g} us a message; the steps of all stages take "
        f"{1e3 * step:.1f} ms\n"
    )
    columns = f"{'schedule':22} ranks  micro-b  plain, ms  {'  '.join(WAYS[1:])}  clipped"
    print(f"{columns}  exposed: {'  '.join(WAYS[:-1])}", *cases, sep="\n")
    for title, ratios in {
        "plain / backward": [case.ratio("backward") for case in cases],
        "plain, clipped / undo, clipped": [case.undone for case in cases],
    }.items():
        less, more = sum(ratio < 0.9995 for ratio in ratios), sum(ratio >= 1.0005 for ratio in ratios)
        print(f"{title}: {min(ratios):.3f} to {max(ratios):.3f}; of {len(cases)}, {less} lose and {more} gain")
    print(*refused, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--measured", type=Path, help="compare with these times, as two_ranks.py --json writes them")
    what.add_argument(
        "--picture",
        type=Path,
        help="draw the gains there, as SVG, of the first of --ranks and the last of --parameters",
    )
    what.add_argument("--pipelines", action="store_true", help="torch's schedules of pipelines instead")
    parser.add_argument("--latency-us", type=float, default=20.0, help="from one rank to another")
    parser.add_argument("--ranks", type=int, nargs="+", help="8, 64, 512 and 4096; of pipelines 4 and 8")
    parser.add_argument("--gbits", type=float, nargs="+", default=[1.0, 10.0, 25.0, 100.0, 400.0], help="of each GPU")
    parser.add_argument("--parameters", type=float, nargs="+", default=[0.1, 1.0, 8.0, 70.0], help="billions")
    parser.add_argument("--tokens", type=int, default=2048, help="of each GPU in an iteration, or a micro-batch")
    parser.add_argument("--tflops", type=float, default=400.0, help="reached by a GPU")
    parser.add_argument("--terabytes", type=float, default=4.1, help="a second, of a GPU's memory")
    parser.add_argument("--buckets", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16], help="of --pipelines")
    parser.add_argument("--pipeline-parameters", type=float, default=8.0, help="billions, of --pipelines")
    parser.add_argument("--message-us", type=float, default=500.0, help="of activations to the next rank")
    options = parser.parse_args()
    if options.measured:
        compare(json.loads(options.measured.read_text()), options.latency_us * 1e-6)
    elif options.pipelines:
        of_pipelines(options)
    else:
        at_scale(options)


if __name__ == "__main__":
    main()
