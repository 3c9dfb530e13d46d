"""Faults that people make when they port a training, and what a comparison has to say of each.

Each is planted in the port only, in the training of a setup.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpora.case import REST, SIDE, Case, Right, Run, at
from tests.corpora.training.families import PADDING, Batch
from tests.corpora.training.lines import lines_of
from tests.corpora.training.setups import SETUPS, Change, reduce_gradients
from tests.corpora.training.trainer import Training

FAULTS: dict[str, Case] = {}
ROOT = ("",)
BACKWARD, LOSS, FORWARD, CLIPPING, UPDATE = KINDS = (
    "the backward pass: custom functions, detached tensors, hooks, ties, recomputation, sums over ranks",
    "the loss: accumulation, padding, tokens, targets",
    "the forward: batches, dropout, weights changed from outside",
    "clipping and gradient scaling",
    "the update: schedules, decay, settings, what the optimizer holds, its state after a resume",
)


def case_of(
    name: str, setup: str, plant: Change, right: Right | None, ranks: int = 1, **fields: Any
) -> Case:
    """Return a case: the training of a setup, against the same with a change planted in it."""
    runs = {
        side: Run(SIDE, ("training", of, side), count, "training", environment=environment)
        for side, of, count, environment in (
            ("reference", setup, SETUPS[setup].ranks, {}),
            ("port", name, max(ranks, SETUPS[setup].ranks), fields.pop("environment", {})),
        )
    }
    return Case(name=name, family=setup, plant=plant, right=right, **runs, **fields)


def fault(
    setup: str, phases: str, *modules: str, step: int = 0, words: str = "", kind: str = "", round: str = REST
) -> Callable[[Change], Change]:  # fmt: skip
    """Add a fault to the table.

    Args:
        phases: the right phases of a finding, best first.
        modules: the right modules, best first: the one that computed a wrong tensor or owns a wrong
            parameter; the root where all parameters are off alike.
        step: of the reference, where the fault first shows.
    """

    def add(plant: Change) -> Change:
        name, places = plant.__name__, tuple(map(at, modules or ROOT))
        right = Right(
            places=places, in_reference=places, phases=tuple(phases.split()), step=step, words=tuple(words.split()),
            lines=lines_of(name, phases.split()),
        )  # fmt: skip
        FAULTS[name] = case_of(name, setup, plant, right, round=round, kind=kind or _kind(right))
        return plant

    return add


def _kind(right: Right) -> str:
    if {"clip", "skip|scale"} & set(right.words):
        return CLIPPING
    first = right.phases[0]
    return {"loss": LOSS, "forward": FORWARD, "update": UPDATE}.get(first, BACKWARD)


# ---- backward


@fault("net", "backward", "blocks.1.act", "blocks.1.up")
def backward_by_a_factor(training: Training) -> None:
    training.model.blocks[1].act.factor = 1.1


@fault("net", "backward", "blocks.2.act", "blocks.2.up")
def backward_of_other_sign(training: Training) -> None:
    training.model.blocks[2].act.factor = -1.0


@fault("net", "backward", "blocks.1.mix")
def backward_transposed(training: Training) -> None:
    training.model.blocks[1].mix.transposed = True


@fault("net", "backward", "blocks.1", "blocks.0")
def residual_detached(training: Training) -> None:
    training.model.blocks[1].residual = Tensor.detach


@fault("net", "backward", "blocks.0.down")
def hook_scales_a_weights_gradient(training: Training) -> None:
    training.model.blocks[0].down.weight.register_hook(lambda gradient: gradient * 0.5)


@fault("net", "backward", "blocks.1.norm", "blocks.1")
def hook_scales_a_modules_gradient(training: Training) -> None:
    training.model.blocks[1].norm.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 0.5,)
    )


@fault("net", "backward", "embed")
def padding_row_learns(training: Training) -> None:
    training.model.embed.padding_idx = None


@fault("net", "backward", "head", "norm")
def weight_changed_before_backward(training: Training) -> None:
    backward = training.backward

    def change_first(loss: Tensor) -> None:
        kept = training.model.head.weight.data.clone()
        training.model.head.weight.data.copy_(kept.flip(0))
        backward(loss)
        training.model.head.weight.data.copy_(kept)

    training.backward = change_first


@fault("net-recomputed", "recompute", "blocks.2.drop")
def recomputed_with_another_random_stream(training: Training) -> None:
    training.model.blocks[2].preserves_random_state = False
    # the draw that shifts the stream between forward and recomputation
    backward = training.backward
    training.backward = lambda loss: (torch.rand(3), backward(loss))


@fault("net", "backward update", "blocks.0.up", words="frozen|requires")
def parameter_frozen(training: Training) -> None:
    training.model.blocks[0].up.weight.requires_grad_(False)


@fault("gpt2", "backward", "lm_head", "transformer.wte")
def weight_untied(training: Training) -> None:
    training.model.lm_head.weight = nn.Parameter(training.model.lm_head.weight.detach().clone())


@fault("llama", "backward", "model.layers.1.self_attn", "model.layers.1.self_attn.k_proj")
def keys_detached(training: Training) -> None:
    training.model.model.layers[1].self_attn.k_proj.register_forward_hook(
        lambda module, inputs, output: output.detach()
    )


# the product that goes into down_proj is no output of a module: its factors are the first places
@fault(
    "llama",
    "backward",
    "model.layers.0.mlp.down_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.0.mlp.act_fn",
)
def hook_scales_an_activations_gradient(training: Training) -> None:
    training.model.model.layers[0].mlp.down_proj.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 2,)
    )


@fault("llama", "backward update", "model.norm", words="frozen|requires")
def norm_frozen(training: Training) -> None:
    training.model.model.norm.weight.requires_grad_(False)


@fault("unet", "backward", "conv_in")
def convolutions_gradient_flipped(training: Training) -> None:
    training.model.conv_in.weight.register_hook(lambda gradient: gradient.flip(-1))


@fault("unet", "backward", "time_embedding", "time_embedding.linear_2")
def time_embedding_detached(training: Training) -> None:
    training.model.time_embedding.register_forward_hook(
        lambda module, inputs, output: output.detach()
    )


@fault("net", "backward", step=1, words="zero|accumul|cleared")
def gradients_never_cleared(training: Training) -> None:
    training.clear = lambda: None


@fault("net-ranks", "backward", words="rank|reduce")
def all_reduce_missing(training: Training) -> None:
    training.synchronize = lambda: None


@fault("net-ranks", "backward", words="2")
def all_reduce_sums(training: Training) -> None:
    training.synchronize = lambda: reduce_gradients(training, 1)


@fault("net-ranks", "backward", words="1/2|0.5")
def all_reduce_averages_twice(training: Training) -> None:
    training.synchronize = lambda: reduce_gradients(training, 4)


@fault("net-ranks", "backward", "blocks.1.down")
def all_reduce_forgets_a_parameter(training: Training) -> None:
    forgotten = training.model.blocks[1].down.weight
    averages = training.synchronize

    def synchronize() -> None:
        own = forgotten.grad.clone()
        averages()
        forgotten.grad.copy_(own)

    training.synchronize = synchronize


# ---- loss


@fault("net-accumulated", "loss", words="2")
def accumulation_not_divided(training: Training) -> None:
    training.loss = lambda batch: training.compute_loss(training.network, batch)


@fault("net-accumulated", "loss", words="2|0.5")
def accumulation_divided_twice(training: Training) -> None:
    loss = training.loss
    training.loss = lambda batch: loss(batch) / training.accumulation


@fault("llama-accumulated", "loss", words="2")
def llama_accumulation_not_divided(training: Training) -> None:
    training.loss = lambda batch: training.compute_loss(training.network, batch)


def _token_losses(model: nn.Module, batch: Batch, **settings: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, and where there is no padding."""
    ids = batch["ids"]
    logits, targets = model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    losses = F.cross_entropy(logits, targets, reduction="none", **settings)
    return losses, targets != PADDING


