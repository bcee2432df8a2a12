"""Image models, as timm, detection and self-supervised code train them."""

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from tests.loops.form import Run, form
from tests.loops.parts import ConvNet, images, mlp, rows


@form("mixup, clipping, EMA, `step_update`", "timm")
def timm_ema(run: Run) -> None:
    model = ConvNet()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.05}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    run.attach(model, optimizer)
    ema = copy.deepcopy(model).eval()
    for update, (x, y) in enumerate(images()):
        mix = float(torch.distributions.Beta(0.8, 0.8).sample())
        target = F.one_hot(y, 4).float()
        loss = -(
            model(mix * x + (1 - mix) * x.flip(0)).log_softmax(1) * (mix * target + (1 - mix) * target.flip(0))
        ).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for average, value in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                average.copy_(0.9 * average + 0.1 * value)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * (update + 1) / 6))
        run.saw(model, optimizer, norm=norm, ema=ema.state_dict(), output=ema(x))


@form("clipping by value", "timm")
def timm_clip_value(run: Run) -> None:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    run.attach(model, optimizer)
    for x, y in images():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form("adaptive gradient clipping", "NFNet")
def timm_agc(run: Run) -> None:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)

    def unit_norm(x: torch.Tensor) -> torch.Tensor:
        dims = tuple(range(1, x.ndim)) or None
        return torch.linalg.vector_norm(x, dim=dims, keepdim=True)

    for x, y in images():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            most = unit_norm(p.detach()).clamp_(min=1e-3).mul_(0.01)
            norm = unit_norm(p.grad.detach())
            clipped = p.grad.detach() * (most / norm.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(norm < most, p.grad.detach(), clipped))
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form("stochastic weight averaging", "torch.optim.swa_utils")
def swa(run: Run) -> None:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    average = AveragedModel(model)
    scheduler, late = lr_scheduler.CosineAnnealingLR(optimizer, 6), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for i, (x, y) in enumerate(images()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if i >= 3:
            average.update_parameters(model)
            late.step()
        else:
            scheduler.step()
        run.saw(model, optimizer, average.module, lr=optimizer.param_groups[0]["lr"])
    update_bn([x for x, _ in images(2)], average)
    run.saw(model, optimizer, average.state_dict())


@form("backbone thawed by `add_param_group`", "fine-tuning")
def unfreezing(run: Run) -> None:
    model = ConvNet()
    model.body.requires_grad_(False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for i, (x, y) in enumerate(images()):
        if i == 3:
            model.body.requires_grad_(True)
            optimizer.add_param_group({"params": model.body.parameters(), "lr": 1e-3})
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form("`OneCycleLR`, momentum too", "fastai")
def one_cycle(run: Run) -> None:
    model = ConvNet(3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch leaves it out
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    run.attach(model, optimizer)
    scheduler = lr_scheduler.OneCycleLR(optimizer, [1e-3, 1e-2], total_steps=7)
    for x, y in images(channels=3):
        loss = F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.saw(model, optimizer, loss=loss.item(), betas=optimizer.param_groups[0]["betas"])


@form("detection: `LambdaLR`, an end if not finite", "torchvision")
def detection(run: Run) -> None:
    model = nn.ModuleDict({"body": mlp(out=8), "classes": nn.Linear(8, 4), "boxes": nn.Linear(8, 4)})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    run.attach(model, optimizer)
    warmup = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.25 * (step + 1)))
    for x, y in rows():
        features = model["body"](x)
        losses = {
            "classes": F.cross_entropy(model["classes"](features), y),
            "boxes": F.smooth_l1_loss(model["boxes"](features), x[:, :4]),
        }
        total: Any = sum(losses.values())
        if not math.isfinite(total.item()):
            break
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        warmup.step()
        run.saw(model, optimizer, losses=losses, lr=optimizer.param_groups[0]["lr"])


@form("momentum encoder, queue of keys", "MoCo")
def momentum_encoder(run: Run) -> None:
    model = ConvNet(out=8)
    slow = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.attach(model, optimizer)
    queue = F.normalize(torch.randn(8, 16), dim=0)
    for i, (x, _) in enumerate(images()):
        query = F.normalize(model(x), dim=1)
        with torch.no_grad():
            for q, k in zip(model.parameters(), slow.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1
            keys = F.normalize(slow(x.flip(3)), dim=1)
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ queue], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue[:, (4 * i) % 16 : (4 * i) % 16 + 4] = keys.T
        run.saw(model, slow, optimizer, loss=loss.item())


@form("EMA teacher, clipping of each parameter", "DINO")
def dino(run: Run) -> None:
    student, teacher = nn.Sequential(mlp(), nn.Linear(4, 6)), nn.Sequential(mlp(), nn.Linear(4, 6))
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters())
    run.attach(student, optimizer)
    center = torch.zeros(1, 6)
    for i, (x, _) in enumerate(rows()):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 1e-2 * (i + 1) / 6, 0.04 + 0.06 * i
        target = teacher(x + 0.1 * torch.randn_like(x))
        loss = -(((target - center) / 0.1).softmax(1) * student(x).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        norms = []
        for name, p in student.named_parameters():
            if p.grad is not None:
                norm = p.grad.data.norm(2)
                norms.append(norm.item())
                if 0.3 / (norm + 1e-6) < 1:
                    p.grad.data.mul_(0.3 / (norm + 1e-6))
            if i < 2 and name.startswith("1."):
                p.grad = None
        optimizer.step()
        with torch.no_grad():
            for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
                k.data.mul_(0.9).add_(q.detach().data, alpha=0.1)
            center = center * 0.9 + target.mean(0, keepdim=True) * 0.1
        run.saw(student, teacher, optimizer, loss=loss.item(), norms=norms)


@form("frozen teacher", "DeiT")
def distillation(run: Run) -> None:
    teacher, student = mlp(width=20).eval(), mlp()
    optimizer = torch.optim.NAdam(student.parameters(), lr=1e-2)
    run.attach(student, optimizer)
    for x, y in rows():
        with torch.no_grad():
            soft = (teacher(x) / 2).softmax(1)
        output = student(x)
        loss = F.kl_div((output / 2).log_softmax(1), soft, reduction="batchmean") + F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.saw(student, optimizer, loss=loss.item())


@form("activation checkpointing with dropout", "timm")
def checkpointed(run: Run) -> None:
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 12)) for _ in range(3)
    )
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(12, 4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for x, y in rows():
        for block in blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        loss = F.cross_entropy(model["head"](x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form(
    "pruned by masks, rewound once",
    "lottery tickets",
)
def pruned(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    run.attach(model, optimizer)
    initial = copy.deepcopy(model.state_dict())
    masks = {name: torch.ones_like(p) for name, p in model.named_parameters() if p.ndim > 1}
    for i, (x, y) in enumerate(rows()):
        if i == 3:
            for name, p in model.named_parameters():
                if name in masks:
                    masks[name] = (p.data.abs() > p.data.abs().median()).float()
                p.data = initial[name].clone() * masks.get(name, torch.ones(()))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        for name, mask in masks.items():
            model.get_parameter(name).data.mul_(mask)
        run.saw(model, optimizer, loss=loss.item(), zeros=[int((p == 0).sum()) for p in model.parameters()])


@form("several tasks' gradients, projected", "PCGrad")
def projected_gradients(run: Run) -> None:
    model = nn.ModuleDict({"body": mlp(out=8), "one": nn.Linear(8, 4), "two": nn.Linear(8, 4)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    shared = list(model["body"].parameters())
    for x, y in rows():
        features = model["body"](x)
        losses = [F.cross_entropy(model["one"](features), y), F.mse_loss(model["two"](features), x[:, :4])]
        one, two = (
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, shared, retain_graph=True)]) for loss in losses
        )
        optimizer.zero_grad()
        (losses[0] + losses[1]).backward()
        agreement = torch.dot(one, two)
        if agreement < 0:
            one, two = one - agreement / two.dot(two) * two, two - agreement / one.dot(one) * one
        for p, g in zip(shared, (one + two).split([p.numel() for p in shared]), strict=True):
            p.grad = g.view_as(p).clone()
        optimizer.step()
        run.saw(model, optimizer, losses=losses, agreement=agreement)
