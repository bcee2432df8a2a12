"""``Trainer(callbacks=[InstepCallback(…)])`` beside the same ``Trainer`` without it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import instep
from instep._torch.placeholders import SpentGradient
from instep.errors import AttachError, InstepError, SpentGradientError, UncommittedStepError, UnsupportedOptimizerError
from instep.integrations.lightning import InstepCallback
from tests.distributed.pool import RankPool
from tests.integrations.fitting import (
    BATCHES,
    WAYS,
    Alternating,
    Classifier,
    assert_fits_the_same,
    assert_same,
    fit,
    left_by,
    train,
    trainer_of,
)
from tests.integrations.pooled import PooledRanks

ways = pytest.mark.parametrize("way", WAYS)
exact_ways = pytest.mark.parametrize("way", ["forward", "undo"])


@ways
def test_automatic_optimization(way: str) -> None:
    model = assert_fits_the_same(way, 2 * BATCHES, val_check_interval=3)
    assert model.redone == 0


class Spy(Classifier):
    """Remembers what was so in each iteration: gradients spent after backward, updates due after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: set[bool] = set()
        self.pending: set[bool] = set()

    def on_after_backward(self) -> None:
        self.spent |= {isinstance(p.grad, SpentGradient) for p in self.parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.trainer.model is not None
        self.pending.add("pending" in repr(instep.attached(self.trainer.model)))


@ways
def test_the_step_is_where_the_schedule_says(way: str) -> None:
    _, model = fit(WAYS[way], Spy)
    assert model.spent == {way in ("backward", "together")}
    assert model.pending == {way == "forward"}


class CallsItsParts(Classifier):
    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.seen.append(loss.detach())
        return loss


@ways
def test_a_training_step_that_calls_parts_of_the_module(way: str) -> None:
    assert_fits_the_same(way, 2 * BATCHES, build=CallsItsParts)


@ways
def test_accumulate_grad_batches(way: str) -> None:
    """Windows of three, three and one."""
    model = assert_fits_the_same(way, 2 * 3, accumulate_grad_batches=3)
    assert model.redone == 0


@ways
def test_accumulate_grad_batches_of_a_part_of_an_epoch(way: str) -> None:
    """Windows of three and two, the last of which only ``limit_train_batches`` ends."""
    assert_fits_the_same(way, 2 * 2, accumulate_grad_batches=3, limit_train_batches=5)


@pytest.mark.parametrize("together", [False, True])
def test_clipping_by_the_norm_of_the_first_of_two_backwards(together: bool) -> None:
    clip = instep.ClipNorm(0.5, mode="two_pass")
    options = {"schedule": "backward", "clip": clip, "together": together, "bucket_bytes": 2_000}
    settings: dict[str, Any] = {"build": OneGroup, "accumulate_grad_batches": 3}
    trainer, model = fit(options, **settings)
    plain = fit(None, gradient_clip_val=0.5, **settings)
    assert_same(left_by(trainer, model), left_by(*plain))
    assert "backward" not in vars(model)


class MostGradients(Classifier):
    """Notes the most bytes of gradients that are there when one is complete."""

    def on_fit_start(self) -> None:
        self.most = 0
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self.seen_one)

    def seen_one(self, _: torch.Tensor) -> None:
        there = sum(p.grad.nbytes for p in self.parameters() if type(p.grad) is torch.Tensor)
        self.most = max(self.most, there)


def test_accumulated_gradients_are_freed() -> None:
    plain, alone, together = (
        fit(None if way is None else {**WAYS[way], "bucket_bytes": 2_000}, MostGradients, accumulate_grad_batches=3)[1]
        for way in (None, "backward", "together")
    )
    assert alone.most == plain.most
    assert together.most < 0.5 * plain.most


class KeepsLogs(pl.loggers.Logger):
    """Of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "keeps"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *_: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.kept.append(dict(metrics))


@pytest.mark.parametrize("every", [1, 3])
def test_stats_in_the_log(every: int) -> None:
    """At the Trainer's own rate; all else is as without."""
    kept = []
    for options in (None, {"schedule": "backward"}, {"schedule": "backward", "log_stats": True}):
        logger = KeepsLogs()
        fit(options, logger=logger, log_every_n_steps=every)
        kept.append(logger.kept)
    plain, silent, told = kept
    assert plain == silent
    with_stats = [entry for entry in told if "instep/steps" in entry]
    assert len(with_stats) == 2 * BATCHES // every
    assert [entry["instep/steps"] for entry in with_stats][:2] == [every, 2 * every]
    assert with_stats[-1]["instep/freed_bytes"] > 0
    assert [{k: v for k, v in one.items() if "instep/" not in k} for one in told] == plain


