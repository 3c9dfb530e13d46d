"""Trainings with modules in the wrong mode, batches that are always the same, statistics that stand
still, and weights that should be one.
"""

from __future__ import annotations

import copy
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adam, AdamW

from tests.corpora.laws.models import (
    CLASSES,
    FEATURES,
    VOCABULARY,
    Cnn,
    LanguageModel,
    Mlp,
    accuracy,
    forever,
    image_loader,
    images,
    next_token_loss,
    point_loader,
    points,
    take_step,
    texts,
)
from tests.corpora.laws.program import breaks

# ---- eval_while_training


@breaks("eval_while_training")
def train_mode_forgotten_after_validation() -> None:
    net = Cnn(dropout=0.2)
    optimizer = AdamW(net.parameters(), 0.01)
    training, validation = image_loader(32), image_loader(16)
    net.train()
    for epoch in range(3):
        for x, y in training:
            take_step(optimizer, F.cross_entropy(net(x), y))
        net.eval()
        print(epoch, accuracy(net, validation))


@breaks("eval_while_training")
def switched_to_eval_before_the_loop() -> None:
    model = LanguageModel(dropout=0.1)
    model.eval()
    optimizer = Adam(model.parameters(), 0.003)
    for _ in range(10):
        loss = next_token_loss(model, texts())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@breaks("eval_while_training")
def part_with_all_dropout_in_eval() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Mlp(dropout=0.3, classes=8)
            self.classifier = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.encoder(x))

    net = Pair()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    for epoch in range(2):
        net.train()
        net.encoder.eval()  # left from a time when it was frozen
        for x, y in point_loader():
            take_step(optimizer, F.cross_entropy(net(x), y))
        net.eval()
        print(epoch, accuracy(net, point_loader(32)))


# ---- train_while_evaluating


@breaks("train_while_evaluating")
def validation_in_train_mode() -> None:
    net = Cnn(dropout=0.2)
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    training, validation = image_loader(32), image_loader(24)
    for epoch in range(3):
        for x, y in training:
            take_step(optimizer, F.cross_entropy(net(x), y))
        print(epoch, accuracy(net, validation))


@breaks("train_while_evaluating")
def copy_in_eval_but_the_original_evaluated() -> None:
    model = LanguageModel(dropout=0.2)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = AdamW(model.parameters(), 0.003)
    for step in range(12):
        model.train()
        take_step(optimizer, next_token_loss(model, texts()))
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        if step % 4 == 3:
            average.eval()
            with torch.inference_mode():
                print(step, next_token_loss(model, texts()).item())


# ---- same_batch


@breaks("same_batch")
def iterator_made_in_each_step() -> None:
    net = Cnn()
    optimizer = AdamW(net.parameters(), 0.005)
    loader = image_loader(48, shuffle=False)
    for _ in range(10):
        x, y = next(iter(loader))
        take_step(optimizer, F.cross_entropy(net(x), y))


@breaks("same_batch")
def seed_set_in_each_step() -> None:
    def get_batch() -> Tensor:
        torch.manual_seed(1337)
        return texts()

    model = LanguageModel()
    optimizer = Adam(model.parameters(), 0.003)
    for _ in range(8):
        loss = next_token_loss(model, get_batch())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


@breaks("same_batch")
def slice_that_never_moves() -> None:
    net = Mlp(dropout=0.1)
    x, y = points(128)
    optimizer = SGD(net.parameters(), 0.1)
    start = 0
    for _ in range(12):
        rows, labels = x[start : start + 16], y[start : start + 16]
        take_step(optimizer, F.cross_entropy(net(rows), labels))


# ---- weights_parted


@breaks("weights_parted")
def head_tied_by_a_copy() -> None:
    model = LanguageModel()
    model.head.weight = nn.Parameter(model.embedding.weight.clone())
    optimizer = AdamW(model.parameters(), 0.003)
    for _ in range(8):
        take_step(optimizer, next_token_loss(model, texts()))


@breaks("weights_parted")
def tie_lost_when_weights_were_assigned() -> None:
    model = LanguageModel(depth=1)
    model.head.weight = model.embedding.weight
    path = os.path.join(tempfile.mkdtemp(), "weights.pt")
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, path)
    model.load_state_dict(torch.load(path), assign=True)
    model.requires_grad_(True)
    optimizer = SGD(model.parameters(), 0.2)
    for _ in range(10):
        loss = next_token_loss(model, texts())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@breaks("weights_parted")
def embedding_made_anew_when_the_vocabulary_grew() -> None:
    model = LanguageModel(dropout=0.1)
    model.head.weight = model.embedding.weight
    grown = nn.Embedding(VOCABULARY, 16)
    grown.weight.data.copy_(model.embedding.weight)
    model.embedding = grown
    optimizer = Adam(model.parameters(), 0.003)
    for _ in range(8):
        take_step(optimizer, next_token_loss(model, texts()))


# ---- batch_norm_still


@breaks("batch_norm_still")
def momentum_of_zero() -> None:
    net = Cnn(dropout=0.1, momentum=0.0)
    optimizer = AdamW(net.parameters(), 0.01)
    for epoch in range(2):
        net.train()
        for x, y in image_loader(32):
            take_step(optimizer, F.cross_entropy(net(x), y))
        net.eval()
        print(epoch, accuracy(net, image_loader(16)))


@breaks("batch_norm_still")
def buffers_copied_for_a_functional_call() -> None:
    net = Cnn()
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    for x, y in forever(image_loader(), 10):
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        scores = functional_call(net, {**dict(net.named_parameters()), **buffers}, (x,))
        take_step(optimizer, F.cross_entropy(scores, y))


@breaks("batch_norm_still")
def norms_frozen_in_a_model_from_scratch() -> None:
    net = nn.Sequential(
        nn.Linear(FEATURES, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, CLASSES),
    )  # fmt: skip
    optimizer = Adam(net.parameters(), 0.01)
    net.train()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()  # copied from a script that starts with pretrained weights
    for _ in range(12):
        x, y = points(32)
        take_step(optimizer, F.cross_entropy(net(3 * x + 1), y))


@breaks("batch_norm_still")
def statistics_restored_after_each_step() -> None:
    net = Cnn()
    optimizer = AdamW(net.parameters(), 0.01)
    pretrained = {name: b.clone() for name, b in net.named_buffers()}
    for _ in range(8):
        x, y = images()
        take_step(optimizer, F.cross_entropy(net(x), y))
        net.load_state_dict(pretrained, strict=False)  # strict=False hides that these are buffers
