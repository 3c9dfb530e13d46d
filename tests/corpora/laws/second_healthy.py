"""A second set of healthy trainings, written without a look at the checks: meta-learning, agents,
adversaries, schedules and constraints that a check may take for a mistake.
"""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parametrizations
from torch.optim import SGD, Adam, AdamW, NAdam, Rprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.corpora.laws.models import (
    CLASSES,
    FEATURES,
    VOCABULARY,
    Cnn,
    Mlp,
    accuracy,
    forever,
    image_loader,
    images,
    point_loader,
    points,
    take_step,
    texts,
)
from tests.corpora.laws.program import breaks, healthy
from tests.corpora.laws.second_models import (
    ACTIONS,
    SIGNALS,
    STATE,
    GraphNet,
    Gru,
    Seq2Seq,
    Vae,
    Vit,
    elbo_loss,
    graphs,
    mlp,
    observations,
    rewards,
    signals,
    translation_loss,
)


def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    """Move the parameters of `slow` towards those of `fast`."""
    with torch.no_grad():
        for average, parameter in zip(slow.parameters(), fast.parameters(), strict=True):
            average.lerp_(parameter, rate)


# ---- meta-learning


def sine_task() -> tuple[Tensor, Tensor]:
    x = 6 * torch.rand(20, 1) - 3
    return x, (0.5 + torch.rand(1)) * torch.sin(x + 3 * torch.rand(1))


@healthy
def maml_with_fast_weights() -> None:
    net = mlp(1, 24, 1, activation=nn.Tanh)
    optimizer = Adam(net.parameters(), 0.005)
    for _ in range(10):
        optimizer.zero_grad()
        for _ in range(3):
            x, y = sine_task()
            fast = dict(net.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(functional_call(net, fast, (x[:10],)), y[:10])
                gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {
                    name: value - 0.05 * gradient
                    for (name, value), gradient in zip(fast.items(), gradients, strict=True)
                }
            (F.mse_loss(functional_call(net, fast, (x[10:],)), y[10:]) / 3).backward()
        optimizer.step()


@healthy
def reptile_with_a_new_inner_optimizer_for_each_task() -> None:
    net = mlp(1, 24, 1, activation=nn.Tanh)
    outer = SGD(net.parameters(), 0.3)
    for _ in range(10):
        x, y = sine_task()
        learner = copy.deepcopy(net)
        inner = SGD(learner.parameters(), 0.05)
        for _ in range(4):
            take_step(inner, F.mse_loss(learner(x), y))
        for parameter, learned in zip(net.parameters(), learner.parameters(), strict=True):
            parameter.grad = parameter.detach() - learned.detach()
        outer.step()


# ---- adversaries


@healthy
def wasserstein_gan_with_gradient_penalty() -> None:
    generator, critic = mlp(4, 16, FEATURES), mlp(FEATURES, 16, 1)
    g_optimizer = Adam(generator.parameters(), 1e-3, betas=(0.0, 0.9))
    d_optimizer = Adam(critic.parameters(), 1e-3, betas=(0.0, 0.9))
    for _ in range(8):
        for _ in range(3):
            real = points()[0]
            with torch.no_grad():
                fake = generator(torch.randn(16, 4))
            mixed = torch.lerp(real, fake, torch.rand(16, 1)).requires_grad_()
            slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
            penalty = (slope.norm(dim=1) - 1).square().mean()
            take_step(d_optimizer, critic(fake).mean() - critic(real).mean() + 10 * penalty)
        take_step(g_optimizer, -critic(generator(torch.randn(16, 4))).mean())


@healthy
def wasserstein_gan_with_clipped_weights() -> None:
    generator, critic = mlp(4, 16, FEATURES), mlp(FEATURES, 16, 1)
    g_optimizer = torch.optim.RMSprop(generator.parameters(), 5e-4)
    d_optimizer = torch.optim.RMSprop(critic.parameters(), 5e-4)
    for step in range(24):
        d_optimizer.zero_grad()
        fake = generator(torch.randn(16, 4)).detach()
        (critic(fake).mean() - critic(points()[0]).mean()).backward()
        d_optimizer.step()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.05, 0.05)
        if step % 3 == 2:
            take_step(g_optimizer, -critic(generator(torch.randn(16, 4))).mean())


@healthy
def hinge_gan_with_spectral_norm_and_a_frozen_critic() -> None:
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12))
    critic = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(FEATURES, 16)), nn.LeakyReLU(0.2),
        parametrizations.spectral_norm(nn.Linear(16, 1)),
    )  # fmt: skip
    g_optimizer, d_optimizer = Adam(generator.parameters(), 1e-3), Adam(critic.parameters(), 2e-3)
    for _ in range(12):
        critic.requires_grad_(True)
        fake = generator(torch.randn(16, 4)).detach()
        d_optimizer.zero_grad()
        loss = F.relu(1 - critic(points()[0])).mean() + F.relu(1 + critic(fake)).mean()
        loss.backward()
        d_optimizer.step()
        critic.requires_grad_(False)
        take_step(g_optimizer, -critic(generator(torch.randn(16, 4))).mean())