class Iterates(Classifier):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss_of(batch)


def test_stats_of_a_step_that_takes_its_batches() -> None:
    logger = KeepsLogs()
    fit({"schedule": "forward", "log_stats": True}, Iterates, logger=logger, log_every_n_steps=1)
    assert sum("instep/steps" in entry for entry in logger.kept) > 1


def test_accumulation_where_the_step_takes_its_batches() -> None:
    with pytest.raises(AttachError, match=r"_batches=3 with training_step\(dataloader_iter\).*undo=True"):
        fit(WAYS["backward"], Iterates, accumulate_grad_batches=3)
    with pytest.raises(AttachError, match="_batches=2 with training_step"):
        fit(WAYS["backward"], Iterates, callbacks=lambda: [GradientAccumulationScheduler({1: 2})])


class SpentBy(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.spent: list[bool] = []

    def on_after_backward(self) -> None:
        self.spent.append(all(isinstance(p.grad, SpentGradient) for p in self.parameters()))


@pytest.mark.parametrize("batches", [BATCHES, 5])
def test_the_last_backward_of_each_window_steps(batches: int) -> None:
    """Also of a window that is shorter."""
    _, model = fit(WAYS["backward"], SpentBy, accumulate_grad_batches=3, limit_train_batches=batches)
    assert model.spent == 2 * [i % 3 == 2 or i == batches - 1 for i in range(batches)]


@ways
def test_windows_that_change(way: str) -> None:
    def callbacks() -> list[pl.Callback]:
        return [GradientAccumulationScheduler({0: 3, 1: 2})]

    assert_fits_the_same(way, 3 + 4, callbacks=callbacks)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@exact_ways
def test_gradient_clip_val(way: str, algorithm: str) -> None:
    limit = {"norm": 0.5, "value": 0.01}[algorithm]
    assert_fits_the_same(way, 2 * BATCHES, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)


class OneGroup(Classifier):
    """Lightning sums the norm up in the order of the optimizer, instep in that of the model."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@exact_ways
def test_clip_norm_in_place_of_gradient_clip_val(way: str) -> None:
    clipping: dict[str, Any] = {"accumulate_grad_batches": 2, "build": OneGroup}
    trainer, model = fit({**WAYS[way], "clip": instep.ClipNorm(0.5)}, **clipping)
    assert_same(left_by(trainer, model), left_by(*fit(None, **clipping, gradient_clip_val=0.5)))
    assert model.steps == 8


@ways
def test_clip_value_in_place_of_gradient_clip_val(way: str) -> None:
    trainer, model = fit({**WAYS[way], "clip": instep.ClipValue(0.01)})
    plain = fit(None, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    assert_same(left_by(trainer, model), left_by(*plain))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision(precision: Any) -> None:
    for way in WAYS:
        if (way, precision) != ("forward", "64-true"):  # refused
            assert_fits_the_same(way, 2 * BATCHES, precision=precision, build=Converted)


class Converted(Classifier):
    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return super().loss_of((x.to(self.dtype), y))


@exact_ways
def test_a_loss_scale(way: str) -> None:
    """On CPU Lightning takes bfloat16 for ``precision="16-mixed"``, unless it is given the plugin."""

    def run(options: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        return fit(options, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])

    trainer, model = run(WAYS[way])
    assert_same(left_by(trainer, model), left_by(*run(None)))
    assert trainer.precision_plugin.scaler.get_scale() != 2.0**12
    assert model.redone < model.steps == 2 * BATCHES


@ways
def test_manual_optimization(way: str) -> None:
    assert_fits_the_same(way, 4 * BATCHES, build=Alternating)


class StepsLate(Alternating):
    """Both losses first, each with the other's parameters frozen, and both steps behind them."""

    def training_step(self, batch: Any, i: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss_of(batch))
            self.untoggle_optimizer(optimizer)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_toggled_optimizers_that_step_late_are_told_when_to_step() -> None:
    """And what they are told works: ``Alternating`` does so."""
    with pytest.raises(
        UncommittedStepError, match=r"Losses of 2 optimizers \(a GAN\): freeze the others' parameters.*docs/errors\.md"
    ):
        fit(WAYS["backward"], StepsLate)
    for way in ("forward", "undo"):
        assert_fits_the_same(way, 2 * BATCHES, build=StepsLate)


class ByHand(Classifier):
    """Manual optimization of one optimizer, whose gradients are cleared at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, i: int) -> None:
        self.manual_backward(self.loss_of(batch))
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class AccumulatesByHand(ByHand):
    def training_step(self, batch: Any, i: int) -> None:
        assert self.trainer.model is not None
        overlap = instep.attached(self.trainer.model)
        if i % 2 == 1:
            super().training_step(batch, i)
        elif overlap is None:
            self.manual_backward(self.loss_of(batch))
        else:
            with overlap.accumulate():
                self.manual_backward(self.loss_of(batch))


@ways
def test_manual_optimization_that_accumulates(way: str) -> None:
    assert_fits_the_same(way, 2 * 3, build=AccumulatesByHand, limit_train_batches=6)


class LogsNorms(Classifier):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict({name: p.grad.norm() for name, p in self.named_parameters() if p.grad is not None})


@exact_ways
def test_hooks_that_use_gradients(way: str) -> None:
    assert_fits_the_same(way, 2 * BATCHES, build=LogsNorms)


def test_hooks_that_use_gradients_meet_spent_ones_in_backward() -> None:
    with pytest.raises(SpentGradientError, match="between backward"):
        fit(WAYS["backward"], LogsNorms)


class Wrapped(Classifier):
    def configure_optimizers(self) -> Any:
        return LightningOptimizer(super().configure_optimizers()[0][0])


def test_a_wrapped_optimizer_is_unwrapped() -> None:
    assert_fits_the_same("backward", 2 * BATCHES, build=Wrapped)


class Thaws(Classifier):
    """Begins with its last layer, and adds the others to the optimizer in the second epoch."""

    def configure_optimizers(self) -> Any:
        self.net.blocks.requires_grad_(False)
        self.net.inner.requires_grad_(False)
        return torch.optim.AdamW(self.net.outer.parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.requires_grad_(True)
            parameters = [*self.net.blocks.parameters(), *self.net.inner.parameters()]
            self.trainer.optimizers[0].add_param_group({"params": parameters, "lr": 1e-3})


@ways
def test_layers_that_are_thawed(way: str) -> None:
    assert_fits_the_same(way, 2 * BATCHES, build=Thaws)


@ways
def test_averaged_weights(way: str) -> None:
    assert_fits_the_same(way, 2 * BATCHES, callbacks=lambda: [EMAWeightAveraging()])


@pytest.mark.nightly
@ways
def test_stochastic_weight_averaging(way: str) -> None:
    def callbacks() -> list[pl.Callback]:
        return [StochasticWeightAveraging(1e-2, swa_epoch_start=2)]

    assert_fits_the_same(way, 4 * BATCHES, callbacks=callbacks, max_epochs=4)


class Compiled(Classifier):
    """Dynamo does not take ``self.log``."""

    def training_step(self, batch: Any, i: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    validation_step = training_step

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs["loss"].detach())


def compile_it() -> Any:
    return torch.compile(Compiled(), backend="eager")


@pytest.mark.nightly
@ways
def test_a_compiled_module(way: str) -> None:
    found = []
    for options in (WAYS[way], None):
        torch._dynamo.reset()
        trainer, compiled = fit(options, compile_it)
        found.append(left_by(trainer, compiled._orig_mod))
    assert_same(found[0], found[1])


# Checkpoints.


def saving(directory: Path) -> Any:
    def callbacks() -> list[pl.Callback]:
        return [ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1)]

    return callbacks


def saved_at(directory: Path, step: int) -> str:
    return str(directory / f"step={step}.ckpt")


def read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=False)
    for own in ("callbacks", "pytorch-lightning_version"):
        del found[own]
    return found


@ways
def test_checkpoints_are_those_without_instep_and_go_both_ways(way: str, tmp_path: Path) -> None:
    """From the middle of an epoch, and of what was accumulated by then."""
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 3}
    mine, plain = tmp_path / "mine", tmp_path / "plain"
    wanted = left_by(*fit(None, callbacks=saving(plain), **settings))
    assert_same(left_by(*fit(WAYS[way], callbacks=saving(mine), **settings)), wanted)
    assert sorted(path.name for path in mine.iterdir()) == sorted(path.name for path in plain.iterdir())
    for path in plain.iterdir():
        assert_same(_without_times(read(str(mine / path.name))), _without_times(read(str(path))), path.name)
    for options, begun_by in ((WAYS[way], plain), (None, mine), (WAYS[way], mine)):
        trainer, model = fit(options, ckpt_path=saved_at(begun_by, 2), **settings)
        assert_same(left_by(trainer, model), left_by(*fit(None, ckpt_path=saved_at(plain, 2), **settings)))
        assert options is None or model.steps == 6


def _without_times(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in checkpoint.items() if key != "loops"}


# Its life.


def test_one_trainer_fits_twice() -> None:
    found = []
    for options in (WAYS["forward"], None):
        trainer, model = fit(options)
        trainer.fit_loop.max_epochs = 3
        train(trainer, model)
        found.append(left_by(trainer, model))
    assert_same(found[0], found[1])


def test_nothing_is_left_on_the_model() -> None:
    for options in WAYS.values():
        trainer, model = fit(options)
        callback = trainer.callbacks[0]  # type: ignore[attr-defined]  # set in its __init__ from elsewhere
        assert isinstance(callback, InstepCallback)
        assert callback.attachment is None
        for module in model.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
        assert all(type(p) is nn.Parameter and not p._post_accumulate_grad_hooks for p in model.parameters())


class StopError(Exception):
    pass


class Stops(Classifier):
    """Raises in one iteration: in its forward, in backward after half of the gradients, or after it."""

    where = "forward"
    at = 3

    def training_step(self, batch: Any, i: int) -> Any:
        if i == self.at and self.where == "forward":
            raise StopError
        if i == self.at and self.where == "backward":
            hook = self.net.blocks[0].register_full_backward_hook(_stop)
            try:
                return super().training_step(batch, i)
            finally:
                self.undo = hook
        return super().training_step(batch, i)

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx == self.at and self.where == "after":
            raise StopError


def _stop(*_: Any) -> None:
    raise StopError


def stopping(where: str) -> Any:
    def build() -> pl.LightningModule:
        model = Stops()
        model.where = where
        return model

    return build


@pytest.mark.parametrize("where", ["forward", "backward", "after"])
def test_an_error_leaves_the_weights_of_the_trainer_without_instep(where: str, tmp_path: Path) -> None:
    """Detached, and with the weights of the steps before."""

    def stopped(options: Any) -> Any:
        trainer = trainer_of(options, [])
        pl.seed_everything(0, verbose=False)
        model = stopping(where)()
        with pytest.raises(StopError):
            train(trainer, model)
        assert instep.attached(model) is None
        return left_by(trainer, model)

    wanted = stopped(None)
    for way in ("forward", "undo", *(["backward"] if where == "forward" else [])):
        assert_same(stopped(WAYS[way]), wanted)


@pytest.mark.parametrize("where", ["backward", "after"])
def test_an_error_amid_a_step_leaves_nothing_that_could_be_saved(where: str, tmp_path: Path) -> None:
    fit(None, callbacks=saving(tmp_path))
    wanted = left_by(*fit(None, ckpt_path=saved_at(tmp_path, 2)))
    trainer = trainer_of({**WAYS["backward"], "bucket_bytes": 1000}, [])
    pl.seed_everything(0, verbose=False)
    model = stopping(where)()
    with pytest.raises(StopError):
        train(trainer, model)
    assert instep.attached(model) is None
    with pytest.raises(InstepError, match=r"training stopped in the middle of a step .StopError"):
        trainer.save_checkpoint(tmp_path / "torn.ckpt")
    with pytest.raises(InstepError, match=r"fit\(…, ckpt_path=…\)"):
        train(trainer, model)
    model.where = "nowhere"
    if where == "backward":
        model.undo.remove()
    train(trainer, model, saved_at(tmp_path, 2))
    assert instep.attached(model) is None
    assert_same(left_by(trainer, model)["parameters"], wanted["parameters"])


# What is refused.

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "clipping by norm": (
        WAYS["backward"],
        {"gradient_clip_val": 1.0},
        r"in place of gradient_clip_val InstepCallback\(schedule='backward', clip=instep.ClipNorm\(1.0, mode='two_pass"
        r"'\)\): backward runs twice; InstepCallback\(schedule='backward', clip=instep.ClipNorm\(1.0\), undo=True\);",
    ),
    "clipping and accumulation": (
        WAYS["backward"],
        {"gradient_clip_val": 1.0, "accumulate_grad_batches": 3},
        r"clip_val InstepCallback\(schedule='backward', together=True, clip=instep.ClipNorm\(1.0, mode='two_pass'\)\)"
        ".* activations of all 3 batches",
    ),
    "clipping by value and accumulation": (
        WAYS["backward"],
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 3},
        r"clip_val InstepCallback\(schedule='backward', together=True, clip=instep.ClipValue\(1.0\)\)",
    ),
    "clipping by value": (
        WAYS["backward"],
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        r"in place of gradient_clip_val InstepCallback\(schedule='backward', clip=instep.ClipValue\(1.0\)\)",
    ),
    "clipping twice": (
        {"schedule": "forward", "defer": True, "clip": instep.ClipNorm(1.0)},
        {"gradient_clip_val": 1.0},
        "Leave one of them out",
    ),
    "a loss scale": (
        WAYS["backward"],
        {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
        r"InstepCallback\(schedule='forward'\) or InstepCallback\(schedule='backward', undo=True\), or precision='bf1",
    ),
    "the default dtype": (
        {"schedule": "forward", "defer": True},
        {"precision": "64-true"},
        r"InstepCallback\(schedule='backward'\)",
    ),
    "an option of attach": ({"schedule": "sideways"}, {}, "must be 'backward' or 'forward', not 'sideways'"),
    "a step left out": ({**WAYS["backward"], "nonfinite": "skip"}, {}, "Use schedule='forward', or undo=True"),
}


def test_what_does_not_go_together_is_refused_with_what_does() -> None:
    for options, settings, said in REFUSED.values():
        with pytest.raises(AttachError, match=said):
            fit(options, **settings)


class OwnBackward(Classifier):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


def test_a_backward_of_the_modules_own() -> None:
    for option in ({"together": True}, {"clip": instep.ClipNorm(1.0, mode="two_pass")}):
        with pytest.raises(AttachError, match=r"OwnBackward has a backward\(\) of its own.* Leave out"):
            fit({**WAYS["backward"], **option}, OwnBackward)
    assert_fits_the_same("backward", 2 * BATCHES, build=OwnBackward)
    with pytest.raises(AttachError, match="schedule='forward' frees none"):
        InstepCallback(together=True)


def test_other_strategies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP's and DeepSpeed's need a GPU to be built at all."""
    trainer = trainer_of(WAYS["backward"], [])

    class FSDPStrategy:
        pass

    monkeypatch.setattr(pl.Trainer, "strategy", FSDPStrategy())
    with pytest.raises(AttachError, match=r"FSDPStrategy is not supported by InstepCallback.*ModelParallelStrategy"):
        InstepCallback(schedule="backward").setup(trainer, Classifier(), "fit")


def test_micro_batches_of_a_sharded_model_are_refused_in_backward() -> None:
    trainer = trainer_of(WAYS["backward"], [], strategy=ModelParallelStrategy(), accumulate_grad_batches=2)
    for options in (WAYS["forward"], WAYS["undo"]):
        InstepCallback(**options).setup(trainer, Classifier(), "fit")
    with pytest.raises(AttachError, match=r"accumulate_grad_batches=2: .* Use InstepCallback\(schedule='forward'\)"):
        InstepCallback(schedule="backward").setup(trainer, Classifier(), "fit")


def test_without_an_optimizer_that_it_can_attach() -> None:
    class LBFGS(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UnsupportedOptimizerError, match="LBFGS evaluates the loss again within a step"):
        fit(WAYS["backward"], LBFGS)


def test_two_callbacks() -> None:
    with pytest.raises(AttachError, match="already attached"):
        fit(WAYS["backward"], callbacks=lambda: [InstepCallback(schedule="backward")])


def test_the_trainer_of_the_other_package() -> None:
    other = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.demos.boring_classes import BoringModel

    trainer = other.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[InstepCallback(schedule="backward")],
    )
    with pytest.raises(AttachError, match=r"import lightning.pytorch as pl` in place of `import pytorch_lightning"):
        trainer.fit(BoringModel())


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "instep.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ImportError, match=r"pip install lightning"):
        import instep.integrations.lightning  # noqa: F401


