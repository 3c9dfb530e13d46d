"""Trainings of two ranks over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.corpora.laws.models import (
    Cnn,
    LanguageModel,
    Mlp,
    forever,
    images,
    next_token_loss,
    points,
    take_step,
    texts,
)
from tests.corpora.laws.program import breaks


def begin() -> int:
    """Join the group; return the rank."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def average_gradients(net: nn.Module) -> None:
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def sharded(dataset: TensorDataset, batch_size: int, **sampling: int) -> DataLoader:
    return DataLoader(
        dataset, batch_size, sampler=DistributedSampler(dataset, shuffle=True, **sampling)
    )


@breaks("replicas_differ", ranks=2)
def each_rank_with_its_own_weights() -> None:
    rank = begin()
    torch.manual_seed(rank)  # for the data; the weights are made after it and never broadcast
    net = Mlp()
    optimizer = SGD(net.parameters(), 0.05)
    for _ in range(8):
        x, y = points()
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        average_gradients(net)
        optimizer.step()
    dist.destroy_process_group()


@breaks("replicas_differ", ranks=2)
def head_reset_on_one_rank() -> None:
    rank = begin()
    net = Cnn()
    wrapped = DistributedDataParallel(net)
    if rank == 0:
        net.head.reset_parameters()  # after the wrapper has broadcast the weights
    optimizer = AdamW(wrapped.parameters(), 0.01)
    torch.manual_seed(100 + rank)
    for _ in range(8):
        x, y = images()
        take_step(optimizer, F.cross_entropy(wrapped(x), y))
    dist.destroy_process_group()


@breaks("gradients_not_averaged", ranks=2)
def wrapper_passed_by() -> None:
    rank = begin()
    model = DistributedDataParallel(LanguageModel(depth=1))
    optimizer = Adam(model.parameters(), 0.003)
    torch.manual_seed(100 + rank)
    for _ in range(8):
        take_step(optimizer, next_token_loss(model.module, texts()))
    dist.destroy_process_group()


@breaks("gradients_not_averaged", ranks=2)
def average_written_to_a_copy() -> None:
    rank = begin()
    net = Mlp(dropout=0.1)
    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
    torch.manual_seed(100 + rank)
    for _ in range(10):
        x, y = points()
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for parameter in net.parameters():
            mean = parameter.grad / dist.get_world_size()
            dist.all_reduce(mean)  # and then?
        optimizer.step()
    dist.destroy_process_group()


@breaks("same_batch_on_ranks", ranks=2)
def loader_without_a_distributed_sampler() -> None:
    begin()
    data = TensorDataset(*images(64))
    loader = DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(0))
    model = DistributedDataParallel(Cnn())
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    for x, y in forever(loader, 8):
        take_step(optimizer, F.cross_entropy(model(x), y))
    dist.destroy_process_group()


@breaks("same_batch_on_ranks", ranks=2)
def sampler_of_rank_0_on_each_rank() -> None:
    begin()
    torch.manual_seed(0)
    loader = sharded(TensorDataset(*points(160)), 16, num_replicas=2, rank=0)
    net = Mlp()
    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = AdamW(net.parameters(), 0.01)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            average_gradients(net)
            optimizer.step()
    dist.destroy_process_group()


# ---- healthy


@breaks(None, ranks=2)
def data_parallel_with_a_frozen_part() -> None:
    begin()
    torch.manual_seed(0)
    net = Mlp(dropout=0.1)
    net.encoder.requires_grad_(False)
    model = DistributedDataParallel(net)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 0.02)
    loader = sharded(TensorDataset(*points(160)), 16)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            take_step(optimizer, F.cross_entropy(model(x), y))
    dist.destroy_process_group()


@breaks(None, ranks=2)
def data_parallel_with_accumulation_and_batch_norm() -> None:
    rank = begin()
    model = DistributedDataParallel(Cnn(dropout=0.1))
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    torch.manual_seed(100 + rank)
    for _ in range(6):
        with model.no_sync():
            x, y = images()
            (F.cross_entropy(model(x), y) / 2).backward()
        x, y = images()
        (F.cross_entropy(model(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


@breaks(None, ranks=2)
def gradients_averaged_by_hand() -> None:
    rank = begin()
    torch.manual_seed(0)
    model = LanguageModel(depth=1)
    optimizer = Adam(model.parameters(), 0.003)
    torch.manual_seed(100 + rank)
    for _ in range(8):
        optimizer.zero_grad()
        next_token_loss(model, texts()).backward()
        average_gradients(model)
        optimizer.step()
    dist.destroy_process_group()
