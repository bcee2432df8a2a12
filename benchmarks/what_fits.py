"""Which card does a Llama fit, with instep and without? ``instep plan`` says: no GPU, no download, no data.

    python benchmarks/what_fits.py                                   # two sizes, three lengths: a quarter of an hour
    python benchmarks/what_fits.py --models 3B --tokens 512 --parts AdamW --checkpoints yes
    python benchmarks/what_fits.py --json fits.json --svg fits.svg   # the README's picture, from all rows
    python benchmarks/what_fits.py --from benchmarks/results/what_fits.json --svg docs/assets/fits.svg
    pip install bitsandbytes                                         # for 8-bit AdamW; left out without it

The shapes are those of Llama 3.2 with 1 and 3 billion parameters, in bfloat16, one row of ``--tokens`` tokens in a
forward. ``yes`` checkpoints each block: backward computes it once more. Logits are cast to float32 for the loss, as
usual, of all tokens at once; in chunks, of 256 at a time (512 with micro-batches), and backward computes them once
more. A peak is all that a step has at once: weights, state, gradients, activations. To that of instep, whose buckets
have the size of an accelerator's, the largest bucket that another one follows is added: a GPU keeps it for longer.

A card of 24 GB is taken to have 24 * 10**9 bytes (one that has 24 * 2**30 has 7% more), of which 1 GiB is left to the
CUDA context, the kernels' workspaces and gaps between blocks.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import bars
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn
from torch.utils.checkpoint import checkpoint

import instep
from instep_tools.output import GIB, steps_left
from instep_tools.planning.cards import CARDS, LEFT, card_of, more_on_accelerator
from instep_tools.planning.job import Job, PlannedBucket, PlannedPeak
from instep_tools.planning.plan import SHARE, plan


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama.

    Attributes:
        groups: heads of keys and values.
        hidden: the width between two layers of a block.
    """

    width: int
    depth: int
    heads: int
    groups: int
    hidden: int
    words: int


SHAPES = {
    "1B": Shape(width=2048, depth=16, heads=32, groups=8, hidden=8192, words=128_256),
    "3B": Shape(width=3072, depth=28, heads=24, groups=8, hidden=8192, words=128_256),
}


