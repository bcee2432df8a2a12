"""What an accelerator should answer: the tests, the selftest, memory and time of each schedule, and a trace.

    python benchmarks/gpu.py                      # every part that has no result yet
    python benchmarks/gpu.py --parts billion muon # these, again
    python benchmarks/gpu.py --device cpu --small # on a CPU, to try the benchmark itself

The most telling part comes first. Each is meant for three minutes at most, the last, ``tests``, for eight. None needs a
network, and each writes a file of its own into ``benchmarks/results/DATE-DEVICE/``: what was found, with versions and
the command. A part that was interrupted is begun again by the next call; one that has its file is left out. Equality is
proved first, by the part ``selftest``: where it finds a difference, nothing is measured.
"""

import argparse
import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import instep
from instep_tools.environment import report
from instep_tools.harness import wait
from instep_tools.processes import name_of
from instep_tools.selftest.features import muon
from instep_tools.training import Job, Kind, Shape, TrainedLoop, measure_group, memory_of

LIMIT, LIMIT_OF_TESTS = 180, 480
"""Seconds of a part that is a command of its own."""
RESULTS = Path(__file__).parent / "results"
GPT = Shape(width=1024, depth=12, heads=16)
BILLION = Shape(width=2560, depth=13, heads=20)
THREE_BILLION = Shape(width=3072, depth=26, heads=24)
"""About 160 million, one and three billion parameters."""
BUDGETS = 24, 48
"""Gigabytes of a card."""
SMALL = Shape(width=64, depth=2, heads=2)
BACKWARD = {"schedule": "backward"}


def adamw(model: nn.Module, **options: Any) -> Sequence[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-4, **options)]


ADAMW: Mapping[str, Callable[[nn.Module], Sequence[Optimizer]]] = {
    "fused": partial(adamw, fused=True),
    "foreach": partial(adamw, foreach=True),
    "capturable": partial(adamw, foreach=True, capturable=True),
}


class Run:
    """One call of this benchmark.

    Attributes:
        folder: of the results.
        job: what the loops train.
        usual: the same in bfloat16, with as many tokens as people train with.
        billion: the same, with a model of a billion parameters in bfloat16.
        budget: rows of 512 tokens, with three billion: as many as fit.
        most_rows: no more are tried.
    """

    def __init__(self, device: torch.device, folder: Path, small: bool) -> None:
        self.device = device
        self.folder = folder
        tried, rounds = (2, 3) if small else (40, 40)
        self.job = Job(SMALL if small else GPT, device, torch.float32, 64, tried, rounds)
        self.usual = replace(self.job, dtype=torch.bfloat16, rows=2 if small else 256)
        self.billion = Job(SMALL if small else BILLION, device, torch.bfloat16, 64, 2, min(rounds, 10))
        self.budget = Job(SMALL if small else THREE_BILLION, device, torch.bfloat16, 16 if small else 512)
        self.most_rows = 3 if small else 512


# The parts. Each returns what is to be kept.


def tests(run: Run) -> Any:
    """The bodies of the tests on this accelerator, and ranks of it."""
    os.environ["INSTEP_TEST_ACCELERATOR"] = run.device.type
    done = _command("pytest", "-m", "accelerator and not nightly", limit=LIMIT_OF_TESTS)
    found = re.findall(r"\d+ \w+", done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "")
    return {"rc": done.returncode, "closing line": found, "end": done.stdout[-4000:]}


def selftest(run: Run) -> Any:
    """Equality, feature by feature and schedule by schedule."""
    file = run.folder / "selftest-found.json"
    done = _command("instep", "selftest", "--device", run.device.type, "--json", str(file), "--quiet")
    found = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    return {"rc": done.returncode, "found": found, "end": done.stdout[-4000:] + done.stderr[-2000:]}


def steps(run: Run) -> Any:
    """Time and memory by the kind of AdamW, on one device."""
    found = []
    for name, make in ADAMW.items():
        if name == "capturable" and run.device.type == "cpu":
            continue
        kind = partial(Kind, base="plain", optimizers=make)
        ways: Mapping[str, Mapping[str, Any] | None] = {
            "plain": None,
            "plain, again": None,
            "default": {},
            "backward": BACKWARD,
            "undo": {**BACKWARD, "undo": True},
        }
        group = [kind(way, options=given) for way, given in ways.items()]
        found += [{"AdamW": name, **dataclasses.asdict(gain)} for gain in measure_group(group, run.job)]
    return found


