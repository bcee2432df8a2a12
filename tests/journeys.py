"""The road of one bucket, of an iteration and of ``attach``: which functions of instep's run, in which files.

``python -m tests.journeys`` prints the road of one bucket, ``python -m tests.journeys undo`` that of an iteration with
``undo``; ``docs/architecture.md`` follows these roads (``WAYS``, and ``ddp``: one rank).
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.attaching import attach

ROOT = str(Path(instep.__file__).parent)
WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"defer": True},
    "default": {"defer": False},
    "undo": {"schedule": "backward", "undo": True},
}
BEFORE, RESTS = 8, 10
"""Iterations until the road is the usual one: torch's own state is there, buckets are in order; and until the default
rests."""


class Call(NamedTuple):
    file: str
    function: str


class Road:
    """The calls of instep's functions, in their order.

    Args:
        first: the name of the function with whose first call the road begins; ``""``: it begins at once.
        last: the name of that with whose first return it ends; ``""``: it does not.
        skipped: how many calls of the first one are not that.
    """

    def __init__(self, first: str = "", last: str = "", skipped: int = 0) -> None:
        self.calls: list[Call] = []
        self._first, self._last, self._skipped = first, last, skipped
        self._began, self._is_over = not first, False

    @contextmanager
    def watched(self) -> Iterator[None]:
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if self._is_over or not code.co_filename.startswith(ROOT) or event not in ("call", "return"):
            return
        if event == "return":
            self._is_over = self._began and code.co_name == self._last
        elif self._began or code.co_name == self._first:
            self._began = self._began or self._skipped == 0
            self._skipped -= 1
            if not self._began:
                return
            self.calls.append(Call(code.co_filename.removeprefix(ROOT + "/"), name_of(code)))

    @property
    def files(self) -> list[str]:
        """In the order in which they are entered."""
        return list(dict.fromkeys(call.file for call in self.calls))


def name_of(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # Python 3.10 has none


class Loop:
    """Three layers, AdamW, one device.

    Args:
        wraps: in a ``DistributedDataParallel``, of the process group that there is.
        more: arguments of ``attach``.
    """

    def __init__(self, way: str, *, wraps: bool = False, **more: Any) -> None:
        torch.manual_seed(0)
        layers: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.model = DistributedDataParallel(layers) if wraps else layers
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.attaching = Road()
        with self.attaching.watched():
            self.overlap = attach(self.model, self.optimizer, **WAYS[way], **more)
        for _ in range(RESTS if way == "default" else BEFORE):
            self.iterate()

    def iterate(self) -> None:
        self.model(torch.ones(2, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def road(self, first: str = "", last: str = "", skipped: int = 0) -> Road:
        """Of one iteration, or of a part of it."""
        road = Road(first, last, skipped)
        with road.watched():
            self.iterate()
        return road


def of_a_bucket() -> Road:
    """From the hook of a bucket's last gradient until the hook returns: not of a step's first one, before which the
    others are prepared."""
    loop = Loop("backward", bucket_bytes=300)
    with loop.overlap:
        return loop.road("_bucket_accumulated", "_bucket_accumulated", 1)


def of_an_iteration(way: str) -> Road:
    """``way``: of ``WAYS``, or ``"ddp"``."""
    if way != "ddp":
        loop = Loop(way)
        with loop.overlap:
            return loop.road()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            loop = Loop("backward", wraps=True)
            with loop.overlap:
                return loop.road()
        finally:
            dist.destroy_process_group()


def show(calls: Sequence[Call]) -> None:
    at = ""
    for call in calls:
        if call.file != at:
            print(at := call.file)
        print(f"    {call.function}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.journeys")
    parser.add_argument("way", nargs="?", choices=["bucket", *WAYS, "ddp"], default="bucket")
    given = parser.parse_args()
    show((of_a_bucket() if given.way == "bucket" else of_an_iteration(given.way)).calls)


if __name__ == "__main__":
    main()
