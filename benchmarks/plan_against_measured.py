"""Is what `instep plan` says of memory what a training run takes?

    python benchmarks/plan_against_measured.py                 # nine models, a few minutes
    python benchmarks/plan_against_measured.py --models mlp --width 64

Each model is planned, without data, and then trained on one device, a CPU. What it takes is read from torch's own
allocator, through the profiler: every block of memory as it is handed out and taken back, from before the model is
built. It sees one thread, so the worker of `schedule="forward"` is made to run there. Two figures are compared: the
most bytes in a step, and how many of them lie above parameters, buffers and optimizer state. The errors are the plan's
to what was measured. Buckets are of 1 MiB.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from what_fits import TOGETHER, Llama
from what_fits import Shape as LlamaShape

import instep
from instep._torch.worker import Task, Worker
from instep.buckets import MIB
from instep_tools.planning.job import Job
from instep_tools.planning.model import FOR_LOOP, IMPLEMENTATIONS
from instep_tools.planning.plan import plan
from instep_tools.planning.show import TWO_PASS
from instep_tools.training import ByteGPT, Shape

BUCKET = MIB
COUNT = "the steps that count"
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "backward": {"schedule": "backward", "bucket_bytes": BUCKET},
    "forward": {"schedule": "forward", "defer": True, "bucket_bytes": BUCKET},
    "backward, undo": {"schedule": "backward", "undo": True, "bucket_bytes": BUCKET},
    TWO_PASS: {"schedule": "backward", "clip": instep.ClipNorm(1.0, mode="two_pass"), "bucket_bytes": BUCKET},
}
OF_MICRO_BATCHES = {"plain": None, TOGETHER: WAYS["backward"]}


class TiedGPT(ByteGPT):
    """The demo's, whose head is its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.head.weight = self.byte.weight


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.two(self.second(torch.relu(self.one(self.first(x))))))


def gpt(width: int) -> nn.Module:
    return TiedGPT(Shape(width, depth=4, heads=4))


