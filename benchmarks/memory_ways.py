"""What ``memory.py`` trains: models, optimizers, and each way of stepping, on one device and on two ranks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from one_device import NEEDS, OPTIONS, InBackward, Lomo, Model, Plain, Torchtune, gpt, optimi
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import instep
from instep.buckets import MIB
from instep_tools.training import Shape

BUCKET = 4 * MIB
BACKWARD: dict[str, Any] = {"schedule": "backward", "bucket_bytes": BUCKET}
WHOLE: dict[str, Any] = {"schedule": "backward"}
"""On ranks, where the wrapper has its own buckets."""
LR = OPTIONS["lr"]

# What is trained, and with what.


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
        return nn.functional.cross_entropy(model(x).float(), torch.arange(len(x), device=x.device) % 10)

    return Model("convolutional", make, images, loss)


def models(dtype: torch.dtype, rows: int, *, small: bool = False) -> dict[str, Model]:
    """By name. ``small``: models that warm a process up."""
    shape = Shape(width=64, depth=1, heads=8) if small else Shape(width=512, depth=12, heads=8)
    return {
        "GPT": gpt("GPT", dtype, shape, rows, tokens=16),
        "convolutional": convolutional(dtype, rows),
    }


def eight_bit() -> type:
    from torchao.optim import AdamW8bit

    found: type = AdamW8bit
    return found


@dataclass(frozen=True)
class Setting:
    """What the weights are, and the optimizer.

    Attributes:
        needs: the module that must be installed.
    """

    title: str
    dtype: torch.dtype
    needs: str = "torch"

    def kind(self) -> type:
        return torch.optim.AdamW if self.needs == "torch" else eight_bit()

    def options(self) -> dict[str, Any]:
        return OPTIONS if self.needs == "torch" else {"lr": LR}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = self.kind()(parameters, **self.options())
        return found


SETTINGS = {
    "float32": Setting("float32, `torch.optim.AdamW(fused=True)`", torch.float32),
    "bfloat16": Setting("bfloat16, `torch.optim.AdamW(fused=True)`", torch.bfloat16),
    "8-bit": Setting("float32, `torchao.optim.AdamW8bit`", torch.float32, needs="torchao"),
}

# How it is trained.


class Accumulated(Plain):
    """Each row of a batch is a micro-batch.

    Args:
        by: how the micro-batches are told: ``None``: the plain loop, or a backward that only drops gradients.
        together: all forwards come before the first backward.
    """

    def __init__(
        self,
        model: Model,
        setting: Setting,
        by: str | None = None,
        *,
        attach: dict[str, Any] | None = None,
        drops: bool = False,
        together: bool = False,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    ) -> None:
        attach = BACKWARD if attach is None and by is not None else attach
        super().__init__(model, attach, optimizer or setting.optimizer)
        self.by, self.drops, self.together = by, drops, together
        if drops:
            for p in self.model.parameters():
                p.register_post_accumulate_grad_hook(_drop)

    def loss_of(self, rows: torch.Tensor) -> torch.Tensor:
        return self.made.loss(self.model, rows) / self.count

    def before_the_last(self) -> AbstractContextManager[Any]:
        """Around all micro-batches but the last."""
        return nullcontext()

    def step(self, tokens: torch.Tensor) -> None:
        micro_batches = tokens.split(1)
        self.count = len(micro_batches)
        if self.overlap is not None and self.by == "micro_batches":
            self.overlap.micro_batches(self.loss_of, micro_batches)
        elif self.together:
            for loss in [self.loss_of(rows) for rows in micro_batches]:
                loss.backward()
        else:
            with self.overlap.accumulate() if self.overlap is not None else self.before_the_last():
                for rows in micro_batches[:-1]:
                    self.loss_of(rows).backward()
            self.loss_of(micro_batches[-1]).backward()
        if not self.drops:
            self.optimizer.step()
            self.optimizer.zero_grad()


class Flash(Plain):
    """FlashOptim's gradient release. Its 8-bit state, its short master weights and its kernels need CUDA."""

    def __init__(self, model: Model) -> None:
        from flashoptim import FlashAdamW, enable_gradient_release

        super().__init__(
            model, optimizer=lambda p: FlashAdamW(p, lr=LR, quantize=False, fused=False, master_weight_bits=None)
        )
        self.handle = enable_gradient_release(self.model, self.optimizer)

    def step(self, tokens: torch.Tensor) -> None:
        self.made.loss(self.model, tokens).backward()


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


