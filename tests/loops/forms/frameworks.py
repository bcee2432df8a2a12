"""Loops that a framework runs, or lends its words to: transformers, accelerate, Lightning and Fabric."""

import copy
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, get_scheduler

import instep
from instep.integrations import lightning as of_lightning
from instep.integrations import transformers as of_transformers
from tests.integrations.fitting import lightnings_own_warnings
from tests.integrations.hugging_face import sentences, tiny
from tests.loops.form import Run, form
from tests.loops.parts import ConvNet, Text, images, mlp, next_token_loss, rows, tokens


class Watch(TrainerCallback):  # type: ignore[misc]  # its types are skipped
    """Tells the run of each step of a ``Trainer``, and of what it logs."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_end(self, *_: Any, model: nn.Module, optimizer: Any, **kwargs: Any) -> None:
        assert (instep.attached(model) is None) == (self.run.options is None)
        self.run.saw(model, getattr(optimizer, "optimizer", optimizer))

    def on_log(self, *_: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        clock = ("_runtime", "_per_second")
        self.run.saw(logs={k: v for k, v in logs.items() if not k.endswith(clock)})


def hugging_face(run: Run, optimizers: Any = (None, None), model: nn.Module | None = None, **settings: Any) -> None:
    chosen = {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": []}
    quiet = {"disable_tqdm": True, "log_level": "error"}
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(directory, **{**chosen, **quiet, **settings})
        added = [] if run.options is None else [of_transformers.InstepCallback(**run.options)]
        data = sentences(18)
        trainer = Trainer(
            model or tiny(),
            arguments,
            train_dataset=data[:14],
            eval_dataset=data[14:],
            callbacks=[Watch(run), *added],
            optimizers=optimizers,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        run.saw(trainer.model, trainer.optimizer.optimizer, history=len(trainer.state.log_history))


@form("`Trainer`", "transformers", by_itself=True)
def trainer(run: Run) -> None:
    hugging_face(run, max_steps=6, per_device_train_batch_size=2)


@form("`Trainer`: accumulation, bfloat16, best model", "transformers", by_itself=True)
def trainer_with_evaluation(run: Run) -> None:
    often: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    more: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "load_best_model_at_end": True,
        "max_grad_norm": 0.5,
    }
    hugging_face(run, max_steps=6, per_device_train_batch_size=2, lr_scheduler_type="cosine", **often, **more)


@form("accelerate: `accumulate`, clipping, EMA", "diffusers")
def accelerate_loop(run: Run) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = mlp(12, 12)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=12)
    loader: Any = DataLoader(TensorDataset(torch.cat([x for x, _ in rows(11)])), batch_size=8)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    run.attach(model, optimizer.optimizer)
    ema = copy.deepcopy(accelerator.unwrap_model(model))
    for [x] in loader:
        with accelerator.accumulate(model):
            noise = torch.randn_like(x)
            loss = F.mse_loss(model(x + noise), noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            run.saw(model, ema, optimizer.optimizer, loss=loss.item(), lr=schedule.get_last_lr())
    AcceleratorState._reset_state(reset_partial_state=True)


@form("accelerate: adapters alone", "LoRA scripts")
def accelerate_adapters(run: Run) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model: Any = nn.ModuleDict({"base": mlp(12, 12), "down": nn.Linear(12, 2, bias=False), "up": nn.Linear(2, 12)})
    model["base"].requires_grad_(False)
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(wanted, lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.attach(model, optimizer.optimizer)
    for x, _ in rows():
        with accelerator.autocast():
            loss = F.mse_loss(model["base"](x) + model["up"](model["down"](x)), x)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        adapters = {k: v for k, v in accelerator.get_state_dict(model).items() if not k.startswith("base")}
        run.saw(model, optimizer.optimizer, loss=loss.item(), norm=norm, adapters=adapters)
    AcceleratorState._reset_state(reset_partial_state=True)


@form("Fabric: `no_backward_sync`, `clip_gradients`", "litgpt")
def fabric_loop(run: Run) -> None:
    with lightnings_own_warnings():
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    module = Text()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    run.attach(model, optimizer.optimizer)
    batches = tokens(12)
    for i in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min((i + 1) / 3, 1)
        for micro in range(2):
            x, y = next(batches)
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = next_token_loss(model(x), y)
                fabric.backward(loss / 2)
        norm: Any = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.saw(module, optimizer.optimizer, loss=loss.item(), norm=norm)


class Lit(pl.LightningModule):
    def __init__(self, run: Run, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.watched_by = run

    def training_step(self, batch: Any, i: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, i: int) -> None:
        self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.trainer.model is not None
        assert (instep.attached(self.trainer.model) is None) == (self.watched_by.options is None)
        optimizers = [getattr(one, "optimizer", one) for one in self.trainer.optimizers]
        self.watched_by.saw(self.net, *optimizers, logged=dict(self.trainer.callback_metrics))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def lightning(run: Run, module: pl.LightningModule, **settings: Any) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks: list[pl.Callback] = [] if run.options is None else [of_lightning.InstepCallback(**run.options)]
    loader = DataLoader(TensorDataset(*map(torch.cat, zip(*images(7), strict=True))), batch_size=4)
    with lightnings_own_warnings():
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, callbacks=callbacks, enable_checkpointing=False, **quiet, **settings
        )
        trainer.fit(module, loader, loader)


@form("clipping, accumulation, validation", "Lightning", by_itself=True)
def lightning_trainer(run: Run) -> None:
    settings: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 2}
    lightning(run, Lit(run, ConvNet()), **settings)


class LitGan(Lit):
    """Manual optimization of two networks in turn."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, nn.ModuleDict({"g": mlp(4, 64), "d": mlp(64, 1)}))
        self.automatic_optimization = False

    def training_step(self, batch: Any, i: int) -> None:
        optimizers: Any = self.optimizers()
        of_g, of_d = optimizers
        x, net = batch[0].flatten(1), self.net
        assert isinstance(net, nn.ModuleDict)
        self.toggle_optimizer(of_g)
        made = net["g"](torch.randn(4, 4))
        loss = -net["d"](made).mean()
        of_g.zero_grad()
        self.manual_backward(loss)
        of_g.step()
        self.untoggle_optimizer(of_g)
        self.toggle_optimizer(of_d)
        gap = F.softplus(-net["d"](x)).mean() + F.softplus(net["d"](made.detach())).mean()
        of_d.zero_grad()
        self.manual_backward(gap)
        of_d.step()
        self.untoggle_optimizer(of_d)
        self.log_dict({"loss": loss, "gap": gap})

    def validation_step(self, batch: Any, i: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        assert isinstance(self.net, nn.ModuleDict)
        return [torch.optim.Adam(self.net[name].parameters(), lr=1e-2) for name in ("g", "d")], []


@form("manual optimization of a GAN", "Lightning", by_itself=True)
def lightning_gan(run: Run) -> None:
    lightning(run, LitGan(run), max_epochs=1)
