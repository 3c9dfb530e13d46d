"""Mamba: a recurrence beside a scan by doubling, a depthwise convolution beside windows."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, INNER, STATE, RANK, KERNEL = 24, 32, 8, 4, 4


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class MambaBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.in_proj = RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv1d = nn.Conv1d(INNER, INNER, KERNEL, groups=INNER, padding=KERNEL - 1)
        self.x_proj = nn.Linear(INNER, RANK + 2 * STATE, bias=False)
        self.dt_proj, self.out_proj = nn.Linear(RANK, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.A_log = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(INNER, 1))
        self.D = nn.Parameter(torch.ones(INNER))

    def forward(self, hidden):
        x, z = self.in_proj(self.norm(hidden)).chunk(2, -1)
        x = self.conv1d(x.transpose(1, 2))[..., : x.shape[1]]
        x = F.silu(x).transpose(1, 2)
        dt, b, c = self.x_proj(x).split([RANK, STATE, STATE], -1)
        dt = F.softplus(self.dt_proj(dt))
        a = -torch.exp(self.A_log)
        state, outputs = x.new_zeros(x.shape[0], INNER, STATE), []
        for t in range(x.shape[1]):
            decay = torch.exp(dt[:, t, :, None] * a)
            state = decay * state + dt[:, t, :, None] * b[:, t, None] * x[:, t, :, None]
            outputs.append((state * c[:, t, None]).sum(-1))
        y = torch.stack(outputs, 1) + x * self.D
        return hidden + self.out_proj(y * F.silu(z))


class Mamba(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers, self.norm_f = nn.ModuleList(MambaBlock() for _ in range(2)), RMSNorm(WIDTH)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm_f(hidden) @ self.embedding.weight.T


class PortMamba(Functional):
    def block(self, i, hidden):
        normed = F.rms_norm(hidden, (WIDTH,), self.w("layers", i, "norm.weight"), 1e-5)
        weight_x, weight_z = self.w("layers", i, "in_proj.weight").chunk(2)
        x = F.linear(normed, weight_x)
        windows = F.pad(x, (0, 0, KERNEL - 1, 0)).unfold(1, KERNEL, 1)
        x = torch.einsum("blck,ck->blc", windows, self.w("layers", i, "conv1d.weight")[:, 0])
        x = F.silu(x + self.w("layers", i, "conv1d.bias"))
        projected = F.linear(x, self.w("layers", i, "x_proj.weight"))
        rank, b, c = projected[..., :RANK], projected[..., RANK:-STATE], projected[..., -STATE:]
        dt = F.linear(
            rank, self.w("layers", i, "dt_proj.weight"), self.w("layers", i, "dt_proj.bias")
        )
        dt = F.softplus(dt)
        decay = torch.exp(-dt.unsqueeze(-1) * self.w("layers", i, "A_log").exp())
        state = torch.einsum("bli,bls->blis", dt * x, b)
        step = 1
        while step < x.shape[1]:
            earlier = F.pad(state, (0, 0, 0, 0, step, 0))[:, : x.shape[1]]
            state = state + decay * earlier
            decay = decay * F.pad(decay, (0, 0, 0, 0, step, 0), value=1.0)[:, : x.shape[1]]
            step *= 2
        y = torch.einsum("blis,bls->bli", state, c)
        y = torch.addcmul(y, x, self.w("layers", i, "D"))
        gate = F.silu(F.linear(normed, weight_z))
        return torch.baddbmm(
            hidden, y * gate, self.w("layers", i, "out_proj.weight").T.expand(len(y), -1, -1)
        )

    def forward(self, ids):
        stream = F.embedding(ids, self.embedding_weight)
        for i in range(2):
            stream = self.block(i, stream)
        stream = F.rms_norm(stream, (WIDTH,), self.norm_f_weight, 1e-5)
        return torch.einsum("blw,vw->blv", stream, self.embedding_weight)


def build():
    reference = shaken(Mamba())
    port, tokens = PortMamba(reference), torch.randint(0, 50, (2, 13))
    return lambda: reference(tokens), lambda: port(tokens)
