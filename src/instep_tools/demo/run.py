"""The demo from its options to its last line: two acts, their numbers, and what is shown.

``run`` refuses what it can before a process is started. The first act (``one_device``) trains the same loop in three
processes that take turns, on one device, and then a deeper model in the memory that was saved, and several
micro-batches in a step (``untimed``). The second act (``two_ranks``) trains data-parallel.
"""

import dataclasses
import json as jsonlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, cycle, islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from instep import __version__
from instep_tools.demo.job import (
    CONTEXT,
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
from instep_tools.demo.processes import Workers, workers
from instep_tools.demo.summary import (
    LargerSummary,
    Summary,
    TrainedLoop,
    conclusion,
    print_line,
    show_summary,
    summarize,
)
from instep_tools.report.figures import Compared
from instep_tools.report.files import NotWrittenError, require_writable, write
from instep_tools.report.page import page

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
    with workers([Alone(shape, line, device) for line in Line], content) as started:
        act = f"One device: three loops in three processes take {steps} steps, in turn"
        with progress(quietly, act, steps) as tell:
            trained = one_device(started, steps, tell)
        deeper, accumulated = untimed(started, shape, device, trained)
        results = []
        if placement.ranks > 1:
            with progress(quietly, f"{placement.ranks} ranks: two loops take {steps} steps, in turn", steps) as tell:
                results = two_ranks(started, placement, steps, tell)
        started.join()
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


MIN_BYTES = CONTEXT + 1
MAX_BYTES = 16 * 1024 * 1024


def load_text(path: Path | None) -> bytes:
    """Return the bytes to train on: the first 16 MiB of the file at ``path``, or Python's own help topics.

    Raises ``DemoError`` for a file that cannot be read, or is too short for one row of a batch.
    """
    if path is None:
        return _help_topics()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES)
    except OSError as error:
        raise DemoError(f"cannot read --text {path}: {error.strerror}") from error
    if len(text) < MIN_BYTES:
        found = "is empty" if not text else f"has only {len(text)} bytes"
        raise DemoError(f"--text {path} {found}: training needs at least {MIN_BYTES} bytes, and better some thousands")
    return text


def _help_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DemoError("this Python comes without pydoc_data, the default text: give one with --text FILE") from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


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


def one_device(started: Workers, steps: int, tell: Tell) -> list[TrainedLoop]:
    """Train each ``Line`` in a process of its own. The processes take turns."""
    lines = list(Line)
    taken: list[list[Stepped]] = [[] for _ in lines]
    for step in range(steps):
        # Another one goes first in each step: whichever goes first finds other caches than the next.
        for number in islice(cycle(range(len(lines))), step % len(lines), step % len(lines) + len(lines)):
            started.tell(number, Turn.STEP)
            taken[number].append(_stepped(started, number))
        tell(step + 1, taken[0][-1].loss)
    # Nobody sees a recording of the default: its loop runs as the plain one does until a trial has found a gain.
    turns = [Turn.END if line is Line.DEFAULT else Turn.RECORD for line in lines]
    results = [_end(started, number, turn) for number, turn in enumerate(turns)]
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


def untimed(
    started: Workers, shape: Shape, device: str, trained: Sequence[TrainedLoop]
) -> tuple[LargerSummary | None, list[TrainedLoop]]:
    """Train what is measured in memory alone, a few steps of each: the processes of ``one_device`` do that next, beside
    each other.

    Returns:
        The deepest model that fits in the plain loop's peak by a step in backward, ``None`` if none is deeper. And the
        plain loop and ``Line.BACKWARD`` with several micro-batches in a step.
    """
    by_line = {one.line: one.result for one in trained}
    budget, backward = by_line[Line.PLAIN].peak_bytes, by_line[Line.BACKWARD]
    accumulating = [Alone(shape, line, device, MICRO_BATCHES) for line in (Line.PLAIN, Line.BACKWARD)]
    deeper = [Alone(replace(shape, depth=depth), Line.BACKWARD, device) for depth in _depths(shape, backward, budget)]
    found = _few_steps(started, [*accumulating, *deeper[:1]])
    accumulated = [TrainedLoop(job.line, *one) for job, one in zip(accumulating, found, strict=False)]
    # The depth is an estimate: if the model does not fit, the next smaller one is tried.
    tried = chain(found[len(accumulating) :], (_few_steps(started, [job])[0] for job in deeper[1:]))
    for job, (_, result) in zip(deeper, tried, strict=True):
        if result.peak_bytes <= budget:
            return LargerSummary(result.parameters, job.shape.depth, result.peak_bytes), accumulated
    return None, accumulated


def _few_steps(started: Workers, jobs: Sequence[Alone]) -> list[tuple[tuple[Stepped, ...], AloneResult]]:
    """Take the first steps of each job, in which memory is counted, and return them with the job's result."""
    started.give(jobs)
    for number in range(len(jobs)):
        for _ in range(WARM_UP_STEPS):
            started.tell(number, Turn.STEP)
    taken = [tuple(_stepped(started, number) for _ in range(WARM_UP_STEPS)) for number in range(len(jobs))]
    results = [_end(started, number, Turn.END) for number in range(len(jobs))]
    return list(zip(taken, results, strict=True))


def _depths(shape: Shape, backward: AloneResult, budget: int) -> range:
    """Return the depths that may fit into ``budget`` bytes by a step in backward, from the deepest on."""
    # A block more takes its weights, AdamW's state of them, and what it keeps for backward.
    block = backward.weight_bytes / shape.depth * (1 + MOMENTS) + _activations(shape, backward)
    return range(shape.depth + int((budget - backward.peak_bytes) / block), shape.depth, -1)


def _activations(shape: Shape, backward: AloneResult) -> float:
    """Return the bytes that a block keeps for backward, at most: the peak less weights and state, by block."""
    return max(0.0, backward.peak_bytes - (1 + MOMENTS) * backward.weight_bytes) / shape.depth


def two_ranks(started: Workers, placement: Placement, steps: int, tell: Tell) -> list[RankResult]:
    """Train data-parallel, and return the results in the order of ranks."""
    started.give([InRank(SHAPES[SIZE_OF_RANKS], steps, placement, rank) for rank in range(placement.ranks)])
    results: dict[int, RankResult] = {}
    for rank, answer in started.answers():
        if isinstance(answer, RankResult):
            results[rank] = answer
        elif isinstance(answer, Progress):
            tell(answer.step, answer.loss)
    return [results[rank] for rank in sorted(results)]


def _acts(summary: Summary, trained: Sequence[TrainedLoop], results: Sequence[RankResult]) -> list[Compared]:
    """Return the recordings of each act, for the report. The two acts train models of their own."""
    alone = [one.result.recorded for one in trained]
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
