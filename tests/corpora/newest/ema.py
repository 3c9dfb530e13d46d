"""A training with batch norm and a slow copy of the model: torch's SGD beside states in and out."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

CLASSES, WIDTH, PARTS, STEPS, WARMUP, RATE, DECAY, MOMENTUM = 6, 8, 2, 5, 2, 0.2, 1e-2, 0.9
SMOOTHING, SLOW = 0.1, 0.9


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        x = F.relu(x + self.bn2(self.conv2(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class ModelEma:
    def __init__(self, model):
        self.module, self.updates = copy.deepcopy(model).eval(), 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(SLOW, (1 + self.updates) / (10 + self.updates))
        for name, ema_v in self.module.state_dict().items():
            model_v = model.state_dict()[name]
            ema_v.copy_(decay * ema_v + (1.0 - decay) * model_v)


def cosine(step):
    wave = 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
    return (step + 1) / WARMUP if step < WARMUP else wave


def train(model, batches):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    criterion, ema, losses = nn.CrossEntropyLoss(label_smoothing=SMOOTHING), ModelEma(model), []
    model.train()
    for parts in batches:
        optimizer.zero_grad()
        for images, targets in parts:
            loss = criterion(model(images), targets) / PARTS
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
        ema.update(model)
    return [p.detach() for p in model.parameters()], ema.module(batches[0][0][0]).detach(), losses


def normed(x, weights, stats, name, training):
    mean, variance = stats[f"{name}.running_mean"], stats[f"{name}.running_var"]
    if training:
        count = x.numel() // WIDTH
        variance, mean = torch.var_mean(x, (0, 1, 2), correction=0)
        news = mean.detach(), variance.detach() * count / (count - 1)
        keys = f"{name}.running_mean", f"{name}.running_var"
        stats = stats | {k: 0.9 * stats[k] + 0.1 * new for k, new in zip(keys, news, strict=True)}
    x = (x - mean) * (variance + 1e-5).rsqrt()
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"], stats


def convolved(x, kernel, stride=1):
    patches = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, stride).unfold(2, 3, stride)
    return torch.einsum("nhwcij,ocij->nhwo", patches, kernel)


def apply(weights, stats, images, training):
    x = convolved(images.permute(0, 2, 3, 1), weights["conv1.weight"], 2)
    x, stats = normed(x, weights, stats, "bn1", training)
    x = F.pad(x.relu(), (0, 0, 1, 1, 1, 1)).unfold(1, 3, 2).unfold(2, 3, 2).amax((-2, -1))
    y, stats = normed(convolved(x, weights["conv2.weight"]), weights, stats, "bn2", training)
    pooled = (x + y).relu().mean((1, 2))
    return pooled @ weights["fc.weight"].T + weights["fc.bias"], stats


def objective(logits, targets):
    goal = F.one_hot(targets, CLASSES) * (1 - SMOOTHING) + SMOOTHING / CLASSES
    return -(goal * logits.log_softmax(1)).sum(1).mean()


def fit(weights, stats, batches):
    velocity = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    slow, losses = weights | stats, []
    for step, parts in enumerate(batches):
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for images, targets in parts:
            logits, stats = apply(leaves, stats, images, True)
            loss = objective(logits, targets) / len(parts)
            slopes = torch.autograd.grad(loss, list(leaves.values()))
            total = {name: total[name] + g for name, g in zip(total, slopes, strict=True)}
            losses.append(loss.detach())
        wave = math.cos(math.pi / 2 * max(0, step - WARMUP) / (STEPS - WARMUP)) ** 2
        rate = RATE * min(1, (step + 1) / WARMUP) * wave
        for name, weight in weights.items():
            slope = total[name] + (DECAY * weight if weight.dim() > 1 else 0)
            velocity[name] = MOMENTUM * velocity[name] + slope
            weights = weights | {name: weight - rate * (slope + MOMENTUM * velocity[name])}
        keep, news = min(SLOW, (step + 2) / (step + 11)), weights | stats
        slow = {name: torch.lerp(news[name], slow[name], keep) for name in slow}
    logits, _ = apply(slow, slow, batches[0][0][0], False)
    return list(weights.values()), logits, losses


def build():
    reference = shaken(ResNet()).requires_grad_(True)
    weights = {name: p.detach().clone() for name, p in reference.named_parameters()}
    stats = {name: buffer.clone() for name, buffer in reference.named_buffers() if buffer.dim()}
    images = torch.randn(STEPS, PARTS, 4, 3, 12, 12)
    targets = torch.randint(0, CLASSES, images.shape[:3])
    batches = [list(zip(*parts, strict=True)) for parts in zip(images, targets, strict=True)]
    return lambda: train(reference, batches), lambda: fit(weights, stats, batches)
