"""Diffusion, radiance fields, and other generators that are trained with averages of their weights."""

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.loops.form import Run, form
from tests.loops.parts import mlp, rows


class Denoiser(nn.Module):
    """Predicts the noise in a vector, given how much there is."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.body = nn.Linear(1, 12), mlp(12, 12, 24)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.body(x + self.time(t))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return F.mse_loss(self((1 - t) * x + t * noise, t), noise)


@form("DDPM: accumulation, clipping, EMA", "lucidrains")
def ddpm(run: Run) -> None:
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99))
    run.attach(model, optimizer)
    ema, batches, step = copy.deepcopy(model), rows(12), 0
    while step < 6:
        model.train()
        total = 0.0
        for _ in range(2):
            loss = model.loss(next(batches)[0]) / 2
            total += loss.item()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step <= 2:
            ema.load_state_dict(model.state_dict())
        else:
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.1)
        with torch.no_grad():
            sample = ema(torch.ones(2, 12), torch.ones(2, 1))
        run.saw(model, ema, optimizer, loss=total, sample=sample)


@form("several EMAs, norms logged", "guided-diffusion")
def guided_diffusion(run: Run) -> None:
    model = Denoiser()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    run.attach(model, optimizer)
    rates = (0.9, 0.99)
    averages: list[list[torch.Tensor]] = [copy.deepcopy([p.detach() for p in parameters]) for _ in rates]
    for step, (x, _) in enumerate(rows()):
        for p in parameters:
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
        for part in x.chunk(2):
            model.loss(part).backward()
        with torch.no_grad():
            grad_norm = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in parameters if p.grad is not None))
            param_norm = math.sqrt(sum(float(p.norm()) ** 2 for p in parameters))
        optimizer.step()
        for average, rate in zip(averages, rates, strict=True):
            for target, source in zip(average, parameters, strict=True):
                target.detach().mul_(rate).add_(source.detach(), alpha=1 - rate)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - (step + 1) / 6)
        run.saw(model, optimizer, averages, norms=[grad_norm, param_norm])


@form("`nan_to_num` on gradients, EMA", "EDM")
def edm(run: Run) -> None:
    net = Denoiser().train().requires_grad_(True)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    run.attach(net, optimizer)
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    for i, (x, _) in enumerate(rows()):
        optimizer.zero_grad(set_to_none=True)
        for part in x.chunk(2):
            net.loss(part).mul(1 / 2).backward()
        for g in optimizer.param_groups:
            g["lr"] = 1e-2 * min((i + 1) / 4, 1)
        for p in net.parameters():
            if p.grad is not None:
                torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
        optimizer.step()
        beta = 0.5 ** (8 / max(min(40, (i + 1) * 8 * 0.5), 1e-8))
        for slow, fast in zip(ema.parameters(), net.parameters(), strict=True):
            slow.copy_(fast.detach().lerp(slow, beta))
        snapshot = copy.deepcopy(ema).eval().requires_grad_(False).half()
        run.saw(net, ema, optimizer, snapshot=snapshot.state_dict(), beta=beta)


@form(
    "EMA copied in to evaluate",
    "score_sde",
)
def ema_stored_and_restored(run: Run) -> None:
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    shadow = [p.clone().detach() for p in model.parameters() if p.requires_grad]
    for step, (x, _) in enumerate(rows()):
        optimizer.zero_grad()
        loss = model.loss(x)
        loss.backward()
        for g in optimizer.param_groups:
            g["lr"] = 1e-2 * min(step / 3, 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        decay = min(0.9, (1 + step) / (10 + step))
        with torch.no_grad():
            for s, p in zip(shadow, model.parameters(), strict=True):
                s.sub_((1 - decay) * (s - p))
        stored = [p.detach().cpu().clone() for p in model.parameters()]
        for s, p in zip(shadow, model.parameters(), strict=True):
            p.data.copy_(s.data)
        with torch.no_grad():
            evaluated = model.loss(x).item()
        for c, p in zip(stored, model.parameters(), strict=True):
            p.data.copy_(c.data)
        run.saw(model, optimizer, loss=loss.item(), evaluated=evaluated, shadow=shadow)


@form("one row of an embedding trained", "diffusers")
def textual_inversion(run: Run) -> None:
    words = nn.Embedding(20, 12)
    model = Denoiser().requires_grad_(False)
    optimizer = torch.optim.AdamW(words.parameters(), lr=1e-2)
    run.attach(words, optimizer)
    original = words.weight.data.clone()
    for x, y in rows():
        t, noise = torch.rand(8, 1), torch.randn_like(x)
        loss = F.mse_loss(model(noise + words(torch.where(y == 0, 19, y)), t), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep = torch.ones(20, dtype=torch.bool)
        keep[19] = False
        with torch.no_grad():
            words.weight[keep] = original[keep]
        run.saw(words, optimizer, loss=loss.item(), learned=words.weight[19].detach().clone())


@form("DreamBooth: two models, one optimizer", "diffusers")
def dreambooth(run: Run) -> None:
    denoiser, encoder = Denoiser(), nn.Embedding(4, 12)
    parameters = [*denoiser.parameters(), *encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    run.attach(nn.ModuleList([denoiser, encoder]), optimizer)  # one optimizer spans two modules, taken as one
    for x, y in rows():
        noise = torch.randn_like(x)
        own, prior = (denoiser(noise + encoder(y), torch.rand(8, 1)) - x).pow(2).chunk(2)
        loss = own.mean() + 0.5 * prior.mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.saw(denoiser, encoder, optimizer, loss=loss.item(), norm=norm)


@form("target by EMA, RAdam", "consistency models")
def consistency(run: Run) -> None:
    model = Denoiser()
    target = copy.deepcopy(model).requires_grad_(False).train()
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for k, (x, _) in enumerate(rows()):
        t, noise, gap = torch.rand(8, 1) * 0.8, torch.randn_like(x), 1 / (5 + k)
        optimizer.zero_grad()
        later = model(x + (t + gap) * noise, t + gap)
        loss = F.mse_loss(later, target(x + t * noise, t))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            mu = math.exp(2 * math.log(0.95) / (k + 1))
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                slow.mul_(mu).add_(fast, alpha=1 - mu)
        run.saw(model, target, optimizer, loss=loss.item())


@form("two networks, rate decayed by hand", "NeRF")
def nerf(run: Run) -> None:
    coarse, fine = mlp(12, 4), mlp(12, 4)
    grad_vars = list(coarse.parameters())
    grad_vars += list(fine.parameters())
    optimizer = torch.optim.Adam(params=grad_vars, lr=1e-2, betas=(0.9, 0.999))
    run.attach(nn.ModuleList([coarse, fine]), optimizer)  # one optimizer spans two modules, which attach() takes as one
    for step, (x, _) in enumerate(rows()):
        optimizer.zero_grad()
        color = x[:, :3].sigmoid()
        image_loss = F.mse_loss(coarse(x)[:, :3].sigmoid(), color)
        loss = image_loss + F.mse_loss(fine(x)[:, :3].sigmoid(), color)
        psnr = -10.0 * torch.log(image_loss) / math.log(10.0)
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.1 ** (step / 6)
        run.saw(coarse, fine, optimizer, loss=loss.item(), psnr=psnr.item())


class Splats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.colors = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (-torch.cdist(x, self.places)).softmax(1) @ self.colors


@form(
    "parameters and state replaced by longer ones",
    "Gaussian splatting",
)
def splatting(run: Run) -> None:
    model = Splats()
    groups: list[dict[str, Any]] = [{"params": [p], "name": name} for name, p in model.named_parameters()]
    optimizer = torch.optim.Adam(groups, lr=1e-2, eps=1e-15)
    run.attach(model, optimizer)
    for i, (x, _) in enumerate(rows()):
        if i == 3:
            for group in optimizer.param_groups:
                [old] = group["params"]
                state = optimizer.state.pop(old)
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.cat([state[key], torch.zeros(2, 3)])
                new = nn.Parameter(torch.cat([old.detach(), old.detach()[:2] + 0.1]))
                group["params"] = [new]
                optimizer.state[new] = state
                setattr(model, group["name"], new)
        loss = F.l1_loss(model(x[:, :3]), x[:, 3:6])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.saw(model, optimizer, loss=loss.item(), count=len(model.places))
