"""What fp32 masters of a bfloat16 model cost, and what it saves to step them in backward: fused and foreach AdamW.

    python benchmarks/masters.py
    python benchmarks/masters.py --rounds 60 --kinds fused --width 512 --rows 128
    python benchmarks/masters.py --micro 4 --kinds fused

Blocks of a small network, one core. *Plain* is ``instep.masters(AdamW)`` without ``attach``. *Loop of masters* is what
projects write: fp32 copies in an optimizer of their own, gradients cast, weights copied back, all at once. *By hand* is
the least that a loop does that steps them in backward: a hook counts a bucket down, then the gradients are cast, the
bucket's masters stepped by lists that were made before, and the weights written; it looks at nothing. *fp32 gradients*
are those of ``masters(AdamW, gradients="float32")``. *Autocast* has fp32 weights and no masters. Weights, masters and
state of all that have some are compared before and after they are timed, bit for bit; loops with fp32 gradients among
themselves. With ``--micro`` a step is of so many micro-batches, which *instep* takes by ``micro_batches()``. Bytes are
those of tensors, for each parameter: at rest, and the most within a step. Times are of the processor, as ratios to
plain's; above 1 is faster.
"""

import argparse
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from foreign import Block
from measure import processor_times, ratio
from torch import nn
from torch.optim.adamw import adamw

import instep
from instep_tools.harness import LiveBytes

PLAIN, LOOP, BY_HAND, ATTACHED = "plain", "loop of masters", "by hand", "instep"
AUTOCAST, AUTOCAST_ATTACHED, AGAIN = "autocast", "autocast, instep", "plain again"
WIDE, WIDE_ATTACHED = "fp32 gradients", "fp32 gradients, instep"
KINDS = (PLAIN, LOOP, BY_HAND, ATTACHED, AUTOCAST, AUTOCAST_ATTACHED, WIDE, WIDE_ATTACHED, AGAIN)
BUCKETS = 9


