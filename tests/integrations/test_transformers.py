"""``InstepCallback``: a ``Trainer`` with it ends, and logs, bit for bit as one without."""

import copy
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedType
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.data import IterableDataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

import instep
from instep import ClipNorm, ClipValue
from instep._torch.placeholders import SpentGradient
from instep.errors import AttachError, TornStepError, UncommittedStepError
from instep.integrations.transformers import InstepCallback
from instep_tools.harness import first_difference, training_state
from tests.distributed.pool import RankPool
from tests.integrations.hugging_face import hooks_of, most_gradients, sentences, tiny
from tests.integrations.ranks import as_torchrun, sharded_by_accelerate

SMALL = 16_000  # bytes: several buckets
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
    "ddp_bucket_cap_mb": SMALL / 2**20,
    "log_level": "error",
}
ROWS = 14  # seven micro-batches on one rank, four on each of two: the last step of an epoch has fewer
WAYS = ("forward", "undo", "backward", "together")
in_every_way = pytest.mark.parametrize("way", WAYS)


def callback(way: str, limit: float = LIMIT, world: int = 1) -> InstepCallback:
    bucket_bytes = SMALL if world == 1 else None  # DDP's buckets are given in SETTINGS
    if way == "forward":
        return InstepCallback(schedule="forward", defer=True, bucket_bytes=bucket_bytes)
    if way == "undo":
        return InstepCallback(schedule="backward", undo=True, bucket_bytes=bucket_bytes)
    clip = ClipNorm(limit, mode="two_pass") if limit else None
    return InstepCallback(schedule="backward", clip=clip, bucket_bytes=bucket_bytes, together=way == "together")


class Witness(TrainerCallback):  # type: ignore[misc]  # its types are skipped
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
    arguments = TrainingArguments(str(directory), **copy.deepcopy({**SETTINGS, **settings}))  # it writes to them
    model = tiny()
    if settings.get("fsdp") and arguments.save_strategy == "steps":
        del model.never_used  # torch's distributed checkpoints want state of every parameter
    made = kind(model, arguments, train_dataset=data[:ROWS], eval_dataset=data[ROWS:], callbacks=callbacks)
    made.remove_callback(PrinterCallback)
    return made


