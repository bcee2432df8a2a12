"""The loops of the demo: model and text, the training loop as a user writes it, alone or two in lockstep."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from instep.attaching import attach
from instep.attachment import attached, record
from instep.demo.job import (
    RECORDED_STEPS,
    WARM_UP_STEPS,
    Alone,
    DemoError,
    Finished,
    Held,
    InRank,
    Placement,
    Progress,
    Shape,
    Stepped,
    Turn,
)
from instep.planning.rehearse import LiveBytes
from instep.replication import replicate
from instep.report.run import Run
from instep.verification import first_difference, training_state

# The model: a byte-level GPT made of torch's own modules.


BYTES = 256
CONTEXT = 64


class ByteGPT(nn.Module):
    """Predicts each next byte from those before it, up to ``CONTEXT`` of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(CONTEXT, shape.width)
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """``(rows, length)`` bytes to ``(rows, length, 256)`` logits."""
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


# The text: English that ships with Python, or a file of the user's; and the batches cut from it.


MIN_BYTES = CONTEXT + 1
MAX_BYTES = 16 * 1024 * 1024


def load_text(path: Path | None) -> bytes:
    """The bytes to train on: the first 16 MiB of the file at ``path``, or Python's own help topics.

    Raises ``DemoError`` for a file that cannot be read, or is too short for one row of a batch.
    """
    if path is None:
        return _help_topics()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES)
    except OSError as error:
        raise DemoError(f"cannot read --text {path}: {error.strerror}") from error
    if len(text) < MIN_BYTES:
        found = "is empty" if not text else f"has only {len(text)} bytes"
        raise DemoError(f"--text {path} {found}: training needs at least {MIN_BYTES} bytes, and better some thousands")
    return text


def _help_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DemoError("this Python comes without pydoc_data, the default text: give one with --text FILE") from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class Batches:
    """Rows cut from the text at random: others on every rank, the same in every run."""

    def __init__(self, text: bytes, rank: int, device: torch.device, rows: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._random = torch.Generator().manual_seed(rank)
        self._device = device
        self._rows = rows

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rows, CONTEXT)`` bytes, and for each of them the byte that follows."""
        starts = torch.randint(len(self._text) - CONTEXT, (self._rows, 1), generator=self._random)
        rows = self._text[starts + torch.arange(CONTEXT + 1)].long().to(self._device)
        return rows[:, :-1], rows[:, 1:]


# The training loop as a user writes it. Nothing in it knows of instep.


SEED = 0
LEARNING_RATE = 1e-3
LR_WARM_UP_STEPS = 20


def new_model(shape: Shape, device: torch.device) -> nn.Module:
    """The same in every process."""
    torch.manual_seed(SEED)
    return ByteGPT(shape).to(device)


class Loop:
    """A model with its optimizer and its schedule."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / LR_WARM_UP_STEPS))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One iteration. Returns the loss."""
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()


def wait(device: torch.device) -> None:
    """Until all is done that was launched."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def weight_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def numbers(model: nn.Module) -> int:
    """How many a model has."""
    return sum(p.numel() for p in model.parameters())


# How much memory a loop has held at most: counted by tensors, by gradients, and by the operating system.


class Peak:
    """The most bytes of tensors that were alive at once.

    Attributes:
        nbytes: once it was measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device

    @contextmanager
    def measured(self) -> Iterator[None]:
        """By the allocator of an accelerator; on a CPU every operation is looked at, which takes time."""
        if self._device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self.nbytes = torch.cuda.max_memory_allocated(self._device)
            return
        with LiveBytes() as live:
            yield
        self.nbytes = live.peak


def resident_bytes() -> int | None:
    """The most memory that this process had, by the operating system; ``None`` where that is not told."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


class GradientProbe:
    """Looks at all ``.grad`` whenever autograd has accumulated one, until ``remove``.

    Hooks run in the order of registration: made before ``attach``, it sees a bucket's last gradient before the
    bucket is stepped and freed.

    Attributes:
        peak_bytes: the most storage that was alive, shared storage counted once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.peak_bytes = 0
        self._parameters = list(parameters)
        self._handles = [p.register_post_accumulate_grad_hook(self._look) for p in self._parameters]

    def remove(self) -> None:
        """Stop looking."""
        for handle in self._handles:
            handle.remove()

    def _look(self, accumulated: torch.Tensor) -> None:
        self.peak_bytes = max(self.peak_bytes, _alive_bytes(self._parameters))