def test_instep_itself_does_without_lightning() -> None:
    used = "import sys, instep; instep.attach; print(any('lightning' in name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", used], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Two ranks.

VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}


def _compare(chosen: Any, steps: int, ddp: dict[str, Any], settings: dict[str, Any]) -> None:
    strategies = [DDPStrategy(process_group_backend="gloo", cluster_environment=PooledRanks(), **ddp) for _ in "ab"]
    trainer, model = fit(chosen, strategy=strategies[0], devices=2, **settings)
    assert_same(left_by(trainer, model), left_by(*fit(None, strategy=strategies[1], devices=2, **settings)))
    assert model.steps == steps, model.steps


@ways
def test_two_ranks(way: str, two_ranks: RankPool) -> None:
    """With bucket views DDP copies gradients when it lays out its buckets anew, in its second forward."""
    two_ranks.run(_compare, WAYS[way], 2 * 4, VIEWS, {"val_check_interval": 2})


@ways
def test_two_ranks_accumulate(way: str, two_ranks: RankPool) -> None:
    two_ranks.run(_compare, WAYS[way], 2 * 2, VIEWS, {"accumulate_grad_batches": 3, "precision": "bf16-mixed"})


@exact_ways
def test_two_ranks_clip(way: str, two_ranks: RankPool) -> None:
    two_ranks.run(_compare, WAYS[way], 2 * 4, {}, {"gradient_clip_val": 0.5})


