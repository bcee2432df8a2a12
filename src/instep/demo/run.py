"""The demo from its options to its last line: two acts, their numbers, and what is shown.

``run`` refuses what it can before a process is started. The first act (``one_device``) trains the same loop in three
processes that take turns, on one device, then a deeper model in the memory that was saved (``larger``), and then with
several micro-batches in a step (``accumulation``). The second act (``two_ranks``) trains data-parallel.
"""

import dataclasses
import json as jsonlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from instep._version import __version__
from instep.demo.job import (
    MICRO_BATCHES,
    MIN_STEPS,
    SHAPES,
    SIZE_OF_RANKS,
    WARM_UP_STEPS,
    Alone,
    AloneResult,
    DemoError,
    InRank,
    Line,
    Placement,
    Progress,
    RankResult,
    Shape,
    Size,
    Stepped,
    Turn,
)
from instep.demo.loops import load_text
from instep.demo.processes import Workers, workers
from instep.demo.summary import (
    LargerSummary,
    Summary,
    TrainedLoop,
    conclusion,
    print_line,
    show_summary,
    summarize,
)
from instep.report.figures import Compared
from instep.report.files import NotWrittenError, require_writable, write
from instep.report.page import page

REPORT = Path("instep-demo-report.html")


def run(
    size: Size, steps: int, ranks: int | None, text: Path | None, json: Path | None, report: Path | None, quiet: bool
) -> bool:
    """Train, show and write what was found. Return whether the weights were equal, bit for bit, in every loop.

    Whatever can be refused is refused before a process is started, with a ``DemoError`` or ``NotWrittenError``.
    Without ``report`` a page is written into the working directory, if that can be written.
    """
    if steps < MIN_STEPS:
        raise DemoError(f"--steps {steps}: at least {MIN_STEPS}, of which the first {WARM_UP_STEPS} are not timed")
    placement = place(ranks)
    content = load_text(text)
    if json is not None:
        require_writable("--json", json)
    no_report = _why_not(report)
    console, quietly = Console(), Console(quiet=quiet)  # tables and conclusion; and all else, unless ``quiet``
    show_header(quietly, placement, f"{len(content):,} bytes of {text or 'the text of Python’s help topics'}")
    shape, device = SHAPES[size], placement.device
    with progress(quietly, f"One device: three loops in three processes take {steps} steps, in turn", steps) as tell:
        trained = one_device(shape, device, steps, content, tell)
    deeper = larger(shape, device, trained, content)
    accumulated = accumulation(shape, device, content)
    results = []
    if placement.ranks > 1:
        with progress(quietly, f"{placement.ranks} ranks: two loops take {steps} steps, in turn", steps) as tell:
            results = two_ranks(SHAPES[SIZE_OF_RANKS], placement, steps, content, tell)
    summary = summarize(size, shape.depth, placement, trained, deeper, accumulated, results)
    show_summary(console, summary)
    if json is not None:
        write("--json", json, _numbers(summary))
    if no_report is None:
        write("--report", report or REPORT, page(_acts(summary, trained, results), list(conclusion(summary))))
        print_line(console, f"Report: {(report or REPORT).resolve().as_uri()}")  # a terminal can open it
    else:
        print_line(console, f"No report: {no_report}. --report FILE writes one elsewhere")
    return not summary.differences


def _why_not(report: Path | None) -> str | None:
    """Return why the page cannot be written that nobody has asked for; ``None``: it can. Raise for a page that was."""
    try:
        require_writable("--report", report or REPORT)
    except NotWrittenError as error:
        if report is not None:
            raise
        return str(error).replace("--report ", "")
    return None


DEFAULT_RANKS = 2


def place(ranks: int | None) -> Placement:
    """Find devices for ``ranks`` ranks: GPUs if there are any, else the CPU. ``None``: as many ranks as suit the
    machine, one or two."""
    if ranks is not None and ranks < 1:
        raise DemoError(f"--ranks {ranks}: give 1 for one device, or 2 and more for data parallel training")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return _on_gpus(ranks, gpus) if gpus else _on_cpu(ranks)


