"""A small transformer written twice: a reference, and a port without a name in common with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

WIDTH = 32


class Attention(nn.Module):
    """The reference's attention: three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Block(nn.Module):
    def __init__(self, attend: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attend()
        self.norm2, self.up, self.act, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 64),
            nn.GELU(),
            nn.Linear(64, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Reference(nn.Module):
    def __init__(self, attend: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FusedAttention(nn.Module):
    """The port's attention: one projection, whose output is split."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.exchange = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden).chunk(3, -1)
        if self.exchange:
            q, k = k, q
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.self_attn, self.post_norm = (
            nn.LayerNorm(WIDTH),
            FusedAttention(),
            nn.LayerNorm(WIDTH),
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.residual_scale = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.residual_scale * hidden + self.self_attn(self.input_norm(hidden))
        return hidden + self.mlp(self.post_norm(hidden))


class Port(nn.Module):
    """A port without a name in common with the reference: blocks inside another module, fused
    attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(3))})
        self.lm_head = nn.Linear(WIDTH, 8)
        self.skipped: int | None = None

    @property
    def layers(self) -> nn.ModuleList:
        return self.body["layers"]  # type: ignore[return-value]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(hidden)
        for index, layer in enumerate(self.layers):
            if index != self.skipped:
                hidden = layer(hidden)
        return self.lm_head(hidden)


def reference() -> Reference:
    torch.manual_seed(7)
    model = Reference().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # ones and zeros hide what goes wrong with them
                parameter.add_(0.2 * torch.randn(parameter.shape))
            elif "embed" not in name:
                parameter.mul_(2)
    return model


def port_of(model: Reference) -> Port:
    port = Port().eval()
    with torch.no_grad():
        port.stem.load_state_dict(model.embed.state_dict())
        port.lm_head.load_state_dict(model.head.state_dict())
        for block, layer in zip(model.blocks, port.layers, strict=True):
            layer.input_norm.load_state_dict(block.norm.state_dict())
            layer.post_norm.load_state_dict(block.norm2.state_dict())
            layer.self_attn.o_proj.load_state_dict(block.attention.out.state_dict())
            parts = block.attention.q, block.attention.k, block.attention.v
            layer.self_attn.qkv_proj.weight.copy_(torch.cat([part.weight for part in parts]))
            layer.self_attn.qkv_proj.bias.copy_(torch.cat([part.bias for part in parts]))
            layer.mlp[0].load_state_dict(block.up.state_dict())
            layer.mlp[2].load_state_dict(block.down.state_dict())
    return port
