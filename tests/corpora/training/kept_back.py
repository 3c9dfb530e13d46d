"""Faults and legal changes that were written after the rules, and not used to tune them."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpora.case import KEPT_BACK, Case
from tests.corpora.training import clean as clean_table
from tests.corpora.training import faults as fault_table
from tests.corpora.training.clean import CLEAN
from tests.corpora.training.families import token_batches
from tests.corpora.training.faults import FAULTS, case_of
from tests.corpora.training.setups import SETUPS, join_group, prepared
from tests.corpora.training.trainer import Training

LATER = "kept back: of all these kinds, written after the rules"
BESIDE_ANOTHER = "beside a legal change: another kernel, recomputation, other batches, ranks, shards, a compiled model"
fault = functools.partial(fault_table.fault, round=KEPT_BACK, kind=LATER)
clean = functools.partial(clean_table.clean, round=KEPT_BACK)


# ---- backward


class CarelessNorm(torch.autograd.Function):
    """RMS norm whose backward pass takes the root mean square for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (x * scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        return gradient * weight * scale, (gradient * x * scale).flatten(0, -2).sum(0), None


@fault("llama", "backward", "model.layers.1.post_attention_layernorm", "model.layers.1")
def llama_norm_with_a_careless_backward(training: Training) -> None:
    norm = training.model.model.layers[1].post_attention_layernorm
    norm.forward = lambda x: CarelessNorm.apply(x, norm.weight, norm.variance_epsilon)


@fault("llama", "backward", "model.layers.0.self_attn", "model.layers.0.self_attn.q_proj")
def llama_queries_detached(training: Training) -> None:
    training.model.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda module, inputs, output: output.detach()
    )


@fault("gpt2", "backward", "transformer.wte", "lm_head")
def gpt2_head_learns_nothing(training: Training) -> None:
    head = training.model.lm_head
    head.forward = lambda x: F.linear(x, head.weight.detach())


@fault("unet", "backward", "conv_out", "conv_norm_out", "conv_act")
def unet_last_gradient_clamped(training: Training) -> None:
    training.model.conv_out.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0].clamp(-1e-3, 1e-3),)
    )


@fault("net", "backward", "head", "norm")
def gradient_scaled_behind_the_head(training: Training) -> None:
    training.model.head.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 1.5,)
    )


@fault("net-clipped", "backward", "blocks.2.act", "blocks.2.up")
def clipped_and_a_wrong_backward(training: Training) -> None:
    training.model.blocks[2].act.factor = 1.05


@fault("net-clipped", "backward", "head")
def clipped_and_a_wrong_head(training: Training) -> None:
    training.model.head.weight.register_hook(lambda gradient: gradient * 1.2)


@fault("net-accumulated", "backward")
def cleared_between_passes(training: Training) -> None:
    backward = training.backward

    def backward_after_clearing(loss: Tensor) -> None:
        training.clear()
        backward(loss)

    training.backward = backward_after_clearing


@fault("net-ranks", "backward")
def reduced_in_bf16(training: Training) -> None:
    def synchronize() -> None:
        for parameter in training.trainable():
            half = parameter.grad.bfloat16()
            dist.all_reduce(half)
            parameter.grad.copy_(half / 2)

    training.synchronize = synchronize


@fault("net-ranks", "backward")
def gradients_of_the_first_rank(training: Training) -> None:
    def synchronize() -> None:
        for parameter in training.trainable():
            dist.broadcast(parameter.grad, 0)

    training.synchronize = synchronize


@fault("net", "backward", "blocks.2.norm")
def gradient_of_a_norm_zeroed(training: Training) -> None:
    training.model.blocks[2].norm.weight.register_hook(torch.zeros_like)


@fault("net", "backward", "embed", step=1)
def gradient_wrong_from_the_second_step(training: Training) -> None:
    training.model.embed.weight.register_hook(
        lambda gradient: gradient * (2 if training.step else 1)
    )


# ---- loss


@fault("llama", "loss")
def llama_loss_with_a_penalty(training: Training) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(input_ids=batch["ids"], labels=batch["ids"], use_cache=False)
        return output.loss + 0.1 * output.logits.logsumexp(-1).square().mean()

    training.compute_loss = loss