def logged(of: Trainer) -> list[dict[str, Any]]:
    """All but what the clock says."""
    clock = ("_runtime", "_per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(clock)} for entry in of.state.log_history]


def require_same(plain: Trainer, other: Trainer) -> None:
    states = [training_state(one.model, one.optimizer.optimizer) for one in (plain, other)]
    assert first_difference(*states) is None
    assert repr(logged(plain)) == repr(logged(other))  # NaN is NaN
    assert plain.lr_scheduler.state_dict() == other.lr_scheduler.state_dict()


def require_was_attached(of: Trainer, way: str) -> None:
    [inside] = [one for one in of.callback_handler.callbacks if isinstance(one, InstepCallback)]
    [witness] = [one for one in of.callback_handler.callbacks if isinstance(one, Witness)]
    kind = type(of.model_wrapped).__name__
    assert (kind == "DistributedDataParallel" or kind.startswith("FSDP")) == (of.args.world_size > 1)
    assert (
        f"Attachment {kind} with AdamW: schedule='{'forward' if way == 'forward' else 'backward'}'" in witness.seen[-1]
    )
    assert f"{len(witness.seen)} steps" in witness.seen[-1]
    if kind != "DistributedDataParallel" or way != "forward":  # there it is one of 16 MiB
        assert " 1 buckets" not in witness.seen[-1]
    assert any(witness.spent) == (way in ("backward", "together"))
    assert inside.overlap is None
    assert instep.attached(of.model_wrapped) is None


def require_gone(of: Trainer, before: dict[str, int]) -> None:
    assert hooks_of(of.model) == before
    assert not {"clip_grad_norm_", "backward"} & vars(of.accelerator).keys()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Of their own: transformers, once loaded, slows the garbage collector, which attach() calls."""
    pool = RankPool(2)
    yield pool
    pool.stop()


# Each on one rank and on two.


def trains_as_without(directory: Path, way: str, settings: dict[str, Any]) -> None:
    plain = trainer(directory, None, **settings)
    before = hooks_of(plain.model)
    plain.train()
    if plain.is_fsdp_enabled:
        before = hooks_of(plain.model)  # with FSDP2's
    limit = settings.get("max_grad_norm", LIMIT)
    other = trainer(directory, callback(way, limit, plain.args.world_size), **settings)
    other.train()
    require_was_attached(other, way)
    require_same(plain, other)
    require_gone(other, before)
    norms = [entry["grad_norm"] for entry in logged(plain) if "grad_norm" in entry]
    assert min(norms) < (limit or 10.0) < max(norms) or (not limit and min(norms) > 0.0)
    witness = next(one for one in other.callback_handler.callbacks if isinstance(one, Witness))
    # Besides, once, the Trainer looks what kind of tensor gradients are.
    assert witness.redone <= (1 + sum(norm > LIMIT for norm in norms) * (limit > 0) if way == "undo" else 0)


def resumes_as_without(directory: Path, way: str, more: dict[str, Any]) -> None:
    """Checkpoints in the middle of an epoch, written and read with and without instep, in all four ways."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"load_best_model_at_end": not more, **more}
    limit = more.get("max_grad_norm", LIMIT)
    whole: dict[str, Trainer] = {}
    world = dist.get_world_size() if dist.is_initialized() else 1
    for kind in KINDS:  # each trained before the next is made, which seeds
        whole[kind] = trainer(directory / kind, callback(way, limit, world) if kind == "instep" else None, **settings)
        whole[kind].train()
    require_same(whole["plain"], whole["instep"])
    require_was_attached(whole["instep"], way)
    if not more:
        assert whole["plain"].state.best_global_step < whole["plain"].state.global_step  # an earlier one was loaded
    for written in KINDS:
        for read in KINDS:
            resumed = trainer(
                directory / "again", callback(way, limit, world) if read == "instep" else None, **settings
            )
            resumed.train(resume_from_checkpoint=str(directory / written / "checkpoint-2"))
            states = [training_state(one.model, one.optimizer.optimizer) for one in (whole["plain"], resumed)]
            assert first_difference(*states) is None, (written, read)
            assert logged(resumed)[:-1] == logged(whole["plain"])[:-1]  # train_loss is over fewer steps


KINDS = ("plain", "instep")


def on_each(ranks: RankPool, world: int, body: Any, *args: Any) -> None:
    if world == 1:
        body(*args)
    else:
        ranks.run(as_torchrun, body, *args)


on_one_and_two_ranks = pytest.mark.parametrize("world", [1, 2])


@on_one_and_two_ranks
@in_every_way
def test_training(tmp_path: Path, ranks: RankPool, way: str, world: int) -> None:
    on_each(ranks, world, trains_as_without, tmp_path, way, {})


@on_one_and_two_ranks
@in_every_way
def test_training_without_clipping(tmp_path: Path, ranks: RankPool, way: str, world: int) -> None:
    on_each(ranks, world, trains_as_without, tmp_path, way, {"max_grad_norm": 0.0})


def test_an_infinite_limit_clips_nothing(tmp_path: Path) -> None:
    """How some write that nothing is to be clipped, and the norm logged."""
    plain = trainer(tmp_path, None, max_grad_norm=math.inf)
    plain.train()
    other = trainer(tmp_path, InstepCallback(schedule="backward", together=True), max_grad_norm=math.inf)
    other.train()
    require_was_attached(other, "together")
    require_same(plain, other)


@on_one_and_two_ranks
@in_every_way
def test_bf16(tmp_path: Path, ranks: RankPool, way: str, world: int) -> None:
    on_each(ranks, world, trains_as_without, tmp_path, way, {"bf16": True})


@on_one_and_two_ranks
@in_every_way
def test_checkpoints_evaluation_and_the_best_model(tmp_path: Path, ranks: RankPool, way: str, world: int) -> None:
    on_each(ranks, world, resumes_as_without, tmp_path, way, {})


EACH: dict[str, Any] = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}


def reduces_each_micro_batch(directory: Path) -> None:
    found = []
    for inside in (None, callback("forward", world=2), callback("undo", world=2)):
        found.append(trainer(directory, inside, **EACH))
        found[-1].train()
    for other in found[1:]:
        require_same(found[0], other)
    with pytest.raises(AttachError, match=r"sync_each_batch=True.*schedule='forward'"):
        trainer(directory, InstepCallback(schedule="backward"), **EACH)


