"""What stands on the ``Trainer``: TRL, peft, sentence-transformers. One callback, and otherwise their own examples."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from instep import ClipNorm
from instep.integrations.transformers import InstepCallback
from tests.frameworks.comparing import Trained, optional, require_equal, without_times
from tests.frameworks.tiny_llama import model, text, tokenizer
from tests.integrations.hugging_face import most_gradients

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

SMALL = 8_000  # bytes: several buckets
WAYS: Mapping[str, Callable[[], InstepCallback]] = {
    "default": InstepCallback,
    "forward": lambda: InstepCallback(schedule="forward", defer=True, bucket_bytes=SMALL),
    "undo": lambda: InstepCallback(schedule="backward", undo=True, bucket_bytes=SMALL),
    "together": lambda: InstepCallback(
        schedule="backward", clip=ClipNorm(1.0, mode="two_pass"), together=True, bucket_bytes=SMALL
    ),
}
in_every_way = pytest.mark.parametrize("way", WAYS)
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_grad_norm": 1.0,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


class Counting(TrainerCallback):  # type: ignore[misc]  # its types are skipped
    """Notes how many steps instep has made."""

    def __init__(self, inside: InstepCallback) -> None:
        self.inside = inside
        self.steps = 0

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        assert self.inside.overlap is not None
        self.steps = self.inside.overlap.step_count


def compared(make: Callable[[list[TrainerCallback]], Trainer], way: str) -> None:
    """The trainer that ``make`` makes trains the same with the callback."""

    def run(attached: bool) -> Trained:
        inside = WAYS[way]()
        counting = Counting(inside)
        trainer = make([inside, counting] if attached else [])
        trainer.train()
        steps = counting.steps if attached else None
        return Trained(trainer.model, trainer.optimizer.optimizer, without_times(trainer.state.log_history), steps)

    require_equal(run)


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_checkpointing": True}, {"packing": True, "max_length": 16}], ids=str
)
@in_every_way
def test_sft(tmp_path: Path, way: str, settings: dict[str, Any]) -> None:
    trl = optional("datasets", "trl")
    rows = optional("datasets").Dataset.from_list([{"text": text(seed)} for seed in range(40)])

    def make(callbacks: list[TrainerCallback]) -> Trainer:
        arguments = trl.SFTConfig(str(tmp_path), **{**SETTINGS, **settings})
        return trl.SFTTrainer(model(), arguments, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks)

    compared(make, way)


def test_sft_with_accumulated_gradients_freed(tmp_path: Path) -> None:
    """One line more: the Trainer's weights and logs, with accumulation and clipping, in less than half of the memory
    of its gradients."""
    trl = optional("datasets", "trl")
    rows = optional("datasets").Dataset.from_list([{"text": text(seed)} for seed in range(40)])
    most: list[int] = []

    def run(attached: bool) -> Trained:
        inside = WAYS["together"]()
        counting = Counting(inside)
        trainer = trl.SFTTrainer(
            model(),
            trl.SFTConfig(str(tmp_path), **{**SETTINGS, "gradient_accumulation_steps": 8}),
            train_dataset=rows,
            processing_class=tokenizer(),
            callbacks=[inside, counting] if attached else [],
        )
        most.append(most_gradients(trainer))
        steps = counting.steps if attached else None
        return Trained(trainer.model, trainer.optimizer.optimizer, without_times(trainer.state.log_history), steps)

    require_equal(run)
    plain, freed = most
    assert freed < 0.5 * plain


@in_every_way
def test_dpo(tmp_path: Path, way: str) -> None:
    trl = optional("datasets", "trl")
    pairs = [{"prompt": text(s), "chosen": text(100 + s), "rejected": text(200 + s)} for s in range(30)]
    rows = optional("datasets").Dataset.from_list(pairs)

    def make(callbacks: list[TrainerCallback]) -> Trainer:
        arguments = trl.DPOConfig(str(tmp_path), **SETTINGS)
        return trl.DPOTrainer(
            model(), model(), arguments, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks
        )

    compared(make, way)


@in_every_way
def test_kto(tmp_path: Path, way: str) -> None:
    trl = optional("datasets", "trl")
    kto = trl if hasattr(trl, "KTOTrainer") else optional("trl.experimental.kto")
    labelled = [{"prompt": text(s), "completion": text(100 + s), "label": s % 2 == 0} for s in range(30)]
    rows = optional("datasets").Dataset.from_list(labelled)

    def make(callbacks: list[TrainerCallback]) -> Trainer:
        arguments = kto.KTOConfig(str(tmp_path), **SETTINGS)
        return kto.KTOTrainer(
            model(), model(), arguments, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks
        )

    compared(make, way)


@in_every_way
def test_grpo(tmp_path: Path, way: str) -> None:
    trl = optional("datasets", "trl")
    rows = optional("datasets").Dataset.from_list([{"prompt": text(seed)} for seed in range(30)])

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    def make(callbacks: list[TrainerCallback]) -> Trainer:
        arguments = trl.GRPOConfig(str(tmp_path), num_generations=2, max_completion_length=6, **SETTINGS)
        return trl.GRPOTrainer(
            model(), reward, arguments, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks
        )

    compared(make, way)


@pytest.mark.parametrize("dora", [False, True])
@in_every_way
def test_peft(tmp_path: Path, way: str, dora: bool) -> None:
    peft, trl = optional("peft"), optional("datasets", "trl")
    rows = optional("datasets").Dataset.from_list([{"text": text(seed)} for seed in range(40)])

    def make(callbacks: list[TrainerCallback]) -> Trainer:
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, lora_dropout=0.1, use_dora=dora, task_type="CAUSAL_LM", target_modules="all-linear")
        arguments = trl.SFTConfig(str(tmp_path), **SETTINGS)
        return trl.SFTTrainer(
            model(), arguments, train_dataset=rows, processing_class=tokenizer(), peft_config=lora, callbacks=callbacks
        )

    compared(make, way)


@in_every_way
def test_sentence_transformers(tmp_path: Path, way: str) -> None:
    found = optional("datasets", "sentence_transformers")
    parts = optional("sentence_transformers.sentence_transformer.modules")
    losses = optional("sentence_transformers.sentence_transformer.losses")
    rows = optional("datasets").Dataset.from_list([{"anchor": text(s), "positive": text(100 + s)} for s in range(40)])

    def make(callbacks: list[TrainerCallback]) -> Trainer:
        body, words = tmp_path / "body", tokenizer()
        model().model.save_pretrained(body)
        words.save_pretrained(body)
        transformer = parts.Transformer(str(body))
        pooling = parts.Pooling(32)
        made = found.SentenceTransformer(modules=[transformer, pooling], device="cpu")
        settings = {key: value for key, value in SETTINGS.items() if key != "gradient_checkpointing"}
        arguments = found.SentenceTransformerTrainingArguments(str(tmp_path), **settings)
        loss = losses.MultipleNegativesRankingLoss(made)
        return found.SentenceTransformerTrainer(made, arguments, train_dataset=rows, loss=loss, callbacks=callbacks)

    compared(make, way)
