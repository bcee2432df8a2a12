"""A small GPT that is trained plain and attached, loop beside loop: what differs, and what memory and time each takes.

The demo trains it on a text, the selftest and the benchmarks on random bytes. A ``Kind`` says how a loop is made, and a
``Job`` what all loops train. ``measure_group`` counts memory in steps of their own, one loop after the other. Then the
loops take a step each in turn, round by round: a plain loop that is there twice shows what chance is.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from rich.table import Table
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from instep import Attachment, attach
from instep_tools.harness import Peak, first_difference, timed, training_state, wait
from instep_tools.output import size_of, table, time_of

BYTES = 256
CONTEXT = 64
"""The most bytes in a row of a batch."""


class Shape(NamedTuple):
    """The shape of a transformer."""

    width: int
    depth: int
    heads: int


class ByteGPT(nn.Module):
    """A GPT on bytes, made of torch's own modules: it predicts each byte from up to ``CONTEXT`` bytes before it.

    Args:
        checkpoints: whether backward computes the blocks once more, in place of keeping their activations.
        ties: whether the weight of the last layer is that of the first.
    """

    def __init__(self, shape: Shape, *, dropout: float = 0.0, checkpoints: bool = False, ties: bool = False) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(CONTEXT, shape.width)
        block = partial(nn.TransformerEncoderLayer, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(
            block(shape.width, shape.heads, 4 * shape.width, dropout) for _ in range(shape.depth)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES)
        if ties:
            self.head.weight = self.byte.weight
        self._checkpoints = checkpoints

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Map ``(rows, length)`` bytes to ``(rows, length, 256)`` logits."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.byte(text) + self.position.weight[:length]
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self._checkpoints else block
            x = run(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True, slots=True)
class Job:
    """What all loops of a comparison train.

    Attributes:
        tokens: in a row of a step, or of a micro-batch: few, so that gradients and not activations make the peak.
        tried: steps before those that are timed.
        rounds: steps of each loop that are timed.
        rows: of a step, or of a micro-batch.
        text: as bytes; ``None``: random ones.
        compares: whether weights and state are compared after every step.
    """

    shape: Shape
    device: torch.device
    dtype: torch.dtype = torch.float32
    tokens: int = 32
    tried: int = 40
    rounds: int = 15
    rows: int = 1
    text: torch.Tensor | None = None
    compares: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """How a loop is made.

    Attributes:
        base: the name of the plain loop that it is compared with.
        options: of ``attach``; ``None``: plain.
        wrap: makes of the model what is called.
    """

    name: str
    base: str
    options: Mapping[str, Any] | None = None
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] = lambda model: [AdamW(model.parameters(), 3e-4, fused=True)]
    micro_batches: int = 1
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model


class TrainedLoop:
    """A loop as a user writes it: a model with its optimizers, attached or not."""

    def __init__(self, kind: Kind, job: Job) -> None:
        torch.manual_seed(0)
        with job.device:  # hundreds of millions of numbers, which one core would draw for minutes
            self.model = kind.wrap(ByteGPT(job.shape).to(job.dtype))
        self.optimizers = kind.optimizers(self.model)
        self.overlap: Attachment | None = None
        if kind.options is not None:
            self.overlap = attach(self.model, self.optimizers, **kind.options)
        self._micro_batches = kind.micro_batches
        self._job = job

    def step(self, number: int) -> torch.Tensor:
        """Run one iteration, and return the sum of the losses of its micro-batches."""
        seeds = range(self._micro_batches * number, self._micro_batches * (number + 1))
        if self.overlap is not None and len(seeds) > 1:
            losses = self.overlap.micro_batches(self._loss, seeds)
        else:
            losses = [self._backward(seed) for seed in seeds]
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return torch.stack(losses).sum()

    def _backward(self, seed: int) -> torch.Tensor:
        loss = self._loss(seed)
        loss.backward()
        return loss.detach()

    def _loss(self, seed: int) -> torch.Tensor:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(1_000_003 * rank + seed)
        rows, tokens, text = self._job.rows, self._job.tokens, self._job.text
        if text is None:
            batch = torch.randint(BYTES, (rows, tokens + 1), generator=generator)
        else:
            starts = torch.randint(len(text) - tokens, (rows, 1), generator=generator)
            batch = text[starts + torch.arange(tokens + 1)].long()
        batch = batch.to(self._job.device)
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) / self._micro_batches

    def own_bytes(self) -> int:
        """Return the bytes of weights, and of state on the device."""
        state = [value for one in self.optimizers for entry in one.state.values() for value in entry.values()]
        tensors = [value for value in state if isinstance(value, torch.Tensor) and value.device == self._job.device]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *tensors))

    def finish(self) -> None:
        """Give the model back: who is measured next has the device alone."""
        if self.overlap is not None:
            self.overlap.detach()


WARM_UP = 3
"""Steps in which an optimizer makes its state, and instep finds the order of gradients."""


def memory_of(kind: Kind, job: Job) -> tuple[int | None, int | None]:
    """Train a few steps. Return the most bytes of tensors in the last, and how many of them are not weights and state;
    ``None``: the backend does not tell."""
    with Peak(job.device) as peak:
        loop = TrainedLoop(kind, job)
        for number in range(WARM_UP):
            loop.step(number)
        peak.reset()
        loop.step(WARM_UP)
    loop.finish()
    return (peak.nbytes, peak.nbytes - loop.own_bytes()) if peak.is_known else (None, None)


@dataclass(slots=True)
class Steps:
    """The steps of one loop.

    Attributes:
        difference: the first one from the plain loop, in words; ``None``: there was none, or nobody has compared.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    difference: str | None = None


