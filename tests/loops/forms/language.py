"""Language models: pre-training, fine-tuning, and the optimizers that come with them."""

import copy
import io
import math
import random
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import lr_scheduler

from tests.loops.form import Run, form
from tests.loops.parts import Text, next_token_loss, rows, tokens


def decay_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


@form("`model.zero_grad()` before backward, clipping, callbacks", "minGPT")
def min_gpt(run: Run) -> None:
    model = Text(tied=False)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95))
    run.attach(model, optimizer)
    for x, y in tokens():
        model.train()
        loss = next_token_loss(model(x), y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            written = model(x[:1]).argmax(-1)
        run.saw(model, optimizer, loss=loss.item(), norm=norm, written=written)


@form("accumulation, autocast, rate set in groups", "nanoGPT")
def nano_gpt(run: Run) -> None:
    model = Text()
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-2, betas=(0.9, 0.95), fused=True)
    run.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batches, best = tokens(18), 1e9
    for i in range(6):
        rate = 1e-2 * (i + 1) / 3 if i < 3 else 1e-3 + 0.5 * (1 + math.cos(math.pi * (i - 3) / 3)) * 9e-3
        for group in optimizer.param_groups:
            group["lr"] = rate
        if i % 2 == 0:
            model.eval()
            with torch.no_grad():
                x, y = next(batches)
                validation = next_token_loss(model(x), y).item()
            model.train()
            if validation < best:
                best = validation
                file = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": best}, file)
        for _ in range(2):
            x, y = next(batches)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = next_token_loss(model(x), y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        run.saw(model, optimizer, loss=loss.item() * 2, norm=norm, saved=torch.load(io.BytesIO(file.getvalue())))


class SmallMuon(torch.optim.Optimizer):
    """Momentum, made orthogonal by a few iterations of Newton and Schulz."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                average = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(average, group["momentum"]).bfloat16()
                x = x / (x.norm() + 1e-7)
                for _ in range(3):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                p.add_(x.to(p.dtype), alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


@form("Muon beside AdamW", "modded-nanogpt")
def muon_and_adamw(run: Run) -> None:
    model = Text(tied=False)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-2), SmallMuon(matrices)]
    run.attach(model, optimizers)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    for i, (x, y) in enumerate(tokens()):
        loss = next_token_loss(15 * torch.tanh(model(x) / 15), y)
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - i / 8)
        for group in optimizers[1].param_groups:
            group["momentum"] = 0.85 + 0.1 * min(i / 4, 1)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        run.saw(model, *optimizers, loss=loss.item())


@form(
    "hidden state carried on, rate divided by 4",
    "pytorch/examples",
)
def word_language_model(run: Run) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(20, 8), "rnn": nn.LSTM(8, 8), "out": nn.Linear(8, 20)})
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    run.attach(model, optimizer)
    hidden, best, file = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)), 0.0, io.BytesIO()
    for x, y in tokens():
        hidden = hidden[0].detach(), hidden[1].detach()
        model.zero_grad()
        output, hidden = model["rnn"](model["words"](x.T), hidden)
        loss = next_token_loss(model["out"](output), y.T)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if not best or loss.item() < best:
            best, file = loss.item(), io.BytesIO()
            torch.save(model, file)
        else:
            optimizer.param_groups[0]["lr"] /= 4.0
        run.saw(model, optimizer, loss=loss.item(), hidden=hidden, lr=optimizer.param_groups[0]["lr"])
    model = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    run.saw(model, optimizer, words=model["words"](torch.arange(3)))


@form(
    "SGD, then ASGD; averages as `p.data`",
    "AWD-LSTM",
)
def averaged_sgd(run: Run) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(20, 8), "rnn": nn.GRU(8, 8), "out": nn.Linear(8, 20)})
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-4)
    run.attach(model, optimizer)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return next_token_loss(model["out"](model["rnn"](model["words"](x.T))[0]), y.T)

    for x, y in tokens(3):
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()
        run.saw(model, optimizer)
    run.detach()
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.5, t0=0, lambd=0.0, weight_decay=1e-4)
    run.attach(model, optimizer)
    for x, y in tokens(5):
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()
        kept = {}
        for p in model.parameters():
            kept[p] = p.data.clone()
            p.data = optimizer.state[p]["ax"].clone()
        with torch.no_grad():
            validation = loss_of(x, y).item()
        for p in model.parameters():
            p.data = kept[p].clone()
        run.saw(model, optimizer, validation=validation)


@form(
    "the Transformer's schedule, tied weights",
    "Annotated Transformer",
)
def noam(run: Run) -> None:
    model = Text()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.9, 0.98), eps=1e-9)
    run.attach(model, optimizer)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: 16**-0.5 * min((i + 1) ** -0.5, (i + 1) * 4**-1.5))
    for i, (x, y) in enumerate(tokens(8)):
        target = torch.full((4, 8, 20), 0.1 / 19).scatter_(2, y.unsqueeze(2), 0.9)
        loss = F.kl_div(model(x).log_softmax(-1), target, reduction="sum") / y.numel()
        loss.backward()
        if i % 2 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        run.saw(model, optimizer, loss=loss.item(), lr=optimizer.param_groups[0]["lr"])


@form("accumulation weighted by tokens", "fairseq")
def multiplied_gradients(run: Run) -> None:
    model = Text()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    run.attach(model, optimizer)
    batches = tokens(12)
    for _ in range(6):
        optimizer.zero_grad()
        count, total = 0, 0.0
        for _ in range(2):
            x, y = next(batches)
            used = torch.rand(y.shape) < 0.7
            loss = F.cross_entropy(model(x)[used], y[used], reduction="sum")
            loss.backward()
            count, total = count + int(used.sum()), total + loss.item()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 / count)
        norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
        if norm > 0.5:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5 / norm)
        optimizer.step()
        run.saw(model, optimizer, loss=total / count, norm=norm)


@form("bfloat16 with float32 masters", "apex O2")
def master_weights(run: Run) -> None:
    model = Text().bfloat16()
    masters = nn.ParameterList(p.detach().clone().float() for p in model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    run.attach(masters, optimizer)
    for x, y in tokens():
        loss = next_token_loss(model(x).float(), y)
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        run.saw(model, masters, optimizer, loss=loss.item())


@form("all in bfloat16", "torchtune")
def all_bfloat16(run: Run) -> None:
    model = Text().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    run.attach(model, optimizer)
    for x, y in tokens():
        optimizer.zero_grad()
        loss = next_token_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


class Experts(nn.Module):
    """Each token goes to one expert; some experts get none."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.router = nn.Embedding(20, 8), nn.Linear(8, 6)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 20)
        self.balance = torch.zeros(())

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text).flatten(0, 1)
        weights = self.router(x).softmax(-1)
        weight, chosen = weights.max(-1)
        self.balance = 6 * (F.one_hot(chosen, 6).float().mean(0) * weights.mean(0)).sum()
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            mine = chosen == number
            out[mine] = weight[mine, None] * self.experts[number](x[mine])
        return self.head(x + out).view(*text.shape, -1)


