"""Classifiers, autoencoders and graphs, as in pytorch/examples and in PyG."""

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import lr_scheduler

from tests.loops.form import Run, form
from tests.loops.parts import ConvNet, images, mlp, rows


@form("MNIST: Adadelta, `StepLR`, evaluations", "pytorch/examples")
def mnist(run: Run) -> None:
    model = ConvNet()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    run.attach(model, optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(3):
        model.train()
        for x, y in images(2):
            optimizer.zero_grad()
            loss = F.nll_loss(model(x).log_softmax(1), y)
            loss.backward()
            optimizer.step()
            run.saw(model, optimizer, loss=loss.item())
        model.eval()
        with torch.no_grad():
            losses = [F.nll_loss(model(x).log_softmax(1), y, reduction="sum").item() for x, y in images(2)]
        scheduler.step()
        run.saw(model, optimizer, losses=losses, lr=scheduler.get_last_lr())


@form("ImageNet: autocast, `GradScaler`, best checkpoint", "pytorch/examples")
def imagenet_amp(run: Run) -> None:
    model = ConvNet(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    run.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    best, file = 0.0, io.BytesIO()
    for x, y in images(channels=3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
            loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        accuracy = (output.argmax(1) == y).float().mean().item()
        if accuracy >= best:
            best = accuracy
            file = io.BytesIO()
            torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        run.saw(model, optimizer, loss=loss.item(), best=best, scale=scaler.get_scale())
    run.saw(model, optimizer, saved=torch.load(io.BytesIO(file.getvalue())))


@form("new model, optimizer and scheduler from a checkpoint", "pytorch/examples")
def resumed(run: Run) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.attach(model, optimizer)
        return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 6)

    model, optimizer, scheduler = build()
    for i, (x, y) in enumerate(rows()):
        if i == 3:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
            model, optimizer, scheduler = build()
            saved = torch.load(io.BytesIO(file.getvalue()))
            for one, state in zip((model, optimizer, scheduler), saved, strict=True):
                one.load_state_dict(state)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.saw(model, optimizer, loss=loss.item(), lr=scheduler.get_last_lr())


@form("one encoder that runs twice", "pytorch/examples")
def siamese(run: Run) -> None:
    model = nn.ModuleDict(
        {"encoder": ConvNet(out=6), "judge": nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))}
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    run.attach(model, optimizer)
    for x, y in images():
        optimizer.zero_grad()
        both = torch.cat([model["encoder"](x), model["encoder"](x.flip(0))], 1)
        loss = F.binary_cross_entropy_with_logits(model["judge"](both).squeeze(1), (y == y.flip(0)).float())
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form("VAE that samples after each step", "pytorch/examples")
def vae(run: Run) -> None:
    model = nn.ModuleDict(
        {"enc": nn.Linear(12, 16), "mu": nn.Linear(16, 4), "var": nn.Linear(16, 4), "dec": mlp(4, 12)}
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    train_loss = 0.0
    for x, _ in rows():
        optimizer.zero_grad()
        h = model["enc"](x).relu()
        mu, log_var = model["mu"](h), model["var"](h)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        loss = F.mse_loss(model["dec"](z), x, reduction="sum") - 0.5 * (1 + log_var - mu**2 - log_var.exp()).sum()
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        with torch.no_grad():
            sample = model["dec"](torch.randn(3, 4))
        run.saw(model, optimizer, loss=train_loss, sample=sample)


@form("super-resolution: `torch.save(model)`", "pytorch/examples")
def super_resolution(run: Run) -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for x, _ in images():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[:, :, ::2, ::2]), x)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            psnr = 10 * torch.log10(1 / F.mse_loss(model(x[:, :, ::2, ::2]), x))
        file = io.BytesIO()
        torch.save(model, file)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        run.saw(model, optimizer, psnr=psnr.item(), saved=saved.state_dict())


@form("forward-forward: an optimizer and loss for each layer", "pytorch/examples")
def forward_forward(run: Run) -> None:
    layers = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 16)])
    optimizers = []
    for layer in layers:
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        run.attach(layer, optimizer)
        optimizers.append(optimizer)
    for x, _ in rows():
        positive, negative = x, x[torch.randperm(len(x))]
        losses = []
        for layer, optimizer in zip(layers, optimizers, strict=True):
            good = layer(positive / positive.norm(dim=1, keepdim=True)).relu()
            bad = layer(negative / negative.norm(dim=1, keepdim=True)).relu()
            loss = F.softplus(torch.cat([2 - good.pow(2).mean(1), bad.pow(2).mean(1) - 2])).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            positive, negative = good.detach(), bad.detach()
        run.saw(layers, *optimizers, losses=losses)


