"""Loops that programs write themselves: a closure for LBFGS, flat fp32 master weights, a GAN with an
EMA copy of its generator.
"""

import copy

import torch
from checks import check, digest, logged, random_number
from torch import nn

torch.manual_seed(0)
inputs, targets = torch.randn(16, 4), torch.randn(16, 1)


class Fit(nn.Linear):
    """Fitted by LBFGS."""


class Half(nn.Linear):
    """Kept in bf16; the optimizer has a flat copy in fp32."""


class Generator(nn.Linear):
    pass


class Critic(nn.Linear):
    pass


fit = Fit(4, 1)
lbfgs = torch.optim.LBFGS(fit.parameters(), lr=0.5, max_iter=3)
for step in range(2):

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = (fit(inputs) - targets).square().mean()
        loss.backward()
        logged("Fit/loss", step, loss)  # noqa: B023
        return loss

    logged("Fit/lr[0]", step, lbfgs.param_groups[0]["lr"])
    lbfgs.step(closure)
check("fit", digest(fit))

half = Half(4, 1).bfloat16()
master = nn.Parameter(nn.utils.parameters_to_vector(half.parameters()).detach().float())
optimizer = torch.optim.AdamW([master], lr=0.01)
for step in range(3):
    loss = (half(inputs.bfloat16()) - targets).float().square().mean()
    half.zero_grad()
    loss.backward()
    master.grad = torch.cat([p.grad.flatten() for p in half.parameters()]).float()
    logged("Half/loss", step, loss)
    logged("Half/lr[0]", step, 0.01)
    logged("Half/grad_norm", step, nn.utils.clip_grad_norm_([master], 0.5))
    optimizer.step()
    with torch.no_grad():
        nn.utils.vector_to_parameters(master.bfloat16(), half.parameters())
check("half", digest(half))

generator, critic = Generator(2, 4), Critic(4, 1)
average = copy.deepcopy(generator)
of_generator = torch.optim.Adam(generator.parameters(), lr=0.02)
of_critic = torch.optim.Adam(critic.parameters(), lr=0.03)
for step in range(3):
    noise = torch.randn(8, 2)
    of_critic.zero_grad()
    loss = critic(generator(noise).detach()).mean() - critic(inputs).mean()
    loss.backward()
    logged("Critic/loss", step, loss)
    logged("Critic/lr[0]", step, 0.03)
    logged("Critic/grad_norm", step, nn.utils.clip_grad_norm_(critic.parameters(), 1.0))
    of_critic.step()
    of_generator.zero_grad()
    loss = -critic(generator(noise)).mean()
    loss.backward()
    logged("Generator/loss", step, loss)
    logged("Generator/lr[0]", step, 0.02)
    gradients = [parameter.grad for parameter in generator.parameters()]
    logged("Generator/grad_norm", step, nn.utils.get_total_norm(gradients))
    of_generator.step()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), generator.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
        check("average", float(average(noise).sum()).hex())
check("final", digest(generator), digest(critic), random_number())
