"""The loops of the demo, and how they run: alone in a process, or two in lockstep.

A ``Loop`` is training as a user writes it, on ``Batches`` of a text. ``train_alone`` is the first act: three processes
run it, and take turns. ``train_in_lockstep`` is the second act: each rank trains with DistributedDataParallel and with
``replicate`` side by side, and compares after each step. The meters of memory are at the end.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from instep import attach, attached, record, replicate
from instep_tools.demo.job import (
    CONTEXT,
    RECORDED_STEPS,
    WARM_UP_STEPS,
    Alone,
    AloneResult,
    InRank,
    Progress,
    RankResult,
    Shape,
    Stepped,
    Turn,
)
from instep_tools.harness import Peak, first_difference, timed, training_state, wait
from instep_tools.report.memory import MIB
from instep_tools.report.run import Run

SEED = 0
LEARNING_RATE = 1e-3
LR_WARM_UP_STEPS = 20


class Loop:
    """The training loop as a user writes it: a model, its optimizer and its scheduler."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / LR_WARM_UP_STEPS))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run one iteration, and return the loss."""
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def accumulate(self, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Run one iteration of several micro-batches, and return the sum of their losses."""

        def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            inputs, targets = batch
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
            return loss / len(micro_batches)

        if (overlap := attached(self.model)) is not None:
            losses = overlap.micro_batches(loss_of, micro_batches)
        else:
            losses = []
            for batch in micro_batches:
                loss = loss_of(batch)
                loss.backward()
                losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return torch.stack(losses).sum()


def new_model(shape: Shape, device: torch.device) -> nn.Module:
    """Return the same model in every process."""
    torch.manual_seed(SEED)
    return ByteGPT(shape).to(device)


BYTES = 256


class ByteGPT(nn.Module):
    """A GPT on bytes, made of torch's own modules: it predicts each byte from up to ``CONTEXT`` bytes before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(CONTEXT, shape.width)
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Map ``(rows, length)`` bytes to ``(rows, length, 256)`` logits."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.byte(text) + self.position.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _block(shape: Shape) -> nn.Module:
    return nn.TransformerEncoderLayer(
        shape.width,
        shape.heads,
        dim_feedforward=4 * shape.width,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )


class Batches:
    """Batches of rows cut from the text at random: others on every rank, the same in every run."""

    def __init__(self, text: bytes, rank: int, device: torch.device, rows: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._random = torch.Generator().manual_seed(rank)
        self._device = device
        self._rows = rows

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(rows, CONTEXT)`` bytes, and for each of them the byte that follows."""
        starts = torch.randint(len(self._text) - CONTEXT, (self._rows, 1), generator=self._random)
        rows = self._text[starts + torch.arange(CONTEXT + 1)].long().to(self._device)
        return rows[:, :-1], rows[:, 1:]


def train_alone(job: Alone, text: bytes, device: torch.device, pipe: Connection) -> None:
    """Answer each ``Turn.STEP`` with ``Stepped``, and any other turn with ``AloneResult``, and return."""
    peak = Peak(device)
    # Memory is counted in the first steps alone: on a CPU counting takes time, and these steps are not timed.
    with peak:
        loop = Loop(new_model(job.shape, device))
        options = job.line.options
        attachment = nullcontext() if options is None else attach(loop.model, loop.optimizer, **options)
        batches = Batches(text, 0, device, rows=1)
        take_step = partial(_step, loop, batches, device, job.micro_batches)
        turn = _take_turns(pipe, take_step, range(WARM_UP_STEPS))
    with attachment:
        turn = turn or _take_turns(pipe, take_step, count())
        resident = resident_bytes()
        state = _fingerprint(value for _, value in training_state(loop.model, [loop.optimizer]))
        more = [batches.next() for _ in range(RECORDED_STEPS + 1)]
        recorded = _recorded(loop, more) if turn is Turn.RECORD else None
        pipe.send(
            AloneResult(
                parameters=count_numbers(loop.model),
                weight_bytes=weight_bytes(loop.model),
                peak_bytes=peak.nbytes,
                resident_bytes=resident,
                state=state,
                recorded=recorded,
            )
        )


def _take_turns(pipe: Connection, take_step: Callable[[], Stepped], turns: Iterable[int]) -> Turn | None:
    """Take a step in each of ``turns``. Return the turn that was none; ``None``: all were steps."""
    for _ in turns:
        turn: Turn = pipe.recv()
        if turn is not Turn.STEP:
            return turn
        pipe.send(take_step())
    return None


def _step(loop: Loop, batches: Batches, device: torch.device, micro_batches: int) -> Stepped:
    inputs, targets = batches.next()
    taken = list(zip(inputs.chunk(micro_batches, 1), targets.chunk(micro_batches, 1), strict=True))
    step = partial(loop.step, inputs, targets) if micro_batches == 1 else partial(loop.accumulate, taken)
    loss, seconds = timed(step, attached(loop.model), device)
    return Stepped(loss.item(), seconds, _fingerprint(loop.model.parameters()))


def _fingerprint(values: Iterable[object]) -> str:
    """Return a digest that is equal exactly where every bit of the values is."""
    digest = hashlib.sha1(usedforsecurity=False)
    for value in values:
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


BUCKETS = 10
"""About as many buckets has the model of the second act."""


def train_in_lockstep(
    job: InRank, text: bytes, device: torch.device, tell: Callable[[Progress | RankResult], None]
) -> None:
    """Take all steps of ``job``; rank 0 tells of each. A difference does not end them: it is in the result.

    The process group is there, and all ranks call this together.
    """
    batches = Batches(text, job.rank, device, rows=1)
    bucket_mb = weight_bytes(new_model(job.shape, torch.device("meta"))) / BUCKETS / MIB
    plain = _Lane(new_model(job.shape, device), lambda module: _data_parallel(module, bucket_mb), device)
    other = _Lane(new_model(job.shape, device), lambda module: replicate(module, bucket_cap_mb=bucket_mb), device)
    difference = None
    with attach(other.loop.model, other.loop.optimizer, schedule="backward"):
        for number in range(1, job.steps + 1):
            batch = batches.next()
            # They go first in turn: whichever goes first finds other caches than the second.
            for lane in (plain, other) if number % 2 == 0 else (other, plain):
                lane.step(*batch)
            difference = difference or _difference(number, plain.loop, other.loop)
            if job.rank == 0:
                tell(Progress(number, plain.loss))
            # A probe looks at all gradients for each gradient, which takes time: not in the steps that are timed.
            if number == WARM_UP_STEPS:
                plain.probe.remove()
                other.probe.remove()
        more = [batches.next() for _ in range(RECORDED_STEPS + 1)]
        recorded = [run for lane in (plain, other) if (run := _recorded(lane.loop, more)) is not None]
        difference = difference or _difference(job.steps + len(more), plain.loop, other.loop)
    tell(
        RankResult(
            parameters=count_numbers(plain.loop.model),
            tensors=_count_tensors(plain.loop),
            difference=difference,
            plain_gradient_bytes=plain.probe.peak_bytes,
            gradient_bytes=other.probe.peak_bytes,
            plain_seconds=tuple(plain.seconds),
            seconds=tuple(other.seconds),
            recorded=tuple(recorded),
        )
    )


class _Lane:
    """A loop with a clock and a probe beside it.

    Attributes:
        loss: the loss of the last step.
        seconds: how long each step took.
    """

    def __init__(self, module: nn.Module, wrap: Callable[[nn.Module], nn.Module], device: torch.device) -> None:
        self.probe = GradientProbe(module.parameters())
        self.loop = Loop(wrap(module))
        self.seconds: list[float] = []
        self.loss = 0.0
        self._device = device

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        # All ranks begin at about the same time, so that no loop pays for what came before it.
        wait(self._device)
        dist.barrier(device_ids=None if self._device.index is None else [self._device.index])
        started = perf_counter()
        loss = self.loop.step(inputs, targets)
        wait(self._device)
        self.seconds.append(perf_counter() - started)
        self.loss = loss.item()


def _data_parallel(module: nn.Module, bucket_mb: float) -> nn.Module:
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)


def _difference(step: int, plain: Loop, other: Loop) -> str | None:
    """Return the first difference of weights or state, in words; ``None``: there is none."""
    found = first_difference(training_state(plain.model, plain.optimizer), training_state(other.model, other.optimizer))
    return None if found is None else f"after step {step}: {found}"


def _count_tensors(loop: Loop) -> int:
    return sum(isinstance(value, torch.Tensor) for _, value in training_state(loop.model, loop.optimizer))


def _recorded(loop: Loop, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Run | None:
    """Record ``RECORDED_STEPS`` steps. There is one batch more: the forward behind the last step completes it."""
    with record(loop.model, loop.optimizer, RECORDED_STEPS) as recording:
        for inputs, targets in batches:
            loop.step(inputs, targets)
    return recording.run()


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters of a model."""
    return sum(p.nbytes for p in model.parameters())


def count_numbers(model: nn.Module) -> int:
    """Return how many numbers the parameters of a model hold."""
    return sum(p.numel() for p in model.parameters())


def resident_bytes() -> int | None:
    """Return the most memory that this process had, by the operating system; ``None`` where that is not known."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # Linux counts in KiB


class GradientProbe:
    """A look at all ``.grad`` whenever autograd has accumulated one, until ``remove``.

    Attributes:
        peak_bytes: the most storage of gradients that was alive, shared storage counted once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.peak_bytes = 0
        self._parameters = list(parameters)
        # Hooks run in the order of registration: a probe that is made before ``attach`` sees a bucket's last gradient
        # before the bucket is stepped and freed.
        self._handles = [p.register_post_accumulate_grad_hook(self._look) for p in self._parameters]

    def remove(self) -> None:
        """Stop looking."""
        for handle in self._handles:
            handle.remove()

    def _look(self, accumulated: torch.Tensor) -> None:
        self.peak_bytes = max(self.peak_bytes, _alive_bytes(self._parameters))


def _alive_bytes(parameters: Iterable[nn.Parameter]) -> int:
    # A spent gradient, instep's subclass without storage, is not alive; views of one DDP bucket share their storage.
    storages = (p.grad.untyped_storage() for p in parameters if type(p.grad) is torch.Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
