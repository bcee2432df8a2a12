"""``instep plan`` as a user runs it."""

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import instep
from instep_tools.cli import app
from instep_tools.output import Told, steps_left
from instep_tools.planning import show
from instep_tools.planning import times as making
from tests import net

HERE = "tests.planning.models"
ROOT = Path(__file__).parents[2]


def invoke(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, words)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_in_a_pipe_it_is_plain_text_and_the_file_has_all_numbers(tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    command = [
        sys.executable,
        "-m",
        "instep",
        "plan",
        f"{HERE}:layers",
        "--inputs",
        f"{HERE}:rows",
        "--json",
        str(written),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=net.SECONDS, cwd=ROOT, env={**os.environ})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for said in (
        "Sequential with AdamW, one device",
        "backward, undo",
        "TFLOP/s, measured here",
        "TB/s of memory, measured",
    ):
        assert said in done.stdout
    assert "attach refuses" not in done.stdout
    assert re.search(
        r"^.* of gradients.*\nThe step takes [\d.]+% of an iteration on this machine\nTake (nothing|instep.attach)",
        done.stdout,
        re.M,
    )
    numbers = json.loads(written.read_text())
    assert numbers["instep_version"] == instep.__version__
    assert numbers["numel"] == 8 * 16 + 16 + 16 * 16 + 16 + 32 + 16 * 4 + 4
    assert {peak["way"] for peak in numbers["peaks"]} == {
        "plain",
        "backward",
        "forward",
        "backward, undo",
        "backward, two_pass",
    }
    assert numbers["sizes"]["state"]["float32"] > 2 * numbers["sizes"]["parameters"]["float32"]
    assert [one["schedule"] for one in numbers["times"]["schedules"]] == [
        "plain",
        "backward",
        "forward",
        "no optimizer",
    ]


def test_refusals_are_shown_when_they_are_asked_for() -> None:
    code, shown, _ = invoke(f"{HERE}:layers", "--refusals", "--terabytes", 1)
    assert code == 0
    assert "attach refuses\n  clip=ClipNorm(1.0) with schedule='backward'" in shown


def test_rates_that_are_given_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured() -> float:
        raise AssertionError("measured")

    monkeypatch.setattr(making, "measured_flops", measured)
    monkeypatch.setattr(making, "measured_memory_bytes", measured)
    code, shown, _ = invoke(f"{HERE}:layers_and_rows", "--terabytes", 0.5, "--tflops", 2)
    assert code == 0
    assert "measured" not in shown
    assert "this machine" not in shown


@pytest.mark.parametrize(
    ("given", "options", "measured"),
    [
        ((), "--terabytes and --tflops", {"terabytes", "tflops"}),
        (("--terabytes", 1), "--tflops", {"tflops"}),
        (("--tflops", 1), "--terabytes", {"terabytes"}),
        (("--forward-ms", 1), "--terabytes", {"terabytes"}),
    ],
)
def test_times_of_this_machine_say_so(
    given: tuple[object, ...],
    options: str,
    measured: set[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("measured_flops", "measured_memory_bytes"):
        monkeypatch.setattr(making, name, lambda: 1e12)
    words = (f"{HERE}:forty_layers", "--inputs", f"{HERE}:two_rows", "-q", "--json", tmp_path / "plan.json")
    code, shown, _ = invoke(*words, *given)
    assert code == 0
    assert f"\nTimes rest on the speed of this machine, measured just now. Give another's: {options}\n" in shown
    assert "% of an iteration on this machine\n" in shown
    second = re.search(r"for a second backward \((.*)\)", shown)
    assert second is not None
    assert second[1].endswith(" on this machine") == ("tflops" in measured)
    assert set(json.loads((tmp_path / "plan.json").read_text())["measured_here"]) == measured


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--optimizer", f"{HERE}:Wraps", "-o", "lr=0.1"),
        ("-o", "fused=True", "--micro-batches", 2, "--offload", "host"),
        ("--world-size", 2, "--offload", "host"),
        ("--world-size", 2),
    ],
)
def test_progress_ends_where_it_was_said_to(words: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    @contextmanager
    def steps_left() -> Iterator[Told]:
        yield lambda done, of, what: seen.append((done, of))

    monkeypatch.setattr(show, "steps_left", steps_left)
    given = (f"{HERE}:layers_and_rows", "--terabytes", 1, "--tflops", 1)
    assert invoke(*given, *words)[0] == 0
    done = list(dict.fromkeys(done for done, _ in seen))
    of = seen[-1][1]
    assert done == list(range(of)), seen
    assert {of for done, of in seen if done > 0} == {of}


def test_progress_is_shown_on_a_terminal_alone() -> None:
    shown, before = [], set(threading.enumerate())
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
        with steps_left(console) as told:
            told(1, 3, "rehearsing")
        assert isinstance(console.file, io.StringIO)
        shown.append(console.file.getvalue())
    for thread in set(threading.enumerate()) - before:
        thread.join()  # rich's, which is told to end, and not awaited
    assert "rehearsing" in shown[0]
    assert "1/3" in shown[0]
    assert shown[1] == ""


@pytest.mark.nightly
def test_quiet_and_several_ranks() -> None:
    code, shown, _ = invoke(f"{HERE}:layers_and_rows", "--world-size", 4, "--gbits", 10, "-o", "lr=0.1", "-q")
    assert code == 0
    for said in ("4 ranks", "backward, replicate", "communication"):
        assert said in shown
    assert "attach refuses" not in shown
    assert "Assumed" not in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["layers"], "name a function as module:function"),
        (["no_such_module:build"], "there is no module 'no_such_module'"),
        ([f"{HERE}:nothing"], "has no attribute 'nothing'"),
        ([f"{HERE}:a_number"], "returned a int"),
        ([f"{HERE}:a_failure"], "raised RuntimeError: the model's own error. It is run without any data"),
        ([f"{HERE}:frozen"], "has no parameter that is trained"),
        ([f"{HERE}:chooses"], "cannot be rehearsed without data: DynamicOutputShapeException"),
        ([f"{HERE}:layers", "--inputs", f"{HERE}:nothing"], "--inputs tests.planning.models:nothing: module"),
        ([f"{HERE}:layers", "--optimizer", "Adm"], "--optimizer Adm: module 'torch.optim' has no attribute 'Adm'"),
        ([f"{HERE}:layers", "--optimizer", f"{HERE}:a_failure"], "takes 0 positional arguments"),
        ([f"{HERE}:layers", "-o", "momentum=0.9"], "unexpected keyword argument 'momentum'"),
        ([f"{HERE}:layers", "-o", "0.9"], "write it as name=value"),
        ([f"{HERE}:layers", "--world-size", "0"], "--world-size 0"),
        ([f"{HERE}:layers", "--gbits", "-1"], "--gbits -1.0"),
        ([f"{HERE}:layers", "--bucket-cap-mb", "4"], "--bucket-bytes"),
        ([f"{HERE}:layers", "--world-size", "2", "--bucket-bytes", "4"], "--bucket-cap-mb"),
        ([f"{HERE}:layers", "--json", "/no/such/place/plan.json"], "cannot write --json"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], said: str) -> None:
    code, shown, error = invoke(*words)
    assert (code, shown) == (2, "")
    assert error.startswith("instep plan: ")
    assert said in error
    assert error.count("\n") == 1


