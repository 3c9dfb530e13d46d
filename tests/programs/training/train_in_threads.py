"""Trains a model of its own in each of four threads."""

import threading

import torch


def train(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(150):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