SHARDED: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "fsdp_version": 2,
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["GPT2Block"],
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": False,
    },
}


def sharded_trains_as_without(directory: Path, way: str, settings: dict[str, Any]) -> None:
    with sharded_by_accelerate():
        trains_as_without(directory, way, {**SHARDED, **settings})


@pytest.mark.parametrize(("way", "limit"), [("forward", LIMIT), ("undo", LIMIT), ("backward", 0.0), ("together", 0.0)])
def test_sharded_by_fsdp2(tmp_path: Path, ranks: RankPool, way: str, limit: float) -> None:
    ranks.run(as_torchrun, sharded_trains_as_without, tmp_path, way, {"max_grad_norm": limit})


def sharded_does_not_fit(directory: Path) -> None:
    with sharded_by_accelerate():
        inside = InstepCallback(schedule="backward", clip=ClipNorm(LIMIT, mode="two_pass"))
        one = trainer(directory, inside, **SHARDED)
        with pytest.raises(AttachError, match="two_pass"):
            one.train()
        assert inside.overlap is None
        inside = InstepCallback(schedule="backward")
        one = trainer(directory, inside, **{**SHARDED, "max_grad_norm": 0.0})
        prepare = one.accelerator.prepare

        def prepare_and_add(*given: Any) -> Any:
            made = prepare(*given)
            one.model.register_module("plain", nn.Linear(2, 2))  # as an adapter that is added to a sharded model
            return made

        one.accelerator.prepare = prepare_and_add
        with pytest.raises(AttachError, match="2 device meshes, or some over none"):
            one.train()
        assert inside.overlap is None


def test_shards_that_do_not_fit(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(as_torchrun, sharded_does_not_fit, tmp_path)


def sharded_resumes_as_without(directory: Path, way: str) -> None:
    with sharded_by_accelerate():
        resumes_as_without(directory, way, {**SHARDED, "max_grad_norm": 0.0})


@pytest.mark.parametrize("way", ["forward", "together"])
def test_checkpoints_of_fsdp2(tmp_path: Path, ranks: RankPool, way: str) -> None:
    ranks.run(as_torchrun, sharded_resumes_as_without, tmp_path, way)


def test_every_micro_batch_is_reduced(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(as_torchrun, reduces_each_micro_batch, tmp_path)


# On one rank alone.


class Failing(Trainer):  # type: ignore[misc]  # its types are skipped
    """Fails once, in the forward of a step that is not the first, with an error of the test's."""

    error: BaseException | None = None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.error is not None and self.state.global_step == 2:
            error, self.error = self.error, None

            def fail(gradient: torch.Tensor) -> None:
                handle.remove()
                raise error

            # Half of backward is over by then.
            handle = self.model.transformer.h[0].mlp.c_proj.weight.register_hook(fail)
        return loss


def failed(directory: Path, inside: InstepCallback | None) -> Failing:
    """Training that has failed in the third step, in the middle of backward."""
    settings = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1, "max_grad_norm": 0.0}
    made = trainer(directory, inside, Failing, **settings)
    made.error = ZeroDivisionError("on purpose")
    with pytest.raises(ZeroDivisionError):
        made.train()
    return made


@in_every_way
def test_training_that_fails_is_resumed_in_the_same_trainer(tmp_path: Path, way: str) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0}
    plain = trainer(tmp_path / "plain", None, **settings)
    plain.train()
    inside = callback(way, limit=0.0)
    other = failed(tmp_path, inside)
    assert inside.overlap is instep.attached(other.model)
    other.train(resume_from_checkpoint=True)
    states = [training_state(one.model, one.optimizer.optimizer) for one in (plain, other)]
    assert first_difference(*states) is None
    assert inside.overlap is None


def test_training_that_fails_is_begun_again_from_whole_weights_only(tmp_path: Path) -> None:
    plain = failed(tmp_path / "plain", None)
    plain.train()
    for way in ("forward", "undo"):
        other = failed(tmp_path / way, callback(way, limit=0.0))
        other.train()
        require_same(plain, other)
    inside = callback("backward", limit=0.0)
    other = failed(tmp_path / "backward", inside)
    for use in (other.train, other.evaluate):
        with pytest.raises(TornStepError, match="step 3 is torn"):
            use()
    inside.detach()
    assert other.evaluate()["eval_loss"] > 0.0


