"""Inner loops, many models, and optimizers that are not torch's."""

import copy
import types
from typing import Any

import torch
from pytorch_optimizer import Lamb, Prodigy
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from tests.loops.form import Run, form
from tests.loops.parts import ConvNet, fit, images, mlp, rows


@form("MAML by `functional_call`", "meta-learning")
def maml(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for x, y in rows():
        total = torch.zeros(())
        for task in range(2):
            fast: dict[str, torch.Tensor] = dict(model.named_parameters())
            for _ in range(2):
                loss = F.cross_entropy(functional_call(model, fast, (x[:4] + task,)), y[:4])
                slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
            total = total + F.cross_entropy(functional_call(model, fast, (x[4:] + task,)), y[4:])
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=total.item())


@form("first-order MAML", "meta-learning")
def first_order_maml(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for x, y in rows():
        optimizer.zero_grad()
        losses = []
        for task in range(2):
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), lr=0.1)
            F.cross_entropy(learner(x[:4] + task), y[:4]).backward()
            inner.step()
            inner.zero_grad()
            losses.append(F.cross_entropy(learner(x[4:] + task), y[4:]))
            losses[-1].backward()
            for p, q in zip(model.parameters(), learner.parameters(), strict=True):
                assert q.grad is not None
                p.grad = q.grad if p.grad is None else p.grad + q.grad
        optimizer.step()
        run.saw(model, optimizer, losses=losses)


@form("Reptile", "meta-learning")
def reptile(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    for task in range(3):
        before = copy.deepcopy(model.state_dict())
        for x, y in rows(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x + task), y).backward()
            optimizer.step()
            run.saw(model, optimizer)
        after = model.state_dict()
        model.load_state_dict({name: before[name] + (after[name] - before[name]) * 0.5 for name in before})
        run.saw(model, optimizer)


@form(
    "federated averaging",
    "clients as copies",
)
def federated(run: Run) -> None:
    server = mlp()
    for turn in range(3):
        states = []
        for client in range(2):
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            run.attach(model, optimizer)
            for x, y in rows(2):
                optimizer.zero_grad()
                F.cross_entropy(model(x + client + turn), y).backward()
                optimizer.step()
                run.saw(model, optimizer)
            states.append(model.state_dict())
        server.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
        run.saw(server)


@form(
    "elastic weight consolidation",
    "continual learning",
)
def consolidation(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    fisher: dict[str, torch.Tensor] = {}
    old: dict[str, torch.Tensor] = {}
    for task in range(2):
        for x, y in rows(3):
            loss = F.cross_entropy(model(x + task), y)
            for name, weight in fisher.items():
                loss = loss + (weight * (model.get_parameter(name) - old[name]) ** 2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.saw(model, optimizer, loss=loss.item())
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        fisher = {name: p.grad.data.clone() ** 2 for name, p in model.named_parameters() if p.grad is not None}
        old = {name: p.data.clone() for name, p in model.named_parameters()}


@form("weights and architecture in turn", "DARTS")
def architecture_search(run: Run) -> None:
    model = nn.ModuleDict({"one": mlp(), "two": nn.Linear(12, 4)})
    choice = nn.Parameter(1e-3 * torch.randn(2))
    model.register_parameter("choice", choice)
    weights = [p for name, p in model.named_parameters() if name != "choice"]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=3e-4)
    architect = torch.optim.Adam([choice], lr=1e-2, betas=(0.5, 0.999))
    run.attach(model, [optimizer, architect])

    def output(x: torch.Tensor) -> torch.Tensor:
        mix = choice.softmax(0)
        return mix[0] * model["one"](x) + mix[1] * model["two"](x)

    for x, y in rows():
        architect.zero_grad()
        F.cross_entropy(output(x[4:]), y[4:]).backward()
        architect.step()
        optimizer.zero_grad()
        loss = F.cross_entropy(output(x[:4]), y[:4])
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 5.0)
        optimizer.step()
        run.saw(model, optimizer, architect, loss=loss.item(), mix=choice.softmax(0))


@form("Lookahead by hand", "tricks")
def lookahead_by_hand(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    slow = [p.detach().clone() for p in model.parameters()]
    for i, (x, y) in enumerate(rows()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if i % 3 == 2:
            for p, s in zip(model.parameters(), slow, strict=True):
                s.add_(p.data - s, alpha=0.5)
                p.data.copy_(s)
        run.saw(model, optimizer, loss=loss.item())


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, as packages write it."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.count = base, 0
        super().__init__(base.param_groups, dict(base.defaults))
        self.param_groups = base.param_groups
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, 0.5)
                p.copy_(slow)


def plain_loop(run: Run, optimizer_of: Any) -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    run.attach(model, optimizer)
    fit(run, model, optimizer)


@form("Lookahead as an optimizer", "timm")
def lookahead(run: Run) -> None:
    plain_loop(run, lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))


@form("LAMB", "timm")
def lamb(run: Run) -> None:
    plain_loop(run, lambda model: Lamb(model.parameters(), lr=1e-2, pre_norm=True))


@form("Prodigy", "sd-scripts")
def prodigy(run: Run) -> None:
    plain_loop(run, lambda model: Prodigy(model.parameters(), lr=1.0))