class Block(nn.Module):
    """Attention and a gated layer, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._size = shape.width // shape.heads
        inner = shape.groups * self._size
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))
        self.query, self.key, self.value = (_linear(shape.width, n) for n in (shape.width, inner, inner))
        self.out = _linear(shape.width, shape.width)
        self.gate, self.up = (_linear(shape.width, shape.hidden) for _ in range(2))
        self.down = _linear(shape.hidden, shape.width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        attention, gated = self.norms
        rows, length, _ = x.shape
        h = attention(x)
        heads = (layer(h).view(rows, length, -1, self._size) for layer in (self.query, self.key, self.value))
        query, key, value = (one.transpose(1, 2) for one in heads)
        query, key = (_turned(one, cos, sin) for one in (query, key))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, -1))
        h = gated(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Llama(nn.Module):
    """Returns the loss of predicting each token from those before it. Its head is its embedding."""

    def __init__(self, shape: Shape, *, checkpoints: bool, chunk: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.head = _linear(shape.width, shape.words)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width)
        self._size, self._checkpoints = shape.width // shape.heads, checkpoints
        self._chunk = chunk

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        frequencies = 500_000.0 ** -(torch.arange(0, self._size, 2) / self._size)
        angles = torch.outer(torch.arange(tokens.shape[1]), frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self._checkpoints else block(x, cos, sin)
        x, targets = self.norm(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        if not self._chunk:
            return self._loss(x, targets) / len(targets)
        chunks = zip(x.split(self._chunk), targets.split(self._chunk), strict=True)
        losses = [checkpoint(self._loss, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(losses).sum() / len(targets)

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")


# What a plan's job names.


class Chosen:
    """The model and the length of one job."""

    shape: Shape
    tokens: int
    checkpoints: bool
    part: "Part"


def build() -> nn.Module:
    part = Chosen.part
    model = Llama(Chosen.shape, checkpoints=Chosen.checkpoints, chunk=part.chunk)
    return model.to(torch.bfloat16)


def inputs() -> torch.Tensor:
    return torch.zeros(1, Chosen.tokens, dtype=torch.long)


def with_masters(parameters: Iterable[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    return instep.masters(torch.optim.AdamW)(parameters, fused=True, **options)


# The jobs.


@dataclass(frozen=True)
class Part:
    """Rows of the table that have an optimizer and a number of micro-batches in common.

    Attributes:
        options: of the optimizer.
        needs: the package that has it.
        lengths, checkpoints: of these alone, for the time that others take and the little that they would add.
        chunk: the loss is computed of so many tokens at a time, each of them checkpointed; 0: of all at once.
    """

    optimizer: str
    options: tuple[str, ...] = ()
    micro_batches: int = 1
    needs: str = "torch"
    lengths: tuple[int, ...] = (512, 2048, 4096)
    checkpoints: tuple[bool, ...] = (True, False)
    chunk: int = 0


HERE = "what_fits"
PARTS = {
    "AdamW": Part("AdamW", ("fused=True",)),
    "AdamW, loss in chunks": Part("AdamW", ("fused=True",), lengths=(2048, 4096), checkpoints=(True,), chunk=256),
    "AdamW, 8 micro-batches": Part("AdamW", ("fused=True",), 8, lengths=(512,), checkpoints=(True,)),
    "AdamW, 8 micro-batches, loss in chunks": Part(
        "AdamW", ("fused=True",), 8, lengths=(512, 2048), checkpoints=(True,), chunk=512
    ),
    "8-bit AdamW": Part("bitsandbytes.optim:AdamW8bit", needs="bitsandbytes", checkpoints=(True,)),
    "masters(AdamW)": Part(f"{HERE}:with_masters", checkpoints=(True,)),
}
TOGETHER = "backward, micro_batches"
WAYS = {
    "plain": "plain",
    "backward": '`schedule="backward"`',
    "backward, two_pass": "… with two_pass",
    TOGETHER: "… `micro_batches()`",
}


@dataclass(frozen=True)
class Row:
    """One line of the table: the peaks, in bytes, by way."""

    model: str
    part: str
    tokens: int
    checkpoints: bool
    peaks: Mapping[str, int]

    @property
    def words(self) -> str:
        checkpoints = "" if self.checkpoints else ", no checkpoints"
        return f"{self.model[:-1]} B, {self.part}, {self.tokens:,} tokens{checkpoints}"

    @property
    def way(self) -> str:
        """That of instep which is shown first."""
        return TOGETHER if TOGETHER in self.peaks else "backward"

    def __str__(self) -> str:
        checkpoints = "yes" if self.checkpoints else "no"
        cells = (said(self.peaks[way]) if way in self.peaks else "" for way in WAYS)
        return f"| {self.model} | {self.part} | {self.tokens:,} | {checkpoints} | {' | '.join(cells)} |"


def said(nbytes: int) -> str:
    """The peak in GiB, and the smallest card in GB."""
    return f"{nbytes / GIB:.2f} on {card_of(nbytes) or '-'}"


def peaks_of(peaks: Iterable[PlannedPeak], buckets: Sequence[PlannedBucket]) -> dict[str, int]:
    """By way. On an accelerator a bucket's gradients are there until the next bucket has been stepped."""
    more = more_on_accelerator(buckets)
    return {peak.way: peak.total + (0 if peak.way == "plain" else more) for peak in peaks if peak.way in WAYS}


def planned(model: str, shape: Shape, name: str, part: Part, tokens: int, checkpoints: bool) -> Row:
    Chosen.shape, Chosen.tokens, Chosen.checkpoints, Chosen.part = shape, tokens, checkpoints, part
    sys.modules.setdefault(HERE, sys.modules[__name__])
    with torch.device("meta"):
        gradients = sum(p.nbytes for p in build().parameters())
    job = Job(
        f"{HERE}:build",
        optimizer=part.optimizer,
        options=part.options,
        inputs=f"{HERE}:inputs",
        bucket_bytes=gradients // SHARE,
        micro_batches=part.micro_batches,
        tflops=1.0,  # of times nothing is shown
        terabytes=1.0,
    )
    estimate = plan(job)
    peaks = peaks_of(estimate.peaks, estimate.buckets)
    if part.micro_batches > 1:  # keeps all gradients until the last one, and two_pass saves no more than it does
        peaks = {way: nbytes for way, nbytes in peaks.items() if way in ("plain", TOGETHER)}
    return Row(model, name, tokens, checkpoints, peaks)


