"""Writes a JSON file whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from instep.demo.errors import DemoError


def require_writable(path: Path) -> None:
    """Raise ``DemoError`` now, rather than after the training, if ``path`` could not be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise DemoError(f"cannot write --json {path}: it is there, and is no regular file")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise DemoError(f"cannot write --json {path}: it is there, and may not be written")
    with _beside(path) as temporary:
        temporary.touch()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` to ``path``, which holds either all of it or what it held before. Raises ``DemoError``."""
    with _beside(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(temporary, path.resolve())  # resolved: a link stays one


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A file name next to the file that ``path`` leads to, where a rename is atomic. The file does not outlive this."""
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DemoError(f"cannot write --json {path}: {error.strerror}") from error
