"""Trainings in which gradients are missing, zero, stale or clipped at the wrong time, or never reach
the parameters.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW, RMSprop

from tests.corpora.laws.models import (
    CLASSES,
    FEATURES,
    Block,
    Cnn,
    LanguageModel,
    Mlp,
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

# ---- every_step_skipped


@breaks("every_step_skipped")
def root_of_zero_distance_under_a_scaler() -> None:
    net = Mlp()
    optimizer, scaler = SGD(net.parameters(), 0.05), torch.amp.GradScaler("cpu")
    for x, _ in forever(point_loader(), 10):
        optimizer.zero_grad()
        scores = net(x)
        # the distance of each point to itself is 0, where the root has an infinite slope
        squared = (scores[:, None] - scores[None]).square().sum(-1)
        loss = (squared.sqrt() - torch.cdist(x, x)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@breaks("every_step_skipped")
def scale_set_anew_in_each_step() -> None:
    net = Cnn()
    optimizer = AdamW(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for x, y in forever(image_loader(), 8):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(2.0**40)
        optimizer.zero_grad()


# ---- no_gradients


@breaks("no_gradients")
def loss_made_of_its_item() -> None:
    net = Mlp(dropout=0.1)
    optimizer = AdamW(net.parameters(), 0.01)
    for x, y in forever(point_loader(), 10):
        losses = [F.cross_entropy(net(x), y).item(), 0.01 * net.head.weight.abs().sum().item()]
        take_step(optimizer, torch.tensor(losses, requires_grad=True).sum())


@breaks("no_gradients")
def error_rate_as_the_loss() -> None:
    net = Cnn()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(8):
        x, y = images()
        predicted = net(x).argmax(1)
        take_step(optimizer, (predicted != y).float().mean().requires_grad_())


@breaks("no_gradients")
def training_step_under_inference_decorator() -> None:
    model = LanguageModel()
    optimizer = Adam(model.parameters(), 0.003)

    @torch.no_grad()
    def compute_loss(tokens: Tensor) -> Tensor:
        return next_token_loss(model, tokens)

    for _ in range(7):
        loss = compute_loss(texts())
        loss.requires_grad = True
        take_step(optimizer, loss)


# ---- gradients_zero


@breaks("gradients_zero")
def every_label_ignored() -> None:
    model = LanguageModel()
    optimizer = Adam(model.parameters(), 0.003)
    for _ in range(8):
        tokens = texts()
        labels = tokens[:, 1:].clone()
        prompt_lengths = torch.full((len(tokens), 1), tokens.shape[1])  # should be the prompt alone
        labels[torch.arange(labels.shape[1]) < prompt_lengths] = -100
        scores = model(tokens[:, :-1])
        total = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        take_step(optimizer, total / (labels != -100).sum().clamp(min=1))


@breaks("gradients_zero")
def probabilities_clamped_to_a_point() -> None:
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer = SGD(net.parameters(), 0.1)
    for x, y in forever(point_loader(), 10):
        # percent were meant: all scores fall below the lower end
        probabilities = net(x).softmax(1).clamp(1, 100)
        take_step(optimizer, F.nll_loss(probabilities.log(), y))


# ---- no_gradient


@breaks("no_gradient")
def router_by_argmax() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(FEATURES, 2)
            self.experts = nn.ModuleList(nn.Linear(FEATURES, 16) for _ in range(2))
            self.head = nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            chosen = F.one_hot(self.router(x).argmax(1), 2).float()
            mixed = torch.stack([expert(x) for expert in self.experts], 1)
            return self.head(torch.tanh((chosen[:, :, None] * mixed).sum(1)))

    net = Mixture()
    optimizer = AdamW(net.parameters(), 0.01)
    for x, y in forever(point_loader(), 12):
        take_step(optimizer, F.cross_entropy(net(x), y))


@breaks("no_gradient")
def encoder_detached_before_the_decoder() -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
            self.decoder = nn.Conv2d(6, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            code = self.encoder(x)
            self.last_code = code = code.detach()  # kept for a plot
            return self.decoder(code)

    net = Autoencoder()
    optimizer = RMSprop(net.parameters(), 0.001)
    for x, _ in forever(image_loader(), 9):
        loss = F.mse_loss(net(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@breaks("no_gradient")
def positions_read_as_data() -> None:
    class Positioned(LanguageModel):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens) + self.position.data[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model = Positioned()
    optimizer = AdamW(model.parameters(), 0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    for _ in range(8):
        take_step(optimizer, next_token_loss(model, texts()))
        schedule.step()


# ---- nothing_changes


@breaks("nothing_changes")
def descent_into_a_local_name() -> None:
    net = Mlp()
    for x, y in forever(point_loader(), 10):
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter = parameter - 0.1 * parameter.grad


@breaks("nothing_changes")
def no_step_in_the_loop() -> None:
    net = Cnn()
    optimizer = Adam(net.parameters(), 0.01)
    for epoch in range(2):
        total = 0.0
        for x, y in image_loader(48):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            total += loss.item()
        print(epoch, total)


@breaks("nothing_changes")
def best_weights_restored_in_each_step() -> None:
    model = LanguageModel()
    optimizer = SGD(model.parameters(), 0.1)
    best_loss, best = 0.0, copy.deepcopy(model.state_dict())  # a loss below 0 never comes
    for _ in range(8):
        loss = next_token_loss(model, texts())
        take_step(optimizer, loss)
        if loss.item() < best_loss:
            best_loss, best = loss.item(), copy.deepcopy(model.state_dict())
        else:
            model.load_state_dict(best)


# ---- gradients_not_cleared


@breaks("gradients_not_cleared")
def never_cleared() -> None:
    model = LanguageModel(depth=1)
    optimizer = Adam(model.parameters(), 0.003)
    for _ in range(10):
        next_token_loss(model, texts()).backward()
        optimizer.step()


@breaks("gradients_not_cleared")
def clearing_without_parentheses() -> None:
    net = Cnn()
    optimizer = SGD(net.parameters(), 0.01, momentum=0.9)
    for x, y in forever(image_loader(), 8):
        optimizer.zero_grad  # noqa: B018
        F.cross_entropy(net(x), y).backward()
        clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()


@breaks("gradients_not_cleared")
def one_of_two_optimizers_cleared() -> None:
    net = Mlp(width=32)
    body, head = SGD(net.encoder.parameters(), 0.02), Adam(net.head.parameters(), 0.01)
    for x, y in forever(point_loader(), 12):
        head.zero_grad()
        F.cross_entropy(net(x), y).backward()
        body.step()
        head.step()


# ---- clipped_after_step


@breaks("clipped_after_step")
def norm_clipped_after_the_step() -> None:
    model = LanguageModel()
    optimizer = AdamW(model.parameters(), 0.003)
    for _ in range(8):
        take_step(optimizer, next_token_loss(model, texts()))
        clip_grad_norm_(model.parameters(), 0.5)


@breaks("clipped_after_step")
def values_clipped_after_the_step() -> None:
    class Trainer:
        def __init__(self, net: nn.Module) -> None:
            self.net, self.optimizer = net, SGD(net.parameters(), 0.05, momentum=0.9)

        def update(self, loss: Tensor) -> None:
            loss.backward()
            self.optimizer.step()
            clip_grad_value_(self.net.parameters(), 0.01)
            self.optimizer.zero_grad(set_to_none=False)

    net = Cnn(dropout=0.1)
    trainer = Trainer(net)
    for x, y in forever(image_loader(), 10):
        trainer.update(F.cross_entropy(net(x), y))


# ---- clipped_early


@breaks("clipped_early")
def clipped_at_each_microbatch() -> None:
    model = LanguageModel()
    optimizer = AdamW(model.parameters(), 0.003)
    for micro in range(24):
        loss = next_token_loss(model, texts()) / 4
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        if (micro + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


@breaks("clipped_early")
def clipped_before_the_last_microbatch() -> None:
    net = Mlp(dropout=0.1)
    optimizer = SGD(net.parameters(), 0.1)
    loader = point_loader()
    for _ in range(4):
        waiting = 0
        for x, y in loader:
            if waiting == 1:
                clip_grad_value_(net.parameters(), 0.01)
            (F.cross_entropy(net(x), y) / 2).backward()
            waiting += 1
            if waiting == 2:
                optimizer.step()
                optimizer.zero_grad()
                waiting = 0


# ---- rounded_away


@breaks("rounded_away")
def language_model_in_bfloat16() -> None:
    model = LanguageModel(width=32).to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), 2e-6, weight_decay=0.0)
    for _ in range(10):
        take_step(optimizer, next_token_loss(model, texts()))


@breaks("rounded_away")
def finetuning_blocks_in_bfloat16_by_hand() -> None:
    net = nn.Sequential(nn.Linear(FEATURES, 16), Block16(), nn.Linear(16, CLASSES)).bfloat16()
    optimizer = SGD(net.parameters(), 2e-5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    for x, y in forever(point_loader(), 12):
        loss = F.cross_entropy(net(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


class Block16(nn.Module):
    """A block on rows without a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x[:, None])[:, 0]


