"""Files that a command writes: whole or not at all.

A command calls ``require_writable`` before its work and ``write`` after it, so that a path that cannot be written
costs no training.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep_tools.signals import waiting


class NotWrittenError(Exception):
    """A file cannot be written. The message is for the user, and names the option that asked for the file."""


def require_writable(option: str, path: Path) -> None:
    """Raise ``NotWrittenError`` now, rather than after much work, if ``path`` could not be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise NotWrittenError(f"cannot write {option} {path}: it is there, and is no regular file")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise NotWrittenError(f"cannot write {option} {path}: it is there, and may not be written")
    # Permissions do not say all, as on a read-only file system: try where ``write_whole`` will write.
    with waiting(), _explained(option, path), _beside(path) as temporary:
        temporary.touch()


def write(option: str, path: Path, content: str) -> None:
    """Write ``content`` whole, or raise ``NotWrittenError``. SIGINT and SIGTERM wait until it is written."""
    with waiting(), _explained(option, path):
        write_whole(path, content.encode())


@contextmanager
def _explained(option: str, path: Path) -> Iterator[None]:
    """Make a ``NotWrittenError`` of an ``OSError``."""
    try:
        yield
    except OSError as error:
        raise NotWrittenError(f"cannot write {option} {path}: {error.strerror}") from error


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