@exact_ways
def test_two_ranks_with_manual_optimization(way: str, two_ranks: RankPool) -> None:
    ddp = {"find_unused_parameters": True, **VIEWS}
    two_ranks.run(_compare, WAYS[way], 4 * 4, ddp, {"build": Alternating})


@ways
def test_two_ranks_with_one_optimizer_by_hand(way: str, two_ranks: RankPool) -> None:
    """The second backward is left to ``optimizer.step()``: Lightning has DDP lay out its buckets just before it."""
    two_ranks.run(_compare, WAYS[way], 8, VIEWS, {"build": ByHand})


def _alternate_in_backward() -> None:
    strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=PooledRanks(), find_unused_parameters=True)
    with pytest.raises(UncommittedStepError, match=r"between backward|has not been called since"):
        fit(WAYS["backward"], ClearsLate, strategy=strategy, devices=2)


class ClearsLate(Alternating):
    def training_step(self, batch: Any, i: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(batch))
            optimizer.step()


def test_two_ranks_with_two_optimizers_in_turn_in_backward(two_ranks: RankPool) -> None:
    two_ranks.run(_alternate_in_backward)


@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_two_ranks_share_the_state(schedule: str, two_ranks: RankPool) -> None:
    two_ranks.run(
        _compare, {"schedule": schedule, "defer": schedule == "forward", "shard_state": True}, 2 * 4, VIEWS, {}
    )


