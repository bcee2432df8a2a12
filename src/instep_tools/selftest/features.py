"""Small training loops, one for each feature, as a user writes them; each is trained plain and in every way to attach.

``compare`` trains a ``Feature`` twice side by side and says how it ended: a ``Cell``. ``FEATURES`` are the rows of the
table, and ``WAYS`` its columns.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from instep import Attachment, ClipNorm, attach
from instep.errors import InstepError
from instep_tools.harness import lockstep, training_state
from instep_tools.training import BYTES, ByteGPT, Shape

STEPS = 4
MICRO_BATCHES = 3
LIMIT = 0.5
"""Of a norm: most steps clip."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "forward": {"schedule": "forward", "defer": True},
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
}
"""The columns: by name, the options of ``attach``."""


@dataclass(frozen=True, slots=True)
class Cell:
    """How one comparison ended.

    Attributes:
        outcome: ``"equal"``, ``"differs"``, ``"failed"``, or ``"-"``: there is nothing to compare.
        said: the first difference, the error, or why there is nothing to compare.
    """

    outcome: str
    said: str = ""

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against instep here."""
        return self.outcome in ("equal", "-")


small_model = partial(ByteGPT, Shape(width=32, depth=3, heads=2), ties=True)


class Loop:
    """One of two loops: the plain one, or an attached one.

    Attributes:
        overlap: of the attached one.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self.model = model
        self.optimizers = optimizers
        self.device = device
        self.overlap: Attachment | None = None
        self.scheduler = LambdaLR(optimizers[0], lambda step: 1.0 / (step + 1))
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)

    def loss(self, seed: int, share: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(BYTES, (2, 9), generator=generator).to(self.device)
        logits = self.model(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / share

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


Iterate = Callable[[Loop, int], None]
"""One iteration of a loop, given its number."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table.

    Attributes:
        name: as the table shows it.
        iterate: one iteration.
        options: by way, what ``attach`` is given besides; ``None``: that way refuses this loop.
        optimizers: makes the optimizers of a model.
        dropout, checkpoints: of the model.
        on_accelerator: whether it needs one.
    """

    name: str
    iterate: Iterate
    options: Mapping[str, Mapping[str, Any] | None]
    optimizers: Callable[[nn.Module], Sequence[Optimizer]]
    dropout: float = 0.0
    checkpoints: bool = False
    on_accelerator: bool = False


# The iterations, each as a user's loop has it.


def usual(loop: Loop, i: int) -> None:
    loop.loss(i).backward()
    loop.step()
    loop.zero_grad()


def scheduled(loop: Loop, i: int) -> None:
    """With a scheduler, and gradients that are zeroed and not thrown away."""
    loop.loss(i).backward()
    loop.step()
    loop.scheduler.step()
    loop.zero_grad(set_to_none=False)


def clipped(loop: Loop, i: int) -> None:
    """By the norm of all gradients: ``clip=`` where it was given, else by the loop."""
    if loop.overlap is None:
        loop.loss(i).backward()
    else:
        loop.overlap.backward(loop.loss(i))
    if loop.overlap is None or loop.overlap.grad_norm is None:
        nn.utils.clip_grad_norm_(loop.model.parameters(), LIMIT)
    loop.step()
    loop.zero_grad()


def accumulated(loop: Loop, i: int) -> None:
    """Gradients of the micro-batches add up in ``.grad``, as in any loop."""
    for micro in range(MICRO_BATCHES):
        more = micro < MICRO_BATCHES - 1
        with nullcontext() if loop.overlap is None or not more else loop.overlap.accumulate():
            loop.loss(MICRO_BATCHES * i + micro, MICRO_BATCHES).backward()
    loop.step()
    loop.zero_grad()


def together(loop: Loop, i: int) -> None:
    """One backward for all micro-batches."""
    for micro in range(MICRO_BATCHES):
        loss = loop.loss(MICRO_BATCHES * i + micro, MICRO_BATCHES)
        if loop.overlap is None:
            loss.backward()
        else:
            loop.overlap.backward(loss, more=micro < MICRO_BATCHES - 1)
    loop.step()
    loop.zero_grad()


def in_bfloat16(loop: Loop, i: int) -> None:
    with torch.autocast(loop.device.type, torch.bfloat16):
        loss = loop.loss(i)
    loss.backward()
    loop.step()
    loop.zero_grad()


def scaled(loop: Loop, i: int) -> None:
    """With a loss scale; the third step overflows, and is left out."""
    loss = loop.loss(i) * (torch.inf if i == 2 else 1.0)
    scaler = loop.scaler
    scaler.scale(loss).backward()
    scaler.step(loop.optimizers[0])
    scaler.update()
    loop.zero_grad()


def resumed(loop: Loop, i: int) -> None:
    """Weights and state are taken out and loaded again in the middle."""
    usual(loop, i)
    if i == 1:
        loop.model.load_state_dict(copy.deepcopy(loop.model.state_dict()))
        for optimizer in loop.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


# The optimizers.


def adamw(model: nn.Module, **options: Any) -> Sequence[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-2, **options)]


def sgd(model: nn.Module) -> Sequence[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def muon(model: nn.Module) -> Sequence[Optimizer]:
    """torch's Muon for the matrices, and AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "byte.weight"]
    inside = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in inside]
    made: Any = torch.optim
    return [AdamW(rest, lr=1e-2), made.Muon(matrices, lr=1e-2)]


ALL: Mapping[str, Mapping[str, Any] | None] = {way: {} for way in WAYS}
TWO_PASS = {"clip": ClipNorm(LIMIT, mode="two_pass")}

FEATURES: Sequence[Feature] = (
    Feature("AdamW", usual, ALL, adamw),
    Feature("AdamW, fused", usual, ALL, partial(adamw, fused=True)),
    Feature("AdamW, foreach", usual, ALL, partial(adamw, foreach=True)),
    Feature("SGD with momentum", usual, ALL, sgd),
    *([Feature("Muon beside AdamW", usual, ALL, muon)] if hasattr(torch.optim, "Muon") else []),
    Feature("dropout", usual, ALL, adamw, dropout=0.1),
    Feature("checkpointed blocks", usual, ALL, adamw, dropout=0.1, checkpoints=True),
    Feature("autocast to bfloat16", in_bfloat16, ALL, adamw),
    Feature("a scheduler, zeroed gradients", scheduled, ALL, adamw),
    Feature("clipping by the norm", clipped, {**ALL, "backward": TWO_PASS}, adamw),
    Feature("accumulation", accumulated, ALL, adamw),
    Feature("accumulation, one backward", together, ALL, adamw),
    Feature("a loss scale", scaled, {**ALL, "backward": None}, partial(adamw, fused=True)),
    Feature("a checkpoint in between", resumed, ALL, adamw),
    Feature("state in host memory", usual, {way: {"offload": "host"} for way in WAYS}, adamw, on_accelerator=True),
)


def compare(feature: Feature, way: str | None, device: torch.device) -> Cell:
    """Train ``feature`` plain and attached in a ``way``, and compare everything after each step.

    Args:
        way: of ``WAYS``; ``None``: the plain loop, once more.
    """
    if feature.on_accelerator and device.type == "cpu":
        return Cell("-", "for accelerators")
    given: Mapping[str, Any] | None = {} if way is None else feature.options[way]
    if given is None:
        return Cell("-", "refused by name")
    try:
        plain, other = (_loop(feature, device) for _ in range(2))
    except (RuntimeError, NotImplementedError) as error:
        return Cell("-", f"not on this device: {first_line(error)}")
    try:
        with nullcontext() if way is None else attach(other.model, other.optimizers, **WAYS[way], **given) as overlap:
            other.overlap = overlap
            return train(feature.iterate, plain, other)
    except Exception as error:
        return failed(error)


def _loop(feature: Feature, device: torch.device) -> Loop:
    torch.manual_seed(0)
    model = small_model(dropout=feature.dropout, checkpoints=feature.checkpoints).to(device)
    return Loop(model, feature.optimizers(model), device)


class NotHereError(Exception):
    """What the device, or this torch, cannot do: the plain loop has raised."""


def train(iterate: Iterate, plain: Loop, other: Loop, first: int = 0) -> Cell:
    """Train both in lockstep.

    Args:
        first: the number of the first iteration.
    """

    def take_plain(i: int) -> None:
        try:
            iterate(plain, first + i)
        except Exception as error:
            raise NotHereError(f"{type(error).__name__}: {first_line(error)}") from error

    def states() -> Any:
        return [training_state(loop.model, loop.optimizers) for loop in (plain, other)]

    try:
        for difference in lockstep((take_plain, lambda i: iterate(other, first + i)), states, STEPS, other.overlap):
            if difference is not None:
                return Cell("differs", difference)
    except NotHereError as error:
        return Cell("-", f"the plain loop does not run here: {error}")
    return Cell("equal")


def failed(error: Exception) -> Cell:
    """Whatever is wrong on this machine is what the table is for."""
    return Cell("failed", f"{type(error).__name__}: {first_line(error)}")


def first_line(error: Exception) -> str:
    """Return the first line of what an error says."""
    found = next(islice(str(error).splitlines(), 1), "")
    return found if isinstance(error, InstepError) else found[:200]
