"""One model written twice: `reference` or `port`, and the bugs that the port has."""

import hashlib
import sys

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

side, bugs = sys.argv[1], sys.argv[2:]
D, H, N = 32, 4, 3


class ReferenceBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (H, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Attention(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, h):
        q, k, v = (
            part(h).unflatten(-1, (H, -1)).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        mixed = (
            attend(q, k, v, scale=0.5 if self.index == 0 and "scale" in bugs else None)
            .transpose(1, 2)
            .clone()
        )
        if self.index == 0 and "head" in bugs:
            mixed[:, :, 2] *= -1
        return self.to_out(mixed.flatten(2))


class PortBlock(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.attention_norm, self.attention, self.mlp_norm = (
            nn.LayerNorm(D),
            Attention(index),
            nn.LayerNorm(D),
        )
        act = nn.SiLU() if index == 1 and "act" in bugs else nn.GELU()
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), act, nn.Linear(2 * D, D))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        if self.index == 2 and "residual" in bugs:
            x = x * 1.1
        return x + self.mlp(self.mlp_norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, D), nn.Linear(D, 8)
        if side == "reference":
            self.layers = nn.ModuleList(ReferenceBlock() for _ in range(N))
        else:
            self.blocks = nn.ModuleList(PortBlock(index) for index in range(N))

    def forward(self, x):
        x = self.embed(x)
        for block in self.layers if side == "reference" else self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model = Net()
names = {
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "query": "attention.to_q",
    "key": "attention.to_k",
    "value": "attention.to_v",
    "out": "attention.to_out",
    "up": "mlp.0",
    "down": "mlp.2",
}
order = [f"layers.{n}.{name}" for n in range(N) for name in names] + ["embed", "head"]
for full in order:
    path = full.split(".")
    if side == "port" and path[0] == "layers":
        full = f"blocks.{path[1]}.{names[path[2]]}"
    for parameter in model.get_submodule(full).parameters():
        parameter.data = torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5 + (
            parameter.dim() == 1
        )
if side == "port" and "weight" in bugs:
    model.get_submodule("blocks.2.attention.to_v").weight.data *= 1.2
model.to(torch.bfloat16 if "bf16" in bugs else torch.float32)
x = torch.randn(2, 6, 8).to(model.head.weight.dtype)
if "train" in bugs:
    y = model(x)
    y.float().square().sum().backward()
    print("grad", all(parameter.grad is not None for parameter in model.parameters()))
else:
    with torch.inference_mode():
        for step in range(-2 if "warm" in bugs else 0, 2):
            y = model(x + step)
numbers = y.detach().float().numpy().tobytes() + torch.get_rng_state().numpy().tobytes()
print(hashlib.sha256(numbers).hexdigest())