def usual(run: Run) -> Any:
    """Time and memory where forward and backward take long: 16,384 tokens a step, in bfloat16."""
    ways: Mapping[str, Mapping[str, Any] | None] = {
        "plain": None,
        "plain, again": None,
        "default": {},
        "backward": BACKWARD,
    }
    group = [Kind(way, "plain", options=given) for way, given in ways.items()]
    return list(map(dataclasses.asdict, measure_group(group, run.usual)))


def billion(run: Run) -> Any:
    """The peak of a step above weights and state, of a model of a billion parameters in bfloat16."""
    fused = ADAMW["fused"]
    kinds = [
        Kind("plain", "plain", None, fused),
        Kind("default", "plain", {}, fused),
        Kind("backward", "plain", BACKWARD, fused),
        Kind("plain, four micro-batches", "plain", None, fused, 4),
        Kind("one backward of four micro-batches", "plain", BACKWARD, fused, 4),
        Kind("offload", "plain", {**BACKWARD, "offload": "host"}, fused),
    ]
    if run.device.type == "cpu":
        kinds.pop()
    return {kind.name: memory_of(kind, run.billion)[1] for kind in kinds}


def budget(run: Run) -> Any:
    """Tokens a second where memory is short: with the most rows that fit, on cards of ``BUDGETS``."""
    found = []
    for gigabytes in BUDGETS:
        with _card_of(gigabytes, run.device):
            for name, options in {"plain": None, "backward": BACKWARD}.items():
                kind = Kind(name, "plain", options, ADAMW["fused"])
                rows, seconds = _most_rows(kind, run.budget, run.most_rows)
                speed = rows * run.budget.tokens / seconds if rows else 0.0
                found.append({"GB": gigabytes, "loop": name, "rows": rows, "tokens a second": round(speed, 1)})
    return found