@healthy
def adversarial_training_with_attacks_in_eval_mode() -> None:
    net = Cnn(dropout=0.1)
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    for x, y in forever(image_loader(), 10):
        net.eval()
        attacked = x.clone()
        for _ in range(2):
            attacked.requires_grad_()
            slope = torch.autograd.grad(F.cross_entropy(net(attacked), y), attacked)[0]
            attacked = (attacked + 0.05 * slope.sign()).detach()
        net.train()
        take_step(optimizer, F.cross_entropy(net(attacked), y))


# ---- representations without labels


@healthy
def byol_with_a_moving_target() -> None:
    online = nn.Sequential(nn.Linear(FEATURES, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))
    predictor = mlp(8, 16, 8)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = AdamW([*online.parameters(), *predictor.parameters()], 0.005)
    for _ in range(12):
        x, _ = points(32)
        views = [x + 0.2 * torch.randn_like(x) for _ in range(2)]
        with torch.no_grad():
            goals = [target(view) for view in views]
        guesses = [predictor(online(view)) for view in views]
        similar = F.cosine_similarity(guesses[0], goals[1]) + F.cosine_similarity(
            guesses[1], goals[0]
        )
        take_step(optimizer, (2 - similar).mean())
        follow(target, online, 0.05)


@healthy
def simsiam_with_a_stopped_gradient() -> None:
    class SimSiam(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.predictor = mlp(FEATURES, 24, 8), mlp(8, 16, 8)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            z_a, z_b = self.encoder(a), self.encoder(b)
            one_way = F.cosine_similarity(self.predictor(z_a), z_b.detach()).mean()
            return -(one_way + F.cosine_similarity(self.predictor(z_b), z_a.detach()).mean()) / 2

    model = SimSiam()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(12):
        x, _ = points(32)
        take_step(optimizer, model(x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)))