@form("unused experts", "MoE models")
def mixture_of_experts(run: Run) -> None:
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    run.attach(model, optimizer)
    for x, y in tokens(size=1):
        loss = next_token_loss(model(x), y)
        (loss + 0.01 * model.balance).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.saw(model, optimizer, loss=loss.item(), balance=model.balance.item(), norm=norm)


@form(
    "stages by hand",
    "pipelines",
)
def pipeline(run: Run) -> None:
    stages = nn.ModuleList([nn.Linear(12, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 4)])
    optimizers = []
    for stage in stages:
        optimizers.append(torch.optim.AdamW(stage.parameters(), lr=1e-2))
        run.attach(stage, optimizers[-1])
    for x, y in rows():
        kept = []
        for part in x.chunk(2):
            inputs, outputs = [], []
            for stage in stages:
                inputs.append(part.detach().requires_grad_())
                part = stage(inputs[-1])
                outputs.append(part)
            kept.append((inputs, outputs))
        losses = []
        for (inputs, outputs), target in zip(kept, y.chunk(2), strict=True):
            losses.append(F.cross_entropy(outputs[-1], target) / 2)
            losses[-1].backward()
            for one, following in zip(outputs[-2::-1], inputs[:0:-1], strict=True):
                one.backward(following.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.saw(stages, *optimizers, losses=losses)


@form("adapters by hand, merged to evaluate", "LoRA")
def lora(run: Run) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.lora_a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
            self.lora_b = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + F.dropout(x, 0.1, self.training) @ self.lora_a.T @ self.lora_b.T

    model = Text()
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, nn.Module)
        block.qkv, block.out = Adapted(block.get_submodule("qkv")), Adapted(block.get_submodule("out"))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run.attach(model, optimizer)
    for x, y in tokens():
        optimizer.zero_grad()
        loss = next_token_loss(model(x), y)
        loss.backward()
        optimizer.step()
        adapters = OrderedDict((k, v) for k, v in model.state_dict().items() if "lora_" in k)
        merged = copy.deepcopy(model)
        for one in merged.modules():
            if isinstance(one, Adapted):
                one.base.weight.data += one.lora_b.data @ one.lora_a.data
                one.lora_b.data.zero_()
        with torch.no_grad():
            written = merged.eval()(x[:1])
        run.saw(model, optimizer, loss=loss.item(), adapters=adapters, written=written)


@form("layers dropped at random", "LayerDrop")
def layer_drop(run: Run) -> None:
    model = Text(depth=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for i, (x, y) in enumerate(tokens()):
        optimizer.zero_grad()
        for again in (False, True):
            try:
                h = model.words(x)
                for block in model.blocks:
                    if random.random() > 0.3:
                        h = block(h)
                loss = next_token_loss(model.head(model.norm(h)), y)
                if i == 2 and not again:
                    raise torch.OutOfMemoryError("as if")
                loss.backward()
                break
            except torch.OutOfMemoryError:
                for p in model.parameters():
                    p.grad = None
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())
