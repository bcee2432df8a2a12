"""The page, in a real browser where there is one, and what the command prints."""

import html
import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from typer.testing import CliRunner

from instep_tools.cli import app
from instep_tools.report.figures import by_job
from instep_tools.report.page import page
from instep_tools.report.run import NotARecordingError, Run, load
from instep_tools.report.spans import Span
from tests import net
from tests.report.runs import GLOO, MAIN, MIB, memory_of, pipelined, run_of, span

HOSTILE = "</title><script>alert(1)</script>&\"'"
LONG = "module." + 40 * "encoder_layer_with_a_name." + "weight"


def some_run(name: str = "a", ranks: int = 2, label: str = "plain") -> Run:
    spans = [
        Span("forward", "forward", 0.0, 0.3, MAIN),
        Span("backward", "backward", 0.3, 0.6, MAIN),
        Span("communication", "all_reduce, 4.00 MiB", 0.4, 0.7, GLOO),
        Span("step", name, 0.6, 0.8, MAIN, (name, "b", "c")),
        Span("waiting", "end of backward", 0.6, 0.65, MAIN),
    ]
    spans += [one._replace(start=one.start + i, end=one.end + i) for i in (1, 2) for one in spans]
    gradients = {name: 3 * MIB, "b": MIB, "c": MIB}
    return run_of(
        spans,
        [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)],
        memory_of(parameters=4 * MIB, gradients=4 * MIB),
        label=label,
        model=name,
        ranks=ranks,
        wrapper="DistributedDataParallel",
        buckets=[[name, "b", "c"]],
        gradients=gradients,
    )


def test_names_are_escaped_and_nothing_is_loaded_from_elsewhere() -> None:
    text = page(by_job([some_run(HOSTILE, label=HOSTILE)]))
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text
    assert text.count("<script") == text.count("</script>") == 2, (
        "the page's own: the values of its curves, and what shows them"
    )
    assert not re.findall(r"https?:|//[a-z]|src=|@import|url\(", text)


needs_a_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")


