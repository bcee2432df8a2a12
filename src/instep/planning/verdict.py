"""What a plan comes to, in a few lines: what would be saved, what the step takes, and which line to write."""

from collections.abc import Iterator, Mapping

from instep.report.estimate import EVERYTHING, Estimate, Peak

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BACKWARD, REPLICATE, TOGETHER = 'schedule="backward"', "instep.replicate", "overlap.micro_batches()"
OFFLOAD = f'{BACKWARD}, offload="host"'
WORTH = 0.05
"""Of the peak: less than that is not worth a schedule that has limits."""


def verdict(estimate: Estimate) -> Iterator[str]:
    """A line each. Memory is that of the optimizer as it is built, the first column of the table."""
    gradients = size_of(sum(estimate.sizes.gradients.values())) + " of gradients"
    gradients += " on each rank" if estimate.ranks > 1 else ""
    peaks = {peak.way: peak for peak in estimate.peaks if peak.implementation == estimate.peaks[0].implementation}
    plain = peaks["plain"].total
    way, best = _best(peaks)
    if best < plain:
        yield (
            f"{gradients}. {way} would save {size_of(plain - best)}: {size_of(best)} at the peak in place of "
            f"{size_of(plain)} ({estimate.optimizer}, {peaks['plain'].implementation})"
        )
    else:
        yield f"{gradients}, of which nothing would be saved: {size_of(plain)} at the peak"
    times = {one.schedule: one for one in estimate.times.schedules}
    if times:
        share = 1 - times["no optimizer"].iteration / times["plain"].iteration
        yield f"The step takes {share:.1%} of an iteration"
    yield f"Take {_line(estimate, way if plain - best > WORTH * plain else None)}"


def _best(peaks: Mapping[str, Peak]) -> tuple[str, int]:
    """Of the ways that free gradients early the one with the lowest peak, in words, and that peak."""
    ways = {
        "backward": BACKWARD,
        "backward, offload": OFFLOAD,
        "backward, replicate": f"{REPLICATE} with {BACKWARD}",
        "backward, micro_batches": f"{TOGETHER} with {BACKWARD}",
    }
    found = {said: peaks[way].total for way, said in ways.items() if way in peaks} or {"": peaks["plain"].total}
    said = min(found, key=found.__getitem__)
    return said, found[said]


def _line(estimate: Estimate, way: str | None) -> str:
    refused = next((one for one in estimate.refusals if one.options.startswith(EVERYTHING)), None)
    if refused is not None:
        return f"instep.attach(model, optimizer). schedule='backward' is refused: {refused.reason}"
    if way is None:
        return "instep.attach(model, optimizer)"
    wrap = f"model = {REPLICATE}(model), and " if REPLICATE in way else ""
    call = f", and {TOGETHER} in place of the loop over micro-batches" if TOGETHER in way else ""
    return f"{wrap}instep.attach(model, optimizer, {OFFLOAD if OFFLOAD in way else BACKWARD}){call}"


def size_of(size: int) -> str:
    """In the unit that suits it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size} B"
