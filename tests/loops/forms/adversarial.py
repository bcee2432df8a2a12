"""Generators against discriminators, and inputs against classifiers."""

import copy
import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import spectral_norm

from tests.loops.form import Run, form
from tests.loops.parts import ConvNet, images, mlp, rows


def pair(run: Run, rate: float = 1e-2) -> tuple[Any, Any, Any, Any]:
    """A generator of vectors of 12 numbers from 4, a discriminator, and an optimizer of each; attached."""
    generator, discriminator = mlp(4, 12), mlp(12, 1)
    of_g = torch.optim.Adam(generator.parameters(), lr=rate, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(discriminator.parameters(), lr=rate, betas=(0.5, 0.999))
    run.attach(generator, of_g)
    run.attach(discriminator, of_d)
    return generator, discriminator, of_g, of_d


@form("DCGAN", "pytorch/examples")
def dcgan(run: Run) -> None:
    generator, discriminator, of_g, of_d = pair(run)
    fixed, bce = torch.randn(3, 4), F.binary_cross_entropy_with_logits
    for x, _ in rows():
        discriminator.zero_grad()
        real = bce(discriminator(x).flatten(), torch.ones(8))
        real.backward()
        fake = generator(torch.randn(8, 4))
        made = bce(discriminator(fake.detach()).flatten(), torch.zeros(8))
        made.backward()
        of_d.step()
        generator.zero_grad()
        output = discriminator(fake).flatten()
        loss = bce(output, torch.ones(8))
        loss.backward()
        of_g.step()
        sample = generator(fixed).detach()
        run.saw(generator, discriminator, of_g, of_d, losses=[real.item(), made.item(), loss.item()], sample=sample)


@form("weights clamped after each step", "WGAN")
def wgan(run: Run) -> None:
    generator, critic = mlp(4, 12), mlp(12, 1)
    of_g = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    of_c = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    run.attach(generator, of_g)
    run.attach(critic, of_c)
    for i, (x, _) in enumerate(rows()):
        of_c.zero_grad()
        gap = critic(generator(torch.randn(8, 4)).detach()).mean() - critic(x).mean()
        gap.backward()
        of_c.step()
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        if i % 3 == 2:
            of_g.zero_grad()
            loss = -critic(generator(torch.randn(8, 4))).mean()
            loss.backward()
            of_g.step()
        run.saw(generator, critic, of_g, of_c, gap=gap.item())


@form("gradient penalty by `create_graph`", "WGAN-GP")
def wgan_gp(run: Run) -> None:
    generator, critic, of_g, of_c = pair(run)
    for x, _ in rows():
        fake = generator(torch.randn(8, 4)).detach()
        mix = torch.rand(8, 1)
        between = (mix * x + (1 - mix) * fake).requires_grad_(True)
        [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        of_c.zero_grad()
        gap = critic(fake).mean() - critic(x).mean()
        (gap + 10 * penalty).backward()
        of_c.step()
        of_g.zero_grad()
        loss = -critic(generator(torch.randn(8, 4))).mean()
        loss.backward()
        of_g.step()
        run.saw(generator, critic, of_g, of_c, penalty=penalty.item(), loss=loss.item())


@form("two generators in one optimizer", "CycleGAN")
def cyclegan(run: Run) -> None:
    there, back, judge_a, judge_b = mlp(12, 12), mlp(12, 12), mlp(12, 1), mlp(12, 1)
    of_g = torch.optim.Adam(itertools.chain(there.parameters(), back.parameters()), lr=1e-2)
    of_d = torch.optim.Adam(itertools.chain(judge_a.parameters(), judge_b.parameters()), lr=1e-2)
    run.attach(nn.ModuleList([there, back]), of_g)  # one optimizer spans two modules, which attach() takes as one
    run.attach(nn.ModuleList([judge_a, judge_b]), of_d)
    for a, _ in rows():
        b = a.flip(1)
        nn.ModuleList([judge_a, judge_b]).requires_grad_(False)
        of_g.zero_grad()
        fake_b, fake_a = there(a), back(b)
        loss = (1 - judge_b(fake_b)).pow(2).mean() + (1 - judge_a(fake_a)).pow(2).mean()
        loss = loss + F.l1_loss(back(fake_b), a) + F.l1_loss(there(fake_a), b) + F.l1_loss(there(b), b)
        loss.backward()
        of_g.step()
        nn.ModuleList([judge_a, judge_b]).requires_grad_(True)
        of_d.zero_grad()
        losses = []
        for judge, real, fake in ((judge_a, a, fake_a), (judge_b, b, fake_b)):
            losses.append(0.5 * ((1 - judge(real)).pow(2).mean() + judge(fake.detach()).pow(2).mean()))
            losses[-1].backward()
        of_d.step()
        run.saw(there, back, judge_a, judge_b, of_g, of_d, loss=loss.item(), losses=losses)


@form("R1 every few steps, EMA", "StyleGAN2")
def stylegan(run: Run) -> None:
    generator, discriminator, of_g, of_d = pair(run)
    ema = copy.deepcopy(generator).eval().requires_grad_(False)
    for i, (x, _) in enumerate(rows()):
        generator.requires_grad_(True)
        discriminator.requires_grad_(False)
        of_g.zero_grad(set_to_none=True)
        loss = F.softplus(-discriminator(generator(torch.randn(8, 4)))).mean()
        loss.backward()
        for p in generator.parameters():
            torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
        of_g.step()
        generator.requires_grad_(False)
        discriminator.requires_grad_(True)
        of_d.zero_grad(set_to_none=True)
        F.softplus(discriminator(generator(torch.randn(8, 4)))).mean().backward()
        F.softplus(-discriminator(x)).mean().backward()
        of_d.step()
        if i % 3 == 0:
            of_d.zero_grad(set_to_none=True)
            x = x.detach().requires_grad_(True)
            [slope] = torch.autograd.grad([discriminator(x).sum()], [x], create_graph=True)
            (slope.square().sum(1).mean() * 5).backward()
            of_d.step()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), generator.parameters(), strict=True):
                slow.copy_(fast.lerp(slow, 0.9))
        run.saw(generator, discriminator, ema, of_g, of_d, loss=loss.item(), sample=ema(torch.ones(1, 4)))