class Rounded(torch.optim.Optimizer):
    """SGD on bfloat16 weights, rounded up or down at random."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    new = p.float().sub_(p.grad.float(), alpha=group["lr"]).view(torch.int32)
                    new += torch.randint(1 << 16, p.shape, dtype=torch.int32)
                    p.copy_(new.bitwise_and_(-65536).view(torch.float32))


@form("stochastic rounding", "OneTrainer, torchao")
def stochastic_rounding(run: Run) -> None:
    model = mlp().bfloat16()
    optimizer = Rounded(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for x, y in rows():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.bfloat16()), y)
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form(
    "`step` replaced on the object",
    "sd-scripts",
    by_itself=True,
)
def patched_step(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step_param(self: Any, p: torch.Tensor, group: dict[str, Any]) -> None:
        if p.grad is not None:
            state = self.state[p]
            state["count"] = state.get("count", 0) + 1
            p.data.add_(p.grad.sign(), alpha=-group["lr"] / state["count"])

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.step_param(p, group)

    patched: Any = optimizer
    patched.step_param = types.MethodType(step_param, optimizer)
    patched.step = types.MethodType(step, optimizer)
    run.attach(model, optimizer)
    fit(run, model, optimizer)


@form("schedule-free", "schedulefree")
def schedule_free(run: Run) -> None:
    model = mlp()
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=2)
    run.attach(model, optimizer)
    for x, y in rows():
        model.train()
        optimizer.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            validation = F.cross_entropy(model(x), y).item()
        run.saw(model, optimizer, validation=validation)


@form(
    "Adam, then `detach()` and SGD",
    "SWATS",
)
def second_optimizer(run: Run) -> None:
    model = mlp()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for i, (x, y) in enumerate(rows(8)):
        if i == 4:
            run.detach()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            run.attach(model, optimizer)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form(
    "a trace, evaluated after each step",
    "export checks",
    fails="TorchScript reads the weights in C++, and does not wait",
)
def traced(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    script: Any = torch.jit.trace(model, torch.randn(2, 12))
    for x, y in rows():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            output = script(x)
        run.saw(model, optimizer, output=output)


@form("`retain_graph=True`", "RNNs")
def retained(run: Run) -> None:
    model = nn.ModuleDict({"cell": nn.GRUCell(12, 8), "out": nn.Linear(8, 4)})
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    hidden = torch.zeros(8, 8)
    for x, y in rows():
        hidden = model["cell"](x, hidden.detach())
        again = model["cell"](x, hidden)
        optimizer.zero_grad()
        F.cross_entropy(model["out"](hidden), y).backward(retain_graph=True)
        F.cross_entropy(model["out"](again), y).backward()
        optimizer.step()
        run.saw(model, optimizer, hidden=hidden)


@form(
    "curvature by `create_graph`",
    "AdaHessian",
)
def curvature(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    parameters = list(model.parameters())
    for x, y in rows():
        loss = F.cross_entropy(model(x), y)
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        signs = [torch.randint_like(g, 2) * 2 - 1 for g in slopes]
        products = torch.autograd.grad(slopes, parameters, grad_outputs=signs)
        for p, g, z, h in zip(parameters, slopes, signs, products, strict=True):
            p.grad = g.detach() / ((z * h).abs() + 1e-1)
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form("compiled blocks", "torch tutorials")
def compiled_blocks(run: Run) -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Sequential(nn.Linear(12, 12), nn.Tanh()), nn.Linear(12, 4))
    model[1].compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    for x, y in rows():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form(
    "batch normalization alone, `inference_mode`",
    "TENT",
)
def adaptation(run: Run) -> None:
    model = ConvNet().requires_grad_(False)
    norms = [one for one in model.modules() if isinstance(one, nn.BatchNorm2d)]
    for one in norms:
        one.requires_grad_(True)
        one.track_running_stats, one.running_mean, one.running_var = False, None, None
    optimizer = torch.optim.Adam([p for one in norms for p in one.parameters()], lr=1e-2)
    run.attach(model, optimizer)
    for x, _ in images():
        chance = model(x).softmax(1)
        loss = -(chance * chance.log()).sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            output = model(x)
        run.saw(model, optimizer, loss=loss.item(), output=output)


@form("the line again, with another optimizer", "notebooks")
def second_stage(run: Run) -> None:
    model = mlp()
    for stage in range(2):
        chosen: Any = torch.optim.AdamW if stage == 0 else torch.optim.SGD
        optimizer = chosen(model.parameters(), lr=1e-2)
        for cell in range(2):
            run.attach(model, optimizer)
            for x, y in rows(3 + cell):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.saw(model, optimizer, loss=loss.item())


@form("all frozen at first, then thawed", "linear probing")
def thawed(run: Run) -> None:
    body, head = mlp(), nn.Linear(4, 4)
    model = nn.Sequential(body, head)
    body.requires_grad_(False)
    of_body = torch.optim.AdamW(body.parameters(), lr=1e-2)
    of_head = torch.optim.AdamW(head.parameters(), lr=1e-2)
    run.attach(model, [of_head])
    run.attach(body, of_body)
    for i, (x, y) in enumerate(rows(7)):
        if i == 2:
            body.requires_grad_(True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for one in (of_head, of_body):
            one.step()
            one.zero_grad()
        run.saw(model, of_head, of_body, loss=loss.item())