@healthy
def contrastive_with_a_learned_and_bounded_temperature() -> None:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.signal = Vit(depth=1), Gru()
            self.log_scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, image: Tensor, signal: Tensor) -> Tensor:
            a = F.normalize(self.image(image), dim=1)
            b = F.normalize(self.signal(signal), dim=1)
            return self.log_scale.exp() * a @ b.T

    model = Clip()
    optimizer = AdamW(model.parameters(), 0.003)
    for _ in range(12):
        x, y = images(8)
        hint = F.one_hot(y, SIGNALS).float()[:, None]
        scores = model(x, signals(8)[0] + 2 * hint)
        labels = torch.arange(8)
        take_step(
            optimizer, (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
        )
        model.log_scale.data.clamp_(0.0, 4.6)


@healthy
def codes_with_a_straight_through_estimate_and_moving_averages() -> None:
    class Vq(nn.Module):
        codes: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(FEATURES, 16, 4), mlp(4, 16, FEATURES)
            self.register_buffer("codes", torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            z = self.encoder(x)
            nearest = torch.cdist(z, self.codes).argmin(1)
            quantized = self.codes[nearest]
            if self.training:
                with torch.no_grad():
                    chosen = F.one_hot(nearest, 8).float()
                    means = (chosen.T @ z) / chosen.sum(0).clamp(min=1)[:, None]
                    used = chosen.any(0)
                    self.codes[used] = torch.lerp(self.codes, means, 0.1)[used]
            loss = F.mse_loss(self.decoder(z + (quantized - z).detach()), x)
            return loss + 0.25 * F.mse_loss(z, quantized.detach())

    model = Vq()
    optimizer = Adam(model.parameters(), 0.005)
    for _ in range(12):
        take_step(optimizer, model(points(32)[0]))


@healthy
def autoencoder_tied_by_transposition() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(FEATURES, 6)
            self.bias = nn.Parameter(torch.zeros(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.encoder(x).tanh(), self.encoder.weight.T, self.bias)

    net = Tied()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    for x, _ in forever(point_loader(), 12):
        take_step(optimizer, F.mse_loss(net(x), x))


@healthy
def warm_up_of_the_divergence_in_a_vae() -> None:
    net = Vae()
    optimizer = Adam(net.parameters(), 0.005)
    for step in range(20):
        x, _ = points(32)
        take_step(optimizer, elbo_loss(x, net(x), beta=0.1 * min(1, step / 10)))


# ---- agents


@healthy
def q_learning_with_replay_and_a_target_copied_at_times() -> None:
    policy = mlp(STATE, 24, ACTIONS)
    target = copy.deepcopy(policy)
    optimizer, memory = Adam(policy.parameters(), 0.005), deque(maxlen=64)
    for step in range(24):
        states = observations(8)
        with torch.no_grad():
            actions = policy(states).argmax(1)
        if random.random() < 0.5:
            actions = torch.randint(0, ACTIONS, (8,))
        gain, following = rewards(states, actions), observations(8)
        memory.extend(zip(states, actions, gain, following, strict=True))
        if len(memory) < 32:
            continue
        states, actions, gain, following = map(
            torch.stack, zip(*random.sample(memory, 16), strict=True)
        )
        with torch.no_grad():
            goal = gain + 0.5 * target(following).amax(1)
        value = policy(states).gather(1, actions[:, None])[:, 0]
        optimizer.zero_grad()
        F.smooth_l1_loss(value, goal).backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        if step % 6 == 0:
            target.load_state_dict(policy.state_dict())


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATE, 24), nn.Tanh())
        self.policy, self.value = nn.Linear(24, ACTIONS), nn.Linear(24, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(states)
        return self.policy(x), self.value(x)[:, 0]


@healthy
def proximal_policy_with_epochs_over_each_rollout() -> None:
    agent = ActorCritic()
    optimizer = Adam(agent.parameters(), 0.005, eps=1e-5)
    for update in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.005 * (1 - update / 4)
        states = observations(48)
        with torch.no_grad():
            logits, values = agent(states)
            choice = Categorical(logits=logits)
            actions = choice.sample()
            before = choice.log_prob(actions)
        gains = rewards(states, actions)
        for _ in range(3):
            for rows in torch.randperm(48).split(16):
                logits, value = agent(states[rows])
                choice = Categorical(logits=logits)
                advantage = gains[rows] - values[rows]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                ratio = (choice.log_prob(actions[rows]) - before[rows]).exp()
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = F.mse_loss(value, gains[rows]) - surrogate.mean()
                optimizer.zero_grad()
                (loss - 0.01 * 0.5**update * choice.entropy().mean()).backward()
                clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()


@healthy
def actor_and_critic_on_one_trunk_with_two_optimizers() -> None:
    agent = ActorCritic()
    actor = Adam([*agent.trunk.parameters(), *agent.policy.parameters()], 0.005)
    critic = Adam(agent.value.parameters(), 0.01)
    for _ in range(16):
        states = observations()
        features = agent.trunk(states)
        choice = Categorical(logits=agent.policy(features))
        actions = choice.sample()
        gains = rewards(states, actions)
        value = agent.value(features.detach())[:, 0]
        take_step(critic, F.mse_loss(value, gains))
        take_step(actor, (-choice.log_prob(actions) * (gains - value.detach())).mean())


@healthy
def deterministic_policy_through_its_critic() -> None:
    actor, critic = mlp(STATE, 16, 2), mlp(STATE + 2, 24, 1)
    slow_actor, slow_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    a_optimizer, c_optimizer = Adam(actor.parameters(), 1e-3), Adam(critic.parameters(), 3e-3)
    for step in range(20):
        states, following = observations(), observations()
        with torch.no_grad():
            actions = actor(states) + 0.2 * torch.randn(len(states), 2)
            gain = -(actions - states[:, :2]).square().sum(1, keepdim=True)
            goal = gain + 0.5 * slow_critic(torch.cat([following, slow_actor(following)], 1))
        take_step(c_optimizer, F.mse_loss(critic(torch.cat([states, actions], 1)), goal))
        if step % 2:
            take_step(a_optimizer, -critic(torch.cat([states, actor(states)], 1)).mean())
            follow(slow_actor, actor, 0.05)
            follow(slow_critic, critic, 0.05)


@healthy
def self_play_against_the_best_of_before() -> None:
    agent = ActorCritic()
    best = copy.deepcopy(agent)
    optimizer = SGD(agent.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    for _ in range(3):
        best.eval()
        with torch.no_grad():
            states = observations(64)
            search = (best(states)[0] + 4 * F.one_hot(states[:, :ACTIONS].argmax(1), 3)).softmax(1)
            outcome = rewards(states, search.multinomial(1)[:, 0])
        agent.train()
        for rows in torch.randperm(64).split(16):
            logits, value = agent(states[rows])
            optimizer.zero_grad()
            loss = F.cross_entropy(logits, search[rows]) + F.mse_loss(value, outcome[rows])
            loss.backward()
            optimizer.step()
        agent.eval()
        with torch.no_grad():
            states = observations(64)
            mine, other = (rewards(states, net(states)[0].argmax(1)).sum() for net in (agent, best))
        if mine >= other:
            best.load_state_dict(agent.state_dict())


@healthy
def evolution_without_gradients() -> None:
    policy = mlp(STATE, 16, ACTIONS)
    weights = nn.utils.parameters_to_vector(policy.parameters()).detach()
    for _ in range(10):
        noise, scores, states = torch.randn(8, len(weights)), [], observations(64)
        for row in noise:
            nn.utils.vector_to_parameters(weights + 0.1 * row, policy.parameters())
            with torch.no_grad():
                scores.append(rewards(states, policy(states).argmax(1)).mean())
        fitness = torch.stack(scores)
        weights = weights + 0.5 * ((fitness - fitness.mean()) @ noise) / 8
        nn.utils.vector_to_parameters(weights, policy.parameters())


# ---- schedules of data, of layers, of weights


@healthy
def curriculum_of_longer_and_longer_signals() -> None:
    net = Gru(dropout=0.1)
    optimizer = NAdam(net.parameters(), 0.005)
    for length in (3, 5, 8, 12):
        net.train()
        for _ in range(5):
            x, y = signals(length=length)
            take_step(optimizer, F.cross_entropy(net(x), y))
        net.eval()
        with torch.no_grad():
            print(length, F.cross_entropy(net(signals()[0]), signals()[1]).item())


@healthy
def unfrozen_from_the_head_down_by_new_groups() -> None:
    net = Vit(depth=3)
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    optimizer = AdamW(net.head.parameters(), 0.005)
    for block in (None, *reversed(net.blocks)):
        if block is not None:
            block.requires_grad_(True)
            optimizer.add_param_group({"params": block.parameters(), "lr": 0.001})
        for x, y in forever(image_loader(32), 5):
            take_step(optimizer, F.cross_entropy(net(x), y))


@healthy
def smaller_rates_for_deeper_layers() -> None:
    net = Vit(dropout=0.1)
    layers = [net.head, *reversed(net.blocks), net.patches]
    groups = [
        {"params": list(layer.parameters()), "lr": 0.003 * 0.5**depth}
        for depth, layer in enumerate(layers)
    ]
    optimizer = AdamW([*groups, {"params": [net.cls, net.position], "lr": 1e-4}])
    scheduler = SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 12)], [4]
    )
    for x, y in forever(image_loader(), 16):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


