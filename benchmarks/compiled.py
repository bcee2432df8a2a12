"""A GPT that torch.compile has compiled as a whole: memory and time of a step, on one core.

    python benchmarks/compiled.py
    python benchmarks/compiled.py --blocks 6 --rounds 60
    python benchmarks/compiled.py --blocks 6 --clip

Blocks of width 256, 16 tokens, float32, AdamW fused: plain, by hand and with instep. *By hand* each block is compiled
by itself, and a hook of each parameter steps it with an optimizer of its own: what a loop can do without a change to
compiled code, at the price of other code. All other loops train to the same weights and state, which are compared
before and after they are timed, bit for bit. The peak is that of torch's allocator in a step, above what it has between
steps: the profiler tells, in a step that is not timed. Times are of the processor, as ratios to the plain loop's; above
1 is faster. With ``--clip`` the norm of all gradients is clipped, by instep in two passes. Compilations are counted,
and their seconds are those of the first three steps: less where a run before has left compiled code on the disk.
"""

import argparse
import os
import types
from collections.abc import Iterator
from itertools import accumulate
from time import process_time
from typing import Any

import torch
from measure import processor_times, ratio, require_equal
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn import functional

import instep

PLAIN, BY_HAND, ATTACHED, AGAIN = "plain", "by hand", "instep", "plain again"
MIB = 1 << 20
MOST = 0.1
"""The norm to which gradients are clipped: each step is."""
WIDTH, HEADS, SYMBOLS, TOKENS = 256, 4, 1024, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before_attention(x)).chunk(3, -1)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        found: torch.Tensor = x + self.down(functional.gelu(self.up(self.before_mlp(x))))
        return found


class GPT(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def with_code_of_its_own(module: nn.Module, name: str) -> None:
    """torch runs what it has compiled for one module in all of the same class."""
    made: Any = module.forward
    function = made.__func__
    code = function.__code__.replace(co_name=f"forward_{name.replace(' ', '_')}")
    forward = types.FunctionType(code, function.__globals__, "forward", function.__defaults__, function.__closure__)
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


class Loop:
    """One variant of the training run."""

    def __init__(self, kind: str, depth: int, *, clips: bool) -> None:
        torch.manual_seed(0)
        self.clips = clips
        self.model: nn.Module = GPT(depth)
        with_code_of_its_own(self.model, kind)
        self.optimizer: torch.optim.Optimizer = adamw(list(self.model.parameters()))
        self.by_hand: dict[torch.Tensor, torch.optim.Optimizer] = {}
        self.overlap: instep.Attachment | None = None
        self.called: Any = self.model
        if kind == BY_HAND:
            for block in self.model.blocks:
                block.compile()
            self.by_hand = {p: adamw([p]) for p in self.model.parameters()}
            for parameter in self.model.parameters():
                parameter.register_post_accumulate_grad_hook(self.step_one)
            return
        self.called = torch.compile(self.model)
        if kind == ATTACHED:
            clip = instep.ClipNorm(MOST, mode="two_pass") if clips else None
            self.overlap = instep.attach(self.called, self.optimizer, schedule="backward", clip=clip)

    def step_one(self, parameter: torch.Tensor) -> None:
        self.by_hand[parameter].step()
        parameter.grad = None

    def step(self, batch: torch.Tensor) -> None:
        loss = self.called(batch)
        if self.clips and self.overlap is not None:
            self.overlap.backward(loss)
        else:
            loss.backward()
        if self.clips and self.overlap is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), MOST)
        if not self.by_hand:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def drain(self) -> None: ...


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(0, SYMBOLS, (1, TOKENS), generator=generator)


def peak(loop: Loop, batch: torch.Tensor) -> float:
    """In MiB."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loop.step(batch)
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    found: int = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return found / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 12, 24])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--clip", action="store_true", help="clip the norm of all gradients")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # no worker has a core of its own
    if arguments.clip:  # as docs/clipping.md says of compiled code that runs twice
        functorch_config.donated_buffer, inductor_config.force_disable_caches = False, True
    print("| | peak, MiB | time | graphs, recompiled | seconds to compile |\n|---|---|---|---|---|")
    for depth in arguments.blocks:
        loops, compiled, tokens = dict[str, Loop](), dict[str, tuple[int, int, float]](), batches()
        first = [next(tokens) for _ in range(6)]
        for kind in (PLAIN, ATTACHED, AGAIN) if arguments.clip else (PLAIN, BY_HAND, ATTACHED, AGAIN):  # each alone
            torch._dynamo.utils.counters.clear()
            loops[kind], started = Loop(kind, depth, clips=arguments.clip), process_time()
            for batch in first[:3]:
                loops[kind].step(batch)
            seconds = process_time() - started
            for batch in first[3:]:
                loops[kind].step(batch)
            compiled[kind] = counters["stats"]["unique_graphs"], sum(counters["recompiles"].values()), seconds
        require_equal(loops, PLAIN, but=[BY_HAND])
        peaks = {kind: peak(loop, first[0]) for kind, loop in loops.items()}
        times = processor_times(loops, tokens, arguments.rounds)
        require_equal(loops, PLAIN, but=[BY_HAND])
        for kind in loops:
            graphs, again, seconds = compiled[kind]
            speed = "" if kind == PLAIN else str(ratio(times[PLAIN], times[kind]))
            name = f"{depth} blocks, {kind}"
            print(f"| {name} | {peaks[kind]:.2f} | {speed} | {graphs}, {again} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