def _save_and_resume(directory: Path) -> None:
    def strategy() -> Any:
        return DDPStrategy(process_group_backend="gloo", cluster_environment=PooledRanks(), **VIEWS)

    for options in (WAYS["backward"], {"schedule": "forward", "defer": True, "shard_state": True}):
        mine, plain = directory / f"mine{len(options)}", directory / f"plain{len(options)}"
        fit(options, callbacks=saving(mine), strategy=strategy(), devices=2)
        fit(None, callbacks=saving(plain), strategy=strategy(), devices=2)
        for path in plain.iterdir():
            assert_same(_without_times(read(str(mine / path.name))), _without_times(read(str(path))), path.name)
        wanted = left_by(*fit(None, ckpt_path=saved_at(plain, 2), strategy=strategy(), devices=2))
        assert_same(left_by(*fit(options, ckpt_path=saved_at(mine, 2), strategy=strategy(), devices=2)), wanted)


def test_two_ranks_save_and_resume(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(_save_and_resume, tmp_path)


class Sharded(Classifier):
    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        assert self.device_mesh is not None
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def _compare_sharded(chosen: Any, settings: dict[str, Any]) -> None:
    def run(options: Any) -> Any:
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False, process_group_backend="gloo")
        trainer, model = fit(options, Sharded, strategy=strategy, devices=2, plugins=[PooledRanks()], **settings)
        left = left_by(trainer, model)
        left["parameters"] = list(map(_local, left["parameters"]))
        states = [state for o in left["optimizers"] for state in o["state"].values()]
        left["optimizers"] = [{key: _local(value) for key, value in state.items()} for state in states]
        return left, model.steps

    found, steps = run(chosen)
    wanted, _ = run(None)
    assert_same(found, wanted)
    assert steps == 2 * 4 // settings.get("accumulate_grad_batches", 1)


@ways
def test_a_sharded_model(way: str, two_ranks: RankPool) -> None:
    two_ranks.run(_compare_sharded, WAYS[way], {})


@exact_ways
def test_a_sharded_model_that_accumulates(way: str, two_ranks: RankPool) -> None:
    two_ranks.run(_compare_sharded, WAYS[way], {"accumulate_grad_batches": 2})