@fault("net", "loss")
def loss_averaged_over_padding(training: Training) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        losses, real = _token_losses(model, batch)
        return (losses * real).sum() / real.numel()

    training.compute_loss = loss


@fault("net", "loss")
def padding_is_learned(training: Training) -> None:
    training.compute_loss = lambda model, batch: _token_losses(model, batch)[0].mean()


@fault("net", "loss")
def loss_smoothes_labels(training: Training) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        losses, real = _token_losses(model, batch, label_smoothing=0.1)
        return losses[real].mean()

    training.compute_loss = loss


@fault("net", "loss")
def loss_summed(training: Training) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        losses, real = _token_losses(model, batch)
        return losses[real].sum()

    training.compute_loss = loss


@fault("unet", "loss")
def unet_predicts_velocity(training: Training) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        level = (batch["time"] / 1000).view(-1, 1, 1, 1)
        noisy = (1 - level) * batch["image"] + level * batch["noise"]
        return F.mse_loss(model(noisy, batch["time"]).sample, batch["noise"] - batch["image"])

    training.compute_loss = loss


@fault("net-tokens", "loss")
def mean_of_the_passes_means(training: Training) -> None:
    training.loss = functools.partial(Training.loss, training)


# ---- forward


@fault("net", "forward", step=1, words="input|batch")
def batches_in_another_order(training: Training) -> None:
    first, second, third, *_ = itertools.islice(training.batches, 3)
    training.batches = iter([first, third, second])


