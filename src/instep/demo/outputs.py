"""The files that the demo writes: whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.demo.errors import DemoError
from instep.report.files import beside, write_whole


def require_writable(option: str, path: Path) -> None:
    """Raise ``DemoError`` now, rather than after the training, if ``path`` could not be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise DemoError(f"cannot write {option} {path}: it is there, and is no regular file")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise DemoError(f"cannot write {option} {path}: it is there, and may not be written")
    with _demo_errors(option, path), beside(path) as temporary:
        temporary.touch()


def write(option: str, path: Path, content: str) -> None:
    """``path`` holds either all of ``content`` or what it held before. Raises ``DemoError``."""
    with _demo_errors(option, path):
        write_whole(path, content.encode())


@contextmanager
def _demo_errors(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DemoError(f"cannot write {option} {path}: {error.strerror}") from error
