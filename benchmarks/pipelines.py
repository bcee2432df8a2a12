"""What does instep hide in the bubbles of a pipeline, and what does it free there?

    python benchmarks/pipelines.py                                   # four ranks, four schedules
    python benchmarks/pipelines.py --ranks 2 --schedules ScheduleZBVZeroBubble --rounds 20

The ranks are processes on this machine, over gloo and loopback. All variants train the same stages on the same batches
with fused AdamW, an optimizer for each stage, as torchtitan has it. First parameters and optimizer state of all must be
equal to the plain loop's, bit for bit, on every rank, or nothing is printed; the norms, too. Then they train in turn,
and are compared again. The plain loop is the schedule followed by ``optimizer.step()``; the plain loop that clips takes
the norm of all stages by hand in between, as torchtitan does. The norm is one that is never reached.

The table: the time of an iteration; the ratio of the plain loop's time to it (of the one that clips, where the variant
clips), above 1 where a variant is faster, as median [p10, p90] of the rounds; and the *exposed step* of each rank:
milliseconds outside of ``schedule.step()`` in which the rank clips, steps, and waits for others to do so, median of all
steps. With ``default``, updates that were put off run in the next forward, and are not among them. Then the bytes of
gradients that a rank has freed before ``schedule.step()`` returned, and the order: after which of a rank's actions each
of its stages was stepped, and how many of its actions were left. ``4B7`` is the backward of stage 4 for micro-batch 7,
``I`` and ``W`` are the halves of one.

Where there are fewer cores than ranks there are no bubbles: while one rank waits, another has its core. Times then say
that nothing is lost, and little more. Bytes and order are the same on any machine.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import wait
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from measure import interleave, ratio, require_equal, spread
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import instep

SCHEDULES = {
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleGPipe": 1,
    "ScheduleLoopedBFS": 2,
    "ScheduleDualPipeV": 2,
}
"""With the stages of a rank."""
BY_DEFAULT = list(SCHEDULES)[:4]
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
NEVER = 1e9
"""A norm that no gradients reach."""
PROOF_STEPS, WARMUP = 3, 1
COLLECTIVE_SECONDS, ALL_SECONDS = 120, 1800
"""Before a rank that waits for another one gives up, and before all are ended."""
PLAIN, CLIPPED = "plain", "plain, clipped"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class LoggedStage(PipelineStage):
    """A stage that says what it has done.

    Attributes:
        log: to which it adds, once it is there.
    """

    log: list[str] | None = None

    def _note(self, kind: str, micro_batch: int) -> None:
        if self.log is not None:
            self.log.append(f"{self.stage_index}{kind}{micro_batch}")

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        found = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        self._note("F", fwd_chunk_id)
        return found

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        found = super().backward_one_chunk(bwd_chunk_id, *args, **options)
        self._note("B" if options.get("full_backward", True) else "I", bwd_chunk_id)
        return found

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        found = super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)
        self._note("W", bwd_chunk_id)
        return found


class Loop:
    """A rank's part of one variant.

    Args:
        attach: what instep is attached with; ``None``: it is not.
        clips: whether the loop itself clips.

    Attributes:
        norm: of the last step, if it was taken.
        exposed: by step, seconds from the end of ``schedule.step()`` to that of the last ``optimizer.step()``.
    """

    def __init__(
        self, schedule: str, options: argparse.Namespace, attach: Mapping[str, Any] | None = None, clips: bool = False
    ) -> None:
        torch.manual_seed(0)
        per_rank, rank = SCHEDULES[schedule], dist.get_rank()
        count = per_rank * options.ranks
        self.numbers = [rank, count - 1 - rank] if schedule in V_SHAPED else list(range(rank, count, options.ranks))
        whole = [nn.Sequential(*(Block(options.width) for _ in range(options.depth))) for _ in range(count)]
        modules = [whole[number] for number in self.numbers]
        self.model = nn.ModuleList(modules)
        device = torch.device("cpu")
        self.stages = [LoggedStage(m, n, count, device) for m, n in zip(modules, self.numbers, strict=True)]
        given: Any = self.stages if per_rank > 1 else self.stages[0]
        self.pipeline: Any = getattr(schedules, schedule)(given, options.micro_batches, loss_fn=nn.functional.mse_loss)
        self.optimizer = [torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True) for module in modules]
        self.overlap: Any = None
        if attach is not None:
            self.overlap = instep.attach(modules, self.optimizer, pipeline=self.pipeline, **attach)
        self.clips = clips
        self.norm: torch.Tensor | None = None
        self.exposed: list[float] = []

    def step(self, x: torch.Tensor) -> None:
        self.run(x)
        started = perf_counter()
        if self.clips:
            self.norm = clip_over_stages(list(self.model.parameters()))
        for optimizer in self.optimizer:
            optimizer.step()
        self.exposed.append(perf_counter() - started)
        for optimizer in self.optimizer:
            optimizer.zero_grad()
        if self.overlap is not None:
            self.norm = self.overlap.grad_norm

    def run(self, x: torch.Tensor) -> None:
        given = [x] if 0 in self.numbers else []
        is_last = self.stages[0].num_stages - 1 in self.numbers
        self.pipeline.step(*given, **({"target": x.roll(1, 1)} if is_last else {}), return_outputs=False)

    def drain(self) -> None:
        if self.overlap is not None:
            self.overlap.synchronize()

    def order(self, x: torch.Tensor) -> list[str]:
        """After which action each stage was stepped in one more step, and how many of its rank's were left."""
        log: list[str] = []
        for stage in self.stages:
            stage.log = log
        if self.overlap is None:
            hooks = [
                optimizer.register_step_post_hook(lambda *_, number=number: log.append(f"step {number}"))
                for number, optimizer in zip(self.numbers, self.optimizer, strict=True)
            ]
            self.step(x)
            for hook in hooks:
                hook.remove()
        else:
            self.overlap.recorder = lambda kind, names, *_: log.extend(self._stepped(names) if kind == "step" else [])
            self.step(x)
            self.drain()
            self.overlap.recorder = None
            # With "default" nobody is told of a step that is left to torch, in ``optimizer.step()``.
            log += [f"step {number}" for number in self.numbers if f"step {number}" not in log]
        for stage in self.stages:
            stage.log = None
        return list(_places(log, self.numbers))

    def _stepped(self, names: Sequence[str]) -> list[str]:
        """``names``: ``"1.0.up.weight"`` is a parameter of this rank's second stage, if it has several."""
        several = len(self.numbers) > 1
        return sorted({f"step {self.numbers[int(name.split('.')[0]) if several else 0]}" for name in names})


