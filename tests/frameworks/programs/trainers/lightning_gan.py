"""Optimizes a generator and a critic by hand in one LightningModule."""

import logging
import warnings

import lightning
import torch
from checks import check, digest
from torch import nn

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Adversaries(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(2, 4), nn.Linear(4, 1)

    def training_step(self, batch, index):
        check("batch", index, self.global_step)
        of_generator, of_critic = self.optimizers()
        loss = -self.critic(self.generator(torch.ones(4, 2))).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        loss = (
            self.critic(self.generator(torch.ones(4, 2)).detach()) - self.critic(batch[0])
        ).mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(
            self.critic.parameters()
        )


lightning.seed_everything(0, verbose=False)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 4)), 4)
model = Adversaries()
lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False,
).fit(model, loader)  # fmt: skip
check("final", digest(model))
