"""DETR: a detection transformer beside fused attention inputs over flattened pixels."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, HEADS, QUERIES, CLASSES, LAYERS = 16, 2, 5, 4, 2


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, channels):
        super().__init__()
        lows = {"weight": 0.9, "bias": -0.2, "running_mean": -0.4, "running_var": 0.05}
        for name, low in lows.items():
            self.register_buffer(name, low + 0.6 * torch.rand(channels))

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


def sine_positions(mask):
    y_embed, x_embed = (~mask).float().cumsum(1), (~mask).float().cumsum(2)
    y_embed = y_embed / (y_embed[:, -1:, :] + 1e-6) * 2 * math.pi
    x_embed = x_embed / (x_embed[:, :, -1:] + 1e-6) * 2 * math.pi
    dim_t = torch.arange(WIDTH // 2, dtype=torch.float32)
    dim_t = 10000 ** (2 * (dim_t // 2) / (WIDTH // 2))
    pos_x, pos_y = x_embed[..., None] / dim_t, y_embed[..., None] / dim_t
    pos_x = torch.stack((pos_x[..., 0::2].sin(), pos_x[..., 1::2].cos()), dim=4).flatten(3)
    pos_y = torch.stack((pos_y[..., 0::2].sin(), pos_y[..., 1::2].cos()), dim=4).flatten(3)
    return torch.cat((pos_y, pos_x), dim=3).permute(0, 3, 1, 2)


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.multihead_attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, tgt, memory, pos, query_pos, mask):
        q = k = tgt + query_pos
        tgt = self.norm1(tgt + self.self_attn(q, k, value=tgt)[0])
        q, k = tgt + query_pos, memory + pos
        tgt = self.norm2(tgt + self.multihead_attn(q, k, value=memory, key_padding_mask=mask)[0])
        return self.norm3(tgt + self.linear2(F.relu(self.linear1(tgt))))


class Detr(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)
        self.bn1, self.bn2 = FrozenBatchNorm2d(8), FrozenBatchNorm2d(12)
        self.input_proj, self.query_embed = nn.Conv2d(12, WIDTH, 1), nn.Embedding(QUERIES, WIDTH)
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm, self.class_embed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES + 1)
        self.bbox_embed = nn.ModuleList(nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 4))

    def forward(self, images, mask, sizes):
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(images))))))
        mask = F.interpolate(mask[None].float(), size=x.shape[-2:]).bool()[0]
        pos = sine_positions(mask).flatten(2).permute(2, 0, 1)
        src, mask = self.input_proj(x).flatten(2).permute(2, 0, 1), mask.flatten(1)
        query_pos = self.query_embed.weight.unsqueeze(1).repeat(1, len(images), 1)
        tgt = torch.zeros_like(query_pos)
        for layer in self.decoder:
            tgt = layer(tgt, src, pos, query_pos, mask)
        hs = self.norm(tgt).transpose(0, 1)
        scores, boxes = self.class_embed(hs).softmax(-1)[..., :-1], hs
        for i, layer in enumerate(self.bbox_embed):
            boxes = F.relu(layer(boxes)) if i < 2 else layer(boxes).sigmoid()
        cx, cy, w, h = boxes.unbind(-1)
        corners = [cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h]
        return scores, torch.stack(corners, dim=-1) * sizes.flip(1).repeat(1, 2)[:, None, :]


class PortDetr(Functional):
    def dense(self, x, *name):
        return F.linear(x, self.w(*name, "weight"), self.w(*name, "bias"))

    def normed(self, x, *name):
        return F.layer_norm(x, (WIDTH,), self.w(*name, "weight"), self.w(*name, "bias"))

    def convolved(self, x, i):
        gain = self.w(f"bn{i}.weight") / (self.w(f"bn{i}.running_var") + 1e-5).sqrt()
        offset = self.w(f"bn{i}.bias") - self.w(f"bn{i}.running_mean") * gain
        return F.conv2d(x, self.w(f"conv{i}.weight") * gain.view(-1, 1, 1, 1), offset, 2, 1).relu()

    def waves(self, count, axis):
        phase = count * (2 * math.pi / (count.amax(axis, keepdim=True) + 1e-6))
        rates = torch.exp(torch.arange(0, WIDTH // 2, 2) * (-math.log(10000) / (WIDTH // 2)))
        angles = phase.flatten(1).unsqueeze(-1) * rates
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)

    def mix(self, q, k, v, padding, *name):
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in (q, k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q * (WIDTH // HEADS) ** -0.5, k)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], -math.inf)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return self.dense(mixed.flatten(2), *name, "out_proj")

    def attend(self, x, places, *name):
        weight, bias = self.w(*name, "in_proj_weight"), self.w(*name, "in_proj_bias")
        qkv = F.linear(x, weight, bias)
        qkv[..., : 2 * WIDTH] += F.linear(places, weight[: 2 * WIDTH])
        return x + self.mix(*qkv.chunk(3, -1), None, *name)

    def cross(self, x, places, memory, pixels, padding, *name):
        weight, bias = self.w(*name, "in_proj_weight"), self.w(*name, "in_proj_bias")
        q = F.linear(x + places, weight[:WIDTH], bias[:WIDTH])
        k, v = F.linear(memory, weight[WIDTH:], bias[WIDTH:]).chunk(2, -1)
        k = k + F.linear(pixels, weight[WIDTH : 2 * WIDTH])
        return x + self.mix(q, k, v, padding, *name)

    def forward(self, images, mask, sizes):
        features = self.convolved(self.convolved(images, 1), 2).flatten(2).transpose(1, 2)
        padding = mask[:, ::4, ::4]
        rows, columns = (self.waves((~padding).cumsum(axis), axis) for axis in (1, 2))
        pixels, padding = torch.cat([rows, columns], -1), padding.flatten(1)
        memory = F.linear(features, self.input_proj_weight[:, :, 0, 0], self.input_proj_bias)
        x, slots = images.new_zeros(len(images), QUERIES, WIDTH), self.query_embed_weight
        for i in range(LAYERS):
            x = self.normed(self.attend(x, slots, "decoder", i, "self_attn"), "decoder", i, "norm1")
            x = self.cross(x, slots, memory, pixels, padding, "decoder", i, "multihead_attn")
            x = self.normed(x, "decoder", i, "norm2")
            hidden = self.dense(x, "decoder", i, "linear1").relu()
            x = self.normed(x + self.dense(hidden, "decoder", i, "linear2"), "decoder", i, "norm3")
        x = self.normed(x, "norm")
        scores = self.dense(x, "class_embed").softmax(-1)[:, :, :CLASSES]
        hidden = self.dense(self.dense(x, "bbox_embed.0").relu(), "bbox_embed.1").relu()
        center, extent = self.dense(hidden, "bbox_embed.2").sigmoid().split(2, -1)
        corners = torch.cat([center - extent / 2, center + extent / 2], -1)
        return scores, corners * sizes[:, [1, 0, 1, 0]].unsqueeze(1)


def build():
    reference = shaken(Detr())
    images, mask = 3 * torch.randn(2, 3, 24, 20), torch.ones(2, 24, 20, dtype=torch.bool)
    mask[0, :, :16], mask[1, :16] = False, False
    images.masked_fill_(mask[:, None], 0.0)
    sizes, port = torch.tensor([[1.5, 1.0], [1.0, 1.25]]), PortDetr(reference)
    return lambda: reference(images, mask, sizes), lambda: port(images, mask, sizes)
