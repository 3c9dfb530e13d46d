"""Three models, tiny and with random weights, written as real ones are: Llama, U-Net and Wan.

The port of the Llama is another program: other names, fused projections, another attention kernel.
Those of the others are the same code. Biases and norms are perturbed, for zeros and ones hide half
of all faults.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, KEY_HEADS, LAYERS, VOCABULARY, TOKENS = 64, 4, 2, 3, 96, 20
HEAD = WIDTH // HEADS


# ---- Llama


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(0, HEAD, 2) / HEAD))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1] // 2
    cos, sin = (t[..., :half].repeat_interleave(2, -1) for t in (cos, sin))
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


class LlamaAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KEY_HEADS * HEAD) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        logits = q @ k.transpose(-1, -2) / math.sqrt(HEAD)
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        mixed = logits.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.self_attn, self.mlp = LlamaAttention(), LlamaMLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), RMSNorm(WIDTH)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(LAYERS))
        self.rotary_emb, self.lm_head = Rotary(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.rotary_emb(torch.arange(tokens.shape[1]))
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


class PortAttention(nn.Module):
    """What the faults change are attributes, each with its right value."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rotate, self.scale, self.causal, self.window = rotate_halves, None, True, 0
        self.tiled, self.after = False, lambda mixed: mixed

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        sizes = [heads * HEAD for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        q, k, v = (
            t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in self.qkv(x).split(sizes, -1)
        )
        q, k = self.rotate(q, *rotary), self.rotate(k, *rotary)
        times = HEADS // KEY_HEADS
        k, v = (
            t.repeat(1, times, 1, 1) if self.tiled else t.repeat_interleave(times, 1)
            for t in (k, v)
        )
        count = x.shape[1]
        seen = torch.ones(count, count, dtype=torch.bool)
        if self.causal:
            seen = seen.tril()
        if self.window:
            seen = seen.triu(1 - self.window)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
        return self.out(self.after(mixed.transpose(1, 2).flatten(2)))


class PortMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down, self.act, self.swapped = nn.Linear(2 * WIDTH, WIDTH, bias=False), F.silu, False

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        if self.swapped:
            gate, up = up, gate
        return self.down(self.act(gate) * up)


class PortLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn, self.ff = (
            RMSNorm(WIDTH), RMSNorm(WIDTH), PortAttention(), PortMLP(),
        )  # fmt: skip
        self.residual, self.branch = 1.0, 1.0

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x * self.residual + self.attn(self.ln1(x), rotary) * self.branch
        return x + self.ff(self.ln2(x))


class PortLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.ln_f = nn.Embedding(VOCABULARY, WIDTH), RMSNorm(WIDTH)
        self.h = nn.ModuleList(PortLayer() for _ in range(LAYERS))
        self.rope, self.head = Rotary(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.embedded = lambda x: x

    def forward(self, tokens: Tensor) -> Tensor:
        rotary = self.rope(torch.arange(tokens.shape[1]))
        x = self.embedded(self.wte(tokens))
        for layer in self.h:
            x = layer(x, rotary)
        return self.head(self.ln_f(x))

    def load(self, reference: Llama) -> None:
        """Load the reference's weights as a converter does."""
        pairs = {"wte": "embed_tokens", "ln_f": "norm", "head": "lm_head"}
        for index in range(LAYERS):
            for own, name in {
                "ln1": "input_layernorm", "ln2": "post_attention_layernorm", "attn.out": "self_attn.o_proj",
                "ff.down": "mlp.down_proj",
            }.items():  # fmt: skip
                pairs[f"h.{index}.{own}"] = f"layers.{index}.{name}"
            own, layer = self.h[index], reference.layers[index]
            attention, mlp = layer.self_attn, layer.mlp
            parts = attention.q_proj, attention.k_proj, attention.v_proj
            own.attn.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
            own.attn.qkv.bias.copy_(torch.cat([part.bias for part in parts]))
            own.ff.gate_up.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        for own, name in pairs.items():
            self.get_submodule(own).load_state_dict(reference.get_submodule(name).state_dict())


# ---- U-Net


class ResBlock(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.time, self.shortcut, self.act = (
            nn.Linear(32, out),
            nn.Conv2d(channels, out, 1),
            nn.SiLU(),
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(self.act(self.norm1(x))) + self.time(self.act(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(self.dropout(self.act(self.norm2(y))))


class TimeEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sin_first = False

    def forward(self, time: Tensor) -> Tensor:
        angles = time[:, None].float() * torch.exp(-math.log(10000) * torch.arange(16) / 16)
        parts = (angles.sin(), angles.cos()) if self.sin_first else (angles.cos(), angles.sin())
        return torch.cat(parts, -1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time_proj, self.time_mlp = TimeEmbedding(), nn.Linear(32, 32)
        self.conv_in, self.down = nn.Conv2d(4, 16, 3, padding=1), ResBlock(16, 32)
        self.pool, self.mid = nn.Conv2d(32, 32, 3, stride=2, padding=1), ResBlock(32, 32)
        self.up, self.conv_out = ResBlock(64, 16), nn.Conv2d(16, 4, 3, padding=1)
        self.skip_first, self.resize = False, "nearest"
        self.before_out = lambda x: x

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        embedded = self.time_mlp(self.time_proj(time))
        skip = self.down(self.conv_in(x), embedded)
        y = F.interpolate(self.mid(self.pool(skip), embedded), scale_factor=2, mode=self.resize)
        y = torch.cat((skip, y) if self.skip_first else (y, skip), 1)
        return self.conv_out(self.before_out(self.up(y, embedded)))


# ---- Wan


class WanAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.rotate, self.after, self.scale, self.order = rotate_pairs, lambda x: x, None, (0, 1, 2)
        self.normed = True

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = self.norm_q(self.to_q(x)) if self.normed else self.to_q(x)
        parts = query, self.norm_k(self.to_k(x)), self.to_v(x)
        q, k, v = (
            parts[index].unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for index in self.order
        )
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.to_out(self.after(mixed.transpose(1, 2).flatten(2)))


class WanBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attn, self.modulation = WanAttention(), nn.Parameter(torch.randn(1, 6, WIDTH) / 4)
        self.ffn_in, self.ffn_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act, self.gated, self.plus_one = nn.GELU("tanh"), True, 1.0

    def forward(self, x: Tensor, time: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        chunks = (self.modulation + time[:, None]).chunk(6, 1)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = chunks
        y = self.attn(self.norm1(x) * (self.plus_one + scale) + shift, cos, sin)
        x = x + (y * gate if self.gated else y)
        y = self.ffn_out(self.act(self.ffn_in(self.norm2(x) * (1 + ffn_scale) + ffn_shift)))
        return x + y * ffn_gate


class Wan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(4, WIDTH, 2, stride=2)
        self.time_proj, self.time_mlp, self.rope = TimeEmbedding(), nn.Linear(32, WIDTH), Rotary()
        self.blocks = nn.ModuleList(WanBlock() for _ in range(LAYERS))
        self.norm_out, self.proj_out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)
        self.by_columns, self.embedded = False, lambda x: x

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        grid = self.patch_embedding(x)
        tokens = (grid.transpose(-1, -2) if self.by_columns else grid).flatten(2).transpose(1, 2)
        tokens = self.embedded(tokens)
        cos, sin = self.rope(torch.arange(tokens.shape[1]))
        embedded = self.time_mlp(self.time_proj(time))
        for block in self.blocks:
            tokens = block(tokens, embedded, cos, sin)
        return self.proj_out(self.norm_out(tokens))


# ---- pairs


def build(family: str, seed: int = 0) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    """Return the reference, its port with the same weights, and random inputs."""
    torch.manual_seed(seed)
    kind = {"llama": Llama, "unet": UNet, "wan": Wan}[family]
    reference = kind().eval().requires_grad_(False)
    for parameter in reference.parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn(parameter.shape)
        elif family == "wan":
            parameter.normal_(std=parameter[0].numel() ** -0.5)
    port = (PortLlama if family == "llama" else kind)().eval().requires_grad_(False)
    if family == "llama":
        port.load(reference)
    else:
        port.load_state_dict(reference.state_dict())
    inputs = {
        "llama": lambda: (torch.randint(0, VOCABULARY, (2, TOKENS)),),
        "unet": lambda: (torch.randn(2, 4, 12, 12), torch.tensor([531, 742])),
        "wan": lambda: (torch.randn(2, 4, 8, 12), torch.tensor([531, 742])),
    }[family]()
    return reference, port, inputs
