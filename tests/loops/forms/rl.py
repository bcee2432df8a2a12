"""Policy gradients and Q-learning in one file each, as CleanRL and pytorch/examples write them."""

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F  # noqa: N812

from tests.loops.form import Run, form
from tests.loops.parts import mlp


class World:
    """A task of four numbers and two actions: the first number says which action is rewarded."""

    def __init__(self) -> None:
        self.state = torch.randn(4)

    def step(self, action: int) -> tuple[torch.Tensor, float]:
        reward = 1.0 if action == int(self.state[0] > 0) else 0.0
        self.state = 0.5 * self.state + torch.randn(4)
        return self.state, reward


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = mlp(4, 1), mlp(4, 2)

    def act(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        chosen = Categorical(logits=self.actor(x))
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(x).squeeze(-1)


@form("REINFORCE", "pytorch/examples")
def reinforce(run: Run) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.attach(model, optimizer)
    running = 0.0
    for _ in range(6):
        world, chances, rewards = World(), [], []
        for _ in range(5):
            policy = Categorical(logits=model(world.state))
            action = policy.sample()
            chances.append(policy.log_prob(action))
            rewards.append(world.step(int(action))[1])
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        optimizer.zero_grad()
        loss = -(torch.stack(chances) * returns).sum()
        loss.backward()
        optimizer.step()
        running = 0.9 * running + 0.1 * sum(rewards)
        run.saw(model, optimizer, loss=loss.item(), running=running)


@form("actor-critic: two heads", "pytorch/examples")
def actor_critic(run: Run) -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 16), "actor": nn.Linear(16, 2), "value": nn.Linear(16, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    run.attach(model, optimizer)
    for _ in range(6):
        world, losses = World(), []
        for _ in range(4):
            h = model["body"](world.state).relu()
            policy, value = Categorical(logits=model["actor"](h)), model["value"](h)[0]
            action = policy.sample()
            reward = world.step(int(action))[1]
            losses.append(
                -policy.log_prob(action) * (reward - value.item()) + F.smooth_l1_loss(value, torch.tensor(reward))
            )
        optimizer.zero_grad()
        loss = torch.stack(losses).sum()
        loss.backward()
        optimizer.step()
        run.saw(model, optimizer, loss=loss.item())


@form("PPO", "CleanRL")
def ppo(run: Run) -> None:
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    run.attach(agent, optimizer)
    world = World()
    for iteration in range(3):
        optimizer.param_groups[0]["lr"] = (1.0 - iteration / 3) * 2.5e-3
        seen: list[list[torch.Tensor]] = [[], [], [], [], []]
        for _ in range(8):
            state = world.state
            with torch.no_grad():
                action, chance, _, value = agent.act(state)
            _, reward = world.step(int(action))
            for column, one in zip(seen, (state, action, chance, value, torch.tensor(reward)), strict=True):
                column.append(one)
        states, actions, chances, values, rewards = map(torch.stack, seen)
        with torch.no_grad():
            returns = rewards + 0.9 * torch.cat([values[1:], agent.act(world.state)[3][None]])
        advantages = returns - values
        for _ in range(2):
            order = torch.randperm(8)
            for part in order.split(4):
                _, new, entropy, value = agent.act(states[part], actions[part])
                ratio = (new - chances[part]).exp()
                with torch.no_grad():
                    kl = ((ratio - 1) - (new - chances[part])).mean()
                gain = advantages[part]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean() - 0.01 * entropy.mean()
                loss = loss + 0.5 * 0.5 * (value - returns[part]).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                run.saw(agent, optimizer, loss=loss.item(), norm=norm, kl=kl.item())
            if kl > 0.05:
                break
        run.saw(agent, optimizer, variance=(1 - (returns - values).var() / returns.var()).item())


@form("recurrent PPO", "CleanRL")
def recurrent_ppo(run: Run) -> None:
    agent = nn.ModuleDict({"lstm": nn.LSTM(4, 8), "actor": nn.Linear(8, 2), "critic": nn.Linear(8, 1)})
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    run.attach(agent, optimizer)
    world = World()
    hidden = torch.zeros(1, 1, 8), torch.zeros(1, 1, 8)
    for _ in range(6):
        start = hidden[0].clone(), hidden[1].clone()
        states, actions, rewards = [], [], []
        for _ in range(4):
            states.append(world.state)
            with torch.no_grad():
                h, hidden = agent["lstm"](world.state[None, None], hidden)
                actions.append(Categorical(logits=agent["actor"](h[0, 0])).sample())
            rewards.append(world.step(int(actions[-1]))[1])
        h, _ = agent["lstm"](torch.stack(states)[:, None], start)
        policy = Categorical(logits=agent["actor"](h[:, 0]))
        value = agent["critic"](h[:, 0]).squeeze(1)
        gain = torch.tensor(rewards) - value.detach()
        loss = (F.mse_loss(value, torch.tensor(rewards)) - policy.log_prob(torch.stack(actions)) * gain).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        run.saw(agent, optimizer, loss=loss.item(), hidden=hidden)


def replay(size: int = 8) -> tuple[torch.Tensor, ...]:
    """A batch of a buffer: states, actions, rewards, next states."""
    return torch.randn(size, 4), torch.rand(size, 2) * 2 - 1, torch.rand(size), torch.randn(size, 4)


@form("DQN", "CleanRL")
def dqn(run: Run) -> None:
    net, target = mlp(4, 2), mlp(4, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    run.attach(net, optimizer)
    target.load_state_dict(net.state_dict())
    world = World()
    for step in range(8):
        action = int(net(world.state).argmax()) if torch.rand(()) > 0.3 else int(torch.randint(2, ()))
        world.step(action)
        states, actions, rewards, after = replay()
        with torch.no_grad():
            goal = rewards + 0.99 * target(after).max(1).values
        old = net(states).gather(1, (actions[:, :1] > 0).long()).squeeze()
        loss = F.mse_loss(goal, old)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                slow.data.copy_(0.1 * fast.data + 0.9 * slow.data)
        run.saw(net, target, optimizer, loss=loss.item(), values=old.mean().item(), action=action)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 1)

    def forward(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([x, a], 1)).squeeze(1)


@form("DDPG", "CleanRL")
def ddpg(run: Run) -> None:
    actor, critic = mlp(4, 2), Critic()
    slow_actor, slow_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    q_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    run.attach(critic, q_optimizer)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    run.attach(actor, optimizer)
    for _ in range(6):
        states, actions, rewards, after = replay()
        with torch.no_grad():
            goal = rewards + 0.9 * slow_critic(after, slow_actor(after).tanh())
        q_loss = F.mse_loss(critic(states, actions), goal)
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()
        loss = -critic(states, actor(states).tanh()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for fast, slow in ((actor, slow_actor), (critic, slow_critic)):
            for p, q in zip(fast.parameters(), slow.parameters(), strict=True):
                q.data.copy_(0.1 * p.data + 0.9 * q.data)
        run.saw(actor, critic, slow_actor, slow_critic, optimizer, q_optimizer, losses=[q_loss, loss])


@form("TD3", "CleanRL")
def td3(run: Run) -> None:
    actor, qf1, qf2 = mlp(4, 2), Critic(), Critic()
    slow = copy.deepcopy(nn.ModuleList([actor, qf1, qf2]))
    q_optimizer = torch.optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=1e-2)
    run.attach(nn.ModuleList([qf1, qf2]), q_optimizer)  # one optimizer spans two modules, which attach() takes as one
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    run.attach(actor, optimizer)
    for step in range(8):
        states, actions, rewards, after = replay()
        with torch.no_grad():
            noise = (torch.randn(8, 2) * 0.2).clamp(-0.5, 0.5)
            following = (slow[0](after).tanh() + noise).clamp(-1, 1)
            goal = rewards + 0.9 * torch.min(slow[1](after, following), slow[2](after, following))
        q_loss = F.mse_loss(qf1(states, actions), goal) + F.mse_loss(qf2(states, actions), goal)
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()
        if step % 2 == 0:
            loss = -qf1(states, actor(states).tanh()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for p, q in zip(nn.ModuleList([actor, qf1, qf2]).parameters(), slow.parameters(), strict=True):
                q.data.copy_(0.1 * p.data + 0.9 * q.data)
        run.saw(actor, qf1, qf2, slow, optimizer, q_optimizer, losses=[q_loss, loss])


@form("SAC", "CleanRL")
def sac(run: Run) -> None:
    actor, qf1, qf2 = mlp(4, 4), Critic(), Critic()
    slow1, slow2 = copy.deepcopy(qf1), copy.deepcopy(qf2)
    q_optimizer = torch.optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=1e-2)
    run.attach(nn.ModuleList([qf1, qf2]), q_optimizer)  # one optimizer spans two modules, which attach() takes as one
    optimizer = torch.optim.Adam(list(actor.parameters()), lr=1e-2)
    run.attach(actor, optimizer)
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha = log_alpha.exp().item()
    a_optimizer = torch.optim.Adam([log_alpha], lr=1e-2)  # one number, and no module: there is nothing to attach

    def act(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = actor(x).chunk(2, dim=1)
        drawn = Normal(mean, log_std.tanh().exp()).rsample()
        chance = Normal(mean, log_std.tanh().exp()).log_prob(drawn) - torch.log(1 - drawn.tanh().pow(2) + 1e-6)
        return drawn.tanh(), chance.sum(1)

    for step in range(6):
        states, actions, rewards, after = replay()
        with torch.no_grad():
            following, chance = act(after)
            goal = rewards + 0.9 * (torch.min(slow1(after, following), slow2(after, following)) - alpha * chance)
        q_loss = F.mse_loss(qf1(states, actions), goal) + F.mse_loss(qf2(states, actions), goal)
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()
        if step % 2 == 0:
            for _ in range(2):
                chosen, chance = act(states)
                loss = (alpha * chance - torch.min(qf1(states, chosen), qf2(states, chosen))).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    _, chance = act(states)
                a_loss = (-log_alpha.exp() * (chance - 2)).mean()
                a_optimizer.zero_grad()
                a_loss.backward()
                a_optimizer.step()
                alpha = log_alpha.exp().item()
        for fast, slow in ((qf1, slow1), (qf2, slow2)):
            for p, q in zip(fast.parameters(), slow.parameters(), strict=True):
                q.data.copy_(0.1 * p.data + 0.9 * q.data)
        run.saw(actor, qf1, qf2, slow1, slow2, optimizer, q_optimizer, losses=[q_loss, loss], alpha=alpha)


@form("random network distillation", "CleanRL")
def random_network_distillation(run: Run) -> None:
    agent = ActorCritic()
    rnd = nn.ModuleDict({"predictor": mlp(4, 6), "target": mlp(4, 6).requires_grad_(False)})
    combined = list(agent.parameters()) + list(rnd["predictor"].parameters())
    optimizer = torch.optim.Adam(combined, lr=1e-2, eps=1e-5)
    run.attach(nn.ModuleList([agent, rnd]), optimizer)  # one optimizer spans two modules, which attach() takes as one
    for _ in range(6):
        states = torch.randn(8, 4)
        gap = F.mse_loss(rnd["predictor"](states), rnd["target"](states).detach(), reduction="none").mean(1)
        _, chance, entropy, value = agent.act(states)
        loss = (gap * (torch.rand(8) < 0.5).float()).mean() - (chance * gap.detach()).mean() - 0.01 * entropy.mean()
        loss = loss + F.mse_loss(value, gap.detach())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(combined, 0.5)
        optimizer.step()
        run.saw(agent, rnd, optimizer, loss=loss.item())


@form("asynchronous actor-critic", "A3C")
def shared_model(run: Run) -> None:
    shared, local = ActorCritic(), ActorCritic()
    optimizer = torch.optim.Adam(shared.parameters(), lr=1e-2)
    run.attach(shared, optimizer)
    for _ in range(6):
        local.load_state_dict(shared.state_dict())
        _, chance, entropy, value = local.act(torch.randn(8, 4))
        loss = (value.pow(2) - chance * (1 - value.detach()) - 0.01 * entropy).mean()
        local.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(local.parameters(), 0.5)
        for mine, theirs in zip(local.parameters(), shared.parameters(), strict=True):
            theirs.grad = mine.grad
        optimizer.step()
        file = io.BytesIO()
        torch.save(shared, file)
        run.saw(shared, optimizer, loss=loss.item(), bytes=len(file.getvalue()))


@form("actor by a line search", "TRPO")
def trust_region(run: Run) -> None:
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.critic.parameters(), lr=1e-2)
    run.attach(agent, optimizer)
    flat: Any = nn.utils.parameters_to_vector
    for _ in range(6):
        states = torch.randn(8, 4)
        action, chance, _, value = agent.act(states)
        gain = (action == (states[:, 0] > 0)).float() - value.detach()
        before = flat(agent.actor.parameters()).detach()
        direction = flat(torch.autograd.grad((chance * gain).mean(), list(agent.actor.parameters()))).detach()
        for size in (1.0, 0.5, 0.25):
            nn.utils.vector_to_parameters(before + size * direction, agent.actor.parameters())
            with torch.no_grad():
                kl = (chance.detach() - agent.act(states, action)[1]).mean()
            if kl < 0.01:
                break
        for _ in range(2):
            value_loss = F.mse_loss(agent.act(states)[3], gain)
            optimizer.zero_grad()
            value_loss.backward()
            optimizer.step()
        run.saw(agent, optimizer, kl=kl.item(), value_loss=value_loss.item(), norm=flat(agent.parameters()).norm())
