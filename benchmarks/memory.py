"""How much memory does a step need above weights and optimizer state?

    python benchmarks/memory.py                          # a GPT and a convolutional model, in float32
    python benchmarks/memory.py --dtype bfloat16 --micro-batches 8
    pip install torchtune torchao==0.15.0 lomo-optim torch-optimi   # peers that are left out where not installed

Every variant is trained in a process of its own, on the same batches. Weights after three steps are compared with the
plain loop's of the same number of micro-batches, bit for bit; the table says where they are others. Then resident
memory is read, as the operating system counts it: between two steps, and the most within the next ones. The allocator
gives large tensors back at once. Beside it stands what ``instep plan`` says before anything is trained. ``no step`` is
the floor: each gradient is dropped as soon as it is there.
"""

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["INSTEP_BENCHMARK_MALLOC"] = "as it is"  # of measure.py, which would keep memory

import torch
from one_device import OPTIONS, PEERS, PLAIN, Model, Plain, gpt
from torch import nn
from torch.utils.checkpoint import checkpoint

from instep._optim.plan import MIB
from instep.demo.job import Shape
from instep.planning.job import Job, Rates
from instep.planning.making import plan

STEPS = 3
PLANNED = "INSTEP_BENCHMARK_PLANNED"
"""The environment's name for the model, and its dtype, that ``instep plan`` is to make."""
WAYS = {
    PLAIN: "plain",
    "4 MiB": "backward",
    "plain accumulation": "plain",
    "accumulate": "backward",
    "micro_batches": "backward, micro_batches",
}
"""What ``instep plan`` calls them."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
ONE_BATCH = {
    PLAIN: "plain, `AdamW(fused=True)`",
    "backward": '`instep.attach(…, schedule="backward")`',
    "torch in backward, fused": "torch's `_apply_optimizer_in_backward`",
    "torchtune, fused": "torchtune's wrapper",
    "optimi gradient release": "optimi's gradient release",
    "LOMO (gradient descent)": "LOMO (gradient descent)",
}


class Checkpointed(nn.Module):
    """Blocks of which only the inputs are kept for backward."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        found: torch.Tensor = self.last(x)
        return found


def convolutional(dtype: torch.dtype, rows: int) -> Model:
    """Of images of 8 x 8 pixels: gradients, and not activations, make the peak."""

    def make() -> nn.Module:
        blocks: list[nn.Module] = [nn.Sequential(nn.Conv2d(512, 512, 3, padding=1), nn.GELU()) for _ in range(8)]
        last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
        return Checkpointed(nn.Conv2d(3, 512, 3, padding=1), blocks, last).to(dtype)

    def images() -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(rows, 3, 8, 8, generator=generator).to(dtype)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x).float(), torch.arange(len(x)) % 10)

    return Model("convolutional", make, images, loss)


def models(dtype: torch.dtype, rows: int) -> dict[str, Model]:
    return {
        "GPT": gpt("GPT", dtype, Shape(width=512, depth=12, heads=8), rows, tokens=16),
        "convolutional": convolutional(dtype, rows),
    }


class Accumulated(Plain):
    """Each row of a batch is a micro-batch.

    Args:
        by: how the micro-batches are told: ``None``: the plain loop, or a backward that only drops gradients.
    """

    def __init__(self, model: Model, by: str | None = None, *, drops: bool = False) -> None:
        super().__init__(model, None if by is None else {"schedule": "backward", "bucket_bytes": 4 * MIB})
        self.by, self.drops = by, drops
        if drops:
            for p in self.model.parameters():
                p.register_post_accumulate_grad_hook(_drop)

    def loss_of(self, rows: torch.Tensor) -> torch.Tensor:
        return self.made.loss(self.model, rows) / self.count

    def step(self, tokens: torch.Tensor) -> None:
        micro_batches = tokens.split(1)
        self.count = len(micro_batches)
        if self.overlap is not None and self.by == "micro_batches":
            self.overlap.micro_batches(self.loss_of, micro_batches)
        elif self.overlap is not None:
            with self.overlap.accumulate():
                for rows in micro_batches[:-1]:
                    self.loss_of(rows).backward()
            self.loss_of(micro_batches[-1]).backward()
        else:
            for rows in micro_batches:
                self.loss_of(rows).backward()
        if not self.drops:
            self.optimizer.step()
            self.optimizer.zero_grad()


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def backward_in_small_buckets(model: Model) -> Plain:
    return Plain(model, {"schedule": "backward", "bucket_bytes": 4 * MIB})


