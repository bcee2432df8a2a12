"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep._signals import waiting


class NotWrittenError(Exception):
    """A file cannot be written. The message is for the user, and names the option that asked for it."""


def require_writable(option: str, path: Path) -> None:
    """Raise ``NotWrittenError`` now, rather than after much work, if ``path`` could not be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise NotWrittenError(f"cannot write {option} {path}: it is there, and is no regular file")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise NotWrittenError(f"cannot write {option} {path}: it is there, and may not be written")
    with waiting(), _said(option, path), _beside(path) as temporary:
        temporary.touch()


def write(option: str, path: Path, content: str) -> None:
    """As ``write_whole``, with a ``NotWrittenError``. SIGINT and SIGTERM wait for its end."""
    with waiting(), _said(option, path):
        write_whole(path, content.encode())


def write_whole(path: Path, content: bytes) -> None:
    """``path`` holds either all of ``content`` or what it held before. Raises ``OSError``."""
    with _beside(path) as temporary:
        temporary.write_bytes(content)
        os.replace(temporary, path.resolve())  # resolved: a link stays one


@contextmanager
def _said(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotWrittenError(f"cannot write {option} {path}: {error.strerror}") from error


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A file name next to the file that ``path`` leads to, where a rename is atomic. The file does not outlive this."""
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
