"""``instep demo``: what it trains, shows and writes, and that it leaves nothing behind."""

import html
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import instep
from instep_tools import processes, training
from instep_tools.cli import app
from instep_tools.demo import acts, run
from instep_tools.demo.run import load_text, time_taken
from instep_tools.output import CannotRunError
from instep_tools.processes import ranks_of, run_on_ranks
from instep_tools.training import CONTEXT, Gain, Job, Kind, Shape, TrainedLoop
from tests import net
from tests.distributed.pool import RankPool

DEMO = [sys.executable, "-m", "instep", "demo"]
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
TEXT = b"In the beginning was the word, and it was a byte. " * 20
NET = net.SECONDS / 3
SMALL = Shape(width=16, depth=2, heads=2)
CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command in this process, without a second act, with a model of no size. Its report goes to a directory of its
    own."""
    monkeypatch.chdir(tmp_path)

    def here(count: int, kind: str, work: Any, *arguments: Any, told: Any) -> list[Any]:
        return [work(CPU, told, *arguments)]

    for size in run.SHAPES:
        monkeypatch.setitem(run.SHAPES, size, SMALL)
    monkeypatch.setattr(run, "run_on_ranks", here)
    monkeypatch.setattr(run, "device_of", lambda given: CPU)


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
    done = subprocess.run([*DEMO, *options], capture_output=True, text=True, timeout=2 * NET, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 1/6: loss" in done.stdout
    said = " ".join(done.stdout.split())
    assert 'instep.attach(model, optimizer, schedule="backward")' in said
    assert "Weights: equal bit for bit in every loop, after each of 6 steps." in said
    assert report.as_uri() in "".join(done.stdout.split())
    assert "instep, <wbr>schedule=" in report.read_text() or "schedule=" in report.read_text()
    assert sorted(tmp_path.iterdir()) == [written, report, text], "nothing temporary is left"
    numbers = json.loads(written.read_text())
    assert numbers["equal"] is True
    assert numbers["differences"] == []
    assert numbers["instep_version"] == instep.__version__
    assert (numbers["steps"], numbers["model"]) == (6, "small")
    act = numbers["one_device"]
    plain, default, backward = act["loops"]
    assert [one["name"] for one in act["loops"]] == ["plain", "default", 'schedule="backward"']
    for one in act["loops"]:
        assert one["losses"] == plain["losses"]
        assert len(one["losses"]) == 6
        assert one["p10"] <= one["p90"]
    assert plain["ratio"] == plain["p10"] == plain["p90"] == 1
    # Weights, two moments and gradients; and without most of the gradients.
    assert plain["peak_bytes"] > 4 * act["gradient_bytes"]
    assert default["peak_bytes"] == plain["peak_bytes"]
    assert backward["peak_bytes"] < plain["peak_bytes"] - act["gradient_bytes"] / 2
    assert 'Memory: schedule="backward" saves' in said
    accumulating, together = act["accumulating"]
    assert together["difference"] is None
    assert together["peak_bytes"] < accumulating["peak_bytes"] - act["gradient_bytes"] / 2
    assert_last_lines_are_in_the_report(done.stdout, report)
    assert (numbers["two_ranks"] is None) == (ranks == 1)
    if ranks == 2:
        ddp, replicated = numbers["two_ranks"]["loops"]
        assert replicated["difference"] is None
        assert replicated["extra_bytes"] < 0.6 * ddp["extra_bytes"]


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


Start = Callable[..., "subprocess.Popen[str]"]


def trains(start: Start, **environment: str) -> "subprocess.Popen[str]":
    """A command that has begun to train for ever."""
    command = start(*DEMO, "--ranks", "2", "--steps", "1000000", **environment)
    assert command.stdout is not None
    assert any(line.startswith("step 1/") for line in command.stdout)
    return command


def test_ctrl_c_leaves_nothing(start: Start, tmp_path: Path) -> None:
    command = trains(start)
    os.killpg(command.pid, signal.SIGINT)
    assert ended(command, tmp_path) == (130, "instep demo: interrupted\n")


@pytest.mark.nightly
def test_ranks_end_when_the_command_is_killed(start: Start, tmp_path: Path) -> None:
    command = trains(start)
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


# Processes that do not come to an end.


def kills_a_rank(device: torch.device, tell: Callable[..., None]) -> None:
    tell(dist.get_rank())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def raises(device: torch.device, tell: Callable[..., None]) -> None:
    raise ZeroDivisionError("of the loop's own")


def refuses(device: torch.device, tell: Callable[..., None]) -> None:
    raise CannotRunError("not here")


def sleeps(device: torch.device, tell: Callable[..., None]) -> None:
    time.sleep(NET)


@pytest.mark.parametrize(
    ("work", "count", "said"),
    [
        (kills_a_rank, 2, r"rank 1 was killed by SIGKILL: by the system, if memory ran out"),
        (raises, 1, "(?s)rank 0 failed:.*ZeroDivisionError: of the loop's own"),
        (refuses, 1, "^not here$"),
        (sleeps, 1, "a rank gave no answer in"),
    ],
)
def test_ranks_that_do_not_come_to_an_end(work: Any, count: int, said: str) -> None:
    before = set(multiprocessing.active_children())
    told: list[int] = []
    with pytest.raises(CannotRunError, match=said):
        run_on_ranks(count, "cpu", work, told=told.append, seconds=1.0 if work is sleeps else 60.0)
    assert set(multiprocessing.active_children()) == before


# Without a second act, in this process.


def attach_and_spoil(model: torch.nn.Module, optimizers: Any, **options: Any) -> Any:
    attachment = instep.attach(model, optimizers, **options)

    def spoil(*_: object) -> None:
        if attachment.step_count == 2:
            with torch.no_grad():
                weight = next(p for name, p in model.named_parameters() if name.endswith("head.bias"))
                weight[7] = torch.nextafter(weight[7], torch.tensor(1.0))

    optimizers[0].register_step_post_hook(spoil)
    return attachment


@pytest.mark.usefixtures("tiny")
def test_unequal_weights_fail_and_are_named(monkeypatch: pytest.MonkeyPatch, text: Path, tmp_path: Path) -> None:
    """One bit of one weight, once, is enough."""
    monkeypatch.setattr(training, "attach", attach_and_spoil)
    written = tmp_path / "numbers.json"
    code, output, _ = invoke("--ranks", 1, "--steps", 5, "--text", text, "--json", written)
    assert code == 1
    assert "NOT EQUAL: schedule=\"backward\": after step 2: parameter 'head.bias' differs" in " ".join(output.split())
    assert "equal bit for bit" not in output
    numbers = json.loads(written.read_text())
    assert numbers["equal"] is False
    named = [one.partition(":")[0] for one in numbers["differences"]]
    assert named == ["default", 'schedule="backward"', "micro_batches()"]


def body_of_a_spoiled_rank() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "attach", attach_and_spoil)
        return acts.on_ranks(CPU, lambda step, loss: None, SMALL, 5, TEXT).differences


def test_unequal_weights_of_ranks_are_named(two_ranks: RankPool) -> None:
    for (difference,) in two_ranks.run(body_of_a_spoiled_rank):
        assert difference.startswith("instep.replicate: after step 2: parameter 'module.head.bias' differs")


@pytest.mark.usefixtures("tiny")
def test_a_directory_that_cannot_be_written_costs_the_report_alone(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(option: str, path: Path | None, content: str = "") -> None:
        if path is not None:
            raise CannotRunError(f"cannot write {option} {path}: Read-only file system")

    monkeypatch.setattr(run, "require_writable", refuse)
    monkeypatch.setattr(run, "write", refuse)
    code, output, errors = invoke("--ranks", 1, "--steps", 5, "--text", text)
    assert (code, errors) == (0, "")
    said = " ".join(output.split())
    assert "No report: cannot write --report instep-demo-report.html: Read-only file system. --report FILE" in said
    assert not list(tmp_path.glob("*.html"))
    code, output, errors = invoke("--ranks", 1, "--steps", 5, "--text", text, "--report", "asked.html")
    assert (code, output) == (2, "")
    assert errors == "instep demo: cannot write --report asked.html: Read-only file system\n"


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (
            (100.0, 1.02, 0.97, 1.05, 8),
            "100.00 ms in place of 102.00 ms, 2% shorter here; too noisy to tell (0.95 to 1.03)",
        ),
        ((100.0, 0.80, 0.75, 0.90, 8), "100.00 ms in place of 80.00 ms, 25% longer"),
        ((100.0, 1.25, 1.10, 1.30, 8), "100.00 ms in place of 125.00 ms, 20% shorter"),
        ((100.0, 1.25, 1.10, 1.30, 7), "100.00 ms in place of 125.00 ms; too few turns to tell"),
    ],
)
def test_a_ratio_agrees_with_its_times(times: tuple[float, float, float, float, int], said: str) -> None:
    plain = Gain("plain", "plain", 1, 1, times[0] * times[1], 1.0, 1.0, 1.0, 8)
    assert time_taken(plain, Gain("default", "plain", 1, 1, *times)) == said


def test_what_is_said_of_a_time_is_of_the_figures_shown() -> None:
    """The median of ratios need not be the ratio of medians."""
    plain, other = (Gain("plain", "plain", 1, 1, ms, 0.9, 0.85, 0.95, 8) for ms in (80.0, 100.0))
    assert time_taken(plain, other) == "100.00 ms in place of 80.00 ms, 25% longer"


@pytest.mark.usefixtures("tiny")
def test_quiet_shows_the_table_alone(text: Path) -> None:
    code, output, errors = invoke("--ranks", 1, "--steps", 5, "--text", text, "-q")
    assert (code, errors) == (0, "")
    assert "step 1/5" not in output
    assert "and state" in output


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


# The parts.


def test_the_default_text_is_english() -> None:
    assert b" the " in load_text(None)
    assert len(load_text(None)) > 100_000


@given(st.binary(max_size=4 * CONTEXT))
@settings(max_examples=100, deadline=None)
def test_any_file_is_a_text_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "[red]any\x1b[31m"
        path.write_bytes(content)
        if len(content) <= CONTEXT:
            with pytest.raises(CannotRunError, match="--text"):
                load_text(path)
            return
        text = load_text(path)
    assert text == content
    job = Job(SMALL, CPU, tokens=CONTEXT, text=torch.frombuffer(bytearray(text), dtype=torch.uint8))
    assert TrainedLoop(Kind("plain", "plain"), job).step(0) > 0


def test_of_a_file_without_end_only_the_beginning_is_read() -> None:
    assert load_text(Path("/dev/zero")) == bytes(16 * 2**20)


@pytest.mark.parametrize(
    ("gpus", "asked", "ranks"), [(0, None, 2), (0, 1, 1), (1, None, 1), (1, 1, 1), (8, None, 2), (8, 8, 8)]
)
def test_ranks_go_to_gpus_where_there_are_enough(
    gpus: int, asked: int | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    assert ranks_of(asked, torch.device("cuda" if gpus else "cpu")) == ranks


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(CannotRunError, match="each rank takes a device, and there are 1"):
        processes.ranks_of(2, torch.device("cuda"))


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"instep {instep.__version__}\n")


def test_importing_the_library_imports_no_command() -> None:
    program = "import sys, instep; sys.exit(any(m in sys.modules for m in ('typer', 'rich', 'instep_tools')))"
    assert subprocess.run([sys.executable, "-c", program], timeout=NET).returncode == 0
