"""``instep selftest``: every cell is equal here, and a machine on which one is not is told of."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.optim import Optimizer
from typer.testing import CliRunner

import instep
from instep_tools.cli import app
from instep_tools.output import CannotRunError
from instep_tools.selftest import features, gains, ranks, run
from instep_tools.selftest.features import FEATURES, WAYS, Cell, Feature, Loop, compare
from instep_tools.selftest.gains import said_of
from instep_tools.selftest.ranks import SOURCES, compare_on_ranks
from instep_tools.selftest.run import Result
from instep_tools.training import Gain, Job, Shape, table_of
from tests.devices import here

BY_NAME = {feature.name: feature for feature in FEATURES}
QUIET = Console(quiet=True)
IS_OLD = not hasattr(torch.cpu.Stream, "record_event")
"""Whether ``fully_shard`` does not run on a CPU with this torch."""


@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_cell(name: str, way: str | None) -> None:
    feature = BY_NAME[name]
    cell = compare(feature, way, here())
    given = {} if way is None else feature.options[way]
    left_out = given is None or (feature.on_accelerator and here().type == "cpu")
    assert cell.holds, cell.said
    assert cell.outcome == "-" or not left_out


def test_on_ranks() -> None:
    table = compare_on_ranks(2, "cpu")
    assert list(table) == list(SOURCES)
    for source, cells in table.items():
        assert {cell.outcome for cell in cells.values()} == {"-" if "FSDP2" in source and IS_OLD else "equal"}, cells


def wrong(model: Any, optimizers: Sequence[Optimizer], **options: Any) -> instep.Attachment:
    """As ``attach``, but the attached loop learns faster with ``undo``, and cannot be attached with "backward"."""
    if options.get("undo"):
        for group in optimizers[0].param_groups:
            group["lr"] *= 1.5
    elif options.get("schedule") == "backward":
        raise instep.errors.AttachError("not on this machine\nreally")
    return instep.attach(model, optimizers, **options)


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FEATURES", [BY_NAME["AdamW"], BY_NAME["accumulation"]])


@pytest.mark.usefixtures("_few")
def test_what_differs_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(features, "attach", wrong)
    file = tmp_path / "found.json"
    assert not run.run(here().type, 1, file, quiet=True, gains=False)
    found = json.loads(file.read_text())
    said = capsys.readouterr().out
    assert not found["equal"]
    assert found["verdict"].startswith("NOT EQUAL on")
    assert "in 4 of 8 comparisons: AdamW, backward: failed: AttachError: not on this machine" in found["verdict"]
    assert "AdamW, undo: differs: after step 1: " in " ".join(said.split())
    assert found["cells"]["accumulation"]["default"] == {"outcome": "equal", "said": ""}
    assert any(line.startswith("torch:") for line in found["environment"])


@pytest.mark.usefixtures("_few")
def test_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert run.run(here().type, 1, file, quiet=True, gains=False)
    assert json.loads(file.read_text())["equal"]
    said = " ".join(capsys.readouterr().out.split())
    assert "bit for bit, in all 8 comparisons" in said
    assert "-: nothing to compare" not in said
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_dash_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "FEATURES", [BY_NAME["AdamW"]])
    monkeypatch.setattr(run, "compare", lambda feature, way, device: Cell("-" if way else "equal", "refused by name"))
    assert run.run(here().type, 1, None, quiet=True, gains=False)
    assert "-: nothing to compare" in " ".join(capsys.readouterr().out.split())


def test_a_machine_that_does_not_repeat_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))

    def differs(loop: Loop, i: int) -> None:
        (loop.loss(i) * (1 + next(calls))).backward()
        loop.step()
        loop.zero_grad()

    adamw = BY_NAME["SGD with momentum"]
    odd = Feature("odd", differs, adamw.options, adamw.optimizers)
    monkeypatch.setattr(run, "FEATURES", [odd, BY_NAME["AdamW"]])
    result = run.examine(here(), 1, QUIET, gains=False)
    assert result.unrepeatable == ["odd"]
    assert result.wrong == []
    assert "(1 features were left out: the plain loop does not repeat its own numbers)" in result.verdict


def test_what_the_plain_loop_cannot_do_here_is_left_out() -> None:
    def cannot(loop: Loop, i: int) -> None:
        raise NotImplementedError("aten::something is not there\nreally")

    cell = compare(Feature("odd", cannot, features.ALL, features.adamw), "backward", here())
    assert cell == Cell("-", "the plain loop does not run here: NotImplementedError: aten::something is not there")


def test_an_optimizer_that_the_device_does_not_have() -> None:
    def none(model: torch.nn.Module) -> Sequence[Optimizer]:
        raise RuntimeError("`fused=True` requires all the params to be on one of a few devices\nand more")

    feature = Feature("fused", features.usual, features.ALL, none)
    cell = compare(feature, "default", here())
    assert cell == Cell("-", "not on this device: `fused=True` requires all the params to be on one of a few devices")


@pytest.mark.parametrize(
    ("device", "ranks", "said"),
    [
        ("sideways", None, "torch does not know it"),
        ("mps", None, "this torch finds"),
        ("cpu", 0, "give 1 for one device"),
    ],
)
def test_what_cannot_run(device: str, ranks: int | None, said: str) -> None:
    if device == here().type:
        pytest.skip("it is there")
    with pytest.raises(CannotRunError, match=said):
        run.run(device, ranks, None, quiet=True)


def test_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gains, "Job", lambda _, device: Job(Shape(32, 2, 2), device, tried=2, rounds=3))
    told: list[str] = []
    found = {gain.name: gain for gain in gains.measure(here(), told.append)}
    assert list(found) == [kind.name for kind in gains.kinds(here())]
    assert told[0] == "memory and time beside 'plain': " + f"{sum(g.base == 'plain' for g in found.values())} loops"
    assert all(gain.milliseconds > 0 and gain.p10 <= gain.ratio <= gain.p90 for gain in found.values())
    if here().type == "cpu":
        one, plain = found["one backward"].extra_bytes, found["plain, accumulating"].extra_bytes
        assert one is not None
        assert plain is not None
        assert one > 0
        assert plain > 0


def test_what_is_said_of_gains() -> None:
    mib = 1 << 20
    plain = Gain("plain", "plain", 50 * mib, 40 * mib, 10.0, 1.0, 1.0, 1.0, 15)
    faster = Gain("default", "plain", 50 * mib, 40 * mib, 8.0, 1.25, 1.1, 1.3, 15)
    smaller = Gain('schedule="backward"', "plain", 14 * mib, 4 * mib, 10.1, 0.99, 0.9, 1.1, 15)
    unknown = Gain("offload", "plain", None, None, 20.0, 0.5, 0.4, 0.6, 7)
    again = Gain("plain, again", "plain", 50 * mib, 40 * mib, 10.0, 1.0, 0.9, 1.1, 15)
    assert list(said_of([plain, again, faster, smaller, unknown])) == [
        "default: 40.00 MiB above weights and state in place of 40.00 MiB, 1.25 of the plain loop's speed",
        'schedule="backward": 4.00 MiB above weights and state in place of 40.00 MiB, 0.99 of the plain loop\'s speed '
        "(within chance)",
        "offload: of its speed too few turns to tell",
    ]


def test_the_table_shows_no_ratio_of_a_few_turns() -> None:
    plain = Gain("plain", "plain", None, None, 10.0, 1.0, 1.0, 1.0, 15)
    gains = [plain, *(Gain(f"{n} turns", "plain", None, None, 8.0, 1.25, 1.1, 1.3, n) for n in (7, 8))]
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table_of(gains))
    shown = {line[:8].strip(): line.split("8.00 ms")[-1].strip() for line in captured.get().splitlines()}
    assert shown["7 turns"] == "too few turns"
    assert captured.get().count("to tell") == 1
    assert shown["8 turns"] == "1.25 [1.10, 1.30]"


@pytest.mark.skipif(here().type != "cpu", reason="threads are a CPU's")
def test_one_thread_unless_it_is_to_be_thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def examine(*args: Any, **options: Any) -> Result:
        seen.append(torch.get_num_threads())
        return Result("cpu", {}, {}, [])

    monkeypatch.setattr(run, "examine", examine)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for options in ([], ["--thorough"]):
            assert CliRunner().invoke(app, ["selftest", "--device", "cpu", *options]).exit_code == 0
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert (seen, after) == ([1, 3], 3)


def test_ranks_that_fail_and_one_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise CannotRunError("rank 1 was killed by SIGKILL\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "run_on_ranks", fails)
        failed = compare_on_ranks(2, "cpu")
    assert {cell.said for cells in failed.values() for cell in cells.values()} == {"rank 1 was killed by SIGKILL"}
    equal = {source: dict.fromkeys(WAYS, Cell("equal")) for source in SOURCES}
    wrong = {source: dict.fromkeys(WAYS, Cell("differs", "after step 1")) for source in SOURCES}
    joined = ranks._joined([equal, wrong])
    assert {cell for cells in joined.values() for cell in cells.values()} == {Cell("differs", "rank 1: after step 1")}


def test_the_result_of_one_wrong_cell() -> None:
    cells = {"a": {"default": Cell("equal"), "undo": Cell("differs", "after step 1: x")}}
    result = Result("cpu", {"a": Cell("equal")}, cells, [])
    assert result.verdict == "NOT EQUAL on cpu in 1 of 2 comparisons: a, undo: differs: after step 1: x"
