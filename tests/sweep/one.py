"""``python -m tests.sweep.one CASE FOLDER``: all runs of one case, each in a process forked from this one.

This process has imported torch and the case's package, and not instep: the plain loops never do.
"""

import importlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.sweep import digests, models
from tests.sweep.cases import CASES, Case

STEPS = 8
AFTER = 2
"""So many more after ``detach()``."""
SHORT = (3, 4)
"""On one device the last block is left out in these steps, so that its weights have no gradient."""
LOOKS = (5, 6)
"""In these steps it is asked which weights backward has stepped."""
SECONDS = 240
RANKS = {"one": 1, "ddp": 2, "fsdp": 2}
WAYS: dict[str, dict[str, Any]] = {
    "small": {"schedule": "backward"},
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "defer": {"schedule": "forward", "defer": True},
}
"""All but ``backward`` with buckets of one parameter; under FSDP2 a bucket is one of its groups."""
PLAIN = ("plain", "again")


@dataclass
class Run:
    """What one process has seen of one run."""

    refused: str = ""
    """What ``attach`` raised; the loop has gone on without it."""
    raised: str = ""
    ours: bool = False
    """Whether what was raised is an error of instep's."""
    steps: list[digests.Digests] = field(default_factory=list)
    """Of the start, and after each whole step."""
    processes: list[digests.Digests] = field(default_factory=list)
    torn: digests.Digests = field(default_factory=dict)
    """Of after an error."""
    stepped: list[list[int]] = field(default_factory=list)
    """How many weights backward has changed, of how many that changed in the step."""
    log: list[str] = field(default_factory=list)
    said: str = ""
    """``repr(overlap)`` and ``overlap.plan``."""
    optimizer: str = ""
    settings: list[str] = field(default_factory=list)
    """As ``proved.json`` names them."""
    graphs: int = 0
    seconds: float = 0.0
    """Of the processor."""


