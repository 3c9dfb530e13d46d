"""A gated delta net: chunks with a triangular solve beside a recurrence of one token after another."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, KEYS, VALUES, DK, DV, KERNEL, CHUNK, LENGTH, EPS = 32, 2, 4, 8, 12, 4, 8, 21, 1e-6
KEY_DIM, VALUE_DIM = KEYS * DK, VALUES * DV


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + self.weight)


def l2norm(x):
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def chunk_gated_delta_rule(query, key, value, g, beta):
    tensors = (l2norm(query) * DK**-0.5, l2norm(key), value, beta[..., None], g[..., None])
    padded = (F.pad(x.transpose(1, 2), (0, 0, 0, -LENGTH % CHUNK)) for x in tensors)
    query, key, value, beta, g = (x.unflatten(2, (-1, CHUNK)) for x in padded)
    v_beta, k_beta, g = value * beta, key * beta, g.squeeze(-1).cumsum(dim=-1)
    mask = torch.triu(torch.ones(CHUNK, CHUNK, dtype=torch.bool))
    decay_mask = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    attn = -((k_beta @ key.transpose(-1, -2)) * decay_mask).masked_fill(mask, 0)
    for i in range(1, CHUNK):
        row, sub = attn[..., i, :i].clone(), attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    attn = attn + torch.eye(CHUNK)
    value, k_cumdecay = attn @ v_beta, attn @ (k_beta * g.exp().unsqueeze(-1))
    state, outputs = query.new_zeros(len(query), VALUES, DK, DV), []
    for i in range(query.shape[2]):
        q_i, k_i, g_i = query[:, :, i], key[:, :, i], g[:, :, i]
        attn = (q_i @ k_i.transpose(-1, -2)) * decay_mask[:, :, i]
        v_new = value[:, :, i] - k_cumdecay[:, :, i] @ state
        outputs.append((q_i * g_i[..., None].exp()) @ state + attn @ v_new)
        k_i = k_i * (g_i[..., -1:] - g_i).exp()[..., None]
        state = state * g_i[..., -1, None, None].exp() + k_i.transpose(-1, -2) @ v_new
    return torch.cat(outputs, dim=2)[:, :, :LENGTH].transpose(1, 2)


class GatedDeltaNet(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = 2 * KEY_DIM + VALUE_DIM, VALUE_DIM, VALUES, VALUES
        projections = (nn.Linear(WIDTH, size, bias=False) for size in sizes)
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = projections
        self.conv1d = nn.Conv1d(sizes[0], sizes[0], KERNEL, groups=sizes[0], padding=KERNEL - 1)
        self.dt_bias, self.A_log = map(nn.Parameter, (torch.ones(VALUES), torch.rand(VALUES)))
        self.norm, self.out_proj = nn.RMSNorm(DV, eps=EPS), nn.Linear(VALUE_DIM, WIDTH, bias=False)

    def forward(self, x):
        mixed = F.silu(self.conv1d(self.in_proj_qkv(x).transpose(1, 2))[:, :, :LENGTH])
        parts = mixed.transpose(1, 2).split([KEY_DIM, KEY_DIM, VALUE_DIM], dim=-1)
        query, key = (part.unflatten(-1, (KEYS, DK)) for part in parts[:2])
        value = parts[2].unflatten(-1, (VALUES, DV))
        beta, z = self.in_proj_b(x).sigmoid(), self.in_proj_z(x).unflatten(-1, (VALUES, DV))
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        query, key = (t.repeat_interleave(VALUES // KEYS, dim=2) for t in (query, key))
        core = chunk_gated_delta_rule(query, key, value, g, beta)
        return self.out_proj((self.norm(core) * F.silu(z)).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.mixer = RMSNorm(), GatedDeltaNet()

    def forward(self, x):
        return x + self.mixer(self.input_layernorm(x))


class Engine(Functional):
    def norm(self, x, *name):
        return F.rms_norm(x, (WIDTH,), 1 + self.w(*name, "weight"), EPS)

    def mix(self, x, *name):
        rows = [self.w(*name, f"in_proj_{part}", "weight") for part in ("qkv", "z", "b", "a")]
        wide, z, strength, rate = (x @ torch.cat(rows).T).split([len(row) for row in rows], -1)
        taps, queue = self.w(*name, "conv1d.weight")[:, 0].T, F.pad(wide, (0, 0, KERNEL - 1, 0))
        wide = sum(taps[j] * queue[:, j : j + LENGTH] for j in range(KERNEL))
        wide = F.silu(wide + self.w(*name, "conv1d.bias"))
        qk, value = wide[..., : 2 * KEY_DIM].unflatten(2, (2, KEYS, DK)), wide[..., 2 * KEY_DIM :]
        qk = qk * (qk.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        query, key = qk[:, :, 0] / DK**0.5, qk[:, :, 1]
        value = value.unflatten(2, (KEYS, -1, DV))
        decay = F.softplus(rate + self.w(*name, "dt_bias")) * self.w(*name, "A_log").exp()
        keep, strength = ((-decay).exp(), strength.sigmoid())
        keep, strength = (t.unflatten(2, (KEYS, -1, 1)) for t in (keep, strength))
        memory, said = x.new_zeros(len(x), KEYS, VALUES // KEYS, DV, DK), []
        for t in range(LENGTH):
            memory = memory * keep[:, t, ..., None]
            known = torch.einsum("nghvk,ngk->nghv", memory, key[:, t])
            news = strength[:, t] * (value[:, t] - known)
            memory = memory + news[..., None] * key[:, t, :, None, None]
            said.append(torch.einsum("nghvk,ngk->nghv", memory, query[:, t]))
        said = F.rms_norm(torch.stack(said, 1), (DV,), self.w(*name, "norm.weight"), EPS)
        return (said.flatten(2) * F.silu(z)) @ self.w(*name, "out_proj.weight").T

    def forward(self, x):
        for i in "01":
            x = x + self.mix(self.norm(x, i, "input_layernorm"), i, "mixer")
        return x


def build():
    reference = shaken(nn.Sequential(Block(), Block()))
    port, x = Engine(reference), torch.randn(2, LENGTH, WIDTH)
    return lambda: reference(x), lambda: port(x)
