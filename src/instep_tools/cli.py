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
from typing import Annotated, Any

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


def _option(help: str, default: str | bool = False, *names: str) -> Any:
    """Return an option with the default that the help shows, where that is not the value in the code."""
    return typer.Option(*names, help=help, show_default=default)


QUIET = ("--quiet", "-q")


@app.command()
def demo(
    steps: Annotated[int, _option("Training steps of each loop.", True)] = 12,
    model: Annotated[
        Size, _option("Size of the model in the first act: 18 or 38 million parameters.", True)
    ] = Size.MEDIUM,
    text: Annotated[
        Path | None, _option("Train on the first 16 MiB of this file, read as bytes.", "Python's help topics")
    ] = None,
    ranks: Annotated[
        int | None,
        _option(
            "Number of processes that train data-parallel in the second act. 1 leaves the second act out.",
            "2, or 1 with one GPU",
        ),
    ] = None,
    json: Annotated[Path | None, _option("Write all numbers to this file.")] = None,
    report: Annotated[
        Path | None, _option("Write a report of the loops, an HTML page, to this file.", "instep-demo-report.html")
    ] = None,
    quiet: Annotated[bool, _option("Show only the tables at the end.", False, *QUIET)] = False,
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
    device: Annotated[str | None, _option("cpu, cuda, mps or xpu.", "the accelerator that torch finds, or cpu")] = None,
    ranks: Annotated[
        int | None, _option("Number of processes for the data-parallel rows. 1 leaves them out.", "2")
    ] = None,
    thorough: Annotated[
        bool,
        _option("On a CPU, compute with all of torch's threads, not with one. It takes several times as long.", False),
    ] = False,
    json: Annotated[Path | None, _option("Write all that was found to this file, for a report.")] = None,
    quiet: Annotated[bool, _option("Show only the tables and the verdict.", False, *QUIET)] = False,
) -> None:
    """Prove on this machine that instep's numbers are the plain loop's, and see what it gives here.

    Small loops, one for each feature, are trained plain and attached in four ways, in torch's deterministic mode, and
    compared bit for bit after every step. Then a GPT is trained plain and attached: its memory and its time. If any
    comparison differs, the exit code is 1.
    """
    from instep_tools.selftest.run import run  # before ``_exit_codes``, as in ``demo``

    with _exit_codes("selftest"):
        equal = run(device, ranks, json, quiet, thorough=thorough)
    raise typer.Exit(0 if equal else NOT_EQUAL)


@app.command()
def report(
    recordings: Annotated[list[Path], typer.Argument(help="Files that recording.save() wrote. Each has a column.")],
    output: Annotated[Path | None, _option("Write one HTML page to this file.", False, "--output", "-o")] = None,
    text: Annotated[
        bool, _option("Print to the terminal. This is the default without -o and --json.", False, "--text")
    ] = False,
    json: Annotated[bool, _option("Print a JSON list with one object for each recording.", False, "--json")] = False,
) -> None:
    """Show a recording: which work ran when, which work was hidden, and the gradients alive at once."""
    # The three outputs may be asked for together; text is what there is if none is.
    with _exit_codes("report"):
        runs = load_all(recordings)
        from rich.console import Console

        from instep_tools.report.page import page, show, summary

        if output is not None:
            write("--output", output, page(runs))
            typer.echo(f"wrote {output}", err=True)
        if json:
            typer.echo(jsonlib.dumps([summary(run) for run in runs], indent=2))
        if text or (output is None and not json):
            show(Console(), runs)


@app.command()
def plan(
    build: Annotated[str, typer.Argument(help="module:function that returns the model, or the model and its inputs.")],
    optimizer: Annotated[str, _option("A class of torch.optim, or module:Class.", True)] = "AdamW",
    options: Annotated[
        list[str] | None,
        _option("An option of the optimizer, as name=value. May be repeated.", False, "--option", "-o"),
    ] = None,
    inputs: Annotated[str | None, _option("module:function that returns the inputs of the model.")] = None,
    loss: Annotated[
        str | None, _option("module:function that computes the loss from the model's output.", "its .loss, or its sum")
    ] = None,
    world_size: Annotated[int, _option("Number of ranks that train data-parallel. 1 is one device.", True)] = 1,
    bucket_cap_mb: Annotated[float | None, _option("bucket_cap_mb of DistributedDataParallel.", "DDP's, 25")] = None,
    bucket_view: Annotated[bool, _option("DistributedDataParallel(gradient_as_bucket_view=…).", True)] = True,
    bucket_bytes: Annotated[
        int | None,
        _option(
            "bucket_bytes of instep.attach, on one device.", "a twentieth of the gradients, on a CPU 16 MiB at most"
        ),
    ] = None,
    micro_batches: Annotated[int, _option("Number of forwards and backwards in one step, on one device.", True)] = 1,
    offload: Annotated[str | None, _option("host: plan with optimizer state in host memory, too.")] = None,
    pcie_gbytes: Annotated[
        float | None, _option("Speed between host and device, in GB/s in each direction.", "25")
    ] = None,
    gbits: Annotated[float | None, _option("Speed of each rank's link, in Gbit/s in each direction.", "100")] = None,
    latency_us: Annotated[float | None, _option("Latency from one rank to another, in microseconds.", "20")] = None,
    tflops: Annotated[float | None, _option("Speed of forward and backward, in TFLOP/s.", "measured here")] = None,
    terabytes: Annotated[
        float | None, _option("Speed at which the step reads and writes memory, in TB/s.", "measured here")
    ] = None,
    forward_ms: Annotated[
        float | None, _option("Measured time of one forward, in milliseconds.", "estimated from its operations")
    ] = None,
    json: Annotated[Path | None, _option("Write all numbers to this file.")] = None,
    refusals: Annotated[
        bool, _option("Show the options that attach would refuse, with the reasons.", False, "--refusals")
    ] = False,
    quiet: Annotated[bool, _option("Show only the verdict, the peaks and the times.", False, *QUIET)] = False,
) -> None:
    """Predict the memory and the time of a training run, with instep and without, before the run.

    The command builds the model and rehearses a few training steps without data. The rehearsal needs no device, and
    almost no memory. The output says what instep would save and which line to write. Then follow the memory with and
    without instep, the buckets, and an estimate of the time.
    """
    given = locals()  # the options have the names of the job's fields
    job = Job(**{**{name: given[name] for name in Job.__dataclass_fields__}, "options": tuple(options or ())})
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