def in_browser(text: str, probe: str, tmp_path: Path, width: int = 1400) -> dict[str, Any]:
    """What ``probe``, the body of a function of ``page`` (a window that wide, whose document is ``text``), returns."""
    # In a frame: a window is at least 500 wide.
    frame = f"""<!doctype html><body style="margin:0"><iframe style="width:{width}px;height:900px;border:0"></iframe>
      <script>
      const frame = document.querySelector('iframe');
      frame.onload = () => {{
        const page = frame.contentWindow;
        document.body.dataset.found = JSON.stringify((() => {{ {probe} }})());
      }};
      frame.srcdoc = {json.dumps(text).replace("<", chr(92) + "u003c")};
    </script></body>"""
    path = tmp_path / "frame.html"
    path.write_text(frame)
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options = ["--window-size=1500,1000", f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([*browser, *options, path.as_uri()], capture_output=True, text=True, timeout=net.SECONDS)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None, done.stdout[-2000:]
    return json.loads(html.unescape(found[1]))


MEASURED = """
  const root = page.document, room = root.documentElement.clientWidth;
  const shown = e => page.getComputedStyle(e).display !== 'none' && e.getClientRects().length > 0;
  const inside = e => e.closest('.track') && !e.matches('.track');
  const all = [...root.querySelectorAll('body *')].filter(e => shown(e) && !inside(e));
  const broken = [];
  const texts = root.createTreeWalker(root.body, page.NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    if (!shown(node.parentElement) || node.parentElement.closest('script, style')) continue;
    for (const word of node.data.matchAll(/[^\\s]+/g)) {
      const range = root.createRange();
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].filter(r => r.width > 0).map(r => Math.round(r.top)));
      if (tops.size > 1) broken.push(word[0]);
    }
  }
  return {
    outside: all.filter(e => e.getBoundingClientRect().right > room + 1).map(e => e.tagName + '.' + e.className),
    clipped: all.filter(e => e.matches('td, th, li, p, h1, h2, h3, .lane > span, .verdict *')
      && e.scrollWidth > e.clientWidth + 1 && page.getComputedStyle(e).display !== 'inline'
    ).map(e => e.textContent.trim().slice(0, 40)),
    scrolls: [root.documentElement, ...root.querySelectorAll('.wide')]
      .filter(e => e.scrollWidth > e.clientWidth + 1).length,
    broken, bars: root.querySelectorAll('.bar').length,
  };
"""


@needs_a_browser
@pytest.mark.parametrize("width", [360, 800, 1400])
def test_in_a_browser_nothing_is_clipped_and_no_word_is_broken(width: int, tmp_path: Path) -> None:
    runs = [
        some_run(LONG, ranks=9),
        some_run(LONG, ranks=9, label="instep, schedule='backward', bucket_bytes=16777216"),
    ]
    found = in_browser(page(by_job(runs)), MEASURED, tmp_path, width)
    assert found["bars"] > 2 * 8 * 6
    assert {name: found[name] for name in ("outside", "clipped", "broken", "scrolls")} == {
        "outside": [],
        "clipped": [],
        "broken": [],
        "scrolls": 0,
    }


@needs_a_browser
def test_values_are_read_by_pointer_and_by_keyboard(tmp_path: Path) -> None:
    probe = """
      const [lanes, curves] = page.document.querySelectorAll('.panel'), said = [];
      const read = panel => said.push(panel.querySelector('.readout').textContent);
      const press = (panel, key) => panel.dispatchEvent(new page.KeyboardEvent('keydown', {key, bubbles: true}));
      const point = (panel, share) => {
        const track = panel.querySelector('.track'), box = track.getBoundingClientRect();
        const clientX = box.left + share * box.width;
        track.dispatchEvent(new page.PointerEvent('pointermove', {clientX, bubbles: true}));
      };
      read(lanes); point(lanes, 0.1); read(lanes); point(curves, 0.5); read(curves);
      press(curves, 'Home'); read(curves); press(curves, 'End'); read(curves);
      press(lanes, 'Home'); press(lanes, 'ArrowRight'); read(lanes);
      const ticks = () => [...lanes.querySelectorAll('.tick')].map(t => t.textContent);
      const before = ticks(); press(lanes, '+'); press(lanes, '+'); const closer = ticks();
      press(lanes, 'Escape'); read(lanes);
      return {said, before, closer, after: ticks(), focusable: lanes.tabIndex};
    """
    found = in_browser(page(by_job([some_run(ranks=1), some_run(ranks=1, label="instep")])), probe, tmp_path)
    hint, pointed, memory, first, last, stepped, again = found["said"]
    assert hint == again
    assert hint.startswith("Point at the picture")
    assert pointed.splitlines() == [
        "200.00 ms",
        "plain: forward: 300.00 ms",
        "instep: forward: 300.00 ms",
    ]
    assert memory.splitlines() == ["500.00 ms", "plain: 8.0 MiB", "instep: 8.0 MiB"]
    assert first.splitlines()[:2] == ["0.00 ms", "plain: 0.0 MiB"]
    assert last.splitlines()[0] == "1000.00 ms"
    assert stepped.splitlines()[0] == "20.00 ms"
    assert found["before"] == found["after"] != found["closer"]
    assert len(found["closer"]) > 1
    assert found["focusable"] == 0


def test_a_recording_is_read_as_it_was_saved(tmp_path: Path) -> None:
    run = some_run()
    for name in ("run.json", "run.json.gz"):
        run.save(tmp_path / name, [[{"ph": "X", "name": "aten::mm", "tid": 1, "ts": 5.0, "dur": 1.0}]] * 2)
        again = load(tmp_path / name)
        assert page(by_job([again])) == page(by_job([run]))
    assert (tmp_path / "run.json.gz").stat().st_size < (tmp_path / "run.json").stat().st_size
    trace = json.loads((tmp_path / "run.json").read_bytes())
    assert {event["pid"] for event in trace["traceEvents"]} == {0}, "rank 0 twice"
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"aten::mm", "step: a", "communication: all_reduce, 4.00 MiB"} <= {event["name"] for event in shown}
    assert all(event["dur"] > 0 for event in shown)
    assert any(event["ph"] == "C" and event["args"]["bytes"] == 8 * MIB for event in trace["traceEvents"])


def took(seconds: float, peak_mib: int, label: str, **job: Any) -> Run:
    """A recording of iterations that took about so long each."""
    ends = [0.0, seconds, 2.01 * seconds, 3.0 * seconds]
    spans = [span("forward", start, start + 0.3 * seconds) for start in ends[:-1]]
    spans += [span("step", start + 0.8 * seconds, start + 0.9 * seconds) for start in ends[:-1]]
    options = {} if label == "plain" else {"schedule": "'backward'"}
    memory = memory_of(parameters=4 * MIB, gradients=(peak_mib - 4) * MIB)
    return run_of(spans, list(pairwise(ends)), memory, label=label, options=options, **job)


