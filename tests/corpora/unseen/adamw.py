"""A training: torch's loss, clipping and AdamW beside plain loops, with warm-up and accumulation."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

RATE, WARMUP, TOTAL, ROUNDS, PARTS, CLASSES = 1e-2, 2, 10, 3, 2, 7


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.fc2(self.norm(F.gelu(self.fc1(x))))


def factor(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))


def reference_train(model, batches):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for parts in batches:
        for x, y in parts:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1, ignore_index=0)
            (loss / PARTS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def smoothed_loss(logits, labels):
    logp = logits - torch.logsumexp(logits, -1, keepdim=True)
    kept = labels != 0
    target = torch.full_like(logp, 0.1 / CLASSES)
    target.scatter_add_(1, labels[:, None], torch.full_like(logp, 0.9))
    losses = -(target * logp).sum(-1)
    return (losses * kept).sum() / kept.sum()


class HandAdamW:
    def __init__(self, parameters):
        self.parameters, self.count = list(parameters), 0
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self, rate):
        self.count += 1
        for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
            if p.dim() > 1:
                p -= rate * 0.1 * p
            m.lerp_(p.grad, 0.1)
            v.copy_(0.95 * v + 0.05 * p.grad**2)
            m_hat = m / (1 - 0.9**self.count)
            v_hat = v / (1 - 0.95**self.count)
            p -= rate * m_hat / (v_hat.sqrt() + 1e-8)


def port_train(model, batches):
    optimizer = HandAdamW(model.parameters())
    for step, parts in enumerate(batches):
        warm = min(1.0, (step + 1) / WARMUP)
        after = max(0, step - WARMUP) / (TOTAL - WARMUP)
        rate = RATE * warm * (1 + math.cos(math.pi * after)) / 2
        for p in model.parameters():
            p.grad = None
        for x, y in parts:
            loss = smoothed_loss(model(x), y) / len(parts)
            loss.backward()
        grads = [p.grad for p in model.parameters()]
        total = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        scale = (0.5 / (total + 1e-6)).clamp(max=1.0)
        for g in grads:
            g.mul_(scale)
        optimizer.step(rate)


def build():
    reference = shaken(Net())
    port = copy.deepcopy(reference).requires_grad_(True)
    reference.requires_grad_(True)
    batches = [
        [(torch.randn(8, 12), torch.randint(0, CLASSES, (8,))) for _ in range(PARTS)]
        for _ in range(ROUNDS)
    ]

    def trained(model, train):
        train(model, batches)
        return [p.detach() for p in model.parameters()]

    return lambda: trained(reference, reference_train), lambda: trained(port, port_train)
