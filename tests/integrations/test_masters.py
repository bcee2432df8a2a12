"""``instep.masters`` in the Trainer and in Lightning: with instep as without, and from a checkpoint on."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import PrinterCallback, Trainer, TrainingArguments

import instep
from instep.integrations.transformers import InstepCallback
from instep_tools.harness import first_difference, training_state
from tests.devices import on_cpu_only
from tests.integrations.fitting import WAYS, Classifier, assert_fits_the_same, assert_same, fit, left_by
from tests.integrations.hugging_face import sentences, tiny

pytestmark = on_cpu_only


def trained(directory: Path, way: dict[str, Any] | None, resume: str | None = None, **settings: Any) -> Trainer:
    model = tiny().to(torch.bfloat16)
    arguments = TrainingArguments(
        str(directory),
        per_device_train_batch_size=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        **{"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "save_strategy": "no", **settings},
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=sentences(12),
        optimizer_cls_and_kwargs=(instep.masters(torch.optim.AdamW), {"lr": 1e-2}),
        callbacks=[] if way is None else [InstepCallback(**way)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def state_of(trainer: Trainer) -> Any:
    return training_state(trainer.model, trainer.optimizer.optimizer)


@pytest.mark.parametrize("together", [False, True])
def test_the_trainer(tmp_path: Path, together: bool) -> None:
    plain = trained(tmp_path, None)
    assert all("master" in entry for entry in plain.optimizer.optimizer.state.values())
    other = trained(tmp_path, {"schedule": "backward", "bucket_bytes": 8_000, "together": together})
    assert first_difference(state_of(plain), state_of(other)) is None


def test_the_trainer_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    way = {"schedule": "backward"}
    plain = trained(tmp_path / "plain", None)
    trained(tmp_path / "saved", way, save_strategy="epoch")
    (first, *_) = sorted((tmp_path / "saved").glob("checkpoint-*"))
    other = trained(tmp_path / "saved", way, str(first))
    assert first_difference(state_of(plain), state_of(other)) is None


class Half(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(torch.bfloat16)).float()

    def configure_optimizers(self) -> Any:
        optimizer = instep.masters(torch.optim.AdamW)(self.named_parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("way", WAYS)
def test_lightning(way: str) -> None:
    assert_fits_the_same(way, steps=14, build=Half)


def test_lightning_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def saving() -> list[pl.Callback]:
        return [pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)]

    wanted = left_by(*fit(WAYS["backward"], Half, saving))
    found = left_by(*fit(WAYS["backward"], Half, ckpt_path=str(tmp_path / "epoch=0.ckpt")))
    for what in ("parameters", "optimizers"):
        assert_same(found[what], wanted[what])
