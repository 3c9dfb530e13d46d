"""How the reference of each case is trained; faults and legal changes are planted in one of these."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.corpora.training.families import BATCH, PADDING, Batch, build, token_batches
from tests.corpora.training.trainer import Training

Change = Callable[[Training], object]


@dataclass(frozen=True)
class Setup:
    """A family and how it is trained.

    Attributes:
        changes: to the attributes of `Training`.
        prepare: changes anything else.
        ranks: processes.
    """

    family: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    prepare: Change = lambda training: None
    ranks: int = 1


def prepared(name: str) -> Training:
    """Return the training of a setup, ready to run."""
    setup = SETUPS[name]
    family = build(setup.family)
    training = Training(family.model, family.loss, family.batches(), **setup.changes)
    setup.prepare(training)
    return training


def drop_out(training: Training) -> None:
    for block in training.model.blocks:
        block.drop.p = 0.25


def drop_out_and_recompute(training: Training) -> None:
    drop_out(training)
    for block in training.model.blocks:
        block.preserves_random_state = True


def enlarge_loss(training: Training) -> None:
    """Let the highest scale overflow."""
    compute_loss = training.compute_loss
    training.compute_loss = lambda model, batch: 256 * compute_loss(model, batch)


def divide_by_tokens(training: Training) -> None:
    """Divide the loss of every pass by the tokens of the whole step."""

    def batches() -> Iterator[Batch]:
        source = token_batches()
        while True:
            passes = list(itertools.islice(source, training.accumulation))
            tokens = sum((batch["ids"][:, 1:] != PADDING).sum() for batch in passes)
            yield from (batch | {"tokens": tokens} for batch in passes)

    def loss(batch: Batch) -> Tensor:
        mean = training.compute_loss(training.network, batch)
        return mean * (batch["ids"][:, 1:] != PADDING).sum() / batch["tokens"]

    training.batches, training.loss = batches(), loss


def take_whole_batches(training: Training) -> None:
    """Train on rows of equal length: the mean of the ranks' losses is that of the batch."""
    training.batches = token_batches(padded=False)


def take_single_rows(training: Training) -> None:
    """Train on 8 rows a step, each alone."""
    training.batches = rows_of(token_batches(padded=False), 1)


def rows_of(batches: Iterator[Batch], rows: int) -> Iterator[Batch]:
    """Cut batches into batches of fewer rows."""
    for batch in batches:
        for start in range(0, BATCH, rows):
            yield {name: tensor[start : start + rows] for name, tensor in batch.items()}


def join_group(training: Training) -> None:
    """Train on this rank's part of each batch."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    parts = rows_of(token_batches(padded=False), BATCH // size)
    training.batches = itertools.islice(parts, rank, None, size)


def join_group_and_average(training: Training) -> None:
    """Average the gradients of the ranks by hand."""
    join_group(training)
    training.synchronize = lambda: reduce_gradients(training, dist.get_world_size())


def reduce_gradients(training: Training, divisor: float) -> None:
    for parameter in training.trainable():
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor


SETUPS = {
    "net": Setup("net"),
    "net-accumulated": Setup("net", {"accumulation": 2}),
    "net-tokens": Setup("net", {"accumulation": 2}, divide_by_tokens),
    "net-clipped": Setup("net", {"max_norm": 0.05}),
    "net-warmup": Setup("net", {"warmup": 4}),
    "net-sgd": Setup(
        "net", {"optimizer_class": torch.optim.SGD, "settings": {"lr": 0.1, "momentum": 0.9}}
    ),
    "net-scaled": Setup("net", {"scaler_settings": {"init_scale": 1024.0}, "max_norm": 0.05}),
    "net-overflowing": Setup(
        "net",
        {"scaler_settings": {"init_scale": 2.0**127, "backoff_factor": 2.0**-100}, "steps": 4},
        enlarge_loss,
    ),
    "net-resumed": Setup("net", {"resumes_at": 2, "steps": 4}),
    "net-dropout": Setup("net", prepare=drop_out),
    "net-recomputed": Setup("net", prepare=drop_out_and_recompute),
    "net-rows": Setup("net", {"accumulation": 8}, take_single_rows),
    "net-whole": Setup("net", prepare=take_whole_batches),
    "net-ranks": Setup("net", prepare=join_group_and_average, ranks=2),
    "llama": Setup("llama"),
    "llama-clipped": Setup("llama", {"max_norm": 0.1, "warmup": 4}),
    "llama-accumulated": Setup("llama", {"accumulation": 2}),
    "gpt2": Setup("gpt2"),
    "unet": Setup("unet"),
    "unet-clipped": Setup("unet", {"max_norm": 0.05, "warmup": 4}),
}
