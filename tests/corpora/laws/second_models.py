"""The models and the data of the second set: recurrent, variational, graphs, patches, agents."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpora.laws.models import CLASSES, FEATURES, VOCABULARY

SIGNALS, STATE, ACTIONS = 5, 6, 3


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these sizes with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def signals(count: int = 12, length: int = 9) -> tuple[Tensor, Tensor]:
    """Return sequences [count, length, 5] whose largest of three mean signals is their class."""
    x = torch.randn(count, length, SIGNALS)
    return x, x.mean(1)[:, :CLASSES].argmax(1)


def graphs(count: int = 8, nodes: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Return node features [count, nodes, 12], adjacency [count, nodes, nodes], classes [count]."""
    x = torch.randn(count, nodes, FEATURES)
    links = (torch.rand(count, nodes, nodes) < 0.4).float()
    adjacency = ((links + links.mT + torch.eye(nodes)) > 0).float()
    return x, adjacency / adjacency.sum(-1, keepdim=True), x.mean(1)[:, :CLASSES].argmax(1)


def observations(count: int = 32) -> Tensor:
    return torch.randn(count, STATE)


def rewards(states: Tensor, actions: Tensor) -> Tensor:
    """Return 1 where the action is the largest of the first three values of a state."""
    return (states[:, :ACTIONS].argmax(1) == actions).float()


class Gru(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gru = nn.GRU(SIGNALS, 16, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.gru(x)[0].mean(1)))


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(FEATURES, 16, 8)
        self.decoder = mlp(4, 16, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(z), mean, log_variance


def elbo_loss(x: Tensor, output: tuple[Tensor, Tensor, Tensor], beta: float = 0.1) -> Tensor:
    rebuilt, mean, log_variance = output
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
    return F.mse_loss(rebuilt, x) + beta * divergence


class Vit(nn.Module):
    def __init__(self, dropout: float = 0.0, depth: int = 2, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout, "gelu", batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, CLASSES)

    def tokens(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        return torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class GraphNet(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = nn.Linear(FEATURES, 16), nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, CLASSES)

    def nodes(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.dropout(F.relu(adjacency @ self.conv_1(x)))
        return F.relu(adjacency @ self.conv_2(x))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.head(self.nodes(x, adjacency).mean(-2))


class Seq2Seq(nn.Module):
    """Translates a text into its reverse, with the right tokens as the decoder's inputs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, 16)
        self.target = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoder = nn.GRU(16, 16, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, state = self.encoder(self.dropout(self.source(source)))
        return self.head(self.dropout(self.decoder(self.target(target), state)[0]))


def translation_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    reverse = tokens.flip(1)
    scores = model(tokens, reverse[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), reverse[:, 1:].flatten())


def contrastive_loss(a: Tensor, b: Tensor, temperature: float = 0.2) -> Tensor:
    """Return the loss of finding for each row of `a` [count, width] its row of `b`."""
    scores = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / temperature
    return F.cross_entropy(scores, torch.arange(len(a)))
