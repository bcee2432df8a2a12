"""Preferences and rewards for language models, as TRL trains them; T5 and BERT with transformers' optimizers."""

import copy

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import get_linear_schedule_with_warmup
from transformers.optimization import Adafactor, AdafactorSchedule

from tests.loops.form import Run, form
from tests.loops.parts import Text, next_token_loss, tokens


def chances(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token after the first, given those before."""
    return model(text[:, :-1]).log_softmax(-1).gather(2, text[:, 1:, None]).squeeze(2)


@form("DPO", "TRL")
def dpo(run: Run) -> None:
    model = Text()
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    run.attach(model, optimizer)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 6)
    for good, bad in tokens():
        both = torch.cat([good, bad])
        with torch.no_grad():
            old = chances(reference, both).sum(1)
        rewards = 0.1 * (chances(model, both).sum(1) - old)
        margin = rewards[:4] - rewards[4:]
        loss = -F.logsigmoid(margin).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.saw(model, optimizer, loss=loss.item(), margin=margin, norm=norm, lr=schedule.get_last_lr())


@form("DPO, adapters off for reference", "TRL with PEFT")
def dpo_without_reference(run: Run) -> None:
    model = Text().requires_grad_(False)
    adapter = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False))
    model.add_module("adapter", adapter)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    run.attach(model, optimizer)

    def log_chance(text: torch.Tensor, adapted: bool) -> torch.Tensor:
        h = model.features(text[:, :-1])
        h = h + adapter(h) if adapted else h
        return model.head(h).log_softmax(-1).gather(2, text[:, 1:, None]).sum((1, 2))

    for good, bad in tokens():
        both = torch.cat([good, bad])
        with torch.no_grad():
            old = log_chance(both, adapted=False)
        rewards = 0.1 * (log_chance(both, adapted=True) - old)
        loss = -F.logsigmoid(rewards[:4] - rewards[4:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item(), rewards=rewards)


@form("PPO for text", "TRL")
def ppo_for_text(run: Run) -> None:
    model = Text()
    value_head = nn.Linear(16, 1)
    both = nn.ModuleDict({"model": model, "value_head": value_head})
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(both.parameters(), lr=5e-3)
    run.attach(both, optimizer)
    for prompt, _ in tokens(3, length=4):
        text = prompt
        with torch.no_grad():
            for _ in range(4):
                text = torch.cat([text, torch.multinomial(model(text)[:, -1].softmax(-1), 1)], 1)
            old = chances(model, text)[:, 3:]
            kl = old - chances(reference, text)[:, 3:]
            rewards = -0.1 * kl
            rewards[:, -1] += (text[:, -1] % 2).float()
            returns = rewards.flip(1).cumsum(1).flip(1)
            gain = returns - value_head(model.features(text[:, :-1])).squeeze(2)[:, 3:]
        for _ in range(2):
            new, values = chances(model, text)[:, 3:], value_head(model.features(text[:, :-1])).squeeze(2)[:, 3:]
            ratio = (new - old).exp()
            loss = (
                torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean() + 0.1 * (values - returns).pow(2).mean()
            )
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(both.parameters(), 1.0)
            optimizer.step()
            run.saw(both, optimizer, loss=loss.item(), kl=kl.mean().item(), norm=norm, text=text)


@form("GRPO", "TRL, veRL")
def grpo(run: Run) -> None:
    model, sampler = Text(), Text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    run.attach(model, optimizer)
    for prompt, _ in tokens(size=1, length=4):
        for name, value in model.state_dict().items():
            sampler.state_dict()[name].copy_(value)
        text = prompt.repeat(4, 1)
        with torch.no_grad():
            for _ in range(4):
                text = torch.cat([text, torch.multinomial(sampler(text)[:, -1].softmax(-1), 1)], 1)
        reward = (text[:, 4:] % 3 == 0).float().sum(1)
        gain = (reward - reward.mean()) / (reward.std() + 1e-4)
        for part in torch.arange(4).chunk(2):
            new = chances(model, text[part])[:, 3:]
            loss = -((new - new.detach()).exp() * gain[part, None]).mean() / 2
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        run.saw(model, sampler, optimizer, reward=reward, norm=norm)


@form("reward model", "TRL")
def reward_model(run: Run) -> None:
    body = Text()
    model = nn.ModuleDict({"body": body, "score": nn.Linear(16, 1)})
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if "bias" not in n and "norm" not in n],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if "bias" in n or "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    run.attach(model, optimizer)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 6)
    for good, bad in tokens():
        score = model["score"](body.features(torch.cat([good, bad]))[:, -1]).squeeze(1)
        loss = -F.logsigmoid(score[:4] - score[4:]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        run.saw(model, optimizer, accuracy=(score[:4] > score[4:]).float().mean().item(), lr=schedule.get_last_lr())


@form("Adafactor, `AdafactorSchedule`", "T5")
def adafactor(run: Run) -> None:
    model = Text()
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    run.attach(model, optimizer)
    schedule = AdafactorSchedule(optimizer)
    for x, y in tokens():
        loss = next_token_loss(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.saw(model, optimizer, loss=loss.item(), lr=schedule.get_lr())