@fault("unet", "loss")
def unet_loss_weighted_by_time(training: Training) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        level = (batch["time"] / 1000).view(-1, 1, 1, 1)
        noisy = (1 - level) * batch["image"] + level * batch["noise"]
        return (level * (model(noisy, batch["time"]).sample - batch["noise"]).square()).mean()

    training.compute_loss = loss


@fault("net", "loss")
def loss_of_the_wrong_tokens(training: Training) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        ids = batch["ids"]
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), ignore_index=0)

    training.compute_loss = loss


# ---- forward


@fault("net-dropout", "forward", "blocks.0.drop", step=1)
def evaluation_mode_is_kept(training: Training) -> None:
    update = training.update

    def update_and_evaluate() -> None:
        update()
        training.model.eval()

    training.update = update_and_evaluate


@fault("llama", "forward", "", "model.embed_tokens", step=2, words="input|batch")
def llama_batch_repeated(training: Training) -> None:
    first, second = itertools.islice(training.batches, 2)
    training.batches = iter([first, second, second])


# ---- clipping and scaling


@fault("net-clipped", "update backward", words="clip|norm")
def clip_of_matrices_alone(training: Training) -> None:
    def clip() -> None:
        matrices = [p for p in training.model.parameters() if p.ndim > 1]
        nn.utils.clip_grad_norm_(matrices, training.max_norm)

    training.clip = clip


@fault("net-clipped", "update backward", words="clip")
def clip_by_the_largest(training: Training) -> None:
    training.clip = lambda: nn.utils.clip_grad_norm_(
        training.model.parameters(), training.max_norm, norm_type=float("inf")
    )


# ---- update


