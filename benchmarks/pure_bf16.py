"""What AdamW loses in bfloat16, and what gets it back: a small GPT on bytes, fine-tuned.

    python benchmarks/pure_bf16.py                       # a quarter of an hour on two cores
    python benchmarks/pure_bf16.py --lr 1e-4 --steps 200
    pip install torch-optimi torchao                     # Kahan sums and stochastic rounding; left out without them

The model is trained on Python's own library first, in float32 and once for all, then fine-tuned on its manual (the
file ``pydoc_data/topics.py``) by each way. *Gained* is by how much the loss on the manual's last tenth falls, as a
share of what float32 gains, the mean of some seeds for the order of the batches, with the least and the most. All
weights are cast to float32 for that. *Moved* is the share of weights that have another value than before, *norms* that
of the weights of ``LayerNorm``, which are about 1.
"""

import argparse
import copy
import os
import pydoc_data.topics
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn
from torch.optim import AdamW, Optimizer

import instep
from instep_tools.output import steps_left
from instep_tools.training import CONTEXT, ByteGPT, Shape

SHAPE = Shape(width=128, depth=4, heads=4)
ROWS = 16
PRETRAINED = 1500
"""Steps in float32 before any way begins."""


@dataclass(frozen=True)
class Way:
    """A way to fine-tune.

    Attributes:
        needs: a package.
        autocast: whether the forward computes in bfloat16 with float32 weights.
    """

    dtype: torch.dtype
    make: Callable[..., Optimizer]
    needs: str = "torch"
    autocast: bool = False


def of(module: str, name: str, **options: Any) -> Callable[..., Optimizer]:
    """An optimizer of a package that is not always there."""

    def make(parameters: Iterable[nn.Parameter], **given: Any) -> Optimizer:
        made: Optimizer = getattr(import_module(module), name)(parameters, **given, **options)
        return made

    return make


HALF = torch.bfloat16
WAYS = {
    "float32": Way(torch.float32, partial(AdamW, fused=True)),
    "float32, autocast": Way(torch.float32, partial(AdamW, fused=True), autocast=True),
    "bfloat16": Way(HALF, partial(AdamW, fused=True)),
    "bfloat16, Kahan sums (optimi)": Way(HALF, of("optimi", "AdamW", kahan_sum=True), "optimi"),
    "bfloat16, stochastic rounding (torchao)": Way(
        HALF, of("torchao.optim", "_AdamW", bf16_stochastic_round=True), "torchao"
    ),
    "bfloat16, instep.masters": Way(HALF, partial(instep.masters(AdamW), fused=True)),
}


def text_of(paths: Iterable[Path]) -> torch.Tensor:
    """The bytes of all files."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def loss_of(model: nn.Module, text: torch.Tensor, generator: torch.Generator, rows: int = ROWS) -> torch.Tensor:
    """The loss of a drawn batch, in nats a byte."""
    starts = torch.randint(len(text) - CONTEXT, (rows, 1), generator=generator)
    batch = text[starts + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def tested(model: nn.Module, text: torch.Tensor) -> float:
    """The loss on ``text``, with weights cast to float32: the same batches for all."""
    model, generator = copy.deepcopy(model).float().eval(), torch.Generator().manual_seed(1)
    return statistics.fmean(loss_of(model, text, generator, 256).item() for _ in range(8))


def trained(model: nn.Module, optimizer: Optimizer, text: torch.Tensor, steps: int, seed: int, autocast: bool) -> None:
    """Take so many steps."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        with torch.autocast("cpu", HALF) if autocast else nullcontext():
            loss = loss_of(model, text, generator)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@dataclass
class Found:
    """What one run of a way has come to."""

    gained: float
    moved: float
    norms: float
    nbytes: float


def moved(model: nn.Module, before: nn.Module, norms: bool) -> float:
    """The share of weights, or of those of normalizations, that have another value than before."""
    kept = dict(before.named_parameters())
    pairs = [
        (p, kept[f"{name}.{inner}" if name else inner])
        for name, module in model.named_modules()
        for inner, p in module.named_parameters(recurse=False)
        if not norms or (isinstance(module, nn.LayerNorm) and inner == "weight")
    ]
    count: int = sum(p.numel() for p, _ in pairs)
    return sum(int((p != q).sum()) for p, q in pairs) / count


def fine_tuned(
    base: nn.Module, way: Way, texts: Sequence[torch.Tensor], options: argparse.Namespace, seed: int
) -> Found:
    """Fine-tune a copy of ``base``, and look at it."""
    model = copy.deepcopy(base).to(way.dtype)
    before = copy.deepcopy(model)
    loss = tested(model, texts[1])
    optimizer = way.make(model.parameters(), lr=options.lr, betas=(0.9, options.beta2), weight_decay=0.01)
    trained(model, optimizer, texts[0], options.steps, seed, way.autocast)
    count = sum(p.numel() for p in model.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return Found(
        loss - tested(model, texts[1]),
        moved(model, before, norms=False),
        moved(model, before, norms=True),
        sum(t.nbytes for t in (*state, *model.parameters()) if t.dim()) / count,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pretrained", type=int, default=PRETRAINED, help="steps in float32 before (default: 1500)")
    options = parser.parse_args()
    torch.manual_seed(0)
    base = ByteGPT(SHAPE)
    library = text_of(sorted(Path(os.__file__).parent.glob("*.py")))
    manual = text_of([Path(pydoc_data.topics.__file__)])
    texts = manual[: len(manual) * 9 // 10], manual[len(manual) * 9 // 10 :]
    trained(base, AdamW(base.parameters(), lr=1e-3, fused=True), library, options.pretrained, 0, autocast=False)
    print(f"lr {options.lr:g}, betas (0.9, {options.beta2:g}), {options.steps} steps of {ROWS * CONTEXT} bytes")
    losses = (tested(model, texts[1]) for model in (base, copy.deepcopy(base).to(HALF)))
    print("loss on the manual before: {:.4f}, with weights cast to bfloat16 {:.4f}".format(*losses))
    ways = {name: way for name, way in WAYS.items() if find_spec(way.needs) is not None}
    found: dict[str, list[Found]] = {}
    with steps_left() as told:
        for done, name in enumerate(ways):
            told(done, len(ways), name)
            found[name] = [fine_tuned(base, ways[name], texts, options, seed) for seed in range(options.seeds)]
    plain = found["float32"]
    print("| way | bytes a parameter | gained | moved | norms |\n|---|---|---|---|---|")
    for name, runs in found.items():
        shares = [100 * one.gained / its.gained for one, its in zip(runs, plain, strict=True)]
        mean = {of: 100 * statistics.fmean(getattr(one, of) for one in runs) for of in ("moved", "norms")}
        print(
            f"| {name} | {runs[0].nbytes:.1f} | {statistics.fmean(shares):.0f}% [{min(shares):.0f}, {max(shares):.0f}] "
            f"| {mean['moved']:.1f}% | {mean['norms']:.1f}% |"
        )


if __name__ == "__main__":
    main()
