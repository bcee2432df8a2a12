"""``instep selftest`` from its options to its verdict: the table of features, memory and time, and one sentence.

The plain loop beside itself comes first: where a machine does not repeat its own numbers, nothing is to be compared.
"""

import dataclasses
import json as jsonlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from instep import __version__
from instep_tools.demo.summary import print_line
from instep_tools.environment import report
from instep_tools.report.files import require_writable, write
from instep_tools.report.memory import MIB
from instep_tools.selftest import SelftestError
from instep_tools.selftest.features import FEATURES, WAYS, Cell, compare
from instep_tools.selftest.gains import Gain, measure
from instep_tools.selftest.ranks import SOURCES, compare_on_ranks

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True, slots=True)
class Result:
    """What was found.

    Attributes:
        repeats: by feature: the plain loop beside itself.
        cells: by feature or kind of ranks, then by way.
        gains: memory and time of each loop.
        seconds: how long all of it took.
    """

    device: str
    repeats: Mapping[str, Cell]
    cells: Mapping[str, Mapping[str, Cell]]
    gains: Sequence[Gain]
    seconds: float

    @property
    def wrong(self) -> list[str]:
        """Each cell that does not hold, in words."""
        return [
            f"{feature}, {way}: {cell.outcome}: {cell.said}"
            for feature, cells in self.cells.items()
            for way, cell in cells.items()
            if not cell.holds and self.repeats.get(feature, Cell("equal")).holds
        ]

    @property
    def unrepeatable(self) -> list[str]:
        """The features whose plain loop differs from itself."""
        return [feature for feature, cell in self.repeats.items() if not cell.holds]

    @property
    def verdict(self) -> str:
        """One sentence."""
        compared = sum(cell.outcome == "equal" for cells in self.cells.values() for cell in cells.values())
        if self.wrong:
            return (
                f"NOT EQUAL on {self.device} in {len(self.wrong)} of {compared + len(self.wrong)} comparisons: "
                f"{self.wrong[0]}"
            )
        left = f" ({len(self.unrepeatable)} features were left out: the plain loop does not repeat its own numbers)"
        return f"equal on {self.device}, bit for bit, in all {compared} comparisons{left * bool(self.unrepeatable)}"


def run(device: str | None, ranks: int | None, json: Path | None, quiet: bool, *, gains: bool = True) -> bool:
    """Compare, measure, show and write. Return whether nothing differed.

    Args:
        gains: whether memory and time are measured.

    Raises:
        SelftestError: the device is not there, or there are not so many for the ranks.
        NotWrittenError: ``json`` cannot be written; before anything has run.
    """
    here = _device(device)
    count = _ranks(ranks, here)
    if json is not None:
        require_writable("--json", json)
    console = Console()
    told = Console(quiet=quiet)
    print_line(told, f"instep {__version__}, torch {torch.__version__}, on {name_of(here)}")
    result = examine(here, count, told, gains=gains)
    _show(console, result)
    if json is not None:
        write("--json", json, _numbers(result))
    print_line(console, result.verdict)
    for sentence in said_of(result.gains):
        print_line(console, sentence)
    return not result.wrong


