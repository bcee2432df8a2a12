"""Files that are written whole or not at all."""

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from instep._signals import waiting
from instep.report.spans import Memory, Span


class NotWrittenError(Exception):
    """A file cannot be written. The message is for the user, and names the option that asked for it."""


def require_writable(option: str, path: Path) -> None:
    """Raise ``NotWrittenError`` now, rather than after much work, if ``path`` could not be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise NotWrittenError(f"cannot write {option} {path}: it is there, and is no regular file")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise NotWrittenError(f"cannot write {option} {path}: it is there, and may not be written")
    with waiting(), _said(option, path), _beside(path) as temporary:
        temporary.touch()


def write(option: str, path: Path, content: str) -> None:
    """As ``write_whole``, with a ``NotWrittenError``. SIGINT and SIGTERM wait for its end."""
    with waiting(), _said(option, path):
        write_whole(path, content.encode())


def write_whole(path: Path, content: bytes) -> None:
    """``path`` holds either all of ``content`` or what it held before. Raises ``OSError``."""
    with _beside(path) as temporary:
        temporary.write_bytes(content)
        os.replace(temporary, path.resolve())  # resolved: a link stays one


@contextmanager
def _said(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotWrittenError(f"cannot write {option} {path}: {error.strerror}") from error


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A file name next to the file that ``path`` leads to, where a rename is atomic. The file does not outlive this."""
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


# What a recording holds, as a file: a trace that Perfetto opens, with all that a report needs beside the events.


FORMAT = 3

FIRST_ROW = 1 << 24
"""Of those that are no threads: Linux gives threads lower numbers."""

Event = dict[str, Any]
"""Of a Chrome trace."""


class NotARecordingError(ValueError):
    """The file is not what ``Run.save`` writes."""


@dataclass(frozen=True)
class Rank:
    """What one rank did.

    Attributes:
        main: the thread of the loop.
        iterations: when each began and ended, from forward to forward.
        spans: in order of their start.
        weights: SHA-256 of this rank's parameters before the first recorded forward and after the last recorded step;
            empty where nobody can tell.
    """

    rank: int
    host: str
    main: int
    iterations: Sequence[tuple[float, float]]
    spans: Sequence[Span]
    memory: Memory
    weights: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """What the loop computes: recordings are compared where this is the same.

    Attributes:
        model: its class.
        parameters: a digest of their names, shapes and dtypes.
        count: how many numbers the trained ones hold on all ranks together, each counted once.
        dtypes: of the trained ones.
        batch: shapes and dtypes of the tensors that the recorded forwards were given, and what autocast computed in.
        device: its type, and the model of a GPU.
    """

    model: str
    parameters: str
    count: int
    dtypes: Sequence[str]
    batch: Sequence[str]
    ranks: int
    device: str


@dataclass(frozen=True)
class Setup:
    """What was recorded, and how.

    Attributes:
        label: ``"plain"``, or how instep was attached.
        options: those of ``attach`` that were given; none of the plain loop.
        optimizer: its class, with its implementation.
        fused: whether that is the fused one.
        wrapper: ``"DistributedDataParallel"`` and the like, or ``""``.
        bucket_view: of DDP: whether ``gradient_as_bucket_view`` is set.
        buckets: by the names of their parameters; empty where nobody knows them.
        gradients: bytes of each parameter's on this rank, by name.
        nbytes: of all parameters, gradients and optimizer state on this rank.
    """

    job: Job
    label: str
    options: Mapping[str, str]
    optimizer: str
    fused: bool
    wrapper: str
    bucket_view: bool
    buckets: Sequence[Sequence[str]]
    gradients: Mapping[str, int]
    nbytes: Mapping[str, int]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """A recording of all ranks. Times are seconds from when the first rank began."""

    setup: Setup
    ranks: Sequence[Rank]

    @property
    def job(self) -> Job:
        return self.setup.job

    def save(self, path: Path, events: Sequence[Sequence[Event]] = ()) -> None:
        """Write it all, or nothing. A name that ends in ``.gz`` is compressed.

        Args:
            events: of each rank: operations to show in a trace viewer; a report does without.
        """
        document = {
            "traceEvents": [event for number, rank in enumerate(self.ranks) for event in _events(rank, events, number)],
            "displayTimeUnit": "ms",
            "instep": {"format": FORMAT, **asdict(self)},
        }
        content = json.dumps(document, separators=(",", ":")).encode()
        write_whole(path, gzip.compress(content, 6) if path.suffix == ".gz" else content)


def load_all(paths: Sequence[Path]) -> list[Run]:
    """With labels that tell them apart. Raises ``NotARecordingError``."""
    runs = [load(path) for path in paths]
    labels = [run.setup.label for run in runs]
    return [
        replace(run, setup=replace(run.setup, label=f"{path.name}: {label}")) if labels.count(label) > 1 else run
        for run, path, label in zip(runs, paths, labels, strict=True)
    ]


def load(path: Path) -> Run:
    """Raises ``NotARecordingError``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotARecordingError(f"cannot read {path}: {error.strerror}") from error
    try:
        document = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        found = document["instep"]
        version = found["format"]
    except (ValueError, KeyError, TypeError, EOFError, OSError, RecursionError) as error:
        raise NotARecordingError(f"{path} is not a recording of instep's: recording.save(path) writes one") from error
    if version != FORMAT:
        raise NotARecordingError(f"{path} has format {version}; this version of instep reads {FORMAT}")
    try:
        return Run(setup_from(found["setup"]), list(map(rank_from, found["ranks"])))
    except (TypeError, KeyError, IndexError) as error:
        raise NotARecordingError(f"{path} is damaged: {error}") from error


def setup_from(found: Mapping[str, Any]) -> Setup:
    """``asdict`` of a ``Setup``, as it comes out of JSON."""
    job: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in found["job"].items()}
    return Setup(**{**found, "job": Job(**job)})


def rank_from(found: Mapping[str, Any]) -> Rank:
    """The same of a ``Rank``."""
    spans = [Span._make([*span[:5], tuple(span[5])]) for span in found["spans"]]
    return Rank(**{**found, "spans": spans, "memory": Memory(**found["memory"])})


def _events(rank: Rank, events: Sequence[Sequence[Event]], number: int) -> list[Event]:
    """Chrome's trace format: microseconds; a process for each rank, and in it a row for each thread."""
    pid = rank.rank
    made: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {rank.rank} on {rank.host}"}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": rank.rank}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank.main, "args": {"name": "the loop"}},
    ]
    rows: dict[tuple[str, ...], int] = {}
    for span in rank.spans:
        tid = span.thread
        if span.kind == "flight":
            # They overlap, and a row shows what is nested only.
            tid = rows.setdefault(span.parameters, FIRST_ROW + len(rows))
        common = {"pid": pid, "tid": tid, "cat": "instep", "ts": 1e6 * span.start, "name": f"{span.kind}: {span.name}"}
        arguments = {"parameters": list(span.parameters)} if span.parameters else {}
        made.append({**common, "ph": "X", "dur": 1e6 * (span.end - span.start), "args": arguments})
    for row, tid in enumerate(rows.values()):
        made.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"flight {row}"}})
    for time, nbytes in zip(rank.memory.times, rank.memory.nbytes, strict=True):
        made.append({"ph": "C", "name": "memory", "pid": pid, "ts": 1e6 * time, "args": {"bytes": nbytes}})
    if events:
        made += [{**event, "pid": pid} for event in events[number]]
    return made