def _on_gpus(ranks: int | None, gpus: int) -> Placement:
    if ranks is None and gpus < DEFAULT_RANKS:
        return Placement("cuda", 1, f"one rank, as there is one GPU; CUDA_VISIBLE_DEVICES= runs {DEFAULT_RANKS} on CPU")
    ranks = ranks or DEFAULT_RANKS
    if ranks > gpus:
        raise DemoError(
            f"--ranks {ranks}: each rank takes a GPU, and there are {gpus}. "
            "With CUDA_VISIBLE_DEVICES= (empty) in the environment the ranks run on the CPU"
        )
    return Placement("cuda", ranks)


def _on_cpu(ranks: int | None) -> Placement:
    cores = os.cpu_count() or 1
    most = max(4, cores)  # a few ranks may share cores; more take longer than anybody waits
    if ranks is not None and ranks > most:
        raise DemoError(f"--ranks {ranks}: at most {most} on this machine, which has {cores} CPU cores")
    return Placement("cpu", ranks or DEFAULT_RANKS)


def show_header(console: Console, placement: Placement, text: str) -> None:
    """Print which versions run, on which text, and why the demo is not as one would expect, if it is not."""
    print_line(console, f"instep {__version__}, torch {torch.__version__}, on {text}")
    if placement.note is not None:
        print_line(console, placement.note)


LINES = 4
"""About as many lines tell of the steps of an act, where the output is no terminal."""


