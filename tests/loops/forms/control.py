"""Reinforcement learning in frameworks: policies, critics and targets as objects, as Stable-Baselines3 has them."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F  # noqa: N812

from tests.loops.form import Run, form
from tests.loops.parts import mlp


def polyak(params: Iterable[torch.Tensor], targets: Iterable[torch.Tensor], tau: float) -> None:
    with torch.no_grad():
        for param, target in zip(params, targets, strict=True):
            target.data.mul_(1 - tau)
            torch.add(target.data, param.data, alpha=tau, out=target.data)


def replay(size: int = 8) -> tuple[torch.Tensor, ...]:
    return torch.randn(size, 4), torch.rand(size, 2) * 2 - 1, torch.rand(size, 1), torch.randn(size, 4)


class Policy(nn.Module):
    """Features, an actor and a critic, with an optimizer that belongs to the policy."""

    optimizer: torch.optim.Optimizer

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.features = mlp(4, 8)
        self.value_features = self.features if shared else mlp(4, 8)
        self.actor, self.critic = nn.Linear(8, 2), nn.Linear(8, 1)

    def evaluate(self, x: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen = Categorical(logits=self.actor(self.features(x)))
        return self.critic(self.value_features(x)).flatten(), chosen.log_prob(action), chosen.entropy()


@form("A2C", "Stable-Baselines3")
def a2c(run: Run) -> None:
    policy = Policy(shared=True)
    policy.optimizer = torch.optim.RMSprop(policy.parameters(), lr=7e-3, alpha=0.99, eps=1e-5)
    run.attach(policy, policy.optimizer)
    for step in range(6):
        for group in policy.optimizer.param_groups:
            group["lr"] = 7e-3 * (1 - step / 6)
        policy.train()
        states, actions, returns = torch.randn(8, 4), torch.randint(2, (8,)), torch.rand(8)
        values, chances, entropy = policy.evaluate(states, actions)
        gain = returns - values.detach()
        loss = -(gain * chances).mean() - 0.01 * entropy.mean() + 0.5 * F.mse_loss(returns, values)
        policy.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        policy.optimizer.step()
        policy.eval()
        with torch.no_grad():
            values = policy.evaluate(states, actions)[0]
        run.saw(policy, policy.optimizer, loss=loss.item(), values=values)


@form("PPO", "Stable-Baselines3")
def ppo_policy(run: Run) -> None:
    policy = Policy(shared=False)
    policy.optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2, eps=1e-5)
    run.attach(policy, policy.optimizer)
    for _ in range(2):
        states, actions, returns = torch.randn(8, 4), torch.randint(2, (8,)), torch.rand(8)
        with torch.no_grad():
            old_values, old_chances, _ = policy.evaluate(states, actions)
        going_on, fractions, updates = True, [], 0
        for _ in range(3):
            for part in torch.randperm(8).split(4):
                values, chances, entropy = policy.evaluate(states[part], actions[part])
                gain = returns[part] - old_values[part]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                ratio = torch.exp(chances - old_chances[part])
                loss = -torch.min(gain * ratio, gain * ratio.clamp(0.8, 1.2)).mean() - 0.01 * entropy.mean()
                loss = loss + 0.5 * F.mse_loss(returns[part], values)
                fractions.append((abs(ratio - 1) > 0.2).float().mean().item())
                with torch.no_grad():
                    kl = float(((ratio - 1) - (chances - old_chances[part])).mean())
                if kl > 0.1:
                    going_on = False
                    break
                policy.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                policy.optimizer.step()
                updates += 1
                run.saw(policy, policy.optimizer, kl=kl, fractions=fractions)
            if not going_on:
                break
        run.saw(policy, policy.optimizer, updates=updates)


@form("DQN", "Stable-Baselines3")
def dqn_policy(run: Run) -> None:
    net, target = mlp(4, 3), mlp(4, 3)
    target.load_state_dict(net.state_dict())
    target.train(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    run.attach(net, optimizer)
    for step in range(6):
        net.train(True)
        states, _, rewards, after = replay()
        with torch.no_grad():
            goal = rewards + 0.9 * target(after).max(dim=1).values.reshape(-1, 1)
        current = torch.gather(net(states), dim=1, index=torch.randint(3, (8, 1)))
        loss = F.smooth_l1_loss(current, goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10)
        optimizer.step()
        net.train(False)
        if step % 2:
            polyak(net.parameters(), target.parameters(), 1.0)
        run.saw(net, target, optimizer, loss=loss.item())


class Critics(nn.Module):
    """Several critics, made and kept as Stable-Baselines3's ``ContinuousCritic`` has them, with their optimizer."""

    optimizer: torch.optim.Optimizer

    def __init__(self) -> None:
        super().__init__()
        self.q_networks: list[nn.Module] = []
        for number in range(2):
            self.q_networks.append(mlp(6, 1))
            self.add_module(f"qf{number}", self.q_networks[-1])

    def forward(self, x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(net(torch.cat([x, a], dim=1)) for net in self.q_networks)


@form("TD3", "Stable-Baselines3")
def td3_policy(run: Run) -> None:
    actor, critic = nn.Sequential(mlp(4, 2), nn.Tanh()), Critics()
    slow_actor, slow_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    slow_critic.q_networks = [slow_critic.get_submodule(f"qf{number}") for number in range(2)]
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    run.attach(actor, optimizer)
    critic.optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    run.attach(critic, critic.optimizer)
    for step in range(8):
        states, actions, rewards, after = replay()
        with torch.no_grad():
            following = (slow_actor(after) + torch.randn(8, 2).mul(0.2).clamp(-0.5, 0.5)).clamp(-1, 1)
            goal = rewards + 0.9 * torch.cat(slow_critic(after, following), dim=1).min(dim=1, keepdim=True).values
        critic_loss: Any = sum(F.mse_loss(current, goal) for current in critic(states, actions))
        critic.optimizer.zero_grad()
        critic_loss.backward()
        critic.optimizer.step()
        actor_loss = torch.zeros(())
        if step % 2 == 0:
            actor_loss = -critic.q_networks[0](torch.cat([states, actor(states)], dim=1)).mean()
            optimizer.zero_grad()
            actor_loss.backward()
            optimizer.step()
            polyak(critic.parameters(), slow_critic.parameters(), 0.1)
            polyak(actor.parameters(), slow_actor.parameters(), 0.1)
        run.saw(actor, critic, slow_actor, slow_critic, optimizer, critic.optimizer, losses=[critic_loss, actor_loss])


def squashed(actor: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean, log_std = actor(x).chunk(2, dim=1)
    drawn = Normal(mean, log_std.clamp(-3, 1).exp())
    action = drawn.rsample()
    return action.tanh(), (drawn.log_prob(action) - torch.log(1 - action.tanh() ** 2 + 1e-6)).sum(1, keepdim=True)


@form("SAC", "Stable-Baselines3")
def sac_policy(run: Run) -> None:
    actor, critic = mlp(4, 4), Critics()
    slow = Critics()
    slow.load_state_dict(critic.state_dict())
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    run.attach(actor, optimizer)
    critic.optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    run.attach(critic, critic.optimizer)
    log_coefficient = torch.zeros(1).requires_grad_(True)
    of_coefficient = torch.optim.Adam([log_coefficient], lr=1e-2)  # one number, and no module
    for _ in range(6):
        states, actions, rewards, after = replay()
        chosen, chance = squashed(actor, states)
        coefficient = torch.exp(log_coefficient.detach())
        of_coefficient.zero_grad()
        (-(log_coefficient * (chance - 2).detach()).mean()).backward()
        of_coefficient.step()
        with torch.no_grad():
            following, later = squashed(actor, after)
            least = torch.cat(slow(after, following), dim=1).min(dim=1, keepdim=True).values
            goal = rewards + 0.9 * (least - coefficient * later)
        critic_loss: Any = 0.5 * sum(F.mse_loss(current, goal) for current in critic(states, actions))
        critic.optimizer.zero_grad()
        critic_loss.backward()
        critic.optimizer.step()
        least = torch.cat(critic(states, chosen), dim=1).min(dim=1, keepdim=True).values
        loss = (coefficient * chance - least).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        polyak(critic.parameters(), slow.parameters(), 0.1)
        run.saw(actor, critic, slow, optimizer, critic.optimizer, loss=loss.item(), coefficient=coefficient)


@form("SAC, critics frozen for the actor", "Spinning Up")
def frozen_critics(run: Run) -> None:
    agent = nn.ModuleDict({"pi": mlp(4, 4), "q1": mlp(6, 1), "q2": mlp(6, 1)})
    target = copy.deepcopy(agent).requires_grad_(False)
    q_params = [*agent["q1"].parameters(), *agent["q2"].parameters()]
    pi_optimizer, q_optimizer = torch.optim.Adam(agent["pi"].parameters(), 1e-2), torch.optim.Adam(q_params, 1e-2)
    run.attach(agent, [pi_optimizer, q_optimizer])
    for _ in range(6):
        states, actions, rewards, after = replay()
        q_optimizer.zero_grad()
        with torch.no_grad():
            both = torch.cat([after, squashed(agent["pi"], after)[0]], 1)
            goal = rewards + 0.9 * torch.min(target["q1"](both), target["q2"](both))
        both = torch.cat([states, actions], 1)
        q_loss = ((agent["q1"](both) - goal) ** 2).mean() + ((agent["q2"](both) - goal) ** 2).mean()
        q_loss.backward()
        q_optimizer.step()
        for p in q_params:
            p.requires_grad = False
        pi_optimizer.zero_grad()
        action, chance = squashed(agent["pi"], states)
        both = torch.cat([states, action], 1)
        pi_loss = (0.2 * chance - torch.min(agent["q1"](both), agent["q2"](both))).mean()
        pi_loss.backward()
        pi_optimizer.step()
        for p in q_params:
            p.requires_grad = True
        polyak(agent.parameters(), target.parameters(), 0.05)
        run.saw(agent, target, pi_optimizer, q_optimizer, losses=[q_loss, pi_loss])


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    before = [(p, p.requires_grad) for module in modules for p in module.parameters()]
    for p, _ in before:
        p.requires_grad = False
    try:
        yield
    finally:
        for p, flag in before:
            p.requires_grad = flag


@form("world model, actor and critic in turn", "Dreamer")
def dreamer(run: Run) -> None:
    world = nn.ModuleDict({"enc": mlp(4, 8), "cell": nn.GRUCell(2, 8), "reward": nn.Linear(8, 1), "dec": mlp(8, 4)})
    actor, critic = mlp(8, 2), mlp(8, 1)
    optimizers = []
    for model, rate in ((world, 1e-2), (actor, 3e-3), (critic, 3e-3)):
        optimizers.append(torch.optim.Adam(model.parameters(), lr=rate))
        run.attach(model, optimizers[-1])
    for _ in range(6):
        states, actions, rewards, after = replay()
        h = world["cell"](actions, world["enc"](states))
        model_loss = F.mse_loss(world["dec"](h), after) + F.mse_loss(world["reward"](h), rewards)
        optimizers[0].zero_grad()
        model_loss.backward()
        norms = [nn.utils.clip_grad_norm_(world.parameters(), 100.0)]
        optimizers[0].step()
        with frozen(world, critic):
            h, gain, dreamed = h.detach(), torch.zeros(8, 1), []
            for _ in range(3):
                h = world["cell"](actor(h).tanh(), h)
                dreamed.append(h)
                gain = gain + world["reward"](h)
            actor_loss = -(gain + critic(h)).mean()
        optimizers[1].zero_grad()
        actor_loss.backward()
        norms.append(nn.utils.clip_grad_norm_(actor.parameters(), 100.0))
        optimizers[1].step()
        critic_loss = F.mse_loss(critic(torch.stack(dreamed).detach()), gain.detach().expand(3, 8, 1))
        optimizers[2].zero_grad()
        critic_loss.backward()
        norms.append(nn.utils.clip_grad_norm_(critic.parameters(), 100.0))
        optimizers[2].step()
        run.saw(world, actor, critic, *optimizers, norms=norms, losses=[model_loss, actor_loss, critic_loss])


@form("evolution strategies: no backward", "ES")
def evolution(run: Run) -> None:
    model = mlp(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model, optimizer)
    x = torch.randn(8, 4)
    for _ in range(6):
        total = [torch.zeros_like(p) for p in model.parameters()]
        fits = []
        for _ in range(4):
            noise = [torch.randn_like(p) for p in model.parameters()]
            with torch.no_grad():
                for p, n in zip(model.parameters(), noise, strict=True):
                    p.add_(n, alpha=0.1)
                fits.append(-(model(x) - x[:, :2]).pow(2).mean().item())
                for p, n in zip(model.parameters(), noise, strict=True):
                    p.sub_(n, alpha=0.1)
            for t, n in zip(total, noise, strict=True):
                t.add_(n, alpha=fits[-1])
        for p, t in zip(model.parameters(), total, strict=True):
            p.grad = -t / 4
        optimizer.step()
        run.saw(model, optimizer, fits=fits)
