"""What does instep cost and save on one device?

    python benchmarks/one_device.py                    # 1,000 small tensors; a GPT in float32 and bfloat16
    python benchmarks/one_device.py --picture one_device.svg
    pip install torchtune torchao==0.15.0 lomo-optim   # peers that are left out where they are not installed

On one core, where nothing can be hidden: the question is what the bookkeeping costs, and what memory is saved for it.
Every variant trains the same model on the same batches, step by step in turn; weights and optimizer state must be equal
to those of the plain loop with fused AdamW, bit for bit, or nothing is printed. The first table: the processor time of
an iteration (a clock on the wall would be moved by the machine's other guests), and the ratio of the plain loop's to
it, below 1 where a variant costs time, as median [p10, p90] of the rounds. The second: the most bytes of tensors there
were in a step, less weights and optimizer state, counted as they are made and freed; and the share of the ideal saving
(all gradients, less the largest bucket) that is reached. ``long context`` is a case in which activations set the peak.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from time import perf_counter, process_time
from typing import Any

import torch
from measure import SETTLED, Spread, batches, loss_of, picture, picture_path, ratio, require_equal, spread
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import instep
from instep.buckets import MIB, ParameterSpec, fill_buckets
from instep.functional import apply_optimizer_in_backward
from instep.options import DEFAULT_BUCKET_BYTES
from instep_tools.harness import LiveBytes
from instep_tools.training import CONTEXT, ByteGPT, Shape

OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
PLAIN = "plain, fused"
BUCKETS_MIB = (0.25, 1.0, 4.0, 16.0, 64.0)


class Tensors(nn.Module):
    """Many small parameters, each used once."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.randn(size)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sum() for p in self.all]).sum()


class GPT(ByteGPT):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).float()


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        batches: makes the inputs.
        loss: of the model and one input.
    """

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[], Iterator[torch.Tensor]]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]


def small_inputs() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(1000, generator=generator)


def gpt(name: str, dtype: torch.dtype, shape: Shape, rows: int, tokens: int = CONTEXT) -> Model:
    return Model(name, lambda: GPT(shape).to(dtype), lambda: batches(rows, tokens), loss_of)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **OPTIONS)


class Plain:
    """The plain loop.

    Args:
        attach: what instep is attached with; ``None``: it is not.
    """

    def __init__(self, model: Model, attach: dict[str, Any] | None = None, optimizer: Any = None) -> None:
        torch.manual_seed(0)
        self.made = model
        self.model = model.make()
        self.optimizer = (optimizer or adamw)(self.model.parameters())
        self.overlap = None if attach is None else instep.attach(self.model, self.optimizer, **attach)

    def step(self, tokens: torch.Tensor) -> None:
        self.made.loss(self.model, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self) -> None:
        if self.overlap is not None:
            self.overlap.synchronize()


class NoOptimizer(Plain):
    def step(self, tokens: torch.Tensor) -> None:
        self.made.loss(self.model, tokens).backward()
        self.optimizer.zero_grad()


class EmptyHooks(Plain):
    """A hook that does nothing for each parameter: what any step in backward pays."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: None)


class NoChecks(Plain):
    """A bucket is stepped in the hook of its last gradient by an optimizer of its own, and nothing is looked at: not
    whether all gradients came, whether step() is called, or what was written in between."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        parameters = list(self.model.parameters())
        specs = [ParameterSpec(i, "", p.shape, p.dtype, p.device, p.nbytes) for i, p in enumerate(parameters)]
        for bucket in fill_buckets("local", reversed(specs), DEFAULT_BUCKET_BYTES):
            members = [parameters[spec.index] for spec in bucket.parameters]
            optimizer = torch.optim.AdamW(members, **OPTIONS)
            optimizer.state = self.optimizer.state  # to be compared
            hook = partial(self._arrived, optimizer, [], len(members))
            for parameter in members:
                parameter.register_post_accumulate_grad_hook(hook)

    @staticmethod
    def _arrived(optimizer: torch.optim.Optimizer, there: list[None], of: int, parameter: torch.Tensor) -> None:
        there.append(None)
        if len(there) == of:
            there.clear()
            optimizer.step()
            optimizer.zero_grad()

    def step(self, tokens: torch.Tensor) -> None:
        self.made.loss(self.model, tokens).backward()


class InBackward(Plain):
    """One optimizer per parameter, by torch's private function or instep's under the same name."""

    def __init__(
        self, model: Model, apply: Callable[..., None], kind: type = torch.optim.AdamW, **options: Any
    ) -> None:
        super().__init__(model)
        apply(kind, self.model.parameters(), options or OPTIONS)

    def step(self, tokens: torch.Tensor) -> None:
        self.made.loss(self.model, tokens).backward()


def optimi(model: Model) -> Plain:
    """optimi's gradient release: its own AdamW, so its weights are its own."""
    from optimi import AdamW, prepare_for_gradient_release

    class Released(Plain):
        def __init__(self) -> None:
            super().__init__(model, optimizer=lambda p: AdamW(p, lr=1e-4, gradient_release=True))
            prepare_for_gradient_release(self.model, self.optimizer)

        def step(self, tokens: torch.Tensor) -> None:
            self.made.loss(self.model, tokens).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    return Released()