def convnet(width: int) -> nn.Module:
    stages = [
        nn.Sequential(nn.Conv2d(w, 2 * w, 3, stride=2, padding=1), Residual(2 * w)) for w in (width // 4, width // 2)
    ]
    return nn.Sequential(
        nn.Conv2d(3, width // 4, 3, padding=1), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)
    )


def mlp(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(60):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*layers)


class Huge(nn.Module):
    """Nearly all parameters are one embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(200 * width, width)
        self.head = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words).mean(1))  # type: ignore[no-any-return]


def bert(width: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=width, num_hidden_layers=4, num_attention_heads=4, intermediate_size=4 * width, vocab_size=8 * width
    )
    return BertForSequenceClassification(config)  # type: ignore[no-any-return]


def llama(width: int, *, checkpoints: bool, chunk: int = 0) -> nn.Module:
    """That of ``what_fits.py``, small, in bfloat16, with as many words to its width."""
    heads = width // 64
    shape = LlamaShape(width, depth=4, heads=heads, groups=heads // 2, hidden=3 * width, words=42 * width)
    return Llama(shape, checkpoints=checkpoints, chunk=chunk).to(torch.bfloat16)


def tokens(rows: int, length: int, words: int) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length) % words


@dataclass(frozen=True)
class Kind:
    """A model with what it is called with."""

    build: Callable[[int], nn.Module]
    inputs: Callable[[int], Any]
    micro_batches: int = 1


KINDS = {
    "gpt": Kind(gpt, lambda width: tokens(2, 64, 256)),
    "convnet": Kind(convnet, lambda width: torch.ones(8, 3, 32, 32)),
    "mlp": Kind(mlp, lambda width: torch.ones(16, width)),
    "embedding": Kind(Huge, lambda width: tokens(16, 32, 200 * width)),
    "llama": Kind(partial(llama, checkpoints=False), lambda width: tokens(1, 128, 42 * width)),
    "llama, checkpoints": Kind(partial(llama, checkpoints=True), lambda width: tokens(1, 128, 42 * width)),
    "llama, in chunks": Kind(partial(llama, checkpoints=True, chunk=256), lambda width: tokens(1, 1024, 42 * width)),
    "llama, 8 micro-batches": Kind(
        partial(llama, checkpoints=True, chunk=128), lambda width: tokens(1, 128, 42 * width), micro_batches=8
    ),
    "bert": Kind(
        bert,
        lambda width: {"input_ids": tokens(2, 64, 8 * width), "labels": torch.zeros(2, dtype=torch.long)},
    ),
}


class Chosen:
    """What the plan's job names: the functions of one kind, at one width."""

    kind: Kind
    width: int


def build() -> nn.Module:
    return Chosen.kind.build(Chosen.width)


def inputs() -> Any:
    return Chosen.kind.inputs(Chosen.width)


def loss_of(model: nn.Module, given: Any) -> torch.Tensor:
    output = model(**given) if isinstance(given, dict) else model(given)
    own = getattr(output, "loss", None)
    return output.sum() if own is None else own  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Measured:
    """Bytes of the allocator: the most in a step, and those of parameters, buffers and state."""

    total: int
    own: int

    @property
    def above(self) -> int:
        return self.total - self.own


def measure(implementation: str, options: dict[str, Any] | None) -> Measured:
    """Train for a few steps, and ask the allocator."""
    gc.collect()
    with recorded() as most, patch.object(Worker, "run", run_at_once):
        torch.manual_seed(0)
        model = build().train()
        loop = implementation == FOR_LOOP
        kind: dict[str, Any] = dict.fromkeys(IMPLEMENTATIONS, False) if loop else {implementation: True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kind)

        def step() -> None:
            if count > 1 and overlap is not None:
                overlap.micro_batches(lambda given: loss_of(model, given) / count, [inputs()] * count)
            elif options is WAYS[TWO_PASS] and overlap is not None:
                overlap.backward(loss_of(model, inputs()))
            else:
                for _ in range(count):
                    (loss_of(model, inputs()) / count).backward()
            optimizer.step()
            optimizer.zero_grad()

        overlap: instep.Attachment | None = None
        count = Chosen.kind.micro_batches
        step()
        if options is not None:
            overlap = instep.attach(model, optimizer, **options)
        step()
        with record_function(COUNT):
            for _ in range(2):
                step()
            if overlap is not None:
                overlap.synchronize()
    state = (value for entry in optimizer.state.values() for value in entry.values())
    own = sum(t.nbytes for t in chain(model.parameters(), model.buffers(), state) if isinstance(t, torch.Tensor))
    if overlap is not None:
        overlap.detach()
    return Measured(most[0], own)


@contextmanager
def recorded() -> Iterator[list[int]]:
    """After it, the list holds the most bytes that this thread had from the allocator in the steps that count."""
    found: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        yield found
    assert recording.profiler is not None
    assert recording.profiler.kineto_results is not None
    events = recording.profiler.kineto_results.events()
    [(begin, end)] = [(e.start_ns(), e.end_ns()) for e in events if e.name() == COUNT]
    there = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        there += event.nbytes()
        if event.start_ns() > end:
            break
        if event.start_ns() >= begin:
            most = max(most, there)
    found.append(most)


def run_at_once(worker: Worker, do: Callable[[], None], place: float = 0) -> Task:
    """In place of ``Worker.run``: in the thread that asks, which is the one that the profiler sees."""
    task = Task(do)
    task()
    return task


@dataclass(frozen=True)
class Compared:
    """One row: a model and a way to train it."""

    model: str
    way: str
    implementation: str
    planned_total: int
    planned_above: int
    measured: Measured

    @property
    def errors(self) -> tuple[float, float]:
        """Of the total, and of what lies above parameters, buffers and state; shares of what was measured."""
        return self.planned_total / self.measured.total - 1, self.planned_above / self.measured.above - 1

    def __str__(self) -> str:
        total, above = self.errors
        return (
            f"| {self.model} | {self.way} | {self.implementation} | {self.planned_total / MIB:.2f} | "
            f"{self.measured.total / MIB:.2f} | {100 * total:+.1f}% | {self.planned_above / MIB:.2f} | "
            f"{self.measured.above / MIB:.2f} | {100 * above:+.1f}% |"
        )


def compare(name: str, width: int) -> Iterator[Compared]:
    """Plan, and train, one model in all ways."""
    Chosen.kind, Chosen.width = KINDS[name], width
    here = "plan_against_measured" if __name__ == "__main__" else __name__
    sys.modules.setdefault(here, sys.modules[__name__])
    count = KINDS[name].micro_batches
    job = Job(f"{here}:build", inputs=f"{here}:inputs", bucket_bytes=BUCKET, options=("lr=1e-3",), micro_batches=count)
    ways = WAYS if count == 1 else OF_MICRO_BATCHES
    for peak in (peak for peak in plan(job).peaks if peak.way in ways):
        found = measure(peak.implementation, ways[peak.way])
        yield Compared(name, peak.way, peak.implementation, peak.total, peak.above, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | loop | AdamW | total, plan | measured | error | above state, plan | measured | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for name in options.models:
        for row in compare(name, options.width):
            print(row, flush=True)
            rows.append(row)
    worst = max(rows, key=lambda row: max(map(abs, row.errors)))
    error = 100 * max(map(abs, worst.errors))
    print(f"\nLargest error: {error:.1f}% ({worst.model}, {worst.way}, {worst.implementation})")


if __name__ == "__main__":
    main()