@form("spectral normalization, orthogonal regularization", "BigGAN")
def biggan(run: Run) -> None:
    generator = mlp(4, 12)
    discriminator = nn.Sequential(spectral_norm(nn.Linear(12, 16)), nn.ReLU(), spectral_norm(nn.Linear(16, 1)))
    of_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.0, 0.999), eps=1e-6)
    of_d = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.0, 0.999), eps=1e-6)
    run.attach(generator, of_g)
    run.attach(discriminator, of_d)
    for x, _ in rows():
        for _ in range(2):
            of_d.zero_grad()
            for half in x.chunk(2):
                fake = generator(torch.randn(4, 4)).detach()
                loss = (F.relu(1 - discriminator(half)).mean() + F.relu(1 + discriminator(fake)).mean()) / 2
                loss.backward()
            of_d.step()
        of_g.zero_grad()
        (-discriminator(generator(torch.randn(8, 4))).mean()).backward()
        with torch.no_grad():
            for p in generator.parameters():
                if p.ndim == 2:
                    w = p.view(p.shape[0], -1)
                    grad = 2 * torch.mm(torch.mm(w, w.t()) * (1.0 - torch.eye(len(w))), w)
                    assert p.grad is not None
                    p.grad.data += 1e-2 * grad.view(p.shape)
        of_g.step()
        run.saw(generator, discriminator, of_g, of_d, loss=loss.item())


@form("weight of a loss by last layer's gradients", "VQGAN")
def vqgan(run: Run) -> None:
    model, discriminator = nn.Sequential(mlp(12, 6), nn.Linear(6, 12)), mlp(12, 1)
    of_g = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.9))
    of_d = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    run.attach(model, of_g)
    run.attach(discriminator, of_d)
    last: Any = model[1].weight
    for x, _ in rows():
        made = model(x)
        fit, fool = F.mse_loss(made, x), -discriminator(made).mean()
        [of_fit] = torch.autograd.grad(fit, last, retain_graph=True)
        [of_fool] = torch.autograd.grad(fool, last, retain_graph=True)
        weight = (of_fit.norm() / (of_fool.norm() + 1e-4)).clamp(0, 1e4).detach()
        of_g.zero_grad()
        (fit + weight * fool).backward()
        of_g.step()
        of_d.zero_grad()
        loss = 0.5 * (F.relu(1 - discriminator(x)).mean() + F.relu(1 + discriminator(made.detach())).mean())
        loss.backward()
        of_d.step()
        run.saw(model, discriminator, of_g, of_d, weight=weight, loss=loss.item(), size=last.norm().item())


@form("PGD on the input", "robustness libraries")
def adversarial_training(run: Run) -> None:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.attach(model, optimizer)
    for x, y in images():
        model.eval()
        delta = torch.zeros_like(x).uniform_(-0.1, 0.1).requires_grad_(True)
        for _ in range(2):
            F.cross_entropy(model(x + delta), y).backward()
            assert delta.grad is not None
            delta.data = (delta + 0.05 * delta.grad.detach().sign()).clamp(-0.1, 0.1)
            delta.grad.zero_()
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x + delta.detach()), y)
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item(), delta=delta)


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is negative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return -ctx.weight * grads[0], None


@form("gradients reversed", "DANN")
def gradient_reversal(run: Run) -> None:
    model = nn.ModuleDict({"body": mlp(out=8), "classes": nn.Linear(8, 4), "domain": nn.Linear(8, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    for i, (x, y) in enumerate(rows()):
        source, target = model["body"](x), model["body"](2 * x + 1)
        both = Reversed.apply(torch.cat([source, target]), i / 6)
        loss = F.cross_entropy(model["classes"](source), y)
        loss = loss + F.cross_entropy(model["domain"](both), torch.arange(2).repeat_interleave(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())
