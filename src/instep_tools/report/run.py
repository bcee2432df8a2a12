"""A recording as values, and as a file.

A ``Run`` is what all ranks recorded: a ``Setup`` that says what was trained and how, and a ``Rank`` for each rank.
``Run.save`` writes a Chrome trace that Perfetto opens, with the ``Run`` itself beside the trace's events. ``load``
reads the ``Run`` back, and a report needs nothing else.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from instep_tools.output import CannotRunError, write_whole
from instep_tools.report.spans import Span

FORMAT = 4
"""The number in a file that changes whenever ``load`` could not read an older file."""

TraceEvent = dict[str, Any]
"""An event of a Chrome trace."""


@dataclass(frozen=True)
class Setup:
    """What was recorded, and how.

    Attributes:
        label: ``"plain"``, or how instep was attached.
        options: the options of ``attach`` that were given; empty for the plain loop.
        model: the name of the model's class.
        count: how many numbers the trained parameters hold on all ranks together, each counted once.
        dtypes: the dtypes of the trained parameters.
        batch: shapes and dtypes of the tensors that the recorded forwards were given, and what autocast computed in.
        device: the device's type, or the model of a GPU.
        optimizer: the optimizer's class, with its implementation.
        wrapper: ``"DistributedDataParallel"`` and the like, or ``""``.
        nbytes: the bytes of all parameters, gradients and optimizer state on this rank, by category.
    """

    label: str
    options: Mapping[str, str]
    model: str
    count: int
    dtypes: Sequence[str]
    batch: Sequence[str]
    ranks: int
    device: str
    optimizer: str
    wrapper: str
    nbytes: Mapping[str, int]
    versions: Mapping[str, str]

    @property
    def job(self) -> str:
        """What was trained, in words."""
        ranks = "one rank" if self.ranks == 1 else f"{self.ranks} ranks"
        within = f" in {self.wrapper}" if self.wrapper else ""
        batch = f", given {' and '.join(self.batch)}" if self.batch else ""
        count = f"{self.count / 1e6:.1f} M parameters of {' and '.join(self.dtypes)}"
        return f"{self.model}, {count}, {self.optimizer}, {ranks}{within}, {self.device}{batch}"


@dataclass(frozen=True)
class Rank:
    """What one rank did.

    Attributes:
        main: the thread of the loop.
        iterations: when each began and ended, from forward to forward.
        spans: in order of their start.
        gradient_bytes: the most bytes of gradients that were alive at once.
        stages: the places of this rank's stages in their pipeline; empty where there is no pipeline.
    """

    rank: int
    host: str
    main: int
    iterations: Sequence[tuple[float, float]]
    spans: Sequence[Span]
    gradient_bytes: int
    stages: Sequence[int] = ()


@dataclass(frozen=True)
class Run:
    """A recording of all ranks. Times are seconds from when the first rank began."""

    setup: Setup
    ranks: Sequence[Rank]

    def save(self, path: Path, events: Sequence[Sequence[TraceEvent]] = ()) -> None:
        """Write the recording to ``path``, whole or not at all. A name that ends in ``.gz`` is compressed.

        Args:
            events: each rank's operations, for a trace viewer; a report does without.
        """
        document = {
            "traceEvents": [event for number, rank in enumerate(self.ranks) for event in _events(rank, events, number)],
            "displayTimeUnit": "ms",
            "instep": {"format": FORMAT, **asdict(self)},
        }
        content = json.dumps(document, separators=(",", ":")).encode()
        write_whole(path, gzip.compress(content, 6) if path.suffix == ".gz" else content)


FIRST_ROW = 1 << 24
"""The first number for a row that is no thread: Linux gives threads lower numbers."""


def _events(rank: Rank, events: Sequence[Sequence[TraceEvent]], number: int) -> list[TraceEvent]:
    """Return a rank in Chrome's trace format: in microseconds, a process for each rank with a row for each thread."""
    pid = rank.rank
    # ``ph`` is the kind of an event: "M" names a process or a row, "X" is a span.
    made: list[TraceEvent] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {rank.rank} on {rank.host}"}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank.main, "args": {"name": "the loop"}},
    ]
    rows: dict[tuple[str, ...], int] = {}
    for span in rank.spans:
        # Flights overlap, and one row of a trace viewer shows nested events only: each bucket has a row.
        is_flight = span.kind == "flight"
        tid = rows.setdefault(span.parameters, FIRST_ROW + len(rows)) if is_flight else span.thread
        common = {"pid": pid, "tid": tid, "cat": "instep", "ts": 1e6 * span.start, "name": f"{span.kind}: {span.label}"}
        arguments = {"parameters": list(span.parameters)} if span.parameters else {}
        made.append({**common, "ph": "X", "dur": 1e6 * (span.end - span.start), "args": arguments})
    for row, tid in enumerate(rows.values()):
        made.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"flight {row}"}})
    if events:
        made += [{**event, "pid": pid} for event in events[number]]
    return made


def load_all(paths: Sequence[Path]) -> list[Run]:
    """Load recordings, with labels that tell them apart. Raises ``CannotRunError``."""
    runs = [load(path) for path in paths]
    # Recordings that were attached alike have the same label: then the file's name tells.
    labels = [run.setup.label for run in runs]
    return [
        replace(run, setup=replace(run.setup, label=f"{path.name}: {label}")) if labels.count(label) > 1 else run
        for run, path, label in zip(runs, paths, labels, strict=True)
    ]


def load(path: Path) -> Run:
    """Read the recording in ``path``, or raise ``CannotRunError``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CannotRunError(f"cannot read {path}: {error.strerror}") from error
    # gzip is known by its first two bytes, whatever the file is called.
    try:
        document = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        found = document["instep"]
        if found["format"] != FORMAT:
            raise CannotRunError(f"{path} has format {found['format']}; this version of instep reads {FORMAT}")
        return Run(Setup(**found["setup"]), list(map(rank_from, found["ranks"])))
    except (ValueError, KeyError, TypeError, IndexError, EOFError, OSError, RecursionError) as error:
        raise CannotRunError(f"{path} is not a recording of instep's: recording.save(path) writes one") from error


def rank_from(found: Mapping[str, Any]) -> Rank:
    """Return the ``Rank`` whose ``asdict`` went through JSON."""
    spans = [Span._make([*span[:5], tuple(span[5]), span[6]]) for span in found["spans"]]
    return Rank(**{**found, "spans": spans})
