"""What ``peers.py --memory`` and ``--speed`` print: bytes and time of each way to step in backward, on one device."""

import gc
from collections.abc import Callable, Sequence

import torch
from measure import ratio
from one_device import PEERS, PLAIN, SIZES, Model, Plain, gpt, processor_times

from instep.buckets import MIB
from instep_tools.harness import LiveBytes
from instep_tools.training import Shape

ROWS = {
    PLAIN: "plain, `AdamW(fused=True)`",
    "plain, again": "plain, again",
    "plain, foreach": "plain, `AdamW(foreach=True)`",
    "default": "`instep.attach(model, optimizer)`",
    "backward": '`instep.attach(…, schedule="backward")`',
    "buckets of 4 MiB": "… and `bucket_bytes=4 * 2**20`",
    "torch in backward, fused": "torch's `_apply_optimizer_in_backward`, fused",
    "torchtune, fused": "torchtune's wrapper, fused",
    "optimi gradient release": "optimi's gradient release",
    "LOMO (gradient descent)": "LOMO (gradient descent, which has no state)",
    "no optimizer": "no optimizer",
}
STEPS = 3


def ways() -> dict[str, Callable[[Model], Plain]]:
    found = {**PEERS, **SIZES}
    return {name: found[name] for name in ROWS if name in found}


def model_of(depth: int, width: int) -> Model:
    """A batch so small that gradients, and not activations, make the peak."""
    return gpt("GPT in float32", torch.float32, Shape(width, depth, heads=8), rows=1, tokens=16)


def weights_of(model: Model, make: Callable[[Model], Plain]) -> list[torch.Tensor]:
    loop = make(model)
    for _, tokens in zip(range(STEPS), model.batches(), strict=False):
        loop.step(tokens)
        loop.drain()
    return [p.detach() for p in loop.model.parameters()]


def bytes_of(model: Model, make: Callable[[Model], Plain]) -> tuple[int, int]:
    """Of weights and optimizer state between two steps, and how many more there are at the peak of a step."""
    tokens = next(model.batches())
    with LiveBytes([tokens]) as live:
        loop = make(model)
        for _ in range(STEPS):
            loop.step(tokens)
            loop.drain()
        gc.collect()
        kept = live.now
        live.reset()
        loop.step(tokens)
        loop.drain()
        return kept, live.peak - kept


def say(model: Model, *, memory: bool, speed: bool, rounds: int) -> None:
    """A Markdown table. Variants that update as the plain loop does are compared with the plain loop first."""
    variants = ways()
    oracle = weights_of(model, Plain)
    times = processor_times(model, variants, rounds) if speed else {}
    columns = ["weights after three steps"]
    columns += ["weights and state, MiB", "more at the peak, MiB"] if memory else []
    columns += ["processor time, plain / this"] if speed else []
    print(f"| {sum(p.numel() for p in oracle) / 1e6:.0f} M parameters | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}", flush=True)
    for name, make in variants.items():
        cells: list[str] = [_compared(oracle, weights_of(model, make))]
        cells += [f"{nbytes / MIB:.1f}" for nbytes in (bytes_of(model, make) if memory else ())]
        cells += [str(ratio(times[PLAIN], times[name]))] if speed else []
        print(f"| {ROWS[name]} | {' | '.join(cells)} |", flush=True)


def _compared(oracle: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str:
    return "plain's, bit for bit" if all(map(torch.equal, oracle, found)) else "others"
