"""Glow: layers that pass a log-determinant on beside fused matrices, grouped nets and a cost."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

COLOURS, SIDE, HIDDEN, DEPTH = 3, 8, 12, 3
WIDTH, PIXELS = 4 * COLOURS, SIDE * SIDE // 4


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.logs = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, logdet):
        x = x + self.bias[:, None, None]
        x = x * torch.exp(self.logs)[:, None, None]
        return x, logdet + self.logs.sum() * x.shape[2] * x.shape[3]


class Invertible1x1(nn.Module):
    def __init__(self):
        super().__init__()
        p, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])
        self.register_buffer("p", p)
        self.register_buffer("sign", upper.diagonal().sign())
        self.lower, self.upper = nn.Parameter(lower), nn.Parameter(upper)
        self.log_s = nn.Parameter(upper.diagonal().abs().log())

    def forward(self, x, logdet):
        lower = self.lower.tril(-1) + torch.eye(WIDTH)
        upper = self.upper.triu(1) + torch.diag(self.sign * self.log_s.exp())
        x = F.conv2d(x, (self.p @ lower @ upper)[:, :, None, None])
        return x, logdet + x.shape[2] * x.shape[3] * self.log_s.sum()


class Permutation(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.randperm(WIDTH))

    def forward(self, x, logdet):
        return x[:, self.order], logdet


def coupling_net():
    return nn.Sequential(
        nn.Conv2d(WIDTH // 2, HIDDEN, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(HIDDEN, HIDDEN, 1),
        nn.ReLU(),
        nn.Conv2d(HIDDEN, WIDTH // 2, 3, padding=1),
    )


class AffineCoupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale_net, self.shift_net = coupling_net(), coupling_net()

    def forward(self, x, logdet):
        kept, changed = x.chunk(2, 1)
        scale = torch.sigmoid(self.scale_net(kept) + 2.0)
        moved = changed + self.shift_net(kept)
        changed = moved * scale
        logdet = logdet + scale.log().flatten(1).sum(1)
        return torch.cat([kept, changed], 1), logdet


class Glow(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (ActNorm, Invertible1x1, Permutation, AffineCoupling)
        self.layers = nn.ModuleList(layer() for _ in range(DEPTH) for layer in layers)
        self.prior_mean = nn.Parameter(torch.zeros(WIDTH))
        self.prior_logs = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, image):
        size = image[0].numel()
        logdet = image.new_full((len(image),), -math.log(256.0) * size)
        z = F.pixel_unshuffle(image, 2)
        for layer in self.layers:
            z, logdet = layer(z, logdet)
        std = self.prior_logs.exp()[:, None, None]
        prior = torch.distributions.Normal(self.prior_mean[:, None, None], std)
        log_likelihood = prior.log_prob(z).sum((1, 2, 3)) + logdet
        bits = -log_likelihood / (math.log(2.0) * size)
        return z, bits, bits.mean()


class PortGlow(Functional):
    def __init__(self, reference):
        super().__init__(reference)
        self.orders = [layer.order for layer in reference.layers[2::4]]

    def mixing(self, step):
        names = ("p", "lower", "upper", "sign", "log_s")
        p, lower, upper, sign, log_s = (self.w("layers", 4 * step + 1, name) for name in names)
        upper = torch.diagonal_scatter(upper.triu(1), sign * torch.exp(log_s))
        weight = p @ (upper + lower.tril(-1) @ upper)
        matrix = weight * self.w("layers", 4 * step, "logs").exp()
        offset = matrix @ self.w("layers", 4 * step, "bias")
        return matrix[self.orders[step]], offset[self.orders[step]]

    def fused(self, step, layer, part):
        nets = ("scale_net", "shift_net")
        return torch.cat([self.w("layers", 4 * step + 3, net, layer, part) for net in nets])

    def nets(self, step, x):
        x = F.conv2d(x, self.fused(step, 0, "weight"), self.fused(step, 0, "bias"), padding=1)
        x = x.relu()
        weight = self.fused(step, 2, "weight")[..., 0, 0].view(2, HIDDEN, HIDDEN)
        x = torch.einsum("bgihw,goi->bgohw", x.unflatten(1, (2, HIDDEN)), weight).flatten(1, 2)
        x = torch.clamp(x + self.fused(step, 2, "bias")[:, None, None], min=0)
        x = F.conv2d(x, self.fused(step, 4, "weight"), padding=1, groups=2)
        x = x + self.fused(step, 4, "bias")[:, None, None]
        return x.permute(0, 2, 3, 1).flatten(1, 2)

    def forward(self, image):
        batch, half = len(image), SIDE // 2
        x = image.view(batch, COLOURS, half, 2, half, 2)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(batch, PIXELS, WIDTH)
        cost = torch.full((batch,), PIXELS * WIDTH * math.log(256.0))
        for step in range(DEPTH):
            matrix, offset = self.mixing(step)
            x = x @ matrix.T + offset
            cost = cost - PIXELS * torch.linalg.slogdet(matrix).logabsdet
            kept, changed = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
            grid = kept.transpose(1, 2).unflatten(2, (half, half))
            raw, shift = self.nets(step, grid).chunk(2, -1)
            squeeze = F.softplus(-(raw + 2.0))
            changed = torch.exp(-squeeze) * (changed + shift)
            cost = cost + squeeze.sum((1, 2))
            x = torch.cat([kept, changed], -1)
        normal = (x - self.prior_mean) * torch.exp(-self.prior_logs)
        cost = cost + 0.5 * normal.square().sum((1, 2))
        cost = cost + PIXELS * (self.prior_logs + 0.5 * math.log(2 * math.pi)).sum()
        bits = cost / (PIXELS * WIDTH) / math.log(2.0)
        return x.transpose(1, 2).reshape(batch, WIDTH, half, half), bits, bits.sum() / batch


def build():
    reference = shaken(Glow())
    port, image = PortGlow(reference), torch.rand(2, COLOURS, SIDE, SIDE) - 0.5
    return lambda: reference(image), lambda: port(image)
