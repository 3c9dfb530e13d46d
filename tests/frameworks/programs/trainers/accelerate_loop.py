"""Trains with Accelerate: accumulation, clipping, validation; one process or several."""

import torch
from accelerate import Accelerator
from checks import check, digest, exact, logged, random_number
from torch import nn

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
rank = accelerator.process_index
step = 0
for epoch in range(2):
    model.train()
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.is_main_process:
                logged("loss", step, loss / 2)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if accelerator.is_main_process:
                    logged("lr[0]", step, schedule.get_last_lr()[0])
                    logged("grad_norm", step, norm)
                step += 1
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        check("validation", rank, epoch, exact(model(torch.ones(2, 8)).sum()))
check("final", rank, digest(accelerator.unwrap_model(model)), random_number())
accelerator.end_training()
