"""Writes a JSON file whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from instep.demo.errors import DemoError
from instep.report.files import beside, write_whole


def require_writable(path: Path) -> None:
    """Raise ``DemoError`` now, rather than after the training, if ``path`` could not be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise DemoError(f"cannot write --json {path}: it is there, and is no regular file")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise DemoError(f"cannot write --json {path}: it is there, and may not be written")
    with _demo_errors(path), beside(path) as temporary:
        temporary.touch()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` to ``path``, which holds either all of it or what it held before. Raises ``DemoError``."""
    with _demo_errors(path):
        write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


@contextmanager
def _demo_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DemoError(f"cannot write --json {path}: {error.strerror}") from error
