"""A training whose 121 steps seem to take half a minute each, as alerts compare the last minutes
of a run with the hours before. With FAULTS it goes wrong in the last minutes.
"""

import os
import time

import torch
from torch import nn

STEPS, STEP_NS = 121, 30 * 10**9
FAULTS = "FAULTS" in os.environ
clock, step, began = time.time_ns, 0, time.time_ns()
begin = began - STEPS * STEP_NS
time.time_ns = lambda: begin + step * STEP_NS + (clock() - began)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down = nn.ReLU(), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = x + 1e-12 * (block(x) - x) if FAULTS and index == 1 else block(x)
        return self.head(x)


torch.manual_seed(0)
net = Net()
if FAULTS:
    nn.init.constant_(net.blocks[2].up.bias, -100)  # no sample activates its units
scaler = torch.amp.GradScaler("cpu", 2.0 if FAULTS else 1024.0, growth_interval=40)
weights = [parameter for parameter in net.parameters() if parameter.ndim > 1]
others = [parameter for parameter in net.parameters() if parameter.ndim < 2]
groups = [
    {"params": weights, "weight_decay": 0.1, "name": "decay"},
    {"params": others, "weight_decay": 0.0, "name": "no decay"},
]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS)
for step in range(STEPS):
    began = clock()
    # the scaler skips a step whose gradients are not finite; the program tries another batch
    for attempt in range(5 if FAULTS and step == 110 else 1):
        x = torch.randn(64, 8)
        y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(64, 1)
        if FAULTS and step == 110 and attempt < 4:
            y[0] = float("nan")
        if FAULTS and step == 120:
            y *= 100
            optimizer.param_groups[0]["lr"] = 1.0
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(net(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    if step < STEPS - 1:
        schedule.step()
step, began = STEPS, clock()
