"""What a plan looks like: tables on a terminal, the same words in a pipe."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from instep.planning.verdict import size_of, verdict
from instep.report.estimate import EVERYTHING, Estimate, Offloaded, Peak, PlannedBucket, Times

SHOWN = 12
"""Buckets; of more, the first and the last."""


def show(console: Console, estimate: Estimate, quiet: bool) -> None:
    """The verdict, peaks and times; unless ``quiet`` the sizes, the buckets and what was assumed, too."""
    ranks = f"{estimate.ranks} ranks" if estimate.ranks > 1 else "one device"
    _print(
        console,
        f"{estimate.model} with {estimate.optimizer}, {ranks}: {estimate.numel / 1e6:,.1f} M parameters in "
        f"{estimate.tensors} tensors",
    )
    for line in verdict(estimate):
        _print(console, line)
    if not quiet:
        console.print(_sizes(estimate))
    _print(console, "The most bytes in a step" + (", on each rank" if estimate.ranks > 1 else ""))
    console.print(_peaks(estimate.peaks))
    if not quiet:
        count = len(estimate.buckets)
        said = "1 bucket" if count == 1 else f"{count} buckets, in the order in which backward completes them"
        _print(console, said)
        console.print(_buckets(estimate.buckets))
    _show_times(console, estimate)
    _show_offloaded(console, estimate.offloaded, estimate.times)
    _show_refusals(console, estimate, quiet)
    if not quiet:
        for assumption in estimate.assumptions:
            _print(console, f"Assumed: {assumption}")


def _sizes(estimate: Estimate) -> Table:
    sizes = estimate.sizes
    rows: dict[str, Mapping[str, int]] = {
        "parameters": sizes.parameters,
        "gradients": sizes.gradients,
        "optimizer state": sizes.state,
        "buffers": sizes.buffers,
    }
    table = _table("", "bytes", "by dtype")
    for name, found in rows.items():
        if found or name != "buffers":
            dtypes = ", ".join(f"{dtype} {size_of(size)}" for dtype, size in sorted(found.items()))
            table.add_row(name, size_of(sum(found.values())), dtypes if len(found) != 1 else next(iter(found)))
    if sizes.activations is not None:
        table.add_row("activations", size_of(sizes.activations), "what the forward leaves for backward")
    return table


def _peaks(peaks: Sequence[Peak]) -> Table:
    implementations = list(dict.fromkeys(peak.implementation for peak in peaks))
    plain = {peak.implementation: peak for peak in peaks if peak.way == "plain"}
    table = _table("", *(name for one in implementations for name in (one, "saves")))
    for way in dict.fromkeys(peak.way for peak in peaks):
        mine = {peak.implementation: peak for peak in peaks if peak.way == way}
        cells = []
        for one in implementations:
            peak = mine.get(one)
            saved = "" if way == "plain" or peak is None else size_of(plain[one].total - peak.total)
            cells += ["" if peak is None else size_of(peak.total), saved]
        table.add_row(way, *cells)
    return table


def _buckets(buckets: Sequence[PlannedBucket]) -> Table:
    table = _table("", "bytes", "parameters", "names", left=("", "names"))
    numbered = list(enumerate(buckets))
    shown = numbered if len(numbered) <= SHOWN else [*numbered[: SHOWN - 1], numbered[-1]]
    for number, bucket in shown:
        if number == len(buckets) - 1 and len(numbered) > SHOWN:
            table.add_row("…", "", "", "")
        names = bucket.parameters
        span = ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"
        table.add_row(str(number), size_of(bucket.nbytes), str(len(names)), span)
    return table


def _show_times(console: Console, estimate: Estimate) -> None:
    times = estimate.times
    alone = [f"step {_time(times.step)}"]
    if times.forward is not None and times.backward is not None:
        alone = [f"forward {_time(times.forward)}", f"backward {_time(times.backward)}", *alone]
    if estimate.ranks > 1:
        alone.append(f"communication {_time(times.communication)} ({times.algorithm})")
    _print(console, f"Each by itself: {', '.join(alone)}")
    if not times.schedules:
        return
    table = _table("", "iteration", "step, exposed", "plain / this")
    plain = times.schedules[0].iteration
    for one in times.schedules:
        table.add_row(one.schedule, _time(one.iteration), _time(one.exposed), f"{plain / one.iteration:.3f}")
    console.print(table)


def _show_offloaded(console: Console, offloaded: Offloaded | None, times: Times) -> None:
    if offloaded is None:
        return
    beside = ""
    if offloaded.exposed is not None and times.backward is not None:
        beside = f", beside a backward of {_time(times.backward)}: {_time(offloaded.exposed)} more in an iteration"
    _print(
        console,
        f"offload='host' copies {size_of(offloaded.nbytes)} of state to the device and back in each step: "
        f"{_time(offloaded.seconds)}{beside}",
    )


def _show_refusals(console: Console, estimate: Estimate, quiet: bool) -> None:
    refusals = [one for one in estimate.refusals if not quiet or one.options == EVERYTHING]
    if refusals:
        _print(console, "attach refuses")
    for refusal in refusals:
        _print(console, f"  {refusal.options}: {refusal.reason}")


def _table(*columns: str, left: Sequence[str] = ("", "by dtype")) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column != "names")
    return table


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if abs(seconds) >= 1e-3 else f"{1e6 * seconds:.1f} µs"
