"""The text: English that ships with Python, or a file of the user's; and the batches cut from it."""

from pathlib import Path

import torch

from instep.demo.errors import DemoError
from instep.demo.model import CONTEXT

MIN_BYTES = CONTEXT + 1
MAX_BYTES = 16 * 1024 * 1024


def load_text(path: Path | None) -> bytes:
    """The bytes to train on: the first 16 MiB of the file at ``path``, or Python's own help topics.

    Raises ``DemoError`` for a file that cannot be read, or is too short for one row of a batch.
    """
    if path is None:
        return _help_topics()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES)
    except OSError as error:
        raise DemoError(f"cannot read --text {path}: {error.strerror}") from error
    if len(text) < MIN_BYTES:
        found = "is empty" if not text else f"has only {len(text)} bytes"
        raise DemoError(f"--text {path} {found}: training needs at least {MIN_BYTES} bytes, and better some thousands")
    return text


def _help_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DemoError("this Python comes without pydoc_data, the default text: give one with --text FILE") from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class Batches:
    """Rows cut from the text at random: others on every rank, the same in every run."""

    def __init__(self, text: bytes, rank: int, device: torch.device, rows: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._random = torch.Generator().manual_seed(rank)
        self._device = device
        self._rows = rows

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rows, CONTEXT)`` bytes, and for each of them the byte that follows."""
        starts = torch.randint(len(self._text) - CONTEXT, (self._rows, 1), generator=self._random)
        rows = self._text[starts + torch.arange(CONTEXT + 1)].long().to(self._device)
        return rows[:, :-1], rows[:, 1:]
