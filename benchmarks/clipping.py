"""What does clipping by the global norm cost in time and memory, in each way that instep knows?

    python benchmarks/clipping.py
    python benchmarks/clipping.py --mib 64 --rows 16 --rounds 15

A GPT on bytes, on one device and one thread, AdamW(fused=True), in two jobs: one in which the norm never reaches the
bound, and one in which every step clips. The plain loop calls ``clip_grad_norm_``; all other loops have ``clip=``. They
train on the same batches; after 45 steps weights and state of all must be equal, bit for bit, or nothing is printed.
Then they are timed in turn, round by round, in processor time; the plain loop runs a second time, to show what is
chance.

Memory is counted in a step of 16 tokens, so that gradients make the peak: all tensors that are alive, less weights and
state. With ``undo`` that counts the copies, wherever they are: on a CPU ``undo="host"`` has no other place for them.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from default_bucket import MIB, SHAPES
from measure import SETTLED, batches, loss_of, processor_times, ratio, require_equal
from torch import nn

import instep
from instep_tools.harness import LiveBytes
from instep_tools.training import ByteGPT, Shape

JOBS = {"never clips": 1e6, "every step clips": 1e-3}
"""The bound of the norm."""
PLAIN, AGAIN = "plain", "plain again"
WAYS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "default": {},
    "backward, undo": {"schedule": "backward", "undo": True},
    "backward, two_pass": {"schedule": "backward", "mode": "two_pass"},
    AGAIN: None,
}


class Loop:
    def __init__(self, shape: Shape, bound: float, options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = ByteGPT(shape)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.overlap: instep.Attachment | None = None
        self._bound = bound
        self._passes = 1
        if options is not None:
            given = dict(options)
            mode = given.pop("mode", "exact")
            self._passes = 2 if mode == "two_pass" else 1
            given["clip"] = instep.ClipNorm(bound, mode=mode)
            self.overlap = instep.attach(self.model, self.optimizer, **given)

    def step(self, tokens: torch.Tensor) -> None:
        loss = loss_of(self.model, tokens)
        if self.overlap is not None and self._passes == 2:
            self.overlap.backward(loss)
        else:
            loss.backward()
        if self.overlap is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._bound)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        if self.overlap is not None:
            self.overlap.synchronize()

    def own_bytes(self) -> int:
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *state))


def peak(shape: Shape, bound: float, options: dict[str, Any] | None) -> float:
    """The most MiB there were in a step, less weights and optimizer state."""
    few: Iterator[torch.Tensor] = batches(1, 16)
    with LiveBytes() as live:
        loop = Loop(shape, bound, options)
        for _ in range(6):
            loop.step(next(few))
        live.reset()
        loop.step(next(few))
        loop.drain()
        bytes_at_peak: int = live.peak
        return (bytes_at_peak - loop.own_bytes()) / MIB


def table(job: str, shape: Shape, rows: int, rounds: int) -> None:
    bound = JOBS[job]
    loops = {name: Loop(shape, bound, options) for name, options in WAYS.items()}
    few: Iterator[torch.Tensor] = batches(1, 16)
    for _ in range(SETTLED):
        batch = next(few)
        for loop in loops.values():
            loop.step(batch)
            loop.drain()
    require_equal(loops, PLAIN)
    seconds = processor_times(loops, batches(rows, 64), rounds)
    redone = {name: loop.overlap.redo_count if loop.overlap is not None else 0 for name, loop in loops.items()}
    steps = rounds + SETTLED
    loops.clear()
    print(
        f"{job}, {rows} x 64 tokens; a step of the plain loop takes {1e3 * sorted(seconds[PLAIN])[rounds // 2]:.0f} ms"
    )
    print("\n| | time of plain / time | MiB in a step | steps done again |\n|---|---|---|---|")
    for name, options in WAYS.items():
        spread = "" if name == PLAIN else str(ratio(seconds[PLAIN], seconds[name]))
        again = f"{redone[name]} of {steps}" if redone[name] else ""
        print(f"| {name} | {spread} | {peak(shape, bound, options):.1f} | {again} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, choices=SHAPES, default=16, help="of gradients")
    parser.add_argument("--rows", type=int, default=8, help="of 64 tokens, in a timed step")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[arguments.mib]
    print("All loops are equal to the plain one, bit for bit.\n")
    for job in JOBS:
        table(job, shape, arguments.rows, arguments.rounds)


if __name__ == "__main__":
    main()