def _alive_bytes(parameters: Iterable[nn.Parameter]) -> int:
    # A spent gradient, instep's subclass without storage, is not alive; views of one DDP bucket share theirs.
    storages = (p.grad.untyped_storage() for p in parameters if type(p.grad) is torch.Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# Where the ranks run: on the GPUs if there are enough of them, else on the CPU.


DEFAULT_RANKS = 2


def place(ranks: int | None) -> Placement:
    """Find devices for ``ranks`` ranks; ``None`` for as many as suit the machine, one or two."""
    if ranks is not None and ranks < 1:
        raise DemoError(f"--ranks {ranks}: give 1 for one device, or 2 and more for data parallel training")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return _on_gpus(ranks, gpus) if gpus else _on_cpu(ranks)


def _on_gpus(ranks: int | None, gpus: int) -> Placement:
    if ranks is None and gpus < DEFAULT_RANKS:
        return Placement("cuda", 1, f"one rank, as there is one GPU; CUDA_VISIBLE_DEVICES= runs {DEFAULT_RANKS} on CPU")
    ranks = ranks or DEFAULT_RANKS
    if ranks > gpus:
        raise DemoError(
            f"--ranks {ranks}: each rank takes a GPU, and there are {gpus}. "
            "With CUDA_VISIBLE_DEVICES= (empty) in the environment the ranks run on the CPU"
        )
    return Placement("cuda", ranks)


def _on_cpu(ranks: int | None) -> Placement:
    cores = os.cpu_count() or 1
    most = max(4, cores)
    if ranks is not None and ranks > most:
        raise DemoError(f"--ranks {ranks}: at most {most} on this machine, which has {cores} CPU cores")
    return Placement("cpu", ranks or DEFAULT_RANKS)


# Two loops in one process, step by step side by side, compared after each step: ``DistributedDataParallel``, and
# ``replicate`` with the step in backward.


BUCKETS = 10
MIB = 1024 * 1024


def train_in_lockstep(
    job: InRank, text: bytes, device: torch.device, tell: Callable[[Progress | Finished], None]
) -> None:
    """Take all steps of ``job``; rank 0 tells of each. A difference does not end them: it is in the answer.

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
            # Whichever goes first finds other caches than the second.
            for lane in (plain, other) if number % 2 == 0 else (other, plain):
                lane.step(*batch)
            difference = difference or _difference(number, plain.loop, other.loop)
            if job.rank == 0:
                tell(Progress(number, plain.loss))
            if number == WARM_UP_STEPS:
                plain.probe.remove()
                other.probe.remove()
        more = [batches.next() for _ in range(RECORDED_STEPS + 1)]
        recorded = [run for lane in (plain, other) if (run := _record(lane.loop, more)) is not None]
        difference = difference or _difference(job.steps + len(more), plain.loop, other.loop)
    tell(
        Finished(
            parameters=numbers(plain.loop.model),
            weight_bytes=weight_bytes(plain.loop.model),
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
    """A loop with the clock and the probe beside it.

    Attributes:
        loss: of the last step.
    """

    def __init__(self, module: nn.Module, wrap: Callable[[nn.Module], nn.Module], device: torch.device) -> None:
        self.probe = GradientProbe(module.parameters())
        self.loop = Loop(wrap(module))
        self.seconds: list[float] = []
        self.loss = 0.0
        self._device = device

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        # On all ranks at about the same time, so that no loop pays for what came before it.
        wait(self._device)
        dist.barrier(device_ids=None if self._device.index is None else [self._device.index])
        started = perf_counter()
        loss = self.loop.step(inputs, targets)
        wait(self._device)
        self.seconds.append(perf_counter() - started)
        self.loss = loss.item()


def _data_parallel(module: nn.Module, bucket_mb: float) -> nn.Module:
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)


def _record(loop: Loop, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Run | None:
    """One step more than is recorded: the last of them is complete with the forward that follows."""
    with record(loop.model, loop.optimizer, RECORDED_STEPS) as recording:
        for inputs, targets in batches:
            loop.step(inputs, targets)
    return recording.run()


def _difference(step: int, plain: Loop, other: Loop) -> str | None:
    found = first_difference(training_state(plain.model, plain.optimizer), training_state(other.model, other.optimizer))
    return None if found is None else f"after step {step}: {found}"


def _count_tensors(loop: Loop) -> int:
    return sum(isinstance(value, torch.Tensor) for _, value in training_state(loop.model, loop.optimizer))


# One loop, alone in its process. It steps when the parent says so: loops in several processes take turns.


def train_alone(job: Alone, text: bytes, device: torch.device, pipe: Connection) -> None:
    """Take a step for each ``Turn.STEP``, and answer ``Stepped``; answer another turn with ``Held``, and return."""
    peak = Peak(device)
    with peak.measured():
        loop = Loop(new_model(job.shape, device))
        options = job.line.options
        attachment = nullcontext() if options is None else attach(loop.model, loop.optimizer, **options)
        batches = Batches(text, 0, device, rows=1)
        turn = next((turn for turn in _turns(pipe, WARM_UP_STEPS) if _step(turn, loop, batches, device, pipe)), None)
    with attachment:
        turn = turn or next(turn for turn in _turns(pipe) if _step(turn, loop, batches, device, pipe))
        resident = resident_bytes()
        state = _fingerprint(value for _, value in training_state(loop.model, [loop.optimizer]))
        recorded = _recorded(loop, batches) if turn is Turn.RECORD else None
        pipe.send(
            Held(
                parameters=numbers(loop.model),
                weight_bytes=weight_bytes(loop.model),
                peak_bytes=peak.nbytes,
                resident_bytes=resident,
                state=state,
                recorded=recorded,
            )
        )


def _turns(pipe: Connection, most: int | None = None) -> Iterator[Turn]:
    while most is None or most > 0:
        yield pipe.recv()
        most = None if most is None else most - 1


def _step(turn: Turn, loop: Loop, batches: Batches, device: torch.device, pipe: Connection) -> bool:
    """Whether that was the last turn."""
    if turn is not Turn.STEP:
        return True
    inputs, targets = batches.next()
    wait(device)
    started = perf_counter()
    loss = loop.step(inputs, targets)
    if (attachment := attached(loop.model)) is not None:
        attachment.synchronize()  # an update that was put off is a part of the step
    wait(device)
    seconds = perf_counter() - started
    pipe.send(Stepped(loss.item(), seconds, _fingerprint(loop.model.parameters())))
    return False


def _recorded(loop: Loop, batches: Batches) -> Run | None:
    """One step more than is recorded: the last of them is complete with the forward that follows."""
    with record(loop.model, loop.optimizer, RECORDED_STEPS) as recording:
        for _ in range(RECORDED_STEPS + 1):
            loop.step(*batches.next())
    return recording.run()


def _fingerprint(values: Iterable[object]) -> str:
    """Equal where every bit is, and otherwise not."""
    digest = hashlib.sha1(usedforsecurity=False)
    for value in values:
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()
