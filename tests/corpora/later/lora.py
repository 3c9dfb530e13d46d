"""LoRA: adapted layers and torch's optimizer beside merged weights and a hand-written AdamW."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, HEADS, VOCABULARY, LENGTH, RANK, ALPHA = 16, 2, 30, 10, 4, 6.0
STEPS, WARMUP, ACCUMULATE, PEAK = 4, 2, 2, 0.02
BETA_1, BETA_2, EPSILON, DECAY, CLIP = 0.9, 0.95, 1e-6, 0.1, 0.5


class LoRALinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.lora_a = nn.Parameter(0.3 * torch.randn(RANK, WIDTH))
        self.lora_b = nn.Parameter(0.2 * torch.randn(WIDTH, RANK))

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T * (ALPHA / RANK)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q, self.v = LoRALinear(), LoRALinear()
        self.k, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm_1, self.norm_2, self.norm_f = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        normed = self.norm_1(x)
        projected = [projection(normed) for projection in (self.q, self.k, self.v)]
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return self.head(self.norm_f(x))


def warmup_cosine(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP + 1)))


def finetune(pretrained, batches):
    model = copy.deepcopy(pretrained)
    adapters = [weight for name, weight in model.named_parameters() if "lora_" in name]
    nn.ParameterList(adapters).requires_grad_(True)
    options = {"lr": PEAK, "betas": (BETA_1, BETA_2), "eps": EPSILON, "weight_decay": DECAY}
    optimizer = torch.optim.AdamW(adapters, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for ids, labels in batches[step]:
            logits = model(ids)[:, :-1]
            targets = labels[:, 1:].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100)
            (loss / ACCUMULATE).backward()
            total += loss.detach() / ACCUMULATE
        nn.utils.clip_grad_norm_(adapters, CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return [adapter.detach() for adapter in adapters], torch.stack(losses)


class PortTransformer(Functional):
    def merged(self, q_a, q_b, v_a, v_b):
        delta = torch.cat([q_b @ q_a, torch.zeros(WIDTH, WIDTH), v_b @ v_a])
        fused = torch.cat([self.q_base_weight, self.k_weight, self.v_base_weight])
        return fused + delta * (ALPHA / RANK)

    def normed(self, name, x):
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * self.w(name, "weight") + self.w(name, "bias")

    def forward(self, ids, adapters):
        batch, length = ids.shape
        x = self.tokens_weight[ids] + self.positions_weight[:length]
        bias = torch.cat([self.q_base_bias, self.k_bias, self.v_base_bias])
        qkv = self.normed("norm_1", x) @ self.merged(*adapters).T + bias
        q, k, v = qkv.view(batch, length, 3, HEADS, WIDTH // HEADS).unbind(2)
        scores = torch.einsum("bqhd,bkhd->hbqk", q, k) * (WIDTH // HEADS) ** -0.5
        scores = (scores + torch.full((length, length), float("-inf")).triu(1)).softmax(-1)
        mixed = torch.einsum("hbqk,bkhd->bqhd", scores, v).reshape(batch, length, WIDTH)
        x = x + F.linear(mixed, self.out_weight, self.out_bias)
        inner = F.linear(self.normed("norm_2", x), self.up_weight, self.up_bias)
        inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
        x = x + F.linear(inner, self.down_weight, self.down_bias)
        return torch.einsum("blw,vw->blv", self.normed("norm_f", x), self.head_weight)


def masked_loss(logits, labels):
    targets = labels[:, 1:]
    known = targets != -100
    picked = logits[:, :-1].gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    surprise = logits[:, :-1].logsumexp(-1) - picked
    return (surprise * known).sum() / known.sum()


def port_finetune(port, start, batches):
    adapters = [tensor.clone().requires_grad_() for tensor in start]
    first, second = ([torch.zeros_like(tensor) for tensor in start] for _ in range(2))
    history = torch.zeros(STEPS)
    for count in range(STEPS):
        sums = [torch.zeros_like(tensor) for tensor in start]
        for ids, labels in batches[count]:
            loss = masked_loss(port(ids, adapters), labels) * (1 / ACCUMULATE)
            fresh = torch.autograd.grad(loss, adapters)
            sums = [total + gradient for total, gradient in zip(sums, fresh)]
            history[count] += loss.detach()
        length = torch.stack([gradient.square().sum() for gradient in sums]).sum().sqrt()
        shrink = (CLIP / (length + 1e-6)).clamp(max=1.0)
        phase = (count - WARMUP) / (STEPS - WARMUP + 1)
        ramp, wave = (count + 1) / WARMUP, math.cos(0.5 * math.pi * phase) ** 2
        rate = PEAK * (ramp if count < WARMUP else wave)
        correction_1, correction_2 = 1 - BETA_1 ** (count + 1), 1 - BETA_2 ** (count + 1)
        for weight, gradient, m, v in zip(adapters, sums, first, second):
            with torch.no_grad():
                gradient = gradient * shrink
                weight.mul_(1 - rate * DECAY)
                m.lerp_(gradient, 1 - BETA_1)
                v.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
                scale = (v / correction_2).sqrt() + EPSILON
                weight.sub_(rate / correction_1 * m / scale)
    return [weight.detach() for weight in adapters], history


def build():
    reference = shaken(Transformer())
    port, batches = PortTransformer(reference), []
    start = [port.q_lora_a, port.q_lora_b, port.v_lora_a, port.v_lora_b]
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (ACCUMULATE, 2, LENGTH))
        labels = ids.clone()
        labels[0, :, :3], labels[1, :, :5], labels[1, 1, -2:] = -100, -100, -100
        batches.append(list(zip(ids, labels)))
    return lambda: finetune(reference, batches), lambda: port_finetune(port, start, batches)
