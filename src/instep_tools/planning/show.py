"""``instep plan`` from its options to its tables and its verdict: tables on a terminal, the same words in a pipe."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from instep_tools.output import print_line, require_writable, size_of, steps_left, table, time_of, write_numbers
from instep_tools.planning.cards import CARDS, card_of, more_on_accelerator, said_of_card
from instep_tools.planning.job import EVERYTHING, Estimate, Job, Offloaded, PlannedPeak, PlannedTimes
from instep_tools.planning.plan import plan


def run(job: Job, refusals: bool, json: Path | None, quiet: bool) -> None:
    """Plan, show and write what was found.

    Raises:
        CannotRunError: something that ``job`` names is not there, or cannot be run without data, or ``json`` cannot
            be written.
    """
    # Before the rehearsal, which takes seconds.
    require_writable("--json", json)
    with steps_left() as told:
        estimate = plan(job, refusals=refusals, told=told)
    write_numbers(json, dataclasses.asdict(estimate))
    show(Console(), estimate, quiet)


def show(console: Console, estimate: Estimate, quiet: bool) -> None:
    """The verdict, peaks and times; unless ``quiet`` the sizes and what was assumed, too."""
    ranks = f"{estimate.ranks} ranks" if estimate.ranks > 1 else "one device"
    print_line(
        console,
        f"{estimate.model} with {estimate.optimizer}, {ranks}: {estimate.numel / 1e6:,.1f} M parameters in "
        f"{estimate.tensors} tensors",
    )
    for line in verdict(estimate):
        print_line(console, line)
    if not quiet:
        console.print(_sizes(estimate))
    print_line(console, "The most bytes in a step" + (", on each rank" if estimate.ranks > 1 else ""))
    console.print(_peaks(estimate.peaks))
    if not quiet:
        largest = size_of(max(bucket.nbytes for bucket in estimate.buckets))
        count = "1 bucket" if len(estimate.buckets) == 1 else f"{len(estimate.buckets)} buckets"
        print_line(console, f"{count}, of {largest} at most; --json FILE has their parameters")
    _show_times(console, estimate)
    _show_offloaded(console, estimate.offloaded, estimate.times)
    _show_refusals(console, estimate, quiet)
    if not quiet:
        for assumption in estimate.assumptions:
            print_line(console, f"Assumed: {assumption}")


# What an option that frees gradients early is called in the verdict.
BACKWARD, REPLICATE, TOGETHER = 'schedule="backward"', "instep.replicate", "overlap.micro_batches()"
OFFLOAD = f'{BACKWARD}, offload="host"'
TWO_PASS = "backward, two_pass"
HERE = " on this machine"
WORTH = 0.05
"""The share of the peak below which a gain is not worth a schedule that has limits."""


def verdict(estimate: Estimate) -> Iterator[str]:
    """Yield a line on each: what would be saved, what the step takes, and which line to write.

    Memory is that of the optimizer as it is built: the first column of the table.
    """
    gradients = size_of(sum(estimate.sizes.gradients.values())) + " of gradients"
    gradients += " on each rank" if estimate.ranks > 1 else ""
    peaks = {peak.way: peak for peak in estimate.peaks if peak.implementation == estimate.peaks[0].implementation}
    plain = peaks["plain"].total
    way, best = _best(peaks)
    without = ", without activations: give --inputs" if estimate.sizes.activations is None else ""
    if best < plain:
        yield (
            f"{gradients}. {way} would save {size_of(plain - best)}: {size_of(best)} at the peak in place of "
            f"{size_of(plain)} ({estimate.optimizer}, {peaks['plain'].implementation}{without})"
        )
    else:
        yield f"{gradients}, of which nothing would be saved: {size_of(plain)} at the peak{without}"
    yield from _card(estimate)
    times = {one.schedule: one for one in estimate.times.schedules}
    if times:
        share = 1 - times["no optimizer"].iteration / times["plain"].iteration
        yield f"The step takes {share:.1%} of an iteration{HERE * bool(estimate.measured_here)}"
    is_worth_it = plain - best > WORTH * plain
    yield f"Take {_line(estimate, way if is_worth_it else None)}"
    if is_worth_it and TWO_PASS in peaks:
        yield _where_it_clips(estimate, plain - peaks[TWO_PASS].total, together=TOGETHER in way)


def _card(estimate: Estimate) -> Iterator[str]:
    """Say which card the run fits, if not the smallest: with ``fused=True`` where that can be had, since torch builds
    an optimizer otherwise on a CPU than on a GPU."""
    implementations = [peak.implementation for peak in estimate.peaks]
    one = "fused" if "fused" in implementations else implementations[0]
    peaks = {peak.way: peak for peak in estimate.peaks if peak.implementation == one}
    plain = peaks["plain"].total
    if card_of(plain) == CARDS[0]:
        return
    way, best = _best(peaks)
    best += more_on_accelerator(estimate.buckets, estimate.bucket_on_accelerator)
    saved = f", {said_of_card(best)} with {way}" if best < plain else ""
    how = ", with fused=True" if one != implementations[0] else ""
    yield f"The smallest card{how}: {said_of_card(plain)} plain{saved}"


def _where_it_clips(estimate: Estimate, saved: int, *, together: bool) -> str:
    """Return what a loop that calls ``clip_grad_norm_`` takes instead: the norm is known when all gradients are.

    Args:
        saved: by two passes, with one backward for each micro-batch.
        together: whether it takes one for all, of which two passes need no more memory.
    """
    backward, second = estimate.times.backward, "a second backward"
    if backward is not None:
        second += f" ({time_of(backward)}{HERE * ('tflops' in estimate.measured_here)})"
    said = "A loop that clips by the norm of all gradients takes instep.attach(model, optimizer), which saves nothing"
    if together:
        said += f'; or {BACKWARD}, clip=ClipNorm(…, mode="two_pass"), with {TOGETHER}, which saves about as much '
        said += f"for {second}"
    elif saved > 0:
        said += (
            f'; or {BACKWARD}, clip=ClipNorm(…, mode="two_pass"), with overlap.backward(loss) in place of '
            f"loss.backward(), which saves {size_of(saved)} for {second}"
        )
    return said


def _best(peaks: Mapping[str, PlannedPeak]) -> tuple[str, int]:
    """Return the way to free gradients early that has the lowest peak, in words, and that peak."""
    ways = {
        "backward": BACKWARD,
        "backward, offload": OFFLOAD,
        "backward, replicate": f"{REPLICATE} with {BACKWARD}",
        "backward, micro_batches": f"{TOGETHER} with {BACKWARD}",
    }
    found = {said: peaks[way].total for way, said in ways.items() if way in peaks} or {"": peaks["plain"].total}
    # A plan has only the ways that the job asks for, and none of these if ``attach`` refuses: then nothing is saved.
    said = min(found, key=found.__getitem__)
    return said, found[said]


def _line(estimate: Estimate, way: str | None) -> str:
    """Return the line to write for ``way``; ``None``: no way is worth it."""
    refused = next((one for one in estimate.refusals if one.options.startswith(EVERYTHING)), None)
    if refused is not None:
        return f"instep.attach(model, optimizer). schedule='backward' is refused: {refused.reason}"
    if way is None:
        return "nothing for memory. instep.attach(model, optimizer) takes any loop, and hides the step where it can"
    wrap = f"model = {REPLICATE}(model), and " if REPLICATE in way else ""
    call = f", and {TOGETHER} in place of the loop over micro-batches" if TOGETHER in way else ""
    return f"{wrap}instep.attach(model, optimizer, {OFFLOAD if OFFLOAD in way else BACKWARD}){call}"


def _sizes(estimate: Estimate) -> Table:
    sizes = estimate.sizes
    rows: dict[str, Mapping[str, int]] = {
        "parameters": sizes.parameters,
        "gradients": sizes.gradients,
        "optimizer state": sizes.state,
        "buffers": sizes.buffers,
    }
    made = table("", "bytes", "by dtype", words=["by dtype"])
    for name, found in rows.items():
        if found or name != "buffers":
            dtypes = ", ".join(f"{dtype} {size_of(size)}" for dtype, size in sorted(found.items()))
            made.add_row(name, size_of(sum(found.values())), dtypes if len(found) != 1 else next(iter(found)))
    if sizes.activations is not None:
        made.add_row("activations", size_of(sizes.activations), "what the forward leaves for backward")
    return made


def _peaks(peaks: Sequence[PlannedPeak]) -> Table:
    implementations = list(dict.fromkeys(peak.implementation for peak in peaks))
    plain = {peak.implementation: peak for peak in peaks if peak.way == "plain"}
    # Two columns for each implementation of the optimizer: the peak, and what is saved of the plain loop's.
    made = table("", *(name for one in implementations for name in (one, "saves")))
    for way in dict.fromkeys(peak.way for peak in peaks):
        mine = {peak.implementation: peak for peak in peaks if peak.way == way}
        cells = []
        for one in implementations:
            peak = mine.get(one)
            saved = "" if way == "plain" or peak is None else size_of(plain[one].total - peak.total)
            cells += ["" if peak is None else size_of(peak.total), saved]
        made.add_row(way, *cells)
    return made


def _show_times(console: Console, estimate: Estimate) -> None:
    times = estimate.times
    alone = [f"step {time_of(times.step)}"]
    if times.forward is not None and times.backward is not None:
        alone = [f"forward {time_of(times.forward)}", f"backward {time_of(times.backward)}", *alone]
    if estimate.ranks > 1:
        alone.append(f"communication {time_of(times.communication)} ({times.algorithm})")
    print_line(console, f"Each by itself: {', '.join(alone)}")
    if estimate.measured_here:
        options = " and ".join(f"--{one}" for one in estimate.measured_here)
        print_line(console, f"Times rest on the speed of this machine, measured just now. Give another's: {options}")
    if not times.schedules:
        return
    made = table("", "iteration", "step, exposed", "plain / this")
    plain = times.schedules[0].iteration
    for one in times.schedules:
        made.add_row(one.schedule, time_of(one.iteration), time_of(one.exposed), f"{plain / one.iteration:.3f}")
    console.print(made)


def _show_offloaded(console: Console, offloaded: Offloaded | None, times: PlannedTimes) -> None:
    if offloaded is None:
        return
    beside = ""
    if offloaded.exposed is not None and times.backward is not None:
        beside = f", beside a backward of {time_of(times.backward)}: {time_of(offloaded.exposed)} more in an iteration"
    print_line(
        console,
        f"offload='host' copies {size_of(offloaded.nbytes)} of state to the device and back in each step: "
        f"{time_of(offloaded.seconds)}{beside}",
    )


def _show_refusals(console: Console, estimate: Estimate, quiet: bool) -> None:
    # A refusal of everything is shown always: it is the reason why a row is missing.
    refusals = [one for one in estimate.refusals if not quiet or one.options == EVERYTHING]
    if refusals:
        print_line(console, "attach refuses")
    for refusal in refusals:
        print_line(console, f"  {refusal.options}: {refusal.reason}")
