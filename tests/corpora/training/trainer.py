"""A training loop whose every part can be replaced, as a fault or a legal change does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.corpora.training.families import Batch, Loss


@dataclass
class Training:
    """How one model is trained.

    Attributes:
        network: what is called; the model, or a wrapper of it.
        accumulation: backward passes a step.
        max_norm: of the gradients; None does not clip.
        warmup: steps in which the learning rate rises; 0 for a constant rate.
        settings: of the optimizer.
        decay: weight decay of matrices; norms and biases have none.
        scaler: settings of a GradScaler, if there is one.
        resumes_at: the step before which model and optimizer are made anew from a checkpoint.
    """

    model: nn.Module
    compute_loss: Loss
    batches: Iterator[Batch]
    steps: int = 3
    accumulation: int = 1
    max_norm: float | None = None
    warmup: int = 0
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    decay: float = 0.1
    scaler_settings: Mapping[str, Any] | None = None
    resumes_at: int | None = None
    clears_at_start: bool = False
    clears_to_none: bool = True
    network: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    schedule: torch.optim.lr_scheduler.LRScheduler = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)
    step: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.network = self.model

    def run(self) -> None:
        """Train for a few steps."""
        self.network.train()
        self.make_optimizer()
        self.scaler = torch.amp.GradScaler(
            "cpu", enabled=self.scaler_settings is not None, **(self.scaler_settings or {})
        )
        for step in range(self.steps):
            self.step = step
            if self.step == self.resumes_at:
                self.resume()
            if self.clears_at_start:
                self.clear()
            for batch in itertools.islice(self.batches, self.accumulation):
                self.backward(self.loss(batch))
            self.synchronize()
            self.update()
            if not self.clears_at_start:
                self.clear()

    # -- the parts

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizer: matrices decay, norms and biases do not."""
        parameters = list(self.trainable())
        return [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]

    def trainable(self) -> Iterable[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def make_optimizer(self) -> None:
        self.optimizer = self.optimizer_class(self.groups(), **self.settings)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def rate(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0

    def loss(self, batch: Batch) -> Tensor:
        return self.compute_loss(self.network, batch) / self.accumulation

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def synchronize(self) -> None:
        """Do nothing: a single process has all gradients."""

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def clip(self) -> None:
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.clears_to_none)

    def resume(self) -> None:
        """Go on with a new optimizer from a checkpoint of the old one."""
        state = copy.deepcopy(self.optimizer.state_dict())
        self.make_optimizer()
        self.load(state)

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
