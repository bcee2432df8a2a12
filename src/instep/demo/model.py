"""The model: a byte-level GPT made of torch's own modules."""

import torch
from torch import nn

from instep.demo.job import Shape

BYTES = 256
CONTEXT = 64


class ByteGPT(nn.Module):
    """Predicts each next byte from those before it, up to ``CONTEXT`` of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(CONTEXT, shape.width)
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """``(rows, length)`` bytes to ``(rows, length, 256)`` logits."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.byte(text) + self.position.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _block(shape: Shape) -> nn.Module:
    return nn.TransformerEncoderLayer(
        shape.width,
        shape.heads,
        dim_feedforward=4 * shape.width,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )
