"""What looking at a step costs: `schedule="backward"` beside the plain loop and a loop by hand, one core.

    python benchmarks/looking.py
    python benchmarks/looking.py --cases "1,000 tensors" --rounds 100
    python benchmarks/looking.py --accelerator
    python benchmarks/looking.py --where

*By hand* is what a loop does that looks at nothing: the same buckets (twenty), one counter in a hook of each parameter,
torch's fused kernel over lists that were made before training, and no gradient afterwards. It is right for as long as
nobody changes anything, and says nothing where somebody does. AdamW, fused, float32. All loops train on the same
batches, in turn. Weights and state of all are compared before and after they are timed, bit for bit. Times are of the
processor, as ratios to the plain loop's; above 1 is faster.

With `--accelerator` the model is on CUDA, or on the emulated accelerator of the tests, and has kernels of a few
elements: times are the host's, which a device that waits for its host would lose or gain.

`--where` says how long each question takes, in microseconds of an iteration, beside the kernels.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from measure import processor_times, ratio, require_equal
from torch import nn
from torch.nn import functional

import instep
from instep._optim.kernels import KernelCall
from instep._step.writes import Writes
from instep._wiring.hooks import IterationHooks
from instep.sources.local import LocalSource

sys.path.append(str(Path(__file__).parents[1]))  # of the tests, which have the emulated accelerator

PLAIN, BY_HAND, ATTACHED, AGAIN = "plain", "by hand", "instep", "plain again"
BUCKETS = 20
COLUMNS = [itemgetter(name) for name in ("exp_avg", "exp_avg_sq", "step")]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(self.before_attention(x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        found: torch.Tensor = x + self.down(functional.gelu(self.up(self.before_mlp(x))))
        return found


class Scales(nn.Module):
    """Many small tensors, each used once."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(size)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


@dataclass(frozen=True)
class Case:
    """A model, the batches it trains on, and how many rounds are timed.

    Attributes:
        kernel: which of its kernels AdamW is asked for.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], torch.Tensor]
    rounds: int
    kernel: str = "fused"


def _gpt(width: int, depth: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(256, width), *[Block(width) for _ in range(depth)], nn.Linear(width, 256))


def _tokens(generator: torch.Generator, count: int = 64) -> torch.Tensor:
    return torch.randint(0, 256, (1, count), generator=generator)


def _values(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(1000, generator=generator)


CASES = {
    "1,000 tensors of 1,000": Case(partial(Scales, 1000, 1000), _values, 60),
    "GPT, width 64, 4 blocks (1 MiB of gradients)": Case(partial(_gpt, 64, 4), _tokens, 300),
    "GPT, width 256, 5 blocks (16 MiB)": Case(partial(_gpt, 256, 5), _tokens, 80),
    "GPT, width 512, 8 blocks (100 MiB)": Case(partial(_gpt, 512, 8), _tokens, 24),
}
ON_ACCELERATOR = {
    "host, GPT of 12 blocks, fused": Case(partial(_gpt, 32, 12), partial(_tokens, count=16), 200),
    "host, GPT of 12 blocks, foreach": Case(partial(_gpt, 32, 12), partial(_tokens, count=16), 200, "foreach"),
}


class ByHand:
    """Once there is state: the kernel over lists that were made once. Nothing is looked at."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        size, filling = sum(p.numel() for p in parameters) / BUCKETS, list[torch.Tensor]()
        self.buckets: list[list[torch.Tensor]] = []
        for parameter in reversed(parameters):
            filling.append(parameter)
            if sum(p.numel() for p in filling) >= size:
                self.buckets.append(filling)
                filling = []
        if filling:
            self.buckets.append(filling)
        self.left = list(map(len, self.buckets))
        self.lists = [
            [list(map(column, map(optimizer.state.__getitem__, bucket))) for column in COLUMNS]
            for bucket in self.buckets
        ]
        self.ones = [list(repeat(torch.ones_like(steps[0]), len(steps))) for *_, steps in self.lists]
        self.gradient = attrgetter("grad")
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self.count, number))

    def count(self, number: int, _: torch.Tensor) -> None:
        self.left[number] -= 1
        if self.left[number]:
            return
        bucket, (first, second, steps) = self.buckets[number], self.lists[number]
        self.left[number] = len(bucket)
        torch._foreach_add_(steps, self.ones[number])
        torch._fused_adamw_(
            bucket,
            list(map(self.gradient, bucket)),
            first,
            second,
            [],
            steps,
            lr=1e-4,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        for parameter in bucket:
            parameter.grad = None


class Loop:
    """One variant of the training run."""

    def __init__(self, case: Case, kind: str, device: str) -> None:
        torch.manual_seed(0)
        self.model = case.model().to(device)
        options: Any = {case.kernel: True}
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.01, **options)
        self.device = device
        self.kind = kind
        self.by_hand: ByHand | None = None
        self.overlap = instep.attach(self.model, self.optimizer, schedule="backward") if kind == ATTACHED else None

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch).square().mean().backward()
        if self.by_hand is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.kind == BY_HAND:
                self.by_hand = ByHand(self.optimizer, list(self.model.parameters()))

    def drain(self) -> None:
        if self.device != "cpu":
            torch.accelerator.synchronize()


