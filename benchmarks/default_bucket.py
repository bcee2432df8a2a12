"""How much does ``schedule="backward"`` save with the bucket that it takes by itself, and what does it cost in time?

    python benchmarks/default_bucket.py                      # models of 1 to 256 MiB of gradients
    python benchmarks/default_bucket.py --mib 1000 --rounds 6
    python benchmarks/default_bucket.py --dtype bfloat16 --rows 16

GPTs on bytes, on one device and one thread, AdamW(fused=True). For each size four loops train on the same batches: the
plain one, one that is attached without ``bucket_bytes``, one that frees each gradient in its own hook
(``bucket_bytes=1``), and the plain one again. After three steps weights and state of all must be equal, bit for bit, or
nothing is printed. They are timed in turn, round by round, in processor time, once the attached ones have found out
whether updates beside backward pay.

Memory is counted in a step of 16 tokens, so that gradients make the peak: all tensors that are alive, less weights and
state. *saved* is the share of what freeing each gradient in its hook saves.
"""

import argparse
from collections.abc import Iterator

import torch
from measure import SETTLED, batches, loss_of, processor_times, ratio, require_equal
from torch import nn

import instep
from instep_tools.harness import LiveBytes
from instep_tools.training import ByteGPT, Shape

MIB = 1 << 20
SHAPES = {
    1: Shape(width=64, depth=4, heads=4),
    4: Shape(width=128, depth=5, heads=4),
    16: Shape(width=256, depth=5, heads=4),
    64: Shape(width=512, depth=5, heads=8),
    256: Shape(width=1024, depth=5, heads=8),
    1000: Shape(width=2048, depth=5, heads=16),
}
"""By about how many MiB of gradients they have in float32; in bfloat16 half as many."""
WAYS: dict[str, dict[str, int] | None] = {
    "plain": None,
    "default": {},
    "each": {"bucket_bytes": 1},
    "plain again": None,
}


class Loop:
    def __init__(self, shape: Shape, dtype: torch.dtype, options: dict[str, int] | None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = ByteGPT(shape).to(dtype)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.overlap = None
        if options is not None:
            given: dict[str, object] = {"schedule": "backward", **options}
            self.overlap = instep.attach(self.model, self.optimizer, **given)  # type: ignore[arg-type]

    def step(self, tokens: torch.Tensor) -> None:
        loss_of(self.model, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        """Nothing is put off."""

    def own_bytes(self) -> int:
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *state))


def peak(shape: Shape, dtype: torch.dtype, options: dict[str, int] | None) -> float:
    """The most MiB there were in a step, less weights and optimizer state."""
    few: Iterator[torch.Tensor] = batches(1, 16)
    with LiveBytes() as live:
        loop = Loop(shape, dtype, options)
        for _ in range(2):
            loop.step(next(few))
        live.reset()
        loop.step(next(few))
        bytes_at_peak: int = live.peak
        return (bytes_at_peak - loop.own_bytes()) / MIB


def row(mib: int, dtype: torch.dtype, rows: int, rounds: int, warm_up: int) -> str:
    shape = SHAPES[mib]
    loops = {name: Loop(shape, dtype, options) for name, options in WAYS.items()}
    tokens = batches(rows, 64)
    for _ in range(3):
        batch = next(tokens)
        for loop in loops.values():
            loop.step(batch)
    require_equal(loops, "plain")
    for _ in range(warm_up):
        batch = next(tokens)
        for loop in loops.values():
            loop.step(batch)
    buckets = len(loops["default"].overlap.plan.buckets) if loops["default"].overlap is not None else 0
    seconds = processor_times(loops, tokens, rounds)
    ratios = [str(ratio(seconds["plain"], seconds[name])) for name in WAYS if name != "plain"]
    milliseconds = 1e3 * sorted(seconds["plain"])[rounds // 2]
    gradients = sum(p.nbytes for p in loops["plain"].model.parameters()) / MIB
    loops.clear()
    all_of_it, default, each = (peak(shape, dtype, WAYS[name]) for name in ("plain", "default", "each"))
    saved = (all_of_it - default) / (all_of_it - each)
    cells = [f"{gradients:.1f}", str(buckets), f"{all_of_it:.1f}", f"{default:.1f}", f"{each:.1f}", f"{saved:.1%}"]
    return "| " + " | ".join([*cells, f"{milliseconds:.0f} ms", *ratios]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", choices=SHAPES, default=[1, 4, 16, 64, 256])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=8, help="of 64 tokens, in a timed step")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=SETTLED, help="steps that are not timed, after the first three")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{arguments.dtype}, {arguments.rows} x 64 tokens. All loops are equal to the plain one, bit for bit.\n")
    print("| gradients, MiB | buckets | plain, MiB | default | each | saved | plain | default | each | plain again |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for mib in arguments.mib:
        print(
            row(mib, getattr(torch, arguments.dtype), arguments.rows, arguments.rounds, arguments.warm_up), flush=True
        )


if __name__ == "__main__":
    main()
