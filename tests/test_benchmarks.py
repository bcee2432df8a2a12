"""Every benchmark runs, and finds its variants equal, on a model so small that its times say nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bars
import gpu
import pytest
import torch
import what_fits

from instep_tools.planning.cards import card_of
from instep_tools.planning.job import PlannedBucket, PlannedPeak
from instep_tools.training import Job, Kind, TrainedLoop
from tests import net

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = ["--rounds", "1", "--width", "48", "--depth", "1"]  # for six heads, and for eight
ONCE = ["--settings", "float32", "--runs", "1", "--jobs", "2"]
needs_namespaces = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root, and iproute2"
)


def run(name: str, *options: str, ranks: int = 1) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*(command if ranks > 1 else [sys.executable]), str(BENCHMARKS / name), *options],
        capture_output=True,
        text=True,
        timeout=net.SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_bars_are_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "bars.svg"
    one = [bars.Bar("plain loop", 147.0, bars.OTHERS), bars.Bar("instep", 9.0, bars.OURS)]
    two = [bars.Bar("instep", -4.0, bars.OURS, (-9.0, 1.0)), bars.Bar("limit", 5.0, bars.LIMIT)]
    bars.draw(path, bars.Panel("MiB & more", {"one batch": one}), bars.Panel("speed", {"": two}, "+.0f"))
    drawn = ElementTree.parse(path).getroot()
    words = [element.text for element in drawn.iter() if element.tag.endswith("}text")]
    assert words == [
        *("MiB & more", "one batch", "plain loop", "147", "instep", "9"),
        *("speed", "instep", "-4", "limit", "+5"),
    ]
    below, above = [element for element in drawn.iter() if element.tag.endswith("}rect")][-2:]
    assert float(below.attrib["x"]) + float(below.attrib["width"]) == pytest.approx(float(above.attrib["x"]), abs=0.1)


def test_marks_stand_where_their_values_are(tmp_path: Path) -> None:
    path = tmp_path / "bars.svg"
    panel = bars.Panel("GiB", {"": [bars.Bar("plain", 10.0, bars.OTHERS, said="ten")]}, marks={"16 GB": 20.0})
    bars.draw(path, panel, layout=bars.Layout(400, 60, 90))
    drawn = ElementTree.parse(path).getroot()
    assert [element.text for element in drawn if element.tag.endswith("}text")] == ["GiB", "16 GB", "plain", "ten"]
    [mark] = [element for element in drawn if element.tag.endswith("}line")]
    bar = [element for element in drawn if element.tag.endswith("}rect")][-1]
    assert (float(mark.attrib["x1"]), float(bar.attrib["width"])) == (60 + 250, 125)


def test_what_a_card_has() -> None:
    assert card_of(16 * 10**9 - 2**30) == 16
    assert card_of(16 * 10**9 - 2**30 + 1) == 24
    assert card_of(80 * 10**9) is None


def test_what_fits_plans_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    several = "AdamW, 8 micro-batches"
    monkeypatch.setitem(what_fits.PARTS, several, replace(what_fits.PARTS[several], micro_batches=2))
    tiny = what_fits.Shape(width=16, depth=1, heads=2, groups=1, hidden=16, words=32)
    found = list(what_fits.rows({"tiny": tiny}, ("AdamW", several, "masters(AdamW)"), (512,), (True, False)))
    named = [(row.part, row.tokens, row.checkpoints) for row in found]
    assert named == [("AdamW", 512, True), ("AdamW", 512, False), (several, 512, True), ("masters(AdamW)", 512, True)]
    checkpointed, kept, together, with_masters = (row.peaks for row in found)
    assert checkpointed["plain"] < kept["plain"]
    assert together.keys() == {"plain", what_fits.TOGETHER}
    assert with_masters["plain"] > checkpointed["plain"]


def test_a_gpu_keeps_the_bucket_before() -> None:
    buckets = [PlannedBucket(nbytes, (), 0) for nbytes in (3, 5, 100)]
    peaks = [PlannedPeak(way, "fused", 1000, 0) for way in ("plain", "backward", "backward, undo")]
    assert what_fits.peaks_of(peaks, buckets) == {"plain": 1000, "backward": 1005}


RESULTS = BENCHMARKS / "results" / "what_fits.json"


def test_the_table_and_the_picture_of_the_readme_are_of_what_was_found(tmp_path: Path) -> None:
    found = [what_fits.Row(**one) for one in json.loads(RESULTS.read_text(encoding="utf-8"))]
    root = BENCHMARKS.parent
    memory = (root / "docs" / "memory.md").read_text(encoding="utf-8")
    assert "\n".join([*what_fits.header(), *map(str, found)]) in memory
    shown = {}
    for row in found:
        plain, ours = (f"{row.peaks[one] / 2**30:.2f} on {card_of(row.peaks[one])}" for one in ("plain", row.way))
        shown[f"| {row.words} | {plain} | {ours} |"] = row
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if re.match(r"\| \d B, ", line)]
    assert 5 < len(rows) <= 8
    assert set(rows) <= shown.keys()
    drawn = {(row.model, row.part, row.tokens, row.checkpoints) for row in map(shown.__getitem__, rows)}
    assert set(what_fits.SHOWN) <= drawn
    run("what_fits.py", "--from", str(RESULTS), "--svg", str(tmp_path / "fits.svg"))
    assert (tmp_path / "fits.svg").read_bytes() == (root / "docs" / "assets" / "fits.svg").read_bytes()


def test_the_demo_is_drawn_line_by_line_and_stays(tmp_path: Path) -> None:
    lines = [
        (2.0, "instep 0.1.0, torch 2.13.0"),
        (3.0, "  plain   no line of instep's"),
        (4.0, ""),
        (4.0, ""),
        (5.0, "word " * 30),
        (7.0, "Weights: equal bit for bit"),
        (8.0, "Report: file:///somewhere"),
    ]
    (tmp_path / "demo.json").write_text(json.dumps(lines))
    run("demo_picture.py", "--from", str(tmp_path / "demo.json"), "--svg", str(tmp_path / "a.svg"), "--seconds", "8")
    drawn = ElementTree.parse(tmp_path / "a.svg").getroot()
    late = {g[0].text: g.attrib["style"] for g in drawn if g.tag.endswith("}g")}
    at_once = [element.text for element in drawn if element.tag.endswith("}text")]
    assert at_once == ["$ instep demo", "plain   no line of instep's"]
    assert late == {
        " ".join(["word"] * 16): "animation-delay: 4.00s",
        " ".join(["word"] * 14): "animation-delay: 4.00s",
        "Weights: equal bit for bit": "animation-delay: 8.00s",
    }


def test_the_demo_of_the_readme_begins_with_words_and_ends() -> None:
    path = BENCHMARKS.parent / "docs" / "assets" / "demo.svg"
    drawn, text = ElementTree.parse(path).getroot(), path.read_text(encoding="utf-8")
    assert sum(element.tag.endswith("}text") for element in drawn) > 1
    assert "infinite" not in text
    assert "prefers-reduced-motion: no-preference" in text
    assert max(map(float, re.findall(r"animation-delay: ([\d.]+)s", text))) <= 3


COUNTED = """
import sys
sys.argv = ["memory.py", "--runs", "1", "--parts", "one-batch", "ranks", "--settings", "float32", "--jobs", "2"]
import contextlib, memory
told = []
memory.in_processes = lambda *given: dict.fromkeys(("own", "above", "weights", "activations", "bucket", "digest"), 1)
memory.planned = lambda *given: __import__("collections").defaultdict(int)
memory.steps_left = lambda: contextlib.nullcontext(lambda done, of, what: told.append((done, of)))
memory.main()
print(told[-1], len(told))
"""


def test_what_is_left_of_the_memory_benchmark() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, timeout=net.SECONDS, check=True, cwd=BENCHMARKS
    )
    last = done.stdout.splitlines()[-1]
    number = last.split()[-1]
    assert last == f"({number}, {number}) {number}"


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--where"]])
def test_what_looking_costs(options: list[str]) -> None:
    rows = run("looking.py", "--cases", "1 MiB", "--rounds", "2", *options).splitlines()[2:]
    assert len(rows) == (11 if options else 1)
    assert all(float(row.split("|")[2]) > 0 for row in rows[1:])


@pytest.mark.nightly
def test_what_a_foreign_optimizer_costs() -> None:
    assert run("foreign.py", "--widths", "64", "--rounds", "1").count("| lion") == 1


def test_the_model_at_scale() -> None:
    assert "backward" in run("simulate.py", "--ranks", "8", "--gbits", "10", "--parameters", "1")


def test_the_model_of_pipelines() -> None:
    said = run("simulate.py", "--pipelines", "--ranks", "2", "--micro-batches", "2")
    assert "ZBVZeroBubble" in said
    assert "DualPipeV requires" in said


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        ("one_device.py", SMALL, 1),
        ("step_placement.py", [*SMALL, "--bucket-mib", "1"], 1),
        ("step_placement.py", [*SMALL, "--bucket-mib", "1"], 2),
        ("safety.py", SMALL, 2),
        ("zero.py", SMALL, 2),
        ("gradient_memory.py", ["--rounds", "2"], 1),
        ("micro_batches.py", ["--mib", "1", "--rounds", "1"], 1),
        ("memory.py", [*ONCE, "--parts", "one-batch", "micro-batches"], 1),
        ("memory.py", [*ONCE, "--parts", "ranks", "ranks-micro-batches"], 1),
        ("memory.py", [*ONCE, "--parts", "device"], 1),
        ("masters.py", ["--rounds", "1", "--width", "32", "--depth", "1", "--kinds", "fused"], 1),
        ("peers.py", ["--memory", "--speed", *SMALL], 1),
        ("pipelines.py", [*SMALL, "--ranks", "2", "--micro-batches", "4"], 1),
    ],
)
def test_runs(name: str, options: list[str], ranks: int) -> None:
    assert run(name, *options, ranks=ranks)


@pytest.mark.nightly
def test_heavy_steps_writes_its_ratios(tmp_path: Path) -> None:
    found = tmp_path / "heavy.json"
    words = ["--rounds", "1", "--steps", "1", "--rows", "1", "--width", "16", "--float32", "--json", str(found)]
    run("heavy_steps.py", *words)
    assert json.loads(found.read_text())["ratio"]["backward, default"]["median"] > 0


@pytest.mark.nightly
def test_what_a_gpu_should_answer(tmp_path: Path) -> None:
    """On a CPU: each part writes its file, and the next call leaves it out."""
    options = ["--device", "cpu", "--small", "--results", str(tmp_path)]
    parts = ["budget", "steps", "usual", "billion", "masters", "offload", "muon", "safety", "trace"]
    run("gpu.py", *options, "--parts", *parts)
    [folder] = tmp_path.iterdir()
    results = {part: json.loads((folder / f"{part}.json").read_text())["result"] for part in parts}
    assert not [part for part, result in results.items() if isinstance(result, dict) and "failed" in result]
    assert results["trace"]["ranges"]["instep::update"] > 3
    assert {entry["AdamW"] for entry in results["steps"]} == {"fused", "foreach"}
    (folder / "selftest.json").write_text("{}")
    (folder / "tests.json").write_text("{}")
    assert [one["rows"] for one in results["budget"]] == [3] * 4  # a CPU takes all that are tried
    assert {one["gradients"] for one in results["masters"]} <= {None, "float32"}
    assert run("gpu.py", *options).count("has a result") == 11


def test_a_step_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("the card is full")

    job = Job(gpu.SMALL, torch.device("cpu"))
    assert gpu._seconds_of(Kind("plain", "plain"), job) is not None
    monkeypatch.setattr(TrainedLoop, "step", full)
    assert gpu._seconds_of(Kind("plain", "plain"), job) is None


def test_the_most_rows_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """To within an eighth, of those that are tried."""
    for there in (0, 1, 2, 3, 7, 37, 100):
        tried: list[int] = []

        def taken(kind: object, job: Any, there: int = there, tried: list[int] = tried) -> float | None:
            tried.append(job.rows)
            return float(job.rows) if job.rows <= there else None

        monkeypatch.setattr(gpu, "_seconds_of", taken)
        job = Job(gpu.SMALL, torch.device("cpu"))
        rows, seconds = gpu._most_rows(Kind("plain", "plain"), job, 64)
        least = min(there, 64)
        assert least - least // 8 <= rows <= least
        assert seconds == rows
        assert len(tried) <= 14


@pytest.mark.nightly
def test_peers_do_what_the_page_says() -> None:
    page = (BENCHMARKS.parent / "docs" / "peers.md").read_text(encoding="utf-8")
    said, found = cells(page.partition("## What they cost")[0]), cells(run("peers.py"))
    assert len(found) > 50
    assert {place: said[place] for place in found} == found


def cells(text: str) -> dict[tuple[str, str], str]:
    """By row and column."""
    header, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    columns = header[-len(rows[0]) + 1 :]
    return {(row[0], column): value for row in rows for column, value in zip(columns, row[1:], strict=True)}


@pytest.mark.nightly
@needs_namespaces
def test_two_ranks_over_a_link_and_the_model_of_them(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    said = run("two_ranks.py", *SMALL, "--gbits", "5", "--steps", "1", "--json", str(found))
    assert "bit for bit" in said
    assert "5" in run("simulate.py", "--measured", str(found))
