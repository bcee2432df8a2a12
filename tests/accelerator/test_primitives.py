"""Where one of torch's ways to order streams does nothing in instep, and in nothing else, tests on the device fail."""

from pathlib import Path

import pytest

from tests import net
from tests.mutation.seeding import PACKAGES, SOURCE, copied, require_failing

ONE_DEVICE = "tests/accelerator/test_one_device.py"
# Methods of torch.Stream cannot be replaced: its type is immutable. So the source calls one that changes nothing.
NOTHING = ".__eq__("


def _calls(name: str, source: Path) -> list[Path]:
    files = (file for package in PACKAGES for file in (source / package).rglob("*.py"))
    return [file for file in files if f".{name}(" in file.read_text(encoding="utf-8")]


@pytest.mark.accelerator
@pytest.mark.timeout(4 * net.SECONDS)
@pytest.mark.parametrize(
    ("name", "picks"),
    [
        ("wait_stream", "test_accumulation and blocks and backward"),
        ("wait_event", "test_accumulation and blocks and backward"),
        ("wait_event", "test_accumulation and blocks and forward"),
        ("set_stream", "test_models_and_optimizers and blocks and AdamW"),
    ],
)
def test_each_is_needed(name: str, picks: str, tmp_path: Path) -> None:
    files = _calls(name, copied(tmp_path))
    assert files
    for file in files:
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(f".{name}(", NOTHING), encoding="utf-8")
    require_failing(tmp_path, [ONE_DEVICE], picks, "accelerator")


def test_no_memory_is_recorded_on_a_stream() -> None:
    """``record_stream`` would keep gradients' memory until the device has come so far: nothing would be saved."""
    assert _calls("record_stream", SOURCE) == []
