"""PPO on a fixed rollout: a loop backwards and torch's Adam beside a matrix and an own Adam."""

import copy

import torch
from torch import nn
from torch.distributions import Categorical

from tests.corpora.unseen.weights import shaken

TIME, ENVS, OBS, HIDDEN, ACTIONS, MINIBATCH, EPOCHS = 16, 4, 6, 16, 3, 16, 2
GAMMA, LAMBDA, CLIP, LR, ENTROPY, VALUE, MAX_NORM = 0.95, 0.9, 0.2, 0.02, 0.05, 0.5, 0.3


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(OBS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()
        self.trunk = nn.Sequential(*layers)
        self.actor, self.critic = nn.Linear(HIDDEN, ACTIONS), nn.Linear(HIDDEN, 1)

    def forward(self, obs, action):
        hidden = self.trunk(obs)
        dist = Categorical(logits=self.actor(hidden))
        return dist.log_prob(action), dist.entropy(), self.critic(hidden).squeeze(-1)


def update_reference(agent, rollout, orders):
    agent = copy.deepcopy(agent)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LR, eps=1e-5)
    rewards, values, dones = rollout["rewards"], rollout["values"], rollout["dones"]
    advantages, lastgaelam = torch.zeros_like(rewards), 0.0
    for t in reversed(range(TIME)):
        nextvalues = rollout["last_value"] if t == TIME - 1 else values[t + 1]
        nextnonterminal = 1.0 - dones[t]
        delta = rewards[t] + GAMMA * nextvalues * nextnonterminal - values[t]
        lastgaelam = delta + GAMMA * LAMBDA * nextnonterminal * lastgaelam
        advantages[t] = lastgaelam
    returns = advantages + values
    b_obs, b_actions = rollout["obs"].reshape(-1, OBS), rollout["actions"].reshape(-1)
    b_logprobs, b_values = rollout["logprobs"].reshape(-1), values.reshape(-1)
    b_advantages, b_returns = advantages.reshape(-1), returns.reshape(-1)
    losses = []
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = (1.0 - epoch / EPOCHS) * LR
        for start in range(0, TIME * ENVS, MINIBATCH):
            mb_inds = orders[epoch][start : start + MINIBATCH]
            newlogprob, entropy, newvalue = agent(b_obs[mb_inds], b_actions[mb_inds])
            ratio = (newlogprob - b_logprobs[mb_inds]).exp()
            mb_adv = b_advantages[mb_inds]
            mb_adv = (mb_adv - mb_adv.mean()) / (mb_adv.std() + 1e-8)
            pg_loss1 = -mb_adv * ratio
            pg_loss2 = -mb_adv * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
            pg_loss = torch.max(pg_loss1, pg_loss2).mean()
            v_loss_unclipped = (newvalue - b_returns[mb_inds]) ** 2
            v_clipped = b_values[mb_inds] + (newvalue - b_values[mb_inds]).clamp(-CLIP, CLIP)
            v_loss_clipped = (v_clipped - b_returns[mb_inds]) ** 2
            v_loss = 0.5 * torch.max(v_loss_unclipped, v_loss_clipped).mean()
            loss = pg_loss - ENTROPY * entropy.mean() + v_loss * VALUE
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)
            optimizer.step()
            losses.append(torch.stack([loss, pg_loss, v_loss, entropy.mean(), norm]).detach())
    return advantages, torch.stack(losses), *(p.detach() for p in agent.parameters())


class FusedAgent(nn.Module):
    """One head for the logits and the value."""

    def __init__(self, agent):
        super().__init__()
        self.first, self.second = copy.deepcopy(agent.trunk[0]), copy.deepcopy(agent.trunk[2])
        heads = (agent.actor, agent.critic)
        self.weight = nn.Parameter(torch.cat([h.weight.detach() for h in heads]).T.contiguous())
        self.bias = nn.Parameter(torch.cat([h.bias.detach() for h in heads]))

    def forward(self, observations):
        hidden = torch.tanh(self.second(torch.tanh(self.first(observations))))
        return torch.addmm(self.bias, hidden, self.weight).split([ACTIONS, 1], -1)