@dataclass(frozen=True)
class Way:
    """A line of a table.

    Attributes:
        oracle: the way whose weights it must have; ``""``: it trains nothing.
        planned: what ``instep plan`` calls it; ``""``: it says nothing of it.
        needs: the module that must be installed.
        short: what the picture calls it; ``""``: it is not drawn.
    """

    title: str
    make: Callable[[Model, Setting], Plain]
    oracle: str = "plain"
    planned: str = ""
    needs: str = "torch"
    short: str = ""


def attached(options: dict[str, Any] | None) -> Callable[[Model, Setting], Plain]:
    return lambda model, setting: Plain(model, options, setting.optimizer)


def torch_in_backward(model: Model, setting: Setting) -> Plain:
    return InBackward(model, _apply_optimizer_in_backward, setting.kind(), **setting.options())


def dropped(model: Model, setting: Setting) -> Plain:
    return Accumulated(model, setting, drops=True)


ONE_BATCH: dict[str, Way] = {
    "plain": Way("plain", attached(None), planned="plain", short="plain loop"),
    "backward": Way('`instep.attach(…, schedule="backward")`', attached(WHOLE), short="instep"),
    "4 MiB": Way(
        "… and `bucket_bytes=4 * 2**20`", attached(BACKWARD), planned="backward", short="instep, 4 MiB buckets"
    ),
    "torch": Way("torch's `_apply_optimizer_in_backward`", torch_in_backward, short="torch, step in backward"),
    "torchtune": Way(
        "torchtune's wrapper",
        lambda model, setting: Torchtune(model, setting.optimizer),
        needs="torchtune",
        short="torchtune's wrapper",
    ),
    "optimi": Way(
        "optimi's gradient release, its own AdamW",
        lambda model, setting: optimi(model),
        needs=NEEDS["optimi gradient release"],
        short="optimi, its own AdamW",
    ),
    "LOMO": Way(
        "LOMO, gradient descent",
        lambda model, setting: Lomo(model),
        needs=NEEDS["LOMO (gradient descent)"],
        short="LOMO, gradient descent",
    ),
    "FlashOptim": Way(
        "FlashOptim's gradient release, its own AdamW, without what needs CUDA",
        lambda model, setting: Flash(model),
        needs="flashoptim",
        short="FlashOptim, its own AdamW",
    ),
    "no step": Way("no step: each gradient is dropped at once", dropped, oracle=""),
}
OWN_UPDATE = ("optimi", "LOMO", "FlashOptim")
"""Ways that bring an update of their own, whatever the setting says."""

MICRO_BATCHES: dict[str, Way] = {
    "plain": Way("plain: gradients add up", Accumulated, planned="plain", short="plain loop"),
    "accumulate": Way(
        "`overlap.accumulate()`",
        lambda model, setting: Accumulated(model, setting, "accumulate"),
        planned="backward",
        short="instep, accumulate()",
    ),
    "micro_batches": Way(
        "`overlap.micro_batches()`",
        lambda model, setting: Accumulated(model, setting, "micro_batches", attach=WHOLE),
        short="instep, micro_batches()",
    ),
    "micro_batches, 4 MiB": Way(
        "… and `bucket_bytes=4 * 2**20`",
        lambda model, setting: Accumulated(model, setting, "micro_batches"),
        planned="backward, micro_batches",
        short="instep, the same, 4 MiB buckets",
    ),
    "no step": Way("no step: each gradient is dropped at once", dropped, oracle=""),
    "together": Way(
        "no step, and all forwards before the first backward",
        lambda model, setting: Accumulated(model, setting, drops=True, together=True),
        oracle="",
    ),
}

# On two ranks.


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET / MIB)


def replicated(model: nn.Module) -> nn.Module:
    return instep.replicate(model, bucket_cap_mb=BUCKET / MIB)


