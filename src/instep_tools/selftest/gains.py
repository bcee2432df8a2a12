"""Memory and time of the plain loop and of each way to attach it, on a GPT that fits, and what is said of them."""

from collections.abc import Callable, Iterator, Sequence

import torch

from instep_tools.output import size_of
from instep_tools.selftest.features import MICRO_BATCHES, muon
from instep_tools.training import TOO_FEW, ByteGPT, Gain, Job, Kind, Shape, measure_group

ON_CPU = Shape(width=256, depth=6, heads=4)
ON_ACCELERATOR = Shape(width=2048, depth=12, heads=16)
"""About 5 and 600 million parameters; the smaller one where the device has less than ``NEEDED`` times the weights."""
NEEDED = 8


def kinds(device: torch.device) -> Sequence[Kind]:
    """Return the loops to compare on ``device``."""
    backward = {"schedule": "backward"}
    found = [
        Kind("plain", "plain"),
        Kind("plain, again", "plain"),
        Kind("default", "plain", {}),
        Kind('schedule="backward"', "plain", backward),
        Kind("plain, accumulating", "plain, accumulating", micro_batches=MICRO_BATCHES),
        Kind("one backward", "plain, accumulating", backward, micro_batches=MICRO_BATCHES),
    ]
    if device.type != "cpu":
        found.append(Kind('offload="host"', "plain", {**backward, "offload": "host"}))
    if hasattr(torch.optim, "Muon"):
        found += [
            Kind("plain, Muon", "plain, Muon", None, muon),
            Kind("default, Muon", "plain, Muon", {}, muon),
            Kind('"backward", Muon', "plain, Muon", backward, muon),
        ]
    return found


def measure(device: torch.device, told: Callable[[str], None]) -> list[Gain]:
    """Measure every loop. ``told`` is told what is being done."""
    job = Job(_that_fits(device), device)
    found: list[Gain] = []
    all_kinds = kinds(device)
    for base in dict.fromkeys(kind.base for kind in all_kinds):
        group = [kind for kind in all_kinds if kind.base == base]
        told(f"memory and time beside {base!r}: {len(group)} loops")
        found += measure_group(group, job)
    return found


def _that_fits(device: torch.device) -> Shape:
    if device.type == "cpu":
        return ON_CPU
    told = getattr(torch.get_device_module(device), "mem_get_info", None)  # not every backend tells what is free
    try:
        free = 0 if told is None else told(device)[0]
    except (RuntimeError, TypeError):
        free = 0
    with torch.device("meta"):
        needed = NEEDED * sum(p.nbytes for p in ByteGPT(ON_ACCELERATOR).parameters())
    return ON_ACCELERATOR if free > needed else ON_CPU


def said_of(gains: Sequence[Gain]) -> Iterator[str]:
    """Yield what each attached loop gives, in a sentence."""
    plain = {gain.name: gain for gain in gains if gain.name == gain.base}
    for gain in gains:
        base = plain[gain.base]
        if gain is base or gain.name == "plain, again":
            continue
        memory = ""
        if gain.extra_bytes is not None and base.extra_bytes is not None:
            extra, before = size_of(gain.extra_bytes), size_of(base.extra_bytes)
            memory = f"{extra} above weights and state in place of {before}, "
        chance = " (within chance)" if gain.may_be_chance else ""
        speed = f"{gain.ratio:.2f} of the plain loop's speed{chance}" if gain.tells else f"of its speed {TOO_FEW}"
        yield f"{gain.name}: {memory}{speed}"
