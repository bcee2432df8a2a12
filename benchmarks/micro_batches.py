"""What does instep cost where gradients of several micro-batches add up before each step?

    python benchmarks/micro_batches.py                     # models of 1 to 64 MiB of gradients, 4 micro-batches
    python benchmarks/micro_batches.py --mib 4 --count 8

GPTs on bytes, on one device and one thread, AdamW(fused=True). For each size four loops train on the same batches, each
of which they divide into ``--count`` micro-batches: the plain one; one with the line without options; one with
``schedule="backward", accumulation_steps=...``; and the plain one again. After three steps weights and state of all
must be equal, bit for bit, or nothing is printed. They are timed in turn, round by round, in processor time, once the
attached ones have decided whether steps are put off, or beside backward.
"""

import argparse
from typing import Any

import torch
from default_bucket import MIB, SHAPES
from measure import SETTLED, batches, loss_of, processor_times, ratio, require_equal
from torch import nn

import instep
from instep_tools.training import ByteGPT

ROWS_OF_ONE = 2


class Loop:
    def __init__(self, mib: int, count: int, options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = ByteGPT(SHAPES[mib])
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.overlap = None if options is None else instep.attach(self.model, self.optimizer, **options)
        self._count = count

    def step(self, tokens: torch.Tensor) -> None:
        for part in tokens.chunk(self._count):
            (loss_of(self.model, part) / self._count).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        if self.overlap is not None:
            self.overlap.synchronize()


def row(mib: int, count: int, rounds: int) -> str:
    ways: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "default": {},
        "backward": {"schedule": "backward", "accumulation_steps": count},
        "plain again": None,
    }
    loops = {name: Loop(mib, count, options) for name, options in ways.items()}
    tokens = batches(ROWS_OF_ONE * count, 64)
    for number in range(3 + SETTLED):
        batch = next(tokens)
        for loop in loops.values():
            loop.step(batch)
        if number == 2:
            for loop in loops.values():
                loop.drain()
            require_equal(loops, "plain")
    seconds = processor_times(loops, tokens, rounds)
    ratios = [str(ratio(seconds["plain"], seconds[name])) for name in ways if name != "plain"]
    gradients = sum(p.nbytes for p in loops["plain"].model.parameters()) / MIB
    return f"| {gradients:.1f} | {1e3 * sorted(seconds['plain'])[rounds // 2]:.0f} ms | " + " | ".join(ratios) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", choices=SHAPES, default=[1, 4, 16, 64])
    parser.add_argument("--count", type=int, default=4, help="micro-batches of 2 x 64 tokens in a step")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{arguments.count} micro-batches. All loops are equal to the plain one, bit for bit.\n")
    print("| gradients, MiB | plain | default | `backward` | plain again |")
    print("|---|---|---|---|---|")
    for mib in arguments.mib:
        print(row(mib, arguments.count, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