@contextmanager
def progress(console: Console, act: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Yield a function to call after each step: it moves a bar on a terminal, and else prints a few lines in all."""
    print_line(console, act)
    # A file or a pipe gets whole lines: a bar draws over itself.
    if not console.is_interactive:
        yield lambda step, loss: _line(console, step, steps, loss)
        return
    with Bar(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), console=console) as bar:
        task = bar.add_task("", total=steps, loss="starting")
        yield lambda step, loss: bar.update(task, completed=step, loss=f"loss {loss:.3f}")


def _line(console: Console, step: int, steps: int, loss: float) -> None:
    if step in (1, steps) or step % max(1, steps // LINES) == 0:
        print_line(console, f"step {step}/{steps}: loss {loss:.3f}")


Tell = Callable[[int, float], None]
"""Is told the number of each step, and the loss."""


def one_device(shape: Shape, device: str, steps: int, text: bytes, tell: Tell) -> list[TrainedLoop]:
    """Train each ``Line`` in a process of its own. The processes take turns."""
    lines = list(Line)
    taken: list[list[Stepped]] = [[] for _ in lines]
    with workers([Alone(shape, line, device) for line in lines], text) as started:
        for step in range(steps):
            # Another one goes first in each step: whichever goes first finds other caches than the next.
            for number in islice(cycle(range(len(lines))), step % len(lines), step % len(lines) + len(lines)):
                started.tell(number, Turn.STEP)
                taken[number].append(_stepped(started, number))
            tell(step + 1, taken[0][-1].loss)
        results = [_end(started, number, Turn.RECORD) for number in range(len(lines))]
        started.join()
    return [TrainedLoop(*one) for one in zip(lines, map(tuple, taken), results, strict=True)]


def _stepped(started: Workers, number: int) -> Stepped:
    answer = started.answer(number)
    assert isinstance(answer, Stepped)
    return answer


def _end(started: Workers, number: int, turn: Turn) -> AloneResult:
    started.tell(number, turn)
    answer = started.answer(number)
    assert isinstance(answer, AloneResult)
    return answer


MOMENTS = 2
"""The numbers that AdamW's state has for each weight."""


def larger(shape: Shape, device: str, trained: Sequence[TrainedLoop], text: bytes) -> LargerSummary | None:
    """Train the deepest model that fits in the plain loop's peak by a step in backward; ``None``: none is deeper."""
    by_line = {one.line: one.result for one in trained}
    budget, freed = by_line[Line.PLAIN].peak_bytes, by_line[Line.BACKWARD].peak_bytes
    # A block more takes its weights, AdamW's state of them, and what it keeps for backward.
    block = by_line[Line.BACKWARD].weight_bytes / shape.depth * (1 + MOMENTS) + _activations(
        shape, by_line[Line.BACKWARD]
    )
    # The depth is an estimate: if the model does not fit, the next smaller one is tried.
    for depth in range(shape.depth + int((budget - freed) / block), shape.depth, -1):
        job = Alone(replace(shape, depth=depth), Line.BACKWARD, device)
        with workers([job], text) as started:
            for _ in range(WARM_UP_STEPS):
                started.tell(0, Turn.STEP)
                _stepped(started, 0)
            result = _end(started, 0, Turn.END)
            started.join()
        if result.peak_bytes <= budget:
            return LargerSummary(result.parameters, depth, result.peak_bytes)
    return None


def accumulation(shape: Shape, device: str, text: bytes) -> list[TrainedLoop]:
    """Train the plain loop and ``Line.BACKWARD`` for a few steps of several micro-batches each."""
    lines = (Line.PLAIN, Line.BACKWARD)
    with workers([Alone(shape, line, device, MICRO_BATCHES) for line in lines], text) as started:
        taken: list[list[Stepped]] = [[], []]
        for _ in range(WARM_UP_STEPS):
            for number in range(len(lines)):
                started.tell(number, Turn.STEP)
            for number in range(len(lines)):
                taken[number].append(_stepped(started, number))
        results = [_end(started, number, Turn.END) for number in range(len(lines))]
        started.join()
    return [TrainedLoop(*one) for one in zip(lines, map(tuple, taken), results, strict=True)]


def _activations(shape: Shape, backward: AloneResult) -> float:
    """Return the bytes that a block keeps for backward, at most: the peak less weights and state, by block."""
    return max(0.0, backward.peak_bytes - (1 + MOMENTS) * backward.weight_bytes) / shape.depth


def two_ranks(shape: Shape, placement: Placement, steps: int, text: bytes, tell: Tell) -> list[RankResult]:
    """Train data-parallel, and return the results in the order of ranks."""
    jobs = [InRank(shape, steps, placement, rank) for rank in range(placement.ranks)]
    results: dict[int, RankResult] = {}
    with workers(jobs, text) as started:
        for rank, answer in started.answers():
            if isinstance(answer, RankResult):
                results[rank] = answer
            elif isinstance(answer, Progress):
                tell(answer.step, answer.loss)
        started.join()
    return [results[rank] for rank in sorted(results)]


def _acts(summary: Summary, trained: Sequence[TrainedLoop], results: Sequence[RankResult]) -> list[Compared]:
    """Return the recordings of each act, for the report. The two acts train models of their own."""
    alone = [one.result.recorded for one in trained if one.line is not Line.DEFAULT]
    act, ranks = summary.one_device, summary.two_ranks
    acts = [Compared([run for run in alone if run is not None], "One device", _weights(summary, act.differences))]
    if ranks is not None:
        found = [] if ranks.difference is None else [ranks.difference]
        acts.append(Compared(results[0].recorded, f"{ranks.ranks} ranks", _weights(summary, found)))
    return acts


def _weights(summary: Summary, differences: Sequence[str]) -> str:
    return "different" if differences else f"equal, bit for bit, after each of {summary.steps} steps"


def _numbers(summary: Summary) -> str:
    """Return the content of ``--json``."""
    versions = {"instep_version": __version__, "torch_version": torch.__version__}
    found = {"equal": not summary.differences, "differences": summary.differences}
    return jsonlib.dumps({**versions, **found, **dataclasses.asdict(summary)}, indent=2) + "\n"
