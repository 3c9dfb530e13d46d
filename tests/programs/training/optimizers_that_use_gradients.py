"""Train in the way that the argument names. A line per gradient that the optimizer uses: its step,
how many came before it in the step, and its mean magnitude.
"""

import sys

import torch

torch.manual_seed(0)
WAY = sys.argv[1]
model = torch.nn.Linear(4, 1, bias=False)
used: list[float] = []


def closure(backwards: int = 1) -> torch.Tensor:
    """Compute the gradient of this step, clipped."""
    optimizer.zero_grad()
    for _ in range(backwards):
        loss = model(inputs).square().mean()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    used.append(model.weight.grad.abs().mean().item())
    return loss


match WAY:
    case "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    case "fused-scaled" | "fused-unscaled":
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    case _:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    inputs = torch.randn(8, 4)
    used.clear()
    match WAY:
        case "positional":
            optimizer.step(closure)
        case "accumulated":
            optimizer.step(closure=lambda: closure(backwards=2))
        case "lbfgs":
            optimizer.step(closure)
        case "fused-scaled" | "fused-unscaled":
            scaler.scale(model(inputs).square().mean()).backward()
            if WAY == "fused-unscaled":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            # the fused step has divided it by the scale
            used.append(model.weight.grad.abs().mean().item())
            optimizer.zero_grad()
        case "no-closure":
            closure()
            optimizer.step(None)
    for evaluation, magnitude in enumerate(used):
        print(step, evaluation, magnitude)
