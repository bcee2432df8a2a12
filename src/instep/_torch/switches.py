"""Switches of torch that an update may read, of the whole process and of a thread: it needs those of ``step()``."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from instep._torch.engine import as_default_device, default_device

DEFAULT_DTYPE = "torch.get_default_dtype()"
MKLDNN = "torch.backends.mkldnn.enabled"
PRECISION = "torch.get_float32_matmul_precision()"


def switches() -> dict[str, Any]:
    """As they are now, by what tells them. Not among them: whether algorithms are deterministic. A loop may have a
    backward that is not, and no optimizer is known to use such an algorithm."""
    precision: str | None = None
    with suppress(RuntimeError):  # some were set by the newer names, of which there is one for each backend
        precision = torch.get_float32_matmul_precision()
    return {
        DEFAULT_DTYPE: torch.get_default_dtype(),
        MKLDNN: torch.backends.mkldnn.enabled,
        PRECISION: precision,
    }


def switched(then: dict[str, Any]) -> str | None:
    """The first that is not as it was, in words."""
    for name, now in switches().items():
        if now != then[name]:
            return f"{name} was {then[name]} and is {now}"
    return None


@contextmanager
def as_then(then: dict[str, Any]) -> Iterator[None]:
    """All of them as they were. Only while nobody else can ask for them: they are the whole process's."""
    before = switches()
    _set(then, before)
    try:
        yield
    finally:
        _set(before, then)


class OfThread(NamedTuple):
    """What torch keeps for each thread of Python, and an update reads.

    Attributes:
        threads: how many of torch's own. Some kernels divide a sum by that number, and each pool of threads wants the
            cores.
        flushes: whether denormal numbers are taken for zero (``torch.set_flush_denormal``).
        device: that of state which is made without naming one; ``None``: the CPU.
    """

    threads: int
    flushes: bool
    device: torch.device | None


_DENORMAL = 5e-324


def of_this_thread() -> OfThread:
    """The thread's own, which in a new thread also makes torch limit the libraries below it."""
    # torch does not tell. It is the processor's own switch, and Python's numbers obey it, too.
    return OfThread(torch.get_num_threads(), _DENORMAL * 1.0 == 0.0, default_device())


@contextmanager
def as_thread(wanted: OfThread) -> Iterator[None]:
    """With what another thread has had."""
    before = of_this_thread()
    if before == wanted:
        yield
        return
    _set_of_thread(wanted, before)
    try:
        with as_default_device(wanted.device):
            yield
    finally:
        _set_of_thread(before, wanted)


def _set_of_thread(wanted: OfThread, current: OfThread) -> None:
    if wanted.threads != current.threads:
        torch.set_num_threads(wanted.threads)
    if wanted.flushes != current.flushes:
        torch.set_flush_denormal(wanted.flushes)


def _set(wanted: dict[str, Any], current: dict[str, Any]) -> None:
    if wanted[DEFAULT_DTYPE] != current[DEFAULT_DTYPE]:
        torch.set_default_dtype(wanted[DEFAULT_DTYPE])
    if wanted[MKLDNN] != current[MKLDNN]:
        torch.backends.mkldnn.enabled = wanted[MKLDNN]
    if wanted[PRECISION] != current[PRECISION] and None not in (wanted[PRECISION], current[PRECISION]):
        torch.set_float32_matmul_precision(wanted[PRECISION])
