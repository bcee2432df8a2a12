"""``instep demo``: what it finds, what it refuses, and that it leaves nothing behind."""

import html
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from instep_tools.demo.job import (
    CONTEXT,
    SHAPES,
    Alone,
    DemoError,
    InRank,
    Line,
    Placement,
    Progress,
    RankResult,
    Shape,
    Size,
    Turn,
)
from instep_tools.demo.loops import Batches, GradientProbe, new_model, train_alone
from instep_tools.demo.processes import workers
from instep_tools.demo.summary import Time, _time_taken
from instep_tools.report.files import NotWrittenError
from typer.testing import CliRunner

import instep
from instep_tools.cli import app
from instep_tools.demo import loops, run
from instep_tools.demo.run import load_text
from tests import net
from tests.demo import signalled
from tests.distributed.pool import RankPool

DEMO = [sys.executable, "-m", "instep", "demo"]
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
TEXT = b"In the beginning was the word, and it was a byte. " * 20
before: set[int | None] = set()


@pytest.fixture(autouse=True)
def _those_before() -> None:
    """Other tests' ranks may be waiting for theirs."""
    before.clear()
    before.update(process.pid for process in multiprocessing.active_children())


def own_children() -> "list[multiprocessing.process.BaseProcess]":
    return [process for process in multiprocessing.active_children() if process.pid not in before]


NET = net.SECONDS / 3


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


SMALL = Shape(width=16, depth=2, heads=2)


