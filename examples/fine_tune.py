"""Fine-tune with all that a real loop does, plain and with instep, and compare: ``python examples/fine_tune.py``.

A small byte model learns English (Python's help texts), then Python (the standard library), with gradient accumulation,
clipping by the global norm, warm-up and cosine decay, weight decay for matrices only, and frozen embeddings. About a
minute on one CPU.
"""

import argparse
import copy
import inspect
import pydoc_data.topics

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import instep

STEPS, MICRO_BATCHES, ROWS, LENGTH, WIDTH = 30, 3, 8, 64, 128


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.layers(self.embedding(text) + self.position, mask=mask, is_causal=True)
        return self.norm(x) @ self.embedding.weight.T  # tied


def loss_of(model: nn.Module, text: torch.Tensor, seed: int) -> torch.Tensor:
    starts = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(seed))
    rows = text[starts + torch.arange(LENGTH + 1)].long()
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def pretrain(model: nn.Module, text: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(40):
        loss = loss_of(model, text, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"pretrained on English: loss {loss.item():.3f}")


def fine_tune(model: nn.Module, text: torch.Tensor, attach: bool) -> list[str]:
    """The loop. ``attach`` is all that instep changes in it."""
    model.embedding.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, fused=True)
    warm_up = LinearLR(optimizer, 0.1, total_iters=5)
    scheduler = SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, STEPS - 5)], [5])
    if attach:
        overlap = instep.attach(model, optimizer, schedule="forward", bucket_bytes=1024 * 1024)
    seen = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            loss = loss_of(model, text, 1000 + MICRO_BATCHES * step + micro) / MICRO_BATCHES
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, max_norm=0.5)
        optimizer.step()  # returns at once: buckets are stepped while the next forward runs
        scheduler.step()
        optimizer.zero_grad()
        seen.append(f"step {step + 1}: loss {MICRO_BATCHES * loss.item():.3f}, norm {norm.item():.3f}")
    if attach:
        overlap.detach()
    return seen


def main() -> None:
    english = torch.frombuffer(bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8)
    python = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8)
    torch.manual_seed(0)
    model = ByteModel()
    pretrain(model, english)
    models, logs = [], []
    for attach in (False, True):
        models.append(copy.deepcopy(model))
        torch.manual_seed(1)  # the same dropout
        logs.append(fine_tune(models[-1], python, attach))
    print("\n".join(logs[1][4::5]))
    plain, attached = ([p.detach() for p in model.parameters()] for model in models)
    equal = logs[0] == logs[1] and all(map(torch.equal, plain, attached))
    print(f"fine-tuned on Python, plain and with instep: {'equal, bit for bit' if equal else 'DIFFERENT'}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