SINGLE: dict[str, tuple[str, Callable[[Model], Plain]]] = {
    **{name: (title, PEERS[name]) for name, title in ONE_BATCH.items() if name in PEERS},
    "4 MiB": ("… and `bucket_bytes=4 * 2**20`", backward_in_small_buckets),
    "no step": ("no step, gradients dropped", lambda model: Accumulated(model, drops=True)),
}
SEVERAL: dict[str, tuple[str, Callable[[Model], Plain]]] = {
    "plain accumulation": ("plain, gradients add up", Accumulated),
    "accumulate": ("instep, `accumulate()`", lambda model: Accumulated(model, "accumulate")),
    "micro_batches": ("instep, `micro_batches()`", lambda model: Accumulated(model, "micro_batches")),
    "no step": ("no step, gradients dropped", lambda model: Accumulated(model, drops=True)),
}


def status(entry: str) -> int:
    """Bytes that the system tells of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(entry + ":"))


def measured(model: Model, make: Callable[[Model], Plain]) -> dict[str, Any]:
    """In this process: a digest of the weights after three steps, and bytes between and within steps."""
    batches = model.batches()
    loop = make(model)
    for _ in range(STEPS):
        loop.step(next(batches))
        loop.drain()
    digest = hashlib.sha256()
    for p in loop.model.parameters():
        digest.update(p.detach().flatten().view(torch.uint8).numpy().tobytes())
    gc.collect()
    between = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most is what there is now
    for _ in range(STEPS):
        loop.step(next(batches))
        loop.drain()
    return {
        "digest": digest.hexdigest(),
        "weights": sum(p.nbytes for p in loop.model.parameters()),
        "above": status("VmHWM") - between,
    }


class Trained(nn.Module):
    """What returns the loss, for ``instep plan``."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner, self.loss = model.make(), model.loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.inner, x)


def _planned_model() -> Model:
    name, dtype = os.environ[PLANNED].split()
    return models(getattr(torch, dtype), 1)[name]


def build_planned() -> nn.Module:
    return Trained(_planned_model())


def planned_inputs() -> torch.Tensor:
    return next(_planned_model().batches())


def planned(arguments: argparse.Namespace, model: str, micro_batches: int) -> dict[str, int]:
    """By way: bytes at the peak above weights and state, as ``instep plan`` says."""
    os.environ[PLANNED] = f"{model} {arguments.dtype}"
    job = Job(
        "memory:build_planned",
        options=("fused=True", f"lr={OPTIONS['lr']}"),
        inputs="memory:planned_inputs",
        bucket_bytes=4 * MIB,
        rates=Rates(tflops=1.0, terabytes=1.0),
        micro_batches=micro_batches,
    )
    return {peak.way: peak.above for peak in plan(job).peaks}


def in_a_process(arguments: argparse.Namespace, model: str, micro_batches: int, variant: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--dtype", arguments.dtype, "--micro-batches", str(micro_batches)]
    command += ["--one", model, variant]
    run = subprocess.run(command, env={**os.environ, **GIVES_BACK}, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{model}, {variant}:\n{run.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def say(arguments: argparse.Namespace, model: str, micro_batches: int) -> None:
    variants = SINGLE if micro_batches == 1 else SEVERAL
    found = {name: in_a_process(arguments, model, micro_batches, name) for name in variants}
    first = next(iter(found.values()))
    predicted = planned(arguments, model, micro_batches)
    title = "one batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    print(f"\n{model}, {arguments.dtype}, {first['weights'] / MIB:.0f} MiB of weights, {title}\n")
    print("| | weights after three steps | MiB above weights and state | `instep plan` |\n|---|---|---|---|")
    for name, (words, _) in variants.items():
        same = "plain's, bit for bit" if found[name]["digest"] == first["digest"] else "others"
        same = "not trained" if name == "no step" else same
        said = f"{predicted[WAYS[name]] / MIB:.0f}" if name in WAYS else ""
        print(f"| {words} | {same} | {found[name]['above'] / MIB:.0f} | {said} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "VARIANT"), help="that one, in this process, as JSON")
    arguments = parser.parse_args()
    if sys.platform != "linux":
        sys.exit("memory.py reads /proc/self/status, which Linux has")
    torch.set_num_threads(1)
    made = models(getattr(torch, arguments.dtype), arguments.micro_batches)
    if arguments.one is not None:
        model, variant = arguments.one
        variants = SINGLE if arguments.micro_batches == 1 else SEVERAL
        print(json.dumps(measured(made[model], variants[variant][1])))
        return
    print(f"AdamW(lr={OPTIONS['lr']}, fused=True), resident memory, a process for each line")
    for model in made:
        say(arguments, model, 1)
        say(arguments, model, arguments.micro_batches)


if __name__ == "__main__":
    main()