@healthy
def lookahead_pulls_back_every_fifth_step() -> None:
    net = GraphNet()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    slow = [p.detach().clone() for p in net.parameters()]
    for step in range(20):
        x, adjacency, y = graphs()
        take_step(optimizer, F.cross_entropy(net(x, adjacency), y))
        if step % 5 == 4:
            with torch.no_grad():
                for anchor, fast in zip(slow, net.parameters(), strict=True):
                    anchor.lerp_(fast, 0.5)
                    fast.copy_(anchor)


@healthy
def snapshots_of_warm_restarts() -> None:
    net = Mlp(dropout=0.1)
    optimizer = SGD(net.parameters(), 0.2, momentum=0.9)
    scheduler = CosineAnnealingWarmRestarts(optimizer, 6)
    snapshots = []
    for step, (x, y) in enumerate(forever(point_loader(), 18)):
        take_step(optimizer, F.cross_entropy(net(x), y))
        scheduler.step()
        if step % 6 == 5:
            snapshots.append(copy.deepcopy(net.state_dict()))
    net.eval()
    for snapshot in snapshots:
        net.load_state_dict(snapshot)
        print(accuracy(net, point_loader(32)))


@healthy
def each_cycle_starts_from_the_same_weights() -> None:
    net = Gru()
    start = copy.deepcopy(net.state_dict())
    for rate in (0.003, 0.01, 0.03):
        net.load_state_dict(start)
        optimizer = Adam(net.parameters(), rate)
        for _ in range(6):
            x, y = signals()
            take_step(optimizer, F.cross_entropy(net(x), y))


@healthy
def stopped_early_with_the_best_weights() -> None:
    net = Cnn(dropout=0.2)
    optimizer = AdamW(net.parameters(), 0.01)
    scheduler = ReduceLROnPlateau(optimizer, patience=1)
    validation = list(image_loader(24))
    best, kept, patience, epoch = float("inf"), net.state_dict(), 0, 0
    while patience < 2 and epoch < 6:
        net.train()
        for x, y in image_loader(32):
            take_step(optimizer, F.cross_entropy(net(x), y))
        net.eval()
        with torch.no_grad():
            loss = sum(F.cross_entropy(net(x), y).item() for x, y in validation)
        scheduler.step(loss)
        if loss < best:
            best, kept, patience = loss, copy.deepcopy(net.state_dict()), 0
        else:
            patience += 1
        epoch += 1
    net.load_state_dict(kept)


@healthy
def a_model_and_an_optimizer_for_each_fold() -> None:
    x, y = points(80)
    parts = torch.randperm(80).chunk(5)
    for fold in range(5):
        rows = torch.cat([part for number, part in enumerate(parts) if number != fold])
        net = Mlp(dropout=0.1)
        optimizer = Adam(net.parameters(), 0.01)
        for batch in rows.split(16):
            take_step(optimizer, F.cross_entropy(net(x[batch]), y[batch]))
        net.eval()
        with torch.no_grad():
            print(fold, (net(x[parts[fold]]).argmax(1) == y[parts[fold]]).float().mean().item())


@healthy
def search_of_many_short_trainings() -> None:
    def trial(rate: float, width: int) -> float:
        net = mlp(FEATURES, width, CLASSES)
        optimizer = SGD(net.parameters(), rate, momentum=0.9)
        scheduler = OneCycleLR(optimizer, rate, total_steps=6)
        for x, y in forever(point_loader(), 6):
            take_step(optimizer, F.cross_entropy(net(x), y))
            scheduler.step()
        return accuracy(net, point_loader(32))

    print(max((trial(10**-e, w), e, w) for e in (0.5, 1, 2) for w in (8, 16)))


@healthy
def ensemble_trained_in_turns() -> None:
    members = [Gru() for _ in range(3)]
    optimizers = [Adam(member.parameters(), 0.01) for member in members]
    for step in range(24):
        x, y = signals()
        member, optimizer = members[step % 3], optimizers[step % 3]
        take_step(optimizer, F.cross_entropy(member(x), y))
    with torch.no_grad():
        print(torch.stack([member(signals()[0]) for member in members]).mean(0).shape)


# ---- what was trained before


