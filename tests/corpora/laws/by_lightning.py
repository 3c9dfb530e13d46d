"""Trainings by Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from tests.corpora.laws.models import (
    Cnn,
    LanguageModel,
    Mlp,
    image_loader,
    next_token_loss,
    point_loader,
    texts,
)
from tests.corpora.laws.program import breaks, healthy

if TYPE_CHECKING:
    from lightning import LightningModule


def fit(module: LightningModule, loader: Any, **settings: Any) -> None:
    """Train two epochs with Lightning."""
    import logging
    import warnings

    from lightning import Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    validation = settings.pop("validation", None)
    Trainer(max_epochs=2, accelerator="cpu", **quiet, **settings).fit(module, loader, validation)


# ---- broken


@breaks("gradients_not_cleared")
def lightning_steps_by_hand_without_clearing() -> None:
    from lightning import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = Mlp(dropout=0.1)

        def training_step(self, batch: list[Tensor], index: int) -> None:
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            self.optimizers().step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Adam(self.net.parameters(), 0.005)

    fit(Classifier(), point_loader())


@breaks("not_held")
def lightning_optimizer_of_the_head_alone() -> None:
    from lightning import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Cnn()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return SGD(self.net.head.parameters(), 0.05, momentum=0.9)

    fit(Classifier(), image_loader(40))


@breaks("scheduler_never_stepped")
def lightning_steps_by_hand_without_the_schedule() -> None:
    from lightning import LightningModule

    class Writer(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = LanguageModel(depth=1)

        def training_step(self, batch: Tensor, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(next_token_loss(self.model, batch))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.model.parameters(), 0.003)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)]

    fit(Writer(), torch.utils.data.DataLoader(texts(30), 6, shuffle=True))


# ---- healthy


@healthy
def lightning_with_validation() -> None:
    from lightning import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Cnn(dropout=0.2)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters(), 0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    fit(Classifier(), image_loader(64), validation=image_loader(16), **settings)


@healthy
def lightning_gan_by_hand() -> None:
    from lightning import LightningModule

    class Gan(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(
                nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12)
            )
            self.discriminator = Mlp(classes=1)

        def training_step(self, batch: list[Tensor], index: int) -> None:
            opt_g, opt_d = self.optimizers()
            fake = self.generator(torch.randn(len(batch[0]), 6))
            self.toggle_optimizer(opt_g)
            opt_g.zero_grad()
            self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.toggle_optimizer(opt_d)
            opt_d.zero_grad()
            real_loss = F.softplus(-self.discriminator(batch[0])).mean()
            fake_loss = F.softplus(self.discriminator(fake.detach())).mean()
            self.manual_backward(real_loss + fake_loss)
            opt_d.step()
            self.untoggle_optimizer(opt_d)

        def configure_optimizers(self) -> Any:
            return [
                Adam(self.generator.parameters(), 1e-3), Adam(self.discriminator.parameters(), 1e-3)
            ]  # fmt: skip

    fit(Gan(), point_loader(80))
