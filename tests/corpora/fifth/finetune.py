"""A decoder is tuned: torch's AdamW over padded halves of a batch beside one flat vector, row by row."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

VOCAB, WIDTH, HEADS, HIDDEN, LONGEST, EOS, IGNORED = 24, 16, 2, 32, 12, 1, -100
ROUNDS, ROWS, PARTS, WARMUP, TOTAL, FLOOR = 4, 8, 2, 2, 8, 0.1
RATE, BETAS, EPS, DECAY, SMOOTHING, MAX_NORM = 2e-2, (0.9, 0.95), 1e-6, 0.5, 0.2, 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj, self.c_fc = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.c_out = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x, mask):
        parts = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        scores = (q @ k.transpose(2, 3)) / math.sqrt(WIDTH // HEADS) + mask
        x = x + self.c_proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.h, self.ln_f = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)

    def forward(self, input_ids):
        n = input_ids.shape[1]
        x = self.wte(input_ids) + self.wpe(torch.arange(n))
        mask = torch.full((n, n), float("-inf")).triu(1)
        for block in self.h:
            x = block(x, mask)
        return self.ln_f(x) @ self.wte.weight.T


def lr_lambda(step):
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    progress = (step - WARMUP) / (TOTAL - WARMUP)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def configure_optimizers(model):
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    decayed = {m.weight for m in linears}
    groups = [
        {"params": [p for p in model.parameters() if p in decayed], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)


def train_reference(model, batches):
    model, losses = copy.deepcopy(model), []
    optimizer, scheduler = configure_optimizers(model)
    for batch in batches:
        ids, labels = (nn.utils.rnn.pad_sequence(t, True, v) for t, v in zip(*batch, strict=True))
        num_items, total = (labels[:, 1:] != IGNORED).sum(), 0.0
        for part, wanted in zip(ids.chunk(PARTS), labels.chunk(PARTS), strict=True):
            logits = model(part)[:, :-1].flatten(0, 1)
            given = {"reduction": "sum", "label_smoothing": SMOOTHING, "ignore_index": IGNORED}
            loss = F.cross_entropy(logits, wanted[:, 1:].flatten(), **given) / num_items
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(torch.stack([total, norm]))
    return torch.stack(losses), *(p.detach() for p in model.parameters())


class Flat:
    """All weights in one vector, which is the only leaf, and its two moments."""

    def __init__(self, model):
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.theta = nn.utils.parameters_to_vector(model.parameters()).detach()
        decays = ["c_" in name and len(shape) > 1 for name, shape in self.shapes.items()]
        sizes = torch.tensor([shape.numel() for shape in self.shapes.values()])
        self.decay = DECAY * torch.tensor(decays).float().repeat_interleave(sizes)
        self.first, self.second = torch.zeros_like(self.theta), torch.zeros_like(self.theta)

    def named(self, theta):
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        return {n: p.view(s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}

    def step(self, gradient, count, rate):
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        bias, spread = 1 - BETAS[0] ** count, math.sqrt(1 - BETAS[1] ** count)
        move = self.first / bias / (self.second.sqrt() / spread + EPS)
        self.theta = self.theta - rate * (move + self.decay * self.theta)


def likelihoods(w, tokens):
    """Return the logarithms of the next token's shares of one text without padding."""
    x = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    for i in (0, 1):
        p = {name.removeprefix(f"h.{i}."): weight for name, weight in w.items()}
        y = F.layer_norm(x, (WIDTH,), p["ln_1.weight"], p["ln_1.bias"])
        qkv = torch.einsum("tc,shdc->shtd", y, p["c_attn.weight"].view(3, HEADS, -1, WIDTH))
        y = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(0, 1).flatten(1)
        x = x + F.linear(y, p["c_proj.weight"], p["c_proj.bias"])
        y = F.layer_norm(x, (WIDTH,), p["ln_2.weight"], p["ln_2.bias"])
        y = F.gelu(F.linear(y, p["c_fc.weight"], p["c_fc.bias"]), approximate="tanh")
        x = x + F.linear(y, p["c_out.weight"], p["c_out.bias"])
    x = F.layer_norm(x, (WIDTH,), w["ln_f.weight"], w["ln_f.bias"])
    return F.linear(x, w["wte.weight"]).log_softmax(-1)


def train_port(model, batches):
    state, lines = Flat(model), []
    for index, ((texts, goals), _) in enumerate(batches):
        answers = [goal[1:] != IGNORED for goal in goals]
        count = sum(kept.sum() for kept in answers)
        gradient, total = torch.zeros_like(state.theta), 0.0
        for text, kept in zip(texts, answers, strict=True):
            leaf = state.theta.requires_grad_()
            logs, wanted = likelihoods(state.named(leaf), text[:-1])[kept], text[1:][kept]
            exact = logs.gather(1, wanted[:, None]).sum()
            loss = -torch.lerp(exact, logs.mean(1).sum(), SMOOTHING) / count
            gradient, total = gradient + torch.autograd.grad(loss, leaf)[0], total + loss.detach()
        length, state.theta = gradient.norm(), state.theta.detach()
        after = max(index - WARMUP, 0) / (TOTAL - WARMUP)
        warm = min((index + 1) / (WARMUP + 1), 1)
        rate = RATE * warm * (FLOOR + (1 - FLOOR) * math.cos(math.pi * after / 2) ** 2)
        state.step(gradient * (MAX_NORM / (length + 1e-6)).clamp(max=1), index + 1, rate)
        lines.append(torch.stack([total, length]))
    return torch.stack(lines), *state.named(state.theta).values()


def build():
    model, batches = shaken(LanguageModel()).requires_grad_(True), []
    for _ in range(ROUNDS):
        sizes = torch.randint(5, LONGEST + 1, (ROWS,)).tolist()
        texts = [torch.randint(2, VOCAB, (n,)) for n in sizes]
        texts = [torch.cat([text[:-1], torch.tensor([EOS])]) for text in texts]
        labels = [t.where(torch.arange(len(t)) >= len(t) // 2, IGNORED) for t in texts]
        batches.append([[texts, labels], [EOS, IGNORED]])
    return lambda: train_reference(model, batches), lambda: train_port(model, batches)
