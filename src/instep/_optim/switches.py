"""Switches of torch, for the whole process, that an update may read: it needs those of ``optimizer.step()``."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DEFAULT_DTYPE = "torch.get_default_dtype()"
MKLDNN = "torch.backends.mkldnn.enabled"


def switches() -> dict[str, Any]:
    """As they are now, by what tells them. Not among them: whether algorithms are deterministic. A loop may have a
    backward that is not, and no optimizer is known to use such an algorithm."""
    return {
        DEFAULT_DTYPE: torch.get_default_dtype(),
        MKLDNN: torch.backends.mkldnn.enabled,
        "torch.get_float32_matmul_precision()": _precision_of_products(),
    }


def switched(then: dict[str, Any], *, but: Container[str] = ()) -> str | None:
    """The first that is not as it was, in words.

    Args:
        but: those that do not count.
    """
    for name, now in switches().items():
        if now != then[name] and name not in but:
            return f"{name} was {then[name]} and is {now}"
    return None


@contextmanager
def as_then(then: dict[str, Any]) -> Iterator[None]:
    """The default dtype and mkldnn as they were. Only while nobody else can ask for them: they are the whole
    process's."""
    before = switches()
    _set(then, before)
    try:
        yield
    finally:
        _set(before, then)


@contextmanager
def in_threads(count: int) -> Iterator[None]:
    """With so many of torch's threads on a CPU. Each thread of Python has a number of its own: some kernels divide a
    sum by that number, and each pool of threads wants the cores."""
    before = torch.get_num_threads()  # in a new thread this also makes torch limit the libraries below it
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _set(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    if wanted[DEFAULT_DTYPE] != found[DEFAULT_DTYPE]:
        torch.set_default_dtype(wanted[DEFAULT_DTYPE])
    if wanted[MKLDNN] != found[MKLDNN]:
        torch.backends.mkldnn.enabled = wanted[MKLDNN]


def _precision_of_products() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # some were set by the newer names, of which there is one for each backend
        return None
