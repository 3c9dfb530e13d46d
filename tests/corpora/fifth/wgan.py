"""A Wasserstein GAN with gradient penalty: autograd and two Adams beside torch.func and own steps."""

import copy

import torch
from torch import nn
from torch.func import grad, grad_and_value, vmap
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

NOISE, SMALL, COLOURS, WIDTH, WIDE, BATCH, CRITICS, ROUNDS = 6, 4, 2, 8, 12, 6, 2, 3
RATE_D, RATE_G, BETAS, PENALTY, SLOPE, EPS = 0.01, 0.02, (0.5, 0.9), 10.0, 0.2, 1e-5


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(NOISE, WIDTH * SMALL * SMALL)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2, bias=False)
        self.bn, self.conv = nn.BatchNorm2d(WIDTH), nn.Conv2d(WIDTH, COLOURS, 3, padding=1)

    def forward(self, z):
        x = F.relu(self.fc(z)).view(-1, WIDTH, SMALL, SMALL)
        x = F.relu(self.bn(self.up(x)))
        return torch.tanh(self.conv(x))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(COLOURS, WIDE, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(1, WIDE)
        self.fc = nn.Linear(WIDE * SMALL * SMALL, 1, bias=False)

    def forward(self, x):
        x = F.leaky_relu(self.norm(self.conv(x)), SLOPE)
        return self.fc(x.flatten(1)).squeeze(1)


def compute_gradient_penalty(discriminator, real, fake, alpha):
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = discriminator(interpolates).sum()
    gradients = torch.autograd.grad(scores, interpolates, create_graph=True)[0]
    return ((gradients.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def train_reference(generator, discriminator, reals, noises, alphas):
    generator, discriminator = copy.deepcopy((generator, discriminator))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=RATE_G, betas=BETAS)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=RATE_D, betas=BETAS)
    losses = []
    generator.train()
    for i in range(ROUNDS):
        for j in range(CRITICS):
            optimizer_d.zero_grad()
            fake = generator(noises[i, j]).detach()
            gp = compute_gradient_penalty(discriminator, reals[i, j], fake, alphas[i, j])
            d_loss = discriminator(fake).mean() - discriminator(reals[i, j]).mean() + PENALTY * gp
            d_loss.backward()
            optimizer_d.step()
            losses.append(d_loss.detach())
        optimizer_g.zero_grad()
        g_loss = -discriminator(generator(noises[i, CRITICS])).mean()
        g_loss.backward()
        optimizer_g.step()
        losses.append(g_loss.detach())
    generator.eval()
    images = generator(noises[0, 0]).detach()
    weights = (*generator.parameters(), *discriminator.parameters())
    return torch.stack(losses), images, *(p.detach() for p in weights)


def paint(w, stats, noise, training=True):
    x = F.linear(noise, w["fc.weight"], w["fc.bias"]).relu().unflatten(1, (WIDTH, SMALL, SMALL))
    x = torch.einsum("nchw,coij->nhiwjo", x, w["up.weight"]).flatten(3, 4).flatten(1, 2)
    mean, variance = stats
    if training:
        variance, mean = torch.var_mean(x, (0, 1, 2), correction=0)
        count = x[..., 0].numel()
        fresh = mean.detach(), variance.detach() * count / (count - 1)
        stats = [torch.lerp(old, new, 0.1) for old, new in zip(stats, fresh, strict=True)]
    scale = w["bn.weight"] * torch.rsqrt(variance + EPS)
    x = (x * scale + (w["bn.bias"] - mean * scale)).relu()
    x = F.conv2d(x.permute(0, 3, 1, 2), w["conv.weight"], w["conv.bias"], padding=1)
    return x.tanh().permute(0, 2, 3, 1), stats


def judge(w, image):
    x = F.conv2d(image.permute(2, 0, 1), w["conv.weight"], w["conv.bias"], 2, 1)
    x = F.layer_norm(x, x.shape).permute(1, 2, 0) * w["norm.weight"] + w["norm.bias"]
    return w["fc.weight"][0] @ torch.where(x > 0, x, SLOPE * x).permute(2, 0, 1).flatten()


judge_all, tilt = vmap(judge, (None, 0)), vmap(grad(judge, argnums=1), (None, 0))


def distrust(critic, real, fake, share):
    slopes = tilt(critic, torch.lerp(fake, real, share))
    steepness = slopes.square().sum((1, 2, 3)).sqrt()
    gap = judge_all(critic, fake).mean() - judge_all(critic, real).mean()
    return gap + PENALTY * (steepness - 1).square().mean()


def step(weights, slopes, moments, count, rate):
    for name, slope in slopes.items():
        first, second = moments.get(name, (0 * slope, 0 * slope))
        first = BETAS[0] * first + (1 - BETAS[0]) * slope
        second = BETAS[1] * second + (1 - BETAS[1]) * slope.square()
        moments[name] = first, second
        root = (second / (1 - BETAS[1] ** count)).sqrt() + 1e-8
        weights = weights | {name: weights[name] - rate / (1 - BETAS[0] ** count) * first / root}
    return weights


def train_port(painter, critic, stats, reals, noises, shares):
    memories, losses, reals = ({}, {}), [], reals.permute(0, 1, 2, 4, 5, 3)

    def convince(painter, stats, noise):
        images, stats = paint(painter, stats, noise)
        return -judge_all(critic, images).mean(), stats

    for i in range(ROUNDS):
        for j in range(CRITICS):
            fake, stats = paint(painter, stats, noises[i, j])
            slopes, loss = grad_and_value(distrust)(critic, reals[i, j], fake, shares[i, j])
            critic = step(critic, slopes, memories[1], i * CRITICS + j + 1, RATE_D)
            losses.append(loss)
        learn = grad_and_value(convince, has_aux=True)
        slopes, (loss, stats) = learn(painter, stats, noises[i, CRITICS])
        painter = step(painter, slopes, memories[0], i + 1, RATE_G)
        losses.append(loss)
    images, _ = paint(painter, stats, noises[0, 0], training=False)
    return torch.stack(losses), images.permute(0, 3, 1, 2), *painter.values(), *critic.values()


def build():
    models = shaken(Generator()), shaken(Discriminator())
    weights = [{k: v.detach().clone() for k, v in model.named_parameters()} for model in models]
    reals = torch.rand(ROUNDS, CRITICS, BATCH, COLOURS, 2 * SMALL, 2 * SMALL) * 2 - 1
    noises = torch.randn(ROUNDS, CRITICS + 1, BATCH, NOISE)
    given = reals, noises, torch.rand(ROUNDS, CRITICS, BATCH, 1, 1, 1)
    stats = torch.zeros(WIDTH), torch.ones(WIDTH)
    models = [model.requires_grad_(True) for model in models]
    return lambda: train_reference(*models, *given), lambda: train_port(*weights, stats, *given)