def test_a_trainer_trains_twice(tmp_path: Path) -> None:
    plain: list[Any] = []
    other: list[Any] = []
    for made, inside in ((plain, None), (other, InstepCallback(schedule="backward", undo=True))):
        one = trainer(tmp_path, inside)
        for _ in range(2):
            one.train()
            made.append((one, logged(one), dict(training_state(copy.deepcopy(one.model), one.optimizer.optimizer))))
    require_same(plain[-1][0], other[-1][0])
    assert [entry for _, entry, _ in plain] == [entry for _, entry, _ in other]


def test_accumulated_gradients_are_freed(tmp_path: Path) -> None:
    plain, by_itself, together = (
        trainer(tmp_path, inside, gradient_accumulation_steps=4)
        for inside in (None, callback("backward"), callback("together"))
    )
    most = most_gradients(plain)
    assert most_gradients(by_itself) == most
    assert most_gradients(together) < 0.5 * most


def lines_in(message: str) -> list[InstepCallback]:
    """The callbacks that a message writes out, in its order."""
    written = re.findall(r"InstepCallback\((?:[^()]|\([^()]*\))*\)", message)
    return [eval(line, {"InstepCallback": InstepCallback, "instep": instep}) for line in written]  # of our own message


def test_the_first_line_of_the_refusal_frees_accumulated_gradients(tmp_path: Path) -> None:
    """With the settings that a Trainer has unless told: it clips, and accumulates."""
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 8,
        "per_device_train_batch_size": 1,
        "max_grad_norm": 1.0,
    }
    with pytest.raises(AttachError) as raised:
        trainer(tmp_path, InstepCallback(schedule="backward"), **settings)
    together, *others = lines_in(str(raised.value))
    assert len(others) == 3
    plain = trainer(tmp_path, None, **settings)
    most = most_gradients(plain)
    for line in (together, *others):
        other = trainer(tmp_path, line, **settings)
        assert (most_gradients(other) < most) == (line is together)
        require_same(plain, other)
    assert "keeps all gradients until the last of 8 micro-batches" in str(raised.value)


def test_together_is_offered_where_it_frees(tmp_path: Path) -> None:
    """Not without accumulation; not a second time to who has it."""
    ways: tuple[tuple[dict[str, Any], int], ...] = (({}, 1), ({"together": True}, 8))
    for options, accumulation in ways:
        settings: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 1.0}
        with pytest.raises(AttachError) as raised:
            trainer(tmp_path, InstepCallback(schedule="backward", **options), **settings)
        backward = [line for line in lines_in(str(raised.value)) if line._schedule == "backward"]
        assert [line._together for line in backward] == [bool(options)] * 2


def test_gradients_that_are_kept_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = []
    for way, accumulation in (("backward", 3), ("undo", 3), ("together", 3), ("backward", 1), ("forward", 3)):
        caplog.clear()
        with caplog.at_level("INFO", logger="instep"):
            trainer(tmp_path, callback(way), gradient_accumulation_steps=accumulation, max_steps=1).train()
        said.append(sum("together=True" in record.message for record in caplog.records))
    assert said == [1, 1, 0, 0, 0]


