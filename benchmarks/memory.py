"""How much memory does a step need above weights and optimizer state?

    python benchmarks/memory.py --jobs 2                 # everything, 8 bits too: an hour, most of it to compile
    python benchmarks/memory.py --settings float32 --parts one-batch --runs 1
    python benchmarks/memory.py --svg memory.svg         # and a picture of the GPT in float32
    pip install torchtune torchao==0.15.0 lomo-optim torch-optimi flashoptim   # left out where not installed

Every way is trained in a process of its own (on two ranks: in two), on the same batches. Weights after three steps are
compared with the plain loop's of the same number of micro-batches, bit for bit; the table says where they are others.
Then resident memory is read, as the operating system counts it: between two steps, and the most within the next ones.
The allocator gives large tensors back at once. Beside it stands what ``instep plan`` says before anything is trained.
``no step`` is the floor: each gradient is dropped as soon as it is there. The sum is computed: activations, counted as
tensors are made and freed, and the largest bucket of 4 MiB, which need not be there at the same time.
``memory_ways.py`` has the ways, ``memory_of_one.py`` what is measured. The part ``device`` is an accelerator's memory
above the weights, optimizer state too, as its allocator counts: CUDA's, or that of the emulated accelerator of the
tests.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

os.environ["INSTEP_BENCHMARK_MALLOC"] = "as it is"  # of measure.py, which would keep memory

import bars
import torch
from memory_of_one import Found, alone, no_accelerator
from memory_ways import BUCKET, OFFLOADED_BUCKETS, PARTS, SETTINGS, Way, installed, models
from one_device import OPTIONS, Model
from torch import nn

from instep.buckets import MIB
from instep_tools.output import Told, steps_left
from instep_tools.planning.job import Job
from instep_tools.planning.plan import plan

PLANNED = "INSTEP_BENCHMARK_PLANNED"
"""The environment's name for the model, and its dtype, that ``instep plan`` is to make."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
ENVIRONMENT = {**GIVES_BACK, "GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

# What ``instep plan`` says.


class Trained(nn.Module):
    """What returns the loss, for ``instep plan``."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner, self.loss = model.make(), model.loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.inner, x)


def _planned_model() -> Model:
    name, setting = os.environ[PLANNED].split()
    return models(SETTINGS[setting].dtype, 1)[name]


def build_planned() -> nn.Module:
    return Trained(_planned_model())


def planned_inputs() -> torch.Tensor:
    return next(_planned_model().batches())


def planned(setting: str, model: str, micro_batches: int) -> dict[str, int]:
    """By way: bytes at the peak above weights and state, as ``instep plan`` says."""
    os.environ[PLANNED] = f"{model} {setting}"
    job = Job(
        "memory:build_planned",
        options=("fused=True", f"lr={OPTIONS['lr']}"),
        inputs="memory:planned_inputs",
        bucket_bytes=BUCKET,
        tflops=1.0,
        terabytes=1.0,
        micro_batches=micro_batches,
    )
    return {peak.way: peak.above for peak in plan(job).peaks}


# The tables.


class Left:
    """Tells how many processes have ended, of how many, so that the rest can be estimated."""

    def __init__(self, told: Told, of: int) -> None:
        self._told, self._of = told, of
        self._done, self._lock = 0, Lock()

    def one_less(self, what: str) -> None:
        with self._lock:  # --jobs
            self._done += 1
            self._told(self._done, self._of, what)


def runs_of(arguments: argparse.Namespace, setting: str, part: str) -> int:
    """How many times something is trained for a table; on ranks once more, for the limit."""
    ranks, _, every = PARTS[part]
    runs: int = arguments.runs * len(installed(every, SETTINGS[setting]))
    return 2 * runs if ranks == 1 else runs + 1


def in_processes(arguments: argparse.Namespace, part: str, setting: str, model: str, way: str) -> Found:
    """Of all ranks: their digests, and the most bytes. ``raises``, where it does not run."""
    ranks = PARTS[part][0]
    command = [sys.executable, __file__, "--micro-batches", str(arguments.micro_batches)]
    command += ["--one", part, setting, model, way]
    with tempfile.TemporaryDirectory(prefix="instep-memory-") as directory:
        command += ["--store", f"{directory}/store"]
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env={**os.environ, **ENVIRONMENT},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            print(f"{setting}, {model}, {way}:\n{errors[-2000:]}", file=sys.stderr)
            return {"raises": errors.strip().splitlines()[-1] if errors.strip() else str(process.returncode)}
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    return {
        name: " ".join(f[name] for f in found) if name == "digest" else max(f[name] for f in found) for name in found[0]
    }


def tried(
    arguments: argparse.Namespace, part: str, setting: str, model: str, ways: dict[str, Way], left: Left
) -> dict[str, Found]:
    """By way; ``above`` has the bytes of each run. A way with other weights in another run has no digest."""

    def run(name: str) -> Found:
        found = in_processes(arguments, part, setting, model, name)
        left.one_less(f"{setting}, {part}, {model}")
        return found

    with ThreadPoolExecutor(arguments.jobs) as pool:
        tasks = {name: [pool.submit(run, name) for _ in range(arguments.runs)] for name in ways}
        results = {name: [task.result() for task in several] for name, several in tasks.items()}
    found = {}
    for name, runs in results.items():
        if any("raises" in run for run in runs):
            found[name] = next(run for run in runs if "raises" in run)
            continue
        same = len({run["digest"] for run in runs}) == 1
        found[name] = {
            **runs[0],
            "digest": runs[0]["digest"] if same else None,
            "above": [run["above"] for run in runs],
        }
    return found


def mib(values: list[int] | int) -> str:
    """One number, or the spread of the runs."""
    rounded = sorted({round(value / MIB) for value in (values if isinstance(values, list) else [values])})
    return f"{rounded[0]}" if len(rounded) == 1 else f"{rounded[0]} to {rounded[-1]}"


def weights(ways: dict[str, Way], name: str, found: list[dict[str, Found]]) -> str:
    oracle = ways[name].oracle
    if not oracle or any("raises" in one[name] for one in found):
        return "" if oracle else "not trained"
    if name == oracle:
        return ""
    equal = all(one[name]["digest"] == one[oracle]["digest"] is not None for one in found)
    return "plain's, bit for bit" if equal else "others"


def say(arguments: argparse.Namespace, part: str, setting: str, left: Left) -> dict[str, dict[str, Found]]:
    """Prints a table; a column for each model on one device, where ``instep plan`` has one too."""
    ranks, several, every = PARTS[part]
    ways = installed(every, SETTINGS[setting])
    names = ["GPT", "convolutional"] if ranks == 1 else ["GPT"]
    found = {model: tried(arguments, part, setting, model, ways, left) for model in names}
    first = next(iter(ways))
    size = {model: f"{model}, {found[model][first]['weights'] / MIB:.0f} MiB of weights" for model in names}
    micro_batches = arguments.micro_batches if several else 1
    plans = {}
    if ranks == 1 and part != "device" and SETTINGS[setting].needs == "torch":
        plans = {model: planned(setting, model, micro_batches) for model in names}
    batch = f"{micro_batches} micro-batches" if several else "one batch"
    trained = f"{setting}, `torch.optim.AdamW(foreach=False)`, two ranks" if ranks > 1 else SETTINGS[setting].title
    where = f", on the device {found['GPT'][first]['device']!r}, above the weights" if part == "device" else ""
    print(f"\n{trained}, {batch}{where}, MiB\n")
    heads = [head for model in names for head in ([size[model], "`instep plan`"] if plans else [size[model]])]
    heads = ["weights and state of a rank", "above them"] if ranks > 1 else heads
    print(f"| | {' | '.join(heads)} | weights after three steps |\n|---|{'---|' * (len(heads) + 1)}")
    for name, way in ways.items():
        cells = []
        for model in names:
            one = found[model][name]
            cells += [mib(one["own"]) if "own" in one else ""] if ranks > 1 else []
            cells.append(mib(one["above"]) if "above" in one else "does not run")
            cells += [mib(plans[model][way.planned]) if way.planned else ""] if plans else []
        print(f"| {way.title} | {' | '.join(cells)} | {weights(ways, name, list(found.values()))} |", flush=True)
    say_sum(arguments, part, setting, found, len(heads))
    if ranks > 1:
        left.one_less(f"{setting}, {part}")
    return found


def say_sum(
    arguments: argparse.Namespace, part: str, setting: str, found: dict[str, dict[str, Found]], columns: int
) -> None:
    """With the activations of all micro-batches, where gradients of several are freed."""
    ranks, several, _ = PARTS[part]
    floor, way = ("together", "micro_batches, 4 MiB") if several else ("no step", "4 MiB")
    buckets, taken = 1, "the largest bucket"
    if part == "device":
        way, buckets, taken = "offload", OFFLOADED_BUCKETS, "gradients and state of two of the largest bucket"
    cells = []
    for ways_found in found.values():
        bucket = ways_found["replicate" if ranks > 1 else way]["bucket"]
        floors = ways_found if ranks == 1 else {floor: in_processes(arguments, ONE_DEVICE[part], setting, "GPT", floor)}
        total = floors[floor]["activations"] + buckets * bucket
        ways_found["sum"] = {"above": [total]}
        cells += [mib(total)] if columns == len(found) else [mib(total), ""]
    cells = ["", mib(total)] if ranks > 1 else cells
    which = "activations of all micro-batches" if several else "activations"
    print(f"| the sum: {which}, and {taken} | {' | '.join(cells)} | computed |", flush=True)


ONE_DEVICE = {"ranks": "one-batch", "ranks-micro-batches": "micro-batches"}


def draw(path: Path, found: dict[str, dict[str, dict[str, Found]]], micro_batches: int) -> None:
    """The GPT in float32, as far as it was measured."""
    titles = {"one-batch": "one batch", "micro-batches": f"{micro_batches} micro-batches"}
    groups = {}
    for part, title in titles.items():
        one = found.get(f"float32, {part}", {}).get("GPT")
        if one is None:
            continue
        ways = {name: way for name, way in installed(PARTS[part][2], SETTINGS["float32"]).items() if way.short}
        lines = [(way.short, one[name]["above"]) for name, way in ways.items() if "above" in one[name]]
        lines.append(("sum: activations, one bucket", one["sum"]["above"]))
        groups[title] = [bars.Bar(words, max(nbytes) / MIB, _kind(words)) for words, nbytes in lines]
    bars.draw(path, bars.Panel("Memory of a step above weights and optimizer state, MiB", groups))


def _kind(words: str) -> str:
    return bars.OURS if words.startswith("instep") else bars.LIMIT if words.startswith("sum") else bars.OTHERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--runs", type=int, default=2, help="of each way; the table has the spread")
    parser.add_argument("--jobs", type=int, default=1, help="so many ways at a time: what they take is their own")
    parser.add_argument("--svg", type=Path, help="draw the GPT in float32 there")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--one", nargs=4, metavar=("PART", "SETTING", "MODEL", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if sys.platform != "linux":
        sys.exit("memory.py reads /proc/self/status, which Linux has")
    torch.set_num_threads(1)
    if arguments.one is not None:
        alone(arguments)
        return
    print(f"Resident memory, a process for each line, runs: {arguments.runs}")
    needed = sorted({way.needs for _, _, ways in PARTS.values() for way in ways.values()} | {"torchao"})
    if missing := [name for name in needed if find_spec(name) is None]:
        print(f"left out, not installed: {', '.join(missing)}")
    if "device" in arguments.parts and (reason := no_accelerator()) is not None:
        print(f"left out, no accelerator and no emulated one: {reason}")
        arguments.parts.remove("device")
    found = {}
    wanted = [
        (setting, part)
        for setting in arguments.settings
        if find_spec(SETTINGS[setting].needs) is not None
        for part in arguments.parts
        # 8 bits are in a wrapper class: shard_state does not divide them, and offload="host" refuses them.
        if SETTINGS[setting].needs == "torch" or part in ("one-batch", "micro-batches")
    ]
    with steps_left() as told:
        left = Left(told, sum(runs_of(arguments, *one) for one in wanted))
        for setting, part in wanted:
            found[f"{setting}, {part}"] = say(arguments, part, setting, left)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1))
    if arguments.svg:
        draw(arguments.svg, found, arguments.micro_batches)


if __name__ == "__main__":
    main()
