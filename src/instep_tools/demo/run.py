"""The demo from its options to its last line: two acts, what is shown of them, and the files.

``run`` refuses what it can before a process is started. The first act trains on one device, the second data-parallel.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

from instep import __version__
from instep_tools.demo.acts import MICRO_BATCHES, MIN_STEPS, WARM_UP_STEPS, Act, Tell, on_ranks, one_device
from instep_tools.output import CannotRunError, print_line, require_writable, size_of, time_of, write, write_numbers
from instep_tools.processes import device_of, name_of, ranks_of, run_on_ranks
from instep_tools.report.page import page
from instep_tools.training import CONTEXT, TOO_FEW, Gain, Shape, table_of

REPORT = Path("instep-demo-report.html")
# 18 and 38 million parameters. The second act has the small one: each rank has two, and all share the machine's memory.
SHAPES = {"small": Shape(width=384, depth=10, heads=6), "medium": Shape(width=512, depth=12, heads=8)}
CODE = """\
  plain                no line of instep's
  default              instep.attach(model, optimizer)
  schedule="backward"  instep.attach(model, optimizer, schedule="backward")"""


def run(
    size: str, steps: int, ranks: int | None, text: Path | None, json: Path | None, report: Path | None, quiet: bool
) -> bool:
    """Train, show and write what was found. Return whether the weights were equal, bit for bit, in every loop.

    Whatever can be refused is refused before a process is started, with a ``CannotRunError``. Without ``report`` a page
    is written into the working directory, if that can be written.
    """
    if steps < MIN_STEPS:
        raise CannotRunError(f"--steps {steps}: at least {MIN_STEPS}, of which the first {WARM_UP_STEPS} are not timed")
    device = device_of(None)
    count = ranks_of(ranks, device)
    content = load_text(text)
    require_writable("--json", json)
    require_writable("--report", report)
    console, quietly = Console(), Console(quiet=quiet)  # tables and conclusion; and all else, unless ``quiet``
    trained_on = f"{len(content):,} bytes of {text or 'the text of Python’s help topics'}"
    print_line(quietly, f"instep {__version__}, torch {torch.__version__}, on {name_of(device)}, on {trained_on}")
    print_line(console, CODE)
    tell = _teller(quietly, f"One device: three loops take {steps} steps, in turn", steps)
    acts: list[Act] = run_on_ranks(1, device.type, one_device, SHAPES[size], steps, content, told=tell)
    if count > 1:
        tell = _teller(quietly, f"{count} ranks: two loops take {steps} steps, in turn", steps)
        acts += run_on_ranks(count, device.type, on_ranks, SHAPES["small"], steps, content, told=tell)[:1]
    for act in acts:
        _show(console, act)
    differences = [difference for act in acts for difference in act.differences]
    for difference in differences:
        console.print(f"NOT EQUAL: {difference}", style="bold red", markup=False, highlight=False)
    said = list(conclusion(acts, steps))
    for line in said:
        print_line(console, line)
    one, *more = (dataclasses.asdict(dataclasses.replace(act, recorded=())) for act in acts)
    found = {"equal": not differences, "differences": differences, "model": size, "steps": steps}
    write_numbers(json, {**found, "one_device": one, "two_ranks": more[0] if more else None})
    try:
        write("--report", report or REPORT, page([one for act in acts for one in act.recorded], said))
        print_line(console, f"Report: {(report or REPORT).resolve().as_uri()}")  # a terminal can open it
    except CannotRunError as error:
        if report is not None:
            raise
        print_line(console, f"No report: {error}. --report FILE writes one elsewhere")
    return not differences


MAX_BYTES = 16 * 1024 * 1024


def load_text(path: Path | None) -> bytes:
    """Return the bytes to train on: the first 16 MiB of the file at ``path``, or Python's own help topics.

    Raises ``CannotRunError`` for a file that cannot be read, or is too short for one row of a batch.
    """
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise CannotRunError(
                "this Python comes without pydoc_data, the default text: give one with --text FILE"
            ) from error
        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES)
    except OSError as error:
        raise CannotRunError(f"cannot read --text {path}: {error.strerror}") from error
    if len(text) <= CONTEXT:
        found = "is empty" if not text else f"has only {len(text)} bytes"
        raise CannotRunError(
            f"--text {path} {found}: training needs at least {CONTEXT + 1} bytes, and better some thousands"
        )
    return text


def _teller(console: Console, act: str, steps: int) -> Tell:
    """Print what the act is. Return a function to call after each step, which prints a few lines in all."""
    print_line(console, act)

    def tell(step: int, loss: float) -> None:
        if step in (1, steps) or step % max(1, steps // 4) == 0:
            print_line(console, f"step {step}/{steps}: loss {loss:.3f}")

    return tell


def _show(console: Console, act: Act) -> None:
    where = "one device" if act.ranks == 1 else f"{act.ranks} ranks over {act.backend}"
    print_line(console, f"{where}, {act.parameters / 1e6:.1f} M parameters")
    console.print(table_of((*act.loops, *act.accumulating)))


def conclusion(acts: Sequence[Act], steps: int) -> Iterator[str]:
    """Yield a line on each: what was saved, what it cost, and whether the weights are right."""
    one = acts[0]
    yield from _memory_saved(one)
    for act in acts[1:]:
        yield f'{act.ranks} ranks: instep.replicate and schedule="backward" take {_in_place(act.loops)}.'
    if one.accumulating:
        yield (
            f"Accumulation: with {MICRO_BATCHES} micro-batches a step, overlap.micro_batches() takes "
            f"{_in_place(one.accumulating)}."
        )
    yield f'Time: with schedule="backward" an iteration takes {time_taken(one.loops[0], one.loops[-1])}.'
    for act in acts[1:]:
        yield f"On {act.ranks} ranks: {time_taken(act.loops[0], act.loops[-1])}."
    # Otherwise the differences have been printed, and nothing is claimed.
    if not any(act.differences for act in acts):
        yield f"Weights: equal bit for bit in every loop, after each of {steps} steps."


def _memory_saved(act: Act) -> Iterator[str]:
    before, after = act.loops[0].peak_bytes, act.loops[-1].peak_bytes
    if before is None or after is None:
        yield "Memory: not known, as the backend does not tell."
    elif before <= after:  # as a tiny model may have it, whose gradients are not what sets the peak
        yield f"Memory: nothing was saved: {size_of(after)} at the peak, {size_of(before)} in the plain loop."
    else:
        yield (
            f'Memory: schedule="backward" saves {size_of(before - after)} of {size_of(act.gradient_bytes)} of '
            f"gradients. Tensors take {size_of(after)} at the peak in place of {size_of(before)}, "
            f"{(before - after) / before:.0%} less."
        )


def _in_place(loops: Sequence[Gain]) -> str:
    plain, other = loops[0].extra_bytes, loops[-1].extra_bytes
    if plain is None or other is None:
        return "memory that the backend does not tell"
    return f"{size_of(other)} above weights and state, in place of {size_of(plain)}"


def time_taken(plain: Gain, other: Gain) -> str:
    """Return a step's time beside the plain loop's, in words."""
    both = f"{time_of(other.milliseconds / 1e3)} in place of {time_of(plain.milliseconds / 1e3)}"
    if not other.tells:
        return f"{both}; {TOO_FEW}"
    share = other.milliseconds / plain.milliseconds  # of the figures that are shown; the spread is that of pairs
    changed = f"{abs(1 - share):.0%} {'shorter' if share < 1 else 'longer'}"
    # Rounded: a change of less than half a per cent is none.
    changed = "as long" if changed.startswith("0%") else changed
    noise = f" here; too noisy to tell ({1 / other.p90:.2f} to {1 / other.p10:.2f})" if other.may_be_chance else ""
    return f"{both}, {changed}{noise}"
