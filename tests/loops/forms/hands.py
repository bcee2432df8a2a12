"""Loops that take gradients and weights in their own hands."""

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F  # noqa: N812

from tests.loops.form import Run, form
from tests.loops.parts import ConvNet, fit, images, mlp, rows


@form("gradient norms now and then", "trackers")
def norms_now_and_then(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for i, (x, y) in enumerate(rows(7)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        logged = {"loss": loss.item()}
        if i % 3 == 2:
            logged |= {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        run.saw(model, optimizer, **logged)


@form(
    "histograms by hooks and `.numpy()`",
    "TensorBoard, wandb.watch",
)
def histograms(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    seen: dict[str, Any] = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.detach().mean().item()}))
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: seen.update({f"gradient of {name}": torch.histc(g, 5)}))
    for x, y in rows():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            seen[name] = p.detach().cpu().numpy().copy()
            seen[f"ratio of {name}"] = None if p.grad is None else (p.grad.std() / p.data.std()).item()
        run.saw(model, optimizer, **seen)


@form("`zero_grad` never called", "mistakes")
def never_zeroed(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for x, y in rows():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item(), first=next(model.parameters()).grad)


@form("`zero_grad(set_to_none=False)`", "before torch 2.0")
def zeroed_in_place(run: Run) -> None:
    model = nn.ModuleDict({"a": mlp(), "b": mlp()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    run.attach(model, optimizer)
    for i, (x, y) in enumerate(rows()):
        loss = F.cross_entropy(model["a" if i % 3 else "b"](x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        run.saw(model, optimizer, loss=loss.item())


@form(
    "gradients in one flat buffer",
    "apex",
)
def flat_gradients(run: Run) -> None:
    model = mlp()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for x, y in rows():
        flat.zero_()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = flat.norm()
        flat.mul_((0.5 / norm).clamp(max=1.0))
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item(), norm=norm)


def flattened(model: nn.Module) -> torch.Tensor:
    """Put all parameters into one tensor, of which they become views."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return flat


@form(
    "parameters that are views of one tensor",
    "fused RNNs",
)
def flat_parameters(run: Run) -> None:
    model = mlp()
    flat = flattened(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    fit(run, model, optimizer, elements=flat.numel)


@form("the same, averaged after each step", "flat EMA")
def flat_average(run: Run) -> None:
    model = mlp()
    flat = flattened(model)
    average = flat.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    for x, y in rows():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.lerp_(flat, 0.1)
        run.saw(model, optimizer, average=average)


@form("one flat parameter, modules have views", "flat masters")
def flat_master(run: Run) -> None:
    model = mlp()
    master = nn.ParameterList([flattened(model)])
    master[0].grad = torch.zeros_like(master[0])
    at = 0
    for p in model.parameters():
        p.grad = master[0].grad[at : at + p.numel()].view_as(p)
        at += p.numel()
    optimizer = torch.optim.SGD(master, lr=0.1, momentum=0.9)
    run.attach(master, optimizer)
    for x, y in rows():
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.saw(model, master, optimizer, loss=loss.item())


@form("a weight's NumPy view, kept", "notebooks")
def numpy_view(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    view = model.get_parameter("0.weight").detach().numpy()
    fit(run, model, optimizer, size=lambda: float(abs(view).sum()))


@form("a detached weight, kept", "monitors")
def detached_alias(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    watched = model.get_parameter("4.weight").detach()
    fit(run, model, optimizer, spectrum=lambda: torch.linalg.svdvals(watched))


@form("a tensor of state, kept", "monitors")
def state_alias(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    watched: Any = None
    for x, y in rows():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if watched is None:
            watched = optimizer.state[model.get_parameter("0.weight")]["exp_avg_sq"]
        run.saw(model, optimizer, size=watched.sqrt().mean().item())


@form("weights moved up and back", "SAM")
def sharpness_aware(run: Run) -> None:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    for x, y in images():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters() if p.grad is not None]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        run.saw(model, optimizer, loss=loss.item(), norm=norm)


@form("noise on gradients, `.grad` set, hooks that clamp", "tricks")
def changed_gradients(run: Run) -> None:
    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    model = mlp()
    model.get_parameter("2.weight").register_post_accumulate_grad_hook(halve)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    model.get_parameter("0.weight").register_hook(lambda g: g.clamp(-0.01, 0.01))
    for i, (x, y) in enumerate(rows()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad += torch.randn_like(p.grad) * 0.01 / (1 + i) ** 0.55
            if p.ndim > 1:
                p.grad = p.grad - p.grad.mean(1, keepdim=True)
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form("gradients of each sample by `vmap`", "DP-SGD")
def private(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)

    def loss_of(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    for x, y in rows():
        params = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss_of), (None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.named_parameters():
            total = torch.einsum("n,n...->...", factors, each[name])
            p.grad = (total + 0.1 * torch.randn_like(total)) / len(x)
        optimizer.step()
        optimizer.zero_grad()
        run.saw(model, optimizer, norms=norms)


@form("back to a copy after a spike", "pre-training")
def rolled_back(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    parts: tuple[Any, ...] = (model, optimizer, scheduler)
    kept = [copy.deepcopy(one.state_dict()) for one in parts]
    for i, (x, y) in enumerate(rows(8)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x * (30 if i in (3, 6) else 1)), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if i in (3, 6):
            for one, state in zip(parts, kept, strict=True):
                one.load_state_dict(state)
        else:
            kept = [copy.deepcopy(one.state_dict()) for one in parts]
        run.saw(model, optimizer, loss=loss.item(), lr=scheduler.get_last_lr())


@form("steps left out by norm", "speech")
def left_out(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    skipped = 0
    for i, (x, y) in enumerate(rows(8)):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * (math.inf if i == 2 else 50 if i == 5 else 1)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if math.isfinite(norm) and norm < 20:
            optimizer.step()
        else:
            skipped += 1
        run.saw(model, optimizer, norm=norm, skipped=skipped)


@form(
    "search of the rate",
    "fastai",
)
def rate_finder(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    run.attach(model, optimizer)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    found, best = 1e-3, math.inf
    for phase in ("search", "train"):
        for i, (x, y) in enumerate(rows()):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * 4**i if phase == "search" else found
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if phase == "search" and loss.item() < best:
                found, best = optimizer.param_groups[0]["lr"], loss.item()
            run.saw(model, optimizer, loss=loss.item(), found=found)
        if phase == "search":
            model.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])


@form("another model shares a layer", "shared encoders")
def shared_layer(run: Run) -> None:
    model = mlp()
    other = nn.Sequential(model[0], nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for x, y in rows():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            output = other(x)
        run.saw(model, other, optimizer, output=output)


@form(
    "`stack_module_state`, `vmap`",
    "torch.func",
)
def ensemble(run: Run) -> None:
    models = [mlp() for _ in range(3)]
    stacked, buffers = stack_module_state(models)
    parameters = {name: nn.Parameter(p.detach()) for name, p in stacked.items()}
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2)
    run.attach(nn.ParameterList(parameters.values()), optimizer)
    base = copy.deepcopy(models[0]).to("meta")
    for x, y in rows():
        logits = vmap(lambda p, b, x=x: functional_call(base, (p, b), (x,)))(parameters, buffers)
        loss = F.cross_entropy(logits.flatten(0, 1), y.repeat(3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.saw(*parameters.values(), optimizer, loss=loss.item())


@form("parameters of no module", "CLIP")
def loose_parameters(run: Run) -> None:
    model = mlp()
    temperature = nn.Parameter(torch.tensor(0.5))
    spread = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.AdamW([*model.parameters(), temperature, spread], lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    run.attach(model, optimizer)
    for i, (x, y) in enumerate(rows(7)):
        loss = F.cross_entropy(model(x) * temperature.exp() + spread.exp() * 0.1 * torch.ones(4), y)
        if i != 3:
            loss.backward()
        else:
            (temperature.square() + spread.sum()).backward()  # the model takes no part in this step
        torch.nn.utils.clip_grad_norm_([*model.parameters(), temperature, spread], 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.saw(model, optimizer, temperature, spread, loss=loss.item())


@form("latents through a frozen network", "inversion")
def latents(run: Run) -> None:
    network, adapter = mlp().requires_grad_(False), nn.Linear(4, 4)
    latent = torch.zeros(8, 12, requires_grad=True)
    groups: list[dict[str, Any]] = [{"params": adapter.parameters()}, {"params": [latent], "lr": 0.1}]
    optimizer = torch.optim.Adam(groups, lr=1e-2)
    run.attach(nn.Sequential(network, adapter), optimizer)
    for _, y in rows():
        loss = F.cross_entropy(adapter(network(latent)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.saw(adapter, optimizer, latent, loss=loss.item(), norm=latent.norm().item())


def compiled(function: Any) -> Any:
    """In one graph, or an error says that there is none."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@form("compiled penalty and average", "EMA")
def compiled_penalty(run: Run) -> None:
    model, averaged = mlp(), [p.detach().clone() for p in mlp().parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    run.attach(model, optimizer)
    penalty = compiled(lambda w, b: w.square().sum() + b.abs().sum())

    def average(into: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        torch._foreach_lerp_(into, given, 0.1)

    update = torch.compile(average, fullgraph=True, backend="aot_eager")
    first = model[0]
    for x, y in rows(14):
        loss = F.cross_entropy(model(x), y) + 0.01 * penalty(first.weight, first.bias)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            update(averaged, list(model.parameters()))
        run.saw(model, optimizer, loss=loss.item(), averaged=averaged[0].sum().item())


@form("compiled norm of gradients", "trackers")
def compiled_norm(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    run.attach(model, optimizer)
    norm = compiled(lambda gradients: torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    fit(run, model, optimizer, 14, norm=lambda: norm([p.grad for p in model.parameters()]).item())
