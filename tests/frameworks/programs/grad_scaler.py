"""A script in the style of nanoGPT: autocast, GradScaler, accumulation, clipping, estimates."""

import torch
from checks import check, digest, exact, logged, random_number
from torch import nn
from torch.nn import functional

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.expand = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.project(functional.gelu(self.expand(self.norm(hidden))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
data = torch.randint(0, 32, (64, 9))


@torch.no_grad()
def estimate() -> float:
    model.eval()
    losses = [model(data[i : i + 4, :-1], data[i : i + 4, 1:])[1].item() for i in (0, 4)]
    model.train()
    return sum(losses) / len(losses)


for iteration in range(5):
    if iteration % 2 == 0:
        check("estimate", iteration, exact(estimate()))
    for micro_step in range(2):
        batch = data[8 * micro_step : 8 * micro_step + 8]
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(batch[:, :-1], batch[:, 1:])
        logged("loss", iteration, loss / 2)
        scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    logged("lr[0]", iteration, optimizer.param_groups[0]["lr"])
    logged("grad_norm", iteration, norm)
    logged("loss_scale", iteration, scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
check("final", digest(model), random_number())