class InThreads:
    """The processes of the first act as threads of this one."""

    def __init__(self, jobs: Sequence[Alone], text: bytes) -> None:
        self._text = text
        self._threads: list[threading.Thread] = []
        self._pipes: list[Connection] = []
        self._theirs: list[Connection] = []
        for _ in jobs:
            ours, theirs = multiprocessing.Pipe()
            self._pipes.append(ours)
            self._theirs.append(theirs)
        self.give(jobs)

    def give(self, jobs: Sequence[Alone]) -> None:
        for job, theirs in zip(jobs, self._theirs, strict=False):
            train = partial(train_alone, job, self._text, torch.device("cpu"), theirs)
            self._threads.append(threading.Thread(target=train, daemon=True))
            self._threads[-1].start()

    def tell(self, number: int, turn: Turn) -> None:
        self._pipes[number].send(turn)

    def answer(self, number: int) -> Any:
        assert self._pipes[number].poll(NET)
        return self._pipes[number].recv()

    def join(self) -> None:
        for thread in self._threads:  # each has sent its last answer, and is about to end
            thread.join(NET)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command in this process, without a second act, with a model of no size. Its report goes to a directory of its
    own."""
    monkeypatch.chdir(tmp_path)

    @contextmanager
    def in_threads(jobs: Sequence[Alone], text: bytes) -> Iterator[InThreads]:
        yield InThreads(jobs, text)

    seeding = threading.Lock()

    def one_at_a_time(*given: Any) -> torch.nn.Module:
        with seeding:  # threads share the generator
            return new_model(*given)

    for size in Size:
        monkeypatch.setitem(SHAPES, size, SMALL)
    monkeypatch.setattr(loops, "new_model", one_at_a_time)
    monkeypatch.setattr(run, "workers", in_threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def invoke(*options: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["demo", *map(str, options)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


# The whole command, as a user runs it.


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_trains_to_equal_weights(ranks: int, text: Path, tmp_path: Path) -> None:
    written, report = tmp_path / "numbers.json", tmp_path / "report.html"
    options = ["--ranks", str(ranks), "--steps", "6", "--text", str(text), "--json", str(written)]
    options += ["--report", str(report), "--model", "small"]
    environment = {**os.environ, **({} if ranks == 1 else ON_CPU)}
    done = subprocess.run([*DEMO, *options], capture_output=True, text=True, timeout=NET, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 1/6: loss" in done.stdout
    said = " ".join(done.stdout.split())
    assert 'instep.attach(model, optimizer, schedule="backward")' in said
    assert "Weights: equal bit for bit in every loop, after each of 6 steps." in said
    assert report.as_uri() in "".join(done.stdout.split())
    assert "instep, schedule=&#39;backward&#39;" in report.read_text()
    assert sorted(tmp_path.iterdir()) == [written, report, text], "nothing temporary is left"
    numbers = json.loads(written.read_text())
    assert numbers["equal"] is True
    assert numbers["differences"] == []
    assert numbers["instep_version"] == instep.__version__
    assert (numbers["steps"], numbers["model"]) == (6, "small")
    act = numbers["one_device"]
    plain, default, backward = act["loops"]
    assert [one["line"] for one in act["loops"]] == ["plain", "default", "backward"]
    for one in act["loops"]:
        assert one["losses"] == plain["losses"]
        assert len(one["step_seconds"]) == 6
        assert one["time"]["p10"] <= one["time"]["p90"]
    assert plain["time"]["ratio"] == plain["time"]["p10"] == plain["time"]["p90"] == 1
    # Weights, two moments and gradients; and without most of the gradients.
    assert plain["peak_bytes"] > 4 * act["weight_bytes"]
    assert default["peak_bytes"] == plain["peak_bytes"]
    assert backward["peak_bytes"] < plain["peak_bytes"] - act["weight_bytes"] / 2
    assert 'Memory: schedule="backward" saves' in said
    assert act["larger"]["depth"] > act["depth"]
    assert act["larger"]["peak_bytes"] <= plain["peak_bytes"]
    accumulated = act["accumulation"]
    assert (accumulated["micro_batches"], accumulated["difference"]) == (4, None)
    assert accumulated["peak_bytes"] < accumulated["plain_peak_bytes"] - act["weight_bytes"] / 2
    assert_last_lines_are_in_the_report(done.stdout, report)
    assert (numbers["two_ranks"] is None) == (ranks == 1)
    if ranks == 2:
        assert numbers["two_ranks"]["difference"] is None
        assert numbers["two_ranks"]["tensors_compared"] > 300
        assert numbers["two_ranks"]["gradient_bytes"] < numbers["two_ranks"]["ddp_gradient_bytes"] / 3


def assert_last_lines_are_in_the_report(printed: str, report: Path) -> None:
    """Word for word, from the line on memory to the one on weights."""
    shown = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", report.read_text())).split())
    said = " ".join(printed.split())
    last = said[said.index("Memory: ") : said.index(" Report: ")]
    assert last.count(". ") >= 4
    assert last in shown


def alive(group: int) -> list[str]:
    """The processes of a process group, without those that have ended."""
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat=,args="], capture_output=True, text=True, check=True)
    rows = (line.split(maxsplit=2) for line in listed.stdout.splitlines())
    return [row[-1] for row in rows if int(row[0]) == group and not row[1].startswith("Z")]


@contextmanager
def as_from_a_terminal() -> Iterator[None]:
    """What this process ignores, as a job in the background does, its children would ignore, too."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def start(text: Path, tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a command, at the head of a process group of its own. It must end, and leave nothing."""
    running: list[subprocess.Popen[str]] = []

    def start(*command: str, **environment: str) -> "subprocess.Popen[str]":
        with as_from_a_terminal():
            running.append(
                subprocess.Popen(
                    [*command, "--text", str(text)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                    cwd=tmp_path,
                    env={**os.environ, **ON_CPU, "TMPDIR": str(tmp_path), **environment},
                )
            )
        return running[-1]

    yield start
    for command in running:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)
        command.communicate()


def ended(command: "subprocess.Popen[str]", directory: Path) -> tuple[int, str]:
    """Exit code and standard error of a command of which no process and no file is left."""
    _, errors = command.communicate(timeout=NET)  # all processes that it started have let go of both pipes
    last = time.monotonic() + NET
    while (left := alive(command.pid)) and time.monotonic() < last:
        time.sleep(0.01)
    assert not left
    assert {path.name for path in directory.iterdir()} <= {"text.txt", "once", "instep-demo-report.html"}
    return command.returncode, errors


ENDS = {"Ctrl-C": (130, "interrupted"), "SIGTERM": (143, "terminated"), "SIGTERM to all": (143, "terminated")}
Start = Callable[..., "subprocess.Popen[str]"]


def require_stopped(start: Start, directory: Path, point: str, how: str, ranks: int) -> None:
    once = directory / "once"
    environment = {"POINT": point, "HOW": how, "ONCE": str(once), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, signalled.__file__, "demo", "--ranks", str(ranks), "--steps", "5"]
    code, errors = ended(start(*program, **environment), directory)
    assert once.exists(), "the point was never reached"
    number, said = ENDS[how]
    if point in signalled.AT_ONCE:
        assert (code, errors) == (128 - number, "")
    else:
        assert (code, errors) == (number, f"instep demo: {said}\n")
    assert (directory / "instep-demo-report.html").exists() == (point in ("writes its report", "ends"))


