"""The command ``instep``.

Exit codes: 0 done, and what was claimed held; 1 it did not hold; 2 it could not run; 130 and 143 stopped by SIGINT and
SIGTERM.
"""

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from instep._version import __version__
from instep.demo.errors import DemoError, TerminatedError
from instep.demo.job import Size

NOT_EQUAL, CANNOT_RUN, INTERRUPTED, TERMINATED = 1, 2, 130, 143

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """The console entry."""
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
    steps: Annotated[int, typer.Option(help="Training steps of each of the two loops.")] = 60,
    model: Annotated[Size, typer.Option(help="3 or 18 million parameters.")] = Size.SMALL,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Train on the first 16 MiB of this file, read as bytes.", show_default="Python's help topics"
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes that train data-parallel; 1 for one device.", show_default="2, or 1 with one GPU"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.", show_default=False)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show the closing table only.")] = False,
) -> None:
    """Train a small language model on real text, plain and with instep side by side.

    Both see the same batches. After every step all weights and the optimizer's state are compared, bit for bit; the
    command fails (exit code 1) if they differ.
    """
    with _exit_codes():
        from instep.demo.run import run

        equal = run(model, steps, ranks, text, json, quiet)
    raise typer.Exit(0 if equal else NOT_EQUAL)


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn errors and signals into one line and an exit code."""
    try:
        with _sigterm_raises():
            yield
    except DemoError as error:
        _leave(str(error), CANNOT_RUN)
    except KeyboardInterrupt:
        _leave("interrupted", INTERRUPTED)
    except TerminatedError:
        _leave("terminated", TERMINATED)


def _leave(message: str, code: int) -> None:
    typer.echo(f"instep demo: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
