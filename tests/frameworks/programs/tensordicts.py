"""A step of PPO with torchrl, whose modules take and return TensorDicts."""

import torch
from checks import check, digest, exact, random_number
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

torch.manual_seed(0)
policy = TensorDictModule(
    nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2), NormalParamExtractor()),
    in_keys=["observation"],
    out_keys=["loc", "scale"],
)
actor = ProbabilisticActor(
    policy,
    spec=Bounded(-1, 1, (1,)),
    in_keys=["loc", "scale"],
    distribution_class=TanhNormal,
    return_log_prob=True,
)
value = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
advantage = GAE(gamma=0.99, lmbda=0.95, value_network=value)
loss_module = ClipPPOLoss(actor, value)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=0.01)
for turn in range(2):
    observations = torch.randn(6, 3)
    data = TensorDict({"observation": observations[:5]}, batch_size=[5])
    with torch.no_grad():
        data = actor(data)
    ends = torch.zeros(5, 1, dtype=torch.bool)
    data["next"] = TensorDict(
        {
            "observation": observations[1:],
            "reward": torch.randn(5, 1),
            "done": ends,
            "terminated": ends,
        },
        batch_size=[5],
    )
    with torch.no_grad():
        advantage(data)
    for _ in range(2):
        losses = loss_module(data)
        loss = sum(value for key, value in losses.items() if key.startswith("loss_"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    check(turn, exact(loss.detach()))
check("final", digest(loss_module), random_number())
