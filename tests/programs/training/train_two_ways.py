"""Train a small transformer for four steps: as the reference does, or with the named difference."""

import sys

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

kind = sys.argv[1]
torch.manual_seed(0)


class Scale(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Square(torch.autograd.Function):
    """The square of a ReLU."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.relu() * (1 if kind == "backward of an activation" else 2)


class SquaredRelu(nn.Module):
    def forward(self, x):
        return Square.apply(x)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if kind == "detached keys":
            k = k.detach()
        backend = SDPBackend.FLASH_ATTENTION if kind == "another kernel" else SDPBackend.MATH
        with sdpa_kernel(backend):
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, number):
        super().__init__()
        self.number = number
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.act = nn.LayerNorm(width), SquaredRelu()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        skip = x.detach() if kind == "detached residual" and self.number == 1 else x
        x = skip + self.attn(self.norm1(x))
        hidden = self.up(self.norm2(x))
        if kind == "hook between modules" and self.number == 0:
            hidden = Scale.apply(hidden, 3.0)
        return x + self.down(self.act(hidden))


class Transformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width, number) for number in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50, bias=False)
        if kind in ("tied", "untied"):
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if kind == "checkpointed":
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


model = Transformer()
if kind == "untied":
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
if kind == "hook on a parameter":
    model.blocks[1].attn.v.weight.register_hook(lambda gradient: gradient * 0.5)
if kind == "frozen":
    model.blocks[0].norm2.requires_grad_(False)

parameters = list(model.named_parameters())
decayed = [p for name, p in parameters if p.dim() > 1]
others = [p for name, p in parameters if p.dim() < 2]
if kind == "not held":
    others = [p for name, p in parameters if p.dim() < 2 and name != "blocks.1.up.bias"]
decays = {"decay": 0.05, "decay below rounding": 0.10001}
if kind == "decay of biases":
    groups = [{"params": decayed + others, "weight_decay": 0.1}]
else:
    groups = [
        {"params": decayed, "weight_decay": decays.get(kind, 0.1)},
        {"params": others, "weight_decay": 0.0},
    ]
settings = {"lr": 1e-3, "betas": (0.9, 0.95)}
settings |= {
    "rate": {"lr": 2e-3},
    "betas": {"betas": (0.9, 0.999)},
    "eps": {"eps": 1e-4},
    "amsgrad": {"amsgrad": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
}.get(kind, {})
make = torch.optim.Adam if kind == "coupled decay" else torch.optim.AdamW
if kind.startswith("sgd"):
    groups = [{"params": decayed + others}]
    momentum = 0.5 if kind == "sgd momentum" else 0.9
    optimizer = torch.optim.SGD(groups, 0.1, momentum=momentum)
else:
    optimizer = make(groups, **settings)
gamma = 0.8 if kind == "schedule" else 0.9
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
batches = torch.randint(0, 50, (5, 8, 13), generator=torch.Generator().manual_seed(1))
accumulated = {"accumulated": 4, "accumulated sum": 4}.get(kind, 1)
for step in range(4):
    tokens = batches[step + (kind == "batch" and step == 2)]
    for part in tokens.chunk(accumulated):
        logits = model(part[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        if kind == "accumulated":
            loss = loss / accumulated
        if kind.startswith("loss scale"):
            loss = 8 * loss
        if kind == "loss":
            loss = loss * 12 / 13
        if kind == "smoothed loss":
            target = part[:, 1:].flatten()
            loss = cross_entropy(logits.flatten(0, 1), target, label_smoothing=0.1)
        loss.backward()
    if kind.startswith("loss scale"):
        is_kept = kind == "loss scale of a parameter"
        kept = model.blocks[1].attn.v.weight if is_kept else None
        for parameter in model.parameters():
            if parameter is not kept:
                parameter.grad /= 8
    max_norm = {"clipped": 0.1, "clipped to another norm": 0.2}.get(kind)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if kind == "resume" and step == 2:
        optimizer = make(groups, **settings | {"lr": optimizer.param_groups[0]["lr"]})
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
