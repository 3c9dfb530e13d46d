"""The models and the data that the trainings share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES, VOCABULARY, LENGTH = 12, 3, 23, 7


def points(count: int = 16) -> tuple[Tensor, Tensor]:
    """Return features [count, 12], and for each the class that a fixed projection gives it."""
    x = torch.randn(count, FEATURES)
    projection = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(9))
    return x, (x @ projection).argmax(1)


def images(count: int = 8) -> tuple[Tensor, Tensor]:
    """Return images [count, 3, 8, 8] whose brightest channel is their class."""
    y = torch.randint(0, 3, (count,))
    return torch.randn(count, 3, 8, 8) + 2 * F.one_hot(y, 3)[:, :, None, None], y


def texts(count: int = 6) -> Tensor:
    """Return token ids [count, 8]: each text counts up from a random token."""
    return (torch.randint(0, VOCABULARY, (count, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY


def point_loader(count: int = 96, batch_size: int = 16, shuffle: bool = True) -> DataLoader:
    return DataLoader(TensorDataset(*points(count)), batch_size, shuffle=shuffle)


def image_loader(count: int = 64, batch_size: int = 8, shuffle: bool = True) -> DataLoader:
    return DataLoader(TensorDataset(*images(count)), batch_size, shuffle=shuffle)


def forever(loader: DataLoader, steps: int) -> Iterator[list[Tensor]]:
    """Yield `steps` batches, in as many epochs as that takes."""
    given = 0
    while given < steps:
        for batch in loader:
            yield batch
            given += 1
            if given == steps:
                return


class Mlp(nn.Module):
    def __init__(self, width: int = 24, dropout: float = 0.0, classes: int = CLASSES) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, **norm: float | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs, **norm)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Cnn(nn.Module):
    def __init__(self, dropout: float = 0.0, **norm: float | None) -> None:
        super().__init__()
        self.stem = ConvBlock(3, 8, **norm)
        self.body = ConvBlock(8, 12, **norm)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(12, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.body(F.max_pool2d(self.stem(x), 2)).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        q, k, v = self.qkv(x).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(count, length, width))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class LanguageModel(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def take_step(optimizer: Optimizer, loss: Tensor) -> None:
    """Take a step down the gradients of `loss`, which follow no earlier ones."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each next token of `tokens` [count, length + 1]."""
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    """Return the share of `loader` that `model` classifies right, in the mode that it is in."""
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).float().mean().item() for x, y in loader]
    return sum(right) / len(right)
