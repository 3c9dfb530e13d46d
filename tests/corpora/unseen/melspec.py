"""A mel spectrogram and a convolutional front end: torch.stft beside frames and a table of waves."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.corpora.unseen.weights import Functional, shaken

RATE, FFT, HOP, MELS, WIDTH = 8000, 64, 16, 12, 16


def hz_to_mel(f):
    return f / (200 / 3) if f < 1000 else 15 + math.log(f / 1000) / (math.log(6.4) / 27)


def mel_to_hz(m):
    return m * 200 / 3 if m < 15 else 1000 * math.exp((math.log(6.4) / 27) * (m - 15))


def filter_bank():
    top = hz_to_mel(RATE / 2)
    edges = torch.tensor([mel_to_hz(top * i / (MELS + 1)) for i in range(MELS + 2)])
    freqs = torch.linspace(0, RATE / 2, FFT // 2 + 1)
    ramps = edges[:, None] - freqs[None]
    width = edges.diff()
    weights = torch.maximum(
        torch.zeros(1), torch.minimum(-ramps[:-2] / width[:-1, None], ramps[2:] / width[1:, None])
    )
    return weights * (2 / (edges[2:] - edges[:-2]))[:, None]


class Audio(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv1d(MELS, WIDTH, 3, padding=1),
            nn.Conv1d(WIDTH, WIDTH, 3, 2, 1),
        )
        self.norm, self.out = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, audio):
        stft = torch.stft(audio, FFT, HOP, window=torch.hann_window(FFT), return_complex=True)
        magnitudes = stft[..., :-1].abs() ** 2
        log = torch.clamp(filter_bank() @ magnitudes, min=1e-10).log10()
        log = torch.maximum(log, log.max() - 8.0)
        log = (log + 4.0) / 4.0
        x = F.gelu(self.conv2(F.gelu(self.conv1(log))))
        x = self.norm(x).transpose(1, 2)
        scale = math.log(10000) / (WIDTH // 2 - 1)
        angles = torch.arange(x.shape[1])[:, None] * torch.exp(-scale * torch.arange(WIDTH // 2))
        return self.out(x + torch.cat([angles.sin(), angles.cos()], 1))


class PortAudio(Functional):
    def spectrum(self, signal):
        signal = F.pad(signal[:, None], (FFT // 2, FFT // 2), mode="reflect")[:, 0]
        n = torch.arange(FFT, dtype=torch.float64)
        window = 0.5 - 0.5 * torch.cos(2 * math.pi * n / FFT)
        frames = signal.unfold(1, FFT, HOP)
        waves = 2 * math.pi / FFT * torch.outer(n, torch.arange(FFT // 2 + 1))
        frames = frames * window.float()
        real, imaginary = frames @ waves.cos().float(), frames @ waves.sin().float()
        power = real.square() + imaginary.square()
        return power[:, :-1]

    def mel(self, power):
        bins = torch.arange(FFT // 2 + 1) * (RATE / FFT)
        points = [mel_to_hz(hz_to_mel(RATE / 2) / (MELS + 1) * i) for i in range(MELS + 2)]
        columns = []
        for low, centre, high in zip(points, points[1:], points[2:], strict=False):
            up, down = (bins - low) / (centre - low), (high - bins) / (high - centre)
            triangle = torch.minimum(up, down).clamp(min=0)
            columns.append(triangle * 2 / (high - low))
        return power @ torch.stack(columns, 1)

    def forward(self, signal):
        mel = self.mel(self.spectrum(signal))
        log = torch.log10(mel.clamp(min=1e-10))
        log = log.clamp(min=log.amax() - 8)
        features = (log / 4 + 1).mT
        x = F.gelu(F.conv1d(features, self.conv1_weight, self.conv1_bias, padding=1))
        x = F.gelu(F.conv1d(x, self.conv2_weight, self.conv2_bias, stride=2, padding=1))
        scale = self.norm_weight / torch.sqrt(self.norm_running_var + 1e-5)
        x = x.mT * scale + (self.norm_bias - self.norm_running_mean * scale)
        rates = 10000 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2 - 1))
        angles = torch.outer(torch.arange(x.shape[1]).float(), rates)
        x = x + torch.cat([torch.sin(angles), torch.cos(angles)], -1)
        return x @ self.out_weight.T + self.out_bias


def build():
    reference = shaken(Audio())
    reference.norm.running_mean.normal_()
    reference.norm.running_var.uniform_(0.5, 2)
    port, audio = PortAudio(reference), torch.randn(2, 400)
    return lambda: reference(audio), lambda: port(audio)