@contextmanager
def _card_of(gigabytes: int, device: torch.device) -> Iterator[None]:
    """torch asks for no more than such a card has, less a gigabyte that CUDA and the allocator take. Not on a CPU."""
    if device.type != "cuda":
        yield
        return
    there = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (gigabytes - 1) * 1e9 / there), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _most_rows(kind: Kind, job: Job, most: int) -> tuple[int, float]:
    """The most rows of a step that fit, to within an eighth, and the seconds of such a step; 0: one is too many."""
    fits, seconds, too_many = 0, 0.0, most + 1
    while too_many - fits > max(1, fits // 8):
        rows = min(max(1, 2 * fits), fits + max(1, (too_many - fits) // 2))
        taken = _seconds_of(kind, replace(job, rows=rows))
        if taken is None:
            too_many = rows
        else:
            fits, seconds = rows, taken
    return fits, seconds


def _seconds_of(kind: Kind, job: Job) -> float | None:
    """Of a step, once there is state; ``None``: it does not fit."""
    loop: TrainedLoop | None = None
    try:
        loop, steps = TrainedLoop(kind, job), []
        for number in range(8):
            wait(job.device)
            started = perf_counter()
            loop.step(number)
            wait(job.device)
            steps.append(perf_counter() - started)
        loop.finish()
        return median(steps[3:])
    except torch.OutOfMemoryError:
        return None
    finally:
        loop = None
        gc.collect()  # an error refers to frames, and these to tensors
        if job.device.type == "cuda":
            torch.cuda.empty_cache()


def masters(run: Run) -> Any:
    """Time and memory of bfloat16 weights with fp32 masters."""
    gradients: Sequence[Literal["float32"] | None] = [None]
    if hasattr(torch.Tensor, "grad_dtype"):
        gradients = [None, "float32"]
    found = []
    for each in gradients:
        cls = instep.masters(AdamW, gradients=each)

        def made(model: nn.Module, cls: type[AdamW] = cls) -> Sequence[Optimizer]:
            return [cls(model.parameters(), lr=1e-4, fused=True)]

        ways: Mapping[str, Mapping[str, Any] | None] = {"plain": None, "plain, again": None, "backward": BACKWARD}
        group = [Kind(way, "plain", options, made) for way, options in ways.items()]
        found += [{"gradients": each, **dataclasses.asdict(gain)} for gain in measure_group(group, run.usual)]
    return found


def offload(run: Run) -> Any:
    """Time of optimizer state in host memory, over PCIe."""
    if run.device.type == "cpu":
        return "for accelerators"
    kinds = [
        Kind("plain", "plain"),
        Kind("plain, again", "plain"),
        Kind("offload", "plain", {**BACKWARD, "offload": "host"}),
    ]
    return list(map(dataclasses.asdict, measure_group(kinds, run.job)))


def heavy(run: Run) -> Any:
    """torch's Muon beside AdamW: how much of its step is hidden."""
    if not hasattr(torch.optim, "Muon"):
        return "this torch has no Muon"
    ways: Mapping[str, Mapping[str, Any] | None] = {
        "plain": None,
        "plain, again": None,
        "default": {},
        "forward": {"schedule": "forward", "defer": True},
        "backward": BACKWARD,
    }
    kinds = [Kind(name, "plain", options, muon) for name, options in ways.items()]
    return list(map(dataclasses.asdict, measure_group(kinds, run.job)))


def safety(run: Run) -> Any:
    """What it costs to leave out steps that are not finite, and to watch weights and gradients."""
    ways: Mapping[str, Mapping[str, Any] | None] = {
        "plain": None,
        "plain, again": None,
        "default, which watches": {},
        "nonfinite": {"nonfinite": "skip"},
    }
    kinds = [Kind(name, "plain", options) for name, options in ways.items()]
    return list(map(dataclasses.asdict, measure_group(kinds, run.job)))


def trace(run: Run) -> Any:
    """How often torch.profiler saw each range of instep's, in three steps, and where the trace is."""
    loop = TrainedLoop(Kind("backward", "plain", BACKWARD), run.job)
    for seed in range(3):
        loop.step(seed)
    with torch.profiler.profile() as profile:
        for seed in range(3):
            loop.step(seed)
        wait(run.device)
    loop.finish()
    file = run.folder / "trace.json.gz"
    profile.export_chrome_trace(str(file))
    ranges = {event.key: event.count for event in profile.key_averages() if event.key.startswith("instep::")}
    return {"file": file.name, "ranges": ranges}


PARTS: Mapping[str, Callable[[Run], Any]] = {
    "selftest": selftest,
    "budget": budget,
    "usual": usual,
    "billion": billion,
    "steps": steps,
    "masters": masters,
    "offload": offload,
    "muon": heavy,
    "trace": trace,
    "safety": safety,
    "tests": tests,
}


def _command(*arguments: str, limit: int = LIMIT) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        return subprocess.CompletedProcess(arguments, 124, said, f"ran past {limit} s")


def _folder(results: Path, device: torch.device) -> Path:
    """Today's, or the latest of this device: what was begun is gone on with."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", name_of(device)).strip("-")
    before = sorted(results.glob(f"*-{name}"))
    return before[-1] if before else results / f"{date.today().isoformat()}-{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="these, with a result or without")
    parser.add_argument("--device", help="by default the accelerator that torch finds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for the results")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the benchmark itself")
    given = parser.parse_args()
    if given.device is None and not torch.accelerator.is_available():
        sys.exit("torch finds no accelerator (see `instep env`). --device cpu --small tries the benchmark itself")
    found = torch.accelerator.current_accelerator() if given.device is None else torch.device(given.device)
    assert found is not None
    device = found if found.type == "cpu" else torch.device(found.type, found.index or 0)
    folder = _folder(given.results, device)
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(device, folder, given.small)
    for name in given.parts or PARTS:
        file = folder / f"{name}.json"
        if given.parts is None and file.exists():
            print(f"{name}: has a result, {file}")
            continue
        started = perf_counter()
        try:
            result = PARTS[name](run)
        except Exception as error:  # the other parts are measured all the same
            result = {"failed": f"{type(error).__name__}: {error}"}
        seconds = round(perf_counter() - started, 1)
        kept = {"part": name, "command": sys.argv, "date": date.today().isoformat(), "seconds": seconds}
        file.write_text(json.dumps({**kept, "environment": report().splitlines(), "result": result}, indent=2) + "\n")
        print(f"{name}: {seconds} s, {file}")
        if name == "selftest" and isinstance(result, dict) and result.get("rc") == 1:
            sys.exit(f"{file}: numbers differ on this device. Nothing is measured")


if __name__ == "__main__":
    main()
