"""The command ``instep``: ``demo``, ``selftest``, ``plan``, ``report`` and ``env``.

Each function here is a subcommand. It takes its options, imports what does the work, and turns the outcome into an exit
code. The imports are in the functions, since torch takes seconds to import, and ``--help`` must not wait for it.

Exit codes: 0 done, and what was claimed held; 1 it did not hold; 2 it could not run; 130 and 143 stopped by SIGINT and
SIGTERM, with a line that says so, or, while it imports and once its work is done, by the signal itself.
"""

import io
import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from instep import __version__
from instep_tools.output import CannotRunError, write
from instep_tools.planning.job import Job
from instep_tools.report.run import load_all
from instep_tools.signals import TerminatedError, raising

NOT_EQUAL, CANNOT_RUN, INTERRUPTED, TERMINATED = 1, 2, 130, 143


class Size(str, Enum):
    """The size of the demo's model."""

    SMALL = "small"
    MEDIUM = "medium"


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command, with signals as they are."""
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
    """Try instep, plan a training run, or read a recording. instep runs the optimizer step behind other work."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each loop.")] = 12,
    model: Annotated[
        Size, typer.Option(help="Size of the model in the first act: 18 or 38 million parameters.")
    ] = Size.MEDIUM,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Train on the first 16 MiB of this file, read as bytes.", show_default="Python's help topics"
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Number of processes that train data-parallel in the second act. 1 leaves the second act out.",
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show only the tables at the end.")] = False,
) -> None:
    """Train a small language model on real text, with instep and without.

    The first act uses one device. It trains the plain loop, attach(model, optimizer), and schedule="backward". The
    second act uses two ranks. It trains DistributedDataParallel and instep.replicate. All loops see the same batches.
    Weights and state are compared after every step, bit for bit. If they differ, the exit code is 1.
    """
    # Before ``_exit_codes``: modules swallow an exception while they are imported, so a signal ends the process then.
    from instep_tools.demo.run import run

    with _exit_codes("demo"):
        equal = run(model.value, steps, ranks, text, json, report, quiet)
    raise typer.Exit(0 if equal else NOT_EQUAL)


@app.command()
def selftest(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, mps or xpu.", show_default="the accelerator that torch finds, or cpu")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Number of processes for the data-parallel rows. 1 leaves them out.", show_default="2"),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all that was found to this file, for a report.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show only the tables and the verdict.")] = False,
) -> None:
    """Prove on this machine that instep's numbers are the plain loop's, and see what it gives here.

    Small loops, one for each feature, are trained plain and attached in four ways, in torch's deterministic mode, and
    compared bit for bit after every step. Then a GPT is trained plain and attached: its memory and its time. If any
    comparison differs, the exit code is 1.
    """
    from instep_tools.selftest.run import run  # before ``_exit_codes``, as in ``demo``

    with _exit_codes("selftest"):
        equal = run(device, ranks, json, quiet)
    raise typer.Exit(0 if equal else NOT_EQUAL)