def batches(case: Case, device: str) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield case.batch(generator).to(device)


def accelerator() -> str:
    """The type of the device. The emulated one takes half a minute to compile, the first time."""
    if torch.cuda.is_available():
        return "cuda"
    from tests.accelerator.device import load

    load()
    return "emu"


# Where instep's own time goes.


QUESTIONS: dict[str, tuple[Any, str]] = {
    "forward: are the parameters in their places, is a step owed": (IterationHooks, "before_forward"),
    "forward: its outputs are told of": (IterationHooks, "after_forward"),
    "backward begins: which gradients are there": (IterationHooks, "before_backward"),
    "buckets: the lock, gradients, versions, stand-ins": (LocalSource, "_bucket_accumulated"),
    "the first bucket: groups, settings and state; calls of all are made": (Writes, "prepare"),
    "the kernels of all buckets": (KernelCall, "run"),
    "step(): groups, settings, state, versions are as left": (IterationHooks, "before_step"),
    "step() has returned: it is counted": (IterationHooks, "after_step"),
}
WITHIN = {"buckets: the lock, gradients, versions, stand-ins": list(QUESTIONS)[4:6]}
"""What is timed within another one, and is none of its time."""


class Timed:
    """Times calls of one method, as the block runs."""

    def __init__(self, of: Any, name: str) -> None:
        self._of, self._name, self._function = of, name, getattr(of, name)
        self.seconds = 0.0
        self.calls = 0

    def __enter__(self) -> "Timed":
        function = self._function

        def timed(*args: Any, **options: Any) -> Any:
            began = process_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += process_time() - began
                self.calls += 1

        setattr(self._of, self._name, timed)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._of, self._name, self._function)


def show_where(case: Case, device: str, rounds: int) -> None:
    tokens = batches(case, device)
    with ExitStack() as stack:  # hooks hold methods: they are wrapped before there are any
        timed = {what: stack.enter_context(Timed(*where)) for what, where in QUESTIONS.items()}
        loop, plain = Loop(case, ATTACHED, device), Loop(case, PLAIN, device)
        taken: dict[str, list[float]] = {what: [] for what in ("plain", "instep", *timed)}
        for number in range(10 + rounds):
            batch = next(tokens)
            for way, one in (("plain", plain), ("instep", loop)):
                before = {what: it.seconds for what, it in timed.items()}
                began = process_time()
                one.step(batch)
                if number >= 10:
                    taken[way].append(process_time() - began)
            for what, it in timed.items() if number >= 10 else ():
                taken[what].append(it.seconds - before[what])
    found = {what: 1e6 * median(times) for what, times in taken.items()}
    for what, parts in WITHIN.items():
        found[what] -= sum(found[part] for part in parts)
    print("\n".join(f"| {what} | {time:.0f} |" for what, time in found.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="only those with this in their names")
    parser.add_argument("--rounds", type=int, help="timed steps of each loop; by default the case's own number")
    parser.add_argument("--accelerator", action="store_true", help="the host's time, on an accelerator")
    parser.add_argument("--where", action="store_true", help="where instep's time goes, in place of ratios")
    arguments = parser.parse_args()
    device, cases = (accelerator(), ON_ACCELERATOR) if arguments.accelerator else ("cpu", CASES)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # no worker has a core of its own
    print(
        "| | us of an iteration |\n|---|---|"
        if arguments.where
        else "| | by hand | instep | plain again |\n|---|---|---|---|"
    )
    for name, case in cases.items():
        if arguments.cases not in name:
            continue
        if arguments.where:
            print(f"| **{name}** | |")
            show_where(case, device, arguments.rounds or case.rounds)
            continue
        kinds = [kind for kind in (PLAIN, BY_HAND, ATTACHED, AGAIN) if case.kernel == "fused" or kind != BY_HAND]
        loops = {kind: Loop(case, kind, device) for kind in kinds}
        tokens = batches(case, device)
        first = [next(tokens) for _ in range(6)]
        for loop in loops.values():  # each alone
            for batch in first:
                loop.step(batch)
        require_equal(loops, PLAIN)
        times = processor_times(loops, tokens, arguments.rounds or case.rounds)
        require_equal(loops, PLAIN)
        found = (str(ratio(times[PLAIN], times[kind])) if kind in times else "" for kind in (BY_HAND, ATTACHED, AGAIN))
        print(f"| {name} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
