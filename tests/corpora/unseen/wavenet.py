"""WaveNet: dilated convolutions over all samples beside one sample after the other with queues."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import shaken

CHANNELS, SKIP, DILATIONS = 12, 16, (1, 2, 4)


class Layer(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.dilation, self.conv = dilation, nn.Conv1d(CHANNELS, 2 * CHANNELS, 2, dilation=dilation)
        self.condition = nn.Conv1d(5, 2 * CHANNELS, 1, bias=False)
        self.residual, self.skip = nn.Conv1d(CHANNELS, CHANNELS, 1), nn.Conv1d(CHANNELS, SKIP, 1)

    def forward(self, x, mel):
        y = self.conv(F.pad(x, (self.dilation, 0))) + self.condition(mel)
        a, b = y.chunk(2, 1)
        y = torch.tanh(a) * torch.sigmoid(b)
        return (x + self.residual(y)) * 0.5**0.5, self.skip(y)


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = (
            nn.Conv1d(1, CHANNELS, 1),
            nn.ModuleList(Layer(d) for d in DILATIONS),
        )
        self.out1, self.out2 = nn.Conv1d(SKIP, SKIP, 1), nn.Conv1d(SKIP, 8, 1)

    def forward(self, wave, mel):
        x, total = self.first(wave), 0
        for layer in self.layers:
            x, skip = layer(x, mel)
            total = total + skip
        return self.out2(F.relu(self.out1(F.relu(total))))


class Streaming(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.net = reference

    def forward(self, wave, mel):
        queues = [[wave.new_zeros(len(wave), CHANNELS) for _ in range(d)] for d in DILATIONS]
        outputs = []
        for t in range(wave.shape[2]):
            x = F.linear(wave[..., t], self.net.first.weight[..., 0], self.net.first.bias)
            skips = []
            for layer, queue in zip(self.net.layers, queues, strict=True):
                old, now = queue.pop(0), x
                queue.append(now)
                y = F.linear(old, layer.conv.weight[..., 0]) + F.linear(
                    now, layer.conv.weight[..., 1], layer.conv.bias
                )
                y = y + F.linear(mel[..., t], layer.condition.weight[..., 0])
                y = y[:, :CHANNELS].tanh() * y[:, CHANNELS:].sigmoid()
                x = F.linear(y, layer.residual.weight[..., 0], layer.residual.bias) + now
                x = x * 2**-0.5
                skips.append(F.linear(y, layer.skip.weight[..., 0], layer.skip.bias))
            y = F.relu(torch.stack(skips).sum(0))
            y = F.relu(F.linear(y, self.net.out1.weight[..., 0], self.net.out1.bias))
            outputs.append(F.linear(y, self.net.out2.weight[..., 0], self.net.out2.bias))
        return torch.stack(outputs, -1)


def build():
    reference = shaken(WaveNet())
    port, wave, mel = Streaming(reference), torch.randn(2, 1, 10), torch.randn(2, 5, 10)
    return lambda: reference(wave, mel), lambda: port(wave, mel)
