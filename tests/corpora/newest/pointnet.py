"""PointNet++: grouped points and 1 x 1 convolutions with norms beside gathered rows and folded ones."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

POINTS, FEATURES, CLASSES, EPS = 48, 3, 6, 1e-5
LEVELS = ((16, 0.9, 8, 6, (16, 24)), (6, 1.4, 5, 27, (24, 32)))


def index_points(points, idx):
    return points[torch.arange(len(points)).view(-1, *[1] * (idx.dim() - 1)), idx]


def farthest_point_sample(xyz, npoint):
    distance, centroids = torch.full(xyz.shape[:2], 1e10), [torch.zeros(len(xyz), dtype=torch.long)]
    while len(centroids) < npoint:
        dist = torch.sum((xyz - index_points(xyz, centroids[-1])[:, None]) ** 2, -1)
        distance = torch.where(dist < distance, dist, distance)
        centroids.append(torch.max(distance, -1)[1])
    return torch.stack(centroids, 1)


def query_ball_point(radius, nsample, xyz, new_xyz):
    group_idx = torch.arange(xyz.shape[1]).repeat(len(xyz), new_xyz.shape[1], 1)
    sqrdists = ((new_xyz[:, :, None] - xyz[:, None]) ** 2).sum(-1)
    group_idx[sqrdists > radius**2] = xyz.shape[1]
    group_idx = group_idx.sort(dim=-1)[0][:, :, :nsample]
    return torch.where(group_idx == xyz.shape[1], group_idx[:, :, :1], group_idx)


class SetAbstraction(nn.Module):
    def __init__(self, npoint, radius, nsample, inputs, widths):
        super().__init__()
        self.npoint, self.radius, self.nsample = npoint, radius, nsample
        self.mlp_convs = nn.ModuleList([nn.Conv2d(inputs, widths[0], 1), nn.Conv2d(*widths, 1)])
        self.mlp_bns = nn.ModuleList(map(nn.BatchNorm2d, widths))

    def forward(self, xyz, points):
        new_xyz = index_points(xyz, farthest_point_sample(xyz, self.npoint))
        idx = query_ball_point(self.radius, self.nsample, xyz, new_xyz)
        grouped_xyz = index_points(xyz, idx) - new_xyz[:, :, None]
        new_points = torch.cat([grouped_xyz, index_points(points, idx)], dim=-1).permute(0, 3, 2, 1)
        for conv, bn in zip(self.mlp_convs, self.mlp_bns, strict=True):
            new_points = F.relu(bn(conv(new_points)))
        return new_xyz, torch.max(new_points, 2)[0].transpose(1, 2)


class FeaturePropagation(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.mlp_conv, self.mlp_bn = nn.Conv1d(inputs, width, 1), nn.BatchNorm1d(width)

    def forward(self, xyz1, xyz2, points2, points1):
        dists, idx = ((xyz1[:, :, None] - xyz2[:, None]) ** 2).sum(-1).sort(dim=-1)
        dist_recip = 1.0 / (dists[:, :, :3] + 1e-8)
        weight = dist_recip / torch.sum(dist_recip, dim=2, keepdim=True)
        interpolated = torch.sum(index_points(points2, idx[:, :, :3]) * weight[..., None], dim=2)
        new_points = torch.cat([points1, interpolated], dim=-1).permute(0, 2, 1)
        return F.relu(self.mlp_bn(self.mlp_conv(new_points))).transpose(1, 2)


class PointNet2(nn.Module):
    def __init__(self):
        super().__init__()
        self.sa1, self.sa2 = (SetAbstraction(*level) for level in LEVELS)
        self.fp2, self.fp1 = FeaturePropagation(24 + 32, 24), FeaturePropagation(FEATURES + 24, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, xyz, normals):
        l1_xyz, l1_points = self.sa1(xyz, normals)
        l1_points = self.fp2(l1_xyz, *self.sa2(l1_xyz, l1_points), l1_points)
        return self.head(self.fp1(xyz, l1_xyz, l1_points, normals))


class Segmenter:
    def __init__(self, reference):
        names = [f"{part}.mlp_{{}}s.{i}" for part in ("sa1", "sa2") for i in (0, 1)]
        self.layers, self.head = {}, (reference.head.weight.T.clone(), reference.head.bias.clone())
        for name in (*names, "fp2.mlp_{}", "fp1.mlp_{}"):
            conv, bn = (reference.get_submodule(name.format(part)) for part in ("conv", "bn"))
            gain = bn.weight / (bn.running_var + EPS).sqrt()
            shift = bn.bias + (conv.bias - bn.running_mean) * gain
            self.layers[name] = conv.weight.flatten(1).T * gain, shift

    def spread(self, places, count):
        chosen, space = [0], torch.cdist(places, places)
        while len(chosen) < count:
            chosen.append(space[chosen].amin(0).argmax().item())
        return torch.tensor(chosen), space

    def gathered(self, places, values, level, part):
        chosen, space = self.spread(places, level[0])
        inside = space[chosen] <= level[1]
        order = inside.long().argsort(dim=1, descending=True, stable=True)[:, : level[2]]
        order = torch.where(inside.gather(1, order), order, order[:, :1])
        y = torch.cat([places[order] - places[chosen, None], values[order]], -1)
        for i in (0, 1):
            matrix, shift = self.layers[f"{part}.mlp_{{}}s.{i}"]
            y = (y @ matrix + shift).relu()
        return places[chosen], y.amax(1)

    def handed_back(self, fine, coarse, known, values, part):
        near, rows = torch.cdist(fine, coarse).topk(3, dim=1, largest=False)
        shares = F.normalize(1 / (near.square() + 1e-8), p=1, dim=1)
        mixed = torch.einsum("pk,pkc->pc", shares, values[rows])
        (matrix, shift), width = self.layers[f"{part}.mlp_{{}}"], known.shape[1]
        return (known @ matrix[:width] + mixed @ matrix[width:] + shift).relu()

    def __call__(self, cloud, normals):
        results = []
        for places, values in zip(cloud, normals, strict=True):
            middle, inner = self.gathered(places, values, LEVELS[0], "sa1")
            few, deep = self.gathered(middle, inner, LEVELS[1], "sa2")
            inner = self.handed_back(middle, few, inner, deep, "fp2")
            outer = self.handed_back(places, middle, values, inner, "fp1")
            results.append(outer @ self.head[0] + self.head[1])
        return torch.stack(results)


def build():
    reference = shaken(PointNet2())
    for buffer in reference.buffers():
        buffer.copy_(0.3 * torch.rand(buffer.shape) + 0.1)
    port, cloud = Segmenter(reference), torch.rand(2, POINTS, 3) * 2
    normals = F.normalize(torch.randn(2, POINTS, FEATURES), dim=-1)
    return lambda: reference(cloud, normals), lambda: port(cloud, normals)
