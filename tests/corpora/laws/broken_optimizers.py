"""Trainings whose optimizer holds the wrong tensors, is made anew, or whose learning rate is wrong."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    StepLR,
)

from tests.corpora.laws.models import (
    CLASSES,
    FEATURES,
    Cnn,
    LanguageModel,
    Mlp,
    accuracy,
    forever,
    image_loader,
    next_token_loss,
    point_loader,
    points,
    take_step,
    texts,
)
from tests.corpora.laws.program import breaks


def fit(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 10,
    schedule: LRScheduler | None = None,
) -> None:
    """Train a classifier of points as it should be done."""
    for x, y in forever(point_loader(), steps):
        take_step(optimizer, F.cross_entropy(net(x), y))
        if schedule is not None:
            schedule.step()


def fit_texts(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8) -> None:
    """Train a language model as it should be done."""
    for _ in range(steps):
        take_step(optimizer, next_token_loss(model, texts()))


# ---- learning_rate_zero


@breaks("learning_rate_zero")
def rate_scaled_by_whole_batches() -> None:
    net, batch_size = Cnn(), 8
    optimizer = SGD(net.parameters(), 0.1 * batch_size // 256, momentum=0.9)
    for x, y in forever(image_loader(64, batch_size), 8):
        take_step(optimizer, F.cross_entropy(net(x), y))


@breaks("learning_rate_zero")
def decay_over_no_steps() -> None:
    model = LanguageModel()
    optimizer = AdamW(model.parameters(), 0.003)
    total = 8 // 16  # optimizer steps: batches by accumulation, with the default of another script

    def linear(step: int) -> float:
        return max(0.0, (total - step) / max(1, total))

    schedule = LambdaLR(optimizer, linear)
    for _ in range(8):
        take_step(optimizer, next_token_loss(model, texts()))
        schedule.step()


# ---- optimizer_holds_others


@breaks("optimizer_holds_others")
def copied_after_the_optimizer_was_made() -> None:
    model = LanguageModel(depth=1)
    optimizer = AdamW(model.parameters(), 0.003)
    model = copy.deepcopy(model)  # "so that the original stays as it is"
    fit_texts(model, optimizer)


@breaks("optimizer_holds_others")
def layers_converted_after_the_optimizer_was_made() -> None:
    class Scaled(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.weight = nn.Parameter(layer.weight.detach() / layer.weight.detach().abs().max())
            self.bias = nn.Parameter(layer.bias.detach().clone())
            self.scale = nn.Parameter(layer.weight.detach().abs().max())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * self.scale, self.bias)

    def convert(module: nn.Module) -> None:
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Scaled(child))
            convert(child)

    net = Mlp()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    convert(net)
    fit(net, optimizer)


# ---- not_held


@breaks("not_held")
def biases_in_no_group() -> None:
    model = LanguageModel()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    norms = [p for name, p in model.named_parameters() if "norm" in name]  # and the other biases?
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    fit_texts(model, AdamW(groups, 0.003))


@breaks("not_held")
def layer_unfrozen_but_not_given() -> None:
    net = Mlp()
    net.encoder.requires_grad_(False)
    optimizer = Adam([p for p in net.parameters() if p.requires_grad], 0.01)
    fit(net, optimizer, 4)
    net.encoder.requires_grad_(True)
    fit(net, optimizer, 8)


@breaks("not_held")
def head_replaced_after_the_optimizer_was_made() -> None:
    net = Cnn()
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    net.head = nn.Linear(12, CLASSES)
    for x, y in forever(image_loader(), 8):
        take_step(optimizer, F.cross_entropy(net(x), y))


@breaks("not_held")
def layers_in_a_plain_list() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 16)
            self.hidden = [nn.Linear(16, 16) for _ in range(2)]  # should be a ModuleList
            self.head = nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            for layer in self.hidden:
                x = torch.tanh(layer(x))
            return self.head(x)

    net = Deep()
    fit(net, AdamW(net.parameters(), 0.01))


# ---- never_changes


@breaks("never_changes")
def rates_by_depth_as_whole_numbers() -> None:
    model = LanguageModel(depth=2)
    rates = [3 * (depth + 1) // 2 // 2 * 0.001 for depth in range(2)]  # 0 for the first block
    groups = [
        {"params": block.parameters(), "lr": rate}
        for block, rate in zip(model.blocks, rates, strict=True)
    ]
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks.")]
    fit_texts(model, AdamW([*groups, {"params": rest}], 0.003))


@breaks("never_changes")
def backbone_restored_after_each_step() -> None:
    net = Cnn()
    pretrained = copy.deepcopy(net.stem.state_dict())
    optimizer = Adam(net.parameters(), 0.01)
    for x, y in forever(image_loader(), 10):
        take_step(optimizer, F.cross_entropy(net(x), y))
        with torch.no_grad():
            net.stem.conv.weight.copy_(pretrained["conv.weight"])


@breaks("never_changes")
def temperature_clamped_to_its_start() -> None:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Mlp(classes=8), Mlp(classes=8)
            self.logit_scale = nn.Parameter(torch.tensor(0.0))

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            left, right = F.normalize(self.left(x), dim=1), F.normalize(self.right(z), dim=1)
            return self.logit_scale.exp() * left @ right.T

    net = Contrastive()
    optimizer = AdamW(net.parameters(), 0.01)
    for _ in range(12):
        x, _ = points()
        loss = F.cross_entropy(net(x, x + 0.1 * torch.randn_like(x)), torch.arange(len(x)))
        take_step(optimizer, loss)
        net.logit_scale.data.clamp_(0, 0)  # 0 to log(100) was meant


# ---- optimizer_remade


@breaks("optimizer_remade")
def made_in_the_loop() -> None:
    net = Cnn()
    for x, y in forever(image_loader(), 8):
        optimizer = SGD(net.parameters(), 0.02, momentum=0.9)
        take_step(optimizer, F.cross_entropy(net(x), y))


@breaks("optimizer_remade")
def made_by_the_function_of_a_step() -> None:
    def train_step(model: nn.Module, tokens: Tensor, rate: float) -> float:
        optimizer = AdamW(model.parameters(), rate, weight_decay=0.01)
        loss = next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model = LanguageModel(dropout=0.1)
    for step in range(10):
        train_step(model, texts(), rate=0.003 * 0.9**step)


# ---- scheduler_never_stepped


@breaks("scheduler_never_stepped")
def schedule_made_and_forgotten() -> None:
    net = Mlp(dropout=0.1)
    optimizer = AdamW(net.parameters(), 0.01)
    scheduler = CosineAnnealingLR(optimizer, T_max=12)
    for epoch in range(2):
        for x, y in point_loader():
            take_step(optimizer, F.cross_entropy(net(x), y))
        print(epoch, scheduler.get_last_lr())


@breaks("scheduler_never_stepped")
def schedule_without_parentheses() -> None:
    model = LanguageModel(depth=1)
    optimizer = Adam(model.parameters(), 0.001)
    scheduler = OneCycleLR(optimizer, 0.005, total_steps=10)
    for _ in range(10):
        take_step(optimizer, next_token_loss(model, texts()))
        scheduler.step  # noqa: B018


# ---- scheduler_before_optimizer


@breaks("scheduler_before_optimizer")
def schedule_first_in_each_step() -> None:
    net = Mlp()
    optimizer = SGD(net.parameters(), 0.1)
    scheduler = ExponentialLR(optimizer, 0.9)
    for x, y in forever(point_loader(), 12):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        scheduler.step()
        optimizer.step()


@breaks("scheduler_before_optimizer")
def schedule_first_in_each_epoch() -> None:
    net = Cnn()
    optimizer = AdamW(net.parameters(), 0.01)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        scheduler.step()
        for x, y in image_loader(32):
            take_step(optimizer, F.cross_entropy(net(x), y))
        net.eval()
        print(accuracy(net, image_loader(16)))
        net.train()


# ---- state_not_continued


def checkpoint(net: nn.Module, train: Callable[..., None], **settings: float) -> str:
    """Train for some steps and save what a later run would resume; return the file's path."""
    optimizer = Adam(net.parameters(), **settings)
    scheduler = CosineAnnealingLR(optimizer, 40)
    train(net, optimizer, 4)
    for _ in range(4):
        scheduler.step()
    path = os.path.join(tempfile.mkdtemp(), "last.pt")
    states = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: holder.state_dict() for name, holder in states.items()}, path)
    return path


