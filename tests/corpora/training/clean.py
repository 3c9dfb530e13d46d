"""Legal changes of a training, of which a comparison has nothing to say."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from tests.corpora.case import REST, Case
from tests.corpora.training.families import token_batches
from tests.corpora.training.faults import case_of
from tests.corpora.training.setups import Change, join_group, rows_of
from tests.corpora.training.trainer import Training

CLEAN: dict[str, Case] = {}


def clean(
    setup: str, ranks: int = 1, round: str = REST, **environment: str
) -> Callable[[Change], Change]:
    """Add a legal change to the table; `ranks` and `environment` are those of the port."""

    def add(plant: Change) -> Change:
        name = plant.__name__
        CLEAN[name] = case_of(name, setup, plant, None, ranks, round=round, environment=environment)
        return plant

    return add


@clean("net")
def the_same_program(training: Training) -> None:
    """Change nothing."""


@clean("llama")
def another_attention_kernel(training: Training) -> None:
    training.model.set_attn_implementation("eager")


@clean("llama-clipped")
def llama_recomputed(training: Training) -> None:
    training.model.gradient_checkpointing_enable()


@clean("net-dropout")
def recomputed(training: Training) -> None:
    for block in training.model.blocks:
        block.preserves_random_state = True


@clean("unet-clipped")
def unet_recomputed(training: Training) -> None:
    training.model.enable_gradient_checkpointing()


@clean("net-clipped")
def optimizer_in_a_loop(training: Training) -> None:
    training.settings = training.settings | {"foreach": False}


@clean("net-clipped")
def optimizer_foreach(training: Training) -> None:
    training.settings = training.settings | {"foreach": True}


@clean("net-warmup")
def optimizer_fused(training: Training) -> None:
    training.settings = training.settings | {"fused": True}


@clean("unet")
def unet_optimizer_fused(training: Training) -> None:
    training.settings = training.settings | {"fused": True}


@clean("net-rows")
def accumulated_in_fewer_passes(training: Training) -> None:
    """Run 2 passes of 4 rows in place of 8 of one."""
    training.accumulation = 2
    training.batches = token_batches(padded=False)


@clean("net-whole", ranks=2)
def split_over_ranks(training: Training) -> None:
    join_group(training)
    training.network = nn.parallel.DistributedDataParallel(training.model)


@clean("net-accumulated")
def gradients_cleared_to_zero(training: Training) -> None:
    training.clears_to_none = False


@clean("net-accumulated")
def gradients_cleared_before(training: Training) -> None:
    training.clears_at_start = True


@clean("net-accumulated")
def groups_split_otherwise(training: Training) -> None:
    matrices, others = training.groups()
    training.groups = lambda: [
        {"params": [parameter], "weight_decay": group["weight_decay"]}
        for group in (others, matrices)
        for parameter in group["params"]
    ]


@clean("llama", OMP_NUM_THREADS="2")
def more_threads(training: Training) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@clean("net-clipped")
def clipped_one_by_one(training: Training) -> None:
    training.clip = lambda: nn.utils.clip_grad_norm_(
        training.model.parameters(), training.max_norm, foreach=False
    )


@clean("net-scaled")
def scaled_otherwise(training: Training) -> None:
    training.scaler_settings = {"init_scale": 64.0}


@clean("net-resumed")
def never_resumed(training: Training) -> None:
    training.resumes_at = None


@clean("net-rows")
def rows_in_pairs(training: Training) -> None:
    training.accumulation = 4
    training.batches = rows_of(token_batches(padded=False), 2)
