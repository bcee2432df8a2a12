"""The tests' own optimizer classes count as proved: their first updates are taken in parts at once, so that what
becomes of such an update is tried with classes that raise, wait and count. They stand for those of a package that was
swept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from instep._optim.proved import is_proved
from instep._step import judging


@contextmanager
def own_steps_are_proved() -> Iterator[None]:
    """As all tests run."""
    with patch.object(judging, "is_proved", _is_proved):
        yield


@contextmanager
def own_steps_are_judged() -> Iterator[None]:
    """As users have it: what is attached in this block by the class of a test is judged by its first updates."""
    with patch.object(judging, "is_proved", is_proved):
        yield


def _is_proved(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("tests.") or is_proved(optimizer)