def _places(log: Sequence[str], numbers: Sequence[int]) -> Iterator[str]:
    for number in numbers:
        last = max(place for place, entry in enumerate(log) if entry == f"step {number}")
        before = [entry for entry in log[:last] if not entry.startswith("step")]
        left = sum(not entry.startswith("step") for entry in log[last:])
        yield f"{number} after {before[-1]}" + (f" ({left} left)" if left else "")


def clip_over_stages(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """As torchtitan's loop clips by the norm of all stages."""
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    total **= 2.0
    dist.all_reduce(total)
    total **= 0.5
    torch.nn.utils.clip_grads_with_norm_(parameters, NEVER, total)
    return total


Make = Callable[[str, argparse.Namespace], Loop]


def attached(**attach: Any) -> Make:
    return lambda schedule, options: Loop(schedule, options, attach)


def clipping_by_hand(schedule: str, options: argparse.Namespace) -> Loop:
    return Loop(schedule, options, clips=True)


VARIANTS: dict[str, Make] = {
    PLAIN: Loop,
    "plain, again": Loop,
    "backward": attached(schedule="backward"),
    CLIPPED: clipping_by_hand,
    "plain, clipped, again": clipping_by_hand,
    "undo, clipped": attached(schedule="backward", undo=True, clip=instep.ClipNorm(NEVER)),
    "default, clipped": attached(clip=instep.ClipNorm(NEVER)),
}


def data(options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """The batches, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(options.rows * options.micro_batches, options.width, generator=generator)


def require_equal_norms(loops: Mapping[str, Loop]) -> None:
    """Exit unless all that clip have found the same norm."""
    expected = loops[CLIPPED].norm
    assert expected is not None
    for name, loop in loops.items():
        if "clipped" in name and (loop.norm is None or not torch.equal(expected, loop.norm)):
            raise SystemExit(f"{name} has the norm {loop.norm}, and {CLIPPED} {expected}")


def rank_main(rank: int, directory: str, options: argparse.Namespace) -> None:
    """One of the ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    for schedule in options.schedules:
        measure(schedule, options)
    dist.barrier()
    dist.destroy_process_group()


def measure(schedule: str, options: argparse.Namespace) -> None:
    loops = {name: make(schedule, options) for name, make in VARIANTS.items()}
    batches = data(options)
    for _ in range(PROOF_STEPS):
        x = next(batches)
        for loop in loops.values():
            loop.step(x)
            loop.drain()
        require_equal(_any(loops), PLAIN)
        require_equal_norms(loops)
    freed = {name: loop.overlap.stats()["freed_bytes"] for name, loop in loops.items() if loop.overlap is not None}
    for loop in loops.values():
        loop.exposed.clear()
    times = interleave(_any(loops), batches, options.rounds, steps=options.steps, warmup=WARMUP)
    exposed = {name: statistics.median(loop.exposed[WARMUP * options.steps :]) for name, loop in loops.items()}
    x = next(batches)
    orders = {name: loop.order(x) for name, loop in loops.items()}
    require_equal(_any(loops), PLAIN)
    redone = [name for name, loop in loops.items() if loop.overlap is not None and loop.overlap.redo_count]
    if redone:
        raise SystemExit(f"a step was done again, and none had to be: {redone}")
    of_ranks: list[Any] = [None] * options.ranks
    mine = {"exposed": exposed, "freed": freed, "order": orders, "gradients": _bytes(loops[PLAIN])}
    dist.all_gather_object(of_ranks, mine)
    if dist.get_rank() == 0:
        say(schedule, options, times.seconds, of_ranks)


def _any(loops: Mapping[str, Loop]) -> dict[str, Any]:
    """``optimizer`` is several here."""
    return dict(loops)


def _bytes(loop: Loop) -> int:
    return sum(p.numel() * p.element_size() for p in loop.model.parameters())


def say(
    schedule: str,
    options: argparse.Namespace,
    seconds: Mapping[str, Sequence[float]],
    of_ranks: Sequence[Mapping[str, Any]],
) -> None:
    print(
        f"\n{schedule}: {options.ranks} ranks, {SCHEDULES[schedule]} of {SCHEDULES[schedule] * options.ranks} stages "
        f"each, {options.micro_batches} micro-batches, {len(seconds[PLAIN])} rounds of {options.steps}"
    )
    print(f"  {'':22} {'iteration':>11}   {'ratio':22} exposed step of each rank, ms")
    for name, times in seconds.items():
        base = seconds[CLIPPED if "clipped" in name else PLAIN]
        exposed = "  ".join(f"{1e3 * found['exposed'][name]:7.2f}" for found in of_ranks)
        print(f"  {name:22} {1e3 * spread(times).median:8.1f} ms   {ratio(base, times)!s:22} {exposed}")
    print(f"  gradients of a rank: {_mib(found['gradients'] for found in of_ranks)}; freed in the run of an iteration:")
    for name in of_ranks[0]["freed"]:
        print(f"    {name:20} {_mib(found['freed'][name] / PROOF_STEPS for found in of_ranks)}")
    print("  stepped:")
    for name in [PLAIN, *of_ranks[0]["freed"]]:
        orders = " | ".join(", ".join(found["order"][name]) for found in of_ranks)
        print(f"    {name:20} {orders}", flush=True)


def _mib(values: Iterator[float]) -> str:
    return "  ".join(f"{value / (1 << 20):.2f}" for value in values) + " MiB"


def run_ranks(options: argparse.Namespace) -> None:
    """Start the ranks, and wait for them. Rank 0 prints.

    Raises:
        SystemExit: a rank failed, or took too long. What it has to say is on standard error.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    context = multiprocessing.get_context("fork")  # torch has run nothing yet, and its import takes seconds
    with tempfile.TemporaryDirectory(prefix="instep-pipelines-") as directory, ExitStack() as stack:
        ranks = [context.Process(target=rank_main, args=(n, directory, options)) for n in range(options.ranks)]
        for process in ranks:
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        last, left = time.monotonic() + ALL_SECONDS, list(ranks)
        while left and time.monotonic() < last:
            wait([process.sentinel for process in left], 1.0)
            left = [process for process in left if process.is_alive()]
            if any(process.exitcode for process in ranks):
                last = min(last, time.monotonic() + 5)  # the others may be waiting for it
        codes = [process.exitcode for process in ranks]
    if any(codes) or None in codes:
        raise SystemExit(f"the ranks have ended with {codes}; None: one was still running, and was killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=BY_DEFAULT)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of each variant in a round")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2, help="blocks of a stage")
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{options.ranks} ranks over gloo and loopback, on {cores} cores, torch {torch.__version__}")
    if cores < options.ranks:
        print("Fewer cores than ranks: there are no bubbles, so that times say little. Bytes and order are exact.")
    print(
        "Parameters, optimizer state and norms of all variants must be equal to the plain loop's, bit for bit.",
        flush=True,
    )
    run_ranks(options)


if __name__ == "__main__":
    main()
