"""Lightning's Trainer with and without instep. Run as it is: ``python examples/lightning_trainer.py``."""

import logging
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instep.integrations.lightning import InstepCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
# Lightning says how many workers the data could have, and uses names that torch has since renamed.
warnings.filterwarnings("ignore", module="lightning")


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)], nn.Linear(64, 2))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(*callbacks: pl.Callback, clip: float | None) -> Classifier:
    pl.seed_everything(0, verbose=False)
    x = torch.randn(25 * 32, 64)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32)
    model = Classifier()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=4,
        accumulate_grad_batches=2,
        gradient_clip_val=clip,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    return model


def same(one: Classifier, other: Classifier) -> bool:
    return one.losses == other.losses and all(map(torch.equal, one.parameters(), other.parameters()))


# The gradients are clipped: the step moves behind the next forward. They are not: it moves into backward.
for schedule, clip in (("forward", 1.0), ("backward", None)):
    plain = train(clip=clip)
    overlapped = train(InstepCallback(schedule=schedule), clip=clip)
    equal = same(plain, overlapped)
    print(f"schedule={schedule!r}, gradient_clip_val={clip}: loss {plain.losses[0]:.3f} to {plain.losses[-1]:.3f},")
    print(f"    with instep {'equal in every bit' if equal else 'DIFFERENT'}")
    if not equal:
        sys.exit(1)
