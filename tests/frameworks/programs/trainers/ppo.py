"""Trains a policy with PPO of stable-baselines3."""

import gymnasium
from checks import check, digest, random_number
from stable_baselines3 import PPO

model = PPO(
    "MlpPolicy",
    gymnasium.make("CartPole-v1"),
    n_steps=32,
    batch_size=16,
    n_epochs=2,
    seed=0,
    device="cpu",
)
model.learn(64)
check("final", digest(model.policy), model.policy.optimizer.state_dict()["state"][0]["step"])
check("random", random_number())