@fault("net-dropout", "forward", "blocks.0.drop")
def dropout_of_another_rate(training: Training) -> None:
    for block in training.model.blocks:
        block.drop.p = 0.3


@fault("net-dropout", "forward", "blocks.0.drop")
def dropout_off(training: Training) -> None:
    training.model.train = lambda: nn.Module.train(training.model, False)


# ---- clipping


@fault("net-clipped", "update backward", words="clip")
def clip_missing(training: Training) -> None:
    training.max_norm = None


@fault("net-clipped", "update backward", words="clip")
def clip_to_another_norm(training: Training) -> None:
    training.max_norm = 0.1


@fault("net-clipped", "update backward", words="clip")
def clip_after_the_step(training: Training) -> None:
    update, clip = training.update, training.clip
    training.clip = lambda: None
    training.update = lambda: (update(), clip())


@fault("unet-clipped", "update backward", words="clip")
def clip_by_value(training: Training) -> None:
    training.clip = lambda: nn.utils.clip_grad_value_(training.model.parameters(), 0.01)


@fault("net-scaled", "update backward", words="clip")
def clip_before_unscaling(training: Training) -> None:
    def update() -> None:
        training.clip()
        training.scaler.step(training.optimizer)
        training.scaler.update()
        training.schedule.step()

    training.update = update


@fault("net-overflowing", "update", words="skip|scale")
def scale_never_lowered(training: Training) -> None:
    def update() -> None:
        training.scaler.step(training.optimizer)
        training.scaler.update(2.0**127)

    training.update = update


# ---- update


@fault("net-warmup", "update", words="lr|rate")
def schedule_one_step_ahead(training: Training) -> None:
    training.rate = lambda step: min(1.0, (step + 2) / training.warmup)


@fault("net-warmup", "update", step=1, words="lr|rate")
def schedule_of_other_length(training: Training) -> None:
    training.rate = lambda step: min(1.0, (1 + 2 * step) / training.warmup)


@fault("llama-clipped", "update", words="lr|rate")
def warmup_missing(training: Training) -> None:
    training.warmup = 0


@fault("unet-clipped", "update", step=1, words="lr|rate")
def schedule_never_stepped(training: Training) -> None:
    training.rate = lambda step: 1 / training.warmup


def _one_group(training: Training) -> None:
    training.groups = lambda: [
        {"params": list(training.trainable()), "weight_decay": training.decay}
    ]


@fault("net", "update", "blocks.0.norm", words="decay")
def norms_decay(training: Training) -> None:
    _one_group(training)


