"""What it costs that a foreign optimizer steps its buckets in backward: Lion and AdamP of pytorch_optimizer, one core.

    python benchmarks/foreign.py
    python benchmarks/foreign.py --rounds 60 --widths 64

Blocks of a small network, float32, 64 rows, about twenty buckets. *By hand* is the least that any such loop does: one
hook for each parameter counts its bucket down; then the groups of the optimizer hold the bucket's parameters alone, its
own ``step()`` runs, attributes are put back, and the gradients go. It looks at nothing. The loops train on the same
batches, two steps at a time, in turn. Weights and state of all are compared before and after they are timed, bit for
bit. Times are of the processor, as ratios to the plain loop's; above 1 is faster.
"""

import argparse
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytorch_optimizer
import torch
from measure import processor_times, ratio, require_equal
from torch import nn

import instep

PLAIN, BY_HAND, ATTACHED, AGAIN = "plain", "by hand", "instep", "plain again"
BUCKETS = 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


class ByHand:
    """The optimizer's own object steps a bucket once its gradients are there. Nothing is looked at."""

    def __init__(self, optimizer: Any, parameters: Sequence[torch.Tensor]) -> None:
        self.optimizer = optimizer
        cls = type(optimizer)
        self.update = getattr(cls.step, "__wrapped__", cls.step)
        size, found, filling = sum(p.numel() for p in parameters) / BUCKETS, [], []
        for parameter in reversed(parameters):
            filling.append(parameter)
            if sum(p.numel() for p in filling) >= size:
                found.append(filling)
                filling = []
        self.buckets = [*found, filling] if filling else found
        self.left = list(map(len, self.buckets))
        self.done = 0
        self.lists = [
            [p for g in optimizer.param_groups for p in g["params"] if any(p is q for q in b)] for b in self.buckets
        ]
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self.count(number))

    def count(self, number: int) -> None:
        self.left[number] -= 1
        if self.left[number]:
            return
        self.left[number] = len(self.buckets[number])
        optimizer = self.optimizer
        (group,) = optimizer.param_groups
        whole = group["params"]
        before = {k: copy.copy(v) for k, v in vars(optimizer).items() if isinstance(v, (int, float, list, dict))}
        values = dict(group)
        group["params"] = self.lists[number]
        self.update(optimizer)
        self.done += 1
        if self.done % len(self.buckets):  # what the step leaves beside parameters is left once
            for added in group.keys() - values.keys():
                del group[added]
            group.update(values)
            vars(optimizer).update((k, v) for k, v in before.items() if k not in ("param_groups", "state", "defaults"))
        group["params"] = whole
        for parameter in self.buckets[number]:
            parameter.grad = None


class Loop:
    def __init__(self, name: str, width: int, depth: int, kind: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.optimizer: Any = pytorch_optimizer.load_optimizer(name)(self.model.parameters(), lr=1e-3)
        self.steps = 0
        self.kind = kind
        self.by_hand: ByHand | None = None
        self.overlap = None
        if kind == BY_HAND:
            self.by_hand = ByHand(self.optimizer, list(self.model.parameters()))
        if kind == ATTACHED:
            self.overlap = instep.attach(self.model, self.optimizer, schedule="backward")

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch).square().mean().backward()
        if self.by_hand is None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def drain(self) -> None: ...


def batches(width: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(64, width, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--depth", type=int, default=6, help="blocks")
    parser.add_argument("--optimizers", nargs="+", default=["lion", "adamp"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| | by hand | instep | plain again |\n|---|---|---|---|")
    for width in arguments.widths:
        for name in arguments.optimizers:
            loops = {k: Loop(name, width, arguments.depth, k) for k in (PLAIN, BY_HAND, ATTACHED, AGAIN)}
            tokens = batches(width)
            first = [next(tokens) for _ in range(6)]
            for loop in loops.values():  # each alone
                for batch in first:
                    loop.step(batch)
            require_equal(loops, PLAIN)
            times = processor_times(loops, tokens, arguments.rounds)
            require_equal(loops, PLAIN)
            found = (str(ratio(times[PLAIN], times[kind])) for kind in (BY_HAND, ATTACHED, AGAIN))
            print(f"| {name}, {arguments.depth} blocks of {width} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