def in_turn(
    loops: Mapping[str, TrainedLoop], job: Job, told: Callable[[int, float], object] | None = None
) -> dict[str, Steps]:
    """Have the loops take their steps, in turn. The first is the plain one.

    Args:
        told: is told the number of each step, and the plain loop's loss.
    """
    names = list(loops)
    plain, found = names[0], {name: Steps() for name in names}
    for number in range(job.tried + job.rounds):
        first = number % len(names)  # whichever goes first finds other caches than the next
        for name in names[first:] + names[:first]:
            if dist.is_available() and dist.is_initialized():  # all ranks begin at about the same time
                wait(job.device)
                dist.barrier(device_ids=None if job.device.index is None else [job.device.index])
            loss, seconds = timed(partial(loops[name].step, number), loops[name].overlap, job.device)
            found[name].seconds.append(seconds)
            found[name].losses.append(loss.item())
        for name in names[1:] if job.compares else ():
            states = (training_state(loops[one].model, loops[one].optimizers) for one in (plain, name))
            if found[name].difference is None and (difference := first_difference(*states)) is not None:
                found[name].difference = f"after step {number + 1}: {difference}"
        if told is not None:
            told(number + 1, found[plain].losses[-1])
    return found


ENOUGH_TURNS = 8
"""So many steps of each loop must be timed before a ratio is shown: that all of eight agree by luck is one in 128."""
TOO_FEW = "too few turns to tell"


@dataclass(frozen=True, slots=True)
class Gain:
    """One loop beside the plain one of its group.

    Attributes:
        base: the name of the plain loop.
        peak_bytes: the most bytes of tensors in a step; ``None``: not known here.
        extra_bytes: those of them that are not weights and optimizer state.
        milliseconds: of a step, the median.
        ratio, p10, p90: the plain loop's time to this one's: the median, and the 10th and 90th percentile, of steps
            that were taken in turn. What slows the machine down for a while slows both.
        turns: the number of these steps.
        losses: of each step.
        difference: from the plain loop, in words; ``None``: there is none, or nobody has compared.
    """

    name: str
    base: str
    peak_bytes: int | None
    extra_bytes: int | None
    milliseconds: float
    ratio: float
    p10: float
    p90: float
    turns: int
    losses: tuple[float, ...] = ()
    difference: str | None = None

    @property
    def may_be_chance(self) -> bool:
        """Whether steps do not agree on which loop is faster."""
        return self.p10 <= 1.0 <= self.p90

    @property
    def tells(self) -> bool:
        """Whether there were turns enough for the ratio to mean something."""
        return self.turns >= ENOUGH_TURNS


def measure_group(
    group: Sequence[Kind],
    job: Job,
    told: Callable[[int, float], object] | None = None,
    after: Callable[[Mapping[str, TrainedLoop]], object] | None = None,
) -> list[Gain]:
    """Measure loops of which the first is the plain one.

    Args:
        told: as for ``in_turn``.
        after: is given the trained loops.
    """
    memory = [memory_of(kind, job) for kind in group]
    loops = {kind.name: TrainedLoop(kind, job) for kind in group}
    steps = in_turn(loops, job, told)
    if after is not None:
        after(loops)
    for loop in loops.values():
        loop.finish()
    seconds = {name: one.seconds[job.tried :] for name, one in steps.items()}
    found = []
    for kind, used in zip(group, memory, strict=True):
        mine, one = seconds[kind.name], steps[kind.name]
        ratios = [plain / this for plain, this in zip(seconds[group[0].name], mine, strict=True)]
        tenths = statistics.quantiles(ratios, n=10, method="inclusive")
        times = (1e3 * statistics.median(mine), statistics.median(ratios), tenths[0], tenths[-1])
        found.append(Gain(kind.name, kind.base, *used, *times, len(mine), tuple(one.losses), one.difference))
    return found


def table_of(gains: Iterable[Gain]) -> Table:
    """Return the table of loops."""
    made = table("loop", "peak", "above\nweights\nand state", "a step", "plain's time\n/ its")
    for gain in gains:
        sizes = ("not known" if size is None else size_of(size) for size in (gain.peak_bytes, gain.extra_bytes))
        spread = f"{gain.ratio:.2f} [{gain.p10:.2f}, {gain.p90:.2f}]" if gain.tells else TOO_FEW.replace(" to", "\nto")
        spread = "" if gain.name == gain.base else spread
        made.add_row(gain.name, *sizes, time_of(gain.milliseconds / 1e3), spread)
    return made
