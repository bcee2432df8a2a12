"""``instep selftest`` from its options to its verdict: the table of features, memory and time, and one sentence.

The plain loop beside itself comes first: where a machine does not repeat its own numbers, nothing is to be compared.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from instep import __version__
from instep_tools.environment import report
from instep_tools.output import print_line, require_writable, table, write_numbers
from instep_tools.processes import deterministic, device_of, name_of, one_thread, ranks_of
from instep_tools.selftest.features import FEATURES, WAYS, Cell, compare
from instep_tools.selftest.gains import measure, said_of
from instep_tools.selftest.ranks import SOURCES, compare_on_ranks
from instep_tools.training import Gain, table_of


@dataclass(frozen=True, slots=True)
class Result:
    """What was found.

    Attributes:
        repeats: by feature: the plain loop beside itself.
        cells: by feature or kind of ranks, then by way.
        gains: memory and time of each loop.
    """

    device: str
    repeats: Mapping[str, Cell]
    cells: Mapping[str, Mapping[str, Cell]]
    gains: Sequence[Gain]

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


def run(
    device: str | None,
    ranks: int | None,
    json: Path | None,
    quiet: bool,
    *,
    thorough: bool = False,
    gains: bool = True,
) -> bool:
    """Compare, measure, show and write. Return whether nothing differed.

    Args:
        thorough: whether a CPU computes with all of torch's threads: several times the processor time.
        gains: whether memory and time are measured.

    Raises:
        CannotRunError: the device is not there, or there are not so many for the ranks, or ``json`` cannot be written.
    """
    here = device_of(device)
    count = ranks_of(ranks, here)
    require_writable("--json", json)
    console = Console()
    told = Console(quiet=quiet)
    print_line(told, f"instep {__version__}, torch {torch.__version__}, on {name_of(here)}")
    with nullcontext() if thorough else one_thread(here):
        result = examine(here, count, told, gains=gains)
    _show(console, result)
    found = {"verdict": result.verdict, "equal": not result.wrong, "environment": report().splitlines()}
    write_numbers(json, {**found, **dataclasses.asdict(result)})
    print_line(console, result.verdict)
    for sentence in said_of(result.gains):
        print_line(console, sentence)
    return not result.wrong


def examine(device: torch.device, ranks: int, console: Console, *, gains: bool) -> Result:
    """Run everything, and say meanwhile what is being done."""
    repeats: dict[str, Cell] = {}
    cells: dict[str, dict[str, Cell]] = {}
    with deterministic():
        for number, feature in enumerate(FEATURES, 1):
            print_line(console, f"{number}/{len(FEATURES)} {feature.name}")
            repeats[feature.name] = compare(feature, None, device)
            cells[feature.name] = {way: compare(feature, way, device) for way in WAYS}
    if ranks > 1:
        print_line(console, f"{ranks} ranks: {', '.join(SOURCES)}")
        cells |= compare_on_ranks(ranks, device.type)
    measured = measure(device, lambda what: print_line(console, what)) if gains else []
    return Result(name_of(device), repeats, cells, measured)


def _show(console: Console, result: Result) -> None:
    cells_of = table("bit for bit", *(ways := ["plain, again", *WAYS]), words=ways)
    for feature, cells in result.cells.items():
        repeat = result.repeats.get(feature)
        cells_of.add_row(feature, "" if repeat is None else repeat.outcome, *(cells[way].outcome for way in WAYS))
    console.print(cells_of)
    if any(cell.outcome == "-" for cells in result.cells.values() for cell in cells.values()):
        print_line(console, "-: nothing to compare, as instep refuses it by name or it is not for this device")
    for line in [*result.wrong, *(f"{one}: the plain loop differs from itself" for one in result.unrepeatable)]:
        print_line(console, line)
    if result.gains:
        console.print(table_of(result.gains))
