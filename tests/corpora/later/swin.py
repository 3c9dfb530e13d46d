"""Swin: rolled images cut into windows beside channels-first tokens gathered by an index."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

IMAGE, PATCH, WIDTH, WINDOW, CLASSES = 32, 2, 16, 4, 10
HEADS = 2, 4


class WindowAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * WINDOW - 1) ** 2, heads))
        axes = torch.meshgrid(torch.arange(WINDOW), torch.arange(WINDOW), indexing="ij")
        coords = torch.stack(axes).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + WINDOW - 1
        self.index = relative[..., 0] * (2 * WINDOW - 1) + relative[..., 1]

    def forward(self, x, mask):
        windows, size, width = x.shape
        qkv = self.qkv(x).reshape(windows, size, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index.view(-1)].view(size, size, -1).permute(2, 0, 1)
        if mask is not None:
            scores = scores.view(-1, len(mask), self.heads, size, size) + mask[:, None]
            scores = scores.view(-1, self.heads, size, size)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(windows, size, width))


def partition(x):
    batch, side, _, width = x.shape
    x = x.view(batch, side // WINDOW, WINDOW, side // WINDOW, WINDOW, width)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW * WINDOW, width)


class SwinBlock(nn.Module):
    def __init__(self, width, heads, side, shift):
        super().__init__()
        self.side, self.shift, self.mask = side, shift, None
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        if shift:
            regions, count = torch.zeros(1, side, side, 1), 0
            cuts = (slice(0, -WINDOW), slice(-WINDOW, -shift), slice(-shift, None))
            for rows in cuts:
                for columns in cuts:
                    regions[:, rows, columns] = count
                    count += 1
            ids = partition(regions)
            self.mask = -100.0 * (ids != ids.mT).float()

    def forward(self, x):
        y, grid = self.norm1(x), self.side // WINDOW
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = self.attn(partition(y), self.mask).view(-1, grid, grid, WINDOW, WINDOW, x.shape[-1])
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        corners = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.reduction(self.norm(torch.cat(corners, -1)))


class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed, self.patch_norm = nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.LayerNorm(WIDTH)
        side = IMAGE // PATCH
        self.stage0 = nn.Sequential(*(SwinBlock(WIDTH, HEADS[0], side, s) for s in (0, 2)))
        self.merge = PatchMerging(WIDTH)
        self.stage1 = nn.Sequential(*(SwinBlock(2 * WIDTH, HEADS[1], 8, s) for s in (0, 2)))
        self.norm, self.head = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, images):
        x = self.patch_norm(self.patch_embed(images).permute(0, 2, 3, 1))
        x = self.stage1(self.merge(self.stage0(x)))
        return self.head(self.norm(x).flatten(1, 2).mean(1))


class PortSwin(Functional):
    """Activations are (batch, channels, tokens)."""

    def normed(self, x, *name):
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        x = (x - mean) * (variance + 1e-5).rsqrt()
        return x * self.w(*name, "weight")[:, None] + self.w(*name, "bias")[:, None]

    def dense(self, x, *name):
        return F.conv1d(x, self.w(*name, "weight")[..., None], self.w(*name, "bias"))

    def block(self, x, side, heads, shift, *name):
        cells = torch.arange(side * side).view(1, 1, side, side).float()
        index = F.unfold(cells, WINDOW, stride=WINDOW)[0].T.long()
        row, column = index // side, index % side
        wraps = (row >= side - shift).long() + 2 * (column >= side - shift).long()
        index = (row + shift) % side * side + (column + shift) % side
        apart = wraps[:, None, :] != wraps[:, :, None]
        row, column = row[0, :, None] - row[0], column[0, :, None] - column[0]
        table = self.w(*name, "attn.table").T.view(heads, 2 * WINDOW - 1, 2 * WINDOW - 1)
        bias = table[:, row + WINDOW - 1, column + WINDOW - 1]
        qkv = self.dense(self.normed(x, *name, "norm1"), *name, "attn.qkv")[:, :, index]
        q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
        scores = torch.einsum("bhdwi,bhdwj->bhwij", q, k) / q.shape[2] ** 0.5 + bias[:, None]
        scores = scores.masked_fill(apart, -torch.inf)
        mixed = torch.einsum("bhwij,bhdwj->bhdwi", scores.softmax(-1), v).flatten(1, 2)
        back = torch.zeros_like(x)
        back[:, :, index.flatten()] = self.dense(mixed.flatten(2), *name, "attn.proj")
        x = x + back
        hidden = F.gelu(self.dense(self.normed(x, *name, "norm2"), *name, "mlp.0"))
        return x + self.dense(hidden, *name, "mlp.2")

    def forward(self, images):
        side = IMAGE // PATCH
        patches = F.unfold(images, PATCH, stride=PATCH)
        x = self.w("patch_embed.weight").flatten(1) @ patches + self.w("patch_embed.bias")[:, None]
        x = self.normed(x, "patch_norm")
        for stage in range(2):
            if stage:
                corners = F.unfold(x.unflatten(2, (side, side)), 2, stride=2)
                corners = corners.unflatten(1, (-1, 2, 2)).permute(0, 3, 2, 1, 4).flatten(1, 3)
                x = self.w("merge.reduction.weight") @ self.normed(corners, "merge.norm")
                side //= 2
            for i, shift in enumerate((0, WINDOW // 2)):
                x = self.block(x, side, HEADS[stage], shift, f"stage{stage}", i)
        pooled = self.normed(x, "norm").mean(2)
        return torch.addmm(self.w("head.bias"), pooled, self.w("head.weight").T)


def build():
    reference = shaken(Swin())
    port, images = PortSwin(reference), torch.randn(2, 3, IMAGE, IMAGE)
    return lambda: reference(images), lambda: port(images)
