"""Where should the step run on a CPU: as attach() does it, in the hook, or on a worker thread?

    python benchmarks/step_placement.py                                            # one device
    torchrun --standalone --nproc-per-node 2 benchmarks/step_placement.py          # two ranks, loopback

Every variant trains the same model on the same batches, step by step in turn. Before anything is printed all weights
are compared with those of the plain loop; then the ratio of the plain loop's time to each variant's is printed with its
spread, and beside it the bound: the same loop with no optimizer at all. One thread per rank unless told.
"""

import argparse
import contextlib
import os
import queue
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

# Under glibc's defaults the plain loop pays page faults for gradients that it frees and gets back each step, and the
# others do not: that is real for users, but it is no overlap. The settings act only on a fresh process.
KEEP_MEMORY = {name: str(1 << 30) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")}
if any(name not in os.environ for name in KEEP_MEMORY):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import instep  # noqa: E402
from instep._optim.stepper import Stepper  # noqa: E402
from instep.buckets import MIB, ParameterSpec, fill_buckets  # noqa: E402
from instep.comm_hooks import mean_allreduce  # noqa: E402
from instep_tools.harness import first_difference, training_state  # noqa: E402
from instep_tools.training import CONTEXT, ByteGPT, Shape  # noqa: E402

ROWS = 2


class Loop:
    """The plain loop; ``optimize=False`` leaves the optimizer out."""

    def __init__(self, shape: Shape, bucket_mib: float, optimize: bool = True) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = ByteGPT(shape)
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.optimize = optimize
        self.bucket_bytes = int(bucket_mib * MIB)

    def step(self, tokens: torch.Tensor) -> None:
        logits = self.model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.end()

    def end(self) -> None:
        if self.optimize:
            self.optimizer.step()
        self.optimizer.zero_grad()


class Attached(Loop):
    """The library as it is: in the hook, or, with ``defer``, on its worker beside backward."""

    def __init__(self, shape: Shape, bucket_mib: float, *, defer: bool = False) -> None:
        super().__init__(shape, bucket_mib)
        instep.attach(
            self.model,
            self.optimizer,
            bucket_bytes=None if dist.is_initialized() else self.bucket_bytes,
            schedule="backward",
            defer=defer,
        )


class InCallback(Loop):
    """Steps a bucket as soon as it is there: in the gradient hook, or on the thread that completes the reduction."""

    def __init__(self, shape: Shape, bucket_mib: float) -> None:
        super().__init__(shape, bucket_mib)
        self.stepper = Stepper(self.optimizer)
        if isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(self, _reduce)
        else:
            self._hook_parameters()

    def update(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.stepper.step(parameters)
        for parameter in parameters:
            parameter.grad = None

    def end(self) -> None:
        self.stepper.commit()
        self.optimizer.zero_grad()

    def _hook_parameters(self) -> None:
        parameters = list(self.model.parameters())
        specs = [ParameterSpec(i, "", p.shape, p.dtype, p.device, p.nbytes) for i, p in enumerate(parameters)]
        for bucket in fill_buckets("local", reversed(specs), self.bucket_bytes):
            members: list[torch.Tensor] = [parameters[spec.index] for spec in bucket.parameters]
            hook = partial(self._arrived, members, [])
            for parameter in members:
                parameter.register_post_accumulate_grad_hook(hook)

    def _arrived(self, members: list[torch.Tensor], there: list[torch.Tensor], parameter: torch.Tensor) -> None:
        there.append(parameter)
        if len(there) == len(members):
            there.clear()
            self.update(members, [member.grad for member in members if member.grad is not None])


class OnWorker(InCallback):
    """Hands each bucket to one worker thread, and waits for it at the end of the step."""

    def __init__(self, shape: Shape, bucket_mib: float) -> None:
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()
        super().__init__(shape, bucket_mib)

    def _run(self) -> None:
        while True:
            self.work.get()()

    def update(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        self.work.put(lambda: InCallback.update(self, parameters, gradients))

    def end(self) -> None:
        done = threading.Event()
        self.work.put(done.set)
        done.wait()
        super().end()


def _reduce(loop: InCallback, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    parameters, gradients = bucket.parameters(), bucket.gradients()
    assert dist.group.WORLD is not None
    future = mean_allreduce(bucket.buffer(), dist.group.WORLD, dist.get_world_size())

    def step(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        loop.update(parameters, gradients)
        return done.value()

    return future.then(step)


VARIANTS: dict[str, Callable[..., Loop]] = {
    "plain": Loop,
    "attach": Attached,
    "beside": partial(Attached, defer=True),
    "callback": InCallback,
    "worker": OnWorker,
    "no optimizer": partial(Loop, optimize=False),
}


def batches(rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(0, 256, (ROWS, CONTEXT + 1), generator=generator)


def measure(shape: Shape, bucket_mib: float, rounds: int, rank: int) -> dict[str, list[float]]:
    """Seconds of each round, per variant; the first two rounds, in which DDP makes its buckets, are left out."""
    loops = {name: make(shape, bucket_mib) for name, make in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number, tokens in zip(range(rounds + 2), batches(rank), strict=False):
        names = list(loops)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if dist.is_initialized():
                dist.barrier()
            started = perf_counter()
            loops[name].step(tokens)
            if number >= 2:
                seconds[name].append(perf_counter() - started)
    for name, loop in loops.items():
        if loop.optimize:
            plain = training_state(loops["plain"].model, loops["plain"].optimizer)
            difference = first_difference(plain, training_state(loop.model, loop.optimizer))
            if difference is not None and name in ("attach", "beside"):
                raise SystemExit(f"not equal: {difference}")
            if difference is not None:
                print(f"  {name} is not equal to the plain loop: {difference}")
    return seconds


def report(seconds: dict[str, list[float]]) -> None:
    for name, times in seconds.items():
        ratios = sorted(plain / time for plain, time in zip(seconds["plain"], times, strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        median = statistics.median(ratios)
        print(f"  {name:14} {1e3 * statistics.median(times):8.1f} ms   {median:.3f} [{low:.3f}, {high:.3f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bucket-mib", type=float, nargs="+", default=[0.1, 1.0, 4.0, 16.0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    shape = Shape(options.width, options.depth, 6)
    size = sum(p.nbytes for p in ByteGPT(shape).parameters()) / MIB
    for bucket_mib in options.bucket_mib:
        quiet: Any = contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(None)
        with quiet:
            print(f"{size:.0f} MiB of gradients, buckets of {bucket_mib} MiB: plain / variant, median [p10, p90]")
            report(measure(shape, bucket_mib, options.rounds, rank))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
