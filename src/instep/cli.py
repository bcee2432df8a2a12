"""The command ``instep``.

Exit codes: 0 done, and what was claimed held; 1 it did not hold; 2 it could not run; 130 and 143 stopped by SIGINT and
SIGTERM, with a line that says so, or, while it imports and once its work is done, by the signal itself.
"""

import io
import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from instep._signals import TerminatedError, raising
from instep._version import __version__
from instep.demo.errors import DemoError
from instep.demo.job import Size
from instep.planning.errors import PlanError
from instep.planning.job import Job
from instep.report.files import NotWrittenError, write
from instep.report.run import NotARecordingError, load_all

NOT_EQUAL, CANNOT_RUN, INTERRUPTED, TERMINATED = 1, 2, 130, 143

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """The command, with signals as they are."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without arrows gets a question mark
    app(prog_name="instep")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"instep {__version__}")
        raise typer.Exit


@app.callback()
def _instep(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The optimizer step inside backward, bit for bit the plain loop."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each loop.")] = 12,
    model: Annotated[Size, typer.Option(help="18 or 38 million parameters, in the first act.")] = Size.MEDIUM,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Train on the first 16 MiB of this file, read as bytes.", show_default="Python's help topics"
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Processes that train data-parallel in the second act; 1 leaves that act out.",
            show_default="2, or 1 with one GPU",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.", show_default=False)] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write a report of the loops, an HTML page, to this file.", show_default="instep-demo-report.html"
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show the closing tables only.")] = False,
) -> None:
    """Train a small language model on real text, plain and with instep side by side.

    First on one device: the plain loop, attach(model, optimizer), and schedule="backward", each in a process of its
    own. Then on two ranks: DistributedDataParallel and instep.replicate. All loops see the same batches. Weights are
    compared after every step, bit for bit; the command fails (exit code 1) if they differ.
    """
    from instep.demo.run import run  # torch, too: a signal that comes meanwhile is not to raise

    with _exit_codes("demo"):
        equal = run(model, steps, ranks, text, json, report, quiet)
    raise typer.Exit(0 if equal else NOT_EQUAL)


@app.command()
def report(
    recordings: Annotated[
        list[Path], typer.Argument(help="What recording.save() wrote; several are shown side by side.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write one HTML page to this file.", show_default=False)
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print to the terminal: so it is without -o and --json.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: a list, with an object for each recording.")
    ] = False,
) -> None:
    """Show what a recording says: what ran when, what was hidden, what memory held, and what to change."""
    with _exit_codes("report"):
        runs = load_all(recordings)
        if output is not None:
            from instep.report.page import page

            write("--output", output, page(runs))
            typer.echo(f"wrote {output}", err=True)
        if json:
            from instep.report.terminal import summary

            typer.echo(jsonlib.dumps([summary(run) for run in runs], indent=2))
        if text or (output is None and not json):
            from rich.console import Console

            from instep.report.terminal import show

            show(Console(), runs)


@app.command()
def plan(
    build: Annotated[str, typer.Argument(help="module:function that returns the model, or the model and its inputs.")],
    optimizer: Annotated[str, typer.Option(help="A class of torch.optim, or module:Class.")] = "AdamW",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="Of the optimizer, as name=value; may be repeated.", show_default=False),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="module:function that returns what the model is called with.", show_default=False),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="module:function that makes the loss of the model's output.", show_default="its .loss, or its sum"
        ),
    ] = None,
    world_size: Annotated[int, typer.Option(help="Ranks that train data-parallel; 1 for one device.")] = 1,
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="Of DistributedDataParallel.", show_default="DDP's, 25")
    ] = None,
    bucket_view: Annotated[bool, typer.Option(help="DistributedDataParallel(gradient_as_bucket_view=…).")] = True,
    bucket_bytes: Annotated[int | None, typer.Option(help="Of attach, on one device.", show_default="16 MiB")] = None,
    gbits: Annotated[
        float | None, typer.Option(help="Gbit/s of each rank's link, in each direction.", show_default="100")
    ] = None,
    latency_us: Annotated[float | None, typer.Option(help="From one rank to another.", show_default="20")] = None,
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s that forward and backward reach.", show_default="measured here")
    ] = None,
    terabytes: Annotated[
        float | None,
        typer.Option(help="TB/s of the device's memory that the step reaches.", show_default="measured here"),
    ] = None,
    forward_ms: Annotated[
        float | None, typer.Option(help="One forward, measured.", show_default="from its operations")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.", show_default=False)] = None,
    refusals: Annotated[
        bool, typer.Option("--refusals", help="Show which options attach would refuse, and why.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show the verdict, peaks and times only.")] = False,
) -> None:
    """What training a model with instep will need and take, before there is a run.

    The model is built, and a few steps of training are rehearsed, without any data: it takes no memory to speak of, and
    no device. Shown are what would be saved, which line to write, the memory with and without instep, the buckets, and
    an estimate of the time.
    """
    job = Job(
        build,
        optimizer,
        tuple(option or ()),
        inputs,
        loss,
        world_size,
        bucket_cap_mb,
        bucket_view,
        bucket_bytes,
        gbits,
        latency_us,
        tflops,
        terabytes,
        forward_ms,
    )
    from instep.planning.run import run

    with _exit_codes("plan"):
        run(job, refusals, json, quiet)


@app.command()
def env() -> None:
    """Print the versions, devices and settings that a report of a bug needs, as plain text to paste.

    It finds out and prints; nothing is changed, and nothing is sent. What cannot be found out says why.
    """
    from instep.environment import report

    typer.echo(report())  # a signal ends the process: torch is imported in there, and nothing is left to clean up


@contextmanager
def _exit_codes(command: str) -> Iterator[None]:
    """Turn errors and signals into one line and an exit code."""
    try:
        with raising():
            yield
    except (DemoError, PlanError, NotARecordingError, NotWrittenError) as error:
        _leave(command, str(error), CANNOT_RUN)
    except KeyboardInterrupt:
        _leave(command, "interrupted", INTERRUPTED)
    except TerminatedError:
        _leave(command, "terminated", TERMINATED)


def _leave(command: str, message: str, code: int) -> None:
    typer.echo(f"instep {command}: {message}", err=True)
    raise typer.Exit(code)
