"""One loop, alone in its process. It steps when the parent says so: loops in several processes take turns."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection
from time import perf_counter

import torch

from instep.attaching import attach
from instep.attachment import attached, record
from instep.demo.job import RECORDED_STEPS, WARM_UP_STEPS, Alone, Held, Stepped, Turn
from instep.demo.loop import Loop, new_model, numbers, wait, weight_bytes
from instep.demo.memory import Peak, resident_bytes
from instep.demo.text import Batches
from instep.report.run import Run
from instep.verification import training_state


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
