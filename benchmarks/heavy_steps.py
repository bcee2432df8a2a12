"""How much of a heavy step runs beside the loop: torch's Muon and AdamW, on one device with an idle core.

    python benchmarks/heavy_steps.py --float32
    python benchmarks/heavy_steps.py --float32 --rows 48

A GPT on bytes of 4.7 M parameters, with one torch thread: matrices are stepped by Muon, the rest by AdamW. The loops
of ``WAYS`` train on the same batches, a few steps at a time, in turn: what is still put off where a turn ends is waited
for in it. Weights and state of all are compared before and after they are timed, bit for bit. Times are those of the
clock on the wall.

*hidden* is how much nearer a loop is to that without a step than the plain one is: 100% where the step costs nothing.
No way hides more of a step than the next forward, or the rest of backward, takes.

``--float32``: Muon multiplies matrices in bfloat16, for which some processors have no instruction: there the step takes
longer than all the rest, and no loop has room for it. With the option they are multiplied in float32, in all loops.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measure import SETTLED, batches, interleave, loss_of, ratio, require_equal, spread
from torch import nn
from torch.optim import _muon

import instep
from instep_tools.training import ByteGPT, Shape

PLAIN, NONE = "plain", "no optimizer"
WAYS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "default": {},
    "put off": {"defer": True},
    "backward": {"schedule": "backward", "defer": False},
    "backward, default": {"schedule": "backward"},
    NONE: None,
    "plain again": None,
}


def in_float32(grad: torch.Tensor, ns_coefficients: Sequence[float], ns_steps: int, eps: float) -> torch.Tensor:
    """The Newton-Schulz iteration of Muon, without going to bfloat16."""
    a, b, c = ns_coefficients
    tall = grad.size(0) > grad.size(1)
    found = grad.T if tall else grad
    found = found / found.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


class Loop:
    def __init__(self, shape: Shape, options: dict[str, Any] | None, *, steps: bool = True) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = ByteGPT(shape)
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if all(p is not matrix for matrix in matrices)]
        self.optimizer: Any = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3, fused=True)]
        self.overlap = None if options is None else instep.attach(self.model, self.optimizer, **options)
        self._steps = steps

    def step(self, tokens: torch.Tensor) -> None:
        loss_of(self.model, tokens).backward()
        for optimizer in self.optimizer:
            if self._steps:
                optimizer.step()
            optimizer.zero_grad()

    def drain(self) -> None:
        if self.overlap is not None:
            self.overlap.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="of 64 tokens, in a step")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8, help="of one loop before the next one's turn")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="beside the plain loop")
    parser.add_argument("--float32", action="store_true", help="Muon multiplies in float32")
    parser.add_argument("--json", type=Path, help="write the ratios there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.float32:
        _muon._zeropower_via_newtonschulz = in_float32
    shape = Shape(width=arguments.width, depth=6, heads=4)
    ways = [name for name in WAYS if name in (PLAIN, NONE, *arguments.ways)]
    loops = {name: Loop(shape, WAYS[name], steps=name != NONE) for name in ways}
    tokens = batches(arguments.rows, 64)
    first = [next(tokens) for _ in range(SETTLED)]
    for loop in loops.values():  # each alone: the default times whole iterations
        for batch in first:
            loop.step(batch)
        loop.drain()
    require_equal(loops, PLAIN, but=(NONE,))
    times = interleave(loops, tokens, arguments.rounds, steps=arguments.steps, warmup=1).seconds
    require_equal(loops, PLAIN, but=(NONE,))
    print(f"{len(os.sched_getaffinity(0))} cores, {arguments.rows} x 64 tokens. Equal to the plain loop, bit for bit.")
    for name, loop in loops.items():
        if name in ("default", "backward, default") and loop.overlap is not None:
            print(f"{name}: {loop.overlap.advice}")
    if arguments.json:
        found = {name: asdict(ratio(times[PLAIN], times[name])) for name in ways if name != PLAIN}
        arguments.json.write_text(json.dumps({"ratio": found}, indent=1))
    print("\n| | time of plain / time | ms | hidden |\n|---|---|---|---|")
    room = spread(times[PLAIN]).median - spread(times[NONE]).median
    for name in ways:
        median = spread(times[name]).median
        hidden = f"{(spread(times[PLAIN]).median - median) / room:.0%}" if name not in (PLAIN, NONE) else ""
        against = "" if name == PLAIN else str(ratio(times[PLAIN], times[name]))
        print(f"| {name} | {against} | {1e3 * median:.0f} | {hidden} |")


if __name__ == "__main__":
    main()