class Reporter(TrainerCallback):  # type: ignore[misc]  # its types are skipped
    """Writes logs, as that of TensorBoard, which a ``Trainer`` has before the callbacks that it is given."""

    def __init__(self) -> None:
        self.reported: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.reported.append(dict(logs))


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_stats_in_the_log(tmp_path: Path, way: str) -> None:
    """Among what is logged of training, for those that write logs, too; all else is as without."""
    settings: dict[str, Any] = {"eval_strategy": "epoch", "gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
    plain = trainer(tmp_path, None, **settings)
    plain.train()
    other = trainer(tmp_path, InstepCallback(schedule=way, log_stats=True), **settings)  # type: ignore[arg-type]
    reporter = Reporter()
    other.callback_handler.callbacks.insert(0, reporter)
    other.train()
    assert "log" not in vars(other)
    entries = logged(other)
    with_stats = [entry for entry in entries if "instep/steps" in entry]
    assert [entry["instep/steps"] for entry in with_stats] == [entry["step"] for entry in with_stats]
    assert all("loss" in entry for entry in with_stats)
    assert len(with_stats) == sum("loss" in entry for entry in entries) > 1
    assert (with_stats[-1]["instep/freed_bytes"] > 0) == (way == "backward")
    assert [entry for entry in reporter.reported if "instep/steps" in entry]
    for entry in entries:
        for name in [name for name in entry if name.startswith("instep/")]:
            del entry[name]
    assert repr(logged(plain)) == repr(entries)


@pytest.mark.parametrize("name", ["backward", "clip_grad_norm_"])
def test_methods_of_somebody_else_are_refused_or_left(tmp_path: Path, name: str) -> None:
    """Of the Accelerator, where instep would run in their place; where it replaces nothing they run, and stay."""

    def trained(inside: InstepCallback | None) -> tuple[Trainer, list[str], Any]:
        one, called = trainer(tmp_path, inside), list[str]()
        method = getattr(one.accelerator, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return method(*args, **kwargs)

        setattr(one.accelerator, name, counted)
        one.train()
        return one, called, counted

    plain, often, _ = trained(None)
    other, as_often, counted = trained(InstepCallback())
    require_same(plain, other)
    assert len(often) == len(as_often) > 1
    assert vars(other.accelerator)[name] is counted
    with pytest.raises(AttachError, match=rf"a {name}\(\) of its own"):
        trained(callback("together"))


def test_a_log_that_is_replaced_after(tmp_path: Path) -> None:
    """By a callback that comes later, and keeps it: it stays, and passes on what is logged afterwards."""

    class Later(TrainerCallback):  # type: ignore[misc]  # its types are skipped
        def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
            before = other.log
            other.log = lambda logs, *args: before({**logs, "later": 1.0}, *args)

    other = trainer(tmp_path, InstepCallback(log_stats=True))
    other.add_callback(Later())
    other.train()
    assert all("instep/steps" in entry and "later" in entry for entry in logged(other) if "loss" in entry)
    other.log({"loss": 1.0})
    assert "later" in other.state.log_history[-1]
    assert "instep/steps" not in other.state.log_history[-1]


def test_stats_beside_a_log_that_somebody_has_replaced(tmp_path: Path) -> None:
    other = trainer(tmp_path, InstepCallback(log_stats=True))
    log, seen = other.log, []

    def replaced(logs: dict[str, float], *args: Any) -> None:
        seen.append(logs)
        log(logs, *args)

    other.log = replaced
    other.train()
    assert other.log is replaced
    assert any("instep/steps" in logs for logs in seen)


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Without a length, and ends within an accumulation."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(sentences(ROWS))


def test_a_dataset_that_ends_within_an_accumulation(tmp_path: Path) -> None:
    """The ``Trainer`` adds the gradients that are left to those of the next epoch."""
    found = []
    for inside in (None, *map(callback, ("forward", "undo", "together", "backward"))):
        made = trainer(tmp_path, inside, max_steps=5)
        made.train_dataset = Stream()
        found.append(made)
        if len(found) == 5:
            with pytest.raises(UncommittedStepError):
                made.train()
            assert inside is not None
            inside.detach()
            break
        made.train()
        require_same(found[0], made)


@pytest.mark.nightly
def test_running_out_of_memory(tmp_path: Path) -> None:
    """``auto_find_batch_size``: the step that ran out is done again, with a smaller batch."""
    found = []
    for inside in (None, callback("undo")):
        made = trainer(tmp_path, inside, Failing, auto_find_batch_size=True)
        made.error = RuntimeError("CUDA out of memory.")
        made.train()
        assert made._train_batch_size == 1
        found.append(made)
    require_same(*found)


def test_a_loss_scale(tmp_path: Path) -> None:
    """``fp16`` needs an accelerator. What it does to a step does not: one in which the scaler finds infinity is left
    out."""
    found = []
    for inside in (None, InstepCallback(schedule="forward", defer=True, bucket_bytes=SMALL)):
        made = trainer(tmp_path, inside)
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        made.train()
        assert made.accelerator.scaler.get_scale() < 2.0**127
        made.train()  # accelerate has left the optimizer's own step method on the object
        found.append(made)
    require_same(*found)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"schedule": "backward"}, 0.0),
        ({"schedule": "forward", "defer": True}, 1.5),
        ({"schedule": "backward", "undo": True}, 1.5),
    ],
)
def test_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], limit: float) -> None:
    """Gradients are clipped once: by the Trainer, or in its place."""
    monkeypatch.setenv("INSTEP_DISABLE", "1")
    plain = trainer(tmp_path, None, max_grad_norm=limit)
    plain.train()
    other = trainer(tmp_path, InstepCallback(**options), max_grad_norm=limit)
    other.train()
    require_same(plain, other)


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    eager = InstepCallback(schedule="backward")
    refused: list[tuple[InstepCallback, dict[str, Any], str]] = [
        (
            eager,
            {},
            r"max_grad_norm=1\.5.*ClipNorm\(1\.5, mode='two_pass'\).*undo=True.*schedule='forward'.*max_grad_norm=0",
        ),
        (InstepCallback(clip=ClipNorm(1.0)), {}, r"two limits. Write max_grad_norm=1\.0, or ClipNorm\(1\.5"),
        (eager, {"max_grad_norm": 0.0, "auto_find_batch_size": True}, "schedule='forward'.*undo=True.*=False"),
        (InstepCallback(), {"optim": "lomo"}, "optim='adamw_torch_fused'"),
    ]
    with pytest.raises(AttachError, match=r"schedule='forward' frees none: write InstepCallback\(schedule='backward'"):
        InstepCallback(together=True)
    for inside, settings, message in refused:
        with pytest.raises(AttachError, match=message):
            trainer(tmp_path, inside, **settings)
    with pytest.raises(AttachError, match=r"clip must be an instep\.ClipNorm or None, not ClipValue"):
        InstepCallback(clip=ClipValue(1.0))  # type: ignore[arg-type]
    late = trainer(tmp_path, None)
    late.add_callback(eager)  # which tells no callback of the arguments
    with pytest.raises(AttachError, match="max_grad_norm=1"):
        late.train()
    late = trainer(tmp_path, InstepCallback(schedule="sideways"))  # type: ignore[arg-type]
    with pytest.raises(AttachError, match="must be 'backward' or 'forward', not 'sideways'"):
        late.train()


