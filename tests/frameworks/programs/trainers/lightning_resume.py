"""Fits with Lightning: validation, accumulation, clipping, and a second fit from a checkpoint."""

import logging
import warnings

import lightning
import torch
from checks import check, digest, exact
from torch import nn

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.criterion = nn.MSELoss()

    def training_step(self, batch, index):
        return self.criterion(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        check("validation", self.global_step, exact(self.criterion(self.net(batch[0]), batch[1])))

    def on_before_optimizer_step(self, optimizer):
        check("gradient", self.global_step, exact(self.net.weight.grad.abs().mean()))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)


def fit(model: Regression, steps: int, **arguments) -> lightning.Trainer:
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", accumulate_grad_batches=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, loader, loader, **arguments)
    return trainer


lightning.seed_everything(0, verbose=False)
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
loader = torch.utils.data.DataLoader(data, 4)
fit(Regression(), 2).save_checkpoint("fit.ckpt")
model = Regression()
fit(model, 4, ckpt_path="fit.ckpt")
check("final", digest(model))
