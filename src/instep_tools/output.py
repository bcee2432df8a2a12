"""What a command says and writes: lines, tables, sizes and times in words, files, and the error that it ends with.

Files are written whole or not at all. A command calls ``require_writable`` before its work and ``write`` after it, so
that a path that cannot be written costs no training.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from instep import __version__
from instep_tools.signals import waiting

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class CannotRunError(Exception):
    """A command cannot run. The message is for the user: what was found and what to do, in a line or two."""


def print_line(console: Console, line: str) -> None:
    """Print a line in which brackets are no markup, and that a pipe gets as a whole."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def table(*columns: str, words: Sequence[str] = ()) -> Table:
    """Return a table without rows. The first column is words, as ``words`` are, and the others are numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        is_words = number == 0 or column in words
        made.add_column(Text(column), justify="left" if is_words else "right", no_wrap=not is_words)
    return made


def size_of(nbytes: float) -> str:
    """Return a size in words, in the unit that suits it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes:.0f} B"


def time_of(seconds: float) -> str:
    """Return a duration in words."""
    return f"{1e3 * seconds:.2f} ms" if abs(seconds) >= 1e-3 else f"{1e6 * seconds:.1f} µs"


Told = Callable[[int, int, str], object]
"""Is told how many parts of some work are done, of how many, and which is next."""


@contextmanager
def steps_left(console: Console | None = None) -> Iterator[Told]:
    """Show how far the work of the block is, and about how long the rest takes, on stderr if that is a terminal: stdout
    may be a pipe, which gets the results alone."""
    console = console or Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    # What a program prints meanwhile stands above the bar on a terminal, and goes where it belongs otherwise.
    shown = Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        speed_estimate_period=3600,
        disable=not console.is_terminal,
    )
    with shown as progress:
        task = progress.add_task("", total=None)

        def told(done: int, of: int, what: str) -> None:
            progress.update(task, completed=done, total=of, description=what)

        yield told


def require_writable(option: str, path: Path | None) -> None:
    """Raise ``CannotRunError`` now, rather than after much work, if ``path`` could not be written. ``None``: nobody has
    asked for a file."""
    if path is None:
        return
    if os.path.exists(path) and not os.path.isfile(path):
        raise CannotRunError(f"cannot write {option} {path}: it is there, and is no regular file")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise CannotRunError(f"cannot write {option} {path}: it is there, and may not be written")
    # Permissions do not say all, as on a read-only file system: try where ``write_whole`` will write.
    with waiting(), _explained(option, path), _beside(path) as temporary:
        temporary.touch()


def write(option: str, path: Path, content: str) -> None:
    """Write ``content`` whole, or raise ``CannotRunError``. SIGINT and SIGTERM wait until it is written."""
    with waiting(), _explained(option, path):
        write_whole(path, content.encode())


def write_numbers(path: Path | None, numbers: Mapping[str, Any]) -> None:
    """Write what ``--json`` asks for, with the versions that it is of."""
    if path is not None:
        versions = {"instep_version": __version__, "torch_version": version("torch")}
        write("--json", path, json.dumps({**versions, **numbers}, indent=2) + "\n")


@contextmanager
def _explained(option: str, path: Path) -> Iterator[None]:
    """Make a ``CannotRunError`` of an ``OSError``."""
    try:
        yield
    except OSError as error:
        raise CannotRunError(f"cannot write {option} {path}: {error.strerror}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content``, so that ``path`` holds either all of it or what it held before. Raises ``OSError``."""
    with _beside(path) as temporary:
        temporary.write_bytes(content)
        os.replace(temporary, path.resolve())  # resolved: a symbolic link stays a link


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a file name next to the file that ``path`` leads to, where a rename is atomic. Such a file does not outlive
    the block."""
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