def estimate(rollout):
    """Environments first; a matrix (time, later time) sums the discounted errors."""
    rewards, values, dones = (rollout[n].T for n in ("rewards", "values", "dones"))
    following = torch.cat([values[:, 1:], rollout["last_value"][:, None]], 1)
    errors = torch.addcmul(rewards - values, following, 1 - dones, value=GAMMA)
    episode = dones.cumsum(1) - dones
    together = episode[:, :, None] == episode[:, None, :]
    gap = torch.arange(TIME) - torch.arange(TIME)[:, None]
    discount = torch.tensor(GAMMA * LAMBDA).pow(gap).triu()
    return torch.einsum("nts,ns->nt", discount * together, errors)


def update_port(agent, rollout, orders):
    policy = FusedAgent(agent)
    weights = list(policy.parameters())
    firsts, seconds = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    lines, count = [], 0
    gains = estimate(rollout).T.reshape(-1)
    observations, actions = rollout["obs"].flatten(0, 1), rollout["actions"].flatten()
    likelihoods, guesses = rollout["logprobs"].flatten(), rollout["values"].flatten()
    targets = gains + guesses
    for epoch, order in enumerate(orders):
        rate = LR - LR * epoch / EPOCHS
        for chosen in order.split(MINIBATCH):
            logits, value = policy(observations[chosen])
            logs = logits - logits.logsumexp(-1, keepdim=True)
            taken = logs.gather(1, actions[chosen, None]).squeeze(1)
            entropy = -(logs.exp() * logs).sum(-1).mean()
            ratio = torch.exp(taken - likelihoods[chosen])
            gain = gains[chosen] - gains[chosen].mean()
            gain = gain / ((gain.square().sum() / (len(gain) - 1)).sqrt() + 1e-8)
            bounded = torch.where(gain > 0, ratio.clamp(max=1 + CLIP), ratio.clamp(min=1 - CLIP))
            surrogate = -(gain * bounded).mean()
            guess, target = guesses[chosen], targets[chosen]
            near = guess + (value[:, 0] - guess).clamp(-CLIP, CLIP)
            miss = torch.maximum((value[:, 0] - target).abs(), (near - target).abs())
            fit = miss.square().mean() / 2
            loss = surrogate + VALUE * fit - ENTROPY * entropy
            gradients = torch.autograd.grad(loss, weights)
            length = torch.cat([g.flatten() for g in gradients]).norm()
            shrink = min(1.0, MAX_NORM / (length.item() + 1e-6))
            gradients, count = [g * shrink for g in gradients], count + 1
            with torch.no_grad():
                for w, g, m, s in zip(weights, gradients, firsts, seconds, strict=True):
                    m.lerp_(g, 0.1)
                    s.mul_(0.999).addcmul_(g, g, value=0.001)
                    root = (s / (1 - 0.999**count)).sqrt()
                    w.sub_(rate * (m / (1 - 0.9**count)) / (root + 1e-5))
            lines.append(torch.stack([loss, surrogate, fit, entropy, length]).detach())
    weight, bias, *rest = (w.detach() for w in weights)
    heads = [weight[:, :ACTIONS].T, bias[:ACTIONS], weight[:, ACTIONS:].T, bias[ACTIONS:]]
    return gains.view(TIME, ENVS), torch.stack(lines), *rest, *heads


def build():
    agent = shaken(Agent())
    behaviour, rollout = copy.deepcopy(agent), {"obs": torch.randn(TIME, ENVS, OBS)}
    for parameter in behaviour.parameters():
        parameter += 0.1 * torch.randn(parameter.shape)
    rollout["actions"] = torch.randint(0, ACTIONS, (TIME, ENVS))
    logprobs, _, values = behaviour(rollout["obs"], rollout["actions"])
    rollout |= {"logprobs": logprobs, "values": values, "last_value": torch.randn(ENVS)}
    rollout["rewards"] = torch.randn(TIME, ENVS)
    rollout["dones"] = (torch.rand(TIME, ENVS) < 0.2).float()
    orders = [torch.randperm(TIME * ENVS) for _ in range(EPOCHS)]
    agent.requires_grad_(True)
    given = (agent, rollout, orders)
    return lambda: update_reference(*given), lambda: update_port(*given)
