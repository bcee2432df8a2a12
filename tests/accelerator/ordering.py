"""What the log of a recording leaves to chance: vector clocks over streams, events and the host.

A kernel on stream S happens after what S held before, after what S has waited for, and after what the host had waited
for when the kernel was launched. A race is two accesses of the same bytes, one of them a write, of which neither
happens after the other.

Freed memory goes back to the stream on which it was allocated, whose next allocation may get it. It is a lifetime error
if by then a kernel of another stream has not been waited for, and ``record_stream`` did not tell of that stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Clock = dict[str, int]
"""For each stream the number of its last kernel that is over by then."""

Span = tuple[str, int, int]
"""A block's number, the first byte, and the one after the last."""

HOST = "host"


@dataclass(frozen=True)
class Problem:
    kind: str  # "race" or "lifetime"
    first: int  # numbers of lines
    second: int
    reused: int | None = None  # the allocation that may have got the memory


@dataclass(slots=True)
class _Access:
    line: int
    stream: str
    number: int  # of the kernel, in its stream
    start: int
    end: int
    writes: bool


@dataclass(slots=True)
class _Block:
    stream: str  # on which it was allocated
    size: int = 0
    accesses: list[_Access] = field(default_factory=list)
    kept_for: set[str] = field(default_factory=set)
    passed: dict[str, int] = field(default_factory=dict)  # what is done before ``record_stream`` gives it back
    freed: int = 0


@dataclass(slots=True)
class _Held:
    """Freed memory that the allocator keeps until streams that it was told of have come so far."""

    device: str
    size: int
    until: Clock


