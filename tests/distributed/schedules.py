"""A loop under DDP in every way of attaching, beside plain DDP: what a ``Case`` says, both do."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import instep.attachment
from instep import ClipNorm, ClipValue
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch, optimizer_cases, two_groups
from tests.distributed.casting import CastByHand

OPTIMIZERS = {name: (cls, kwargs) for name, cls, kwargs in optimizer_cases()}


WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True},
    "undo on the host": {"schedule": "backward", "undo": "host"},
    "two_pass": {"schedule": "backward"},
}


def blocks_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x).float(), y) * (1 + 9 * (seed % 2))


def expert_of_this_rank(model: nn.Module, seed: int) -> torch.Tensor:
    """One expert is used on the second rank only, the other on the rest."""
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x, dist.get_rank() % 2), y)


def sometimes_an_expert(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(model(x, 0 if dist.get_rank() == 1 and seed % 2 else None), y)


@dataclass(frozen=True)
class Case:
    """A loop.

    Attributes:
        clip: what ``attach`` gets, and the plain loop does by itself.
        by_hand: what both loops do by themselves.
        micro: micro-batches in a step.
        hold: around all of them but the last: ``"no_sync"``, ``"accumulate"``, or nothing.
        scaled: with a ``GradScaler``: ``"step"``, or with ``"unscale_"``.
        give: whether ``attach`` gets the scaler.
        overflow: the rank whose loss is infinite in some steps.
        ddp: options of DDP.
        attach: options of ``attach``.
    """

    way: str
    view: bool = False
    clip: ClipNorm | ClipValue | None = None
    by_hand: ClipNorm | ClipValue | None = None
    micro: int = 1
    hold: str | None = None
    scaled: str | None = None
    give: bool = True
    overflow: int | None = None
    optimizer: str = "AdamW-0-fused"
    make: Callable[[], nn.Module] = Blocks
    loss: Callable[[nn.Module, int], torch.Tensor] = blocks_loss
    ddp: dict[str, Any] = field(default_factory=dict)
    attach: dict[str, Any] = field(default_factory=dict)


class Loop:
    def __init__(self, case: Case, attach: bool) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model: Any = self.wrap(case.make())
        cls, kwargs = OPTIMIZERS[case.optimizer]
        self.optimizer = cls(two_groups(self.model), **kwargs)
        self.scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=2, enabled=case.scaled is not None)
        self.overlap: Any = self._attach() if attach else None

    def wrap(self, module: nn.Module) -> nn.Module:
        options = {"gradient_as_bucket_view": self.case.view, "bucket_cap_mb": 0.004, **self.case.ddp}
        return DistributedDataParallel(module, **options)

    def _attach(self) -> instep.Attachment:
        case, clip = self.case, self.case.clip
        if case.way == "two_pass" and isinstance(clip, ClipNorm):
            clip = replace(clip, mode="two_pass")
        scaler = self.scaler if case.scaled and case.give and case.way.startswith("undo") else None
        return instep.attach(self.model, self.optimizer, clip=clip, scaler=scaler, **{**WAYS[case.way], **case.attach})

    def step(self, i: int) -> Iterator[tuple[str, Any]]:
        """One step; what is to be the same in both loops."""
        case = self.case
        for micro in range(case.micro):
            with self.holding(micro):
                loss = case.loss(self.model, 1000 * dist.get_rank() + case.micro * i + micro) / case.micro
                if i in (0, 2) and case.overflow == dist.get_rank():
                    loss = loss * math.inf
                self.backward(self.scaler.scale(loss))
        if case.scaled == "unscale_" or (case.scaled and case.clip and self.overlap is None):
            self.scaler.unscale_(self.optimizer)
        norm = self.clip(case.clip) if self.overlap is None else None
        yield "norm by hand", self.clip(case.by_hand)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        yield "scale", self.scaler.get_scale()
        if isinstance(case.clip, ClipNorm) and not case.scaled:
            yield "norm", norm if self.overlap is None else self.overlap.grad_norm
        if self.overlap is not None:
            self.overlap.synchronize()
        yield from training_state(self.model, self.optimizer)

    def holding(self, micro: int) -> AbstractContextManager[Any]:
        if micro == self.case.micro - 1:
            return nullcontext()
        if self.overlap is None and (self.case.hold or "accumulation_steps" in self.case.attach):
            return self.model.no_sync()
        if self.case.hold == "no_sync":
            return self.model.no_sync()
        return self.overlap.accumulate() if self.case.hold == "accumulate" else nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        if self.overlap is None:
            loss.backward()
        else:
            self.overlap.backward(loss)

    def clip(self, clip: ClipNorm | ClipValue | None) -> torch.Tensor | None:
        if isinstance(clip, ClipValue):
            clip_grad_value_(self.model.parameters(), clip.clip_value)
        elif clip is not None:
            return clip_grad_norm_(self.model.parameters(), clip.max_norm, clip.norm_type)
        return None


def compare(case: Case, steps: int = 4) -> tuple[str | None, int, int]:
    """The first difference in words; steps; steps done again."""
    plain, attached = Loop(case, False), Loop(case, True)
    with attached.overlap:
        found = [first_difference(plain.step(i), attached.step(i)) for i in range(steps)]
        return first_of(found), attached.overlap.step_count, attached.overlap.redo_count


def first_of(differences: list[str | None]) -> str | None:
    """In words. All ranks go on to the end: one that returned early would leave the others waiting."""
    found = (f"after step {number}: {text}" for number, text in enumerate(differences, 1) if text is not None)
    return next(found, None)


def difference_of(*loops: Loop) -> str | None:
    return first_difference(*(training_state(loop.model, loop.optimizer) for loop in loops))


def renamed(state: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in state:
        yield name.replace("'inner.", "'", 1), value


def cast_by_hand() -> nn.Module:
    return CastByHand(Blocks(), torch.bfloat16)