class Torchtune(Plain):
    """torchtune's wrapper: one optimizer per parameter."""

    def __init__(self, model: Model, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        from torchtune.training import create_optim_in_bwd_wrapper, register_optim_in_bwd_hooks

        super().__init__(model, optimizer=make)
        self.each = each = {p: (make or adamw)([p]) for p in self.model.parameters()}
        register_optim_in_bwd_hooks(model=self.model, optim_dict=each)
        self.wrapper = create_optim_in_bwd_wrapper(model=self.model, optim_dict=each)

    def step(self, tokens: torch.Tensor) -> None:
        self.made.loss(self.model, tokens).backward()


class Lomo(Plain):
    """LOMO's update is plain gradient descent: less work than AdamW's, and no state."""

    def __init__(self, model: Model) -> None:
        from lomo_optim import Lomo

        super().__init__(model)
        self.fused = Lomo(self.model, lr=1e-4)

    def step(self, tokens: torch.Tensor) -> None:
        self.fused.fused_backward(self.made.loss(self.model, tokens), 1e-4)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)


def bucket(mib: float) -> Callable[[Model], Plain]:
    return lambda model: Plain(model, {"schedule": "backward", "bucket_bytes": int(mib * MIB)})


PEERS: dict[str, Callable[[Model], Plain]] = {
    PLAIN: Plain,
    "plain, again": Plain,  # how much of a difference is chance: where tensors happen to lie
    "plain, foreach": lambda model: Plain(model, optimizer=foreach),
    "backward": lambda model: Plain(model, {"schedule": "backward"}),
    "default": lambda model: Plain(model, {}),
    "forward": lambda model: Plain(model, {"schedule": "forward", "defer": True}),
    "empty hooks": EmptyHooks,
    "no checks": NoChecks,
    "instep, per parameter": lambda model: InBackward(model, apply_optimizer_in_backward),
    "torch in backward, fused": lambda model: InBackward(model, _apply_optimizer_in_backward),
    "torch in backward": lambda model: InBackward(model, _apply_optimizer_in_backward, lr=1e-4, fused=False),
    "optimi gradient release": optimi,
    "torchtune, fused": Torchtune,
    "LOMO (gradient descent)": Lomo,
    "no optimizer": NoOptimizer,
}
NEEDS = {"optimi gradient release": "optimi", "torchtune, fused": "torchtune", "LOMO (gradient descent)": "lomo_optim"}
PEERS = {name: make for name, make in PEERS.items() if name not in NEEDS or find_spec(NEEDS[name]) is not None}
SIZES = {f"buckets of {mib:g} MiB": bucket(mib) for mib in BUCKETS_MIB}
EQUAL = {PLAIN, "plain, again", "empty hooks", "no checks", "backward", "default", "forward", *SIZES}