@healthy
def backbone_loaded_without_its_head() -> None:
    path = os.path.join(tempfile.mkdtemp(), "vit.pt")
    torch.save(Vit().state_dict(), path)
    saved = {k: v for k, v in torch.load(path).items() if not k.startswith("head")}
    net = Vit(dropout=0.1)
    net.head = nn.Linear(16, 2)
    net.load_state_dict(saved, strict=False)
    optimizer = AdamW(net.parameters(), 0.002)
    for x, y in forever(image_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x), (y == 0).long()))


@healthy
def resumed_with_optimizer_schedule_and_random_state() -> None:
    path = os.path.join(tempfile.mkdtemp(), "last.pt")

    def train(steps: int, resume: bool) -> None:
        net = Cnn(dropout=0.1)
        optimizer = AdamW(net.parameters(), 0.01)
        scheduler = CosineAnnealingLR(optimizer, 20)
        if resume:
            saved = torch.load(path)
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
            torch.set_rng_state(saved["random"])
        for x, y in forever(image_loader(), steps):
            take_step(optimizer, F.cross_entropy(net(x), y))
            scheduler.step()
        parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**saved, "random": torch.get_rng_state()}, path)

    train(8, resume=False)
    train(8, resume=True)


@healthy
def moving_average_that_is_evaluated() -> None:
    net = Cnn(dropout=0.2)
    average = copy.deepcopy(net).requires_grad_(False).eval()
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    for step, (x, y) in enumerate(forever(image_loader(), 16)):
        take_step(optimizer, F.cross_entropy(net(x), y))
        follow(average, net, 0.1)
        for mine, theirs in zip(average.buffers(), net.buffers(), strict=True):
            mine.copy_(theirs)
        if step % 4 == 3:
            print(step, accuracy(average, image_loader(16)))


@healthy
def copy_with_zero_convolutions_beside_a_frozen_net() -> None:
    class Controlled(nn.Module):
        def __init__(self, base: Cnn) -> None:
            super().__init__()
            self.control = copy.deepcopy(base.stem)
            self.base = base.requires_grad_(False).eval()
            self.zero = nn.Conv2d(8, 8, 1)
            nn.init.zeros_(self.zero.weight)
            nn.init.zeros_(self.zero.bias)

        def forward(self, x: Tensor, hint: Tensor) -> Tensor:
            x = self.base.stem(x) + self.zero(self.control(x + hint))
            return self.base.head(self.base.body(F.max_pool2d(x, 2)).mean((2, 3)))

    net = Controlled(Cnn())
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = AdamW(trained, 0.01)
    for x, y in forever(image_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x, 0.1 * torch.randn_like(x)), y))


@healthy
def frozen_word_vectors_with_padding() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            vectors = torch.randn(VOCABULARY, 16)
            self.words = nn.Embedding.from_pretrained(vectors, freeze=True, padding_idx=0)
            self.kinds = nn.Embedding(4, 16, padding_idx=0)
            self.gru = nn.GRU(16, 16, batch_first=True)
            self.head = nn.Linear(16, VOCABULARY)

        def forward(self, tokens: Tensor) -> Tensor:
            kinds = (1 + tokens % 3) * (tokens > 0)
            return self.head(self.gru(self.words(tokens) + self.kinds(kinds))[0])

    model = Tagger()
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    for _ in range(12):
        tokens = texts(8)
        tokens[torch.rand(tokens.shape) < 0.2] = 0
        optimizer.zero_grad()
        scores = model(tokens[:, :-1]).flatten(0, 1)
        F.cross_entropy(scores, tokens[:, 1:].flatten(), ignore_index=0).backward()
        optimizer.step()


@healthy
def norms_adapted_to_a_new_domain_without_gradients() -> None:
    net = Cnn()
    optimizer = AdamW(net.parameters(), 0.01)
    for x, y in forever(image_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x), y))
    with torch.no_grad():
        for _ in range(4):
            net(2 * images()[0] + 1)
    net.eval()
    print(accuracy(net, image_loader(16)))


@healthy
def only_the_norms_adapt_at_test_time() -> None:
    net = Cnn()
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    for x, y in forever(image_loader(), 8):
        take_step(optimizer, F.cross_entropy(net(x), y))
    net.requires_grad_(False)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.requires_grad_(True)
    adapting = Adam([p for norm in norms for p in norm.parameters()], 0.001)
    for x, _ in forever(image_loader(), 8):
        chances = net(1.5 * x + 0.5).log_softmax(1)
        take_step(adapting, -(chances.exp() * chances).sum(1).mean())


# ---- constraints on weights


@healthy
def pruning_mask_put_on_after_each_step() -> None:
    net = mlp(FEATURES, 32, CLASSES)
    masks = {}
    for name, parameter in net.named_parameters():
        if parameter.ndim == 2:
            masks[name] = (parameter.abs() > parameter.abs().median()).float()
            parameter.data *= masks[name]
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    for x, y in forever(point_loader(), 16):
        take_step(optimizer, F.cross_entropy(net(x), y))
        with torch.no_grad():
            for name, mask in masks.items():
                net.get_parameter(name).mul_(mask)


