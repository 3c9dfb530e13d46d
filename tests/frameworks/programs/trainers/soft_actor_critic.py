"""Trains an actor and two critics with SAC of stable-baselines3: three optimizers a step."""

import gymnasium
from checks import check, digest, random_number
from stable_baselines3 import SAC

model = SAC(
    "MlpPolicy",
    gymnasium.make("Pendulum-v1"),
    learning_starts=10,
    batch_size=8,
    policy_kwargs={"net_arch": [16]},
    seed=0,
    device="cpu",
)
model.learn(16)
check("final", digest(model.policy), model._n_updates, random_number())
