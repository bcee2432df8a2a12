"""The page, in a real browser where there is one, and what the command prints."""

import html
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instep_tools.cli import app
from instep_tools.output import CannotRunError
from instep_tools.report.page import page
from instep_tools.report.run import Run, load
from instep_tools.report.spans import Span
from tests import net
from tests.report.runs import GLOO, MAIN, MIB, pipelined, run_of, span

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
    return run_of(
        spans,
        [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)],
        4 * MIB,
        label=label,
        model=name,
        ranks=ranks,
        wrapper="DistributedDataParallel",
    )


def test_names_are_escaped_and_nothing_is_loaded_from_elsewhere() -> None:
    text = page([some_run(HOSTILE, label=HOSTILE)])
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text
    assert "<script" not in text
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
    clipped: all.filter(e => e.matches('td, th, li, p, h1, h2, h3, .lane > span, .first *')
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
    found = in_browser(page(runs), MEASURED, tmp_path, width)
    assert found["bars"] > 2 * 8 * 6
    assert {name: found[name] for name in ("outside", "clipped", "broken", "scrolls")} == {
        "outside": [],
        "clipped": [],
        "broken": [],
        "scrolls": 0,
    }


def test_a_recording_is_read_as_it_was_saved(tmp_path: Path) -> None:
    run = some_run()
    for name in ("run.json", "run.json.gz"):
        run.save(tmp_path / name, [[{"ph": "X", "name": "aten::mm", "tid": 1, "ts": 5.0, "dur": 1.0}]] * 2)
        again = load(tmp_path / name)
        assert page([again]) == page([run])
    assert (tmp_path / "run.json.gz").stat().st_size < (tmp_path / "run.json").stat().st_size
    trace = json.loads((tmp_path / "run.json").read_bytes())
    assert {event["pid"] for event in trace["traceEvents"]} == {0}, "rank 0 twice"
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"aten::mm", "step: a", "communication: all_reduce, 4.00 MiB"} <= {event["name"] for event in shown}
    assert all(event["dur"] > 0 for event in shown)


def words_of(text: str) -> str:
    shown = re.sub(r"<style.*?</style>|<wbr>", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", shown)))


def test_each_recording_has_a_column() -> None:
    runs = [some_run(ranks=1), run_of([span("step", 0.6, 0.7)], gradients=MIB, label="instep", model="Other")]
    words = words_of(page(runs))
    assert "gradients at once plain 4.00 MiB instep 1.00 MiB" in words
    assert "instep : Other, 1.0 M parameters of float32, AdamW(fused=True), one rank, cpu" in words


def test_flights_of_buckets_have_rows_of_their_own(tmp_path: Path) -> None:
    """They overlap without one being inside the other, which a row cannot show."""
    run = run_of([span("flight", 0.0, 0.5, GLOO, "a"), span("flight", 0.2, 0.9, GLOO, "b")])
    run.save(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_bytes())["traceEvents"]
    rows = [event["tid"] for event in events if event["ph"] == "X"]
    assert len(set(rows)) == 2
    assert {event["tid"] for event in events if event["name"] == "thread_name"} >= set(rows)


def test_stages_have_lanes(tmp_path: Path) -> None:
    run, path = pipelined(), tmp_path / "run.json"
    text = page([run])
    for stage in range(4):
        assert f"<span>stage {stage}</span>" in text
    titles = Counter(re.findall('title="([^"]*)"', text))
    assert titles["forward, stage 0, micro-batch 0: 100.00 ms"] == 1
    assert titles["backward, stage 2, weights, micro-batch 0: 100.00 ms"] == 1
    assert titles["step, stage 3, a: 100.00 ms"] == 1
    run.save(path)
    assert page([load(path)]) == text
    events = json.loads(path.read_bytes())["traceEvents"]
    assert "forward: stage 3, micro-batch 0" in {event["name"] for event in events}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\x1f\x8b123", b'{"instep": 1}', b'{"instep": {"format": 0}}']
)
def test_what_is_no_recording_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(CannotRunError, match=r"run\.json"):
        load(path)


def test_a_damaged_one_too(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    some_run().save(path)
    path.write_text(path.read_text().replace('"iterations"', '"iteration"'))
    with pytest.raises(CannotRunError, match="is not a recording"):
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
    assert out.read_text() == page([load(plain), load(attached)])
    again = tmp_path / "again.json"
    some_run().save(again)
    code, text, errors = invoke(plain, again)
    assert text.count("plain.json: plain") == text.count("again.json: plain") == 2, "in the table, and below"
    again.unlink()
    code, text, errors = invoke(plain, "--json")
    (found,) = json.loads(text)
    assert found["figures"]["step"]["hidden"] == pytest.approx(0.1)
    assert found["gradient_bytes"] == 4 * MIB
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