@healthy
def rows_projected_to_unit_norm() -> None:
    net, prototypes = mlp(FEATURES, 16, 8), nn.Linear(8, CLASSES, bias=False)
    optimizer = SGD([*net.parameters(), *prototypes.parameters()], 0.1, momentum=0.9)
    for x, y in forever(point_loader(), 16):
        with torch.no_grad():
            prototypes.weight.copy_(F.normalize(prototypes.weight, dim=1))
        take_step(optimizer, F.cross_entropy(prototypes(F.normalize(net(x), dim=1)) / 0.2, y))


@healthy
def weight_norm_in_a_recurrent_net() -> None:
    net = Gru()
    parametrizations.weight_norm(net.gru, "weight_hh_l0")
    parametrizations.weight_norm(net.head)
    optimizer = Adam(net.parameters(), 0.01)
    for _ in range(12):
        x, y = signals()
        take_step(optimizer, F.cross_entropy(net(x), y))


@healthy
def weights_quantized_in_the_forward() -> None:
    class Quantized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            step = self.weight.detach().abs().max() / 7
            rounded = (self.weight / step).round() * step
            return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)

    net = nn.Sequential(Quantized(FEATURES, 24), nn.ReLU(), Quantized(24, CLASSES))
    optimizer = Adam(net.parameters(), 0.01)
    for x, y in forever(point_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x), y))


# ---- gradients by other ways


@healthy
def truncated_gradients_with_a_carried_state() -> None:
    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(SIGNALS, 16), nn.Linear(16, SIGNALS)

        def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple]:
            x, state = self.lstm(x, state)
            return self.head(x), state

    net = Carrying()
    optimizer = SGD(net.parameters(), 0.2, momentum=0.9)
    stream, state = torch.randn(121, 4, SIGNALS).cumsum(0) / 5, None
    for start in range(0, 120, 8):
        chunk = stream[start : start + 9]
        guess, state = net(chunk[:-1], state)
        state = tuple(part.detach() for part in state)
        optimizer.zero_grad()
        F.mse_loss(guess, chunk[1:]).backward()
        clip_grad_norm_(net.parameters(), 0.25)
        optimizer.step()


@healthy
def mixed_images_with_smooth_labels() -> None:
    net = Cnn(dropout=0.1)
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9, nesterov=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for x, y in forever(image_loader(), 12):
        share, order = random.betavariate(0.4, 0.4), torch.randperm(len(x))
        scores = net(share * x + (1 - share) * x[order])
        take_step(
            optimizer, share * criterion(scores, y) + (1 - share) * criterion(scores, y[order])
        )


@healthy
def momentum_by_hand() -> None:
    net = Gru()
    speeds = [torch.zeros_like(p) for p in net.parameters()]
    for _ in range(14):
        x, y = signals()
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for parameter, speed in zip(net.parameters(), speeds, strict=True):
                speed.mul_(0.9).add_(parameter.grad)
                parameter.sub_(0.05 * speed)


@healthy
def resilient_steps_on_all_nodes_of_a_graph() -> None:
    net = GraphNet(dropout=0.2)
    x, adjacency, _ = (part[0] for part in graphs(1, nodes=40))
    y = x[:, :CLASSES].argmax(1)
    known = torch.arange(40) < 24
    optimizer = Rprop(net.parameters(), 0.005)
    for _ in range(16):
        net.train()
        scores = net.head(net.nodes(x, adjacency))
        take_step(optimizer, F.cross_entropy(scores[known], y[known]))
        net.eval()
        with torch.no_grad():
            scores = net.head(net.nodes(x, adjacency))
            print((scores[~known].argmax(1) == y[~known]).float().mean().item())


