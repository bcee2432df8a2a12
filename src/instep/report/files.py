"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """``path`` holds either all of ``content`` or what it held before. Raises ``OSError``."""
    with beside(path) as temporary:
        temporary.write_bytes(content)
        os.replace(temporary, path.resolve())  # resolved: a link stays one


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A file name next to the file that ``path`` leads to, where a rename is atomic. The file does not outlive this."""
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
