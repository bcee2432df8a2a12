"""What other ways to step in backward do with a real loop, each cell tried, as a Markdown table: ``peers.py``.

The oracle is the plain loop with the same optimizer. A cell says how a loop ended that does what the row says: with the
plain loop's weights and bit for bit (yes), with an error (raises), or with other weights and no word of it (wrong).
Columns of packages that are not installed are left out.
"""

import argparse
import datetime
import importlib.util
import io
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep

LR, STEPS, SECONDS, SEED = 1e-2, 4, 60, 1234
ADAMW: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
HAS_NONE = "has none"


class Loop:
    """The plain loop, and what each peer does otherwise."""

    optimizer: Any = None
    each: dict[torch.Tensor, Any]

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model: Any = model
        self.optimizer = self.make(model.parameters())

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **ADAMW, foreach=False)

    @classmethod
    def oracle(cls) -> "type[Loop]":
        """The plain loop that it is compared with."""
        return cls

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def more_to_come(self) -> AbstractContextManager[Any]:
        return nullcontext()


class Each(Loop):
    """One optimizer for each parameter, and neither step() nor zero_grad() in the loop."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.each = {p: self.make([p]) for p in model.parameters()}
        self.register()

    @classmethod
    def oracle(cls) -> type[Loop]:
        return Loop

    def register(self) -> None:
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(self._step)

    def _step(self, p: torch.Tensor) -> None:
        self.each[p].step()
        self.each[p].zero_grad()

    def finish(self) -> None:
        pass


class TorchVerb(Each):
    def register(self) -> None:
        from torch.distributed.optim import _apply_optimizer_in_backward

        made = self.make([torch.zeros(1, requires_grad=True)])
        kwargs = {name: value for name, value in made.defaults.items() if name in (*ADAMW, "foreach")}
        _apply_optimizer_in_backward(type(made), list(self.each), kwargs)
        self.each = {p: vars(p)["_in_backward_optimizers"][0] for p in self.each}


class TorchOverlapped(Each):
    """Under DDP alone."""

    def register(self) -> None:
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        _as_overlapped_optim(torch.optim.AdamW, None, **ADAMW).register_ddp(self.model)

    def finish(self) -> None:
        self.model.zero_grad()


class Torchtune(Each):
    def register(self) -> None:
        from torchtune.training import create_optim_in_bwd_wrapper, register_optim_in_bwd_hooks

        register_optim_in_bwd_hooks(model=self.model, optim_dict=self.each)
        self.wrapper = create_optim_in_bwd_wrapper(model=self.model, optim_dict=self.each)


class PlainOptimi(Loop):
    def make(self, parameters: Any, **options: Any) -> Any:
        import optimi

        return optimi.AdamW(parameters, **ADAMW, **options)


class Optimi(PlainOptimi):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        import optimi

        self.model = model
        self.optimizer = self.make(model.parameters(), gradient_release=True)
        optimi.prepare_for_gradient_release(model, self.optimizer)

    @classmethod
    def oracle(cls) -> type[Loop]:
        return PlainOptimi


class PlainSGD(Loop):
    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=LR, foreach=False)


class Lomo(Loop):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        import lomo_optim

        self.model = model
        self.optimizer = lomo_optim.Lomo(model, lr=LR, **options)

    @classmethod
    def oracle(cls) -> type[Loop]:
        return PlainSGD

    def backward(self, loss: torch.Tensor) -> None:
        if self.optimizer.clip_grad_norm is not None:
            self.optimizer.grad_norm(loss)
        self.optimizer.fused_backward(loss, self.optimizer.param_groups[0]["lr"])

    def finish(self) -> None:
        pass


class Instep(Loop):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model)
        self.overlap = instep.attach(model, self.optimizer, **{"schedule": "backward", **options})

    @classmethod
    def oracle(cls) -> type[Loop]:
        return Loop

    def backward(self, loss: torch.Tensor) -> None:
        self.overlap.backward(loss)

    def more_to_come(self) -> AbstractContextManager[Any]:
        return self.overlap.accumulate()


PEERS: dict[str, tuple[type[Loop], str]] = {
    "hooks by hand": (Each, "torch"),
    "torch, `_apply_optimizer_in_backward`": (TorchVerb, "torch"),
    "torch, `_as_overlapped_optim`": (TorchOverlapped, "torch"),
    "torchtune": (Torchtune, "torchtune"),
    "optimi": (Optimi, "optimi"),
    "LOMO": (Lomo, "lomo_optim"),
    "instep": (Instep, "torch"),
}


class OddError(Exception):
    """Raised by a model."""


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])


def loss_of(model: nn.Module, i: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    out: torch.Tensor = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * i + rank)))
    return out.square().mean()


# What a loop does. Each takes a loop and trains with it.


def simple(loop: Loop) -> None:
    for i in range(STEPS):
        loop.backward(loss_of(loop.model, i))
        loop.finish()


def clips(loop: Loop) -> None:
    for i in range(STEPS):
        loop.backward(loss_of(loop.model, i))
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
        loop.finish()


def accumulates(loop: Loop) -> None:
    for i in range(STEPS):
        loop.backward(loss_of(loop.model, 2 * i))
        loop.backward(loss_of(loop.model, 2 * i + 1))
        loop.finish()


def accumulates_its_way(loop: Loop) -> None:
    optimi = isinstance(loop, Optimi)
    for i in range(STEPS):
        if optimi:
            loop.optimizer.optimizer_accumulation = True
        with loop.more_to_come():
            loop.backward(loss_of(loop.model, 2 * i))
        if optimi:
            loop.optimizer.optimizer_accumulation = False
        loop.backward(loss_of(loop.model, 2 * i + 1))
        loop.finish()


def accumulates_in_no_sync(loop: Loop) -> None:
    for i in range(STEPS):
        with loop.model.no_sync():
            loop.backward(loss_of(loop.model, 2 * i))
        loop.backward(loss_of(loop.model, 2 * i + 1))
        loop.finish()


def scales(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i in range(STEPS):
        loop.backward(scaler.scale(loss_of(loop.model, i)))
        if loop.optimizer is not None:
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()


def schedules(loop: Loop) -> None:
    optimizers = [loop.optimizer] if loop.optimizer is not None else list(loop.each.values())
    for i in range(STEPS):
        loop.backward(loss_of(loop.model, i))
        loop.finish()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


def exchanges(loop: Loop) -> None:
    """Half of the steps with the loop, half with the plain one that takes over its checkpoint."""
    simple(loop)
    plain = loop.oracle()(new_model())
    plain.model.load_state_dict(loop.model.state_dict())
    wrapper = getattr(loop, "wrapper", None)
    state = loop.optimizer.state_dict() if wrapper is None else wrapper.state_dict()
    plain.optimizer.load_state_dict(state)
    simple(plain)
    loop.model = plain.model


def fails(loop: Loop) -> None:
    """An error in the middle of a backward, and the loop goes on: right if it is told, or nothing was written."""
    before = [p.detach().clone() for p in loop.model.parameters()]

    def stop(gradient: torch.Tensor) -> None:
        raise OddError

    # The second layer's output: the gradients of the last two layers are there by then.
    loop.model[1].register_forward_hook(lambda module, args, out: out.register_hook(stop) and None)
    loss = loss_of(loop.model, 0)
    with suppress(OddError):
        loop.backward(loss)
    for module in loop.model:
        module._forward_hooks.clear()
    if all(map(torch.equal, before, loop.model.parameters())):
        return
    loop.model(torch.zeros(1, 16))  # the next iteration


class Sign(torch.optim.Optimizer):
    """An optimizer of one's own."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class Noisy(Sign):
    """Draws for each parameter, one after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(torch.randn_like(p), alpha=group["lr"])


class Keyed(Loop):
    """The plain loop of ``random="keyed"``: an optimizer for each parameter, seeded with a key before its step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0
        self.each = {p: Noisy([p]) for p in model.parameters()}

    def finish(self) -> None:
        for name, p in self.model.named_parameters():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(instep.draw_key(SEED, self.steps, name))
                self.each[p].step()
            self.each[p].zero_grad()
        self.steps += 1