@fault("llama", "update", "model.layers.0.input_layernorm", words="decay")
def llama_norms_decay(training: Training) -> None:
    _one_group(training)


@fault("net", "update", words="decay|AdamW")
def decay_coupled(training: Training) -> None:
    training.optimizer_class = torch.optim.Adam


@fault("net", "update", "embed", words="decay")
def decay_missing(training: Training) -> None:
    training.decay = 0.0


@fault("net", "update", words="eps")
def eps_of_another_size(training: Training) -> None:
    training.settings = training.settings | {"eps": 1e-4}


@fault("net", "update", step=1, words="beta")
def betas_of_another_size(training: Training) -> None:
    training.settings = training.settings | {"betas": (0.9, 0.95)}


@fault("net", "update", step=1, words="amsgrad")
def amsgrad(training: Training) -> None:
    training.settings = training.settings | {"amsgrad": True, "betas": (0.9, 0.999)}


@fault("net", "update", words="lr|rate")
def rate_of_another_size(training: Training) -> None:
    training.settings = training.settings | {"lr": 0.02}


@fault("net", "update", "embed", words="lr|rate")
def rate_of_one_group(training: Training) -> None:
    groups = training.groups()
    groups[0]["lr"] = 0.02
    training.groups = lambda: groups


@fault("net", "update", "head", words="optimizer")
def parameter_that_no_optimizer_holds(training: Training) -> None:
    head = training.model.head.weight
    trainable = [parameter for parameter in training.trainable() if parameter is not head]
    training.trainable = lambda: trainable


@fault("unet", "update", "conv_out", words="optimizer")
def unet_parameters_that_no_optimizer_holds(training: Training) -> None:
    kept_out = set(training.model.conv_out.parameters())
    trainable = [parameter for parameter in training.trainable() if parameter not in kept_out]
    training.trainable = lambda: trainable


@fault("net-sgd", "update", step=1, words="dampening")
def momentum_dampened(training: Training) -> None:
    training.settings = training.settings | {"dampening": 0.1}


@fault("net-sgd", "update", words="nesterov")
def momentum_of_nesterov(training: Training) -> None:
    training.settings = training.settings | {"nesterov": True}


@fault("net-resumed", "update", step=2, words="state")
def state_lost_at_a_resume(training: Training) -> None:
    training.load = lambda state: None


@fault("net-resumed", "update", step=2, words="state|step")
def step_counter_lost_at_a_resume(training: Training) -> None:
    load = training.load

    def load_without_steps(state: dict[str, Any]) -> None:
        for values in state["state"].values():
            values["step"].zero_()
        load(state)

    training.load = load_without_steps


@fault("net", "update", words="maximize")
def loss_maximized(training: Training) -> None:
    training.settings = training.settings | {"maximize": True}


class WithoutBiasCorrection(torch.optim.AdamW):
    """Adam as its first implementations outside of the paper were."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                    state["square"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 - first)
                state["square"].lerp_(parameter.grad.square(), 1 - second)
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.sub_(rate * state["mean"] / (state["square"].sqrt() + group["eps"]))


@fault("net", "update", words="WithoutBiasCorrection")
def bias_correction_missing(training: Training) -> None:
    training.optimizer_class = WithoutBiasCorrection


@fault("net", "update", words="leaves|unchanged|updates")
def optimizer_of_a_stale_copy(training: Training) -> None:
    stale = copy.deepcopy(training.model)
    training.trainable = stale.parameters


@fault("llama-clipped", "update", step=1, words="lr|rate")
def schedule_stepped_twice(training: Training) -> None:
    update = training.update
    training.update = lambda: (update(), training.schedule.step())


# ---- outside of forward, backward and optimizer


@fault("net", "forward update", "blocks.1.mix", step=2)
def weight_reset_after_an_update(training: Training) -> None:
    weight = training.model.blocks[1].mix.weight
    update = training.update

    def update_and_reset() -> None:
        kept = weight.detach().clone()
        update()
        if training.step == 1:
            weight.data.copy_(kept)

    training.update = update_and_reset
