"""Memory and time of the plain loop and of each way to attach it, on a GPT that fits, side by side in one process.

Memory is counted in steps of their own, one loop after the other. For time the loops take a step each in turn, round by
round, with the plain loop twice among them: what differs between the two is chance.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn
from torch.optim import AdamW, Optimizer

from instep import Attachment, attach
from instep_tools.demo.job import Shape
from instep_tools.demo.loops import ByteGPT
from instep_tools.harness import Peak, timed
from instep_tools.selftest.features import MICRO_BATCHES, muon

ON_CPU = Shape(width=256, depth=6, heads=4)
ON_ACCELERATOR = Shape(width=2048, depth=12, heads=16)
"""About 5 and 600 million parameters; a smaller one where the device has less than ``NEEDED`` times the weights."""
NEEDED = 8
WARM_UP, ROUNDS = 3, 15
TRIED = 40
"""After so many steps a loop has decided whether a worker, or the next forward, takes its updates."""
TOKENS = 32
"""In a step, or in a micro-batch: few, so that gradients and not activations make the peak."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all loops of a comparison train: a GPT, on random bytes.

    Attributes:
        tokens: in a row of a step, or of a micro-batch.
        tried: steps before those that are timed.
        rounds: steps of each loop that are timed.
        rows: of a step, or of a micro-batch.
    """

    shape: Shape
    device: torch.device
    dtype: torch.dtype = torch.float32
    tokens: int = TOKENS
    tried: int = TRIED
    rounds: int = ROUNDS
    rows: int = 1


@dataclass(frozen=True, slots=True)
class Gain:
    """One loop beside the plain one of its group.

    Attributes:
        name: of the loop.
        base: the name of the plain loop that it is compared with.
        extra_bytes: the most memory in a step above weights and optimizer state; ``None``: not known here.
        milliseconds: of a step, the median.
        ratio, p10, p90: the plain loop's time to this one's: the median, and the 10th and 90th percentile.
    """

    name: str
    base: str
    extra_bytes: int | None
    milliseconds: float
    ratio: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Kind:
    """How a loop is made: its name, the plain one's, the options of ``attach`` (``None``: plain), what steps."""

    name: str
    base: str
    options: Mapping[str, Any] | None = None
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] = lambda model: [AdamW(model.parameters(), 1e-4, fused=True)]
    micro_batches: int = 1


def kinds(device: torch.device) -> Sequence[Kind]:
    """The loops to compare on ``device``."""
    found = [
        Kind("plain", "plain"),
        Kind("plain, again", "plain"),
        Kind("default", "plain", {}),
        Kind('schedule="backward"', "plain", {"schedule": "backward"}),
        Kind("plain, accumulating", "plain, accumulating", micro_batches=MICRO_BATCHES),
        Kind("one backward", "plain, accumulating", {"schedule": "backward"}, micro_batches=MICRO_BATCHES),
    ]
    if device.type != "cpu":
        found.append(Kind('offload="host"', "plain", {"schedule": "backward", "offload": "host"}))
    if hasattr(torch.optim, "Muon"):
        found += [
            Kind("plain, Muon", "plain, Muon", None, muon),
            Kind("default, Muon", "plain, Muon", {}, muon),
            Kind('"backward", Muon', "plain, Muon", {"schedule": "backward"}, muon),
        ]
    return found


def measure(device: torch.device, told: Callable[[str], None]) -> list[Gain]:
    """Measure every loop. ``told`` is told what is being done."""
    job = Job(_that_fits(device), device, tried=TRIED, rounds=ROUNDS)
    found: list[Gain] = []
    all_kinds = kinds(device)
    for base in dict.fromkeys(kind.base for kind in all_kinds):
        group = [kind for kind in all_kinds if kind.base == base]
        told(f"memory and time beside {base!r}: {len(group)} loops")
        found += measure_group(group, job)
    return found


def measure_group(group: Sequence[Kind], job: Job) -> list[Gain]:
    """Measure loops that have one plain loop among them."""
    base = group[0].base
    extra = {kind.name: extra_bytes(kind, job) for kind in group}
    seconds = _seconds(group, job)
    found: list[Gain] = []
    for kind in group:
        ratios = sorted(a / b for a, b in zip(seconds[base], seconds[kind.name], strict=True))
        tenths = statistics.quantiles(ratios, n=10, method="inclusive")
        middle = statistics.median(seconds[kind.name])
        found.append(
            Gain(kind.name, base, extra[kind.name], 1e3 * middle, statistics.median(ratios), tenths[0], tenths[-1])
        )
    return found


def _that_fits(device: torch.device) -> Shape:
    if device.type == "cpu":
        return ON_CPU
    free = _free_bytes(device)
    with torch.device("meta"):
        needed = NEEDED * sum(p.nbytes for p in ByteGPT(ON_ACCELERATOR).parameters())
    return ON_ACCELERATOR if free is not None and free > needed else ON_CPU


def _free_bytes(device: torch.device) -> int | None:
    """What the device has free; ``None`` where its backend does not tell."""
    told = getattr(torch.get_device_module(device), "mem_get_info", None)
    try:
        return None if told is None else int(told(device)[0])
    except (RuntimeError, TypeError):
        return None


class TimedLoop:
    """One of the loops: a model with its optimizers, attached or not."""

    def __init__(self, kind: Kind, job: Job) -> None:
        torch.manual_seed(0)
        with job.device:  # hundreds of millions of numbers, which one core would draw for minutes
            self.model = ByteGPT(job.shape).to(job.dtype)
        self.optimizers = kind.optimizers(self.model)
        self.overlap: Attachment | None = None
        if kind.options is not None:
            self.overlap = attach(self.model, self.optimizers, **kind.options)
        self._micro_batches = kind.micro_batches
        self._job = job

    def step(self, seed: int) -> None:
        for micro in range(self._micro_batches):
            loss, more = self._loss(self._micro_batches * seed + micro), micro < self._micro_batches - 1
            if self.overlap is None:
                loss.backward()
            else:
                self.overlap.backward(loss, more=more)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(256, (self._job.rows, self._job.tokens + 1), generator=generator).to(self._job.device)
        logits = self.model(text[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten()) / self._micro_batches

    def own_bytes(self) -> int:
        """Of weights, and of state on the device."""
        state = [value for one in self.optimizers for entry in one.state.values() for value in entry.values()]
        tensors = [value for value in state if isinstance(value, torch.Tensor) and value.device == self._job.device]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *tensors))

    def finish(self) -> None:
        """Give the model back: who is measured next has the device alone."""
        if self.overlap is not None:
            self.overlap.detach()


def extra_bytes(kind: Kind, job: Job) -> int | None:
    """The most bytes of tensors in a step, less weights and state; ``None`` where the backend does not tell."""
    with Peak(job.device) as peak:
        loop = TimedLoop(kind, job)
        for seed in range(WARM_UP):
            loop.step(seed)
        peak.reset()
        loop.step(WARM_UP)
    loop.finish()
    return peak.nbytes - loop.own_bytes() if peak.is_known else None


def _seconds(group: Sequence[Kind], job: Job) -> dict[str, list[float]]:
    """Of each step that is timed, by the name of the loop."""
    loops = {kind.name: TimedLoop(kind, job) for kind in group}
    names = list(loops)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(job.tried + job.rounds):
        first = number % len(names)  # whichever goes first finds other caches than the next
        for name in names[first:] + names[:first]:
            _, seconds = timed(partial(loops[name].step, number), loops[name].overlap, job.device)
            if number >= job.tried:
                found[name].append(seconds)
    for loop in loops.values():
        loop.finish()
    return found
