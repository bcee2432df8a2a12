"""A step of the user's own is never put off. The tests' own optimizer classes are, so that what becomes of an update
that runs later is tried with classes that raise, wait and count: they stand for those of a package that was tested."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from instep._optim import kinds


@contextmanager
def own_steps_wait() -> Iterator[None]:
    """As all tests run."""
    with patch.object(kinds, "_TESTED", kinds._TESTED | {"tests"}):
        yield


@contextmanager
def own_steps_stay() -> Iterator[None]:
    """As users have it: what is attached in this block by the class of a test steps in ``optimizer.step()`` itself."""
    with patch.object(kinds, "_TESTED", kinds._TESTED - {"tests"}):
        yield
