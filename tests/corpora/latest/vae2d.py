"""An image autoencoder, channels first beside windows of channels-last maps."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

WIDTH, WIDE, LATENT, GROUPS, SCALE, SHIFT = 16, 24, 4, 4, 0.3611, 0.2159


class ResnetBlock(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.norm1, self.norm2 = (nn.GroupNorm(GROUPS, n, eps=1e-6) for n in (inner, outer))
        self.conv1, self.conv2 = (nn.Conv2d(n, outer, 3, padding=1) for n in (inner, outer))
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.shortcut(x) + h


class AttnBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, WIDE, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(WIDE, WIDE, 1) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q(h).flatten(2), self.k(h).flatten(2), self.v(h).flatten(2)
        weights = torch.bmm(q.transpose(1, 2), k) * WIDE**-0.5
        h = torch.bmm(v, weights.softmax(dim=2).transpose(1, 2))
        return x + self.proj_out(h.view(x.shape))


class Downsample(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class AutoencoderKL(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(3, WIDTH, 3, padding=1), ResnetBlock(WIDTH, WIDTH)),
            *(Downsample(WIDTH, WIDTH, 3, stride=2), ResnetBlock(WIDTH, WIDE)),
            *(Downsample(WIDE, WIDE, 3, stride=2), ResnetBlock(WIDE, WIDE)),
            *(AttnBlock(), ResnetBlock(WIDE, WIDE), nn.GroupNorm(GROUPS, WIDE, eps=1e-6)),
            *(nn.SiLU(), nn.Conv2d(WIDE, 2 * LATENT, 3, padding=1)),
        )
        self.decoder = nn.Sequential(
            *(nn.Conv2d(LATENT, WIDE, 3, padding=1), ResnetBlock(WIDE, WIDE), AttnBlock()),
            *(ResnetBlock(WIDE, WIDE), Upsample(WIDE, WIDE, 3, padding=1)),
            *(ResnetBlock(WIDE, WIDTH), Upsample(WIDTH, WIDTH, 3, padding=1)),
            *(ResnetBlock(WIDTH, WIDTH), nn.GroupNorm(GROUPS, WIDTH, eps=1e-6)),
            *(nn.SiLU(), nn.Conv2d(WIDTH, 3, 3, padding=1)),
        )

    def forward(self, image, noise):
        mean, logvar = self.encoder(image).chunk(2, dim=1)
        z = mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise
        latents = (z - SHIFT) * SCALE
        z = latents / SCALE + SHIFT
        return latents, self.decoder(z)


class Codec(Functional):
    def __init__(self, reference):
        super().__init__(reference)
        for name in ("encoder_6", "decoder_2"):
            for leaf in ("weight", "bias"):
                rows = torch.cat([self.w(name, part, leaf) for part in "qkv"])
                self.register_parameter(f"{name}_qkv_{leaf}", nn.Parameter(rows, False))

    def dense(self, x, *name):
        return F.linear(x, self.w(*name, "weight").flatten(1), self.w(*name, "bias"))

    def windows(self, x, *name, pads=(1, 1), step=1):
        x = F.pad(x, (0, 0, *pads, *pads))
        return self.dense(x.unfold(1, 3, step).unfold(2, 3, step).flatten(3), *name)

    def normed(self, x, *name):
        grouped = x.unflatten(-1, (GROUPS, -1))
        variance, mean = torch.var_mean(grouped, (1, 2, 4), correction=0, keepdim=True)
        x = ((grouped - mean) * (variance + 1e-6).rsqrt()).flatten(3)
        return torch.addcmul(self.w(*name, "bias"), x, self.w(*name, "weight"))

    def resnet(self, x, *name):
        y = self.windows(F.silu(self.normed(x, *name, "norm1")), *name, "conv1")
        y = self.windows(F.silu(self.normed(y, *name, "norm2")), *name, "conv2")
        return y + (x if x.shape == y.shape else self.dense(x, *name, "shortcut"))

    def middle(self, x, *name):
        q, k, v = self.dense(self.normed(x, *name, "norm"), *name, "qkv").flatten(1, 2).chunk(3, -1)
        scores = (q * WIDE**-0.25) @ (k * WIDE**-0.25).mT
        y = (scores.softmax(-1) @ v).view(x.shape)
        return x + self.dense(y, *name, "proj_out")

    def forward(self, image, noise):
        x = self.resnet(self.windows(image.permute(0, 2, 3, 1), "encoder.0"), "encoder.1")
        for i in (2, 4):
            x = self.windows(x, "encoder", i, pads=(0, 1), step=2)
            x = self.resnet(x, "encoder", i + 1)
        x = self.resnet(self.middle(x, "encoder.6"), "encoder.7")
        x = self.windows(F.silu(self.normed(x, "encoder.8")), "encoder.10").permute(0, 3, 1, 2)
        mean, logvar = x[:, :LATENT], x[:, LATENT:]
        latents = SCALE * (mean - SHIFT + noise * (logvar.clamp(-30, 20) / 2).exp())
        x = latents.permute(0, 2, 3, 1) / SCALE + SHIFT
        x = self.resnet(self.windows(x, "decoder.0"), "decoder.1")
        x = self.resnet(self.middle(x, "decoder.2"), "decoder.3")
        for i in (4, 6):
            x = x.repeat_interleave(2, 1).repeat_interleave(2, 2)
            x = self.resnet(self.windows(x, "decoder", i), "decoder", i + 1)
        x = self.windows(F.silu(self.normed(x, "decoder.8")), "decoder.10")
        return latents, x.permute(0, 3, 1, 2)


def build():
    reference = shaken(AutoencoderKL())
    port, image = Codec(reference), torch.randn(2, 3, 16, 16)
    noise = torch.randn(2, LATENT, 4, 4)
    return lambda: reference(image, noise), lambda: port(image, noise)