def processor_times(model: Model, variants: dict[str, Callable[[Model], Plain]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, per variant: of processor time on one core, of the clock on the wall on several, where a
    step may run beside the loop."""
    alone = len(os.sched_getaffinity(0)) == 1
    clock, warm_up = (process_time, 3) if alone else (perf_counter, SETTLED)
    loops = {name: make(model) for name, make in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for number, tokens in zip(range(rounds + warm_up), model.batches(), strict=False):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = clock()
            loops[name].step(tokens)
            loops[name].drain()
            if number >= warm_up:
                seconds[name].append(clock() - started)
    require_equal(loops, PLAIN, [name for name in loops if name not in EQUAL])
    return seconds


def peak(model: Model, make: Callable[[Model], Plain]) -> tuple[int, int]:
    """The most bytes of tensors in a step, less weights and state; and bytes of all gradients."""
    loop = make(model)
    tokens = next(model.batches())
    loop.step(tokens)
    loop.drain()
    state = [value for entry in loop.optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    with LiveBytes([*loop.model.parameters(), *loop.model.buffers(), *state, tokens]) as live:
        for _ in range(2):
            loop.step(tokens)
            loop.drain()
        live.reset()
        loop.step(tokens)
        loop.drain()
    return live.peak, sum(p.nbytes for p in loop.model.parameters())


def say_times(title: str, seconds: dict[str, list[float]]) -> dict[str, Spread]:
    print(f"\n{title}: {'processor' if len(os.sched_getaffinity(0)) == 1 else 'wall'} time, plain / variant")
    found = {name: ratio(seconds[PLAIN], times) for name, times in seconds.items()}
    for name, one in found.items():
        print(f"  {name:28} {1e3 * spread(seconds[name]).median:8.1f} ms   {one}", flush=True)
    return found


def say_memory(model: Model) -> None:
    plain, gradients = peak(model, Plain)
    idle, _ = peak(model, NoOptimizer)
    print(f"\n{model.name}: peak above weights and state, {gradients / MIB:.1f} MiB of gradients")
    print(f"  {PLAIN:28} {plain / MIB:8.1f} MiB")
    print(f"  {'plain, foreach':28} {peak(model, PEERS['plain, foreach'])[0] / MIB:8.1f} MiB")
    for mib, (name, make) in zip(BUCKETS_MIB, SIZES.items(), strict=True):
        found, _ = peak(model, make)
        largest = min(max(mib * MIB, max(p.nbytes for p in model.make().parameters())), gradients)
        ideal = gradients - largest
        share = f"{100 * (plain - found) / ideal:5.0f}% of the ideal saving" if ideal else ""
        print(f"  {name:28} {found / MIB:8.1f} MiB   {share}", flush=True)
    print(f"  {'no optimizer':28} {idle / MIB:8.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--variants", nargs="+", choices=PEERS, default=list(PEERS), help="beside the plain loop")
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, help="of the GPT")
    parser.add_argument(
        "--cores", type=int, default=1, help="more than one: the clock on the wall, one thread in torch"
    )
    parser.add_argument("--times-only", action="store_true", help="no sizes of buckets, no memory")
    parser.add_argument("--picture", type=picture_path, help="draw the time and size of buckets there, as SVG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    shape = Shape(options.width, options.depth, heads=8)
    variants = {name: PEERS[name] for name in dict.fromkeys([PLAIN, *options.variants])}
    say_times(
        "1,000 tensors of 1,000 elements",
        processor_times(
            Model("small tensors", lambda: Tensors(1000, 1000), small_inputs, lambda m, x: m(x)),
            variants,
            options.rounds,
        ),
    )
    curves = {}
    for name in options.dtypes:
        dtype = getattr(torch, name)
        model = gpt(f"GPT in {name}", dtype, shape, rows=2)
        count = sum(p.numel() for p in model.make().parameters())
        say_times(f"{model.name}, {count / 1e6:.0f} M parameters", processor_times(model, variants, options.rounds))
        if options.times_only:
            continue
        sizes = processor_times(model, {PLAIN: Plain, **SIZES}, options.rounds)
        found = say_times(f"{model.name}, by size of bucket", sizes)
        curves[name] = {mib: found[size] for mib, size in zip(BUCKETS_MIB, SIZES, strict=True)}
        say_memory(gpt(model.name, dtype, shape, rows=1, tokens=16))
    if options.times_only:
        return
    say_memory(gpt("GPT in float32, long context", torch.float32, shape, rows=32))
    if options.picture:
        picture(options.picture, "One core, one device", curves, "bucket, MiB", "plain / instep, processor time")


if __name__ == "__main__":
    main()