# How a row is tried.


def verdict(
    peer: type[Loop], train: Callable[[Loop], None], prepare: Callable[[nn.Module], nn.Module], **options: Any
) -> str:
    plain = peer.oracle()(prepare(new_model()))
    train(plain)
    try:
        loop = peer(prepare(new_model()), **options)
        train(loop)
        if isinstance(loop, Instep):
            loop.overlap.synchronize()
    except (Exception, SystemExit) as error:
        return f"raises `{type(error).__name__}`"
    return "yes" if equal(plain.model, loop.model) else "wrong"


def equal(a: nn.Module, b: nn.Module) -> bool:
    def whole(p: torch.Tensor) -> torch.Tensor:
        return p.full_tensor() if hasattr(p, "full_tensor") else p

    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all([torch.equal(whole(x.detach()), whole(y.detach())) for x, y in pairs])  # noqa: C419, collective


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def in_ddp_with_a_hook(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


def sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def own_optimizer(peer: type[Loop], kind: type[Sign] = Sign, plain: type[Loop] | None = None, **options: Any) -> str:
    class Own(peer):  # type: ignore[misc, valid-type]
        def make(self, parameters: Any, **options: Any) -> torch.optim.Optimizer:
            return kind(parameters)

        @classmethod
        def oracle(cls) -> type[Loop]:
            return plain or PlainOwn

    class PlainOwn(Loop):
        def make(self, parameters: Any) -> torch.optim.Optimizer:
            return kind(parameters)

    def seeded(loop: Loop) -> None:
        torch.manual_seed(SEED)
        simple(loop)

    return HAS_NONE if peer is Lomo else verdict(Own, seeded, as_it_is, **options)


def drawing_optimizer(peer: type[Loop]) -> str:
    found = own_optimizer(peer, Noisy)
    if peer is Instep:
        found += f'; `random="keyed"`: {own_optimizer(peer, Noisy, Keyed, random="keyed", seed=SEED)}'
    return found


def torn(peer: type[Loop]) -> str:
    """Not the oracle's question: whether a half-applied step goes unnoticed."""
    loop = peer(new_model(), bucket_bytes=1) if peer is Instep else peer(new_model())
    before = [p.detach().clone() for p in loop.model.parameters()]
    try:
        fails(loop)
    except instep.errors.TornStepError:
        return "says so"
    return "nothing written" if all(map(torch.equal, before, loop.model.parameters())) else "half applied, not said"


def clipping_of_its_own(peer: type[Loop]) -> str:
    if peer not in (Lomo, Instep):
        return HAS_NONE
    option = {"clip_grad_norm": 0.01} if peer is Lomo else {"clip": instep.ClipNorm(0.01, mode="two_pass")}
    plain = peer.oracle()(new_model())
    clips(plain)
    loop = peer(new_model(), **option)
    simple(loop)
    return "yes" if equal(plain.model, loop.model) else "wrong"


def with_a_hook(peer: type[Loop]) -> str:
    if peer is not Instep:
        return verdict(peer, simple, in_ddp_with_a_hook)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    plain = Loop(in_ddp_with_a_hook(new_model()))
    simple(plain)
    loop = Instep(in_ddp(new_model()), comm_hook=(None, fp16_compress_hook))
    simple(loop)
    return "yes" if equal(plain.model, loop.model) else "wrong"


def own_way(train: Callable[[Loop], None], *able: type[Loop]) -> Callable[[type[Loop]], str]:
    return lambda peer: verdict(peer, train, as_it_is) if peer in able else HAS_NONE


def forward_too(
    train: Callable[[Loop], None], prepare: Callable[[nn.Module], nn.Module]
) -> Callable[[type[Loop]], str]:
    """instep with ``schedule="backward"``, then with "forward"."""

    def tried(peer: type[Loop]) -> str:
        found = verdict(peer, train, prepare)
        if peer is Instep and found != "yes":
            found += f'; `schedule="forward"`: {verdict(peer, train, prepare, schedule="forward", defer=True)}'
        return found

    return tried


ROWS: dict[str, tuple[int, Callable[[type[Loop]], str]]] = {
    "the simple loop": (1, lambda peer: verdict(peer, simple, as_it_is)),
    "the loop clips by the global norm": (1, forward_too(clips, as_it_is)),
    "clipping of its own": (1, clipping_of_its_own),
    "the loop accumulates, and does not say so": (1, forward_too(accumulates, as_it_is)),
    "accumulation of its own": (1, own_way(accumulates_its_way, Optimi, Instep)),
    "`GradScaler`": (1, forward_too(scales, as_it_is)),
    "learning rates change": (1, lambda peer: verdict(peer, schedules, as_it_is)),
    "its checkpoint in the plain optimizer": (
        1,
        lambda peer: "no one state" if peer in (Each, TorchVerb) else verdict(peer, exchanges, as_it_is),
    ),
    "an optimizer of one's own": (1, own_optimizer),
    "an optimizer that draws random numbers": (1, drawing_optimizer),
    "backward raises in the middle": (1, torn),
    "DDP, two ranks, CPU": (2, lambda peer: verdict(peer, simple, in_ddp)),
    "DDP, `no_sync`": (2, lambda peer: verdict(peer, accumulates_in_no_sync, in_ddp)),
    "DDP, the loop clips": (2, forward_too(clips, in_ddp)),
    "DDP, a communication hook": (2, with_a_hook),
    "FSDP2, two ranks, CPU": (2, lambda peer: verdict(peer, simple, sharded)),
}


def cell(row: str, name: str, rank: int, directory: str) -> None:
    ranks, tried = ROWS[row]
    peer = PEERS[name][0]
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        limit = datetime.timedelta(seconds=SECONDS / 3)
        store = f"file://{directory}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)
    with redirect_stderr(io.StringIO()):
        found = tried(peer)
    Path(directory, str(rank)).write_text(found, encoding="utf-8")
    os._exit(0)  # what a peer has left in flight is nobody's


def try_cell(row: str, name: str) -> str:
    ranks, _ = ROWS[row]
    peer = PEERS[name][0]
    if peer is TorchOverlapped and (ranks == 1 or "FSDP" in row):
        return "DDP only" if ranks == 1 else own_fsdp()
    context = multiprocessing.get_context("fork")  # torch has run nothing yet
    with tempfile.TemporaryDirectory() as directory:
        processes = [context.Process(target=cell, args=(row, name, rank, directory)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
            process.kill()
            process.join()
        found = [Path(directory, str(rank)) for rank in range(ranks)]
        said = {path.read_text(encoding="utf-8") if path.exists() else "dies or hangs" for path in found}
        return "; ".join(sorted(said))


def own_fsdp() -> str:
    from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

    try:
        _as_overlapped_optim(torch.optim.AdamW, None, **ADAMW).register_fsdp(None)
    except NotImplementedError as error:
        return f"raises `{type(error).__name__}`"
    return "yes"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows that contain this text")
    parser.add_argument(
        "--memory", action="store_true", help="in place of the table: bytes of each peer, on one device"
    )
    parser.add_argument("--speed", action="store_true", help="in place of the table: time of each peer, on one core")
    for name, value in {"rounds": 20, "width": 512, "depth": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="for --memory and --speed")
    options = parser.parse_args(arguments)
    if options.memory or options.speed:
        costs(options)
        return
    names = [name for name, (_, module) in PEERS.items() if importlib.util.find_spec(module) is not None]
    for module in ("torch._dynamo", "torch.distributed.optim", "torch.distributed.fsdp", *(PEERS[n][1] for n in names)):
        import_module(module)  # once, for all cells
    say_versions()
    print(f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}", flush=True)
    for row in ROWS:
        if options.rows in row:
            print(f"| {row} | {' | '.join(try_cell(row, name) for name in names)} |", flush=True)


def costs(options: argparse.Namespace) -> None:
    import peer_costs  # which starts the process again, with other settings of the allocator

    torch.set_num_threads(1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    say_versions()
    model = peer_costs.model_of(options.depth, options.width)
    peer_costs.say(model, memory=options.memory, speed=options.speed, rounds=options.rounds)


def say_versions() -> None:
    packages = [p for p in ("torch", "torchtune", "torchao", "torch-optimi", "lomo-optim") if _installed(p)]
    print(f"{datetime.date.today()}: {', '.join(f'{p} {version(p)}' for p in packages)}\n")


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