THREE_JOBS = [
    [took(1.0, 100, "plain"), took(1.5, 90, "instep")],
    [took(0.1, 50, "plain", model="Small", count=10_000), took(0.05, 20, "instep", model="Small", count=10_000)],
    [took(4.0, 300, "plain", batch=("(32, 64) float32",))],
]
CLAIMS = re.compile(
    r"[\d.]+ MiB (?:less|more)|\d+% (?:shorter|longer)|as long(?! as)|the same\b|[\d.]+ ms to [\d.]+ ms"
)


def claims_of(runs: list[Run]) -> set[str]:
    """What may be said to differ between recordings, counted here from what they hold."""
    if len(runs) == 1:
        return set()
    first, last = (run.ranks[0] for run in runs)
    before, after = ([end - start for start, end in rank.iterations] for rank in (first, last))
    saved = (first.memory.peak - last.memory.peak) / MIB
    share = median(after) / median(before) - 1
    exposed = [1e3 * median(s.end - s.start for s in r.spans if s.kind == "step") for r in (first, last)]
    return {
        f"{abs(saved):.1f} MiB {'less' if saved > 0 else 'more'}",
        f"{abs(share):.0%} {'shorter' if share < 0 else 'longer'}",
        f"{exposed[0]:.1f} ms to {exposed[1]:.1f} ms",
    }


