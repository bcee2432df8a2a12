"""``InstepCallback``: a ``Trainer`` with it ends, and logs, bit for bit as one without."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import instep
from instep import ClipNorm
from instep._core.placeholders import SpentGradient
from instep.errors import AttachError, TornStepError
from instep.integrations.transformers import InstepCallback
from instep.verification import first_difference, training_state
from tests.distributed.pool import RankPool
from tests.integrations import hugging_face
from tests.integrations.hugging_face import hooks_of, sentences, tiny

LIMIT = 1.5
"""Some of the steps below have a larger norm, and some a smaller one."""
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_grad_norm": LIMIT,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "log_level": "error",
}
ROWS = 14  # seven micro-batches on one rank, four on each of two: the last step of an epoch has fewer
in_every_way = pytest.mark.parametrize("way", ["forward", "undo", "backward"])


def callback(way: str, limit: float = LIMIT) -> InstepCallback:
    if way == "forward":
        return InstepCallback()
    if way == "undo":
        return InstepCallback(schedule="backward", undo=True)
    return InstepCallback(schedule="backward", clip=ClipNorm(limit, mode="two_pass") if limit else None)


class Witness(TrainerCallback):
    """That the model was attached, as it was trained, and stepped when the schedule says."""

    def __init__(self, inside: InstepCallback) -> None:
        self.inside = inside
        self.seen: list[str] = []
        self.spent: list[bool] = []
        self.redone = 0

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # undo is not told that somebody looks
            self.spent.append(any(isinstance(p.grad, SpentGradient) for p in model.parameters()))

    def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        assert self.inside.overlap is not None
        self.seen.append(repr(self.inside.overlap))
        self.redone = self.inside.overlap.redo_count


def trainer(directory: Path, inside: InstepCallback | None, kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    callbacks = [] if inside is None else [inside, Witness(inside)]
    data = sentences(ROWS + 4)
    arguments = TrainingArguments(str(directory), **{**SETTINGS, **settings})
    made = kind(tiny(), arguments, train_dataset=data[:ROWS], eval_dataset=data[ROWS:], callbacks=callbacks)
    made.remove_callback(PrinterCallback)
    return made


def logged(of: Trainer) -> list[dict[str, Any]]:
    """All but what the clock says."""
    clock = ("_runtime", "_per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(clock)} for entry in of.state.log_history]


def require_same(plain: Trainer, other: Trainer) -> None:
    states = [training_state(one.model, one.optimizer.optimizer) for one in (plain, other)]
    assert first_difference(*states) is None
    assert logged(plain) == logged(other)
    assert plain.lr_scheduler.state_dict() == other.lr_scheduler.state_dict()


def require_was_attached(of: Trainer, way: str) -> None:
    [inside] = [one for one in of.callback_handler.callbacks if isinstance(one, InstepCallback)]
    [witness] = [one for one in of.callback_handler.callbacks if isinstance(one, Witness)]
    kind = "DistributedDataParallel" if of.args.world_size > 1 else "GPT2LMHeadModel"
    assert (
        f"Attachment {kind} with AdamW: schedule='{'forward' if way == 'forward' else 'backward'}'" in witness.seen[-1]
    )
    assert f"{len(witness.seen)} steps" in witness.seen[-1]
    assert any(witness.spent) == (way == "backward")
    assert inside.overlap is None
    assert instep.attached(of.model_wrapped) is None


def require_gone(of: Trainer, before: dict[str, int]) -> None:
    assert hooks_of(of.model) == before
    assert not {"clip_grad_norm_", "backward"} & vars(of.accelerator).keys()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    yield from hugging_face.two_ranks()


# Each on one rank and on two.


def trains_as_without(directory: Path, way: str, settings: dict[str, Any]) -> None:
    plain = trainer(directory, None, **settings)
    before = hooks_of(plain.model)
    plain.train()
    limit = settings.get("max_grad_norm", LIMIT)
    other = trainer(directory, callback(way, limit), **settings)
    other.train()
    require_was_attached(other, way)
    require_same(plain, other)
    require_gone(other, before)
    norms = [entry["grad_norm"] for entry in logged(plain) if "grad_norm" in entry]
    assert min(norms) < (limit or 10.0) < max(norms) or (not limit and min(norms) > 0.0)
    witness = next(one for one in other.callback_handler.callbacks if isinstance(one, Witness))
    # Besides, once, the Trainer looks what kind of tensor gradients are.
    assert witness.redone <= (1 + sum(norm > LIMIT for norm in norms) * (limit > 0) if way == "undo" else 0)


def resumes_as_without(directory: Path, way: str) -> None:
    """Checkpoints in the middle of an epoch, written and read with and without instep, in all four ways."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    settings["load_best_model_at_end"] = True
    whole: dict[str, Trainer] = {}
    for kind in KINDS:  # each trained before the next is made, which seeds
        whole[kind] = trainer(directory / kind, callback(way) if kind == "instep" else None, **settings)
        whole[kind].train()
    require_same(whole["plain"], whole["instep"])
    require_was_attached(whole["instep"], way)
    assert whole["plain"].state.best_global_step < whole["plain"].state.global_step  # an earlier one was loaded
    for written in KINDS:
        for read in KINDS:
            resumed = trainer(directory / "again", callback(way) if read == "instep" else None, **settings)
            resumed.train(resume_from_checkpoint=str(directory / written / "checkpoint-2"))
            states = [training_state(one.model, one.optimizer.optimizer) for one in (whole["plain"], resumed)]
            assert first_difference(*states) is None, (written, read)
            assert logged(resumed)[:-1] == logged(whole["plain"])[:-1]  # train_loss is over fewer steps


KINDS = ("plain", "instep")


def on_each(ranks: RankPool, world: int, body: Any, *args: Any) -> None:
    if world == 1:
        body(*args)
    else:
        ranks.run(hugging_face.as_torchrun, body, *args)


on_one_and_two_ranks = pytest.mark.parametrize("world", [1, 2])


@on_one_and_two_ranks
@in_every_way
def test_training(tmp_path: Path, ranks: RankPool, way: str, world: int) -> None:
    on_each(ranks, world, trains_as_without, tmp_path, way, {})


@on_one_and_two_ranks
@in_every_way
def test_training_without_clipping(tmp_path: Path, ranks: RankPool, way: str, world: int) -> None:
    on_each(ranks, world, trains_as_without, tmp_path, way, {"max_grad_norm": 0.0})


@on_one_and_two_ranks
@in_every_way
def test_bf16(tmp_path: Path, ranks: RankPool, way: str, world: int) -> None:
    on_each(ranks, world, trains_as_without, tmp_path, way, {"bf16": True})


@on_one_and_two_ranks
@in_every_way
def test_checkpoints_evaluation_and_the_best_model(tmp_path: Path, ranks: RankPool, way: str, world: int) -> None:
    on_each(ranks, world, resumes_as_without, tmp_path, way)
