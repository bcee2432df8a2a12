"""One way of ``memory.py``, trained and measured in a process of its own."""

import argparse
import gc
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ["INSTEP_BENCHMARK_MALLOC"] = "as it is"  # of measure.py, which would keep memory
sys.path.append(str(Path(__file__).parents[1]))  # of the tests, which have the emulated accelerator

import torch
import torch.distributed as dist
from memory_ways import PARTS, SETTINGS, models
from one_device import Model, Plain
from torch import nn

from instep_tools.harness import LiveBytes
from instep_tools.planning.rehearse import inside

STEPS = 3
Found = dict[str, Any]


def status(entry: str) -> int:
    """Bytes that the system tells of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(entry + ":"))


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def own_bytes(loop: Plain) -> int:
    """Of weights and optimizer state, of this rank."""
    optimizers = [loop.optimizer, *getattr(loop, "each", {}).values()]
    entries = [entry for optimizer in optimizers for entry in optimizer.state.values()]
    state = [value for entry in entries for value in entry.values() if torch.is_tensor(value)]
    return sum(local(tensor).nbytes for tensor in [*loop.model.parameters(), *loop.model.buffers(), *state])


def train(loop: Plain, model: Model) -> None:
    for _, batch in zip(range(STEPS), model.batches(), strict=False):
        loop.step(batch)
        loop.drain()


def trained(model: Model, make: Callable[[Model], Plain]) -> tuple[Plain, Found]:
    """With a digest of the weights after three steps, and how large weights and the largest bucket are."""
    loop = make(model)
    train(loop, model)
    digest = hashlib.sha256()
    for p in loop.model.parameters():
        digest.update(local(p).cpu().flatten().view(torch.uint8).numpy().tobytes())
    found: Found = {"digest": digest.hexdigest(), "weights": sum(local(p).nbytes for p in loop.model.parameters())}
    if loop.overlap is not None:
        sizes = [sum(spec.nbytes for spec in bucket.parameters) for bucket in loop.overlap.plan.buckets]
        found["bucket"] = max(sizes)
    gc.collect()
    return loop, found


def measured(model: Model, make: Callable[[Model], Plain], warm_up: Model | None) -> Found:
    """What ``trained()`` finds, and bytes that more steps take.

    Args:
        warm_up: trained first, so that memory between steps is that of this model alone, and is counted too: DDP's
            buckets. ``None``: what there is between steps is taken off.
    """
    before = 0
    if warm_up is not None:
        train(make(warm_up), warm_up)
        gc.collect()
        before = status("VmRSS")
    loop, found = trained(model, make)
    kept = status("VmRSS") if warm_up is None else before + own_bytes(loop)
    Path("/proc/self/clear_refs").write_text("5")  # the most is what there is now
    train(loop, model)
    return {**found, "above": status("VmHWM") - kept, "own": own_bytes(loop)}


class Activations(LiveBytes):
    """Everything but the parameters' gradients. Which storages were gradients is known only once they are there.

    Args:
        kernels: what kernels take inside counts too, where the system's memory is measured.
    """

    def __init__(self, loop: Plain, *, kernels: bool) -> None:
        super().__init__([*loop.model.parameters(), *loop.model.buffers()])
        self.kernels = kernels
        self.made: dict[int, int] = {}
        self.events: list[tuple[int, int]] = []
        self.gradients: set[int] = set()
        for p in loop.model.parameters():
            p.register_hook(lambda g: self.gradients.add(self.made.get(g.untyped_storage()._cdata, -2)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.kernels:
            size: int = inside(func, args, result)
            self.events += [(-1, size), (-1, -size)]
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._seen:
            self.made[storage._cdata] = len(self.events)  # addresses are used again, numbers are not
            self.events.append((len(self.events), storage.nbytes()))
        super()._count(storage)

    def _freed(self, key: int, size: int) -> None:
        self.events.append((self.made[key], -size))
        super()._freed(key, size)

    def most(self) -> int:
        changes: list[int] = [size for number, size in self.events if number not in self.gradients]
        return max(itertools.accumulate(changes), default=0)


def activations(model: Model, make: Callable[[Model], Plain], *, kernels: bool) -> int:
    """The most bytes of them in a step, of a way that drops gradients."""
    loop = make(model)
    live = Activations(loop, kernels=kernels)
    with live:
        loop.step(next(model.batches()))
    most: int = live.most()
    return most


# On an accelerator.


def no_accelerator() -> str | None:
    """The reason why there is neither CUDA nor an emulated accelerator, or None. Compiling the latter takes half a
    minute the first time."""
    if torch.cuda.is_available():
        return None
    from tests.accelerator.building import why_not

    return why_not()


@cache
def accelerator() -> str:
    """The device's type."""
    if torch.cuda.is_available():
        return "cuda"
    from tests.accelerator.device import load

    load()
    return "emu"


def on_device(model: Model) -> Model:
    device = accelerator()

    def make() -> nn.Module:
        return model.make().to(device)

    def batches() -> Iterator[torch.Tensor]:
        return (batch.to(device) for batch in model.batches())

    return replace(model, make=make, batches=batches)


def start_count() -> None:
    """From here on ``peak()`` counts."""
    torch.accelerator.synchronize()
    torch.get_device_module(accelerator()).reset_peak_memory_stats()


def peak() -> int:
    """The most bytes that the device's allocator has given out at a time."""
    torch.accelerator.synchronize()
    found: int = torch.get_device_module(accelerator()).max_memory_allocated()
    return found


def measured_on_device(model: Model, make: Callable[[Model], Plain]) -> Found:
    """As ``measured()``, with the bytes of the device above weights and buffers, optimizer state among them."""
    loop, found = trained(model, make)
    kept = sum(tensor.nbytes for tensor in [*loop.model.parameters(), *loop.model.buffers()])
    start_count()
    train(loop, model)
    return {**found, "above": peak() - kept}


# All of it.


def alone(arguments: argparse.Namespace) -> None:
    """One way, here; says what was found as JSON."""
    part, setting_name, model_name, way_name = arguments.one
    ranks, several, ways = PARTS[part]
    setting, way = SETTINGS[setting_name], ways[way_name]
    if ranks > 1:
        store = f"file://{arguments.store}"
        dist.init_process_group("gloo", init_method=store, rank=arguments.rank, world_size=ranks)
    rows = arguments.micro_batches if several else 1
    model = models(setting.dtype, rows)[model_name]
    warm_up = models(setting.dtype, rows, small=True)[model_name] if ranks > 1 else None

    def make(model: Model) -> Plain:
        return way.make(model, setting)

    if part == "device":
        model = on_device(model)
        found = {**measured_on_device(model, make), "device": accelerator()}
    else:
        found = measured(model, make, warm_up)
    if not way.oracle:
        found["activations"] = activations(model, make, kernels=part != "device")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    print(json.dumps(found))