class AdamW(torch.optim.AdamW):
    """An AdamW whose decay is not multiplied by the learning rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            decay = group["weight_decay"] * (1 - group["lr"]) * 0.1
            for parameter in group["params"]:
                parameter.mul_(1 - decay)
        super().step(closure)


@fault("net", "update", "embed")
def decay_without_the_rate(training: Training) -> None:
    training.optimizer_class = AdamW


@fault("llama-clipped", "update", step=2, words="lr|rate")
def schedule_falls(training: Training) -> None:
    training.rate = lambda step: (1 / 4, 2 / 4, 1 / 4)[min(step, 2)]


@fault("llama", "update", "lm_head", words="lr|rate")
def rate_of_the_head(training: Training) -> None:
    groups, head = training.groups(), training.model.lm_head.weight
    groups[0]["params"] = [p for p in groups[0]["params"] if p is not head]
    groups.append({"params": [head], "weight_decay": training.decay, "lr": 0.1})
    training.groups = lambda: groups


@fault("unet", "update", step=1, words="beta")
def betas_exchanged(training: Training) -> None:
    training.settings = training.settings | {"betas": (0.95, 0.999)}


@fault("net-sgd", "update", step=1, words="momentum")
def momentum_of_another_size(training: Training) -> None:
    training.settings = training.settings | {"momentum": 0.8}


@fault("net-sgd", "update", words="SGD")
def another_optimizer(training: Training) -> None:
    training.optimizer_class = torch.optim.RMSprop


@fault("net-resumed", "update", "blocks.0.mix", step=2, words="state")
def state_of_a_parameter_lost(training: Training) -> None:
    load = training.load

    def load_without_one(state: dict[str, Any]) -> None:
        names = [name for name, _ in training.model.named_parameters()]
        matrices = [n for n, p in training.model.named_parameters() if p.ndim > 1]
        assert "blocks.0.mix.weight" in names
        state["state"][matrices.index("blocks.0.mix.weight")]["exp_avg_sq"].mul_(4)
        load(state)

    training.load = load_without_one


# ---- legal changes


@clean("net-whole", ranks=2)
def sharded(training: Training) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join_group(training)
    mesh = init_device_mesh("cpu", (2,))
    for block in training.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(training.model, mesh=mesh)


@clean("net-whole", ranks=2)
def optimizer_split_over_ranks(training: Training) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    join_group(training)
    training.network = nn.parallel.DistributedDataParallel(training.model)
    make = torch.optim.AdamW
    training.optimizer_class = functools.partial(ZeroRedundancyOptimizer, optimizer_class=make)


@clean("net")
def compiled(training: Training) -> None:
    training.network = torch.compile(training.model, backend="aot_eager")


@clean("net")
def evaluated_in_between(training: Training) -> None:
    update = training.update

    def update_and_evaluate() -> None:
        update()
        training.model.eval()
        with torch.no_grad():
            training.model(next(token_batches())["ids"])
        training.model.train()

    training.update = update_and_evaluate


@clean("llama-clipped")
def averaged_beside(training: Training) -> None:
    average = torch.optim.swa_utils.AveragedModel(training.model)
    update = training.update
    training.update = lambda: (update(), average.update_parameters(training.model))


@clean("net-warmup")
def rate_as_a_tensor(training: Training) -> None:
    training.settings = {"lr": torch.tensor(0.01)}


@clean("net-clipped")
def optimizer_steps_while_going_back(training: Training) -> None:
    """Nothing changes but that gradients are freed as views of one buffer."""
    training.clears_to_none = False
    training.settings = training.settings | {"foreach": True}


@clean("net-rows")
def rows_in_another_order(training: Training) -> None:
    batches = training.batches

    def turned() -> Any:
        while True:
            yield from reversed(list(itertools.islice(batches, training.accumulation)))

    training.batches = turned()


@clean("net-accumulated")
def stepped_from_master_weights(training: Training) -> None:
    """Step copies of the parameters in fp64, and copy them back."""
    model = training.model
    pairs = [(p, nn.Parameter(p.detach().double())) for p in model.parameters()]
    copies = dict(pairs)
    groups = [
        group | {"params": [copies[p] for p in group["params"]]} for group in training.groups()
    ]
    training.groups = lambda: groups
    update = training.update

    def update_masters() -> None:
        for parameter, master in pairs:
            master.grad = parameter.grad.double()
        update()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)
        model.zero_grad()

    training.update = update_masters


@clean("unet-clipped")
def unet_deep_copied(training: Training) -> None:
    training.model = training.network = copy.deepcopy(training.model)


# ---- faults beside legal changes


def _beside(change: Case, planted: Case) -> Case:
    """Return a fault in a port that is legally different besides."""

    def plant(training: Training) -> None:
        change.plant(training)
        planted.plant(training)

    name = f"{change.name}+{planted.name}"
    return case_of(
        name, change.family, plant, planted.right, change.port.ranks, round=KEPT_BACK, kind=BESIDE_ANOTHER
    )  # fmt: skip


BESIDE = {
    "another_attention_kernel": ("llama_norms_decay", "hook_scales_an_activations_gradient", "keys_detached"),
    "accumulated_in_fewer_passes": ("backward_by_a_factor", "eps_of_another_size", "accumulation_not_divided"),
    "split_over_ranks": ("eps_of_another_size", "backward_transposed", "residual_detached", "loss_summed"),
    "sharded": ("norms_decay", "backward_transposed", "betas_of_another_size", "rate_of_another_size"),
    "llama_recomputed": ("keys_detached", "warmup_missing", "llama_norm_with_a_careless_backward"),
    "unet_recomputed": ("convolutions_gradient_flipped", "clip_by_value"),
    "optimizer_in_a_loop": ("betas_of_another_size", "clip_missing"),
    "optimizer_fused": ("schedule_one_step_ahead",),
    "compiled": ("backward_of_other_sign", "eps_of_another_size"),
    "rows_in_another_order": ("backward_by_a_factor", "eps_of_another_size"),
}  # fmt: skip


for _change, _names in BESIDE.items():
    for _case in [_beside(CLEAN[_change], FAULTS[name]) for name in _names]:
        FAULTS[_case.name] = _case


@contextmanager
def side(name: str, side: str, variant: str, seed: int) -> Iterator[Callable[[], object]]:
    """Prepare one side of a case; `name` is a fault or a legal change, of the reference a setup."""
    training = prepared(name if name in SETUPS else (FAULTS | CLEAN)[name].family)
    if name not in SETUPS:
        (FAULTS | CLEAN)[name].plant(training)
    yield training.run
    if dist.is_initialized():
        dist.destroy_process_group()