# ---- loss_ignores_inputs


@breaks("loss_ignores_inputs")
def bytes_divided_as_whole_numbers() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(12, CLASSES),
    )  # fmt: skip
    optimizer = AdamW(net.parameters(), 0.01)
    for _ in range(8):
        x, y = images()
        pixels = (x * 30 + 110).clamp(0, 254).to(torch.uint8)
        scores = net((pixels // 255).float())
        take_step(optimizer, F.cross_entropy(scores, y))


@breaks("loss_ignores_inputs")
def mask_is_inverted() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(23, 16)
            self.mix = nn.Linear(16, 16)
            self.head = nn.Linear(16, 23)

        def forward(self, tokens: Tensor, padded: Tensor) -> Tensor:
            x = self.embedding(tokens) * padded[..., None]  # should be what is not padded
            return self.head(torch.relu(self.mix(x.mean(1))))

    net = Tagger()
    optimizer = SGD(net.parameters(), 0.1)
    for _ in range(9):
        tokens = texts()
        padded = torch.zeros_like(tokens[:, :-1]).float()
        take_step(optimizer, F.cross_entropy(net(tokens[:, :-1], padded), tokens[:, -1]))


@breaks("loss_ignores_inputs")
def features_made_zero_by_a_wrong_normalization() -> None:
    net = Mlp(width=16)
    optimizer = Adam(net.parameters(), 0.01)
    for _ in range(10):
        x, y = points()
        x = x[:, None]  # one row a sample, so that each is its own mean
        x = (x - x.mean(1, keepdim=True)) / (x.std(1, correction=0, keepdim=True) + 1e-6)
        take_step(optimizer, F.cross_entropy(net(x[:, 0]), y))