class Ordering:
    """Of the lines of one recording, each of them split into its fields."""

    def __init__(self, lines: Sequence[Sequence[str]]) -> None:
        self.problems: dict[Problem, int] = {}
        """With how often each was found, for the same two places in the program."""
        self.peaks: dict[str, int] = {}
        """By device: the most bytes that were allocated at a time."""
        self.held_peaks: dict[str, int] = {}
        """The same, with freed blocks that ``record_stream`` still holds, if the device lags behind the host."""
        self._clocks: dict[str, Clock] = {}
        self._host: Clock = {}
        self._waits = 0  # of the host
        self._joined: dict[str, int] = {}  # by stream: the host's waits when a kernel was last launched on the stream
        self._events: dict[str, Clock] = {}
        self._blocks: dict[str, _Block] = {}
        self._loose: dict[str, list[_Block]] = {}  # freed, and may be given out too early; by stream
        self._bytes: dict[str, int] = {}
        self._held: list[_Held] = []
        steps: dict[str, Callable[..., None]] = {
            name.removeprefix("_on_"): getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }
        for number, (kind, *rest) in enumerate(lines):
            steps[kind](number, *rest)

    # What is launched.

    def _on_op(self, line: int, stream: str, _name: str, reads: str, writes: str, _node: str) -> None:
        clock = self._clock(stream)
        if self._joined.get(stream) != self._waits:
            _join(clock, self._host)
            self._joined[stream] = self._waits
        number = clock[stream] = clock.get(stream, 0) + 1
        self._touch(line, stream, number, clock, reads, writes)

    def _on_host_access(self, line: int, _name: str, reads: str, writes: str) -> None:
        # The host's own access is over when the call returns: whatever is launched later comes after it.
        self._touch(line, HOST, 0, self._host, reads, writes)

    def _touch(self, line: int, stream: str, number: int, clock: Clock, reads: str, writes: str) -> None:
        written = _spans(writes)
        for span in _spans(reads):
            if span not in written:
                self._access(span, _Access(line, stream, number, span[1], span[2], False), clock)
        for span in written:
            self._access(span, _Access(line, stream, number, span[1], span[2], True), clock)

    def _access(self, span: Span, new: _Access, clock: Clock) -> None:
        block = self._blocks.get(span[0])
        if block is None:
            block = self._blocks[span[0]] = _Block(new.stream)
        kept = []
        for old in block.accesses:
            if old.line == new.line:
                kept.append(old)
                continue
            before = clock.get(old.stream, 0) >= old.number
            if not before and old.start < new.end and new.start < old.end and (old.writes or new.writes):
                self._report(Problem("race", old.line, new.line))
            # Whoever comes after the new access comes after the old one.
            covered = before and new.start <= old.start and old.end <= new.end
            if not (covered and (new.writes or not old.writes)):
                kept.append(old)
        if new.stream != HOST:
            kept.append(new)
            block.accesses = kept

    # What orders.

    def _on_record(self, _line: int, event: str, stream: str) -> None:
        clock = dict(self._clock(stream))
        _join(clock, self._host)
        self._events[event] = clock

    def _on_wait(self, _line: int, event: str, stream: str) -> None:
        if event in self._events:
            _join(self._clock(stream), self._events[event])

    def _on_hostwait(self, _line: int, stream: str, _why: str) -> None:
        device, _, number = stream.partition(".")
        own = (
            [c for s, c in self._clocks.items() if s.startswith(f"{device}.")]
            if number == "*"
            else [self._clock(stream)]
        )
        for clock in own:
            self._host_reaches(clock)

    def _on_query(self, line: int, stream: str, why: str) -> None:
        self._on_hostwait(line, stream, why)

    def _on_hostwaitevent(self, _line: int, event: str) -> None:
        self._host_reaches(self._events.get(event, {}))

    def _on_queryevent(self, line: int, event: str) -> None:
        self._on_hostwaitevent(line, event)

    def _host_reaches(self, clock: Clock) -> None:
        self._waits += 1
        _join(self._host, clock)
        self._held = [held for held in self._held if not _reached(held.until, self._host)]

    # Memory.

    def _on_live(self, line: int, name: str, stream: str, size: str) -> None:
        self._on_alloc(line, name, stream, size)

    def _on_alloc(self, line: int, name: str, stream: str, size: str) -> None:
        self._blocks[name] = _Block(stream, int(size))
        self._count_bytes(stream.partition(".")[0], int(size))
        if size == "0":
            return
        for block in self._loose.pop(stream, ()):
            for access in self._unordered(block):
                self._report(Problem("lifetime", access.line, block.freed, line))

    def _on_free(self, line: int, name: str) -> None:
        block = self._blocks.pop(name, None)
        if block is None:
            return
        block.freed = line
        device = block.stream.partition(".")[0]
        # The allocator records an event on each stream that it was told of, and keeps the block until they have passed.
        until = {s: self._clock(s).get(s, 0) for s in block.kept_for if s != block.stream}
        # What those streams had waited for by then has passed, too.
        for stream in until:
            _join(block.passed, self._clock(stream))
        if until and not _reached(until, self._host):
            self._held.append(_Held(device, block.size, until))
        self._count_bytes(device, -block.size)
        if self._unordered(block):
            self._loose.setdefault(block.stream, []).append(block)

    def _on_keep(self, _line: int, name: str, stream: str) -> None:
        if name in self._blocks:
            self._blocks[name].kept_for.add(stream)

    def _unordered(self, block: _Block) -> list[_Access]:
        own = self._clock(block.stream)
        return [
            access
            for access in block.accesses
            if access.stream != block.stream
            and block.passed.get(access.stream, 0) < access.number
            and own.get(access.stream, 0) < access.number
            and self._host.get(access.stream, 0) < access.number
        ]

    def _count_bytes(self, device: str, change: int) -> None:
        now = self._bytes[device] = self._bytes.get(device, 0) + change
        self.peaks[device] = max(self.peaks.get(device, 0), now)
        held = sum(held.size for held in self._held if held.device == device)
        self.held_peaks[device] = max(self.held_peaks.get(device, 0), now + held)

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _report(self, problem: Problem) -> None:
        self.problems[problem] = self.problems.get(problem, 0) + 1


def _spans(text: str) -> list[Span]:
    found = []
    for span in text.split(",")[:-1]:
        block, _, ends = span.partition(":")
        start, _, end = ends.partition("-")
        found.append((block, int(start), int(end)))
    return found


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def _reached(until: Clock, clock: Clock) -> bool:
    return all(clock.get(stream, 0) >= number for stream, number in until.items())
