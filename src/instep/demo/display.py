"""What the demo shows: a header, the falling loss, the closing table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from instep._version import __version__
from instep.demo.job import RECORDED_STEPS, Job, Progress
from instep.demo.summary import MIB, LoopSummary, Summary, notes

LINES = 10


def show_header(console: Console, job: Job, text: str) -> None:
    """What is about to run, and why it is not something else."""
    versions = f"instep {__version__}, torch {torch.__version__}"
    _print(console, f"{versions}: {job.steps} steps of a {job.size.value} GPT on {text}, plain and with instep")
    if job.placement.note is not None:
        _print(console, job.placement.note)


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[Progress], None]]:
    """A function to call after each step: it moves a bar on a terminal, and else prints about ten lines in all."""
    if not console.is_interactive:
        yield lambda now: _line(console, now, steps)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("starting", total=steps, loss="")
        yield lambda now: bar.update(task, completed=now.step, description="training", loss=_losses(now))


def show_summary(console: Console, summary: Summary) -> None:
    """The closing table, the first difference if there is one, and what the numbers mean."""
    _print(console, _title(summary))
    console.print(_table(summary))
    if summary.difference is not None:
        console.print(f"Not equal: {summary.difference}", style="bold red", markup=False, highlight=False)
    for note in notes(summary):
        _print(console, note)


def show_report(console: Console, path: Path) -> None:
    """Where it is; as a terminal can open it."""
    _print(console, f"Report of {RECORDED_STEPS} more steps of each: {path.resolve().as_uri()}")


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False)


def _losses(now: Progress) -> str:
    return f"loss {now.plain_loss:.3f} plain, {now.attached_loss:.3f} instep"


def _line(console: Console, now: Progress, steps: int) -> None:
    if now.step in (1, steps) or now.step % max(1, steps // LINES) == 0:
        _print(console, f"step {now.step}/{steps}: {_losses(now)}")


def _table(summary: Summary) -> Table:
    plain, instep, ratio = summary.plain, summary.instep, summary.ratio
    tensors = f"{summary.tensors_compared} tensors"
    equal = "equal after every step" if summary.equal else "[bold red]NOT EQUAL"
    table = Table("", "plain", "instep", "plain / instep", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_row("loss, first → last", _loss(plain), _loss(instep))
    table.add_row("weights and state", tensors, tensors, equal)
    table.add_row(
        "step time, median",
        _milliseconds(plain.median_step_seconds),
        _milliseconds(instep.median_step_seconds),
        f"{ratio.median:.2f} (p10–p90 {ratio.p10:.2f}–{ratio.p90:.2f})",
    )
    table.add_row(
        "optimizer, exposed",
        _milliseconds(plain.median_exposed_optimizer_seconds),
        _milliseconds(instep.median_exposed_optimizer_seconds),
    )
    table.add_row("gradients, peak", _mebibytes(plain), _mebibytes(instep))
    return table


def _title(summary: Summary) -> str:
    ranks = f"{summary.ranks} DDP ranks over {summary.backend}" if summary.backend else "one rank"
    return (
        f"{summary.model} GPT, {summary.parameters / 1e6:.1f} M parameters, {ranks} on {summary.device}, "
        f"{summary.buckets} buckets, {summary.steps} steps ({summary.warm_up_steps} not timed)"
    )


def _loss(loop: LoopSummary) -> str:
    return f"{loop.first_loss:.3f} → {loop.last_loss:.3f}"


def _milliseconds(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _mebibytes(loop: LoopSummary) -> str:
    return f"{loop.peak_gradient_bytes / MIB:.1f} MiB"