@healthy
def stepped_in_the_backward_pass() -> None:
    model = Seq2Seq(dropout=0.1)
    optimizers = {p: AdamW([p], 0.003) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(12):
        translation_loss(model, texts()).backward()


@healthy
def noise_added_to_gradients() -> None:
    net = GraphNet()
    optimizer = Adam(net.parameters(), 0.01)
    for step in range(12):
        x, adjacency, y = graphs()
        optimizer.zero_grad()
        F.cross_entropy(net(x, adjacency), y).backward()
        for parameter in net.parameters():
            parameter.grad += 0.01 / (1 + step) ** 0.55 * torch.randn_like(parameter)
        optimizer.step()


@healthy
def private_gradients_of_all_samples_at_once() -> None:
    net = mlp(FEATURES, 16, CLASSES, activation=nn.Tanh)
    optimizer = SGD(net.parameters(), 0.2)

    def loss_of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (x[None],)), y[None])

    gradients_of = vmap(grad(loss_of_one), in_dims=(None, 0, 0))
    for x, y in forever(point_loader(), 12):
        weights = {name: p.detach() for name, p in net.named_parameters()}
        each = gradients_of(weights, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factor = (1 / norms).clamp(max=1)
        for name, parameter in net.named_parameters():
            total = torch.einsum("i,i...->...", factor, each[name])
            parameter.grad = (total + 0.3 * torch.randn_like(total)) / len(x)
        optimizer.step()


@healthy
def private_gradients_of_one_sample_after_another() -> None:
    net = mlp(FEATURES, 16, CLASSES, activation=nn.Tanh)
    optimizer = SGD(net.parameters(), 0.2)
    for x, y in forever(point_loader(batch_size=6), 10):
        sums = [torch.zeros_like(p) for p in net.parameters()]
        for row, label in zip(x, y, strict=True):
            net.zero_grad()
            F.cross_entropy(net(row[None]), label[None]).backward()
            clip_grad_norm_(net.parameters(), 1.0)
            for total, parameter in zip(sums, net.parameters(), strict=True):
                total += parameter.grad
        for total, parameter in zip(sums, net.parameters(), strict=True):
            parameter.grad = (total + 0.3 * torch.randn_like(total)) / len(x)
        optimizer.step()


@healthy
def conflicting_gradients_projected() -> None:
    net = mlp(FEATURES, 24, CLASSES + 1)
    optimizer = Adam(net.parameters(), 0.01)
    weights = list(net.parameters())
    for x, y in forever(point_loader(), 12):
        out = net(x)
        losses = F.cross_entropy(out[:, :CLASSES], y), F.mse_loss(out[:, -1], x.mean(1))
        first, second = (
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)])
            for loss in losses
        )
        if (overlap := first @ second) < 0:
            first, second = (
                first - overlap / second.square().sum() * second,
                second - overlap / first.square().sum() * first,
            )
        start = 0
        for parameter in weights:
            part = slice(start, start := start + parameter.numel())
            parameter.grad = (first + second)[part].view_as(parameter)
        optimizer.step()


@healthy
def each_layer_trained_on_its_own() -> None:
    layers = [nn.Linear(FEATURES, 24), nn.Linear(24, 24)]
    optimizers = [Adam(layer.parameters(), 0.01) for layer in layers]
    for _ in range(12):
        x, _ = points(24)
        good, bad = x, x[:, torch.randperm(FEATURES)]
        for layer, optimizer in zip(layers, optimizers, strict=True):
            good, bad = layer(good.detach()).relu(), layer(bad.detach()).relu()
            goodness = good.square().mean(1), bad.square().mean(1)
            optimizer.zero_grad()
            (F.softplus(0.5 - goodness[0]) + F.softplus(goodness[1] - 0.5)).mean().backward()
            optimizer.step()


@healthy
def weights_of_losses_learned_by_uncertainty() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_variances = nn.Parameter(torch.zeros(2))

        def forward(self, losses: Tensor) -> Tensor:
            return (losses * (-self.log_variances).exp() + self.log_variances).sum()

    net, criterion = mlp(FEATURES, 24, CLASSES + 1), Weighted()
    optimizer = Adam([*net.parameters(), *criterion.parameters()], 0.01)
    for x, y in forever(point_loader(), 12):
        out = net(x)
        losses = F.cross_entropy(out[:, :CLASSES], y), F.mse_loss(out[:, -1], x.sum(1))
        take_step(optimizer, criterion(torch.stack(losses)))


# ---- parts that rest at times


@healthy
def blocks_skipped_at_random() -> None:
    class Stochastic(Vit):
        def forward(self, x: Tensor) -> Tensor:
            x = self.tokens(x)
            for block in self.blocks:
                if not self.training or random.random() > 0.4:
                    x = block(x)
            return self.head(x[:, 0])

    random.seed(0)
    net = Stochastic(depth=3)
    optimizer = AdamW(net.parameters(), 0.003)
    for epoch in range(2):
        net.train()
        for x, y in image_loader():
            take_step(optimizer, F.cross_entropy(net(x), y))
        net.eval()
        print(epoch, accuracy(net, image_loader(16)))


@healthy
def experts_chosen_by_a_weighing_router() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(FEATURES, 4, bias=False)
            self.experts = nn.ModuleList(mlp(FEATURES, 16, CLASSES) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            chances = self.router(x).softmax(1)
            weight, chosen = chances.max(1)
            out = x.new_zeros(len(x), CLASSES)
            for number, expert in enumerate(self.experts):
                if (rows := (chosen == number).nonzero()[:, 0]).numel():
                    out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
            load = F.one_hot(chosen, 4).float().mean(0)
            return out, 4 * (load * chances.mean(0)).sum()

    net = Mixture()
    optimizer = Adam(net.parameters(), 0.01)
    for x, y in forever(point_loader(), 14):
        out, balance = net(x)
        take_step(optimizer, F.cross_entropy(out, y) + 0.01 * balance)


@healthy
def tasks_whose_labels_are_missing_at_times() -> None:
    class Multitask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(FEATURES, 24), nn.ReLU())
            self.heads = nn.ModuleDict({"class": nn.Linear(24, 3), "sum": nn.Linear(24, 1)})

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.trunk(x)
            return {name: head(x) for name, head in self.heads.items()}

    model = Multitask()
    optimizer = Adam(model.parameters(), 0.01)
    for step, (x, y) in enumerate(forever(point_loader(), 18)):
        out = model(x)
        losses = [F.cross_entropy(out["class"], y)]
        if step % 6 == 5:  # few samples have this label
            losses = [F.mse_loss(out["sum"][:, 0], x.sum(1))]
        take_step(optimizer, sum(losses))