def rows(
    models: Mapping[str, Shape],
    parts: Iterable[str],
    lengths: Iterable[int],
    checkpoints: Iterable[bool],
    told: Callable[[int, int, str], object] = lambda done, of, what: None,
) -> Iterator[Row]:
    """Plan one row after another.

    Args:
        told: is told how many rows are done, of how many, and what is next.
    """
    wanted = [
        (model, shape, name, PARTS[name], tokens, keeps)
        for (model, shape), name, keeps, tokens in product(models.items(), parts, checkpoints, lengths)
        if tokens in PARTS[name].lengths and keeps in PARTS[name].checkpoints
    ]
    for done, one in enumerate(wanted):
        told(done, len(wanted), f"{one[0]}, {one[2]}, {one[4]} tokens")
        yield planned(*one)


SHOWN = (
    ("3B", "AdamW", 512, True),
    ("3B", "AdamW, 8 micro-batches, loss in chunks", 512, True),
    ("3B", "AdamW, loss in chunks", 4096, True),
    ("1B", "masters(AdamW)", 512, True),
    ("3B", "AdamW", 4096, False),
)
"""The rows of the README's picture: what gains, and what gains nothing."""


def picture(found: Iterable[Row]) -> bars.Panel:
    by_name = {(row.model, row.part, row.tokens, row.checkpoints): row for row in found}
    shown = [by_name[name] for name in SHOWN]
    groups = {}
    for row in shown:
        drawn = (("plain", "plain", bars.OTHERS), ("instep", row.way, bars.OURS))
        groups[row.words] = [_bar(label, row.peaks[one], kind) for label, one, kind in drawn]
    largest = card_of(max(nbytes for row in shown for nbytes in row.peaks.values())) or CARDS[-1]
    marks = {f"{one} GB" if one == largest else f"{one}": (one * 10**9 - LEFT) / GIB for one in CARDS if one <= largest}
    return bars.Panel("Llama, bfloat16: peak in GiB, and the card", groups, marks=marks)


def _bar(label: str, nbytes: int, kind: str) -> bars.Bar:
    return bars.Bar(label, nbytes / GIB, kind, said=f"{nbytes / GIB:.1f} on {card_of(nbytes)} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 4096], choices=[512, 2048, 4096])
    parser.add_argument("--checkpoints", nargs="+", choices=("yes", "no"), default=["yes", "no"])
    parser.add_argument("--json", type=Path, help="write the peaks there")
    parser.add_argument("--from", dest="source", type=Path, help="show what --json has written; nothing is planned")
    parser.add_argument("--svg", type=Path, help="draw the README's picture there")
    options = parser.parse_args()
    if options.source:
        found = [Row(**one) for one in json.loads(options.source.read_text(encoding="utf-8"))]
        print("\n".join([*header(), *map(str, found)]))
    else:
        found = plan_all(options)
    if options.json:
        options.json.write_text(json.dumps([vars(row) for row in found], indent=1) + "\n", encoding="utf-8")
    if options.svg:
        bars.draw(options.svg, picture(found), layout=bars.NARROW)


def header() -> list[str]:
    heads = ["model", "optimizer", "tokens", "checkpoints", *WAYS.values()]
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]


def plan_all(options: argparse.Namespace) -> list[Row]:
    """Plan what was asked for, and print each row."""
    parts = [name for name in options.parts if find_spec(PARTS[name].needs) is not None]
    if missing := [PARTS[name].needs for name in options.parts if name not in parts]:
        print(f"left out, not installed: {', '.join(missing)}")
    print("\n".join(header()), flush=True)
    checkpoints = [one == "yes" for one in options.checkpoints]
    found = []
    with steps_left() as told:
        for row in rows({name: SHAPES[name] for name in options.models}, parts, options.tokens, checkpoints, told):
            print(row, flush=True)
            found.append(row)
    return found


if __name__ == "__main__":
    main()
