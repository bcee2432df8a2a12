"""Record what is launched on the emulated accelerator, and say what nothing puts in order."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.accelerator import ACCELERATOR, EMULATED
from tests.accelerator.ordering import Ordering

_FRAMES = 8
_HIDDEN = ("/torch/", "/_pytest/", "/pluggy/", "/contextlib.py", "<frozen", "/tests/accelerator/recording.py")


@dataclass(frozen=True)
class Finding:
    kind: str  # "race" or "lifetime"; "left": another stream or device is current after the block
    first: str
    second: str
    count: int = 1

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.kind.upper()}{times}\n  {self.first}\n  {self.second}"


class Log:
    """Of one ``recorded()`` block; complete when the block is left."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = []
        self.findings: list[Finding] = []
        self.streams: set[str] = set()
        """On which kernels ran, as "device.stream"; the default streams are "0.0" and "1.0"."""
        self.host_waits: list[str] = []
        """Each operator or call that had the host wait, with its stack."""
        self.queries: list[str] = []
        """Each query of a stream, an event or a collective that answered True after a launch."""
        self._ordering = Ordering([])
        self._words: dict[int, str] = {}

    def count(self, kind: str, stream: str | None = None) -> int:
        """Lines of this kind, as "op" for a kernel, on this stream or on any."""
        return sum(line[0] == kind and stream in (None, line[1]) for line in self.lines)

    def kernels(self, stream: str | None = None) -> list[str]:
        """The names of the kernels in the order of their launches."""
        return [line[2] for line in self.lines if line[0] == "op" and stream in (None, line[1])]

    def peak_bytes(self, device: int = 0, held: bool = False) -> int:
        """The most bytes allocated at a time.

        ``held`` adds freed blocks that ``record_stream`` keeps, as on a device that lags behind: until the host itself
        has waited for what the stream held when the block was freed.
        """
        peaks = self._ordering.held_peaks if held else self._ordering.peaks
        return peaks.get(str(device), 0)

    def assert_ordered(self) -> None:
        assert not self.findings, "\n\n".join(map(str, self.findings))

    def read(self, text: str) -> None:
        """Take over the log of the emulation, and analyse it."""
        self.lines = [line.split("\t") for line in text.splitlines()]
        self._ordering = Ordering(self.lines)
        found: Counter[tuple[str, str, str]] = Counter()
        for problem, times in self._ordering.problems.items():
            second = self._said(problem.second)
            if problem.reused is not None:
                second += f"\n  and given out again: {self._said(problem.reused)}"
            found[problem.kind, self._said(problem.first), second] += times
        self.findings = [Finding(*key, count) for key, count in found.items()]
        for number, (kind, *_) in enumerate(self.lines):
            if kind in ("hostwait", "hostwaitevent"):
                self.host_waits.append(self._said(number))
            elif kind in ("query", "queryevent"):
                self.queries.append(self._said(number))
        self.streams = {line[1] for line in self.lines if line[0] == "op"}

    def _said(self, line: int) -> str:
        if line not in self._words:
            self._words[line] = self._in_words(line)
        return self._words[line]

    def _in_words(self, line: int) -> str:
        frames = [f for f in torch.ops.emu.stack(line) if not any(hidden in f for hidden in _HIDDEN)]
        return "\n      ".join([_what(*self.lines[line]), *(frames[:_FRAMES] or ["(no Python frame)"])])


def _what(kind: str, *rest: str) -> str:
    if kind == "op":
        return f"{rest[1]} on stream {rest[0]}" + (f", in {rest[4]}" if rest[4] else "")
    if kind in ("hostwait", "query"):
        return f"the host waits for stream {rest[0]}: {rest[1]}"
    return {
        "alloc": f"allocated on stream {rest[-2] if len(rest) > 1 else ''}",
        "free": "freed",
        "host_access": f"the host's {rest[0]}",
        "hostwaitevent": "the host waits for an event",
        "queryevent": "the host asks an event",
    }.get(kind, kind)


@contextlib.contextmanager
def recorded() -> Iterator[Log]:
    """Record what is launched in this block on the emulated accelerator, and look for what is not ordered.

    ``numpy()``, ``__array__`` and ``tolist()`` of pinned memory count as reads by the host when they are called. Later
    reads of a NumPy array that shares pinned memory are not seen.
    """
    if ACCELERATOR != EMULATED:
        yield Log()
        return
    if torch.ops.emu.recording():
        raise RuntimeError("a recording is already under way in this process")
    log = Log()
    before = _current()
    torch.ops.emu.start()
    try:
        with _python_reads_seen():
            yield log
    finally:
        torch.ops.emu.stop()
        log.read(torch.ops.emu.log())
        if _current() != before:
            log.findings.append(Finding("left", "the current stream or device is not what it was", "after the block"))


def _current() -> tuple[int, list[torch.Stream]]:
    streams = [torch.accelerator.current_stream(index) for index in range(torch.accelerator.device_count())]
    return torch.accelerator.current_device_index(), streams


@contextlib.contextmanager
def _python_reads_seen() -> Iterator[None]:
    """What reads a tensor's memory without an operator says so."""
    names = ("numpy", "tolist")  # __array__ calls numpy
    for name in names:
        setattr(torch.Tensor, name, _seen(name, getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(torch.Tensor, name)


def _seen(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def reading(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) not in (torch.Tensor, torch.nn.Parameter) and torch._C._is_torch_function_enabled():
            # torch would look the name up, and give the class this function in place of its own.
            return type(self).__torch_function__(read, (type(self),), (self, *args), kwargs)
        if type(self) in (torch.Tensor, torch.nn.Parameter) and self.device.type == "cpu" and not self.is_sparse:
            torch.ops.emu.host_reads(self.detach(), name)
        return read(self, *args, **kwargs)

    return reading
