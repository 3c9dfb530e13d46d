"""A VQ-VAE with a codebook that follows its vectors: distances beside their expansion."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

CODES, DIM = 16, 8


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codebook", torch.randn(CODES, DIM))
        self.register_buffer("cluster_size", torch.rand(CODES) * 4 + 1)
        self.register_buffer("embed_avg", torch.randn(CODES, DIM) * 3)

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, DIM)
        index = torch.cdist(flat, self.codebook).argmin(1)
        quantized = (
            F.embedding(index, self.codebook).view(len(z), *z.shape[2:], DIM).permute(0, 3, 1, 2)
        )
        loss = 0.25 * F.mse_loss(z, quantized)
        one_hot = F.one_hot(index, CODES).type(z.dtype)
        self.cluster_size.mul_(0.99).add_(one_hot.sum(0), alpha=0.01)
        self.embed_avg.mul_(0.99).add_(one_hot.T @ flat, alpha=0.01)
        total = self.cluster_size.sum()
        smoothed = (self.cluster_size + 1e-2) / (total + CODES * 1e-2) * total
        self.codebook.copy_(self.embed_avg / smoothed[:, None])
        return quantized, loss


class VqVae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1, self.enc2 = nn.Conv2d(3, 12, 4, 2, 1), nn.Conv2d(12, DIM, 4, 2, 1)
        self.quantizer = Quantizer()
        self.dec1, self.dec2 = (
            nn.ConvTranspose2d(DIM, 12, 4, 2, 1),
            nn.ConvTranspose2d(12, 3, 4, 2, 1),
        )

    def forward(self, x):
        z = self.enc2(F.relu(self.enc1(x)))
        quantized, loss = self.quantizer(z)
        reconstruction = self.dec2(F.relu(self.dec1(quantized)))
        return reconstruction, loss + F.mse_loss(reconstruction, x), self.quantizer.codebook


class PortVqVae(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.encoder = nn.Sequential(reference.enc1, nn.ReLU(), reference.enc2)
        self.decoder = nn.Sequential(reference.dec1, nn.ReLU(), reference.dec2)
        old = reference.quantizer
        self.register_buffer("codes", old.codebook.T.clone())
        self.register_buffer("counts", old.cluster_size.clone())
        self.register_buffer("sums", old.embed_avg.T.clone())

    def nearest(self, vectors):
        distance = vectors.square().sum(1, keepdim=True) + self.codes.square().sum(0)
        distance = distance - 2 * vectors @ self.codes
        return distance.min(1).indices

    def update(self, assigned, vectors):
        counts = torch.bincount(assigned, minlength=CODES).float()
        sums = torch.zeros_like(self.sums).index_add(1, assigned, vectors.T)
        self.counts = torch.lerp(self.counts, counts, 0.01)
        self.sums = torch.lerp(self.sums, sums, 0.01)
        n = self.counts.sum()
        smoothed = n * (self.counts + 1e-2) / (n + CODES * 1e-2)
        self.codes = self.sums / smoothed

    def forward(self, image):
        latent = self.encoder(image)
        vectors = latent.movedim(1, -1).flatten(0, 2)
        assigned = self.nearest(vectors)
        chosen = self.codes.T[assigned]
        commitment = (vectors - chosen).pow(2).mean()
        decoded = self.decoder(chosen.unflatten(0, (len(image), *latent.shape[2:])).movedim(-1, 1))
        self.update(assigned, vectors)
        error = (decoded - image).square().mean()
        return decoded, error + 0.25 * commitment, self.codes.T


def build():
    reference = shaken(VqVae())
    port, x = PortVqVae(reference), torch.randn(2, 3, 16, 16)
    return lambda: reference(x), lambda: port(x)