def examine(device: torch.device, ranks: int, console: Console, *, gains: bool) -> Result:
    """Run everything, and say meanwhile what is being done."""
    started = perf_counter()
    repeats: dict[str, Cell] = {}
    cells: dict[str, dict[str, Cell]] = {}
    with _deterministic():
        for number, feature in enumerate(FEATURES, 1):
            print_line(console, f"{number}/{len(FEATURES)} {feature.name}")
            repeats[feature.name] = compare(feature, None, device)
            cells[feature.name] = {way: compare(feature, way, device) for way in WAYS}
    if ranks > 1:
        print_line(console, f"{ranks} ranks: {', '.join(SOURCES)}")
        cells |= compare_on_ranks(ranks, device.type)
    measured = measure(device, lambda what: print_line(console, what)) if gains else []
    return Result(name_of(device), repeats, cells, measured, perf_counter() - started)


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault(_CUBLAS, ":4096:8")  # cuBLAS reads it when it is used first
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _device(given: str | None) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if given is None:
        return torch.device("cpu") if found is None else torch.device(found.type, 0)
    try:
        wanted = torch.device(given)
    except RuntimeError as error:
        raise SelftestError(f"--device {given}: torch does not know it. Give cpu, cuda, mps or xpu") from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    if found is None or found.type != wanted.type:
        there = "no accelerator" if found is None else f"{found.type} and the CPU"
        raise SelftestError(f"--device {given}: this torch finds {there}. See `instep env`")
    if (wanted.index or 0) >= torch.accelerator.device_count():
        raise SelftestError(f"--device {given}: there are {torch.accelerator.device_count()} of them")
    return torch.device(wanted.type, wanted.index or 0)


def _ranks(given: int | None, device: torch.device) -> int:
    if given is not None and given < 1:
        raise SelftestError(f"--ranks {given}: give 1 for one device, or 2 and more for data parallel training")
    if not torch.distributed.is_available():
        if given is not None and given > 1:
            raise SelftestError(f"--ranks {given}: this torch was built without torch.distributed")
        return 1
    there = 2 if device.type == "cpu" else torch.accelerator.device_count()
    if given is None:
        return min(2, there)
    if device.type != "cpu" and given > there:
        raise SelftestError(f"--ranks {given}: each rank takes a device, and there are {there}")
    return given


def name_of(device: torch.device) -> str:
    """The device, with the name of its model where the backend tells one."""
    told = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if told is None else f"{device} ({told(device)})"


def _show(console: Console, result: Result) -> None:
    table = Table("bit for bit", "plain, again", *WAYS, box=box.SIMPLE, title_justify="left")
    for feature, cells in result.cells.items():
        repeat = result.repeats.get(feature)
        table.add_row(feature, "" if repeat is None else repeat.outcome, *(cells[way].outcome for way in WAYS))
    console.print(table)
    for line in [*result.wrong, *(f"{one}: the plain loop differs from itself" for one in result.unrepeatable)]:
        print_line(console, line)
    if result.gains:
        console.print(_table_of(result.gains))


def _table_of(gains: Sequence[Gain]) -> Table:
    table = Table("loop", "MiB above weights and state", "ms a step", "plain's time / its", box=box.SIMPLE)
    for gain in gains:
        extra = "not known" if gain.extra_bytes is None else f"{gain.extra_bytes / MIB:.1f}"
        spread = "" if gain.name == gain.base else f"{gain.ratio:.2f} [{gain.p10:.2f}, {gain.p90:.2f}]"
        table.add_row(gain.name, extra, f"{gain.milliseconds:.1f}", spread)
    return table


def said_of(gains: Sequence[Gain]) -> Iterator[str]:
    """What each attached loop gives, in a sentence."""
    plain = {gain.name: gain for gain in gains if gain.name == gain.base}
    for gain in gains:
        base = plain[gain.base]
        if gain is base or gain.name == "plain, again":
            continue
        memory = ""
        if gain.extra_bytes is not None and base.extra_bytes is not None:
            memory = (
                f"{gain.extra_bytes / MIB:.0f} MiB above weights and state in place of {base.extra_bytes / MIB:.0f}, "
            )
        chance = " (within chance)" if gain.p10 <= 1.0 <= gain.p90 else ""
        yield f"{gain.name}: {memory}{gain.ratio:.2f} of the plain loop's speed{chance}"


def _numbers(result: Result) -> str:
    """Return the content of ``--json``, to be attached to a report."""
    found = {"verdict": result.verdict, "equal": not result.wrong, "environment": report().splitlines()}
    return jsonlib.dumps({**found, **dataclasses.asdict(result)}, indent=2) + "\n"