class ByHand:
    """The masters of a bucket are stepped once its gradients are there. Nothing is looked at."""

    def __init__(self, optimizer: Any, halves: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
        self.optimizer = optimizer
        size = sum(p.numel() for p in halves) / BUCKETS
        self.buckets: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        filling: list[tuple[torch.Tensor, torch.Tensor]] = []
        for pair in reversed(list(zip(halves, masters, strict=True))):
            filling.append(pair)
            if sum(p.numel() for p, _ in filling) >= size or pair[0] is halves[0]:
                self.buckets.append(([p for p, _ in filling], [m for _, m in filling]))
                filling = []
        self.left = [len(some) for some, _ in self.buckets]
        for number, (some, _) in enumerate(self.buckets):
            for p in some:
                p.register_post_accumulate_grad_hook(lambda _, number=number: self.count(number))

    def count(self, number: int) -> None:
        self.left[number] -= 1
        if self.left[number]:
            return
        halves, masters = self.buckets[number]
        self.left[number] = len(halves)
        with torch.no_grad():
            gradients = [torch.empty_like(m) for m in masters]
            torch._foreach_copy_(gradients, [p.grad for p in halves if p.grad is not None])
            for p in halves:
                p.grad = None
            self.update(masters, gradients)
            torch._foreach_copy_(halves, masters)

    def update(self, masters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        state, group = self.optimizer.state, self.optimizer.param_groups[0]
        for m in masters:
            if not state[m]:
                state[m].update(step=torch.zeros(()), exp_avg=torch.zeros_like(m), exp_avg_sq=torch.zeros_like(m))
        first, second, steps = ([state[m][name] for m in masters] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        numbers = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        switches = {name: group[name] for name in ("foreach", "fused")}
        adamw(masters, gradients, first, second, [], steps, beta1=beta1, beta2=beta2, **numbers, **switches)


class Loop:
    def __init__(self, kind: str, width: int, depth: int, way: str, micro: int) -> None:
        torch.manual_seed(0)
        self.kind, self.micro = kind, micro
        self.model: nn.Module = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.in_half = kind not in (AUTOCAST, AUTOCAST_ATTACHED)
        if self.in_half:
            self.model.to(torch.bfloat16)
        self.halves: list[torch.Tensor] = list(self.model.parameters())
        settings: dict[str, Any] = {"lr": 1e-3, way: True}
        self.masters: list[torch.Tensor] = []
        self.optimizer: Any
        if kind in (LOOP, BY_HAND):
            self.masters = [p.detach().float() for p in self.halves]
            self.optimizer = torch.optim.AdamW(self.masters, **settings)
        else:
            wide: Any = {"gradients": "float32"} if kind in (WIDE, WIDE_ATTACHED) else {}
            cls = instep.masters(torch.optim.AdamW, **wide) if self.in_half else torch.optim.AdamW
            self.optimizer = cls(self.model.parameters(), **settings)
        self.by_hand = ByHand(self.optimizer, self.halves, self.masters) if kind == BY_HAND else None
        self.overlap: Any = None
        if kind in (ATTACHED, AUTOCAST_ATTACHED, WIDE_ATTACHED):
            self.overlap = instep.attach(self.model, self.optimizer, schedule="backward")

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.in_half):
            found: torch.Tensor = self.model(batch if not self.in_half else batch.to(torch.bfloat16))
            return found.float().square().mean()

    def step(self, batch: torch.Tensor) -> None:
        parts = batch.chunk(self.micro)
        if self.overlap is not None and self.micro > 1:
            self.overlap.micro_batches(self.loss, parts)
        else:
            for part in parts:
                self.loss(part).backward()
        if self.by_hand is not None:
            return
        if self.kind == LOOP:
            for p, m in zip(self.halves, self.masters, strict=True):
                m.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        if self.kind == LOOP:
            with torch.no_grad():
                torch._foreach_copy_(self.halves, self.masters)
            self.model.zero_grad()
        self.optimizer.zero_grad()

    def drain(self) -> None: ...

    def state(self) -> list[torch.Tensor]:
        """Weights, masters and what belongs to them."""
        found = [p.detach() for p in self.halves]
        for p, m in zip(self.halves, self.masters or self.halves, strict=True):
            entry = self.optimizer.state[m]
            found += [self.optimizer.state[p]["master"] if not self.masters else m] if self.in_half else []
            found += [entry[name] for name in ("exp_avg", "exp_avg_sq", "step")]
        return found


def require_equal(loops: dict[str, Loop]) -> None:
    for kind, loop in loops.items():
        other = WIDE if kind in (WIDE, WIDE_ATTACHED) else PLAIN
        if loop.in_half and not all(map(torch.equal, loops[other].state(), loop.state())):
            raise SystemExit(f"{kind} is not equal to {other}")


def bytes_of(loop: Loop, batch: torch.Tensor) -> tuple[float, float]:
    """Of each parameter: at rest, and at the most."""
    rest = sum(t.nbytes for t in loop.state())
    with LiveBytes(chain(loop.state(), [batch])) as live:
        loop.step(batch)
    count = sum(p.numel() for p in loop.halves)
    return rest / count, (rest + live.peak) / count


def batches(width: int, rows: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(rows, width, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--depth", type=int, default=6, help="blocks")
    parser.add_argument("--kinds", nargs="+", default=["fused", "foreach"])
    parser.add_argument("--micro", type=int, default=1, help="micro-batches of a step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for way in arguments.kinds:
        kinds = [kind for kind in KINDS if hasattr(torch.Tensor, "grad_dtype") or kind not in (WIDE, WIDE_ATTACHED)]
        if arguments.micro > 1:
            kinds.remove(BY_HAND)  # which counts one backward
        loops = {kind: Loop(kind, arguments.width, arguments.depth, way, arguments.micro) for kind in kinds}
        rows = batches(arguments.width, arguments.rows)
        first = [next(rows) for _ in range(6)]
        for loop in loops.values():  # each alone
            for batch in first:
                loop.step(batch)
        require_equal(loops)
        batch = next(rows)
        memory = {kind: bytes_of(loop, batch) for kind, loop in loops.items()}
        times = processor_times(loops, rows, arguments.rounds)
        require_equal(loops)
        print(f"| {way} | bytes at rest | at the most | time of plain / time |\n|---|---|---|---|")
        for kind, (rest, most) in memory.items():
            print(f"| {kind} | {rest:.1f} | {most:.1f} | {ratio(times[PLAIN], times[kind])} |", flush=True)


if __name__ == "__main__":
    main()