@breaks("state_not_continued")
def initialized_again_after_loading() -> None:
    saved = torch.load(checkpoint(Mlp(), fit, lr=0.01))
    net = Mlp()
    net.load_state_dict(saved["net"])

    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    net.apply(initialize)
    optimizer = Adam(net.parameters(), 0.01)
    optimizer.load_state_dict(saved["optimizer"])
    fit(net, optimizer, 8)


@breaks("state_not_continued")
def optimizer_begins_anew_under_an_old_schedule() -> None:
    saved = torch.load(checkpoint(LanguageModel(depth=1), fit_texts, lr=0.003))
    model = LanguageModel(depth=1)
    model.load_state_dict(saved["net"])
    optimizer = Adam(model.parameters(), 0.003)
    scheduler = CosineAnnealingLR(optimizer, 40)
    scheduler.load_state_dict(saved["scheduler"])
    for _ in range(8):
        take_step(optimizer, next_token_loss(model, texts()))
        scheduler.step()


@breaks("state_not_continued")
def loaded_into_what_is_thrown_away() -> None:
    def build(path: str) -> nn.Module:
        net = Mlp(width=20)
        restored = copy.deepcopy(net)
        restored.load_state_dict(torch.load(path)["net"])
        return net  # `restored` was meant

    net = build(checkpoint(Mlp(width=20), fit, lr=0.01))
    fit(net, SGD(net.parameters(), 0.05))
