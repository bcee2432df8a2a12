"""Small training runs to be interrupted, and everything of one that a checkpoint must bring back."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import instep
from instep import Checkpoint
from instep.checkpoint import manifest as manifests
from instep.checkpoint.files import DIGEST, MANIFEST, digest_line
from instep_tools.harness import first_difference
from tests.cases import Blocks, batch, two_groups

loss_of = nn.functional.cross_entropy
Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, amsgrad=True)


def made(make: Make = adamw, seed: int = 0, build: Callable[[], nn.Module] = Blocks) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = build()
    return model, make(model)


def load_from(path: Path | str, model: nn.Module, optimizer: Any) -> Checkpoint:
    """``instep.load`` where there is something to load."""
    found = instep.load(path, model, optimizer)
    assert found is not None
    return found


def learn(model: nn.Module, optimizer: Any, steps: range) -> None:
    for i in steps:
        x, y = batch(i)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Copies of parameters, buffers, state and groups, as they are in memory: instep is not told that they are read."""
    with torch._C.DisableTorchFunctionSubclass():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            yield name, tensor.detach().clone()
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                yield f"group {number} {key}", len(value) if key == "params" else copy.deepcopy(value)
            for place, parameter in enumerate(group["params"]):
                entry = optimizer.state.get(parameter, {})
                yield f"keys of {number}.{place}", sorted(entry)
                for key, value in sorted(entry.items()):
                    several = value if isinstance(value, list) else [value]
                    yield from ((f"{number}.{place}.{key}.{i}", copy.deepcopy(v)) for i, v in enumerate(several))


def require_same(first: Any, second: Any, when: str) -> None:
    """Of two ``(model, optimizer)``, or of what ``everything`` gave before."""
    a, b = (everything(*one) if isinstance(one, tuple) else iter(one) for one in (first, second))
    difference = first_difference(a, b)
    assert difference is None, f"{when}: {difference}"


def sign(directory: Path, manifest: Any) -> None:
    """Put another manifest in the place of a checkpoint's, with the digest that it should have."""
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode("ascii")
    (directory / MANIFEST).write_bytes(text)
    (directory / DIGEST).write_bytes(digest_line(manifests.digest_of(text)))
