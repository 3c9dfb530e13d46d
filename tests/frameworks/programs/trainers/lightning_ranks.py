"""Trains with Lightning on two ranks in bf16-mixed: automatic optimization with accumulation and
clipping, a sanity check, validation, and a schedule.
"""

import logging
import warnings

import lightning
import torch
from checks import check, digest, exact, leave, logged
from torch import nn

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss, on_step=True)
        if self.trainer.is_global_zero:
            logged("loss", self.global_step, loss / 2)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.is_global_zero:
            gradients = [parameter.grad for parameter in self.parameters()]
            logged("grad_norm", self.global_step, nn.utils.get_total_norm(gradients))
            logged("lr[0]", self.global_step, self.lr_schedulers().get_last_lr()[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


lightning.seed_everything(0, verbose=False)
model = Regression()
data = torch.utils.data.TensorDataset(torch.randn(32, 4))
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    precision="bf16-mixed",
    accumulate_grad_batches=2,
    gradient_clip_val=0.3,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
loader = torch.utils.data.DataLoader(data, batch_size=4)
trainer.fit(model, loader, loader)
check("final", trainer.global_rank, digest(model), exact(trainer.callback_metrics["val_loss"]))
leave()
