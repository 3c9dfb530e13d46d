"""ConvNeXt with a feature pyramid: channels-first convolutions beside channels-last matrices."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

WIDTHS, DEPTHS, PYRAMID, CLASSES, IMAGE = (8, 16, 24), (1, 2, 1), 12, 5, 32


class LayerNorm2d(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        scale = self.weight[:, None, None] / torch.sqrt(variance + 1e-6)
        return scale * (x - mean) + self.bias[:, None, None]


class GRN(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma, self.beta = (nn.Parameter(torch.randn(1, width, 1, 1)) for _ in range(2))

    def forward(self, x):
        energy = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
        ratio = energy / (energy.mean(dim=1, keepdim=True) + 1e-6)
        return self.gamma * (x * ratio) + self.beta + x


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.grn = LayerNorm2d(width), GRN(4 * width)
        self.pwconv1, self.pwconv2 = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.gamma = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x):
        y = self.grn(F.gelu(self.pwconv1(self.norm(self.dwconv(x)))))
        return x + self.gamma[:, None, None] * self.pwconv2(y)


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(width, PYRAMID, 1) for width in WIDTHS)
        self.smooth = nn.ModuleList(nn.Conv2d(PYRAMID, PYRAMID, 3, padding=1) for _ in WIDTHS)
        self.head = nn.Conv2d(PYRAMID, CLASSES, 1)

    def forward(self, features):
        maps = [lateral(x) for lateral, x in zip(self.lateral, features)]
        for level in range(len(maps) - 1, 0, -1):
            above = F.interpolate(maps[level], scale_factor=2, mode="nearest")
            maps[level - 1] = maps[level - 1] + above
        return [self.head(F.relu(smooth(x))) for smooth, x in zip(self.smooth, maps)]


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.downsample = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 8, 4, 4), LayerNorm2d(8))])
        for old, new in zip(WIDTHS, WIDTHS[1:]):
            self.downsample.append(nn.Sequential(LayerNorm2d(old), nn.Conv2d(old, new, 2, 2)))
        stages = [[Block(width) for _ in range(n)] for width, n in zip(WIDTHS, DEPTHS)]
        self.stages = nn.ModuleList(nn.Sequential(*stage) for stage in stages)
        self.norms, self.pyramid = nn.ModuleList(LayerNorm2d(w) for w in WIDTHS), Pyramid()

    def forward(self, x):
        features = []
        for downsample, stage, norm in zip(self.downsample, self.stages, self.norms):
            x = stage(downsample(x))
            features.append(norm(x))
        return self.pyramid(features)


def linear_of(conv):
    weight = conv.weight.permute(0, 2, 3, 1).flatten(1)
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.load_state_dict({"weight": weight, "bias": conv.bias})
    return linear.requires_grad_(False)


def cells(x, size):
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // size, size, width // size, size, channels)
    return x.transpose(2, 3).flatten(3)


class LastBlock(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.kernel, self.offset = block.dwconv.weight[:, 0], block.dwconv.bias
        self.widen, self.narrow = linear_of(block.pwconv1), linear_of(block.pwconv2)
        self.gain, self.shift = block.grn.gamma.flatten(), block.grn.beta.flatten()
        self.scale, self.norm = block.gamma, (block.norm.weight, block.norm.bias)

    def forward(self, x):
        windows = F.pad(x, (0, 0, 3, 3, 3, 3)).unfold(1, 7, 1).unfold(2, 7, 1)
        y = torch.einsum("bhwcij,cij->bhwc", windows, self.kernel) + self.offset
        y = F.gelu(self.widen(F.layer_norm(y, y.shape[-1:], *self.norm, 1e-6)))
        energy = y.square().sum((1, 2), keepdim=True).sqrt()
        factor = energy / (energy.mean(-1, keepdim=True) + 1e-6)
        y = self.narrow(y * (1 + self.gain * factor) + self.shift)
        return torch.addcmul(x, y, self.scale)


class LastConvNeXt(nn.Module):
    def __init__(self, model):
        super().__init__()
        norms = [model.downsample[0][1], *(pair[0] for pair in model.downsample[1:]), *model.norms]
        self.norms = [(norm.weight, norm.bias) for norm in norms]
        self.stem = linear_of(model.downsample[0][0])
        self.downs = nn.ModuleList(linear_of(pair[1]) for pair in model.downsample[1:])
        self.blocks = nn.ModuleList(nn.ModuleList(map(LastBlock, stage)) for stage in model.stages)
        self.lateral = nn.ModuleList(map(linear_of, model.pyramid.lateral))
        self.smooth, self.head = model.pyramid.smooth, linear_of(model.pyramid.head)

    def normed(self, x, which):
        return F.layer_norm(x, x.shape[-1:], *self.norms[which], 1e-6)

    def forward(self, images):
        x = self.normed(self.stem(cells(images.movedim(1, -1), 4)), 0)
        features, outputs, merged = [], [], None
        for i, blocks in enumerate(self.blocks):
            if i:
                x = self.downs[i - 1](cells(self.normed(x, i), 2))
            for block in blocks:
                x = block(x)
            features.append(self.normed(x, 3 + i))
        for level in (2, 1, 0):
            side = self.lateral[level](features[level])
            if level < 2:
                side = side + merged.repeat_interleave(2, 1).repeat_interleave(2, 2)
            merged = side
            smooth, padded = self.smooth[level], F.pad(merged, (0, 0, 1, 1, 1, 1))
            windows = padded.unfold(1, 3, 1).unfold(2, 3, 1)
            smoothed = torch.einsum("bhwcij,dcij->bhwd", windows, smooth.weight) + smooth.bias
            outputs.insert(0, self.head(smoothed.clamp(min=0)).movedim(-1, 1))
        return outputs


def build():
    reference = shaken(ConvNeXt())
    port, images = LastConvNeXt(reference), torch.randn(2, 3, IMAGE, IMAGE)
    return lambda: reference(images), lambda: port(images)