def sharded(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    found: nn.Module = fully_shard(model)
    return found


def unfused(parameters: Any) -> torch.optim.Optimizer:
    """Fused kernels round in another way over the rows of a rank: tests/distributed/test_zero.py."""
    return torch.optim.AdamW(parameters, lr=LR, foreach=False)


class Ranked(Accumulated):
    """On each of two ranks."""

    def __init__(
        self,
        model: Model,
        setting: Setting,
        wrap: Callable[[nn.Module], nn.Module],
        by: str | None = None,
        attach: dict[str, Any] | None = None,
    ) -> None:
        attach = WHOLE if attach is None and by is not None else attach
        super().__init__(wrapped(model, wrap), setting, by, attach=attach, optimizer=unfused)

    def before_the_last(self) -> AbstractContextManager[Any]:
        model: Any = self.model
        return model.no_sync() if hasattr(model, "no_sync") else without_reduction(model)


def wrapped(model: Model, wrap: Callable[[nn.Module], nn.Module]) -> Model:
    return replace(model, make=lambda: wrap(model.make()))


@contextmanager
def without_reduction(model: Any) -> Iterator[None]:
    """What ``no_sync()`` is for FSDP2."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def on_ranks(wrap: Callable[[nn.Module], nn.Module], **options: Any) -> Callable[[Model, Setting], Plain]:
    return partial(Ranked, wrap=wrap, **options)


RANKS: dict[str, Way] = {
    "DDP": Way("`DistributedDataParallel(gradient_as_bucket_view=True)`", on_ranks(ddp), oracle="DDP"),
    "replicate": Way('`instep.replicate`, `schedule="backward"`', on_ranks(replicated, attach=WHOLE), oracle="DDP"),
    "shard_state": Way(
        'that `DistributedDataParallel`, `schedule="backward", shard_state=True`',
        on_ranks(ddp, attach={**WHOLE, "shard_state": True}),
        oracle="DDP",
    ),
    "FSDP2": Way("`fully_shard`", on_ranks(sharded), oracle="FSDP2"),
    "FSDP2, torchtune": Way(
        "`fully_shard`, torchtune's wrapper",
        lambda model, setting: Torchtune(wrapped(model, sharded), unfused),
        oracle="FSDP2",
        needs="torchtune",
    ),
    "FSDP2, backward": Way('`fully_shard`, `schedule="backward"`', on_ranks(sharded, attach=WHOLE), oracle="FSDP2"),
}
RANKS_MICRO_BATCHES: dict[str, Way] = {
    "DDP": Way("`DistributedDataParallel`, `no_sync()`", on_ranks(ddp), oracle="DDP"),
    "replicate": Way(
        "`instep.replicate`, `overlap.micro_batches()`", on_ranks(replicated, by="micro_batches"), oracle="DDP"
    ),
    "FSDP2": Way("`fully_shard`, `set_requires_gradient_sync(False)`", on_ranks(sharded), oracle="FSDP2"),
    "FSDP2, micro_batches": Way(
        "`fully_shard`, `overlap.micro_batches()`", on_ranks(sharded, by="micro_batches"), oracle="FSDP2"
    ),
}

# On an accelerator.

OFFLOADED: dict[str, Any] = {**BACKWARD, "offload": "host"}
ON_DEVICE: dict[str, Way] = {
    "plain": Way("plain", attached(None)),
    "backward": Way('`schedule="backward"`', attached(BACKWARD)),
    "offload": Way('`schedule="backward", offload="host"`', attached(OFFLOADED)),
    "undo": Way('`schedule="backward", undo="host", offload="host"`', attached({**OFFLOADED, "undo": "host"})),
    "forward": Way('`schedule="forward", offload="host"`', attached({**OFFLOADED, "schedule": "forward"})),
    "no step": Way("no step, no state: each gradient is dropped at once", dropped, oracle=""),
}
OFFLOADED_BUCKETS = 2 * (1 + 2)
"""Bytes of a bucket that are on the device: gradients and state of two buckets, and AdamW's state is two of each."""

PARTS: dict[str, tuple[int, bool, dict[str, Way]]] = {
    "one-batch": (1, False, ONE_BATCH),
    "micro-batches": (1, True, MICRO_BATCHES),
    "ranks": (2, False, RANKS),
    "ranks-micro-batches": (2, True, RANKS_MICRO_BATCHES),
    "device": (1, False, ON_DEVICE),
}
"""By name: ranks, whether there are several micro-batches, and ways."""


def installed(ways: dict[str, Way], setting: Setting) -> dict[str, Way]:
    """Those that can be tried in this environment, in this setting."""
    own = () if setting.needs == "torch" else OWN_UPDATE
    return {name: way for name, way in ways.items() if find_spec(way.needs) is not None and name not in own}
