"""How far a bucket, an iteration and ``attach`` travel through instep: files and calls, in the regular case.

Every file on the way is one that a reader has to open, and so is every file of the core that names an option. The
bounds are what was counted last: they only ever go down. Once they went up, by the lock of a step: what it says of
Ctrl-C in one file had been said in thirty; once the files by one, when torch's switches got a file of their own; and
once the calls by three and four, when it was asked, too, who has replaced ``_init_group``.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import instep
from instep._torch.handing_over import HandedOver
from tests.journeys import WAYS, Loop, Road, of_a_bucket, of_an_iteration

BOUNDS = {
    # Files, calls.
    "bucket": (8, 12),
    "backward": (28, 353),
    "forward": (30, 651),  # of these 7 ask whether the optimizer has masters, and were written
    "default": (8, 23),
    "undo": (33, 829),
}
ATTACH = {"backward": 40, "forward": 42, "default": 42, "undo": 42}  # with that of the dtypes of gradients


def require_within(road: Road, files: int, calls: int, *, least_files: int = 10, least_calls: int = 60) -> None:
    assert len(road.files) <= files, road.files
    assert len(road.calls) <= calls
    assert len(road.files) > least_files  # else the road was not seen at all
    assert len(road.calls) > least_calls


@pytest.fixture(autouse=True)
def _nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test before this one has compiled."""
    monkeypatch.setattr(HandedOver, "has_code", False)


def test_a_bucket() -> None:
    require_within(of_a_bucket(), *BOUNDS["bucket"], least_files=6, least_calls=8)


@pytest.mark.parametrize("way", list(WAYS))
def test_an_iteration(way: str) -> None:
    loop = Loop(way)
    with loop.overlap:
        least = {"least_files": 6, "least_calls": 16} if way == "default" else {}
        require_within(loop.road(), *BOUNDS[way], **least)


@pytest.mark.parametrize("way", list(WAYS))
def test_attach(way: str) -> None:
    Loop(way).overlap.detach()  # modules are imported once
    loop = Loop(way)
    loop.overlap.detach()
    assert 30 < len(loop.attaching.files) <= ATTACH[way], loop.attaching.files


ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
ROADS = {
    '`schedule="backward"`, one device': "backward",
    '`schedule="backward"`, `DistributedDataParallel`': "ddp",
    '`schedule="backward", undo=True`': "undo",
    '`schedule="forward", defer=True`': "forward",
    '`schedule="forward", defer=False`, where torch takes the step': "default",
}
"""The headings of the roads in ``docs/architecture.md``."""
STATION = re.compile(r"^\d+\. `([\w.]+)` \(`([\w/.]+)`\): ", re.MULTILINE)


@pytest.mark.parametrize("heading", list(ROADS))
def test_the_page_follows_the_trace(heading: str) -> None:
    """Every station of a road is on it, in this order, in this file."""
    _, _, text = ARCHITECTURE.read_text(encoding="utf-8").partition(f"### {heading}\n")
    stations = STATION.findall(re.split("^##", text, maxsplit=1, flags=re.MULTILINE)[0])
    assert len(stations) > 2
    road = iter(of_an_iteration(ROADS[heading]).calls)
    for function, file in stations:
        # Python 3.10 knows the names of functions alone.
        names = (function, function.rpartition(".")[2])
        assert any(call.file == file and call.function in names for call in road), f"{function} does not come here"


CORE = ["_torch", "_optim", "_gradients", "_step", "sources", "_wiring", "_micro_batches"]
NAMES = {
    "offload": ({"offload", "offloaded", "home", "OffloadedState", "HostState", "HostLoading"}, 8),
    "keyed": ({"keyed", "draws", "_draws", "is_keyed", "_is_keyed", "KeyedDraws", "draw_key"}, 9),
    "undo": ({"undo", "on_trial", "Undo", "UndoCopies", "TrialWrites"}, 10),
}
"""By option: what names it in code, and in how many files of the core."""


def names_in(file: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def core() -> Iterator[Path]:
    root = Path(instep.__file__).parent
    for folder in CORE:
        yield from (root / folder).rglob("*.py")
    yield from (root / f"{name}.py" for name in ("attaching", "attachment", "options", "target"))


@pytest.mark.parametrize("option", list(NAMES))
def test_an_option_is_named_where_it_belongs(option: str) -> None:
    names, bound = NAMES[option]
    found = [str(file) for file in core() if not names.isdisjoint(names_in(file))]
    assert 3 < len(found) <= bound, found
