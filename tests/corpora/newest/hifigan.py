"""HiFi-GAN: weight norm and transposed convolutions beside folded kernels, windows and overlaps."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from tests.corpora.unseen.weights import shaken

MELS, WIDTH, RATES, SIZES, SLOPE = 10, 32, (4, 2), (8, 4), 0.1
RES_SIZES, DILATIONS = (3, 5), (1, 3)


def get_padding(kernel_size, dilation=1):
    return (kernel_size * dilation - dilation) // 2


class ResBlock1(nn.Module):
    def __init__(self, channels, size):
        super().__init__()
        pads = get_padding(size), *(get_padding(size, d) for d in DILATIONS)
        self.convs1 = nn.ModuleList(
            weight_norm(nn.Conv1d(channels, channels, size, dilation=d, padding=pad))
            for d, pad in zip(DILATIONS, pads[1:], strict=True)
        )
        self.convs2 = nn.ModuleList(
            weight_norm(nn.Conv1d(channels, channels, size, padding=pads[0])) for _ in DILATIONS
        )

    def forward(self, x):
        for c1, c2 in zip(self.convs1, self.convs2, strict=True):
            xt = c1(F.leaky_relu(x, SLOPE))
            xt = c2(F.leaky_relu(xt, SLOPE))
            x = xt + x
        return x


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_pre = weight_norm(nn.Conv1d(MELS, WIDTH, 7, padding=3))
        self.ups, self.resblocks, channels = nn.ModuleList(), nn.ModuleList(), WIDTH
        for rate, size in zip(RATES, SIZES, strict=True):
            up = nn.ConvTranspose1d(channels, channels // 2, size, rate, padding=(size - rate) // 2)
            self.ups.append(weight_norm(up))
            channels //= 2
            self.resblocks.extend(ResBlock1(channels, k) for k in RES_SIZES)
        self.conv_post = weight_norm(nn.Conv1d(channels, 1, 7, padding=3))

    def forward(self, x):
        x = self.conv_pre(x)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, SLOPE))
            xs = None
            for j in range(len(RES_SIZES)):
                block = self.resblocks[i * len(RES_SIZES) + j]
                xs = block(x) if xs is None else xs + block(x)
            x = xs / len(RES_SIZES)
        x = self.conv_post(F.leaky_relu(x))
        return torch.tanh(x)


class Vocoder:
    def __init__(self, generator):
        state = generator.state_dict()
        self.bias = {name[:-5]: state[name] for name in state if name.endswith(".bias")}
        self.kernel = {}
        for name in self.bias:
            size, direction = (state[f"{name}.parametrizations.weight.original{i}"] for i in (0, 1))
            length = direction.square().sum((1, 2), keepdim=True).sqrt()
            self.kernel[name] = direction * (size / length)

    def filtered(self, x, name, gap=1):
        kernel = self.kernel[name]
        reach = gap * (kernel.shape[2] - 1)
        x, frames = F.pad(x, (0, 0, reach // 2, reach // 2)), x.shape[1]
        taps = [x[:, j : j + frames] for j in range(0, reach + 1, gap)]
        return torch.cat(taps, -1) @ kernel.permute(2, 1, 0).flatten(0, 1) + self.bias[name]

    def stretched(self, x, name, rate):
        kernel, frames = self.kernel[name], x.shape[1]
        size, channels = kernel.shape[2], kernel.shape[1]
        spread = torch.einsum("btc,cok->btko", x, kernel)
        places = (rate * torch.arange(frames)[:, None] + torch.arange(size)).flatten()
        total = x.new_zeros(len(x), rate * (frames - 1) + size, channels)
        total = total.index_add(1, places, spread.flatten(1, 2))
        crop = (size - rate) // 2
        return total[:, crop : crop + rate * frames] + self.bias[name]

    def refined(self, x, name):
        for i, gap in enumerate(DILATIONS):
            y = self.filtered(F.leaky_relu(x, SLOPE), f"{name}.convs1.{i}", gap)
            x = x + self.filtered(F.leaky_relu(y, SLOPE), f"{name}.convs2.{i}")
        return x

    def __call__(self, mel):
        x = self.filtered(mel.mT, "conv_pre")
        for i, rate in enumerate(RATES):
            x = self.stretched(F.leaky_relu(x, SLOPE), f"ups.{i}", rate)
            first = i * len(RES_SIZES)
            blocks = range(first, first + len(RES_SIZES))
            x = torch.stack([self.refined(x, f"resblocks.{j}") for j in blocks]).mean(0)
        return self.filtered(F.leaky_relu(x), "conv_post").tanh().mT


def build():
    reference = shaken(Generator())
    for name, parameter in reference.named_parameters():
        if name.endswith("original0"):
            parameter *= 1 + 0.5 * torch.rand(parameter.shape)
    port, mel = Vocoder(reference), torch.randn(2, MELS, 9)
    return lambda: reference(mel), lambda: port(mel)
