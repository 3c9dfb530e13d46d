"""SAM's image encoder: windows of maps with added biases beside gathered tokens and longer keys."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, HEADS, OUT, PATCH, WINDOW, TRAINED = 24, 2, 16, 4, 4, 8
GRID, CELLS, PADDED, DIM, WINDOWED = (7, 10), 70, (8, 12), WIDTH // HEADS, (True, False, True)


def window_partition(x):
    x = F.pad(x, (0, 0, 0, PADDED[1] - GRID[1], 0, PADDED[0] - GRID[0]))
    x = x.unflatten(2, (-1, WINDOW)).unflatten(1, (-1, WINDOW))
    return x.transpose(2, 3).reshape(-1, WINDOW, WINDOW, WIDTH)


def window_unpartition(windows):
    x = windows.view(-1, *(side // WINDOW for side in PADDED), WINDOW, WINDOW, WIDTH).transpose(
        2, 3
    )
    return x.reshape(-1, *PADDED, WIDTH)[:, : GRID[0], : GRID[1]]


def get_rel_pos(size, rel_pos):
    if rel_pos.shape[0] != 2 * size - 1:
        rel_pos = F.interpolate(rel_pos.T[None], size=2 * size - 1, mode="linear")[0].T
    return rel_pos[torch.arange(size)[:, None] - torch.arange(size)[None, :] + size - 1]


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rel_pos_h, self.rel_pos_w = map(nn.Parameter, torch.randn(2, 2 * size - 1, DIM) / 2)

    def forward(self, x):
        (height, width), qkv = x.shape[1:3], self.qkv(x).flatten(1, 2).unflatten(2, (3, HEADS, DIM))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).flatten(1, 2)
        attn, r_q = (q * DIM**-0.5) @ k.transpose(-2, -1), q.reshape(-1, height, width, DIM)
        rel_h = torch.einsum("bhwc,hkc->bhwk", r_q, get_rel_pos(height, self.rel_pos_h))
        rel_w = torch.einsum("bhwc,wkc->bhwk", r_q, get_rel_pos(width, self.rel_pos_w))
        attn = attn.view(-1, height, width, height, width)
        attn = attn + rel_h[..., :, None] + rel_w[..., None, :]
        x = attn.view(-1, height * width, height * width).softmax(dim=-1) @ v
        return self.proj(x.view(-1, HEADS, height, width, DIM).permute(0, 2, 3, 1, 4).flatten(3))


class Block(nn.Module):
    def __init__(self, windowed):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, 1e-6), nn.LayerNorm(WIDTH, 1e-6)
        self.attn, self.windowed = Attention(WINDOW if windowed else TRAINED), windowed
        self.lin1, self.lin2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = window_partition(self.norm1(x)) if self.windowed else self.norm1(x)
        x = x + (window_unpartition(self.attn(y)) if self.windowed else self.attn(y))
        return x + self.lin2(F.gelu(self.lin1(self.norm2(x))))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        x = x - x.mean(1, keepdim=True)
        x = x / torch.sqrt(x.pow(2).mean(1, keepdim=True) + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ImageEncoderViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(torch.randn(1, CELLS, WIDTH))
        self.blocks = nn.Sequential(*map(Block, WINDOWED))
        first, last = nn.Conv2d(WIDTH, OUT, 1, bias=False), nn.Conv2d(OUT, OUT, 3, padding=1)
        self.neck = nn.Sequential(first, LayerNorm2d(OUT, 1e-6), last)

    def forward(self, x):
        x = self.patch_embed(x).permute(0, 2, 3, 1) + self.pos_embed.unflatten(1, GRID)
        return self.neck(self.blocks(x).permute(0, 3, 1, 2))


class TokenEncoder(Functional):
    def dense(self, x, *name):
        return F.linear(x, self.w(*name, "weight").flatten(1), self.w(*name, "bias"))

    def norm(self, x, *name):
        centred, weight = x - x.mean(-1, keepdim=True), self.w(*name, "weight")
        return F.rms_norm(centred, weight.shape, weight, 1e-6) + self.w(*name, "bias")

    def distances(self, size, table):
        at = (torch.arange(2 * size - 1) + 0.5) * len(table) / (2 * size - 1) - 0.5
        at = at.clamp(0, len(table) - 1)
        near = torch.lerp(table[at.floor().long()], table[at.ceil().long()], at.frac()[:, None])
        return near.unfold(0, size, 1).flip(-1)

    def attend(self, x, height, width, *name):
        q, k, v = self.dense(x, *name, "qkv").unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        down = self.distances(height, self.w(*name, "rel_pos_h")).repeat_interleave(width, 0)
        along = self.distances(width, self.w(*name, "rel_pos_w")).repeat(height, 1, 1)
        far = torch.einsum("nhqd,qdk->nhqk", q, torch.cat([down, along], -1))
        marks = torch.eye(height).repeat_interleave(width, 0), torch.eye(width).repeat(height, 1)
        q, marks = torch.cat([q / DIM**0.5, far], -1), torch.cat(marks, 1).expand(*k.shape[:3], -1)
        mixed = F.scaled_dot_product_attention(q, torch.cat([k, marks], -1), v, scale=1.0)
        return self.dense(mixed.transpose(1, 2).flatten(2), *name, "proj")

    def forward(self, image):
        excess = (0, -GRID[1] % WINDOW, 0, -GRID[0] % WINDOW)
        spots = F.pad(torch.arange(CELLS).view(GRID), excess, value=CELLS)
        cut = spots.unfold(0, WINDOW, WINDOW).unfold(1, WINDOW, WINDOW).reshape(-1, WINDOW**2)
        back = cut.flatten().argsort()[:CELLS]
        x = self.dense(F.unfold(image, PATCH, stride=PATCH).mT, "patch_embed") + self.pos_embed
        for i, windowed in enumerate(WINDOWED):
            y = self.norm(x, "blocks", i, "norm1")
            y = F.pad(y, (0, 0, 0, 1))[:, cut].flatten(0, 1) if windowed else y
            y = self.attend(y, *((WINDOW, WINDOW) if windowed else GRID), "blocks", i, "attn")
            x = x + (y.view(len(x), -1, WIDTH)[:, back] if windowed else y)
            y = F.gelu(self.dense(self.norm(x, "blocks", i, "norm2"), "blocks", i, "lin1"))
            x = x + self.dense(y, "blocks", i, "lin2")
        x = self.norm(x @ self.neck_0_weight.flatten(1).T, "neck.1").mT.unflatten(2, GRID)
        near = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        x = torch.einsum("nchwij,ocij->nhwo", near, self.neck_2_weight) + self.neck_2_bias
        return x.permute(0, 3, 1, 2)


def build():
    reference = shaken(ImageEncoderViT())
    port, image = TokenEncoder(reference), torch.randn(2, 3, *(PATCH * side for side in GRID))
    return lambda: reference(image), lambda: port(image)