@form("LSTM cells in float64, L-BFGS", "pytorch/examples")
def time_sequence(run: Run) -> None:
    model = nn.ModuleDict({"cell": nn.LSTMCell(1, 8), "out": nn.Linear(8, 1)}).double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    run.attach(model, optimizer)
    wave = torch.sin(torch.arange(12.0).double() / 3).repeat(3, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        hidden = torch.zeros(3, 8).double(), torch.zeros(3, 8).double()
        outputs = []
        for value in wave.split(1, dim=1):
            hidden = model["cell"](value, hidden)
            outputs.append(model["out"](hidden[0]))
        loss = F.mse_loss(torch.cat(outputs, 1)[:, :-1], wave[:, 1:])
        loss.backward()
        return loss

    for _ in range(5):
        run.saw(model, optimizer, loss=optimizer.step(closure).item())


@form("SGD with a closure", "torch.optim")
def closure_sgd(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    for x, y in rows():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.item()

        run.saw(model, optimizer, loss=optimizer.step(closure))


class Graph(nn.Module):
    """Two graph convolutions with a dense adjacency, or two attentions over it."""

    edges: torch.Tensor

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 4)
        self.score = nn.Parameter(torch.randn(16)) if attention else None
        self.register_buffer("edges", (torch.rand(10, 10) > 0.6).float() + torch.eye(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(F.dropout(x, 0.3, self.training))
        edges = self.edges / self.edges.sum(1, keepdim=True)
        if self.score is not None:
            scores = F.leaky_relu((h * self.score).sum(1) + (h * self.score).sum(1, keepdim=True))
            edges = scores.masked_fill(self.edges == 0, -9e9).softmax(1)
        return edges @ self.second((edges @ h).relu())


@form("GCN: one full batch", "PyG")
def gcn(run: Run) -> None:
    model = Graph(attention=False)
    decayed: dict[str, Any] = {"params": model.first.parameters(), "weight_decay": 5e-4}
    optimizer = torch.optim.Adam([decayed, {"params": model.second.parameters()}], lr=1e-2)
    run.attach(model, optimizer)
    x, y = next(rows(1, size=10))
    best = 0.0
    for _ in range(6):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x)[:5], y[:5])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(x).argmax(1) == y
        best = max(best, right[5:].float().mean().item())
        run.saw(model, optimizer, loss=loss.item(), best=best, right=right)


@form("GAT: early stopping, best weights by `deepcopy`", "PyG")
def early_stopping(run: Run) -> None:
    model = Graph(attention=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2, weight_decay=5e-4)
    run.attach(model, optimizer)
    x, y = next(rows(1, size=10))
    best, best_state, patience = float("inf"), copy.deepcopy(model.state_dict()), 0
    for _ in range(8):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x)[:5], y[:5])
        loss.backward()
        optimizer.step()
        model.eval()
        validation = F.cross_entropy(model(x)[5:], y[5:]).item()
        if validation < best:
            best, best_state, patience = validation, copy.deepcopy(model.state_dict()), 0
        else:
            patience += 1
        run.saw(model, optimizer, validation=validation, patience=patience)
    model.load_state_dict(best_state)
    run.saw(model, optimizer, output=model(x))


@form("`best_state = model.state_dict()`, uncopied", "notebooks")
def best_state_by_reference(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    run.attach(model, optimizer)
    best, best_state = float("inf"), model.state_dict()
    for x, y in rows():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < best:
            best, best_state = loss.item(), model.state_dict()
        run.saw(model, optimizer, best=best)
    model.load_state_dict(best_state)
    run.saw(model, optimizer, best_state=best_state)


@form("`ReduceLROnPlateau`", "Keras-like trainers")
def plateau(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for x, y in rows():
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.inference_mode():
            validation = F.cross_entropy(model(x + 1), y)
        scheduler.step(validation)
        run.saw(model, optimizer, validation=validation.item(), lr=optimizer.param_groups[0]["lr"])


@form("`SparseAdam` beside `Adam`", "word2vec")
def sparse_embeddings(run: Run) -> None:
    model = nn.ModuleDict({"users": nn.Embedding(20, 8, sparse=True), "things": nn.Embedding(20, 8), "out": mlp(16, 1)})
    sparse = torch.optim.SparseAdam(model["users"].parameters(), lr=1e-2)
    dense = torch.optim.Adam([*model["things"].parameters(), *model["out"].parameters()], lr=1e-2)
    run.attach(model, [sparse, dense])
    for _ in range(6):
        who, what = torch.randint(20, (8,)), torch.randint(20, (8,))
        loss = F.mse_loss(
            model["out"](torch.cat([model["users"](who), model["things"](what)], 1)).squeeze(1), torch.rand(8)
        )
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        run.saw(model, sparse, dense, loss=loss.item())