@app.command()
def report(
    recordings: Annotated[
        list[Path],
        typer.Argument(help="Files that recording.save() wrote. Each has a column."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write one HTML page to this file.", show_default=False)
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print to the terminal. This is the default without -o and --json.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list with one object for each recording.")] = False,
) -> None:
    """Show a recording: which work ran when, which work was hidden, the gradients alive at once, and what to change."""
    # The three outputs may be asked for together; text is what there is if none is.
    with _exit_codes("report"):
        runs = load_all(recordings)
        if output is not None:
            from instep_tools.report.page import page

            write("--output", output, page(runs))
            typer.echo(f"wrote {output}", err=True)
        if json:
            from instep_tools.report.page import summary

            typer.echo(jsonlib.dumps([summary(run) for run in runs], indent=2))
        if text or (output is None and not json):
            from rich.console import Console

            from instep_tools.report.page import show

            show(Console(), runs)


@app.command()
def plan(
    build: Annotated[str, typer.Argument(help="module:function that returns the model, or the model and its inputs.")],
    optimizer: Annotated[str, typer.Option(help="A class of torch.optim, or module:Class.")] = "AdamW",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", "-o", help="An option of the optimizer, as name=value. May be repeated.", show_default=False
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="module:function that returns the inputs of the model.", show_default=False),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="module:function that computes the loss from the model's output.", show_default="its .loss, or its sum"
        ),
    ] = None,
    world_size: Annotated[int, typer.Option(help="Number of ranks that train data-parallel. 1 is one device.")] = 1,
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="bucket_cap_mb of DistributedDataParallel.", show_default="DDP's, 25")
    ] = None,
    bucket_view: Annotated[bool, typer.Option(help="DistributedDataParallel(gradient_as_bucket_view=…).")] = True,
    bucket_bytes: Annotated[
        int | None,
        typer.Option(
            help="bucket_bytes of instep.attach, on one device.",
            show_default="a twentieth of the gradients, on a CPU 16 MiB at most",
        ),
    ] = None,
    micro_batches: Annotated[
        int, typer.Option(help="Number of forwards and backwards in one step, on one device.")
    ] = 1,
    offload: Annotated[
        str | None,
        typer.Option(help="host: plan with optimizer state in host memory, too.", show_default=False),
    ] = None,
    pcie_gbytes: Annotated[
        float | None,
        typer.Option(help="Speed between host and device, in GB/s in each direction.", show_default="25"),
    ] = None,
    gbits: Annotated[
        float | None, typer.Option(help="Speed of each rank's link, in Gbit/s in each direction.", show_default="100")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(help="Latency from one rank to another, in microseconds.", show_default="20")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Speed of forward and backward, in TFLOP/s.", show_default="measured here")
    ] = None,
    terabytes: Annotated[
        float | None,
        typer.Option(help="Speed at which the step reads and writes memory, in TB/s.", show_default="measured here"),
    ] = None,
    forward_ms: Annotated[
        float | None,
        typer.Option(
            help="Measured time of one forward, in milliseconds.", show_default="estimated from its operations"
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.", show_default=False)] = None,
    refusals: Annotated[
        bool, typer.Option("--refusals", help="Show the options that attach would refuse, with the reasons.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show only the verdict, the peaks and the times.")
    ] = False,
) -> None:
    """Predict the memory and the time of a training run, with instep and without, before the run.

    The command builds the model and rehearses a few training steps without data. The rehearsal needs no device, and
    almost no memory. The output says what instep would save and which line to write. Then follow the memory with and
    without instep, the buckets, and an estimate of the time.
    """
    job = Job(
        build=build,
        optimizer=optimizer,
        options=tuple(option or ()),
        inputs=inputs,
        loss=loss,
        world_size=world_size,
        bucket_cap_mb=bucket_cap_mb,
        bucket_view=bucket_view,
        bucket_bytes=bucket_bytes,
        micro_batches=micro_batches,
        offload=offload,
        gbits=gbits,
        latency_us=latency_us,
        tflops=tflops,
        terabytes=terabytes,
        forward_ms=forward_ms,
        pcie_gbytes=pcie_gbytes,
    )
    from instep_tools.planning.show import run  # before ``_exit_codes``, as in ``demo``

    with _exit_codes("plan"):
        run(job, refusals, json, quiet)


@app.command()
def env() -> None:
    """Print the versions, devices and settings that a bug report needs, as plain text to paste.

    The command changes nothing and sends nothing. A fact that cannot be found out is replaced by the reason.
    """
    from instep_tools.environment import report

    typer.echo(report())  # a signal ends the process: torch is imported in there, and nothing is left to clean up


@contextmanager
def _exit_codes(command: str) -> Iterator[None]:
    """Turn errors and signals into one line and an exit code."""
    try:
        with raising():
            yield
    except CannotRunError as error:
        _leave(command, str(error), CANNOT_RUN)
    except KeyboardInterrupt:
        _leave(command, "interrupted", INTERRUPTED)
    except TerminatedError:
        _leave(command, "terminated", TERMINATED)


def _leave(command: str, message: str, code: int) -> None:
    typer.echo(f"instep {command}: {message}", err=True)
    raise typer.Exit(code)
