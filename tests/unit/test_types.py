"""What a type checker says of a user's program."""

import subprocess
import sys
from pathlib import Path

import pytest

import instep

SOURCE = Path(instep.__file__).parents[1]
PROGRAM = """
import torch
from torch import nn

import instep

model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
instep.attach(model, optimizer, {option})
instep.attach([model, nn.Linear(2, 2)], [optimizer], undo="host", nonfinite="skip", defer="auto")
with instep.attach((model,), optimizer, schedule="backward").keep_gradients():
    pass
"""


@pytest.mark.nightly  # mypy reads torch, which takes ten seconds
def test_an_option_that_is_misspelt(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    options = ['schedule="sideways"', 'nonfinite="skp"', 'undo="disk"', 'defer="never"']
    files = [tmp_path / f"program{number}.py" for number in range(len(options))]
    for file, option in zip(files, options, strict=True):
        file.write_text(PROGRAM.format(option=option))
    command = [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", str(tmp_path / "cache"), *map(str, files)]
    done = subprocess.run(
        command, env={"MYPYPATH": str(SOURCE)}, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    for file, option in zip(files, options, strict=True):
        name = option.partition("=")[0]
        assert f'{file.name}:9: error: Argument "{name}" to "attach" has incompatible type' in done.stdout, done
    assert f"Found {len(options)} errors in {len(options)} files" in done.stdout
