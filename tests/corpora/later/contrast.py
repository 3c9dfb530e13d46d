"""Contrastive training with momentum encoders: two towers beside a stacked pair."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

INPUTS, HIDDEN, DIM, QUEUE, BATCH, STEPS = 10, 16, 8, 12, 4, 5
LR, DECAY, KEEP = 0.05, 0.1, 0.9


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm = nn.Linear(INPUTS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return F.normalize(self.fc2(self.norm(F.gelu(self.fc1(x)))), dim=-1)


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_m, self.text_m = shaken(Tower()), shaken(Tower())
        self.image = copy.deepcopy(self.image_m).requires_grad_(True)
        self.text = copy.deepcopy(self.text_m).requires_grad_(True)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))
        self.register_buffer("image_queue", F.normalize(torch.randn(DIM, QUEUE), dim=0))
        self.register_buffer("text_queue", F.normalize(torch.randn(DIM, QUEUE), dim=0))
        self.queue_ptr = 0

    @torch.no_grad()
    def momentum_update(self):
        for online, slow in ((self.image, self.image_m), (self.text, self.text_m)):
            for param, param_m in zip(online.parameters(), slow.parameters(), strict=True):
                param_m.data = param_m.data * KEEP + param.data * (1.0 - KEEP)

    @torch.no_grad()
    def dequeue_and_enqueue(self, image_keys, text_keys):
        ptr, size = self.queue_ptr, len(image_keys)
        self.image_queue[:, ptr : ptr + size] = image_keys.T
        self.text_queue[:, ptr : ptr + size] = text_keys.T
        self.queue_ptr = (ptr + size) % QUEUE

    def forward(self, images, texts):
        image_features, text_features = self.image(images), self.text(texts)
        with torch.no_grad():
            self.momentum_update()
            image_keys, text_keys = self.image_m(images), self.text_m(texts)
            image_all = torch.cat([image_keys.T, self.image_queue.clone()], dim=1)
            text_all = torch.cat([text_keys.T, self.text_queue.clone()], dim=1)
        scale = self.logit_scale.exp()
        targets = torch.arange(len(images))
        loss_i2t = F.cross_entropy(scale * image_features @ text_all, targets)
        loss_t2i = F.cross_entropy(scale * text_features @ image_all, targets)
        self.dequeue_and_enqueue(image_keys, text_keys)
        return (loss_i2t + loss_t2i) / 2


def train_reference(model, batches):
    model, ema = copy.deepcopy(model), copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.9)
    cosine, losses = lambda step: 0.5 * (1 + math.cos(math.pi * step / STEPS)), []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    for step, (images, texts) in enumerate(batches):
        loss = model(images, texts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        decay = min(0.999, (1 + step) / (10 + step))
        with torch.no_grad():
            for averaged, param in zip(ema.parameters(), model.parameters(), strict=True):
                averaged.copy_(decay * averaged + (1 - decay) * param)
        losses.append(loss.detach())
    towers = (model.image, model.text, model.image_m, model.text_m, ema.image, ema.text)
    parameters = [p.detach() for tower in towers for p in tower.parameters()]
    scales = torch.stack([model.logit_scale.detach(), ema.logit_scale.detach()])
    return torch.stack(losses), model.image_queue, model.text_queue, scales, *parameters


class Pair(nn.Module):
    """Both towers at once: every weight has the tower as its first axis."""

    def __init__(self, one, two):
        super().__init__()
        for (name, left), right in zip(one.named_parameters(), two.parameters(), strict=True):
            stacked = torch.stack([left.detach(), right.detach()])
            self.register_parameter(name.replace(".", "_"), nn.Parameter(stacked))

    def forward(self, x):
        h = torch.einsum("tbi,toi->tbo", x, self.fc1_weight) + self.fc1_bias.unsqueeze(1)
        h = F.layer_norm(F.gelu(h), (HIDDEN,))
        h = h * self.norm_weight.unsqueeze(1) + self.norm_bias.unsqueeze(1)
        out = torch.baddbmm(self.fc2_bias.unsqueeze(1), h, self.fc2_weight.mT)
        return out / out.square().sum(-1, keepdim=True).sqrt()


def train_port(model, batches):
    pair, keeper = Pair(model.image, model.text), Pair(model.image_m, model.text_m)
    temperature = model.logit_scale.detach().clone().requires_grad_(True)
    weights = [*pair.parameters(), temperature]
    averages = [w.detach().clone() for w in weights]
    velocities = [torch.zeros_like(w) for w in weights]
    queue, pointer = torch.stack([model.image_queue.T, model.text_queue.T]), 0
    history = torch.empty(len(batches))
    for step, batch in enumerate(batches):
        inputs = torch.stack(batch)
        with torch.no_grad():
            for slow, fast in zip(keeper.parameters(), pair.parameters(), strict=True):
                slow.mul_(KEEP).add_(fast, alpha=1 - KEEP)
            keys = keeper(inputs)
            candidates = torch.cat([keys, queue], 1).flip(0)
        queries = pair(inputs) * temperature.exp()
        logits = torch.einsum("tbd,tkd->tbk", queries, candidates)
        loss = (logits.logsumexp(-1) - logits.diagonal(dim1=1, dim2=2)).mean()
        gradients = torch.autograd.grad(loss, weights)
        rate = LR * math.cos(math.pi * step / (2 * STEPS)) ** 2
        share = 1 - min(0.999, (1 + step) / (10 + step))
        with torch.no_grad():
            for w, g, v, average in zip(weights, gradients, velocities, averages, strict=True):
                total = g + DECAY * w if w.dim() > 2 else g
                v.mul_(0.9).add_(total)
                w.sub_(rate * v)
                average.lerp_(w, share)
            queue[:, pointer : pointer + BATCH] = keys
            pointer = (pointer + BATCH) % QUEUE
        history[step] = loss.detach()
    sets = (weights[:-1], list(keeper.parameters()), averages[:-1])
    parameters = [p.detach()[side] for some in sets for side in (0, 1) for p in some]
    scales = torch.stack([temperature.detach(), averages[-1]])
    return history, queue[0].T, queue[1].T, scales, *parameters


def build():
    model = Contrast()
    base = [torch.randn(BATCH, INPUTS) for _ in range(STEPS)]
    batches = [(x, 0.5 * x.flip(1) + torch.randn_like(x)) for x in base]
    return lambda: train_reference(model, batches), lambda: train_port(model, batches)
