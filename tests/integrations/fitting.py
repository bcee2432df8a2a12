"""A small LightningModule, and one ``fit`` of it with or without instep."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.integrations.lightning import InstepCallback
from tests.cases import Blocks

WAYS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "undo": {"schedule": "backward", "undo": True},
    "together": {"schedule": "backward", "together": True},
}
BATCHES = 7


class Classifier(pl.LightningModule):
    """Logs, validates and schedules; keeps each loss it has seen, and how many steps instep has made."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Blocks(depth=2)
        self.seen: list[torch.Tensor] = []
        self.steps = self.redone = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.seen.append(loss.detach())
        return loss

    def training_step(self, batch: Any, i: int) -> Any:
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, i: int) -> None:
        self.log("validation", self.loss_of(batch), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += self.trainer.callback_metrics.values()
        assert self.trainer.model is not None
        overlap = instep.attached(self.trainer.model)
        if overlap is not None:
            self.steps, self.redone = overlap.step_count, overlap.redo_count

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 2e-2}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Alternating(Classifier):
    """Manual optimization: two optimizers in turn, each with its own forward, and gradients cleared at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, i: int) -> None:
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss_of(batch))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        optimizers = [
            torch.optim.AdamW(parameters[:6], lr=1e-2),
            torch.optim.SGD(parameters[6:], lr=1e-2, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 2, 0.7) for o in optimizers]


def loader(batches: int = BATCHES) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(batches)
    x, y = torch.randn(4 * batches, 16, generator=generator), torch.randint(0, 10, (4 * batches,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def trainer_of(options: dict[str, Any] | None, callbacks: list[pl.Callback], **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks)
    mine = [] if options is None else [InstepCallback(**options)]
    chosen = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, **quiet, **settings}
    with lightnings_own_warnings():
        return pl.Trainer(**chosen, callbacks=[*mine, *callbacks])


@contextmanager
def lightnings_own_warnings() -> Iterator[None]:
    """Of more workers for the data, of torch's names that it uses, of a GPU that is not used."""
    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module="lightning")
        yield


def fit(
    options: dict[str, Any] | None,
    build: Callable[[], pl.LightningModule] = Classifier,
    callbacks: Callable[[], list[pl.Callback]] = list,
    ckpt_path: str | None = None,
    **settings: Any,
) -> tuple[pl.Trainer, Any]:
    """Train a model with the same weights as ever, with instep if there are ``options``."""
    pl.seed_everything(0, verbose=False)
    model = build()
    trainer = trainer_of(options, callbacks(), **settings)
    train(trainer, model, ckpt_path)
    return trainer, model


def train(trainer: pl.Trainer, model: Any, ckpt_path: str | None = None) -> None:
    with lightnings_own_warnings():
        trainer.fit(model, loader(), loader(2), ckpt_path=ckpt_path)


def left_by(trainer: pl.Trainer, model: Any) -> dict[str, Any]:
    """All that two runs have to have in common."""
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "seen": getattr(model, "seen", []),
        "logged": dict(trainer.callback_metrics),
        "step": trainer.global_step,
    }


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    """Every number in two nests of dicts and lists, bit for bit."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert found.dtype == wanted.dtype, where
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    else:
        assert found == wanted, where


def assert_fits_the_same(way: str, steps: int, *, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """``fit`` with instep is ``fit`` without, and instep has made the steps. Returns the model trained with it."""
    chosen = WAYS[way] if options is None else {**WAYS[way], **options}
    trainer, model = fit(chosen, **settings)
    assert_same(left_by(trainer, model), left_by(*fit(None, **settings)))
    assert model.steps == steps
    assert instep.attached(trainer.model or model) is None
    return model