class _Kept(logging.Handler):
    """Warnings of instep, as text."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        self.log.append(record.getMessage())


class Trained:
    """The case's model and optimizer, and the loop."""

    def __init__(self, case: Case, shape: str, way: str, rank: int) -> None:
        self.rank, self.shape = rank, shape
        bare = case.net()
        self.model: Any = bare
        self.bare: Any = bare
        if shape == "fsdp":
            self._shard()
        self.optimizer = case.optimizer(bare)
        if shape == "ddp":
            options = {} if way == "backward" else {"bucket_cap_mb": 1e-4}
            self.model = DistributedDataParallel(bare, gradient_as_bucket_view=True, **options)  # type: ignore[arg-type]
        self.beside: nn.Module | None = None
        self.after: Callable[[], None] = lambda: None
        if case.beside is not None:
            self.beside, self.after = case.beside(bare)
        self.overlap: Any = None

    def _shard(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for module in [m for m in self.bare.modules() if isinstance(m, models.Block)]:
            fully_shard(module, mesh=mesh)
        fully_shard(self.bare, mesh=mesh)

    def look(self) -> digests.Digests:
        found = digests.weights(self.bare) | digests.state(self.bare, self.optimizer)
        if self.beside is not None:
            found |= {f"beside: {name}": text for name, text in digests.weights(self.beside).items()}
        return found

    def step(self, i: int, run: Run) -> None:
        x, y = models.batch(i, self.rank)
        look = i in LOOKS and self.backward_stays
        for net in (m for m in self.bare.modules() if isinstance(m, models.Net)):
            net.depth = 1 if self.shape == "one" and i in SHORT else 2
        memory = digests.Memory(self.bare)
        before = memory.read() if look else {}
        loss = nn.functional.cross_entropy(self.model(x).float().flatten(0, 1), y.flatten())
        loss.backward()
        within = memory.read() if look else before
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.overlap is not None:
            self.overlap.synchronize()
        if look:
            after = memory.read()
            changed = [name for name in before if before[name] != after[name]]
            run.stepped.append([sum(before[name] != within[name] for name in changed), len(changed)])
        self.after()

    backward_stays = False


def run_case(case: Case, shape: str, way: str, rank: int, run: Run) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    trained = Trained(case, shape, way, rank)
    run.optimizer = f"{type(trained.optimizer).__module__}.{type(trained.optimizer).__qualname__}"
    errors: Any = ()
    torch.manual_seed(1 + rank)
    if way not in PLAIN:
        instep = importlib.import_module("instep")
        refusal = importlib.import_module("instep.errors")
        errors = refusal.InstepError
        logger = logging.getLogger("instep")
        logger.addHandler(_Kept(run.log))
        logger.propagate = False
        options = dict(WAYS[way])
        if shape == "one" and way != "backward":
            options["bucket_bytes"] = 1
        try:
            trained.overlap = instep.attach(trained.model, trained.optimizer, **options)
        except refusal.AttachError as error:
            run.refused = _text(error)
        else:
            trained.backward_stays = way in ("small", "backward")
            run.settings = importlib.import_module("instep._optim.proved").settings_of(trained.optimizer)
    try:
        _train(trained, run)
    except Exception as error:
        run.raised, run.ours = _text(error), isinstance(error, errors)
        run.log.append("".join(traceback.format_exception(error))[-1500:])
        with suppress(Exception):
            run.torn = trained.look()
    run.graphs = digests.graphs()
    run.seconds = time.process_time()


def _train(trained: Trained, run: Run) -> None:
    run.steps.append(trained.look())
    run.processes.append(digests.process())
    for i in range(STEPS + AFTER):
        if i == STEPS and trained.overlap is not None:
            run.said = f"{trained.overlap!r}\n{trained.overlap.plan}"
            trained.overlap.detach()
            trained.overlap = None
            trained.backward_stays = False
        trained.step(i, run)
        run.steps.append(trained.look())
        run.processes.append(digests.process())


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _child(case: Case, shape: str, way: str, rank: int, folder: Path) -> None:
    """In a process of its own: its words go to a file, its findings to another."""
    name = f"{shape}-{way}-{rank}"
    out = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    run = Run()
    try:
        if RANKS[shape] > 1:
            where = f"file://{folder / f'{shape}-{way}-meet'}"
            dist.init_process_group(
                "gloo", init_method=where, rank=rank, world_size=RANKS[shape], timeout=timedelta(seconds=60)
            )
        run_case(case, shape, way, rank, run)
    except Exception as error:  # before the loop: the model, the optimizer
        run.raised = run.raised or _text(error)
        traceback.print_exc()
    (folder / f"{name}.json").write_text(json.dumps(asdict(run)))
    if RANKS[shape] > 1 and dist.is_initialized():
        with suppress(Exception):
            dist.barrier()


def fork(case: Case, shape: str, way: str, folder: Path) -> list[Run | None]:
    """The findings of each rank; ``None`` of one that died, or did not end in time."""
    pids = []
    for rank in range(RANKS[shape]):
        pid = os.fork()
        if pid == 0:
            try:
                _child(case, shape, way, rank, folder)
            finally:
                os._exit(0)
        pids.append(pid)
    end = time.monotonic() + SECONDS
    left = set(pids)
    while left and time.monotonic() < end:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found(shape, way, folder)


def found(shape: str, way: str, folder: Path) -> list[Run | None]:
    files = [folder / f"{shape}-{way}-{rank}.json" for rank in range(RANKS[shape])]
    return [Run(**json.loads(file.read_text())) if file.exists() else None for file in files]


def ways_of(shape: str) -> list[str]:
    return [way for way in WAYS if not (shape == "fsdp" and way == "small")]


def fork_with_instep(case: Case, shapes: list[str], folder: Path) -> None:
    """All the ways, from a process that has imported instep."""
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module("instep.attaching")
            for shape in shapes:
                for way in ways_of(shape):
                    fork(case, shape, way, folder)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def main(name: str, folder: Path, shapes: list[str]) -> None:
    case = next(case for case in CASES if case.name == name)
    warnings.simplefilter("ignore")
    torch.manual_seed = torch.random.manual_seed  # tests/__init__.py has one for tests; here it is as users have it
    for module in case.imports:
        importlib.import_module(module)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    from tests.sweep.judging import judge  # not before the fork: nothing here knows of instep

    plain = {(shape, way): fork(case, shape, way, folder) for shape in shapes for way in PLAIN}
    able = [shape for shape in shapes if all(plain[shape, "plain"])]
    fork_with_instep(case, able, folder)
    for shape in shapes:
        for way in ways_of(shape):
            seen = found(shape, way, folder) if shape in able else []
            result = judge(way, plain[shape, "plain"], plain[shape, "again"], seen)
            print(json.dumps({"case": case.name, "shape": shape, "way": way, **asdict(result)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","))