@pytest.mark.nightly
@pytest.mark.parametrize("how", signalled.HOW)
@pytest.mark.parametrize("point", [*signalled.POINTS, *signalled.IN_PROCESS])
def test_a_signal_at_any_point(point: str, how: str, start: Start, tmp_path: Path) -> None:
    require_stopped(start, tmp_path, point, how, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("point", sorted({*signalled.POINTS, *signalled.IN_PROCESS} - {*signalled.NEED_TWO_RANKS}))
def test_a_signal_at_any_point_with_one_rank(point: str, start: Start, tmp_path: Path) -> None:
    require_stopped(start, tmp_path, point, "Ctrl-C", 1)


@pytest.mark.parametrize("point", ["started a process", "a process imports torch"])
def test_ctrl_c_while_processes_start(point: str, start: Start, tmp_path: Path) -> None:
    require_stopped(start, tmp_path, point, "Ctrl-C", 2)


def training(start: Start, **environment: str) -> "subprocess.Popen[str]":
    """A command that has begun to train for ever."""
    command = start(*DEMO, "--ranks", "2", "--steps", "1000000", **environment)
    assert command.stdout is not None
    assert any(line.startswith("step 1/") for line in command.stdout)
    return command


def test_ctrl_c_leaves_nothing(start: Start, tmp_path: Path) -> None:
    command = training(start)
    os.killpg(command.pid, signal.SIGINT)
    assert ended(command, tmp_path) == (130, "instep demo: interrupted\n")


@pytest.mark.nightly
def test_ranks_end_when_the_command_is_killed(start: Start, tmp_path: Path) -> None:
    command = training(start)
    command.kill()
    assert ended(command, tmp_path) == (-signal.SIGKILL, "")


@pytest.mark.nightly
def test_what_is_ignored_stays_ignored(start: Start, tmp_path: Path) -> None:
    """As in the background of a shell without job control, whose jobs do not get the Ctrl-C of the one in front."""
    ignore = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = start(sys.executable, "-c", ignore, *DEMO, "--ranks", "2", "--steps", "50")
    assert command.stdout is not None
    assert any(line.startswith("step 1/") for line in command.stdout)
    os.killpg(command.pid, signal.SIGINT)
    assert ended(command, tmp_path) == (0, "")


def test_sigterm_stops_the_processes(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(SHAPES, Size.SMALL, SMALL)
    running: set[int | None] = set()

    def terminate(*_: object) -> None:
        running.update(process.pid for process in own_children())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run, "_line", terminate)
    code, _, errors = invoke("--ranks", 1, "--model", "small", "--text", text)
    assert (code, errors) == (143, "instep demo: terminated\n")
    assert len(running) == len(Line)
    assert not own_children()


# Processes that do not come to an end.


def test_a_rank_that_dies_is_named() -> None:
    jobs = [InRank(SMALL, 100_000, Placement("cpu", 2), rank) for rank in range(2)]

    def kill_a_rank() -> None:
        victim = own_children()[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)

    def train() -> None:
        with workers(jobs, TEXT) as started:
            for number, (_, answer) in enumerate(started.answers()):
                assert isinstance(answer, Progress)
                if number == 0:
                    kill_a_rank()

    with pytest.raises(DemoError, match=r"rank [01] was killed by SIGKILL"):
        train()
    assert not own_children()


def test_a_loop_that_dies_is_named() -> None:
    def train() -> None:
        with workers([Alone(SMALL, Line.BACKWARD, "cpu")], TEXT) as started:
            victim = own_children()[0].pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            started.tell(0, Turn.STEP)
            started.answer(0)

    with pytest.raises(DemoError, match="the loop 'backward' was killed by SIGKILL"):
        train()
    assert not own_children()


def test_ranks_that_cannot_meet_say_why(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    for size in Size:
        monkeypatch.setitem(SHAPES, size, SMALL)
    code, _, errors = invoke("--ranks", 2, "--text", text)
    assert code == 2
    assert "could not meet the other ranks over gloo on interface 'nosuch0'" in errors
    assert errors.count("\n") == 1
    assert not own_children()


# Without a second act, in this process.


def attach_and_spoil(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    attachment = instep.attach(model, optimizer, **options)

    def spoil(*_: object) -> None:
        if attachment.step_count == 2:
            with torch.no_grad():
                weight = next(p for name, p in model.named_parameters() if name.endswith("head.bias"))
                weight[7] = torch.nextafter(weight[7], torch.tensor(1.0))

    optimizer.register_step_post_hook(spoil)
    return attachment


@pytest.mark.usefixtures("tiny")
def test_unequal_weights_fail_and_are_named(monkeypatch: pytest.MonkeyPatch, text: Path, tmp_path: Path) -> None:
    """One bit of one weight, once, is enough."""
    monkeypatch.setattr(loops, "attach", attach_and_spoil)
    written = tmp_path / "numbers.json"
    code, output, _ = invoke("--ranks", 1, "--steps", 5, "--text", text, "--json", written)
    assert code == 1
    assert "NOT EQUAL: backward: after step 2 weights differ from the plain loop's" in " ".join(output.split())
    assert "equal bit for bit" not in output
    numbers = json.loads(written.read_text())
    assert numbers["equal"] is False
    assert [one.partition(":")[0] for one in numbers["differences"]] == ["default", "backward", "micro_batches()"]


@pytest.mark.usefixtures("tiny")
def test_unequal_state_fails_and_is_named(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    """Of the very last step: no weight shows it any more."""

    def attach_and_spoil_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        attachment = instep.attach(model, optimizer, **options)

        def spoil(*_: object) -> None:
            if attachment.step_count == 5:
                optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg_sq"].view(-1)[0] += 1

        optimizer.register_step_post_hook(spoil)
        return attachment

    monkeypatch.setattr(loops, "attach", attach_and_spoil_state)
    code, output, _ = invoke("--ranks", 1, "--steps", 5, "--text", text)
    assert code == 1
    assert "NOT EQUAL: backward: the optimizer's state differs from the plain loop's" in " ".join(output.split())


def body_of_a_spoiled_rank() -> str | None:
    found: list[Any] = []
    job = InRank(SMALL, 5, Placement("cpu", 2), dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "attach", attach_and_spoil)
        loops.train_in_lockstep(job, TEXT, torch.device("cpu"), found.append)
    assert isinstance(found[-1], RankResult)
    return found[-1].difference


def test_unequal_weights_of_ranks_are_named(two_ranks: RankPool) -> None:
    for difference in two_ranks.run(body_of_a_spoiled_rank):
        assert difference is not None
        assert difference.startswith("after step 2: parameter 'module.head.bias' differs")


@pytest.mark.usefixtures("tiny")
def test_a_directory_that_cannot_be_written_costs_the_report_alone(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(option: str, path: Path) -> None:
        raise NotWrittenError(f"cannot write {option} {path}: Read-only file system")

    monkeypatch.setattr(run, "require_writable", refuse)
    code, output, errors = invoke("--ranks", 1, "--steps", 5, "--text", text)
    assert (code, errors) == (0, "")
    said = " ".join(output.split())
    assert "No report: cannot write instep-demo-report.html: Read-only file system. --report FILE writes one" in said
    assert not list(tmp_path.glob("*.html"))
    code, output, errors = invoke("--ranks", 1, "--steps", 5, "--text", text, "--report", "asked.html")
    assert (code, output) == (2, "")
    assert errors == "instep demo: cannot write --report asked.html: Read-only file system\n"


@pytest.mark.parametrize(
    ("time", "said"),
    [
        (Time(0.100, 1.02, 0.97, 1.05), "100 ms in place of 102 ms, 2% shorter here; too noisy to tell (0.95 to 1.03)"),
        (Time(0.100, 0.80, 0.75, 0.90), "100 ms in place of 80 ms, 25% longer"),
        (Time(0.100, 1.25, 1.10, 1.30), "100 ms in place of 125 ms, 20% shorter"),
    ],
)
def test_a_ratio_agrees_with_its_times(time: Time, said: str) -> None:
    assert _time_taken(time.ratio * time.median_seconds, time) == said


@pytest.mark.usefixtures("tiny")
def test_quiet_shows_the_table_alone(text: Path) -> None:
    code, output, errors = invoke("--ranks", 1, "--steps", 5, "--text", text, "-q")
    assert (code, errors) == (0, "")
    assert "step 1/5" not in output
    assert "tensors, peak" in output


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", 0], "--steps 0: at least 5"),
        (["--steps", 4], "--steps 4: at least 5"),
        (["--ranks", 0], "--ranks 0: give 1"),
        (["--ranks", -1], "--ranks -1: give 1"),
        (["--ranks", 10_000], "--ranks 10000: at most"),
        (["--text", "missing.txt"], "cannot read --text missing.txt: No such file"),
        (["--text", "."], "cannot read --text .: Is a directory"),
        (["--text", "empty"], "--text empty is empty"),
        (["--text", "short"], "--text short has only 64 bytes"),
        (["--json", "."], "cannot write --json .: it is there, and is no regular file"),
        (["--json", "missing/numbers.json"], "cannot write --json missing/numbers.json: No such file"),
        (["--json", "short/numbers.json"], "cannot write --json short/numbers.json: Not a directory"),
    ],
)
def test_refuses_in_one_line(
    options: list[object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("short").write_bytes(TEXT[:CONTEXT])
    code, output, errors = invoke(*options)
    assert (code, output) == (2, "")
    assert errors.startswith(f"instep demo: {message}")
    assert errors.count("\n") == 1
    assert sorted(os.listdir()) == ["empty", "short"]


@pytest.mark.usefixtures("tiny")
def test_a_failing_training_keeps_the_old_json(monkeypatch: pytest.MonkeyPatch, text: Path, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise DemoError("rank 0 was killed by SIGKILL")

    monkeypatch.setattr(run, "workers", fail)
    written = tmp_path / "numbers.json"
    written.write_text("old")
    code, _, errors = invoke("--ranks", 1, "--text", text, "--json", written)
    assert (code, errors) == (2, "instep demo: rank 0 was killed by SIGKILL\n")
    assert written.read_text() == "old"


# The parts.


def test_the_default_text_is_english() -> None:
    assert b" the " in load_text(None)
    assert len(load_text(None)) > 100_000


ROWS = 3


def batch_of(text: bytes, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return Batches(text, rank, torch.device("cpu"), ROWS).next()


def test_batches_differ_by_rank_and_repeat_from_run_to_run() -> None:
    inputs, targets = batch_of(TEXT)
    assert inputs.shape == targets.shape == (ROWS, CONTEXT)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    again, _ = batch_of(TEXT)
    other, _ = batch_of(TEXT, rank=1)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)


def test_the_shortest_text_makes_a_batch() -> None:
    inputs, targets = batch_of(TEXT[: CONTEXT + 1])
    assert inputs[0].tolist() == list(TEXT[:CONTEXT])
    assert targets[0, -1] == TEXT[CONTEXT]


@given(st.binary(max_size=4 * CONTEXT))
@settings(max_examples=100, deadline=None)
def test_any_file_is_a_text_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "[red]any\x1b[31m"
        path.write_bytes(content)
        if len(content) <= CONTEXT:
            with pytest.raises(DemoError, match="--text"):
                load_text(path)
            return
        text = load_text(path)
    assert text == content
    inputs, targets = batch_of(text)
    assert inputs.shape == targets.shape == (ROWS, CONTEXT)


def test_of_a_file_without_end_only_the_beginning_is_read() -> None:
    assert load_text(Path("/dev/zero")) == bytes(16 * 2**20)


def test_the_probe_counts_shared_storage_once() -> None:
    buffer = torch.zeros(8)
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(6))
    probe = GradientProbe([first, second])
    first.grad, second.grad = buffer[:2], buffer[2:]
    (first.sum() + second.sum()).backward()
    probe.remove()
    assert probe.peak_bytes == buffer.nbytes


@pytest.mark.parametrize(
    ("gpus", "asked", "device", "ranks"),
    [
        (0, None, "cpu", 2),
        (0, 1, "cpu", 1),
        (1, None, "cuda", 1),
        (1, 1, "cuda", 1),
        (8, None, "cuda", 2),
        (8, 8, "cuda", 8),
    ],
)
def test_ranks_go_to_gpus_where_there_are_enough(
    gpus: int, asked: int | None, device: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    placed = run.place(asked)
    assert (placed.device, placed.ranks) == (device, ranks)
    assert placed.backend == (None if ranks == 1 else "nccl" if gpus else "gloo")


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DemoError, match="each rank takes a GPU, and there are 1"):
        run.place(2)


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"instep {instep.__version__}\n")


def test_importing_the_library_imports_no_command() -> None:
    program = "import sys, instep; sys.exit(any(m in sys.modules for m in ('typer', 'rich', 'instep_tools')))"
    assert subprocess.run([sys.executable, "-c", program], timeout=NET).returncode == 0
