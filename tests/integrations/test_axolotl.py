"""axolotl's plugin, against a stand-in of its interface: the classes and calls of axolotl 0.19 that it uses."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from instep.errors import AttachError
from instep_tools.harness import first_difference, training_state
from tests.integrations.hugging_face import sentences, tiny

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "log_level": "error",
}


class BasePlugin:
    """Of its methods those that a plugin without a model, an adapter or data of its own may have."""

    def register(self, cfg: dict[str, Any]) -> None: ...

    def get_input_args(self) -> str | None: ...

    def add_callbacks_pre_trainer(self, cfg: dict[str, Any], model: Any) -> list[Any]:
        return []


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As axolotl's ``load_plugin`` makes it from the name in ``plugins:``."""
    pytest.importorskip("pydantic")
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["axolotl.integrations.base"], "BasePlugin", BasePlugin, raising=False)
    module, name = ["instep.integrations.axolotl", "InstepPlugin"]
    yield getattr(importlib.import_module(module), name)()
    sys.modules.pop(module)


def trained(directory: Path, callbacks: list[Any]) -> Trainer:
    trainer = Trainer(tiny(), TrainingArguments(str(directory), **SETTINGS), train_dataset=sentences(20))
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    return trainer


TWO_PASS = {"schedule": "backward", "together": True, "clip": {"max_norm": 1.0, "mode": "two_pass"}}


@pytest.mark.parametrize("options", [None, {"schedule": "backward", "undo": True}, TWO_PASS], ids=str)
def test_training(tmp_path: Path, plugin: Any, options: dict[str, Any] | None) -> None:
    cfg = {} if options is None else {"instep": options}
    plugin.register(cfg)
    plain = trained(tmp_path, [])
    other = trained(tmp_path, plugin.add_callbacks_pre_trainer(cfg, None))
    states = [training_state(one.model, one.optimizer.optimizer) for one in (plain, other)]
    assert first_difference(*states) is None


def test_the_configuration(plugin: Any) -> None:
    """axolotl imports the class by the name, and has its own inherit from it."""
    module, name = plugin.get_input_args().rsplit(".", 1)
    base = getattr(importlib.import_module(module), name)
    combined = type("AxolotlInputConfig", (base,), {})
    assert combined(instep=TWO_PASS).model_dump() == {"instep": TWO_PASS}
    assert combined().instep is None


def test_options_that_do_not_fit(plugin: Any) -> None:
    for options, message in (
        ({"schedul": "backward"}, r"takes the options of InstepCallback.*'schedul'"),
        ({"clip": {"norm": 1.0}}, r"in clip: those of ClipNorm.*'norm'"),
        ({"together": True}, "schedule='forward' frees none"),
    ):
        with pytest.raises(AttachError, match=message):
            plugin.register({"instep": options})


def test_without_axolotl() -> None:
    if "axolotl" not in sys.modules and importlib.util.find_spec("axolotl") is None:
        with pytest.raises(ImportError, match="pip install axolotl"):
            importlib.import_module("instep.integrations.axolotl")
