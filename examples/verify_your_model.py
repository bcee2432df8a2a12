"""Is it the same for your model? ``instep.verify`` trains it twice and compares everything after every step."""

import torch
from torch import nn

import instep


def build() -> tuple[nn.Module, torch.optim.Optimizer, object]:
    model = nn.Sequential(nn.Embedding(256, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(i: int) -> None:
        tokens = torch.randint(0, 256, (8, 33))
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


found = instep.verify(build, steps=5, bucket_bytes=16 * 1024, schedule="backward")
print(f"{found.steps} steps, {found.tensors} tensors:", "all equal" if found.equal else found.difference)
raise SystemExit(not found.equal)
