"""LLaMA-Factory's ``run_exp`` with the callback of its ``Trainer``.

It pins transformers, and has an environment of its own: ``pip install llamafactory``, then ``pytest -m nightly
tests/frameworks/test_llama_factory.py``.
"""

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from instep import ClipNorm
from instep.integrations.transformers import InstepCallback
from tests.frameworks.comparing import optional, without_times
from tests.frameworks.tiny_llama import WORDS, model, tokenizer

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "together": {"schedule": "backward", "together": True, "clip": ClipNorm(1.0, mode="two_pass")},
}


def prepare(directory: Path) -> None:
    """A model with its tokenizer, and a dataset."""
    model().save_pretrained(directory / "model")
    tokenizer().save_pretrained(directory / "model")
    draw = random.Random(0)
    rows = [
        {
            "instruction": " ".join(draw.choices(WORDS[3:], k=5)),
            "input": "",
            "output": " ".join(draw.choices(WORDS[3:], k=6)),
        }
        for _ in range(40)
    ]
    (directory / "rows.json").write_text(json.dumps(rows))
    (directory / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))


def train(directory: Path, name: str, tuning: str, callbacks: list[Any]) -> tuple[dict[str, torch.Tensor], str]:
    """What is saved, and what is logged."""
    optional("llamafactory.train.tuner").run_exp(
        {
            "stage": "sft",
            "do_train": True,
            "finetuning_type": tuning,
            "model_name_or_path": str(directory / "model"),
            "dataset": "rows",
            "dataset_dir": str(directory),
            "template": "default",
            "cutoff_len": 32,
            "output_dir": str(directory / name),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 3,
            "learning_rate": 1e-2,
            "max_steps": 4,
            "logging_steps": 1,
            "report_to": "none",
            "preprocessing_num_workers": 1,
            "use_reentrant_gc": False,
        },
        callbacks=callbacks,
    )
    [saved] = (directory / name).glob("*.safetensors")
    state = json.loads((directory / name / "trainer_state.json").read_text())
    return load_file(saved), repr(without_times(state["log_history"]))


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_training(tmp_path: Path, tuning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optional("llamafactory")
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    if find_spec("torchaudio") is None:  # of which it asks nothing here
        monkeypatch.setitem(sys.modules, "torchaudio", ModuleType("torchaudio"))
    prepare(tmp_path)
    plain, log = train(tmp_path, "plain", tuning, [])
    for way, options in WAYS.items():
        inside = InstepCallback(**options)
        found, found_log = train(tmp_path, way, tuning, [inside])
        assert found.keys() == plain.keys()
        assert all(torch.equal(plain[name], found[name]) for name in plain)
        assert found_log == log
