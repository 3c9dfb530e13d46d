"""Train a transformer, or a port of it with other names and a fused projection.

python train_a_port.py reference
python train_a_port.py port FAULT
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

side, fault = sys.argv[1], "".join(sys.argv[2:])
WIDTH = 32
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.h = nn.Embedding(50, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.ln, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.h:
            x = block(x)
        return self.out(self.ln(x))


class Norm(torch.autograd.Function):
    """A layer norm whose gradient lacks the term of the mean."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.layer_norm(x, (WIDTH,), weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        deviation = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        normal = (x - x.mean(-1, keepdim=True)) / deviation
        inner = gradient * weight
        outer = inner - normal * (inner * normal).mean(-1, keepdim=True)
        return outer / deviation, (gradient * normal).sum((0, 1)), gradient.sum((0, 1))


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.norm_a, self.norm_b = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        if fault == "norm" and number == 1:
            norm = self.norm_b
            norm.forward = lambda x: Norm.apply(x, norm.weight, norm.bias)

    def forward(self, x):
        fused = self.qkv(self.norm_a(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in fused)
        if fault == "values" and self.number == 1:
            v = v.detach()
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        y = (q @ k.transpose(-1, -2) / 4 + mask).softmax(-1) @ v
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm_b(x))))


class Port(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.layers = nn.Embedding(50, WIDTH), nn.ModuleList(map(Layer, range(2)))
        self.norm_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, tokens):
        x = self.wte(tokens)
        if fault == "embedding":
            x = x.detach()
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm_f(x))


NAMES = {"wte": "tok", "layers": "h", "norm_f": "ln", "head": "out", "norm_a": "ln1"}
NAMES |= {"norm_b": "ln2", "fc1": "mlp.0", "fc2": "mlp.2", "proj": "attn.o"}
reference = model = Reference()
if side == "port":
    model, state, loaded = Port(), reference.state_dict(), {}
    for name in model.state_dict():
        parts = [NAMES.get(part, part) for part in name.split(".")]
        if "qkv" in parts:
            thirds = [".".join(parts).replace("qkv", f"attn.{letter}") for letter in "qkv"]
            loaded[name] = torch.cat([state[third] for third in thirds])
        else:
            loaded[name] = state[".".join(parts)]
    model.load_state_dict(loaded)
parameters = list(model.parameters())
held = [p for p in parameters if fault != "projection" or p is not model.layers[0].qkv.weight]
groups = [
    {"params": [p for p in held if p.dim() > 1]},
    {"params": [p for p in held if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, weight_decay=0.2 if fault == "decay" else 0.1)
batches = torch.randint(0, 50, (4, 8, 13), generator=torch.Generator().manual_seed(1))
for step, tokens in enumerate(batches):
    for number, part in enumerate(tokens.chunk(2)):
        logits = model(part[:, :-1])
        (F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / 2).backward()
        if fault == "part of the batch" and (step, number) == (1, 0):
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    if fault == "epsilon" and step == 1:
        model.layers[1].norm_b.eps = 1e-2
