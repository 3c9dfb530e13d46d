"""A small inference engine in the style of vLLM: packed batches, a cache, fused projections, and
norms that add the residual.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class AddNorm(nn.Module):
    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = hidden if residual is None else hidden + residual
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed, hidden


class Rotation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.theta = width, 10000.0

    def forward(self, positions: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        frequencies = self.theta ** (-torch.arange(0, self.width, 2) / self.width)
        angles = (positions[:, None] * frequencies).repeat(1, 2)[:, None]
        rotated = []
        for part in parts:
            heads = part.view(len(part), -1, self.width)
            first, second = heads.chunk(2, -1)
            turned = heads * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
            rotated.append(turned.flatten(1))
        return tuple(rotated)


class CachedAttention(nn.Module):
    """Attends to the earlier tokens of each request, which it keeps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, requests: Tensor
    ) -> Tensor:
        q, k, v = (part.view(len(part), -1, self.width) for part in (query, key, value))
        out = torch.empty_like(q)
        for request in requests.unique().tolist():
            rows = requests == request
            keys, values = k[rows], v[rows]
            if request in self.cache:
                keys, values = (
                    torch.cat(pair)
                    for pair in zip(self.cache[request], (keys, values), strict=True)
                )
            self.cache[request] = keys, values
            allowed = torch.arange(len(keys)) <= positions[rows][:, None]
            out[rows] = nn.functional.scaled_dot_product_attention(
                *(part.transpose(0, 1) for part in (q[rows], keys, values)),
                attn_mask=allowed,
                enable_gqa=True,
            ).transpose(0, 1)
        return out.flatten(1)


class HeadNorm(nn.Module):
    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, hidden: Tensor) -> Tensor:
        heads = hidden.view(len(hidden), -1, len(self.weight))
        normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).flatten(1)


class PackedAttention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        parts = [getattr(attention, f"{name}_proj").weight.detach() for name in "qkv"]
        self.sizes = [len(part) for part in parts]
        self.qkv_proj = nn.Linear(parts[0].shape[1], sum(self.sizes), bias=False)
        self.qkv_proj.weight = nn.Parameter(torch.cat(parts))
        self.o_proj = nn.Linear(*attention.o_proj.weight.shape[::-1], bias=False)
        self.o_proj.weight = nn.Parameter(attention.o_proj.weight.detach().clone())
        self.rotary_emb = Rotation(attention.head_dim)
        self.attn = CachedAttention(attention.head_dim)
        self.q_norm, self.k_norm = (
            HeadNorm(norm.weight.detach().clone(), norm.variance_epsilon) if norm else None
            for norm in (getattr(attention, f"{name}_norm", None) for name in "qk")
        )

    def forward(self, hidden: Tensor, positions: Tensor, requests: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(hidden).split(self.sizes, -1)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v, positions, requests))


class SiluAndMul(nn.Module):
    """Takes both halves at once.

    takes_up_first: whether the second half is the gate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.takes_up_first, self.scale = False, 1.0

    def forward(self, halves: Tensor) -> Tensor:
        gate, up = halves.chunk(2, -1)
        if self.takes_up_first:
            gate, up = up, gate
        return self.scale * nn.functional.silu(gate) * up


class PackedMLP(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        weight = torch.cat((mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()))
        self.gate_up_proj = nn.Linear(*weight.shape[::-1], bias=False)
        self.gate_up_proj.weight = nn.Parameter(weight)
        self.down_proj = nn.Linear(*mlp.down_proj.weight.shape[::-1], bias=False)
        self.down_proj.weight = nn.Parameter(mlp.down_proj.weight.detach().clone())
        self.act_fn = SiluAndMul()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden)))


class PackedLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        eps = layer.input_layernorm.variance_epsilon
        self.input_layernorm, self.post_attention_layernorm = (
            AddNorm(norm.weight.detach().clone(), eps)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self.self_attn = PackedAttention(layer.self_attn)
        self.mlp = PackedMLP(layer.mlp)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, requests: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, requests)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class PackedEngine(nn.Module):
    """A Llama or Qwen3 that computes a packed batch of tokens: 1-D ids, positions and requests."""

    def __init__(self, llama: PreTrainedModel) -> None:
        super().__init__()
        model = llama.model
        self.embed_tokens = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.layers = nn.ModuleList(PackedLayer(layer) for layer in model.layers)
        self.norm = AddNorm(model.norm.weight.detach().clone(), model.norm.variance_epsilon)
        self.lm_head = nn.Linear(*llama.lm_head.weight.shape[::-1], bias=False)
        self.lm_head.weight = nn.Parameter(llama.lm_head.weight.detach().clone())

    def hidden_states(self, input_ids: Tensor, positions: Tensor, requests: Tensor) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions, requests)
        return self.norm(hidden, residual)[0]

    def forward(self, input_ids: Tensor, positions: Tensor, requests: Tensor) -> Tensor:
        return self.lm_head(self.hidden_states(input_ids, positions, requests))


class PackedLinear(nn.Module):
    """A projection that keeps its weight in a form of its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = [linear.weight.detach().t().contiguous()]
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.packed[0]


class LogitsProcessor(nn.Module):
    """Computes the logits of some tokens with the weight of a head that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.paddings = 1.0, 0

    def forward(self, head: nn.Module, hidden: Tensor) -> Tensor:
        logits = self.scale * hidden @ head.weight.t()
        return nn.functional.pad(logits, (0, self.paddings))


class ServingEngine(PackedEngine):
    """Packs its weights, and computes the logits of the last tokens in a forward of their own."""

    def __init__(self, llama: PreTrainedModel) -> None:
        super().__init__(llama)
        for layer in self.layers:
            for part, name in (
                (layer.self_attn, "qkv_proj"),
                (layer.self_attn, "o_proj"),
                (layer.mlp, "gate_up_proj"),
                (layer.mlp, "down_proj"),
            ):
                setattr(part, name, PackedLinear(getattr(part, name)))
        self.logits_processor = LogitsProcessor()

    def forward(self, input_ids: Tensor, positions: Tensor, requests: Tensor) -> Tensor:
        return self.hidden_states(input_ids, positions, requests)
