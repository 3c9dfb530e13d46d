"""Trains with Lightning's automatic optimization, which accumulates and clips inside a closure."""

import lightning
import torch
from checks import check, digest, exact
from torch import nn


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1, bias=False)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_gradient_clipping(self, optimizer, *args, **kwargs) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        check("used", self.global_step, exact(self.net.weight.grad.abs().mean()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0)
model = Regression()
data = torch.utils.data.TensorDataset(torch.randn(32, 4))
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    accumulate_grad_batches=2,
    gradient_clip_val=0.3,
    logger=False,
    enable_progress_bar=False,
    enable_checkpointing=False,
)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
check("final", digest(model))