@healthy
def diffusion_whose_modulation_begins_at_zero() -> None:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.label = (
                mlp(1, 16, 16, activation=nn.SiLU),
                nn.Embedding(CLASSES + 1, 16),
            )
            self.enter, self.body = nn.Linear(FEATURES, 16), mlp(16, 32, 16, activation=nn.GELU)
            self.norm = nn.LayerNorm(16, elementwise_affine=False)
            self.modulation, self.leave = nn.Linear(16, 48), nn.Linear(16, FEATURES)
            for layer in (self.modulation, self.leave):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

        def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
            condition = self.time(time) + self.label(label)
            shift, scale, gate = self.modulation(F.silu(condition)).chunk(3, 1)
            x = self.enter(x)
            return self.leave(x + gate * self.body(self.norm(x) * (1 + scale) + shift))

    model = Denoiser()
    optimizer = AdamW(model.parameters(), 0.003)
    for x, y in forever(point_loader(), 16):
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        label = torch.where(torch.rand(len(x)) < 0.1, CLASSES, y)
        take_step(optimizer, F.mse_loss(model(torch.lerp(x, noise, time), time, label), noise - x))


@healthy
def masks_of_ones_and_a_constant_condition() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.style, self.embedding = nn.Embedding(4, 16), nn.Embedding(VOCABULARY, 16)
            self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
            self.head = nn.Linear(16, VOCABULARY)

        def forward(self, mask: Tensor, style: Tensor, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens) + self.style(style)[:, None]
            return self.head(self.block(x, src_key_padding_mask=mask == 0))

    model = Conditioned()
    optimizer = Adam(model.parameters(), 0.005)
    for _ in range(12):
        tokens = texts(6)
        mask = torch.ones(6, tokens.shape[1] - 1)  # all texts are as long
        scores = model(mask, torch.zeros(6, dtype=torch.long), tokens[:, :-1])
        take_step(optimizer, F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()))


# ---- unusual data


@healthy
def coordinates_of_an_image_made_anew() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (6 * x).sin()

    net = mlp(2, 32, 32, 3, activation=Sine)
    picture = torch.rand(8, 8, 3)
    optimizer = Adam(net.parameters(), 0.002)
    for _ in range(16):
        axis = torch.linspace(-1, 1, 8)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
        take_step(optimizer, F.mse_loss(net(grid).view(8, 8, 3), picture))


@healthy
def an_image_trained_through_a_frozen_net() -> None:
    net = Cnn().eval().requires_grad_(False)
    goal = net.features(images(1)[0])
    picture = nn.Parameter(torch.rand(1, 3, 8, 8))
    optimizer = Adam([picture], 0.05)
    for _ in range(14):
        take_step(optimizer, F.mse_loss(net.features(picture), goal))
        picture.data.clamp_(0, 1)


@healthy
def one_sample_at_a_time() -> None:
    net = Gru()
    optimizer = SGD(net.parameters(), 0.02)
    for _ in range(24):
        x, y = signals(1)
        take_step(optimizer, F.cross_entropy(net(x), y))


@healthy
def evaluated_in_eval_mode_after_each_step() -> None:
    model = Seq2Seq(dropout=0.2)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, 0.003, fused=True)
    scheduler = ReduceLROnPlateau(optimizer, patience=3)
    held_out = texts(12)

    @torch.inference_mode()
    def evaluate() -> float:
        was_training = model.training
        model.eval()
        loss = translation_loss(model, held_out).item()
        model.train(was_training)
        return loss

    for _ in range(14):
        optimizer.zero_grad(set_to_none=False)
        translation_loss(model, texts()).backward()
        optimizer.step()
        scheduler.step(evaluate())


# ---- ranks


@breaks(None, ranks=2)
def sequences_sharded_over_ranks() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    dataset = TensorDataset(*signals(120))
    sampler: DistributedSampler = DistributedSampler(dataset, shuffle=True)
    model = DistributedDataParallel(Gru(dropout=0.1))
    optimizer = AdamW(model.parameters(), 0.01)
    scheduler = CosineAnnealingLR(optimizer, 10)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, 12, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    dist.destroy_process_group()


@breaks(None, ranks=2)
def weights_averaged_every_fourth_step() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    net = mlp(FEATURES, 24, CLASSES)
    optimizer = SGD(net.parameters(), 0.1)
    torch.manual_seed(50 + dist.get_rank())
    for step in range(16):
        x, y = points()
        take_step(optimizer, F.cross_entropy(net(x), y))
        if step % 4 == 3:
            for parameter in net.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
    dist.destroy_process_group()


def shards(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(90 + rank)
    while True:
        yield torch.randn(16, FEATURES, generator=generator)


@breaks(None, ranks=2)
def variational_with_accumulation_over_ranks() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DistributedDataParallel(Vae())
    optimizer = Adam(model.parameters(), 0.005)
    torch.manual_seed(50 + rank)
    batches = shards(rank)
    for _ in range(8):
        with model.no_sync():
            x = next(batches)
            (elbo_loss(x, model(x)) / 2).backward()
        x = next(batches)
        (elbo_loss(x, model(x)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