def test_nothing_is_planned_where_instep_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_DISABLE", "1")
    code, _, error = invoke(f"{HERE}:layers")
    assert code == 2
    assert "INSTEP_DISABLE" in error


def test_offload_has_its_rows_and_its_price(tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    words = (f"{HERE}:layers", "--inputs", f"{HERE}:rows", "--terabytes", 1, "--forward-ms", 1e-4, "--bucket-bytes", 1)
    code, shown, _ = invoke(*words, "--offload", "host", "--pcie-gbytes", 2, "--json", written)
    assert code == 0
    assert "offload='host' copies 4.06 KiB of state to the device and back in each step: 2.1 µs, beside a" in shown
    assert 'Take instep.attach(model, optimizer, schedule="backward", offload="host")' in shown
    numbers = json.loads(written.read_text())
    state = numbers["sizes"]["state"]["float32"]
    assert numbers["offloaded"] == {"nbytes": state, "seconds": state / 2e9, "exposed": state / 2e9 - 2e-7}
    peaks = {(peak["way"], peak["implementation"]): peak for peak in numbers["peaks"]}
    # Of the largest layer and the one before or after it, with 4 bytes for each parameter's number of steps.
    two = 2 * 4 * (16 * 16 + 16) + 2 * 4
    for way in ("backward", "forward"):
        without, found = peaks[way, "fused"], peaks[f"{way}, offload", "fused"]
        assert without["own"] - found["own"] == without["total"] - found["total"] >= state - 2 * two


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--offload", "disk"), "--offload disk: it is host, or left out"),
        (("--pcie-gbytes", 12), "--pcie-gbytes is for --offload host: give both"),
        (("--offload", "host", "--pcie-gbytes", 0), "--pcie-gbytes 0.0: a number above 0 is needed"),
    ],
)
def test_options_of_offload_that_make_no_sense(words: tuple[object, ...], said: str) -> None:
    code, _, error = invoke(f"{HERE}:layers", *words)
    assert code != 0
    assert said in error
