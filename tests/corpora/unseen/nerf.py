"""NeRF: an MLP over encoded points and volume rendering, products beside sums of logarithms."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, LEVELS, RAYS, SAMPLES = 24, 4, 6, 9


def encode(x, levels):
    parts = [x]
    for i in range(levels):
        parts += [torch.sin(2.0**i * math.pi * x), torch.cos(2.0**i * math.pi * x)]
    return torch.cat(parts, -1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        points, views = 3 + 6 * LEVELS, 3 + 6 * 2
        self.layer0, self.layer1 = nn.Linear(points, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer2, self.sigma = nn.Linear(WIDTH + points, WIDTH), nn.Linear(WIDTH, 1)
        self.feature, self.view = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + views, WIDTH // 2)
        self.rgb = nn.Linear(WIDTH // 2, 3)

    def forward(self, points, directions):
        encoded, views = encode(points, LEVELS), encode(directions, 2)
        h = F.relu(self.layer1(F.relu(self.layer0(encoded))))
        h = F.relu(self.layer2(torch.cat([encoded, h], -1)))
        density = F.softplus(self.sigma(h)[..., 0] - 1)
        h = F.relu(self.view(torch.cat([self.feature(h), views], -1)))
        return torch.sigmoid(self.rgb(h)), density


def reference_render(field, origins, directions):
    t = torch.linspace(0.5, 3.0, SAMPLES)
    points = origins[:, None] + directions[:, None] * t[:, None]
    views = F.normalize(directions, dim=-1)[:, None].expand_as(points)
    colour, density = field(points, views)
    deltas = torch.cat([t.diff(), torch.tensor([1e10])]) * directions.norm(dim=-1, keepdim=True)
    alpha = 1 - torch.exp(-density * deltas)
    through = torch.cumprod(torch.cat([torch.ones(RAYS, 1), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    weights = alpha * through
    rgb = (weights[..., None] * colour).sum(-2)
    rgb = rgb + (1 - weights.sum(-1, keepdim=True))
    return rgb, (weights * t).sum(-1)


class PortField(Functional):
    def linear(self, name, x):
        return F.linear(x, self.w(name, "weight"), self.w(name, "bias"))

    def waves(self, x, levels):
        bands = math.pi * 2 ** torch.arange(levels)
        angles = x[..., None, :] * bands[:, None]
        both = torch.stack([angles.sin(), angles.cos()], -2).flatten(-3)
        return torch.cat([x, both], -1)

    def forward(self, points, views):
        encoded = self.waves(points, LEVELS)
        h = self.linear("layer0", encoded).relu_()
        h = self.linear("layer1", h).relu_()
        by_point, by_hidden = self.layer2_weight.tensor_split([encoded.shape[-1]], 1)
        h = encoded @ by_point.T + F.linear(h, by_hidden, self.layer2_bias)
        h = h.relu_()
        raw = self.linear("sigma", h).squeeze(-1)
        density = torch.log1p(torch.exp(raw - 1))
        feature = self.linear("feature", h)
        turned = self.waves(views, 2)
        h = torch.cat([feature, turned[:, None].expand(-1, SAMPLES, -1)], -1)
        h = self.linear("view", h).clamp(min=0)
        return self.linear("rgb", h).sigmoid(), density


def port_render(field, origins, directions):
    depth = 0.5 + torch.arange(SAMPLES) * (2.5 / (SAMPLES - 1))
    points = torch.einsum("s,rc->rsc", depth, directions) + origins[:, None]
    length = directions.square().sum(-1, keepdim=True).sqrt()
    colour, density = field(points, directions / length)
    step = F.pad(depth[1:] - depth[:-1], (0, 1), value=1e10)
    optical = density * (step * length)
    passed = F.pad(optical.cumsum(-1)[:, :-1], (1, 0))
    weights = torch.exp(-passed) * (1 - torch.exp(-optical))
    image = torch.einsum("rs,rsc->rc", weights, colour)
    image = image + 1 - weights.sum(1)[:, None]
    return image, weights @ depth


def build():
    reference = shaken(Field())
    port = PortField(reference)
    origins, directions = torch.randn(RAYS, 3), torch.randn(RAYS, 3)
    return (
        lambda: reference_render(reference, origins, directions),
        lambda: port_render(port, origins, directions),
    )