def words_of(text: str) -> str:
    shown = re.sub(r"<(script|style).*?</\1>|<wbr>", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", shown)))


def test_recordings_of_different_jobs_are_not_compared() -> None:
    """Every number on the page that claims a difference is one between recordings of the same job."""
    mixed = [THREE_JOBS[job][number] for job, number in [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]]
    text = page(by_job(mixed))
    assert "of 3 different jobs" in text
    _, *parts = text.split('<h2 class="job">')
    assert len(parts) == len(THREE_JOBS)
    for part, runs in zip(parts, THREE_JOBS, strict=True):
        words = words_of(part)
        assert set(CLAIMS.findall(words)) - {"the same"} == claims_of(runs), words
        assert words.count("What to change") == words.count("Timeline") == 1
    assert [part.count("in place of") for part in parts] == [0, 0, 0]


def test_recordings_in_a_terminal_are_grouped_too(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.json" for number in range(5)]
    for file, run in zip(files, (run for runs in THREE_JOBS for run in runs), strict=True):
        run.save(file)
    code, text, _ = invoke(*files)
    assert code == 0
    said = re.sub(r"\s+", " ", text)
    for runs in THREE_JOBS:
        assert runs[0].job.model in said
        assert all(claim in said for claim in claims_of(runs) if "to" not in claim)
    allowed = set().union(*map(claims_of, THREE_JOBS))
    assert set(CLAIMS.findall(said)) <= allowed


def test_a_terminal_says_of_weights_what_the_page_does(tmp_path: Path) -> None:
    files = [tmp_path / "plain.json", tmp_path / "attached.json"]
    for file, label in zip(files, ("plain", "instep"), strict=True):
        some_run(label=label).save(file)
    assert "Weights: not compared" in invoke(*files)[1]
    assert "Weights" not in invoke(files[0])[1]


def test_buckets_of_which_there_is_nothing_to_tell_have_no_table(tmp_path: Path) -> None:
    """torch has taken the steps as a whole."""
    run = some_run()
    whole = replace(
        run, ranks=[replace(one, spans=[s._replace(parameters=()) for s in one.spans]) for one in run.ranks]
    )
    for one, has_table in ((run, True), (whole, False)):
        one.save(tmp_path / "run.json")
        assert ("on its way" in invoke(tmp_path / "run.json")[1]) == has_table
        assert ("on its way" in page(by_job([one]))) == has_table


def test_flights_of_buckets_have_rows_of_their_own(tmp_path: Path) -> None:
    """They overlap without one being inside the other, which a row cannot show."""
    run = run_of([span("flight", 0.0, 0.5, GLOO, "a"), span("flight", 0.2, 0.9, GLOO, "b")])
    run.save(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_bytes())["traceEvents"]
    rows = [event["tid"] for event in events if event["ph"] == "X"]
    assert len(set(rows)) == 2
    assert {event["tid"] for event in events if event["name"] == "thread_name"} >= set(rows)


def test_stages_and_bubbles_have_lanes() -> None:
    plain, attached = pipelined(0.1, 0.05, attached=False), pipelined(0.1, 0.2, attached=True)
    text = page(by_job([plain, attached]))
    lanes = re.findall('data-lane="([^"]*)" data-run="([^"]*)"', text)
    for label in ("plain", "instep"):
        assert [lane for lane, run in lanes if run == f"{label} rank 0"] == ["stage 0", "stage 3", *OTHERS]
        assert [lane for lane, run in lanes if run == f"{label} rank 1"] == ["stage 1", "stage 2", *OTHERS]
    titles = Counter(re.findall('title="([^"]*)"', text))
    assert titles["forward, stage 0, micro-batch 0: 100.00 ms"] == 2
    assert titles["backward, stage 2, weights, micro-batch 0: 100.00 ms"] == 2
    assert titles["step, stage 3, a: 100.00 ms"] == titles["step, stage 2, a: 200.00 ms"] == 1
    assert (titles["bubble: 100.00 ms"], titles["bubble: 200.00 ms"]) == (9, 2), "plain, the last one is whole"
    words = words_of(text)
    assert "bubbles Inside schedule.step(): no stage of the rank computes, nor is stepped. By rank. 400.0 ms" in words
    assert "step, in schedule.step()" in words
    assert "Bubble :" in words
    without = words_of(page(by_job([some_run()])))
    assert "ubble" not in without
    assert "schedule.step()" not in without


OTHERS = ("optimizer", "bubbles", "waiting")


def test_bubbles_have_a_row_in_a_trace_viewer_and_are_read_again(tmp_path: Path) -> None:
    run, path = pipelined(0.1, 0.2, attached=True), tmp_path / "run.json"
    run.save(path)
    assert page(by_job([load(path)])) == page(by_job([run]))
    events = json.loads(path.read_bytes())["traceEvents"]
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    shown = {(rows[event["pid"], event["tid"]], event["name"]) for event in events if event["ph"] == "X"}
    assert {name for row, name in shown if row == "bubbles"} == {"bubble: bubble"}
    assert ("the loop", "forward: stage 3, micro-batch 0") in shown
    assert ("the loop", "bubble: bubble") not in shown


def test_a_recording_from_before_there_were_pipelines_is_read(tmp_path: Path) -> None:
    run, path = some_run(), tmp_path / "run.json"
    run.save(path)
    document = json.loads(path.read_bytes())
    for rank in document["instep"]["ranks"]:
        rank["spans"] = [span[:6] for span in rank["spans"]]
        del rank["stages"], rank["runs"]
    path.write_text(json.dumps(document))
    assert page(by_job([load(path)])) == page(by_job([run]))


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\x1f\x8b123", b'{"instep": 1}', b'{"instep": {"format": 0}}']
)
def test_what_is_no_recording_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(NotARecordingError, match=r"run\.json"):
        load(path)


def test_a_damaged_one_too(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    some_run().save(path)
    path.write_text(path.read_text().replace('"iterations"', '"iteration"'))
    with pytest.raises(NotARecordingError, match="damaged"):
        load(path)


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_the_command(tmp_path: Path) -> None:
    plain, attached, out = tmp_path / "plain.json", tmp_path / "attached.json", tmp_path / "report.html"
    some_run().save(plain)
    some_run(label="instep, schedule='backward'").save(attached)
    code, text, errors = invoke(plain, attached)
    assert (code, errors) == (0, "")
    assert "step, hidden" in text
    assert "schedule='backward'" in text
    assert invoke(plain, attached, "-o", out) == (0, "", f"wrote {out}\n")
    assert out.read_text() == page(by_job([load(plain), load(attached)]))
    again = tmp_path / "again.json"
    some_run().save(again)
    code, text, errors = invoke(plain, again)
    assert text.count("plain.json: plain") == text.count("again.json: plain") == 2, "in the table, and below"
    again.unlink()
    code, text, errors = invoke(plain, "--json")
    (found,) = json.loads(text)
    assert found["figures"]["step"]["hidden"] == pytest.approx(0.1)
    assert found["peak"]["alive"]["gradients"] == 4 * MIB
    assert found["advice"]
    assert sorted(tmp_path.iterdir()) == [attached, plain, out]


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    missing, plain = tmp_path / "missing.json", tmp_path / "plain.json"
    some_run().save(plain)
    assert invoke(missing) == (2, "", f"instep report: cannot read {missing}: No such file or directory\n")
    out = tmp_path / "no" / "report.html"
    assert invoke(plain, "-o", out) == (
        2,
        "",
        f"instep report: cannot write --output {out}: No such file or directory\n",
    )