def test_placements_that_do_not_fit(tmp_path: Path) -> None:
    one = trainer(tmp_path, InstepCallback(schedule="backward", undo=True))
    one.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(AttachError, match=r"schedule='forward'.*bf16=True"):
        one.train()
    one = trainer(tmp_path, InstepCallback())
    one.model_wrapped = nn.DataParallel(one.model)
    with pytest.raises(AttachError, match="torchrun"):
        one.train()
    one = trainer(tmp_path, InstepCallback())
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        one.accelerator.state.distributed_type = kind
        with pytest.raises(AttachError, match=f"the Trainer uses {kind.value}"):
            one.callback_handler.callbacks[1].on_train_begin(one.args, one.state, one.control)
    one.accelerator.state.distributed_type = DistributedType.NO
    with pytest.raises(AttachError, match=r"instep\.attach"):
        InstepCallback().on_train_begin(one.args, TrainerState(), one.control)


def test_without_transformers() -> None:
    """instep itself does without it, and the integration says what to install."""
    code = "import sys; sys.modules['transformers'] = None; import instep; import instep.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("needs transformers and accelerate: pip install transformers accelerate")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own reading
@in_every_way
def test_compiled(tmp_path: Path, way: str) -> None:
    with functorch_config.patch(donated_buffer=False):  # two passes: see docs/clipping.md
        trains_as_without(tmp_path, way, {"torch_compile_backend": "aot_eager"})


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit"])
@in_every_way
def test_bitsandbytes(way: str, optim: str, tmp_path: Path) -> None:
    """Embeddings keep their state in 32 bits: the Trainer registers overrides for them."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    trained = []
    for inside in (None, callback(way)):
        trained.append(trainer(tmp_path, inside, optim=optim))
        trained[-1].train()
    plain, other = trained
    require_same(plain, other)
    assert manager.module_weight_config_triple
    dtypes = {
        value.dtype
        for state in other.optimizer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    assert {torch.uint8, torch.float32} <= dtypes
